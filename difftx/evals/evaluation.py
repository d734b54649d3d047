"""The object that every suite receives, and the journal with which an interrupted suite resumes."""
# Axes of arrays: B = rows of a batch, T = tokens of a row

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from difftx.data.loader import Batch, ordered_batches, ordered_rows
from difftx.data.packing import PackedRows, Row, RowSource
from difftx.errors import UserError
from difftx.files import UNLOCKED, Owner
from difftx.inference.decode import LanguageModel
from difftx.inference.generate import REQUESTS_PER_ROW, Request, generate
from difftx.inference.sampling import Sampling
from difftx.inference.score import batch_scores, row_scores
from difftx.json_files import JsonLines, json_sha256
from difftx.parallel.multihost import decide_on_primary, is_primary
from difftx.progress import Work
from difftx.training.run import Run
from difftx.training.state import graph

DECISION_ITEMS = 64  # Maximum number of answers per message from the primary process. Answers may be long texts.


def journal_of(path: Path, settings: str, weights: str | None, owner: Owner = UNLOCKED) -> JsonLines:
    """Return the journal of the result at `path`: a file with the answers to finished items.

    The file name depends on settings and weights, because an evaluation with different ones may run at the same time.
    """
    return JsonLines(path.with_suffix(f".{json_sha256([settings, weights])[:32]}.items.jsonl"), owner)


