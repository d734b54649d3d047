"""Names that other trainers use for config fields and flags: Hugging Face, MaxText, nanoGPT, levanter, torchtitan.

Error messages for unknown names use them to propose the right field or flag.
"""

from difftx.config import Config
from difftx.config.fields import marks

# Field → its names in other trainers.
SYNONYMS = {
    "model.architecture": "arch model_type attention_type",
    "model.d_model": "hidden_size n_embd dim emb_dim embed_dim base_emb_dim",
    "model.mlp_dim": "intermediate_size hidden_dim ffn_dim d_ff base_mlp_dim",
    "model.num_layers": "num_hidden_layers n_layer n_layers depth base_num_decoder_layers",
    "model.num_heads": "num_attention_heads n_head n_heads base_num_query_heads",
    "model.num_kv_heads": "num_key_value_heads n_kv_head n_kv_heads base_num_kv_heads",
    "model.rope_theta": "rope_base rope_max_timescale",
    "model.norm_eps": "rms_norm_eps layer_norm_eps normalization_layer_epsilon",
    "model.head_norm": "subln groupnorm group_norm",
    "model.window": "sliding_window sliding_window_size",
    "model.tie_embeddings": "tie_word_embeddings weight_tying logits_via_embedding",
    "model.init_std": "initializer_range",
    "model.logit_soft_cap": "final_logit_softcapping final_logits_soft_cap",
    "model.compute_dtype": "dtype torch_dtype bf16 fp16 mixed_precision param_dtype",
    "model.matmul": "fp8 quantization use_qwix_quantization float8",
    "model.remat": "gradient_checkpointing activation_checkpoint remat_policy",
    "model.attention_implementation": "attn_implementation attention_kernel flash_attention use_flash_attention",
    "data.path": "dataset dataset_path dataset_name dataset_dir train_data",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
    "data.sequence_length": "block_size seq_len max_seq_len max_seq_length max_length context_length max_target_length "
    "max_position_embeddings",
    "optimizer.name": "optim opt_type optimizer_type",
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.final_learning_rate": "min_lr lr_min end_learning_rate",
    "optimizer.schedule": "lr_scheduler_type lr_schedule scheduler",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_fraction warmup_ratio warmup_steps_fraction",
    "optimizer.decay_steps": "decay_fraction",
    "optimizer.b1": "beta1 adam_beta1 adam_b1",
    "optimizer.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd adam_weight_decay",
    "optimizer.clip_norm": "grad_clip max_norm max_grad_norm gradient_clipping_threshold",
    "train.steps": "max_iters max_steps num_steps num_train_steps num_train_epochs epochs",
    "train.global_batch_tokens": "batch_size global_batch_size train_batch_size per_device_batch_size "
    "per_device_train_batch_size",
    "train.accumulation": "gradient_accumulation_steps grad_accum",
    "train.lora_rank": "lora_r",
    "mesh.data": "ici_data_parallelism data_parallel_replicate_degree",
    "mesh.fsdp": "ici_fsdp_parallelism data_parallel_shard_degree",
    "mesh.tensor": "ici_tensor_parallelism tensor_parallel_degree",
    "mesh.slices": "dcn_data_parallelism num_slices",
    "checkpoint.every_steps": "save_steps save_interval checkpoint_period ckpt_interval",
    "checkpoint.keep": "save_total_limit max_to_keep",
    "checkpoint.init_from": "load_parameters_path initialize_from",
    "eval.every_steps": "eval_steps eval_interval steps_per_eval",
    "logging.every_steps": "logging_steps log_interval log_period log_freq",
    "logging.trackers": "report_to wandb enable_wandb wandb_log wandb_project tensorboard mlflow trackio",
}


# Flag of a command → its names in other trainers.
FLAG_SYNONYMS = {
    "config": "recipe config_file config_name config_path",
    "workdir": "model model_path checkpoint ckpt resume resume_from_checkpoint output_dir run_dir out_dir save_dir "
    "logdir",
    "suite": "suites task tasks",
    "prompt": "text input_text",
    "new_tokens": "max_new_tokens max_tokens max_length num_tokens",
}

# Field or flag → what messages add to it, because its values differ from those in other trainers.
NOTES = {
    "train.global_batch_tokens": "in tokens: sequences × data.sequence_length",
    "train.steps": "in updates, not epochs",
    "logging.trackers": "such as wandb:PROJECT",
    "workdir": "directory of a run; a training resumes a run that exists",
    "suite": "tasks of lm-eval: --suite=harness --eval.harness.tasks=…",
}


def flag_named(name: str) -> str | None:
    """Return the command-line flag that another trainer calls `name`, or None."""
    return next((flag for flag, names in FLAG_SYNONYMS.items() if name in names.split()), None)


def field_named(name: str) -> str | None:
    """Return the full name of the field that other trainers call `name`, or that alone ends in `.name`, or None."""
    for field, names in SYNONYMS.items():
        if name in names.split():
            return field
    same = [field for field, _ in marks(Config) if field.rpartition(".")[2] == name]
    return same[0] if len(same) == 1 else None


def note_on(name: str, meant: str | None) -> str:
    """Return the note, such as " (in updates, not epochs)", on a field or flag that others call `name`, or ""."""
    names = (SYNONYMS | FLAG_SYNONYMS).get(meant or "", "").split()
    return f" ({NOTES[meant]})" if meant in NOTES and name in names else ""
