"""Prompts of suite `attention`: those of suite `needle`, or validation examples of the synthetic task `retrieval`."""

import dataclasses

import numpy as np

from difftx.config.eval import NeedleCaseConfig
from difftx.data.synthetic import SyntheticRows, retrieval_with_positions
from difftx.errors import UserError
from difftx.evals.evaluation import require_plain_logits
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompt, NeedlePrompts
from difftx.training.run import Run


def prompts_of(run: Run) -> "NeedlePrompts | RetrievalPrompts":
    """Return needle prompts with the length and the numbers of needles and queries in `eval.attention`.

    If all validation sets are synthetic, one of them is the task `retrieval`, and `eval.needle.haystack` is None, the
    prompts are examples of that task instead. Raise `UserError` if a window of the model is shorter than the prompts,
    which do not include the answers, or if the model rounds attention logits.
    """
    require_plain_logits(run, "attention")
    chosen_layers(run)
    settings, needle = run.config.eval.attention, run.config.eval.needle
    tasks = [rows for rows in run.data.valid.values() if isinstance(rows, SyntheticRows)]
    retrieval = [rows for rows in tasks if rows.task == "retrieval"]
    if retrieval and needle.haystack is None and len(tasks) == len(run.data.valid):
        prompts = RetrievalPrompts(run, retrieval[0])
    else:
        case = NeedleCaseConfig(needles=settings.needles, queries=settings.queries)
        lengths = () if settings.length is None else (settings.length,)
        changed = dataclasses.replace(needle, cases=(case,), lengths=lengths, samples=settings.samples)
        prompts = NeedlePrompts(run, changed, length_field="eval.attention.length", case_field="eval.attention.needles")
    window, tokens = run.config.model.window, len(prompts.prompt(prompts.items[0]).tokens)
    if window is not None and window < tokens:
        shorter = prompts.lengths[0] - (tokens - window)
        fix = f"use eval.attention.length={shorter} or less, or " if isinstance(prompts, NeedlePrompts) else ""
        raise UserError(
            f"model.window={window}: the suite 'attention' requires that the last of the {tokens} tokens of a prompt "
            f"attends to all others; {fix}leave out the suite"
        )
    return prompts


def chosen_layers(run: Run) -> list[int]:
    """Return the 0-based indices of `eval.attention.layers`, by default of all layers, or raise `UserError`."""
    layers, count = run.config.eval.attention.layers, run.config.model.num_layers
    if layers and max(layers) > count:
        raise UserError(f"eval.attention.layers={layers}: the model has {count} layers; use 1 … {count}")
    return [layer - 1 for layer in layers] or list(range(count))


class RetrievalPrompts:
    """Validation examples of the task `retrieval` as needle prompts, with the same number of examples at each depth.

    An example consists of pairs and distractors in random order, and ends with the key of the queried pair. The pairs
    are the needles. The relative position of the queried pair, rounded to the nearest of `depths`, is the example's
    depth. `NeedleItem.sample` is the index of the example.
    """

    def __init__(self, run: Run, rows: SyntheticRows):
        self._rows, self._settings = rows, run.config.data.synthetic
        self.depths, samples = run.config.eval.needle.depths, run.config.eval.attention.samples
        case = NeedleCaseConfig(needles=self._settings.pairs, queries=1)
        examples: dict[float, list[int]] = {depth: [] for depth in self.depths}
        for index in range(len(rows)):
            if min(map(len, examples.values())) >= samples:
                break
            tokens, positions, queried = self._example(index)
            share = positions[queried] / (len(tokens) - 1)
            examples[min(self.depths, key=lambda depth: abs(depth - share))].append(index)
        length = len(self._example(0)[0])
        self.lengths = [length]
        self.items: list[NeedleItem] = []
        for depth, indices in examples.items():
            if len(indices) < samples:
                raise UserError(
                    f"eval.attention.samples={samples}: of data.synthetic.valid_examples={len(rows)} only "
                    f"{len(indices)} have their answer near depth {depth:g}; use fewer samples, more examples, or "
                    f"eval.needle.depths without {depth:g}"
                )
            self.items += [NeedleItem(length, case, depth, index) for index in indices[:samples]]

    def prompt(self, item: NeedleItem) -> NeedlePrompt:
        tokens, positions, queried = self._example(item.sample)
        spans = [(position, position + 2) for position in positions.tolist()]
        return NeedlePrompt(
            item=item,
            tokens=tokens.tolist(),
            asked=(spans.pop(queried),),
            others=tuple(spans),
            question=(len(tokens) - 1, len(tokens)),
            numbers=(str(tokens[positions[queried] + 1]),),
        )

    @staticmethod
    def text_of(tokens: list[int]) -> str:
        """Return the token ids as text, since the tokens of a synthetic task have no text."""
        return " ".join(map(str, tokens))

    def _example(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        return retrieval_with_positions(self._settings, self._rows.sequence_length, self._rows.random(index))
