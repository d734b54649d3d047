"""The class of suites. docs/extend.md shows how to add a suite."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from difftx.config import Config
from difftx.config.eval import EvalConfig
from difftx.config.fields import add_group, types_of
from difftx.errors import UserError, did_you_mean
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Measure, Result
from difftx.storage.paths import AnyPath
from difftx.training.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A function that evaluates a model, what its result depends on besides the model and data, and what readers see.

    Attributes:
        evaluate: function that runs the suite. `difftx eval --list` prints the first line of its docstring.
        reads: fields of the config group `eval` that the suite reads besides its own. Its own fields have its name, or
            begin with it and an underscore. A stored result is reused only if the values of all are the same.
        files: function that returns the files that the suite reads. A stored result depends on their contents.
        headers: function that returns files that the suite reads and that are too large to hash. A stored result
            depends on their first lines, which must identify their contents.
        endpoint: function that returns the address of a service whose answers the result depends on, or None. A stored
            result is reused only with the same address.
        inner: function that returns the names of other suites that this suite runs. It may raise `UserError`.
        check: function that raises `UserError` for a run that the suite cannot evaluate. It is called before training
            and before an evaluation.
        checks_inner: whether `check` also checks the suites of `inner`. Otherwise, their own `check` is called.
        measures_device: whether the result depends on the devices and the mesh.
        quantizable: whether the suite `quantize` can run this suite.
        revision: number to increase when a change of the suite's code changes its results. A stored result is reused
            only with the same revision. Results of extensions already depend on the content of their files.
        title: title of the suite's results. By default, it is the name of the suite.
        explanation: sentences on what is measured and how to read it. By default, the first line of the docstring of
            `evaluate`.
        measures: form of a number's name → measure. A part such as `<task>` of a form stands for any text. If a form
            starts with such parts, it also matches names without them, such as labels of axes. The first match counts.
            A form with such parts has no label, which would be the same for all of its numbers.
        inner_numbers: form of the names of numbers that the suites of `inner` compute, with `<suite>` and `<number>`.
            These numbers have the measures that those suites declare.
        charts_show_numbers: whether the charts show all numbers. The report then folds the table of numbers away.
    """

    evaluate: Callable[[Evaluation], Result]
    reads: tuple[str, ...] = ()
    files: Callable[[Config], Iterable[AnyPath]] = lambda config: ()
    headers: Callable[[Config], Iterable[AnyPath]] = lambda config: ()
    endpoint: Callable[[Config], str | None] = lambda config: None
    inner: Callable[[Config], Sequence[str]] = lambda config: ()
    check: Callable[[Run], Any] = lambda run: None
    checks_inner: bool = False
    measures_device: bool = False
    quantizable: bool = True
    revision: int = 0
    title: str = ""
    explanation: str = ""
    measures: Mapping[str, Measure] = dataclasses.field(default_factory=dict)
    inner_numbers: str = ""
    charts_show_numbers: bool = False

    def __post_init__(self):
        for form, measure in self.measures.items():
            if "<" in form and measure.label:
                raise UserError(
                    f"Suite.measures[{form!r}] has label={measure.label!r}, the same for several numbers; omit it"
                )


def register_suite(name: str, suite: Suite, config: type | None = None) -> None:
    """Add a suite.

    `config` is a frozen dataclass of the suite's own fields. It becomes the group `eval.<name>`, and a stored result
    depends on all of its values. Raise `UserError` if the name is taken, `suite.reads` names a field that does not
    exist, or `config` is not a frozen dataclass whose fields all have defaults.
    """
    for field in suite.reads:
        if field not in types_of(EvalConfig):
            raise UserError(f"suite {name!r}: eval has no field {field!r}.{did_you_mean(field, types_of(EvalConfig))}")
    SUITES.register(name)(suite)
    if config is not None:
        add_group(EvalConfig, name, config)
