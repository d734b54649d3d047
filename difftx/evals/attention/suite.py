"""Suite `attention`: attention weights of a prompt's last token (Table 3 of the Differential Transformer paper)."""
# Axes of arrays: B = prompts of a batch, T = tokens, C = queries per prompt, L = layers, N = bins of tokens, D = depths

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import reshard

from difftx.config.eval import NeedleCaseConfig
from difftx.data.synthetic import SyntheticRows, retrieval_with_positions
from difftx.errors import UserError
from difftx.evals.attention.charts import example_charts, layer_charts, part_table
from difftx.evals.attention.statistics import PARTS, UNSEEN, row_pictures, row_statistics
from difftx.evals.evaluation import Evaluation, require_plain_logits
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompt, NeedlePrompts
from difftx.evals.result import Better, Number, Result
from difftx.evals.suite import Suite
from difftx.inference import decode
from difftx.parallel.layout import Layout
from difftx.training.run import Run
from difftx.training.state import graph

MAX_BINS = 256  # Maximum number of columns in an attention map. For a longer prompt, each column sums several tokens.
# Measures of `row_statistics` that become `Result.numbers`, with unit, better direction and label. All other measures
# only appear in details and charts.
NUMBERS: dict[str, tuple[str, Better, str]] = {
    "answer": ("share", "higher", "weight on the answer"),
    "others": ("share", None, "weight on the other needles"),
    "noise": ("share", "lower", "weight on irrelevant text (noise)"),
    "question": ("share", None, "weight on the question"),
    "first": ("share", None, "weight on the first token"),
    "answer_signed": ("share", None, "weight on the answer, with its sign"),
    "noise_signed": ("share", None, "weight on noise, with its sign"),
    "first_signed": ("share", None, "weight on the first token, with its sign"),
    "first_a1": ("share", None, "weight of A1 on the first token"),
    "first_a2": ("share", None, "weight of A2 on the first token"),
    "gini": ("", None, "Gini coefficient of the weights (0: even)"),
    "entropy": ("nats", None, "entropy of the weights"),
    "l0": ("share", None, "tokens with a weight above the threshold"),
    "lambda": ("", None, "λ"),
    "cosine_answer": ("", None, "cosine of A1 and A2 on the answer"),
    "cosine_noise": ("", None, "cosine of A1 and A2 on noise"),
    "kl_answer": ("nats", None, "KL(A1 ‖ A2) on the answer"),
    "kl_noise": ("nats", None, "KL(A1 ‖ A2) on noise"),
    "cosine_answer_with_first": ("", None, "cosine of A1 and A2 on the answer and the first token"),
    "cosine_noise_with_first": ("", None, "cosine of A1 and A2 on noise and the first token"),
    "kl_answer_with_first": ("nats", None, "KL(A1 ‖ A2) on the answer and the first token"),
    "kl_noise_with_first": ("nats", None, "KL(A1 ‖ A2) on noise and the first token"),
}


