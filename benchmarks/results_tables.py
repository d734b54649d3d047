"""Tables and values of docs/exploratory.md, made from the records that benchmarks/results.py collects.

This module has no command: `python benchmarks/results.py render` calls the functions in `PLACEHOLDERS`. Functions whose
names end in `_table` return Markdown, and those whose names end in `_text` return a value for a sentence. Each takes
the records of a study first. A `number` is a key of a record's "numbers", such as "loss/bits_per_byte".

Intervals are 95 % Student's t intervals over seeds. Results on the tasks in `BIMODAL_TASKS` have two modes, solved or
not. For these tasks the tables show the value of each seed and the number of solved runs, because a mean over both
modes would describe no run.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import scipy.stats

from difftx.errors import UserError

CONFIDENCE = 0.95

type Record = dict[str, Any]  # A run in docs/results.json; `_record` in benchmarks/results.py lists the fields.


class Estimate(NamedTuple):
    """A mean over seeds and its interval."""

    mean: float
    half_width: float | None  # Half of the interval's width; None for a single seed.

    def __str__(self) -> str:
        decimals = 3 if abs(self.mean) < 10 else max(0, 3 - int(math.log10(abs(self.mean))))
        if self.half_width and 0 < round(self.half_width, decimals) == round(abs(self.mean), decimals):
            decimals += 1  # Otherwise a reader could not tell whether the interval contains zero.
        interval = "" if self.half_width is None else f" ± {self.half_width:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{interval}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and the interval of a sample."""
    count = len(values)
    if count < 2:
        return Estimate(values[0], None)
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return Estimate(statistics.fmean(values), float(quantile * statistics.stdev(values) / math.sqrt(count)))


class Column(NamedTuple):
    """A column of a table of arms."""

    title: str
    number: str  # Name of a number in `Record["numbers"]`.
    minus_reference: bool = False  # Whether the Transformer's number for the same seed is subtracted.


MAX_COMMANDS = 6  # Largest number of commands below a table. If there are more, only the first one is shown.
REFERENCE = "transformer"
BIMODAL_TASKS = {"recall", "recall-easy"}
SOLVED_TASK = "retrieval"  # Name in the suite exact_match of the rows that ask for one key.
SOLVED_ACCURACY = 0.9  # A run has solved recall or recall-easy if its accuracy on these rows is at least this.
SOLVED_NUMBER = f"exact_match/{SOLVED_TASK}"
# (arm, reference, difference between their models).
CONTRASTS = (
    ("diff", "transformer", "all of it"),
    ("transformer-8x256-norm", "transformer-8x256", "head norm, in the Transformer with wide heads"),
    ("diff", "diff-no_norm", "head norm, in the differential model"),
    ("diff", "transformer-8x256-norm", "subtraction, with head norm"),
    ("diff-no_norm", "transformer-8x256", "subtraction, without head norm"),
    ("transformer-8x256", "transformer", "heads half as many and twice as wide"),
    ("diff-no_norm", "transformer", "subtraction and wide heads, without head norm"),
    ("diff_v2", "transformer", "Differential Transformer V2"),
    ("diff_v2", "transformer-8x256", "V2, compared with wide heads"),
)
WHOLE_CACHE = "whole"  # Name in the suite `cache` of the cache without compression.
CACHE_SIZE_PREFIX = "cache/bytes_per_token_"  # The number of a cache's bytes per token is this and the cache's name.
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
TEST_LOSS = "test/loss_bits_per_byte"  # Loss on the test text.
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


def numbers_by_seed(records: Iterable[Record], task: str, arm: str, number: str) -> dict[int, float]:
    """Return seed → number, for the runs of one task and arm."""
    found = (r for r in records if (r["task"], r["arm"]) == (task, arm) and number in r["numbers"])
    return one_per_seed(found, number, f"task {task}, arm {arm}")


def one_per_seed(records: Iterable[Record], number: str, what: str) -> dict[int, float]:
    """Return seed → number, or raise `UserError` if two runs of `what` have the same seed."""
    found: dict[int, float] = {}
    for record in records:
        if (seed := record["seed"]) in found:
            raise UserError(f"{what}: two runs have the seed {seed}; collect only one of them")
        found[seed] = record["numbers"][number]
    return found


def differences_between_arms(
    records: Sequence[Record], task: str, arm: str, reference: str, number: str
) -> list[float]:
    """Return the arm's number minus the reference's for each seed that both have, in the order of the seeds.

    Runs with the same seed see the data in the same order.
    """
    own, other = (numbers_by_seed(records, task, name, number) for name in (arm, reference))
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def differences_within_runs(
    records: Sequence[Record], task: str, arm: str, number: str, reference_number: str
) -> list[float]:
    """Return one number of an arm minus another number of the same run, in the order of the seeds."""
    own, other = (numbers_by_seed(records, task, arm, name) for name in (number, reference_number))
    return [own[seed] - other[seed] for seed in sorted(own)]


