"""Parameters, FLOPs and memory of a config, on paper: nothing is computed on a device.

Model FLOPs count what the mathematics needs, not what a kernel executes, so that both architectures are held to the
same number. A differential head needs, for each pair of tokens, two products of width d for its maps and one of
width 2d for (A1 - λ A2) V: as many as the two softmax heads it replaces. Maps are counted once, however often a kernel
makes them: A2 of grouped differential attention once for all of its signal heads.
"""

from difftx.config import Config, ModelConfig
from difftx.model.abstract import count_parameters

# Peak dense bf16 FLOP/s of a device kind as jax names it (vendors' data sheets). No entry: no MFU, rather than a guess.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12 / 2,  # A chip is two devices.
}


def flops_per_token(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Return the model FLOPs of training on one token: 6 N + 12 L T d, or 6 L T d where `causal` halves attention.

    N: parameters in matrix products, the unembedding among them; d = heads × head width; T tokens a row. In general
    12 d stands for 6 × (width of all queries + width of all values that maps are multiplied with).
    """
    parameters = count_parameters(config)
    products = parameters.projections + config.vocab_size * config.d_model
    width = (config.query_heads + config.num_heads * config.groups) * config.d_head
    attention = (3 if causal else 6) * config.num_layers * sequence_length * width
    return 6 * products + attention


def state_bytes(config: ModelConfig) -> int:
    """Return bytes of the train state: parameters, two Adam moments and the gradient, float32 each."""
    return 16 * count_parameters(config).total


def activation_bytes(config: Config, rows: int) -> int:
    """Estimate bytes kept for the backward pass of one microbatch of `rows` rows, and its logits.

    A layer keeps its input ("full" remat; "offload": on the host), or its matrix products too ("dots"), or all of its
    intermediate values (counted as three times the products). Logits are float32, once, with their gradient.
    """
    model = config.model
    tokens = rows * config.data.sequence_length
    width = 2 if model.compute_dtype == "bfloat16" else 4
    heads = model.d_head * (model.query_heads + model.groups * (model.num_heads + 2 * model.kv_heads))
    products = heads + 2 * model.mlp_dim + 2 * model.d_model
    of_input = 0 if model.remat == "offload" else model.d_model
    kept = of_input + {"dots": products, "none": 3 * products}.get(model.remat, 0)
    return tokens * (model.num_layers * kept * width + 2 * 4 * model.vocab_size)
