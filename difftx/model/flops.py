"""Formulas for the FLOPs and the memory of a config. They need no device.

Model FLOPs count each value of the model once, even if a kernel computes it twice. For each pair of tokens, a
differential head needs two products of width d for its logits and one product of width 2d for (A1 - λ A2) V. The two
softmax heads that it replaces need equally many FLOPs. In grouped differential attention, several signal heads share
one A2, which counts once.
"""

from difftx.config import Config, ModelConfig
from difftx.kernels.backend import visible_keys
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of

# Peak dense bfloat16 FLOP/s by JAX's device kind, from the vendors' data sheets. MFU is not reported for other devices.
# Where a data sheet states only the rate with sparsity, the table has half of it: L4 242 TFLOP/s, H100 PCIe 1,513, H100
# NVL 1,671, GB200 NVL72 360 PFLOP/s for 72 GPUs. The B200's rate is a quarter of the sparse FP8 rate of a DGX B200,
# 72 PFLOP/s for eight GPUs. The RTX 4090's rate is with float32 accumulation (NVIDIA's Ada whitepaper). Keys are full
# names, because "NVIDIA L4" is also a prefix of the faster L40S.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12 / 2,  # JAX reports a chip as two devices.
}
# `model.matmul` → device kind → speed-up over `PEAK_FLOPS` for dense products of 8-bit operands with 32-bit
# accumulation, from the same data sheets. Kinds that are not listed have no units for such products.
LOW_PRECISION_FACTORS = {
    "fp8": {kind: 2.0 for kind in PEAK_FLOPS if ("NVIDIA" in kind and "A100" not in kind) or kind == "TPU7x"},
    "int8": {kind: 2.0 for kind in PEAK_FLOPS if kind != "TPU7x"} | {"NVIDIA GeForce RTX 4090": 4.0, "TPU v4": 1.0},
}


def flops_per_token(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Return the model FLOPs to train on one token: 6 N + 6 L T w, or 6 N + 3 L T w if `causal`.

    N is the number of parameters in matrix products, including the unembedding, L the number of layers, and T the
    sequence length. w is the total width of all queries plus the total width of all head outputs. Softmax attention
    usually has w = 2 d_model, which gives the well-known term 12 L T d_model. In a layer with a window, T is replaced
    by twice `visible_keys`.
    """
    parameters = count_parameters(config)
    products = parameters.projections + config.embeddings * config.d_model
    heads = heads_of(config)
    width = heads.query_heads * heads.d_head + config.num_heads * heads.d_value
    layers = config.num_layers // len(config.windows)
    keys = sum(visible_keys(sequence_length, window) for window in config.windows)
    # A multiply-add is 2 FLOPs. It happens once in the forward pass and twice in the backward pass. Without `causal`,
    # masked attention weights count too.
    return 6 * products + (6 if causal else 12) * layers * keys * width


def gradient_bytes(config: ModelConfig) -> int:
    """Return the total size in bytes of the gradients, which are float32."""
    return 4 * count_parameters(config).total


def activation_bytes(config: Config, rows: int) -> int:
    """Estimate the bytes that a device stores for the backward pass of one microbatch of `rows` rows.

    What a layer stores depends on `model.remat`. "full": its input. "dots": its input and its matrix products.
    "offload": nothing. "none": all values, estimated as its input plus three times the size of its matrix products.
    The float32 logits and their gradient are added.
    """
    model, heads = config.model, heads_of(config.model)
    tokens = rows * config.data.sequence_length
    width = 2 if model.compute_dtype == "bfloat16" else 4
    keys_and_queries = heads.d_head * (heads.query_heads + heads.groups * heads.kv_heads)
    values_and_outputs = heads.d_value * (model.num_heads + heads.kv_heads)
    products = keys_and_queries + values_and_outputs + 2 * model.mlp_dim + 2 * model.d_model
    of_input = 0 if model.remat == "offload" else model.d_model
    kept = of_input + {"dots": products, "none": 3 * products}.get(model.remat, 0)
    return tokens * (model.num_layers * kept * width + 2 * 4 * model.embeddings)


def format_bytes(count: float) -> str:
    """Format a number of bytes with three significant digits and a unit from B to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