class Evaluation:
    """The input of a suite: run, parameters, progress display, and a journal if an interrupted suite can resume.

    Only the primary process reads and writes the journal.
    """

    def __init__(self, run: Run, params: Any, work: Work, journal: JsonLines | None = None):
        self.run, self.params, self.work, self.journal = run, params, work, journal
        self._valid_nll: dict[str, np.ndarray] = {}

    @functools.cached_property
    def lm(self) -> LanguageModel:
        """The language model, for generating text and scoring continuations."""
        return LanguageModel(self.run.config, self.run.mesh, self.params, self.run.tokenizer)

    def batches(self, source: RowSource, limit_tokens: int, what: str) -> Iterator[Batch]:
        """Yield the first `limit_tokens` tokens of a source as microbatches of rows. The last one is padded."""
        rows = self.run.microbatch_rows
        batches = ordered_batches(
            source,
            batch_rows=rows,
            limit_tokens=limit_tokens,
            sharding=self.run.batch_sharding,
            vocab_size=self.run.config.model.embeddings,
        )
        return self.work.track(batches, what, -(-ordered_rows(source, limit_tokens) // rows))

    def scores(self, source: RowSource, limit_tokens: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays `[rows, T]` for the targets in the first rows of a source, in every process.

        The first array is -log p of each target in nats, float32. The second one is whether no other token is more
        likely, bool. Targets outside the loss mask have values too.

        The rows have at most `limit_tokens` tokens, but there is at least one row. Progress is shown under the name
        `what`. Suites sum the values in float64 on the host, so that results do not depend on batch size, mesh or
        number of hosts.

        If the run's cache is compressed, the keys and values of earlier tokens are read from it, chunk by chunk. The
        cache does not separate documents, so rows with document masks do not use it.
        """
        config = self.run.config
        if config.model.cache.compresses and not config.data.document_mask:
            scores = self._scores_through_cache(source, limit_tokens, what)
        else:
            scores = self._scores_of_batches(source, limit_tokens, what)
        rows = ordered_rows(source, limit_tokens)
        nll_BT, is_best_BT = (np.concatenate(arrays)[:rows] for arrays in zip(*scores, strict=True))
        return nll_BT, is_best_BT

    def _scores_of_batches(self, source: RowSource, limit_tokens: int, what: str) -> Iterator[Sequence[np.ndarray]]:
        graphdef, pending = graph(self.run.config), None
        for batch in self.batches(source, limit_tokens, what):
            scored = batch_scores(graphdef, self.params, batch)
            if pending is not None:  # Fetch the previous batch while the device computes this one.
                yield jax.device_get(pending)
            pending = scored
        yield jax.device_get(pending)

    def _scores_through_cache(self, source: RowSource, limit_tokens: int, what: str) -> Iterator[Sequence[np.ndarray]]:
        rows = [source[index] for index in range(ordered_rows(source, limit_tokens))]
        batches = list(itertools.batched(rows, self.run.microbatch_rows))
        for batch in self.work.track(batches, what, len(batches)):
            inputs, targets = ([row[name].tolist() for row in batch] for name in ("tokens", "targets"))
            with jax.set_mesh(self.run.mesh):
                scores = row_scores(self.lm, inputs, targets)
            yield [scores_BT[: len(batch), : len(inputs[0])] for scores_BT in scores]

    def valid_rows(self, name: str) -> Iterator[tuple[Row, np.ndarray]]:
        """Yield the first rows of a validation set, up to `eval.loss_tokens` tokens, each with -log p `[T]`."""
        source = self.run.data.valid[name]
        if name not in self._valid_nll:  # All suites share one forward pass per set.
            self._valid_nll[name], _ = self.scores(source, self.run.config.eval.loss_tokens, f"rows of {name}")
        for index, nll_T in enumerate(self._valid_nll[name]):
            yield source[index], nll_T

    def answers(
        self,
        items: Sequence[Any],
        answer_batch: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        what: str,
        batch_items: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield each item with its answer, in order. Reuse answers in the journal.

        `answer_batch` returns the answers to a batch of `batch_items` items, as JSON. The default is the number of rows
        in a microbatch. Progress is shown under the name `what`. Items are dataclasses or JSON values, and must be the
        same whenever the settings are the same. Equal items of a suite have the same answer.
        """
        as_json = (dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item for item in items)
        ids = list(map(json_sha256, as_json))
        answers = self._stored_answers(ids)
        left = {name: item for name, item in zip(ids, items, strict=True) if name not in answers}
        batches = itertools.batched(left, batch_items or self.run.microbatch_rows)
        with self.work.task(what, len(left)) as advance:
            for name, item in zip(ids, items, strict=True):
                if name not in answers:  # This is the first item of the next batch.
                    batch = next(batches)
                    new_answers = dict(zip(batch, answer_batch([left[new] for new in batch]), strict=True))
                    answers |= new_answers
                    if self.journal is not None and is_primary():
                        self.journal.append({"id": new, "answer": answer} for new, answer in new_answers.items())
                    advance(len(batch))
                yield item, answers[name]

    def completions[T](
        self,
        items: Sequence[T],
        request_of: Callable[[T], Request],
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        what: str,
    ) -> Iterator[tuple[T, dict[str, Any]]]:
        """Yield each item with its completion: `text`, number of `tokens`, `ended_by`. Reuse stored answers."""
        rows = self.run.microbatch_rows

        def answer(batch: Sequence[T]) -> list[dict[str, Any]]:
            done = generate(self.lm, list(map(request_of, batch)), sampling, stop=stop, batch_rows=rows)
            return [{"text": each.text, "tokens": len(each.tokens), "ended_by": each.ended_by} for each in done]

        return self.answers(items, answer, what=what, batch_items=rows * REQUESTS_PER_ROW)

    def _stored_answers(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the answers in the journal by item id, in every process."""
        if self.journal is None:
            return {}
        rows = self.journal.read({"id": str, "answer": object}) if is_primary() else []
        stored, answers = {row["id"]: row["answer"] for row in rows}, {}
        for group in itertools.batched(ids, DECISION_ITEMS):
            of_group = {name: stored[name] for name in group if name in stored}
            answers |= decide_on_primary(lambda of_group=of_group: of_group)
        return answers


def perplexity(loss: float) -> float:
    """Return exp(loss). If it is too large for a float64, because the model has diverged, return infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def text_sets(run: Run, suite: str) -> dict[str, PackedRows]:
    """Return the validation sets with text, by name. Raise `UserError` if there are none."""
    text = {name: rows for name, rows in run.data.valid.items() if isinstance(rows, PackedRows)}
    if not text:
        raise UserError(f"suite {suite!r}: no validation set is text; for synthetic tasks, use the suite 'exact_match'")
    return text


def require_plain_logits(run: Run, suite: str) -> None:
    """Raise `UserError` if the model rounds attention logits, because the suite would not round them."""
    if (bits := run.config.model.attention_logit_bits) is not None:
        raise UserError(
            f"model.attention_logit_bits={bits}: the suite {suite!r} would measure attention weights without this "
            "rounding; leave out the suite"
        )
