"""The input of every suite, the journals of suites, and the forward pass over validation data that suites share."""
#   B = batch, T = tokens of a row

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from difftx.data.loader import Batch, ordered_batches, ordered_rows
from difftx.data.packing import PackedRows, Row, RowSource
from difftx.errors import UserError
from difftx.files import JsonLines, schema_error
from difftx.inference.decode import LanguageModel
from difftx.parallel.multihost import decide_on_primary, is_primary
from difftx.progress import Work
from difftx.training.checkpoint.checkpointer import DECISION_SECONDS
from difftx.training.loss import token_nll
from difftx.training.run import Run
from difftx.training.state import graph

DECISION_ITEMS = 64  # Items per message from the primary process to the other processes; answers may be long texts.


class Identified(Protocol):
    """An item whose `id` is unique within its suite, and the same in every process and evaluation."""

    @property
    def id(self) -> str: ...


class ItemJournal:
    """A file of JSON lines: the settings and weights, then one answer per line. Only the primary process uses it.

    An interrupted suite reads the answers of its finished items from this file.
    """

    def __init__(self, path: Path, settings: str, weights: str | None):
        self._file, self._head = JsonLines(path), {"settings": settings, "weights": weights}

    def start(self, items: Sequence[Identified]) -> dict[str, Any]:
        """Rewrite the file with only its valid answers, and return those of `items` by item id in every process."""
        stored = self._read() if is_primary() else {}
        answers = {}
        for group in itertools.batched(items, DECISION_ITEMS):
            found = {item.id: stored[item.id] for item in group if item.id in stored}
            answers |= decide_on_primary(lambda found=found: found, DECISION_SECONDS)
        if is_primary():  # Removes incomplete lines, and answers for other settings or weights.
            self._file.rewrite([self._head, *self._rows(stored)])
        return answers

    def add(self, answers: dict[str, Any]) -> None:
        """Append answers by item id; they are on disk when the function returns."""
        if is_primary():
            self._file.append(self._rows(answers))

    def remove(self) -> None:
        self._file.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """Return the answers of a file with the same settings and weights."""
        rows = self._file.read()
        if rows[:1] != [self._head]:
            return {}
        shape = {"id": str, "answer": object}
        return {row["id"]: row["answer"] for row in rows if schema_error(row, shape) is None}

    @staticmethod
    def _rows(answers: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return ({"id": name, "answer": answer} for name, answer in answers.items())


class Evaluation:
    """A run, the parameters of one of its steps, a progress display, and the journal of the current suite.

    Without a journal, an interrupted suite starts again from its first item.
    """

    def __init__(self, run: Run, params: Any, work: Work, journal: ItemJournal | None = None):
        self.run, self.params, self.work, self.journal = run, params, work, journal
        self._valid_nll: dict[str, np.ndarray] = {}

    @functools.cached_property
    def lm(self) -> LanguageModel:
        """The model, to generate with and to score continuations."""
        return LanguageModel(self.run.config, self.run.mesh, self.params, self.run.tokenizer)

    def batches(self, source: RowSource, limit_tokens: int, what: str) -> Iterator[Batch]:
        """Yield the first rows of a source in microbatches, the last one padded; the arguments are those of `nll`."""
        rows = self.run.microbatch_rows
        batches = ordered_batches(
            source,
            rows=rows,
            limit_tokens=limit_tokens,
            sharding=self.run.batch_sharding,
            vocab_size=self.run.config.model.vocab_size,
        )
        return self.work.track(batches, what, -(-ordered_rows(source, limit_tokens) // rows))

    def nll(self, source: RowSource, limit_tokens: int, what: str) -> np.ndarray:
        """Return -log p of each target of a source's first rows, in nats, float32 `[rows, T]`.

        Targets outside the loss mask have a value too. Every process gets the whole array. Suites sum its values in
        float64 on the host, so that their numbers do not depend on the batch size, the mesh or the number of hosts.

        Args:
            source: the rows to score.
            limit_tokens: largest number of tokens, rounded down to whole rows, but at least one row.
            what: name of the rows in the progress display.
        """
        graphdef, found, pending = graph(self.run.config), [], None
        for batch in self.batches(source, limit_tokens, what):
            scored = _score(graphdef, self.params, batch)
            if pending is not None:  # Fetch the previous batch while the device computes the current one.
                found.append(np.asarray(pending))
            pending = scored
        return np.concatenate([*found, np.asarray(pending)])[: ordered_rows(source, limit_tokens)]

    def valid_rows(self, name: str) -> Iterator[tuple[Row, np.ndarray]]:
        """Yield the rows of a validation set, at most `eval.loss_tokens` tokens, each with its `nll`, float32 `[T]`.

        Suites share the result: the forward pass runs once per set.
        """
        source = self.run.data.valid[name]
        if name not in self._valid_nll:
            self._valid_nll[name] = self.nll(source, self.run.config.eval.loss_tokens, f"rows of {name}")
        for index, nll_T in enumerate(self._valid_nll[name]):
            yield source[index], nll_T

    def answers[Item: Identified](
        self,
        items: Sequence[Item],
        answer_batch: Callable[[Sequence[Item]], Sequence[Any]],
        *,
        what: str,
        batch_items: int | None = None,
    ) -> Iterator[tuple[Item, Any]]:
        """Yield each item with its answer, in order; answers that are in the journal are not computed again.

        Args:
            items: the items of the suite; the same settings must always give the same items.
            answer_batch: function that returns the answers of a batch of items, as JSON.
            what: name of the items in the progress display.
            batch_items: number of items per batch; None: the rows of a microbatch.
        """
        answers = {} if self.journal is None else self.journal.start(items)
        left = [item for item in items if item.id not in answers]
        batches = itertools.batched(left, batch_items or self.run.microbatch_rows)
        with self.work.task(what, len(left)) as advance:
            for item in items:
                if item.id not in answers:  # The first item of the next batch.
                    batch = next(batches)
                    found = dict(zip((member.id for member in batch), answer_batch(batch), strict=True))
                    answers |= found
                    if self.journal is not None:
                        self.journal.add(found)
                    advance(len(batch))
                yield item, answers[item.id]


def text_sets(run: Run, suite: str) -> dict[str, PackedRows]:
    """Return the validation sets of text by name; raise `UserError` if there are none."""
    text = {name: rows for name, rows in run.data.valid.items() if isinstance(rows, PackedRows)}
    if not text:
        raise UserError(f"suite {suite!r}: no validation set is text; for synthetic tasks, use the suite 'exact_match'")
    return text


@functools.partial(jax.jit, static_argnums=0)
def _score(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> jax.Array:
    model = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden(batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT)
    nll_BT = token_nll(x_BTD, model.unembedding(), batch.targets_BT)
    return jax.sharding.reshard(nll_BT, jax.P())  # Replicated, so that each host can read all of it.
