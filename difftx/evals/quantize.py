"""Suite `quantize`: results of other suites with attention logits rounded to few bits (arXiv 2410.05258, Figure 8)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from difftx.config import Config
from difftx.config.architectures import ARCHITECTURES
from difftx.errors import UserError, did_you_mean
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Heatmap, LineChart, Result, Series
from difftx.evals.resume import resumable
from difftx.evals.suite import SUITES, Suite

UNQUANTIZED = 16


@dataclasses.dataclass(frozen=True)
class Item:
    """A suite and the number of bits of its attention logits."""

    suite: str
    bits: int

    @property
    def id(self) -> str:
        """The item's name in the journal."""
        return f"{self.suite} {self.bits}"


def evaluate(evaluation: Evaluation) -> Result:
    """Run other suites under quantised attention logits: number by bits.

    Each of `eval.quantize.suites` is evaluated under each of `eval.quantize.bits`; 16: as the suite does by itself. Its
    numbers have their names, behind the suite's and before the bits.

    Raises:
        UserError: a suite cannot be quantised, or raises the error itself.
    """
    config, settings = evaluation.run.config, evaluation.run.config.eval.quantize
    # By bits: suites that share a pass over the model share it.
    items = [Item(suite, bits) for bits in settings.bits for suite in inner_suites(config)]

    @functools.lru_cache(maxsize=1)
    def with_bits(bits: int) -> Evaluation:
        run = dataclasses.replace(evaluation.run, config=quantized(config, bits))
        return Evaluation(run, evaluation.params, evaluation.work)

    def answer(items: Sequence[Item]) -> list[dict[str, float]]:
        return [SUITES[item.suite].evaluate(with_bits(item.bits)).numbers for item in items]

    found: dict[str, dict[int, dict[str, float]]] = {}
    for item, numbers in resumable(evaluation, items, answer, what="suites by bits", batch_items=1):
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
    """Return which suites are to run.

    Raises:
        UserError: a suite is unknown or cannot be quantised.
    """
    for name in config.eval.quantize.suites:
        if name not in SUITES or not SUITES[name].quantizable:
            fit = [other for other, suite in SUITES.items() if suite.quantizable]
            raise UserError(f"eval.quantize.suites: {name!r} is no suite to quantise.{did_you_mean(name, fit)}")
    return config.eval.quantize.suites


def quantized(config: Config, bits: int) -> Config:
    """Return the config with attention logits of `bits` bits; 16 bits means no quantisation.

    The attention implementation becomes "auto" if the configured one does not support the quantisation.
    """
    model = config.model
    backends = ARCHITECTURES[model.architecture].backends(quantized=bits != UNQUANTIZED)
    serves = model.attention_implementation in backends
    changed = dataclasses.replace(
        model,
        attention_logit_bits=None if bits == UNQUANTIZED else bits,
        attention_logit_granularity=config.eval.quantize.granularity,
        attention_implementation=model.attention_implementation if serves else "auto",
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
