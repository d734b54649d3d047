"""Examples of the synthetic task retrieval as needle prompts, with the spans of their parts."""

import numpy as np

from difftx.config.eval import NeedleCaseConfig
from difftx.data.synthetic import SyntheticRows, retrieval_with_positions
from difftx.errors import UserError
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompt
from difftx.training.run import Run

TASK = "retrieval"


class RetrievalPrompts:
    """Validation examples of the task retrieval, with the same number of examples at each depth.

    An example consists of the queried pair, other pairs, distractors, and last the queried key. Its depth is the entry
    of `depths` that is nearest to the position of the queried pair, as a share of the tokens before the last key.
    """

    def __init__(self, run: Run, rows: SyntheticRows, *, depths: tuple[float, ...], samples: int):
        """Select the first examples of each depth.

        Raises:
            UserError: a depth has fewer than `samples` examples.
        """
        self._rows, self._settings = rows, run.config.data.synthetic
        self.depths = depths
        case = NeedleCaseConfig(needles=self._settings.pairs, queries=1)
        found: dict[float, list[int]] = {depth: [] for depth in depths}
        for index in range(len(rows)):
            if min(map(len, found.values())) >= samples:
                break
            tokens, places, asked = self._example(index)
            share = places[asked] / (len(tokens) - 1)
            found[min(depths, key=lambda depth: abs(depth - share))].append(index)
        for depth, indices in found.items():
            if len(indices) < samples:
                raise UserError(
                    f"eval.attention.samples={samples}: of data.synthetic.valid_examples={len(rows)} only "
                    f"{len(indices)} have their answer near depth {depth:g}; use fewer samples, or more examples"
                )
        length = len(self._example(0)[0])
        self.lengths = [length]
        self._index = {
            NeedleItem(length, case, depth, sample): index
            for depth, indices in found.items()
            for sample, index in enumerate(indices[:samples])
        }
        self.items = list(self._index)

    def prompt(self, item: NeedleItem) -> NeedlePrompt:
        """Return the prompt of an item."""
        tokens, places, asked = self._example(self._index[item])
        spans = [(place, place + 2) for place in places.tolist()]
        return NeedlePrompt(
            item=item,
            tokens=tokens.tolist(),
            asked=(spans.pop(asked),),
            others=tuple(spans),
            question=(len(tokens) - 1, len(tokens)),
            numbers=(str(tokens[places[asked] + 1]),),
        )

    @staticmethod
    def text_of(tokens: list[int]) -> str:
        """Return the token ids as text, since the tokens of a synthetic task have no text."""
        return " ".join(map(str, tokens))

    def _example(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        return retrieval_with_positions(self._settings, self._rows.sequence_length, self._rows.random(index))
