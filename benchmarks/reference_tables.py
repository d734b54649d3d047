"""Generated tables of docs/suites.md (numbers of each suite) and docs/files.md (rows of metrics.jsonl).

    python benchmarks/reference_tables.py

The names of numbers are those that tests/golden/golden.json records. Parts of a name that depend on settings stand in
angle brackets.
Units and directions come from difftx/evals/measures.py, and the fields of rows from difftx/training/metrics.py.
"""

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from difftx.config.suites import SUITES
from difftx.evals.measures import measure_of
from difftx.evals.result import Measure
from difftx.training.metrics import ROW_FIELDS, SPLIT_FIELDS

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "golden.json"
END = "<!-- to here -->"
# Suite → {pattern in a number's name: placeholder in the table}. Settings decide the parts that match.
SETTINGS = {
    "harness": {r"(arc_challenge|arc_easy|boolq|hellaswag|openbookqa|piqa|winogrande)_": "<task>_"},
    "math": {"gsm8k_": "<set>_"},
    "needle": {r"n\d+_r\d+_\d+": "n<needles>_r<requested>_<length>"},
    "icl": {"trec_": "<task>_", "(random|alternating)_": "<order>_"},
    "hallucination": {"(news|qa|question_answering|summarisation)_": "<set or kind>_", "by_.*": "by_<judge>"},
    "outliers": {r"top_\d+": "top_<rank>"},
    "gradients": {r"(checkpoint|initial_(as_configured|counterpart|no_scale_no_norm|no_scale|no_norm))_": "<model>_"},
}
# Suites that run other suites → form of their numbers, which have the units of those suites.
WRAPPERS = {
    "test": "`<suite>_<number>`",
    "quantize": "`<suite>_<number>_<bits>_bits`",
    "cache": "`<suite>_<number>_<compression>`, `bytes_per_token_<compression>`",
}
# Numbers that golden.json does not record, because they depend on the speed of the machine.
MEASURED = {
    "throughput": [
        f"{part}_{number}"
        for part in ("forward", "forward_backward")
        for number in (
            "diff_tokens_per_second",
            "transformer_tokens_per_second",
            "throughput_drop_percent",
            "time_rise_percent",
        )
    ]
}
TYPES: dict[Any, str] = {int: "integer", float: "number", str: "text", types.NoneType: "null"}


def suites_table() -> str:
    """Return a table with a row for each suite and unit of its numbers."""
    lines = ["| suite | numbers | unit | better |", "|---|---|---|---|"]
    golden = json.loads(GOLDEN.read_text())["values"]
    for suite in SUITES:
        if suite in WRAPPERS:
            lines.append(f"| `{suite}` | {WRAPPERS[suite]} | as in that suite | as in that suite |")
            continue
        found = [re.fullmatch(rf"\w+/{suite}/numbers/(.+)", path) for path in golden]
        measures: dict[str, Measure] = {}
        for number in MEASURED.get(suite) or [match[1] for match in found if match]:
            shown = number
            for pattern, text in SETTINGS.get(suite, {}).items():
                shown = re.sub(rf"^{pattern}" if text.endswith("_") else pattern, text, shown)
            measures.setdefault(shown, measure_of(number))
        assert measures, f"no number of the suite {suite} is recorded"
        for measure in dict.fromkeys(measures.values()):
            names = ", ".join(f"`{name}`" for name in measures if measures[name] == measure)
            lines.append(f"| `{suite}` | {names} | {measure.unit} | {measure.better or ''} |")
    return "\n".join(lines)


def rows_table() -> str:
    """Return a table with the fields that every row of metrics.jsonl has, by split."""
    lines = ["| `split` | field | type |", "|---|---|---|"]
    fields_of = {"every split": ROW_FIELDS, **{f"`{name}`": fields for name, fields in SPLIT_FIELDS.items()}}
    for split, fields in fields_of.items():
        for name, kind in fields.items():
            kinds = dict.fromkeys(TYPES[part] for part in getattr(kind, "__args__", (kind,)))
            shown = [text for text in kinds if not (text == "integer" and "number" in kinds)]
            lines.append(f"| {split} | `{name}` | {' or '.join(shown)} |")
    return "\n".join(lines)


TABLES = {"suites": suites_table, "files": rows_table}


def with_table(page: str) -> tuple[Path, str]:
    """Return the path of a page of docs/, and its text with a new table between the markers."""
    path = ROOT / "docs" / f"{page}.md"
    begin = "<!-- benchmarks/reference_tables.py writes from here -->"
    before, found, rest = path.read_text().partition(begin)
    if not found:
        raise ValueError(f"{path} has no line {begin}")
    return path, f"{before}{begin}\n\n{TABLES[page]()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in TABLES:
        file, content = with_table(name)
        file.write_text(content)
