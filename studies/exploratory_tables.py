"""Tables and values of docs/exploratory.md, made from the records that studies/results.py collects.

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`. Functions whose
names end in `_table` return Markdown, and those whose names end in `_text` return a value for a sentence. Each takes
the records of a study first.

Results on the tasks in `BIMODAL_TASKS` have two modes, solved or not. For these tasks the tables show the value of each
seed and the number of solved runs, because a mean over both modes would describe no run.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from studies.study_records import (
    BIMODAL_TASKS,
    CACHE_SIZE_PREFIX,
    REFERENCE,
    TEST_LOSS,
    WHOLE_CACHE,
    Estimate,
    Record,
    cache_names,
    differences_within_runs,
    estimate,
    estimates_by_rate,
    has_solved,
    markdown,
    numbers_by_seed,
    provenance,
    signed,
    solved_text,
)


class Column(NamedTuple):
    """A column of a table of arms."""

    title: str
    number: str  # Name of a number in `Record["numbers"]`.
    minus_reference: bool = False  # Whether the Transformer's number for the same seed is subtracted.


# (arm, reference, difference between their models).
CONTRASTS = (
    ("diff", "transformer", "the whole architecture"),
    ("transformer-8x256-norm", "transformer-8x256", "head norm, in the Transformer with wide heads"),
    ("diff", "diff-no_norm", "head norm, in the differential model"),
    ("diff", "transformer-8x256-norm", "subtraction, with head norm"),
    ("diff-no_norm", "transformer-8x256", "subtraction, without head norm"),
    ("transformer-8x256", "transformer", "heads half as many and twice as wide"),
    ("diff-no_norm", "transformer", "subtraction and wide heads, without head norm"),
    ("diff_v2", "transformer", "Differential Transformer V2"),
    ("diff_v2", "transformer-8x256", "V2, compared with wide heads"),
)
RECALL = (
    Column("accuracy, one key asked for", "exact_match/retrieval"),
    Column("accuracy, all keys", "exact_match/mqar"),
    Column("loss, nats", "loss/loss"),
)
BOOKS = (
    Column("bits per byte", "loss/bits_per_byte"),
    Column("more than transformer", "loss/bits_per_byte", minus_reference=True),
    Column("AR-Hit, nats", "recall/ar_hit_loss"),
    Column("Others, nats", "recall/others_loss"),
)
TASK_COLUMNS = {
    "novels": (Column("bits per byte of the test text", TEST_LOSS),),
    "books": BOOKS,
    "books-0.8m": BOOKS,
    "recall": RECALL,
    "recall-easy": RECALL,
}
INSIDE_COLUMNS = {
    "books": (
        Column("largest logit", "outliers/logits_top_1"),
        Column("median logit", "outliers/logits_median"),
        Column("largest hidden state", "outliers/hidden_top_1"),
        Column("median", "outliers/hidden_median"),
        Column("λ, layer 1", "lambda/1"),
        Column("λ, layer 2", "lambda/2"),
    ),
    "recall": (
        Column("attention to the answer", "attention/answer"),
        Column("to other pairs", "attention/others"),
        Column("to distractors", "attention/noise"),
        Column("Gini", "attention/gini"),
        Column("λ, layer 1", "lambda/1"),
        Column("λ, layer 2", "lambda/2"),
    ),
}
# Task → numbers whose means the command `compare` checks. For tasks in `BIMODAL_TASKS` it checks which runs are solved.
COMPARED = {
    task: [column.number for column in columns if not column.minus_reference]
    for task, columns in TASK_COLUMNS.items()
    if task not in BIMODAL_TASKS
}


def differences_between_arms(
    records: Sequence[Record], task: str, arm: str, reference: str, number: str
) -> list[float]:
    """Return the arm's number minus the reference's for each seed that both have, in the order of the seeds.

    Runs with the same seed see the data in the same order.
    """
    own, other = (numbers_by_seed(records, task, name, number) for name in (arm, reference))
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def difference_in_differences_text(
    records: Sequence[Record], task: str, arm: str, reference: str, number: str, reference_number: str
) -> str:
    """Return `number` − `reference_number` of an arm's runs minus the same difference of the reference arm's runs.

    It is a mean over seeds with its interval, with four decimals, because the values are small.
    """
    own, other = (differences_within_runs(records, task, name, number, reference_number) for name in (arm, reference))
    found = estimate([a - b for a, b in zip(own, other, strict=True)])
    return f"{found.mean:+.4f} ± {found.half_width:.4f}"


def difference_text(records: Sequence[Record], task: str, arm: str, number: str, reference: str = REFERENCE) -> str:
    """Return the mean over seeds of an arm's number minus the reference's, with sign and interval."""
    return signed(estimate(differences_between_arms(records, task, arm, reference, number)))


def contrasts_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a table of `CONTRASTS`: the difference for each seed, their mean and interval."""
    rows = []
    for arm, reference, what in CONTRASTS:
        values = differences_between_arms(records, task, arm, reference, number)
        found = estimate(values)
        holds_zero = found.half_width is None or abs(found.mean) <= found.half_width
        each = ", ".join(signed(Estimate(value, None)) for value in values)
        rows.append([f"{arm} − {reference}", what, each, signed(found), "yes" if holds_zero else "no"])
    return markdown(["contrast", "what differs", "each seed", "mean", "zero in the interval"], rows)


