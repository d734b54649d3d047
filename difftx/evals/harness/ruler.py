"""Prompts for RULER's 13 tasks (arXiv 2404.06654), as long as a given number of the run's tokens allows.

lm-eval provides the texts of the prompts, the generation settings and the scores. It also writes prompts when it loads
a task, but this needs a tokenizer from transformers, and lengthens prompts in steps that are too large below 4,096
tokens. So while a task is loaded, difftx replaces the method that creates the prompts.
"""

import bisect
import contextlib
import functools
import math
import random
import re
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from difftx.config.eval import HarnessConfig
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError, import_extra
from difftx.json_files import read_json

PROMPTS = 500  # Prompts per task and length, as in lm-eval.
NEAR = 16  # The sizes of two consecutive prompts of a task rarely differ by more.
# Minimum numbers of words. `ruler_cwe` asks for the 10 most common words. With fewer words in `ruler_fwe`, the third
# and fourth could be equally frequent.
CWE_WORDS, FWE_WORDS = 11, 53
SENTENCE_END = re.compile(r"(?<=[.!?]) ")
# Types of haystack, keys and values, and further numbers, as in lm-eval's `niah_utils`.
NEEDLES: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "niah_single_1": ("repeat", "words", "numbers", {}),
    "niah_single_2": ("essay", "words", "numbers", {}),
    "niah_single_3": ("essay", "words", "uuids", {}),
    "niah_multikey_1": ("essay", "words", "numbers", {"num_needle_k": 4}),
    "niah_multikey_2": ("needle", "words", "numbers", {}),
    "niah_multikey_3": ("needle", "uuids", "uuids", {}),
    "niah_multiquery": ("essay", "words", "numbers", {"num_needle_k": 4, "num_needle_q": 4}),
    "niah_multivalue": ("essay", "words", "numbers", {"num_needle_v": 4}),
}


class Prompt(NamedTuple):
    """A question of a task: the text of the prompt, the right answers, and the beginning of the answer."""

    text: str
    answers: list[str]
    prefix: str


class Source(NamedTuple):
    """A writer of prompts for one task."""

    write: Callable[[int, int], Prompt]  # Maps the index of a question and a haystack size (≥ 0) to a prompt.
    most: int  # Largest haystack size.
    questions: int = PROMPTS


def is_task(name: str) -> bool:
    """Return whether `name` is a RULER task, group or tag in lm-eval."""
    return name in ("ruler", "longcxt") or name.startswith(("ruler_", "niah_"))


@contextlib.contextmanager
def prompts(tokenizer: Tokenizer, settings: HarnessConfig) -> Iterator[Any]:
    """Yield a task manager. Within the block, it loads RULER tasks with prompts measured in tokens of `tokenizer`."""
    for package in ("transformers", "wonderwords"):
        import_extra(package, "ruler")
    nltk = import_extra("nltk", "ruler")
    import datasets
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask

    def write(task: Any, *_: Any, **__: Any) -> None:
        rows = [row for length in settings.ruler_lengths for row in _rows(task.config, tokenizer, settings, length)]
        task.dataset = {"test": datasets.Dataset.from_list(rows)}

    folder, states = Path(lm_eval.tasks.__path__[0]) / "ruler", (random.getstate(), np.random.get_state())
    try:
        # Prevent lm-eval from downloading nltk's rules for finding sentences. `_needles` does not use them.
        with mock.patch.object(nltk, "download"), mock.patch.object(ConfigurableTask, "download", write):
            yield lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _rows(task: Any, tokenizer: Tokenizer, settings: HarnessConfig, length: int) -> list[dict[str, Any]]:
    """Return the questions of a task with prompts of at most `length` tokens, including the tokens to generate.

    Each prompt has the largest haystack that fits. Questions that do not even fit without a haystack are left out.
    """
    from lm_eval.api.utils import maybe_delimit
    from lm_eval.tasks.ruler import cwe_utils

    generated = task.generation_kwargs["max_gen_toks"]

    def tokens_of(prompt: Prompt) -> int:
        return len(tokenizer.encode_prompt(maybe_delimit(prompt.text, prompt.prefix, task.target_delimiter)))

    def draw(index: int, size: int) -> tuple[Prompt, int]:
        """Return a prompt and its length. Its random numbers only depend on the task, the length and the question."""
        seed = zlib.crc32(f"{settings.seed} {task.task} {length} {index}".encode())
        random.seed(seed)
        np.random.seed(seed)
        cwe_utils.RNG.seed(seed)
        prompt = source.write(index, size)
        return prompt, tokens_of(prompt) + generated

    def exceeds(index: int, size: int) -> bool:
        return draw(index, size)[1] > length

    random.seed(settings.seed)
    np.random.seed(settings.seed)
    source = _source(task.task, settings, length, tokens_of)
    rows, size, shortest, end = [], 0, math.inf, min(source.most, length) + 1
    for index in range(source.questions):
        sizes = range(max(0, size - NEAR), min(size + NEAR, end))
        if not rows or exceeds(index, sizes[0]):
            if (least := draw(index, 0)[1]) > length:
                shortest = min(shortest, least)
                continue
            sizes = range(end)
        size = sizes[bisect.bisect_left(sizes, True, key=functools.partial(exceeds, index)) - 1]
        prompt, tokens = draw(index, size)
        question = {"index": index, "input": prompt.text, "outputs": prompt.answers, "gen_prefix": prompt.prefix}
        rows.append(question | {"length": tokens, "max_length": length})
        if len(rows) == min(PROMPTS, settings.limit or PROMPTS):
            break
    if not rows:
        raise UserError(
            f"eval.harness.ruler_lengths: at {length}, no prompt of {task.task} fits: the shortest has {shortest} "
            f"tokens with the {generated} to generate; use a larger length, or remove the task from eval.harness.tasks"
        )
    return rows