def difference_of_changes_text(
    records: Sequence[Record], task: str, arm: str, reference: str, number: str, reference_number: str
) -> str:
    """Return how much more `number` − `reference_number` is in an arm's runs than in the reference arm's.

    It is a mean over seeds with its interval. The differences are small, so they have four decimals.
    """
    own, other = (differences_within_runs(records, task, name, number, reference_number) for name in (arm, reference))
    found = estimate([a - b for a, b in zip(own, other, strict=True)])
    return f"{found.mean:+.4f} ± {found.half_width:.4f}"


def difference_text(records: Sequence[Record], task: str, arm: str, number: str, reference: str = REFERENCE) -> str:
    """Return the mean over seeds of an arm's number minus the reference's, with sign and interval."""
    return signed(estimate(differences_between_arms(records, task, arm, reference, number)))


def signed(value: Estimate) -> str:
    """Return an estimate as text, with a plus sign if it is positive."""
    return f"{'+' if value.mean > 0 else ''}{value}"


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


def has_solved(record: Record) -> bool:
    """Return whether a run of recall has solved the task."""
    return record["numbers"][SOLVED_NUMBER] >= SOLVED_ACCURACY


def arm_outcomes(records: Sequence[Record], task: str, arm: str) -> list[bool]:
    """Return for each of an arm's runs whether it has solved the task."""
    return [has_solved(r) for r in records if (r["task"], r["arm"]) == (task, arm)]


def solved_text(records: Sequence[Record], task: str, arm: str) -> str:
    """Return the number of an arm's runs that have solved the task, such as "2 of 3"."""
    own = arm_outcomes(records, task, arm)
    return f"{sum(own)} of {len(own)}"


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


def estimates_by_rate(records: Sequence[Record], task: str, arm: str, number: str) -> dict[float, Estimate]:
    """Return learning rate → mean and interval of an arm's number over the seeds, in the order of the rates."""
    found: dict[float, list[float]] = collections.defaultdict(list)
    for r in records:
        if (r["task"], r["arm"]) == (task, arm):
            found[r["learning_rate"]].append(r["numbers"][number])
    return {rate: estimate(found[rate]) for rate in sorted(found)}


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


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without a line feed at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(records: Sequence[Record]) -> str:
    """Return the text below a table: commands, number of runs, tokens, seeds, time, hardware, commits and JAX versions.

    It begins with the blank line that ends the table.
    """
    seeds = sorted({r["seed"] for r in records})
    commits = dict.fromkeys(r["commit"][:7] + "+" * r["commit"].endswith("+") for r in records)
    hardware = dict.fromkeys(r["hardware"] for r in records)
    minutes = sum(r["wall_seconds"] for r in records) / 60
    tokens = dict.fromkeys(f"{r['tokens']:,}" for r in records)
    commands = list(dict.fromkeys(r["sweep"] for r in records))
    if len(commands) > MAX_COMMANDS:
        commands[1:] = [f"# and {len(commands) - 1} sweeps with other values"]
    sweeps = "\n".join(f"    {command}" for command in commands)
    return (
        f"\n\n{sweeps}\n\n{len(records)} runs of {' or '.join(tokens)} tokens, {'seeds' if len(seeds) > 1 else 'seed'} "
        f"{', '.join(map(str, seeds))}; {minutes:.0f} minutes of {' and '.join(hardware)} in all; "
        f"commit {', '.join(commits)}; jax {', '.join(dict.fromkeys(r['jax'] for r in records))}."
    )


def cache_names(records: Sequence[Record], task: str) -> list[str]:
    """Return the names of the caches that the suite `cache` measured, the whole one first, then by falling size."""
    numbers = next(r["numbers"] for r in records if r["task"] == task)
    sizes = {
        name.removeprefix(CACHE_SIZE_PREFIX): size
        for name, size in numbers.items()
        if name.startswith(CACHE_SIZE_PREFIX)
    }
    return sorted(sizes, key=lambda name: (name != WHOLE_CACHE, -sizes[name]))


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
        last = difference_of_changes_text(records, task, own, reference, compressed, uncompressed)
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
    "difference_of_changes": difference_of_changes_text,
    "best_difference": best_difference_text,
    "at_rate": at_rate_text,
    "best_rate": best_rate_text,
    "by_rate": rates_text,
    "solved": solved_text,
    "seeds": seeds_text,
    "modes": modes_text,
}
