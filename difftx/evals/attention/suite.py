"""Suite `attention`: the attention weights of the last token of a needle prompt (arXiv 2410.05258, Table 3, Figure 1).

The suite also measures the similarity of A1 and A2, and the sparsity of the attention weights. `statistics.py` and
docs/suites.md define all measures.
"""
#   B = prompts of a batch, T = tokens, C = queries, L = layers, N = bins of tokens

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import P
from jax.sharding import reshard

from difftx.config import Config
from difftx.config.eval import NeedleCaseConfig
from difftx.data.synthetic import SyntheticRows
from difftx.errors import UserError
from difftx.evals.attention.charts import Example, example_charts, layer_charts, part_table
from difftx.evals.attention.retrieval import RetrievalPrompts
from difftx.evals.attention.statistics import PARTS, UNSEEN, row_pictures, row_statistics
from difftx.evals.evaluation import Evaluation
from difftx.evals.needle.haystack import haystack_files
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompt, NeedlePrompts
from difftx.evals.result import Result
from difftx.evals.resume import resumable
from difftx.evals.suite import Suite
from difftx.inference import decode
from difftx.parallel.layout import Layout
from difftx.training.run import Run
from difftx.training.state import graph

MOST_BINS = 256  # Largest number of columns of an attention map; columns of longer prompts sum several tokens.
# The measures of `row_statistics` that become `Result.numbers`. Details and charts contain the remaining measures.
NAMES = """
answer others noise question first answer_signed noise_signed first_signed first_a1 first_a2 gini entropy l0 lambda
cosine_answer cosine_noise kl_answer kl_noise
cosine_answer_with_first cosine_noise_with_first kl_answer_with_first kl_noise_with_first
"""
NUMBERS = tuple(NAMES.split())


def evaluate(evaluation: Evaluation) -> Result:
    """Measure the attention weights of the last token in every layer, for prompts at each of `eval.needle.depths`.

    Numbers are means over prompts, heads and `eval.attention.layers`. Details and charts also have values per layer.

    Raises:
        UserError: a length exceeds the context, the model lacks a layer, or there is no text to hide needles in.
    """
    run, settings = evaluation.run, evaluation.run.config.eval.attention
    prompts, layers = prompts_of(run), chosen_layers(run)
    rows = decode.rows_for(run.microbatch_rows, run.mesh)
    measure = functools.partial(_statistics, evaluation, prompts, rows)
    of_depth: dict[float, list[dict[str, list[float]]]] = collections.defaultdict(list)
    for item, found in resumable(evaluation, prompts.items, measure, what="prompts", batch_items=rows):
        of_depth[item.depth].append(found)
    # Maps names to arrays [depth, layer]. Every depth has the same number of prompts, so means of means are exact.
    names = next(iter(of_depth.values()))[0]
    means = {
        name: np.array([np.mean([f[name] for f in found], axis=0) for found in of_depth.values()]) for name in names
    }
    by_layer = {name: np.mean(mean_DL, axis=0) for name, mean_DL in means.items()}
    by_depth = {name: np.mean(mean_DL[:, layers], axis=1) for name, mean_DL in means.items()}
    example = _example(evaluation, prompts, layers)
    return Result(
        numbers={name: float(np.mean(by_layer[name][layers])) for name in NUMBERS if name in names},
        details={
            "prompts_a_depth": settings.samples,
            "needles": prompts.items[0].case.needles,
            "asked_for": prompts.items[0].case.queries,
            "tokens": prompts.lengths[0],
            "layers": [layer + 1 for layer in layers],
            "l0_share": settings.l0_share,
            "by_depth": {
                f"{depth:g}": {n: float(v[i]) for n, v in by_depth.items()} for i, depth in enumerate(of_depth)
            },
            "by_layer": {name: values.tolist() for name, values in by_layer.items()},
            "example": example.prompt.item.id,
        },
        charts=[
            part_table(list(of_depth), by_depth),
            *example_charts(example),
            *layer_charts(by_layer, settings.l0_share),
        ],
    )


type Prompts = NeedlePrompts | RetrievalPrompts


def prompts_of(run: Run) -> Prompts:
    """Return the prompts that suite `needle` makes with the case and the length of `eval.attention`.

    If all validation sets are synthetic, one of them is the task `retrieval`, and `eval.needle.haystack` is None, the
    prompts are examples of that task.

    Raises:
        UserError: the prompts do not fit the context, there is no text, or the model lacks a chosen layer.
    """
    chosen_layers(run)
    settings, needle = run.config.eval.attention, run.config.eval.needle
    tasks = [rows for rows in run.data.valid.values() if isinstance(rows, SyntheticRows)]
    retrieval = [rows for rows in tasks if rows.task == "retrieval"]
    if retrieval and needle.haystack is None and len(tasks) == len(run.data.valid):
        return RetrievalPrompts(run, retrieval[0])
    return NeedlePrompts(
        run,
        dataclasses.replace(
            needle,
            cases=(NeedleCaseConfig(needles=settings.needles, queries=settings.queries),),
            lengths=() if settings.length is None else (settings.length,),
            samples=settings.samples,
        ),
        length_field="eval.attention.length",
        case_field="eval.attention.needles",
    )