def _source(name: str, settings: HarnessConfig, length: int, tokens_of: Callable[[Prompt], int]) -> Source:
    """Return the writer of a task's prompts for one length."""
    if name in NEEDLES:
        return _needles(name, settings)
    if name.startswith("ruler_qa_"):
        return _documents(name, settings)
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    def common_words(_: int, size: int) -> Prompt:
        _, text, answers = cwe_utils.generate_input_output(CWE_WORDS + size, length)
        return _split(text, answers, cwe_utils.CONFIG["answer_prefix"])

    def frequent_words(_: int, size: int) -> Prompt:
        no_tokens = types.SimpleNamespace(input_ids=())  # lm-eval would shorten a text of too many tokens.
        options = {"num_words": FWE_WORDS + size, "vocab_size": max(length // 50, 5)}
        text, answers, _ = fwe_utils.generate_input_output(length, lambda _: no_tokens, **options)
        return _split(text, answers, fwe_utils.CONFIG["answer_prefix"])

    def variables(size: int, *, is_example: bool = False) -> Prompt:
        text, answers = vt_utils.generate_input_output(1 + size, 1, 4, is_icl=is_example)
        return _split(text, answers, " Answer: According to the chain(s)")

    def solved(size: int) -> Prompt:
        """Return an example with its answer. As in lm-eval, it precedes the question."""
        text, answers, prefix = variables(size, is_example=True)
        return Prompt(f"{text} {prefix} {' '.join(answers)}\n\n\n\n", [], "")

    if name == "ruler_cwe":
        return Source(common_words, len(cwe_utils.WORDS) - CWE_WORDS)
    if name == "ruler_fwe":
        return Source(frequent_words, length)
    # In lm-eval, an example has up to 500 tokens, including 30 to generate.
    room = min(500 - 30, length // 3)
    size = bisect.bisect_left(range(room), True, key=lambda size: tokens_of(solved(size)) > room)
    example = solved(size - 1).text if size else ""

    def traced(_: int, size: int) -> Prompt:
        prompt = variables(size)
        return prompt._replace(text=vt_utils.randomize_icl(example) + prompt.text) if example else prompt

    return Source(traced, length)


def _split(text: str, answers: list[str], prefix: str) -> Prompt:
    """Split a text at the last `prefix`: the prompt is before it, the beginning of the answer from it on."""
    start = text.rindex(prefix)
    return Prompt(text[:start].strip(), answers, text[start:].strip())


def _needles(name: str, settings: HarnessConfig) -> Source:
    """Return the writer of a task with needles in a haystack of essay words or of sentences."""
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    haystack_type, keys, values, numbers = NEEDLES[name]
    counts = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1} | numbers
    options = {"type_haystack": haystack_type, "type_needle_k": keys, "type_needle_v": values, **counts}
    if haystack_type == "essay" and settings.ruler_path is not None:
        haystack = _file(settings, "paul_graham_essays.txt").read_text().split()
    else:
        haystack = prepare_niah.get_haystack(haystack_type)
    # A haystack of sentences has at least one sentence per needle.
    is_essay, least = haystack_type == "essay", counts["num_needle_k"] * counts["num_needle_v"]

    def write(_: int, size: int) -> Prompt:
        with mock.patch.object(prepare_niah, "cached_sent_tokenize", lambda text: SENTENCE_END.split(text)):
            text, answers, query = prepare_niah.generate_input_output(
                size if is_essay else least + size, haystack, template=niah_utils.TEMPLATE, **options
            )
        kind, verb = (values[:-1], "is") if len(answers) == 1 else (values, "are")
        return Prompt(text, answers, f"The special magic {kind} for {query} mentioned in the provided text {verb}")

    return Source(write, len(haystack) if is_essay else 2**31)


def _documents(name: str, settings: HarnessConfig) -> Source:
    """Return the writer of a task with questions about documents, mixed with unrelated documents."""
    from lm_eval.tasks.ruler import qa_utils

    read = {"ruler_qa_squad": qa_utils.read_squad, "ruler_qa_hotpot": qa_utils.read_hotpotqa}[name]
    if settings.ruler_path is None:
        questions, documents = read()
    else:

        def from_file(url: str) -> Any:
            return read_json(_file(settings, Path(url).name))

        with mock.patch.object(qa_utils, "download_json", from_file):
            questions, documents = read.__wrapped__()  # Do not use lm-eval's cache of previous reads.

    def write(index: int, size: int) -> Prompt:
        count = len(questions[index]["context"]) + size
        text, answers = qa_utils.generate_input_output(index, count, questions, documents)
        return Prompt(text, answers, "Answer:")

    return Source(write, len(documents), len(questions))


def _file(settings: HarnessConfig, name: str) -> Path:
    if not (found := Path(str(settings.ruler_path)) / name).is_file():
        raise UserError(f"eval.harness.ruler_path={settings.ruler_path}: no file {name} (see RULER in suites.md)")
    return found
