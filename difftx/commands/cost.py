"""Estimate the cost of a config: parameters, FLOPs and memory. `difftx train` prints it; --dry_run then stops."""

import dataclasses
import math
import os
from collections.abc import Sequence

import jax

from difftx.config import Config
from difftx.model.abstract import count_parameters
from difftx.model.architectures import describe_heads
from difftx.model.flops import activation_bytes, flops_per_token, format_bytes, gradient_bytes
from difftx.parallel.mesh import batch_shards, make_mesh
from difftx.training.fit import fit
from difftx.training.run import Run
from difftx.training.state import state_bytes


def format_cost(config: Config) -> str:
    """Return a text with a config's parameters, FLOPs and memory. Raise `UserError` if its mesh is impossible."""
    mesh = make_mesh(config.mesh)
    fit(config, mesh)
    parameters = count_parameters(config.model)
    length, steps, batch = config.data.sequence_length, config.train.steps, config.train.global_batch_tokens
    full = flops_per_token(config.model, length, causal=False)
    halved = flops_per_token(config.model, length, causal=True)
    memory = memory_of(config, mesh)
    model, warmup = config.model, config.warmup_steps
    base = ""
    if model.mup_base_width is not None:
        base = f"; taken over from a base of width {model.mup_base_width:,} and {model.mup_base_layers:,} layers (µP)"
    lines = [
        f"model    {model.architecture}, {parameters.total:,} parameters ({parameters.embedding:,} of them embedding)",
        f"shape    {model.num_layers} layers of width {model.d_model:,}, {describe_heads(model)}, "
        f"mlp_dim {model.mlp_dim:,}",
        f"training {steps:,} steps of {batch:,} tokens = {steps * batch:,}; rows of {length:,} tokens",
        f"rate     {config.optimizer.name}, peak learning rate {config.optimizer.learning_rate:g} after a warm-up of "
        f"{warmup:,} steps, schedule {config.optimizer.schedule}{base}",
        f"compute  {full:.3g} FLOPs per token (6 N + 12 L T d_model; {halved:.3g} if causal attention counts as half), "
        f"{full * steps * batch:.3g} in all",
        f"memory   {format_bytes(memory.state)} of train state and gradients, and about "
        f"{format_bytes(memory.activations)} of activations per device; mesh {dict(mesh.shape)} of "
        f"{mesh.devices.flat[0].device_kind}",
    ]
    if warning := memory.warning():
        lines.append(f"warning  {warning}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that a training needs per device, in bytes, and the devices of this process."""

    state: float  # Exact size of train state and gradients.
    activations: float  # Estimated.
    devices: Sequence[jax.Device]

    @property
    def holds_state(self) -> bool:
        """Whether the train state and the gradients fit into the device memory."""
        sharers, available, _ = self._memory()
        return self.state * sharers <= available

    def warning(self) -> str | None:
        """Return None if the estimate fits into memory, else a text with the need, the available memory and a fix."""
        sharers, available, owner = self._memory()
        if (needed := (self.state + self.activations) * sharers) <= available:
            return None
        fix = "raise train.accumulation, lower train.global_batch_tokens, or set model.remat to full"
        if self.state > self.activations or not self.holds_state:
            fix = "use a smaller model, or more devices along mesh.fsdp"
        return f"about {format_bytes(needed)} exceed the {format_bytes(available)} of {owner}; {fix}"

    def _memory(self) -> tuple[int, float, str]:
        """Return how many devices share a memory, its size, and its owner. CPU devices share the host's memory."""
        if self.devices[0].platform == "cpu":
            return len(self.devices), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
        return 1, (self.devices[0].memory_stats() or {}).get("bytes_limit", math.inf), "the device"


def memory_of(config: Config, mesh: jax.sharding.Mesh) -> Memory:
    """Return the memory that a training needs on a mesh."""
    state = (state_bytes(config) + gradient_bytes(config.model)) / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    activations = activation_bytes(config, config.batch_rows // config.train.accumulation // batch_shards(mesh))
    return Memory(state, activations, mesh.local_devices)


def format_data(run: Run) -> str:
    """Describe the data: numbers of tokens, tokenizer, and notes on up-sampling and packing."""
    epochs = run.data.epochs(run.config.train.steps * run.config.batch_rows)
    train = ", ".join(f"{rows.tokens:,} {name} ({epochs[name]:.2f} epochs)" for name, rows in run.data.train.items())
    valid = ", ".join(f"{rows.tokens:,} {name}" for name, rows in run.data.valid.items())
    tokenizer = f"{run.tokenizer.name} ({run.tokenizer.n_vocab:,})"
    tokens = f"training tokens {train}; validation tokens {valid}; tokenizer {tokenizer}"
    return "\n".join(f"data     {text}" for text in (tokens, *run.data.notes))
