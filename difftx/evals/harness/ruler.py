"""Prompts of lm-eval's RULER tasks (arXiv 2404.06654), with the run's tokenizer and, on request, without a network.

lm-eval writes the prompts when it loads a task. It asks transformers for a tokenizer by name and downloads texts. While
a task is loaded, difftx replaces the functions of the libraries that lm-eval calls for this.
"""

import contextlib
import io
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from difftx.config.eval import HarnessConfig
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError, import_extra
from difftx.json_files import read_json

GROUPS = "ruler", "longcxt"  # A group and a tag, each of all tasks.


def is_task(name: str) -> bool:
    """Return whether `name` is a task, group or tag of RULER in lm-eval."""
    return name in GROUPS or name.startswith(("ruler_", "niah_"))


@contextlib.contextmanager
def prompts(task: str, tokenizer: Tokenizer, settings: HarnessConfig) -> Iterator[Any]:
    """Return a task manager that writes the prompts of `task` within the block, with `tokenizer` and `ruler_path`."""
    import lm_eval.tasks

    libraries = "transformers", "nltk", "datasets", "requests", "wonderwords"
    transformers, nltk, datasets, requests, _ = (import_extra(library, "ruler") for library in libraries)

    def tokens(text: str) -> Any:
        return types.SimpleNamespace(input_ids=tokenizer.encode_prompt(text))

    def file(name: str) -> Path:
        if not (found := Path(str(settings.ruler_path)) / name).is_file():
            raise UserError(f"eval.harness.ruler_path={settings.ruler_path}: no file {name} (see RULER in suites.md)")
        return found

    replaced = [(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokens)]
    if settings.ruler_path is not None:
        replaced += [
            (datasets, "load_dataset", lambda name, **_: {"text": [file(f"{Path(name).name}.txt").read_text()]}),
            (requests, "get", lambda url, **_: mock.Mock(json=lambda: read_json(file(Path(url).name)))),
            (nltk, "download", lambda name: file(f"tokenizers/{name}/english/abbrev_types.txt")),
            (nltk.data, "path", [settings.ruler_path, *nltk.data.path]),
        ]
    for module in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
        del sys.modules[module]  # The modules keep texts, a tokenizer and a random generator.
    states = random.getstate(), np.random.get_state()
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    try:
        with contextlib.ExitStack() as stack:
            for owner, attribute, value in replaced:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # lm-eval prints each length that it tries.
            for length in settings.ruler_lengths:
                _check_length(task, length, tokens)
            metadata = {"tokenizer": "difftx", "max_seq_lengths": list(settings.ruler_lengths)}
            folder = Path(lm_eval.tasks.__path__[0]) / "ruler"
            yield lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"eval.harness.ruler_lengths={settings.ruler_lengths}: {task}: {error}") from error
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def check_filled(name: str, task: Any) -> None:
    """Raise `UserError` if no prompt of a length has half of it, because lm-eval adds text in steps that do not fit."""
    longest: dict[int, int] = {}
    for row in task.test_docs():
        longest[row["max_length"]] = max(row["length"], longest.get(row["max_length"], 0))
    for length, filled in longest.items():
        if filled < length / 2:
            raise UserError(
                f"eval.harness.ruler_lengths: at {length}, no prompt of {name} has more than {filled} tokens; choose a "
                "larger length or other eval.harness.tasks"
            )


def _check_length(task: str, length: int, tokens: Callable[[str], Any]) -> None:
    """Raise `UserError` if the shortest prompts of `task` exceed `length`: lm-eval would look for one forever."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    def longest(write: Callable[..., Any], *args: Any, **options: Any) -> int:
        draws = (write(*args, **options) for _ in range(20))
        return max(len(tokens(" ".join(map(str, draw))).input_ids) for draw in draws)

    # A prompt of ruler_vt begins with an example of up to 500 tokens. The constants are the tokens to generate.
    for name, room, needed in (
        ("ruler_vt", 500, lambda: longest(vt_utils.generate_input_output, 5, 1, 4, is_icl=True) + 30),
        ("ruler_vt", length - 500, lambda: longest(vt_utils.generate_input_output, 10, 1, 4) + 30),
        ("ruler_cwe", length, lambda: longest(cwe_utils.generate_input_output, 10, length) + 120),
        ("ruler_fwe", length, lambda: longest(fwe_utils.generate_input_output, 2**30, tokens, num_words=32)),
    ):
        if task in (name, *GROUPS) and (least := needed()) > room:
            raise UserError(
                f"eval.harness.ruler_lengths: at {length}, {name} has room for {room} tokens, but its shortest "
                f"text has {least} with this tokenizer; choose a larger length or other eval.harness.tasks"
            )