class RetrievalPrompts:
    """Validation examples of the task `retrieval` as needle prompts, with the same number of examples at each depth.

    An example consists of pairs and distractors in random order, and ends with the key of the queried pair. The pairs
    are the needles. The example's depth is the relative position of the queried pair, rounded to the nearest of
    `depths`. `NeedleItem.sample` is the index of the example.
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
        """Return the token ids as text, because the tokens of a synthetic task have no text."""
        return " ".join(map(str, tokens))

    def _example(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        return retrieval_with_positions(self._settings, self._rows.sequence_length, self._rows.random(index))


def evaluate(evaluation: Evaluation) -> Result:
    """Measure the attention weights of the last token in every layer, for prompts at each of `eval.needle.depths`."""
    run, settings = evaluation.run, evaluation.run.config.eval.attention
    prompts, layers = prompts_of(run), chosen_layers(run)
    case, rows = prompts.items[0].case, decode.rows_for(run.microbatch_rows, run.mesh)
    example = prompts.prompt(prompts.items[len(prompts.depths) // 2 * settings.samples])
    # All prompts have as many tokens of a part as this one. Position 0 may be one of them, so require at least two.
    tokens_of = np.bincount(_parts(example), minlength=len(PARTS))
    compared = tuple(part for part in ("answer", "noise", "others") if tokens_of[PARTS.index(part)] > 1)
    # This layout does not shard tokens, so prompts may have any length.
    graphdef = graph(run.config, Layout.of(run.config.mesh.context_method).for_inference())

    def measure(items: Sequence[NeedleItem]) -> list[dict[str, list[float]]]:
        batch = _batch(evaluation, [prompts.prompt(item) for item in items], rows, 1)
        measures = _measure_rows(graphdef, evaluation.params, batch, l0_share=settings.l0_share, compared=compared)
        measures = {name: np.asarray(value_LB) for name, value_LB in measures.items()}
        return [{name: value_LB[:, row].tolist() for name, value_LB in measures.items()} for row in range(len(items))]

    by_prompt = [values for _, values in evaluation.answers(prompts.items, measure, what="prompts", batch_items=rows)]
    # Each depth has `settings.samples` adjacent items. The mean over depths is also the mean over all items.
    shape = len(prompts.depths), settings.samples, run.config.model.num_layers
    means = {name: np.reshape([values[name] for values in by_prompt], shape).mean(axis=1) for name in by_prompt[0]}
    by_layer = {name: np.mean(mean_DL, axis=0) for name, mean_DL in means.items()}
    by_depth = {name: np.mean(mean_DL[:, layers], axis=1) for name, mean_DL in means.items()}
    tokens_per_bin = -(-len(example.tokens) // MAX_BINS)
    bins, queries = -(-len(example.tokens) // tokens_per_bin), min(settings.shown_queries, len(example.tokens))
    batch = _batch(evaluation, [example], decode.rows_for(1, run.mesh), queries)
    pictures = _draw_rows(graphdef, evaluation.params, batch, tokens_per_bin=tokens_per_bin)
    # Weights of the example's last tokens, averaged over layers, each `[C, N]`.
    maps: dict[str, np.ndarray] = {
        name: np.mean(np.asarray(x)[layers, 0, :, :bins], axis=0, dtype=np.float64) for name, x in pictures.items()
    }
    # Weight of each part for a model that attends evenly to all tokens. The lengths of other prompts differ by at most
    # a few tokens, because only the words of their needles differ.
    shares = {part: tokens_of[number] / len(example.tokens) for number, part in enumerate(PARTS)}
    return Result(
        numbers={
            name: Number(np.mean(by_layer[name][layers]), *said, chance=shares.get(name))
            for name, said in NUMBERS.items()
            if name in means
        },
        details={
            "prompts_a_depth": settings.samples,
            "needles": case.needles,
            "asked_for": case.queries,
            "tokens": prompts.lengths[0],
            "layers": [layer + 1 for layer in layers],
            "l0_share": settings.l0_share,
            "by_depth": {
                f"{depth:g}": {name: float(mean_D[i]) for name, mean_D in by_depth.items()}
                for i, depth in enumerate(prompts.depths)
            },
            "by_layer": {name: values.tolist() for name, values in by_layer.items()},
            "example": example.item.id,
        },
        charts=[
            part_table(prompts.depths, by_depth),
            *example_charts(example, maps, tokens_per_bin, prompts.text_of),
            *layer_charts(by_layer, settings.l0_share),
        ],
    )


def prompts_of(run: Run) -> NeedlePrompts | RetrievalPrompts:
    """Return needle prompts with the length and the numbers of needles and queries in `eval.attention`.

    Return examples of the task `retrieval` instead if it is a validation set, all validation sets are synthetic, and
    `eval.needle.haystack` is None. Raise `UserError` if the prompts (without answers) are longer than a window of the
    model, or if the model rounds attention logits.
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
    """Return the 0-based indices of `eval.attention.layers` (by default all). Raise `UserError` if one is too large."""
    layers, count = run.config.eval.attention.layers, run.config.model.num_layers
    if layers and max(layers) > count:
        raise UserError(f"eval.attention.layers={layers}: the model has {count} layers; use 1 … {count}")
    return [layer - 1 for layer in layers] or list(range(count))


