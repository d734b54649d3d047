"""The class of suites. docs/extend.md shows how to add a suite."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from difftx.config import Config
from difftx.config.eval import EvalConfig
from difftx.config.fields import add_group, types_of
from difftx.errors import UserError, did_you_mean
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Result
from difftx.training.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A function that evaluates a model, what its result depends on besides the model and data, and what readers see.

    Attributes:
        evaluate: function that runs the suite. `difftx eval --list` prints the first line of its docstring.
        reads: fields of the config group `eval` that the suite reads besides its own. Its own fields have its name, or
            begin with it and an underscore. A stored result is reused only if the values of all are the same, except
            those that affect no result (`affects.Nothing`), and the contents of the files that they name
            (`flag.Location`).
        inner: function that returns the names of other suites that this suite runs. It may raise `UserError`.
        check: function that raises `UserError` for a run that the suite cannot evaluate. It is called before training
            and before an evaluation. A suite with `inner` also calls the `check` of these suites.
        measures_device: whether the result depends on the devices and the mesh.
        quantizable: whether the suite `quantize` can run this suite.
        revision: number to increase when a change of the suite's code changes its results. A stored result is reused
            only with the same revision. Results of extensions already depend on the content of their files.
        title: title of the suite's results. By default, it is the name of the suite.
        explanation: sentences on what is measured and how to read it. By default, the first line of the docstring of
            `evaluate`.
        main_charts: names of the charts that answer the suite's question, which the report shows first. It may name one
            line of a chart, as in "layers: answer". By default, they are the first charts.
    """

    evaluate: Callable[[Evaluation], Result]
    reads: tuple[str, ...] = ()
    inner: Callable[[Config], Sequence[str]] = lambda config: ()
    check: Callable[[Run], Any] = lambda run: None
    measures_device: bool = False
    quantizable: bool = True
    revision: int = 0
    title: str = ""
    explanation: str = ""
    main_charts: tuple[str, ...] = ()


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
