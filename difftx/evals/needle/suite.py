"""Suite `needle`: retrieval of magic numbers hidden in a long text (§3.4 of the Differential Transformer paper)."""
# Axes of arrays: L = prompt lengths, C = cases, D = depths

import re
from collections.abc import Sequence

import numpy as np

from difftx.evals.evaluation import Evaluation
from difftx.evals.needle.prompts import NeedleItem, NeedlePrompts
from difftx.evals.result import Heatmap, Number, Result
from difftx.evals.suite import Suite
from difftx.inference.generate import Request
from difftx.inference.sampling import GREEDY


def evaluate(evaluation: Evaluation) -> Result:
    """Ask for magic numbers and generate answers greedily. Accuracy is the share of numbers that an answer contains."""
    settings, prompts = evaluation.run.config.eval.needle, NeedlePrompts(evaluation.run)

    def request_of(item: NeedleItem) -> Request:
        return Request(prompt=prompts.prompt(item).tokens, new_tokens=settings.new_tokens, seed=0)

    answers = [
        (item, {"numbers": list(prompts.prompt(item).numbers), "answer": done["text"]})
        for item, done in evaluation.completions(prompts.items, request_of, GREEDY, what="needles")
    ]
    shape = len(prompts.lengths), len(prompts.cases), len(prompts.depths), settings.samples
    accuracy_LCD, lwm_accuracy_LCD = (
        np.reshape([rule(given["answer"], given["numbers"]) for _, given in answers], shape).mean(axis=-1)
        for rule in (share_found, lwm_share_found)
    )
    first = [(item, given) for item, given in answers if item.sample == 0]
    numbers = _numbers(prompts, accuracy_LCD, "") | _numbers(prompts, lwm_accuracy_LCD, "_lwm")
    return Result(
        numbers=numbers,
        details={
            "haystack_tokens": prompts.haystack_tokens,
            "samples_a_cell": settings.samples,
            "cells": [
                {"id": item.cell, "accuracy": accuracy}
                for (item, _), accuracy in zip(first, accuracy_LCD.ravel().tolist(), strict=True)
            ],
            "first_of_each_cell": [{"id": item.id, **given} for item, given in first],
        },
        charts=_charts(prompts, accuracy_LCD),
    )


def share_found(text: str, numbers: Sequence[str]) -> float:
    """Return the share of `numbers` that a text contains as whole numbers, not inside longer numbers."""
    there = set(re.findall(r"\d+", text))
    return sum(number in there for number in numbers) / len(numbers)


def lwm_share_found(text: str, numbers: Sequence[str]) -> float:
    """Return the share of `numbers` that a text contains, even inside longer numbers.

    This is the rule of LWM (github.com/LargeWorldModel/LWM, scripts/eval_needle_multi.py).
    """
    return sum(number in text for number in numbers) / len(numbers)


def _numbers(prompts: NeedlePrompts, accuracy_LCD: np.ndarray, suffix: str) -> dict[str, Number]:
    values = {f"accuracy{suffix}": np.mean(accuracy_LCD)}
    for case, mean_L in zip(prompts.cases, accuracy_LCD.mean(axis=2).T.tolist(), strict=True):
        for length, mean in zip(prompts.lengths, mean_L, strict=True):
            values[f"n{case.needles}_r{case.queries}_{length}{suffix}"] = mean
    # Needles have so many digits that one guess in millions is right.
    return {name: Number(value, "share", "higher", chance=0.0) for name, value in values.items()}


def _charts(prompts: NeedlePrompts, accuracy_LCD: np.ndarray) -> list[Heatmap]:
    def chart(name: str, title: str, y_label: str, y: list[str], values: np.ndarray) -> Heatmap:
        return Heatmap(
            name=name,
            title=title,
            x_label="tokens of prompt and answer",
            y_label=y_label,
            x=[f"{length:,}" for length in prompts.lengths],
            y=y,
            values=values.tolist(),
            value_label="accuracy",
            low=0.0,
            high=1.0,
        )

    mean_CL = accuracy_LCD.mean(axis=2).T
    cases = [f"N={case.needles}, R={case.queries}" for case in prompts.cases]
    charts = [chart("needle", "Numbers found, mean over depths", "needles N, asked for R", cases, mean_CL)]
    depths = [*(f"{100 * depth:g} %" for depth in prompts.depths), "mean"]
    for i, case in enumerate(prompts.cases):
        name = f"needle_n{case.needles}_r{case.queries}"
        title = f"Numbers found: {case.queries} of {case.needles} asked for"
        values = np.vstack([accuracy_LCD[:, i].T, mean_CL[i]])
        charts.append(chart(name, title, "depth of what is asked for", depths, values))
    return charts


SUITE = Suite(
    evaluate=evaluate,
    check=NeedlePrompts,
    title="Needles in a haystack",
    explanation="Share of numbers that the model retrieves from sentences hidden in a long text.",
    revision=1,
)
