"""Suite `needle`: retrieval of magic numbers hidden in a long text (arXiv 2410.05258, §3.4, Table 2, Figure 5)."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from difftx.config.eval import NeedleCaseConfig
from difftx.evals.evaluation import Evaluation
from difftx.evals.needle.haystack import haystack_files
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompts
from difftx.evals.result import Heatmap, Result
from difftx.evals.resume import resumable
from difftx.evals.suite import Suite
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY

type Cell = tuple[NeedleCaseConfig, int, float]  # case, length, depth


def evaluate(evaluation: Evaluation) -> Result:
    """Ask for the magic numbers and generate greedily; accuracy is the share of numbers that the answer contains.

    A cell is a case, length and depth; its accuracy is the mean over `eval.needle.samples` prompts. A result such as
    `n4_r2_4096` is the mean over all depths for 4 needles, 2 of them asked for, in 4,096 tokens. Results that end with
    `_lwm` use LWM's rule (`lwm_share_found`).

    Raises:
        UserError: a length exceeds the context or does not hold a case, or there is no text to hide needles in.
    """
    run, settings = evaluation.run, evaluation.run.config.eval.needle
    prompts = NeedlePrompts(run)

    def answer(items: Sequence[NeedleItem]) -> list[dict[str, Any]]:
        made = [prompts.prompt(item) for item in items]
        requests = [Request(prompt=prompt.tokens, new_tokens=settings.new_tokens, seed=0) for prompt in made]
        completions = generate(evaluation.lm, requests, GREEDY)
        return [
            {"numbers": list(prompt.numbers), "answer": completion.text}
            for prompt, completion in zip(made, completions, strict=True)
        ]

    shares: dict[Cell, list[float]] = collections.defaultdict(list)
    lwm_shares: dict[Cell, list[float]] = collections.defaultdict(list)
    first = []
    rows = run.microbatch_rows
    for item, given in resumable(evaluation, prompts.items, answer, what="needles", batch_items=rows):
        cell = item.case, item.length, item.depth
        shares[cell].append(share_found(given["answer"], given["numbers"]))
        lwm_shares[cell].append(lwm_share_found(given["answer"], given["numbers"]))
        if item.sample == 0:
            first.append({"id": item.id, **given})
    accuracy = {cell: float(np.mean(found)) for cell, found in shares.items()}
    lwm_accuracy = {cell: float(np.mean(found)) for cell, found in lwm_shares.items()}
    return Result(
        numbers=_numbers(prompts, accuracy, "") | _numbers(prompts, lwm_accuracy, "_lwm"),
        details={
            "haystack_tokens": prompts.haystack_tokens,
            "samples_a_cell": settings.samples,
            "cells": [{"id": NeedleItem(n, case, d, 0).cell, "accuracy": a} for (case, n, d), a in accuracy.items()],
            "first_of_each_cell": first,
        },
        charts=_charts(prompts, accuracy),
    )


def share_found(text: str, numbers: Sequence[str]) -> float:
    """Return the share of `numbers` that a text contains as whole numbers, not as parts of longer ones."""
    there = set(re.findall(r"\d+", text))
    return sum(number in there for number in numbers) / len(numbers)


def lwm_share_found(text: str, numbers: Sequence[str]) -> float:
    """Return the share of `numbers` that a text contains, also as parts of longer numbers.

    This is LWM's rule (github.com/LargeWorldModel/LWM, scripts/eval_needle_multi.py: `number in answer`).
    """
    return sum(number in text for number in numbers) / len(numbers)


def _numbers(prompts: NeedlePrompts, accuracy: Mapping[Cell, float], suffix: str) -> dict[str, float]:
    return {f"accuracy{suffix}": float(np.mean(list(accuracy.values())))} | {
        f"n{case.needles}_r{case.queries}_{length}{suffix}": _over_depths(prompts, accuracy, case, length)
        for case in prompts.cases
        for length in prompts.lengths
    }


def _charts(prompts: NeedlePrompts, accuracy: Mapping[Cell, float]) -> list[Heatmap]:
    """Return Table 2, and Figure 5 for each case."""
    lengths = prompts.lengths
    means = [[_over_depths(prompts, accuracy, case, length) for length in lengths] for case in prompts.cases]

    def chart(name: str, title: str, y_label: str, y: list[str], values: list[list[float]]) -> Heatmap:
        return Heatmap(
            name=name,
            title=title,
            x_label="tokens of prompt and answer",
            y_label=y_label,
            x=[f"{length:,}" for length in lengths],
            y=y,
            values=values,
            value_label="accuracy",
            low=0.0,
            high=1.0,
        )

    cases = [f"N={case.needles}, R={case.queries}" for case in prompts.cases]
    charts = [chart("needle", "Numbers found, mean over depths", "needles N, asked for R", cases, means)]
    for case, mean in zip(prompts.cases, means, strict=True):
        name = f"needle_n{case.needles}_r{case.queries}"
        title = f"Numbers found: {case.queries} of {case.needles} asked for"
        by_depth = [[accuracy[case, length, depth] for length in lengths] for depth in prompts.depths]
        depths = [*(f"{100 * depth:g} %" for depth in prompts.depths), "mean"]
        charts.append(chart(name, title, "depth of what is asked for", depths, [*by_depth, mean]))
    return charts


def _over_depths(prompts: NeedlePrompts, accuracy: Mapping[Cell, float], case: NeedleCaseConfig, length: int) -> float:
    return float(np.mean([accuracy[case, length, depth] for depth in prompts.depths]))


SUITE = Suite(evaluate=evaluate, reads=("needle",), check=NeedlePrompts, files=haystack_files)
