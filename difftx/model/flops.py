"""FLOPs and memory of a config, computed by formulas without a device.

Model FLOPs are those that the formulas require, not those that a kernel executes, which may compute a value twice. For
each pair of tokens, a differential head requires two products of width d for its logits and one product of width 2d for
(A1 - λ A2) V, as many FLOPs as the two softmax heads that it replaces. In grouped differential attention, the A2 that
several signal heads share counts once.
"""

from difftx.config import Config, ModelConfig
from difftx.kernels.backend import visible_keys
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of

# Peak dense bfloat16 FLOP/s by JAX's device kind, from the vendors' data sheets. MFU is not reported for other devices.
# The data sheet of the L4 states 242 TFLOP/s with sparsity, twice the dense rate. The RTX 4090's is that with float32
# accumulation in NVIDIA's whitepaper of the Ada GPU architecture. DGX B200: 72 PFLOP/s of sparse FP8 for eight GPUs, a
# quarter of which is dense bfloat16. H100 PCIe: 1,513 TFLOP/s with sparsity, H100 NVL: 1,671. GB200 NVL72: 360 PFLOPS
# with sparsity for 72 GPUs. Names are complete, because "NVIDIA L4" also begins the name of the faster L40S.
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
# `model.matmul` → kind → factor of `PEAK_FLOPS` for dense products of 8-bit operands with 32-bit accumulation, from the
# same data sheets. Other kinds of `PEAK_FLOPS` have no such units.
LOW_PRECISION_FACTORS = {
    "fp8": {kind: 2.0 for kind in PEAK_FLOPS if ("NVIDIA" in kind and "A100" not in kind) or kind == "TPU7x"},
    "int8": {kind: 2.0 for kind in PEAK_FLOPS if kind != "TPU7x"} | {"NVIDIA GeForce RTX 4090": 4.0, "TPU v4": 1.0},
}


def flops_per_token(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Return the model FLOPs of training on one token, 6 N + 6 L T w, or 6 N + 3 L T w if `causal`.

    N is the number of parameters in matrix products, including the unembedding, L the number of layers, T the sequence
    length, and w the total width of the queries and of the heads' outputs. For softmax attention, w = 2 d_model usually
    holds, which gives the well-known term 12 L T d_model. In a layer with a window, twice the `visible_keys`
    replace T.
    """
    parameters = count_parameters(config)
    products = parameters.projections + config.embeddings * config.d_model
    heads = heads_of(config)
    width = heads.query_heads * heads.d_head + config.num_heads * heads.d_value
    layers = config.num_layers // len(config.windows)
    keys = sum(visible_keys(sequence_length, window) for window in config.windows)
    # 2 FLOPs per multiply-add, in the forward pass and twice in the backward pass. Without `causal`, count the masked
    # half of the weights too.
    return 6 * products + (6 if causal else 12) * layers * keys * width


def gradient_bytes(config: ModelConfig) -> int:
    """Return the total size of the gradients in bytes, which are float32 as the parameters."""
    return 4 * count_parameters(config).total


def activation_bytes(config: Config, rows: int) -> int:
    """Estimate the bytes that a device stores for the backward pass of one microbatch of `rows` rows.

    With `model.remat` = "full", a layer stores its input, with "dots" also its matrix products, and with "offload"
    nothing. With "none", it stores all values, estimated as its input and three times the size of its matrix products.
    Float32 logits and their gradient are added.
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
    """Return a number of bytes as text with three significant digits and a unit from B to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
