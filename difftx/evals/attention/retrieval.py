"""Prompts of suite `attention` from the validation examples of the synthetic task `retrieval`."""

import numpy as np

from difftx.config.eval import NeedleCaseConfig
from difftx.data.synthetic import SyntheticRows, retrieval_with_positions
from difftx.errors import UserError
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompt
from difftx.training.run import Run


class RetrievalPrompts:
    """Validation examples of the task `retrieval` as needle prompts, with the same number of examples at each depth.

    An example consists of the queried pair, other pairs and distractors in random order, and ends with the queried key.
    The pairs are the needles. The depth of an example is the entry of `depths` nearest to the position of the queried
    pair, as a share of the tokens before the final key.
    """

    def __init__(self, run: Run, rows: SyntheticRows):
        """Select the first `eval.attention.samples` examples at each of `eval.needle.depths`.

        Raises:
            UserError: there are too few examples at a depth.
        """
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
        self._example_of: dict[NeedleItem, int] = {}
        for depth, indices in examples.items():
            if len(indices) < samples:
                raise UserError(
                    f"eval.attention.samples={samples}: of data.synthetic.valid_examples={len(rows)} only "
                    f"{len(indices)} have their answer near depth {depth:g}; use fewer samples, or more examples"
                )
            for sample, index in enumerate(indices[:samples]):
                self._example_of[NeedleItem(length, case, depth, sample)] = index
        self.items = list(self._example_of)

    def prompt(self, item: NeedleItem) -> NeedlePrompt:
        """Return the prompt of an item."""
        tokens, positions, queried = self._example(self._example_of[item])
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
