"""Charts of the suite `attention`, including Table 3 and Figure 1 of the Differential Transformer paper."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from difftx.evals.attention.statistics import FIRST, PARTS
from difftx.evals.needle.prompts import NeedlePrompt
from difftx.evals.result import Heatmap, LineChart, Series

LABELS = {"answer": "answer", "others": "other needles", "noise": "noise", "question": "question", FIRST: "position 0"}
MAX_CHARACTERS = 24  # Maximum length of prompt text in an axis label.


def part_table(depths: Sequence[float], by_depth: Mapping[str, np.ndarray]) -> Heatmap:
    """Return Table 3 of the paper: the share of attention on each part of the prompt, by depth."""
    return Heatmap(
        name="attention_parts",
        title="Attention of the last token by depth (Table 3), |A| normalised to 1",
        x_label="depth of the answer",
        y_label="part of the prompt",
        x=[*(f"{100 * depth:g} %" for depth in depths), "mean"],
        y=[LABELS[part] for part in (*PARTS, FIRST)],
        values=[[*by_depth[part].tolist(), float(np.mean(by_depth[part]))] for part in (*PARTS, FIRST)],
        value_label="share",
        low=0.0,
        high=1.0,
    )


def example_charts(
    prompt: NeedlePrompt, maps: Mapping[str, np.ndarray], tokens_per_bin: int, text_of: Callable[[list[int]], str]
) -> list[LineChart | Heatmap]:
    """Return a chart of the last token's attention over the prompt (Figure 1 of the paper), and attention maps.

    `maps` has the keys of `row_pictures`. Its arrays `[queries, bins]` have the prompt's last tokens as queries, and
    one bin per `tokens_per_bin` tokens.
    """
    names, tokens = _map_names("a1" in maps), prompt.tokens
    by_bin = f", sums of {tokens_per_bin} tokens" if tokens_per_bin > 1 else ""
    starts = range(0, len(tokens), tokens_per_bin)

    def label(start: int, stop: int) -> str:
        text = text_of(tokens[start:stop])[:MAX_CHARACTERS]
        return f"{start}{f' … {stop - 1}' if stop > start + 1 else ''} {text!r}"

    # A1 − λ A2 may be negative, so draw its magnitudes, normalised to 1.
    rows = {title: maps["share" if name == "map" else name][-1] for name, title in names.items()}
    top = max(float(np.max(row_N)) for row_N in rows.values())
    lines = [Series(name=title, x=[float(i) for i in starts], y=row_N.tolist()) for title, row_N in rows.items()]
    spans = [
        Series(name="answer", x=[float(start), float(stop - 1)], y=[0.0, 0.0], low=[0.0, 0.0], high=[top, top])
        for start, stop in prompt.asked
    ]
    context = LineChart(
        name="attention_context",
        title=f"Attention of the last token over a prompt, |A| normalised to 1{by_bin}",
        x_label="position, tokens",
        y_label="share",
        series=[*lines, *spans],
    )
    where = " and ".join(f"{start} … {stop - 1}" for start, stop in prompt.asked)
    heatmaps = [
        Heatmap(
            name=f"attention_{name}",
            title=f"{title} of the last tokens; the answer is at {where}",
            x_label=f"context, tokens{by_bin}",
            y_label="query",
            x=[label(start, start + tokens_per_bin) for start in starts],
            y=[label(i, i + 1) for i in range(len(tokens) - len(maps[name]), len(tokens))],
            values=maps[name].tolist(),
            value_label="weight",
        )
        for name, title in names.items()
    ]
    return [context, *heatmaps]


def layer_charts(by_layer: Mapping[str, np.ndarray], l0_share: float) -> list[LineChart]:
    """Return a chart for each measure, with the layer on the x-axis."""
    is_pair = "lambda" in by_layer
    names = _map_names(is_pair)

    def chart(name: str, title: str, y_label: str, lines: Mapping[str, str], over_steps: bool = False) -> LineChart:
        layers = [float(layer + 1) for layer in range(len(by_layer["gini"]))]
        return LineChart(
            name=f"attention_{name}",
            title=title,
            x_label="layer",
            y_label=y_label,
            series=[Series(name=label, x=layers, y=by_layer[key].tolist()) for label, key in lines.items()],
            over_steps=over_steps,
        )

    def each_map(measure: str) -> dict[str, str]:
        return {label: measure if name == "map" else f"{measure}_{name}" for name, label in names.items()}

    parts = {LABELS[part]: part for part in PARTS}
    charts = [
        chart("layers", "Attention of the last token by layer, |A| normalised to 1", "share", parts),
        chart("position_0", "Attention to position 0, |A| normalised to 1", "share", each_map(FIRST)),
        chart("gini", "Gini coefficient of |A|: 0 even, 1 a single entry", "Gini coefficient", each_map("gini")),
        chart("entropy", "Entropy of |A| normalised to 1", "nats", each_map("entropy")),
        chart("l0", f"Entries above {l0_share:g} of a row's mass (pseudo-ℓ0)", "share of entries", each_map("l0")),
    ]
    if not is_pair:
        return charts
    for measure, title, unit in (("cosine", "Cosine of A1 and A2", "cosine"), ("kl", "KL(A1 ‖ A2)", "nats")):
        title += " within each part of the prompt"
        lines = {label: f"{measure}_{part}" for label, part in parts.items() if f"{measure}_{part}" in by_layer}
        with_first = {label: f"{key}_with_first" for label, key in lines.items()}
        charts.append(chart(measure, title, unit, lines, over_steps=True))
        charts.append(chart(f"{measure}_with_first", f"{title}, position 0 included", unit, with_first))
    return [*charts, chart("lambda", "λ by layer", "λ", {"λ": "lambda"})]


def _map_names(is_pair: bool) -> dict[str, str]:
    return {"map": "A1 − λ A2", "a1": "A1", "a2": "A2"} if is_pair else {"map": "A"}
