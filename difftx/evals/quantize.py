"""Suite `quantize`: other suites with attention logits rounded to few bits (Figure 8 of the paper; docs/suites.md)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from difftx.config import Config
from difftx.config.architectures import ARCHITECTURES
from difftx.config.suites import SUITES
from difftx.errors import UserError, did_you_mean
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Heatmap, LineChart, Result, Series
from difftx.evals.suite import Suite

UNQUANTIZED = 16  # Number of bits that stands for no quantisation.


@dataclasses.dataclass(frozen=True)
class Item:
    """A suite to run, and the number of bits of its attention logits."""

    suite: str
    bits: int

    @property
    def id(self) -> str:
        return f"{self.suite} {self.bits}"


def evaluate(evaluation: Evaluation) -> Result:
    """Run `eval.quantize.suites` with attention logits rounded to each of `eval.quantize.bits` (16: not rounded)."""
    config, settings = evaluation.run.config, evaluation.run.config.eval.quantize
    # Items with the same bits are adjacent, so that suites share a forward pass over the validation data.
    items = [Item(suite, bits) for bits in settings.bits for suite in inner_suites(config)]

    @functools.lru_cache(maxsize=1)
    def with_bits(bits: int) -> Evaluation:
        run = dataclasses.replace(evaluation.run, config=quantized(config, bits))
        return Evaluation(run, evaluation.params, evaluation.work)

    def answer(items: Sequence[Item]) -> list[dict[str, float]]:
        return [SUITES[item.suite].evaluate(with_bits(item.bits)).numbers for item in items]

    found: dict[str, dict[int, dict[str, float]]] = {}
    for item, numbers in evaluation.answers(items, answer, what="suites by bits", batch_items=1):
        found.setdefault(item.suite, {})[item.bits] = numbers
    numbers = {
        f"{suite}_{name}_{bits}_bits": value
        for suite, by_bits in found.items()
        for bits, of_suite in by_bits.items()
        for name, value in of_suite.items()
    }
    charts: list[LineChart | Heatmap] = [
        _chart(suite, name, by_bits)
        for suite, by_bits in found.items()
        for name in by_bits[settings.bits[0]]
        if len({of_suite[name] for of_suite in by_bits.values()}) > 1  # Skip constants, such as the number of tokens.
    ]
    return Result(numbers=numbers, details={"granularity": settings.granularity}, charts=charts)


def inner_suites(config: Config) -> tuple[str, ...]:
    """Return `eval.quantize.suites`, or raise `UserError` if one of them is unknown or cannot be quantised."""
    quantizable = [name for name, suite in SUITES.items() if suite.quantizable]
    for name in config.eval.quantize.suites:
        if name not in quantizable:
            hint = did_you_mean(name, quantizable)
            raise UserError(f"eval.quantize.suites: {name!r} is not a suite to quantise.{hint}")
    return config.eval.quantize.suites


def quantized(config: Config, bits: int) -> Config:
    """Return the config with attention logits of `bits` bits, and an attention implementation that supports them."""
    model, implementation = config.model, config.model.attention_implementation
    backends = ARCHITECTURES[model.architecture].backends(quantized=bits != UNQUANTIZED)
    changed = dataclasses.replace(
        model,
        attention_logit_bits=None if bits == UNQUANTIZED else bits,
        attention_logit_granularity=config.eval.quantize.granularity,
        attention_implementation=implementation if implementation in backends else "auto",
    )
    return dataclasses.replace(config, model=changed)


def _chart(suite: str, name: str, by_bits: Mapping[int, Mapping[str, float]]) -> LineChart:
    points = sorted((float(bits), numbers[name]) for bits, numbers in by_bits.items())
    bits, values = (list(axis) for axis in zip(*points, strict=True))
    return LineChart(
        name=f"quantize_{suite}_{name}",
        title=f"{suite}: {name} by the bits of attention logits",
        x_label="bits of an attention logit; 16: not quantised",
        y_label=name,
        series=[Series(name=suite, x=bits, y=values)],
    )


SUITE = Suite(evaluate=evaluate, reads=("quantize",), inner=inner_suites, quantizable=False)
