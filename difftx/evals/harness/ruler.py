"""Prompts of lm-eval's RULER tasks (arXiv 2404.06654), with the run's tokenizer and, on request, without a network.

lm-eval writes the prompts when it loads a task. It asks transformers for a tokenizer by name, and downloads texts.
`eval.harness.ruler_path` is a folder with the files that it would download:

    essays.txt                       text around the needles, such as Paul Graham's essays: tasks niah_… but three
    dev-v2.0.json                    SQuAD 2.0 as published: ruler_qa_squad
    hotpot_dev_distractor_v1.json    HotpotQA as published: ruler_qa_hotpot
    tokenizers/punkt_tab/english/    nltk's data punkt_tab, which splits essays.txt into sentences
"""

import contextlib
import io
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError, import_extra
from difftx.json_files import read_json

NAME = "difftx"  # The name under which lm-eval's tasks ask for the tokenizer.
ESSAYS = "baber/paul_graham_essays"  # The data set that essays.txt replaces.


def is_task(name: str) -> bool:
    """Return whether a task or group of lm-eval is one of RULER."""
    return name == "ruler" or name.startswith(("ruler_", "niah_"))


def metadata(lengths: Sequence[int]) -> dict[str, Any]:
    """Return what RULER tasks take from lm-eval's task manager."""
    return {"tokenizer": NAME, "max_seq_lengths": list(lengths)}


@contextlib.contextmanager
def prompts(tokenizer: Tokenizer, path: str | None) -> Iterator[None]:
    """Within the block, RULER tasks are written with `tokenizer` and, if `path` is given, the files in this folder."""

    def file(name: str) -> Path:
        if not (found := Path(str(path)) / name).is_file():
            raise UserError(f"eval.harness.ruler_path={path} has no {name}; suites.md lists the files of RULER")
        return found

    def tokens(original: Callable[..., Any], name: str, **options: Any) -> Any:
        if name != NAME:
            return original(name, **options)
        return lambda text: types.SimpleNamespace(input_ids=tokenizer.encode_prompt(text))

    def data_set(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return {"text": [file("essays.txt").read_text()]} if args == (ESSAYS,) else original(*args, **options)

    def answer(_: Callable[..., Any], url: str, **options: Any) -> Any:
        content = read_json(file(PurePosixPath(url).name))
        return types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: content)

    functions: list[tuple[Any, str, Any]] = [(_extra("transformers").AutoTokenizer, "from_pretrained", tokens)]
    folders = _extra("nltk").data.path
    _extra("wonderwords")
    if path is not None:
        functions += [(_extra("datasets"), "load_dataset", data_set), (_extra("requests"), "get", answer)]
        functions += [(_extra("nltk"), "download", lambda *_: file("tokenizers/punkt_tab/english/abbrev_types.txt"))]
    for name, module in list(sys.modules.items()):  # lm-eval's tasks cache tokenizers and texts.
        for function in vars(module).values() if "tasks.ruler" in name else ():
            getattr(function, "cache_clear", lambda: None)()
    with contextlib.ExitStack() as stack:
        for owner, attribute, function in functions:
            original = getattr(owner, attribute)
            replaced = lambda *args, f=function, o=original, **options: f(o, *args, **options)  # noqa: E731
            stack.enter_context(mock.patch.object(owner, attribute, replaced))
        stack.enter_context(mock.patch.object(_extra("nltk").data, "path", [path, *folders] if path else folders))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # The tasks print their progress.
        yield


def check_vt(tokenizer: Tokenizer, lengths: Sequence[int]) -> None:
    """Raise `UserError` if `ruler_vt` does not fit into a length. lm-eval would look for a shorter prompt forever."""
    from lm_eval.tasks.ruler import vt_utils

    def count(text: str) -> int:
        return len(tokenizer.encode_prompt(text))

    # lm-eval adds sentences in steps of 5 to an example of up to 500 tokens, and in steps of 10 to the prompt.
    example = count(vt_utils.generate_input_output(5, 1, 4, is_icl=True)[0]) + 30
    longest = max(count(vt_utils.generate_input_output(10, 1, 4)[0]) for _ in range(20)) + 30
    needed = max(500, example) + longest
    if example > 500 or min(lengths) < needed:
        why = f"an example of {example} tokens, of at most 500" if example > 500 else f"up to {needed} tokens"
        raise UserError(
            f"eval.harness.ruler_lengths={min(lengths)}: ruler_vt needs {why}, with the tokenizer "
            f"{tokenizer.name!r}; choose a larger length, or name the other tasks in eval.harness.tasks"
        )


def _extra(module: str) -> Any:
    return import_extra(module, "ruler")
