"""What a config costs, on paper: parameters, FLOPs, memory. Printed before training and by --dry_run."""

from difftx.model.flops import activation_bytes, count_parameters, flops_per_token, state_bytes
from difftx.training.run import Run


def format_cost(run: Run) -> str:
    """Return a few lines on the model, the data, the arithmetic and the memory of a device."""
    config, mesh = run.config, run.mesh
    parameters = count_parameters(config.model)
    length = config.data.sequence_length
    full = flops_per_token(config.model, length, causal=False)
    halved = flops_per_token(config.model, length, causal=True)
    tokens = config.train.steps * config.train.global_batch_tokens
    state_shards = mesh.shape["fsdp"] * mesh.shape["tensor"]
    rows = run.microbatch_rows // (mesh.size // mesh.shape["tensor"])
    state, activations = state_bytes(config.model) / state_shards, activation_bytes(config, rows)
    valid = ", ".join(f"{len(store):,} {name}" for name, store in run.corpus.valid.items())
    lines = {
        "model": f"{config.model.architecture}, {parameters.total:,} parameters "
        f"({parameters.embedding:,} of them embedding)",
        "data": f"{len(run.corpus.train):,} training tokens, {valid}; {run.tokenizer.name} ({run.tokenizer.n_vocab:,})",
        "training": f"{config.train.steps:,} steps of {config.train.global_batch_tokens:,} tokens = {tokens:,} "
        f"({tokens / len(run.corpus.train):.2f} epochs)",
        "compute": f"{full:.3g} FLOPs a token (6 N + 12 L T d; {halved:.3g} with attention halved), "
        f"{full * tokens:.3g} in all",
        "memory": f"{_size(state)} of train state and about {_size(activations)} of activations a device; "
        f"mesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}",
    }
    return "\n".join(f"{name:<9}{text}" for name, text in lines.items())


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