class _Batch(NamedTuple):
    """Prompts on the mesh, int32, padded to the longest one. Rows without a prompt only have UNSEEN tokens."""

    tokens_BT: jax.Array
    part_BT: jax.Array  # Indices into PARTS, or UNSEEN.
    queries_BC: jax.Array  # Positions of each prompt's last tokens, ascending.


def _batch(evaluation: Evaluation, prompts: Sequence[NeedlePrompt], rows: int, queries: int) -> _Batch:
    shape = rows, max(prompt.item.length for prompt in prompts)
    tokens_BT, part_BT = np.zeros(shape, np.int32), np.full(shape, UNSEEN, np.int32)
    queries_BC = np.zeros((rows, queries), np.int32)
    for row, prompt in enumerate(prompts):
        count = len(prompt.tokens)
        tokens_BT[row, :count], part_BT[row, :count] = prompt.tokens, _parts(prompt)
        queries_BC[row] = np.arange(count - queries, count)
    return _Batch(*(decode.put(evaluation.run.mesh, x) for x in (tokens_BT, part_BT, queries_BC)))


def _parts(prompt: NeedlePrompt) -> np.ndarray:
    """Return the index into PARTS of each token."""
    part_T = np.full(len(prompt.tokens), PARTS.index("noise"))
    for name, spans in (("answer", prompt.asked), ("others", prompt.others), ("question", [prompt.question])):
        for start, stop in spans:
            part_T[start:stop] = PARTS.index(name)
    return part_T


@functools.partial(jax.jit, static_argnames=("graphdef", "l0_share", "compared"))
def _measure_rows(
    graphdef: nnx.GraphDef, params: Any, batch: _Batch, *, l0_share: float, compared: tuple[str, ...]
) -> Mapping[str, jax.Array]:
    """Return the measures of `row_statistics` in every layer, each `[L, B]`."""
    visit = functools.partial(row_statistics, part_BS=batch.part_BT, l0_share=l0_share, compared=compared)
    measures = nnx.merge(graphdef, params).attention_rows(batch.tokens_BT, batch.queries_BC, visit)
    return reshard(measures, P())  # Replicate, so that each host can read all of it.


@functools.partial(jax.jit, static_argnames=("graphdef", "tokens_per_bin"))
def _draw_rows(graphdef: nnx.GraphDef, params: Any, batch: _Batch, *, tokens_per_bin: int) -> Mapping[str, jax.Array]:
    """Return the arrays of `row_pictures` in every layer, each `[L, B, C, N]`."""
    visit = functools.partial(row_pictures, tokens_per_bin=tokens_per_bin)
    pictures = nnx.merge(graphdef, params).attention_rows(batch.tokens_BT, batch.queries_BC, visit)
    return reshard(pictures, P())


SUITE = Suite(
    evaluate=evaluate,
    reads=("needle",),
    check=prompts_of,
    quantizable=False,
    revision=1,
    title="Attention weights",
    explanation="Where the last token of a prompt looks: at the requested answer, or at irrelevant text (noise). "
    "Differential attention is meant to move weight from noise to the answer. Chance is even attention to all tokens. "
    "A is the matrix of attention weights. A differential model has A = A1 − λ A2, with two softmax matrices and a "
    "learned factor λ, so its weights may be negative, and shares are those of |A|.",
    main_charts=("attention_layers: answer", "attention_layers: noise", "attention_layers"),
)