def modes_text(records: Sequence[Record], task: str, number: str) -> str:
    """Return the gap in a number between the runs that have solved the task and those that have not.

    The runs that have solved the task have the larger numbers.
    """
    chosen = [r for r in records if r["task"] == task]
    most = max(r["numbers"][number] for r in chosen if not has_solved(r))
    least = min(r["numbers"][number] for r in chosen if has_solved(r))
    return f"at most {most:.3f} in the runs that did not solve the task and at least {least:.3f} in those that did"


def seeds_text(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's number for each seed, in the order of the seeds."""
    found = numbers_by_seed(records, task, arm, number)
    return ", ".join(str(Estimate(found[seed], None)) for seed in sorted(found))


def rates_text(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's mean number and its interval at each learning rate, such as "2.310 ± 0.004 at 0.008"."""
    return ", ".join(f"{value} at {rate:g}" for rate, value in estimates_by_rate(records, task, arm, number).items())


def at_rate_text(records: Sequence[Record], task: str, arm: str, number: str, rate: str) -> str:
    """Return the mean and the interval of an arm's number at a learning rate."""
    return str(estimates_by_rate(records, task, arm, number)[float(rate)])


def best_rate_text(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return the learning rate at which the mean of an arm's number is smallest."""
    found = estimates_by_rate(records, task, arm, number)
    return f"{min(found, key=lambda rate: found[rate].mean):g}"


def best_difference_text(records: Sequence[Record], task: str, number: str, row: str, reference: str) -> str:
    """Return the difference between two rows of `rates_table`, each at its best learning rate.

    Args:
        records: Records of one seed.
        task: Task of both rows.
        number: Name of the number to compare; smaller is better.
        row: Arm and changes of the first row, such as "diff,optimizer.warmup_steps=5".
        reference: Arm and changes of the row that is subtracted.
    """
    best: dict[str, float] = {}
    for r in records:
        if r["task"] == task:
            name = _row_name(r).replace(" ", "")
            best[name] = min(best.get(name, math.inf), r["numbers"][number])
    return signed(Estimate(best[row] - best[reference], None))


def arms_table(records: Sequence[Record], task: str, columns: Sequence[Column], *, with_runs: bool) -> str:
    """Return a table with a row for each arm: means over seeds, or the value of each seed for tasks in `BIMODAL_TASKS`.

    `with_runs`: also show parameters, learning rate, solved runs and provenance, as in the first table of a study.
    """
    records = [r for r in records if r["task"] == task]
    counts_solved = with_runs and task in BIMODAL_TASKS
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        run = next(r for r in records if r["arm"] == arm)
        cells = [f"{run['parameters']:,}", f"{run['learning_rate']:g}"] if with_runs else []
        cells += [solved_text(records, task, arm)] if counts_solved else []
        rows.append([arm, *cells, *(_arm_cell(records, task, arm, column) for column in columns)])
    header = ["arm"]
    header += ["parameters", "rate"] if with_runs else []
    header += ["solved"] if counts_solved else []
    table = markdown([*header, *(column.title for column in columns)], rows)
    return table + provenance(records) if with_runs else table


def _arm_cell(records: Sequence[Record], task: str, arm: str, column: Column) -> str:
    """Return the text of an arm's cell in `arms_table`, empty if no run of the arm has the column's number."""
    if task in BIMODAL_TASKS:
        return seeds_text(records, task, arm, column.number)
    if not numbers_by_seed(records, task, arm, column.number) or (column.minus_reference and arm == REFERENCE):
        return ""
    if column.minus_reference:
        return difference_text(records, task, arm, column.number)
    return mean_text(records, task, arm, column.number)


def rates_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a table with a row for each arm and change and a column for each learning rate; the best is in bold."""
    best = max if number.startswith("exact_match/") else min
    rows: dict[str, dict[float, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    chosen = [r for r in records if r["task"] == task]
    for r in chosen:
        rows[_row_name(r)][r["learning_rate"]].append(r["numbers"][number])
    rates = sorted({r["learning_rate"] for r in chosen})
    cells = []
    for name, found in rows.items():
        means = {rate: estimate(values) for rate, values in found.items()}
        best_mean = best(means.values(), key=lambda value: value.mean)
        shown = {rate: f"**{value}**" if value == best_mean else str(value) for rate, value in means.items()}
        cells.append([name, *(shown.get(rate, "") for rate in rates)])
    return markdown(["", *(f"{rate:g}" for rate in rates)], cells) + provenance(chosen)


def _row_name(record: Record) -> str:
    """Return the name of a record's row: the arm and its changes, except the learning rate."""
    changes = [
        f"{name.removeprefix('model.')}={value}"
        for name, value in record["changes"].items()
        if name != "optimizer.learning_rate"
    ]
    return ", ".join([record["arm"], *changes])


def growth_table(records: Sequence[Record], task: str, number: str, *arms: str) -> str:
    """Return a table with a row for each model size and length of training.

    A row has the Transformer's number and the differences of other arms from it. Each arm uses its best learning rate,
    chosen on the lowest seed.

    Args:
        records: Records of all sizes.
        task: Beginning of the tasks' names; sizes of books are the tasks books and books-0.8m.
        number: Name of the number; smaller is better.
        arms: Arms besides the Transformer.
    """
    records = [r for r in records if r["arm"] in (REFERENCE, *arms) and r["task"].startswith(task)]
    rows = []
    for name, tokens in dict.fromkeys((r["task"], r["tokens"]) for r in records):
        trained = [r for r in records if (r["task"], r["tokens"]) == (name, tokens)]
        rates = {
            arm: _best_rate_of_lowest_seed([r for r in trained if r["arm"] == arm], number)
            for arm in (REFERENCE, *arms)
        }
        best = [r for r in trained if r["learning_rate"] == rates[r["arm"]]]
        reference = numbers_by_seed(best, name, REFERENCE, number)
        size = next(r["parameters"] for r in best if r["arm"] == REFERENCE)
        cells = [
            f"{difference_text(best, name, arm, number)} ({rates[arm]:g})" if rates[arm] is not None else ""
            for arm in arms
        ]
        reference_cell = f"{estimate(list(reference.values()))} ({rates[REFERENCE]:g})"
        rows.append((size, tokens, [f"{size:,}", f"{tokens:,}", reference_cell, *cells]))
    rows.sort(key=lambda row: row[:2])
    header = ["parameters", "tokens", REFERENCE, *(f"{arm}, more" for arm in arms)]
    return markdown(header, [cells for _, _, cells in rows]) + provenance(records)


def _best_rate_of_lowest_seed(records: Sequence[Record], number: str) -> float | None:
    """Return the learning rate of the lowest seed's smallest number, or None without records."""
    lowest = min((r["seed"] for r in records), default=None)
    tried = {r["learning_rate"]: r["numbers"][number] for r in records if r["seed"] == lowest}
    return min(tried, key=tried.__getitem__) if tried else None


def caches_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a table with a row for each cache of the suite `cache`, and a column of each arm's number with it.

    Below them are rows of the suite `quantize`, without a cache. All cells but those of the whole cache are differences
    from the same runs without compression. The last column compares the differences of the two arms.
    """
    records = [r for r in records if r["task"] == task]
    reference, own = dict.fromkeys(r["arm"] for r in records)

    def difference_cells(compressed: str, uncompressed: str) -> list[str]:
        """Return both arms' differences of two numbers, and by how much the second arm's difference is larger."""
        found = (differences_within_runs(records, task, arm, compressed, uncompressed) for arm in (reference, own))
        last = difference_in_differences_text(records, task, own, reference, compressed, uncompressed)
        return [*(signed(estimate(values)) for values in found), last]

    whole = f"cache/{number}_{WHOLE_CACHE}"
    rows = []
    for name in cache_names(records, task):
        size = " or ".join(dict.fromkeys(f"{r['numbers'][CACHE_SIZE_PREFIX + name]:g}" for r in records))
        if name == WHOLE_CACHE:
            means = [*(mean_text(records, task, arm, whole) for arm in (reference, own)), ""]
        else:
            means = difference_cells(f"cache/{number}_{name}", whole)
        rows.append([name.replace("_", " "), size, *means])
    for bits in (8, 4):
        quantized = f"quantize/{number}_{bits}_bits"
        if quantized in records[0]["numbers"]:
            cells = difference_cells(quantized, f"quantize/{number}_16_bits")
            rows.append([f"no cache, Q, K and V in {bits} bits", "", *cells])
    header = ["cache", "bytes per token", reference, own, f"{own} − {reference}"]
    return markdown(header, rows) + provenance(records)


def mean_text(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return the mean and the interval of an arm's number over seeds."""
    return str(estimate(list(numbers_by_seed(records, task, arm, number).values())))


# First word of a placeholder in the template → function of the study's records and the other words.
PLACEHOLDERS: dict[str, Callable[..., str]] = {
    "arms": lambda records, task: arms_table(records, task, TASK_COLUMNS[task], with_runs=True),
    "inside": lambda records, task: arms_table(records, task, INSIDE_COLUMNS[task], with_runs=False),
    "rates": rates_table,
    "growth": growth_table,
    "contrasts": contrasts_table,
    "caches": caches_table,
    "mean": mean_text,
    "difference": difference_text,
    "difference_in_differences": difference_in_differences_text,
    "best_difference": best_difference_text,
    "at_rate": at_rate_text,
    "best_rate": best_rate_text,
    "by_rate": rates_text,
    "solved": solved_text,
    "seeds": seeds_text,
    "modes": modes_text,
}
