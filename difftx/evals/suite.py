"""The class for suites. docs/extend.md shows how to add one."""

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
    """An evaluation function, with the settings that its result depends on, and texts for readers.

    Attributes:
        evaluate: function that runs the suite. `difftx eval --list` prints the first line of its docstring.
        reads: fields of the config group `eval` that the suite reads in addition to its own. Its own fields are called
            like the suite, or begin with its name and an underscore. A stored result is reused only if all of these
            fields are unchanged, including the contents of files that they name (`flag.Location`). Fields that affect
            no result (`affects.Nothing`) may change.
        inner: function that returns the names of the suites that this suite runs. It may raise `UserError`.
        check: function that raises `UserError` if the suite cannot evaluate a run. It is called before training and
            before an evaluation. If the suite has `inner` suites, it must call their `check` too.
        measures_device: whether the result depends on the devices and the mesh.
        quantizable: whether the suite `quantize` can run this suite.
        revision: number to increase when new code of the suite changes its results. A stored result is reused only with
            the same revision. An extension need not set it, because its results depend on the content of its files.
        title: title of the suite's results. The default is the name of the suite.
        explanation: sentences on what is measured and how to read it. The default is the first line of the docstring
            of `evaluate`.
        main_charts: names of the charts that the report shows first, because they answer the suite's question. An entry
            may name one line of a chart, as in "layers: answer". The default is the first charts.
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

    `config` is a frozen dataclass with the suite's own fields. It becomes the group `eval.<name>`, and a stored result
    depends on all of its values. Raise `UserError` if the name is taken, `suite.reads` names an unknown field, or
    `config` is not a frozen dataclass with a default for each field.
    """
    for field in suite.reads:
        if field not in types_of(EvalConfig):
            raise UserError(f"suite {name!r}: eval has no field {field!r}.{did_you_mean(field, types_of(EvalConfig))}")
    SUITES.register(name)(suite)
    if config is not None:
        add_group(EvalConfig, name, config)
