"""Models of every architecture with random parameters, as runs and as folders of `difftx convert --to=hf`."""

from helpers.inference_models import language_model
from helpers.interop_folders import export, run_of

HEADS = {"num_heads": 4, "num_kv_heads": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 0.5, "original_max_position_embeddings": 64}
LLAMA3 = {f"rope_scaling__{name}": value for name, value in LLAMA3.items()}
# Name → architecture and fields of `model`. Together they have every option that the modelling file supports.
MODELS = {
    "diff": ("diff", HEADS | {"tie_embeddings": "false"}),
    "diff_bounded": ("diff", {"lambda_bound": "sigmoid", "head_norm": "scalar", "head_dim": 6}),
    "diff_tanh": ("diff", {"lambda_bound": "tanh", "head_norm": "none", "head_norm_eps": 1e-3}),
    "diff_fixed": ("diff", {"lambda_learned": "false", "lambda_init": 1.0, "post_scale": 0.2, "head_norm": "sigmoid"}),
    # Like the models that `--differential=split` makes from Qwen 2 and Llama 3.
    "diff_biased": ("diff", HEADS | {"attention_bias": "true"}),
    "diff_llama3": ("diff", {"num_heads": 2, **LLAMA3}),
    "zero_branch": ("zero_branch", HEADS | {"attention_bias": "true"}),
    "zero_branch_bounded": ("zero_branch", {"num_heads": 2, "lambda_bound": "tanh", **LLAMA3}),
    "dex": ("dex", HEADS | {"head_norm": "none", "dex__anneal_steps": 7}),
    "dex_normed": ("dex", {"num_heads": 4, "head_norm": "rms_affine", "lambda_init": 0.5}),
    "gda": ("gda", {"num_heads": 6, "gda__signal_heads": 3, "qk_norm": "true"}),
    "motif": ("motif", {"num_heads": 6, "motif__signal_heads": 3}),
    "motif_pairs": ("motif", HEADS | {"motif__signal_heads": 1, "tie_embeddings": "false"}),
    "diff_v2": ("diff_v2", HEADS | {"qk_norm": "true"}),
    "gdla": (
        "gdla",
        {"num_heads": 8, "num_kv_heads": 2, "logit_soft_cap": 2.0}
        | {"gdla__signal_heads": 2, "gdla__output_gate": "true"},
    ),
    "gdla_ungated": ("gdla", {"num_heads": 4, "gdla__signal_heads": 4, "attention_bias": "true"}),
    "gated": ("gated", HEADS | {"head_norm": "rms"}),
    "transformer": ("transformer", {"num_heads": 4, "head_norm": "rms_affine", "post_scale": 3.0}),
    "llama": ("transformer", HEADS),
    "diffllama": ("diff", {"num_heads": 4, "head_norm": "rms"}),
    "top_k": ("top_k", {"num_heads": 4, "top_k__k": 3}),
    "off_by_one": ("off_by_one", HEADS),
    "sink": ("sink", HEADS),
    "signed_mask": ("signed_mask", {"num_heads": 2, "num_kv_heads": 1, "attention_bias": "true", **LLAMA3}),
}
# Models of classes of transformers, which need no modelling file. Not every format or engine of the tests has windows.
CLASSES = {
    "qwen2": ("transformer", HEADS | {"attention_bias": "true"}),
    "qwen3": ("transformer", HEADS | {"qk_norm": "true"}),
    "mistral": ("transformer", HEADS | {"window": 8}),
    "smollm3": ("transformer", HEADS | {"window_pattern": "GN"}),
}
NOT_SERVABLE = ("top_k", "off_by_one", "sink", "signed_mask")
SERVABLE = tuple(name for name in MODELS if name not in NOT_SERVABLE)


def config_of(config, name):
    architecture, fields = MODELS[name]
    return config(architecture, **{f"model__{field}": value for field, value in fields.items()})


def exported(config, mesh, name, folder, format_="hf", value_width=None):
    """Return the model, the directory of its run, and the exported folder.

    `value_width` replaces the width of the heads of values.
    """
    architecture, fields = (MODELS | CLASSES)[name]
    fields = {"compute_dtype": "float32"} | fields
    if value_width is not None:
        fields |= {"head_dim": value_width // (2 if architecture in ("diff", "gda") else 1)}
    lm = language_model(config, mesh, architecture, **{f"model__{field}": value for field, value in fields.items()})
    folder.mkdir(exist_ok=True)
    workdir = run_of(lm, folder / "run")
    return lm, workdir, export(workdir, folder / format_, format_=format_)
