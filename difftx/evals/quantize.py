"""Suite `quantize`: other suites with attention or products in few bits (Figure 8 of the paper; docs/suites.md)."""

from typing import Any

from difftx.config import Config
from difftx.evals import SUITES, products
from difftx.evals.evaluation import Evaluation
from difftx.evals.inner import evaluate_inner, require_quantizable
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.model.architectures import ARCHITECTURES

UNQUANTIZED = 16  # Number of bits that means no quantisation.
# Values of `eval.quantize.rounded` → plural and singular, for texts.
ROUNDED = {
    "logits": ("attention logits", "an attention logit"),
    "operands": ("queries, keys and values", "a query, key or value"),
}


def evaluate(evaluation: Evaluation) -> Result:
    """Run `eval.quantize.suites` unrounded, and with each of `eval.quantize.bits` or `eval.quantize.products`."""
    config, settings = evaluation.run.config, evaluation.run.config.eval.quantize
    if settings.rounded == "products":
        return _evaluate_products(evaluation)
    configs = {f"{bits}_bits": quantized(config, bits) for bits in settings.bits}
    all_rounded, one_rounded = ROUNDED[settings.rounded]
    texts = {"title": f"by the bits of {all_rounded}", "x_label": f"bits of {one_rounded}; 16: not quantised"}
    lines = {"": {f"{bits}_bits": float(bits) for bits in sorted(settings.bits)}}
    numbers, charts = evaluate_inner(evaluation, settings.suites, configs, lines, prefix="quantize", **texts)
    details = {"rounded": settings.rounded, "granularity": settings.granularity}
    return Result(numbers=numbers, details=details, charts=charts)


def _evaluate_products(evaluation: Evaluation) -> Result:
    """Run `eval.quantize.suites` with each precision in `eval.quantize.products`, and measure the products by layer."""
    config, settings = evaluation.run.config, evaluation.run.config.eval.quantize
    modes = list(dict.fromkeys(name.removesuffix(products.STATIC) for name in settings.products))
    found = products.observe(evaluation, modes)
    of_layers = products.by_layer(found, modes)
    texts = {"title": "by the bits of products with weights", "x_label": "bits of a weight; 16: not quantised"}
    configs = products.configs_of(config, settings.products, found["largest"])
    lines = products.lines_of(settings.products)
    numbers, charts = evaluate_inner(evaluation, settings.suites, configs, lines, prefix="quantize", **texts)
    details = {"rounded": settings.rounded, **of_layers.details}
    return Result(numbers={**numbers, **of_layers.numbers}, details=details, charts=[*charts, *of_layers.charts])


def quantized(config: Config, bits: int) -> Config:
    """Return the config with attention in `bits` bits, and with an attention implementation that supports it."""
    model, settings = config.model, config.eval.quantize
    chosen = None if bits == UNQUANTIZED else bits
    if settings.rounded == "operands":
        return config.but(model={"attention_operand_bits": chosen})
    implementation = model.attention_implementation
    backends = ARCHITECTURES[model.architecture].backends(quantized=chosen is not None)
    changed: dict[str, Any] = {"attention_logit_bits": chosen, "attention_logit_granularity": settings.granularity}
    if implementation not in backends:
        changed["attention_implementation"] = "auto"
    return config.but(model=changed)


SUITE = Suite(
    evaluate=evaluate,
    inner=lambda config: require_quantizable("eval.quantize.suites", config.eval.quantize.suites),
    check=lambda run: [SUITES[name].check(run) for name in run.config.eval.quantize.suites],
    quantizable=False,
    title="Attention or products in few bits",
    explanation="Other suites with attention, or products with weights, rounded to few bits. A robust model changes "
    "little from 16 bits to 4.",
)