def chosen_layers(run: Run) -> list[int]:
    """Return the indices, from 0, of the layers to average over.

    Raises:
        UserError: `eval.attention.layers` names a layer that the model does not have.
    """
    layers, count = run.config.eval.attention.layers, run.config.model.num_layers
    if layers and max(layers) > count:
        raise UserError(f"eval.attention.layers={layers}: the model has {count} layers; use 1 … {count}")
    return [layer - 1 for layer in layers] or list(range(count))


class _Batch(NamedTuple):
    """Prompts on the mesh, int32, padded to the longest prompt; all tokens of rows without a prompt are UNSEEN."""

    tokens_BT: jax.Array
    part_BT: jax.Array  # Indices into PARTS, or UNSEEN.
    queries_BC: jax.Array  # Positions of each prompt's last tokens, ascending.


def _batch(evaluation: Evaluation, prompts: Sequence[NeedlePrompt], rows: int, queries: int) -> _Batch:
    shape = rows, max(prompt.item.length for prompt in prompts)
    tokens_BT, part_BT = np.zeros(shape, np.int32), np.full(shape, UNSEEN, np.int32)
    queries_BC = np.zeros((rows, queries), np.int32)
    for row, prompt in enumerate(prompts):
        count = len(prompt.tokens)
        tokens_BT[row, :count], part_BT[row, :count] = prompt.tokens, PARTS.index("noise")
        for name, spans in (("answer", prompt.asked), ("others", prompt.others), ("question", [prompt.question])):
            for start, stop in spans:
                part_BT[row, start:stop] = PARTS.index(name)
        queries_BC[row] = np.arange(count - queries, count)
    return _Batch(*(decode.put(evaluation.run.mesh, x) for x in (tokens_BT, part_BT, queries_BC)))


def _statistics(
    evaluation: Evaluation, prompts: Prompts, rows: int, items: Sequence[NeedleItem]
) -> list[dict[str, list[float]]]:
    """Return each item's measures by name, with one number per layer."""
    batch = _batch(evaluation, [prompts.prompt(item) for item in items], rows, 1)
    case = items[0].case
    compared = ("answer", "noise", "others") if case.needles > case.queries else ("answer", "noise")
    config = evaluation.run.config
    l0_share = config.eval.attention.l0_share
    found = _measure_rows(_graph(config), evaluation.params, batch, l0_share=l0_share, compared=compared)
    found = {name: np.asarray(value_LB) for name, value_LB in found.items()}
    return [{name: value_LB[:, row].tolist() for name, value_LB in found.items()} for row in range(len(items))]


def _example(evaluation: Evaluation, prompts: Prompts, layers: Sequence[int]) -> Example:
    """Return the attention maps of the first prompt of the middle depth."""
    run, depth = evaluation.run, prompts.depths[len(prompts.depths) // 2]
    prompt = prompts.prompt(next(item for item in prompts.items if item.depth == depth))
    queries = min(run.config.eval.attention.shown_queries, len(prompt.tokens))
    tokens_a_bin = -(-len(prompt.tokens) // MOST_BINS)
    bins = -(-len(prompt.tokens) // tokens_a_bin)
    batch = _batch(evaluation, [prompt], decode.rows_for(1, run.mesh), queries)
    found = _draw_rows(_graph(run.config), evaluation.params, batch, tokens_a_bin=tokens_a_bin)
    return Example(
        prompt=prompt,
        tokens_a_bin=tokens_a_bin,
        maps={name: np.mean(np.asarray(x)[layers, 0, :, :bins], axis=0, dtype=np.float64) for name, x in found.items()},
        text_of=prompts.text_of,
    )


@functools.cache
def _graph(config: Config) -> nnx.GraphDef:
    """Return the graph with a layout that does not shard tokens, so that prompts may have any length."""
    return graph(config, Layout.of(config.mesh.context_method).for_inference())


@functools.partial(jax.jit, static_argnames=("graphdef", "l0_share", "compared"))
def _measure_rows(
    graphdef: nnx.GraphDef, params: Any, batch: _Batch, *, l0_share: float, compared: tuple[str, ...]
) -> Mapping[str, jax.Array]:
    """Return `row_statistics` in every layer, `[L, B]` each."""
    visit = functools.partial(row_statistics, part_BS=batch.part_BT, l0_share=l0_share, compared=compared)
    _, found = nnx.merge(graphdef, params).attention_rows(batch.tokens_BT, batch.queries_BC, visit)
    return reshard(found, P())  # Replicated, so that each host can read all of it.


@functools.partial(jax.jit, static_argnames=("graphdef", "tokens_a_bin"))
def _draw_rows(graphdef: nnx.GraphDef, params: Any, batch: _Batch, *, tokens_a_bin: int) -> Mapping[str, jax.Array]:
    """Return `row_pictures` in every layer, `[L, B, C, N]` each."""
    visit = functools.partial(row_pictures, tokens_a_bin=tokens_a_bin)
    _, found = nnx.merge(graphdef, params).attention_rows(batch.tokens_BT, batch.queries_BC, visit)
    return reshard(found, P())


SUITE = Suite(
    evaluate=evaluate, reads=("attention", "needle"), check=prompts_of, files=haystack_files, quantizable=False
)
