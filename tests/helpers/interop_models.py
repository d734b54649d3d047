"""Models of every architecture with random parameters, as runs and as folders of `difftx convert --to=hf`."""

from helpers.inference_models import language_model
from helpers.interop_folders import export, run_of

LLAMA3 = {
    "model__rope_scaling__factor": 8.0,
    "model__rope_scaling__low_freq_factor": 0.5,
    "model__rope_scaling__original_max_position_embeddings": 64,
}
# Name → architecture and overrides. Together they have every option that the modelling file supports.
MODELS = {
    "diff": ("diff", {"model__num_heads": 4, "model__num_kv_heads": 2, "model__tie_embeddings": "false"}),
    "diff_bounded": ("diff", {"model__lambda_bound": "sigmoid", "model__head_norm": "scalar", "model__head_dim": 6}),
    "diff_tanh": ("diff", {"model__lambda_bound": "tanh", "model__head_norm": "none", "model__head_norm_eps": 1e-3}),
    "diff_fixed": (
        "diff",
        {
            "model__lambda_learned": "false",
            "model__lambda_init": 1.0,
            "model__post_scale": 0.2,
            "model__head_norm": "sigmoid",
        },
    ),
    # Like the models that `--differential=split` makes from Qwen 2 and Llama 3.
    "diff_biased": ("diff", {"model__num_heads": 4, "model__num_kv_heads": 2, "model__attention_bias": "true"}),
    "diff_llama3": ("diff", {"model__num_heads": 2, **LLAMA3}),
    "zero_branch": ("zero_branch", {"model__num_heads": 4, "model__num_kv_heads": 2, "model__attention_bias": "true"}),
    "zero_branch_bounded": ("zero_branch", {"model__num_heads": 2, "model__lambda_bound": "tanh", **LLAMA3}),
    "dex": (
        "dex",
        {"model__num_heads": 4, "model__num_kv_heads": 2, "model__head_norm": "none", "model__dex__anneal_steps": 7},
    ),
    "dex_normed": ("dex", {"model__num_heads": 4, "model__head_norm": "rms_affine", "model__lambda_init": 0.5}),
    "gda": ("gda", {"model__num_heads": 6, "model__gda__signal_heads": 3, "model__qk_norm": "true"}),
    "diff_v2": ("diff_v2", {"model__num_heads": 4, "model__num_kv_heads": 2, "model__qk_norm": "true"}),
    "gdla": (
        "gdla",
        {
            "model__num_heads": 8,
            "model__gdla__signal_heads": 2,
            "model__num_kv_heads": 2,
            "model__gdla__output_gate": "true",
            "model__logit_soft_cap": 2.0,
        },
    ),
    "gdla_ungated": ("gdla", {"model__num_heads": 4, "model__gdla__signal_heads": 4, "model__attention_bias": "true"}),
    "gated": ("gated", {"model__num_heads": 4, "model__num_kv_heads": 2, "model__head_norm": "rms"}),
    "transformer": (
        "transformer",
        {"model__num_heads": 4, "model__head_norm": "rms_affine", "model__post_scale": 3.0},
    ),
    "llama": ("transformer", {"model__num_heads": 4, "model__num_kv_heads": 2}),
    "diffllama": ("diff", {"model__num_heads": 4, "model__head_norm": "rms"}),
    "top_k": ("top_k", {"model__num_heads": 4, "model__top_k__k": 3}),
    "off_by_one": ("off_by_one", {"model__num_heads": 4, "model__num_kv_heads": 2}),
    "sink": ("sink", {"model__num_heads": 4, "model__num_kv_heads": 2}),
    "signed_mask": (
        "signed_mask",
        {"model__num_heads": 2, "model__num_kv_heads": 1, "model__attention_bias": "true", **LLAMA3},
    ),
}
NOT_SERVABLE = ("top_k", "off_by_one", "sink", "signed_mask")
SERVABLE = tuple(name for name in MODELS if name not in NOT_SERVABLE)


def config_of(config, name):
    architecture, overrides = MODELS[name]
    return config(architecture, **overrides)


def exported(config, mesh, name, folder, format_="hf"):
    """Return the model, the directory of its run, and the exported folder."""
    architecture, overrides = MODELS[name]
    lm = language_model(config, mesh, architecture, **{"model__compute_dtype": "float32"} | overrides)
    folder.mkdir(exist_ok=True)
    workdir = run_of(lm, folder / "run")
    return lm, workdir, export(workdir, folder / format_, format_=format_)
