"""Examples of the synthetic task retrieval, with their parts marked as those of a needle prompt."""

import numpy as np

from difftx.config.eval import NeedleCaseConfig
from difftx.data.synthetic import SyntheticRows, retrieval_with_places
from difftx.errors import UserError
from difftx.evals.needle_prompts import NeedleItem, NeedlePrompt
from difftx.training.run import Run

TASK = "retrieval"


class RetrievalPrompts:
    """Validation examples, as many at each depth: the pair that is asked for, other pairs, distractors, the key.

    An example is a sample of the depth that is nearest to its pair's place, as a share of the tokens before the key.
    """

    def __init__(self, run: Run, rows: SyntheticRows, *, depths: tuple[float, ...], samples: int):
        """Look for them, in the order of their numbers.

        Raises:
            UserError: there are too few.
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
        """Return tokens by their numbers: they spell nothing."""
        return " ".join(map(str, tokens))

    def _example(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        return retrieval_with_places(self._settings, self._rows.sequence_length, self._rows.random(index))
