"""Check that the groups of a config fit together, and fit the architecture, the tokenizer and the devices."""

import math

import jax

from difftx import kernels
from difftx.config import Config
from difftx.config.data import SYNTHETIC
from difftx.data.tokenizer import Tokenizer
from difftx.data.tokenizers import padded_size
from difftx.errors import UserError
from difftx.model.architectures import ARCHITECTURES, check_attention, require_multiple
from difftx.model.flops import LOW_PRECISION_FACTORS, PEAK_FLOPS
from difftx.model.products import COMPUTE_DTYPE
from difftx.parallel.mesh import batch_shards
from difftx.training.optimizer import make_optimizer
from difftx.training.qk_clip import check_qk_clip
from difftx.training.workload import attention_call, kernel_function


def fit(config: Config, mesh: jax.sharding.Mesh | None = None, tokenizer: Tokenizer | None = None) -> Config:
    """Return the config. Raise `UserError` if its groups contradict each other, the mesh or the tokenizer.

    With a mesh, `model.vocab_size` must be set (`with_vocabulary`).
    """
    _check_groups(config)
    check_model(config, mesh)
    if config.optimizer.qk_clip is not None:
        check_qk_clip(config)
    if mesh is not None:
        _check_batch(config, mesh)
        make_optimizer(config)  # Raises an error if the optimizer or schedule is unknown, or has no rule for µP.
        _check_kernel(config, mesh)
    if tokenizer is not None:
        _check_vocabulary(config, tokenizer)
    return config


def check_model(config: Config, mesh: jax.sharding.Mesh | None = None) -> None:
    """Raise `UserError` if the model does not fit its architecture or the mesh. The mesh may be one for generation."""
    model = config.model
    check_attention(model, mesh, config.mesh.context_method)
    ARCHITECTURES[model.architecture].check_rows(model, config.data.sequence_length)
    if mesh is not None:
        for field, size in {"model.mlp_dim": model.mlp_dim, "model.vocab_size": model.embeddings}.items():
            require_multiple(field, size, mesh.shape["tensor"], "mesh.tensor")
        check_products(model.matmul, mesh.devices.flat[0].device_kind)


def check_products(matmul: str, kind: str) -> None:
    """Raise `UserError` if devices of this kind are known to lack units for 8-bit products."""
    usable = [name for name, factors in LOW_PRECISION_FACTORS.items() if kind in factors]
    if kind in PEAK_FLOPS and matmul not in (COMPUTE_DTYPE, *usable):
        choices = " or ".join(map(repr, [*usable, COMPUTE_DTYPE]))
        raise UserError(f"model.matmul={matmul!r}: {kind} has no units for such products; use {choices}")


def _check_groups(config: Config) -> None:
    """Raise `UserError` if two groups contradict each other, for any architecture and any devices."""
    model, data, train, keep_best = config.model, config.data, config.train, config.checkpoint.keep_best
    unit = data.sequence_length * train.accumulation
    if train.global_batch_tokens % unit:
        tokens = train.global_batch_tokens
        rows = f", or {tokens * unit} if {tokens} is a number of rows" if tokens < data.sequence_length else ""
        raise UserError(
            f"train.global_batch_tokens={tokens} is not a multiple of data.sequence_length × train.accumulation = "
            f"{unit}; use {max(1, round(tokens / unit)) * unit}{rows}"
        )
    if (warmup := config.warmup_steps) >= train.steps:
        smaller = f"{train.steps // 2}, or train.steps to {2 * warmup}" if train.steps > 1 else "0"
        raise UserError(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} leaves none of train.steps={train.steps} after "
            f"the warm-up; set it to {smaller}"
        )
    if model.window is not None and model.window >= data.sequence_length:
        raise UserError(
            f"model.window={model.window} is not less than data.sequence_length={data.sequence_length}, so it would "
            "hide no token; use a smaller number, none, or longer rows"
        )
    if (profiled := config.logging.profile_steps) and sum(profiled) - 1 > train.steps:
        raise UserError(
            f"logging.profile_steps={profiled} ends after train.steps={train.steps}; use an earlier first step"
        )
    if keep_best is not None and (suite := keep_best.split("/")[0]) not in config.eval.suites:
        raise UserError(
            f"checkpoint.keep_best={keep_best!r}: {suite} is not one of eval.suites={config.eval.suites}; add it there"
        )
    if keep_best is not None and config.checkpoint.every_steps % config.eval.every_steps:
        raise UserError(
            f"eval.every_steps={config.eval.every_steps} does not divide checkpoint.every_steps="
            f"{config.checkpoint.every_steps}, so that checkpoint.keep_best has no numbers to compare; use a divisor"
        )
    is_synthetic = any(path.startswith(SYNTHETIC) for path in data.paths)
    if is_synthetic and model.vocab_size is not None and data.synthetic.vocab_size > model.vocab_size:
        raise UserError(
            f"data.synthetic.vocab_size={data.synthetic.vocab_size} exceeds model.vocab_size={model.vocab_size}; use "
            f"at most {model.vocab_size}"
        )


def _check_batch(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise `UserError` if the rows of a microbatch, or their tokens, cannot be divided evenly over the mesh."""
    length, train = config.data.sequence_length, config.train
    shards, context = batch_shards(mesh), mesh.shape["context"]
    if (rows := config.batch_rows // train.accumulation) % shards:
        unit = length * train.accumulation * shards
        raise UserError(
            f"train.global_batch_tokens={train.global_batch_tokens}: {rows} rows per microbatch cannot be split into "
            f"mesh.data × mesh.fsdp = {shards} shards; use a multiple of {unit}, such as "
            f"{math.ceil(train.global_batch_tokens / unit) * unit}"
        )
    if config.mesh.context_method == "zigzag" and context > 1:
        axes = "2 × mesh.context (mesh.context_method='zigzag')"
        require_multiple("data.sequence_length", length, 2 * context, axes)
    require_multiple("data.sequence_length", length, context, "mesh.context")


def _check_kernel(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raise `UserError` if the attention kernel cannot run on the mesh. Skip the check if its devices are absent."""
    name = config.model.attention_implementation
    if name == "auto" or mesh.devices.flat[0] not in jax.devices():
        return
    call = attention_call(config, mesh)
    function = kernel_function(config)
    if why := kernels.why_unavailable(function, name, call):
        quantized = config.model.attention_logit_bits is not None
        backends = ARCHITECTURES[config.model.architecture].backends(quantized=quantized)
        usable = [name for name in backends if kernels.why_unavailable(function, name, call) is None]
        raise UserError(
            f"model.attention_implementation={name!r}: {why}; use one of {', '.join(usable)} (difftx eval: "
            f"--model.attention_implementation={usable[0]})"
        )


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the model lacks embeddings for tokens that occur in texts. Most special tokens never do."""
    size, ends = config.model.embeddings, (tokenizer.eot_token, *tokenizer.prefix)
    if tokenizer.n_vocab > size and (any(tokenizer.token_bytes[size:]) or max(ends) >= size):
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is less than the {tokenizer.n_vocab} tokens of "
            f"data.tokenizer={config.data.tokenizer!r}; use at least {padded_size(tokenizer)}"
        )
