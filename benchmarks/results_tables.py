"""Tables and values of docs/exploratory.md, made from the records that benchmarks/results.py collects.

Intervals are 95 % Student's t intervals over seeds. Results on the tasks in `BY_SEED` have two modes, solved or not.
For these tasks the tables show the value of each seed and the number of solved runs, because a mean over both modes
would describe no run.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import scipy.stats

from difftx.errors import UserError

CONFIDENCE = 0.95

type Record = dict[str, Any]


class Estimate(NamedTuple):
    """A mean over seeds and its interval."""

    mean: float
    half: float | None  # Half of the interval's width; None for a single seed.

    def __str__(self) -> str:
        decimals = 3 if abs(self.mean) < 10 else max(0, 3 - int(math.log10(abs(self.mean))))
        if self.half and 0 < round(self.half, decimals) == round(abs(self.mean), decimals):
            decimals += 1  # Otherwise a reader could not tell whether the interval contains zero.
        return f"{self.mean:.{decimals}f}" + ("" if self.half is None else f" ± {self.half:.{decimals}f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and the interval of a sample."""
    count = len(values)
    if count < 2:
        return Estimate(values[0], None)
    width = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return Estimate(statistics.fmean(values), float(width * statistics.stdev(values) / math.sqrt(count)))


class Column(NamedTuple):
    """A column of a table of arms."""

    title: str
    number: str  # Name of a number in `Record["numbers"]`.
    minus_reference: bool = False  # Whether the Transformer's number for the same seed is subtracted.


MOST_COMMANDS = 6  # Largest number of commands below a table. If there are more, only the first one is shown.
REFERENCE = "transformer"
BY_SEED = {"recall", "recall-easy"}
# A run has solved recall or recall-easy if its accuracy on rows that ask for one key is at least this.
SOLVED_TASK, SOLVED_FROM = "retrieval", 0.9
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
WHOLE, CACHE_SIZE = "whole", "cache/bytes_per_token_"  # Name and number of the suite `cache`.
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
# Task → numbers whose means the command `compare` checks. For tasks in `BY_SEED` it checks which runs are solved.
COMPARED = {
    task: [column.number for column in columns if not column.minus_reference]
    for task, columns in TASK_COLUMNS.items()
    if task not in BY_SEED
}


def of_seeds(records: Iterable[Record], task: str, arm: str, number: str) -> dict[int, float]:
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


def paired(records: Sequence[Record], task: str, arm: str, reference: str, number: str) -> list[float]:
    """Return the arm's number minus the reference's for each seed that both have.

    Runs with the same seed see the data in the same order.
    """
    own, other = (of_seeds(records, task, name, number) for name in (arm, reference))
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def paired_numbers(records: Sequence[Record], task: str, arm: str, number: str, reference: str) -> list[float]:
    """Return one number of an arm minus another number of the same run, for each seed."""
    own, other = (of_seeds(records, task, arm, name) for name in (number, reference))
    return [own[seed] - other[seed] for seed in sorted(own)]


def difference_of_changes(
    records: Sequence[Record], task: str, arm: str, reference: str, number: str, plain: str
) -> str:
    """Return the mean over seeds of `number` − `plain` of an arm, minus the same difference of the reference's run.

    The differences are small, so they have four decimals.
    """
    own, other = (paired_numbers(records, task, name, number, plain) for name in (arm, reference))
    found = estimate([a - b for a, b in zip(own, other, strict=True)])
    return f"{found.mean:+.4f} ± {found.half:.4f}"


def difference(records: Sequence[Record], task: str, arm: str, number: str, reference: str = REFERENCE) -> str:
    """Return the mean over seeds of an arm's number minus the reference's, with sign and interval."""
    return signed(estimate(paired(records, task, arm, reference, number)))


def signed(value: Estimate) -> str:
    """Return an estimate as text, with a plus sign if it is positive."""
    return f"{'+' if value.mean > 0 else ''}{value}"


def contrasts_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a table of `CONTRASTS`: the difference for each seed, their mean and interval."""
    rows = []
    for arm, reference, what in CONTRASTS:
        values = paired(records, task, arm, reference, number)
        found = estimate(values)
        holds_zero = found.half is None or abs(found.mean) <= found.half
        each = ", ".join(signed(Estimate(value, None)) for value in values)
        rows.append([f"{arm} − {reference}", what, each, signed(found), "yes" if holds_zero else "no"])
    return markdown(["contrast", "what differs", "each seed", "mean", "zero in the interval"], rows)


def is_solved(record: Record) -> bool:
    """Return whether a run of recall has solved the task."""
    return record["numbers"][SOLVED_NUMBER] >= SOLVED_FROM


def outcomes(records: Sequence[Record], task: str, arm: str) -> list[bool]:
    """Return for each of an arm's runs whether it has solved the task."""
    return [is_solved(r) for r in records if (r["task"], r["arm"]) == (task, arm)]


def solved(records: Sequence[Record], task: str, arm: str) -> str:
    """Return the number of an arm's runs that have solved the task, such as "2 of 3"."""
    own = outcomes(records, task, arm)
    return f"{sum(own)} of {len(own)}"


def modes(records: Sequence[Record], task: str, number: str) -> str:
    """Return the gap in a number between the runs that have solved the task and those that have not, as text."""
    here = [r for r in records if r["task"] == task]
    unsolved = max(r["numbers"][number] for r in here if not is_solved(r))
    least = min(r["numbers"][number] for r in here if is_solved(r))
    return f"at most {unsolved:.3f} in the runs that did not solve the task and at least {least:.3f} in those that did"


def seeds(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's number for each seed, as text."""
    found = of_seeds(records, task, arm, number)
    return ", ".join(str(Estimate(found[seed], None)) for seed in sorted(found))


def by_rate(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's number at each learning rate, as text."""
    return ", ".join(f"{value} at {rate:g}" for rate, value in by_rates(records, task, arm, number).items())


def by_rates(records: Sequence[Record], task: str, arm: str, number: str) -> dict[float, Estimate]:
    """Return learning rate → an arm's number, over the seeds of each rate, in the order of the rates."""
    found: dict[float, list[float]] = collections.defaultdict(list)
    for r in records:
        if (r["task"], r["arm"]) == (task, arm):
            found[r["learning_rate"]].append(r["numbers"][number])
    return {rate: estimate(found[rate]) for rate in sorted(found)}


def at_rate(records: Sequence[Record], task: str, arm: str, number: str, rate: str) -> str:
    """Return an arm's number at a learning rate, as text."""
    return str(by_rates(records, task, arm, number)[float(rate)])


def best_rate(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return the learning rate with an arm's smallest mean, as text."""
    found = by_rates(records, task, arm, number)
    return f"{min(found, key=lambda rate: found[rate].mean):g}"


def best_difference(records: Sequence[Record], task: str, number: str, row: str, reference: str) -> str:
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
            name = _row(r).replace(" ", "")
            best[name] = min(best.get(name, math.inf), r["numbers"][number])
    return signed(Estimate(best[row] - best[reference], None))


def arms_table(records: Sequence[Record], task: str, columns: Sequence[Column], *, first: bool) -> str:
    """Return a table with a row for each arm: means over seeds, or the value of each seed for tasks in `BY_SEED`.

    `first`: also show parameters, learning rate, solved runs and provenance, as in the first table of a study.
    """
    records = [r for r in records if r["task"] == task]
    counted = first and task in BY_SEED
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        run = next(r for r in records if r["arm"] == arm)
        cells = [f"{run['parameters']:,}", f"{run['learning_rate']:g}"] * first
        cells += [solved(records, task, arm)] if counted else []
        for _, number, minus_reference in columns:
            if task in BY_SEED:
                cells.append(seeds(records, task, arm, number))
            elif not of_seeds(records, task, arm, number) or (minus_reference and arm == REFERENCE):
                cells.append("")
            elif minus_reference:
                cells.append(difference(records, task, arm, number))
            else:
                cells.append(mean(records, task, arm, number))
        rows.append([arm, *cells])
    header = ["arm", *["parameters", "rate"] * first, *["solved"] * counted, *(c.title for c in columns)]
    table = markdown(header, rows)
    return table + provenance(records) * first


def rates_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a table with a row for each arm and change and a column for each learning rate; the best is in bold."""
    best = max if number.startswith("exact_match/") else min
    rows: dict[str, dict[float, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    chosen = [r for r in records if r["task"] == task]
    for r in chosen:
        rows[_row(r)][r["learning_rate"]].append(r["numbers"][number])
    rates = sorted({r["learning_rate"] for r in chosen})
    cells = []
    for name, found in rows.items():
        means = {rate: estimate(values) for rate, values in found.items()}
        top = best(means.values(), key=lambda e: e.mean)
        cells.append([name, *(_bold(means[rate], top) if rate in means else "" for rate in rates)])
    return markdown(["", *(f"{rate:g}" for rate in rates)], cells) + provenance(chosen)


def _row(record: Record) -> str:
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
        here = [r for r in records if (r["task"], r["tokens"]) == (name, tokens)]
        rates = {arm: _best_rate([r for r in here if r["arm"] == arm], number) for arm in (REFERENCE, *arms)}
        best = [r for r in here if r["learning_rate"] == rates[r["arm"]]]
        reference = of_seeds(best, name, REFERENCE, number)
        size = next(r["parameters"] for r in best if r["arm"] == REFERENCE)
        cells = [
            f"{difference(best, name, arm, number)} ({rates[arm]:g})" if rates[arm] is not None else "" for arm in arms
        ]
        top = f"{estimate(list(reference.values()))} ({rates[REFERENCE]:g})"
        rows.append((size, tokens, [f"{size:,}", f"{tokens:,}", top, *cells]))
    rows.sort(key=lambda row: row[:2])
    header = ["parameters", "tokens", REFERENCE, *(f"{arm}, more" for arm in arms)]
    return markdown(header, [cells for _, _, cells in rows]) + provenance(records)


def _best_rate(records: Sequence[Record], number: str) -> float | None:
    lowest = min((r["seed"] for r in records), default=None)
    tried = {r["learning_rate"]: r["numbers"][number] for r in records if r["seed"] == lowest}
    return min(tried, key=tried.__getitem__) if tried else None


def _bold(value: Estimate, top: Estimate) -> str:
    return f"**{value}**" if value == top else str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(records: Sequence[Record]) -> str:
    """Return the text below a table: commands, number of runs, tokens, seeds, time, hardware, commit and versions."""
    seeds = sorted({r["seed"] for r in records})
    commits = dict.fromkeys(r["commit"][:7] + "+" * r["commit"].endswith("+") for r in records)
    hardware = dict.fromkeys(r["hardware"] for r in records)
    minutes = sum(r["wall_seconds"] for r in records) / 60
    tokens = dict.fromkeys(f"{r['tokens']:,}" for r in records)
    commands = list(dict.fromkeys(r["sweep"] for r in records))
    if len(commands) > MOST_COMMANDS:
        commands[1:] = [f"# and {len(commands) - 1} sweeps with other values"]
    sweeps = "\n".join(f"    {command}" for command in commands)
    return (
        f"\n\n{sweeps}\n\n{len(records)} runs of {' or '.join(tokens)} tokens, {'seeds' if len(seeds) > 1 else 'seed'} "
        f"{', '.join(map(str, seeds))}; {minutes:.0f} minutes of {' and '.join(hardware)} in all; "
        f"commit {', '.join(commits)}; jax {', '.join(dict.fromkeys(r['jax'] for r in records))}."
    )


def caches(records: Sequence[Record], task: str) -> list[str]:
    """Return the names of the caches that the suite `cache` measured, the whole one first, then by falling size."""
    numbers = next(r["numbers"] for r in records if r["task"] == task)
    size = {name.removeprefix(CACHE_SIZE): value for name, value in numbers.items() if name.startswith(CACHE_SIZE)}
    return sorted(size, key=lambda name: (name != WHOLE, -size[name]))


def caches_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a table with a row for each cache of the suite `cache`, and a column of each arm's number with it.

    Below them are rows of the suite `quantize`, without a cache. All cells but those of the whole cache are differences
    from the same runs without compression. The last column compares the differences of the two arms.
    """
    records = [r for r in records if r["task"] == task]
    reference, own = dict.fromkeys(r["arm"] for r in records)

    def cells(compressed: str, plain: str) -> list[str]:
        found = (paired_numbers(records, task, arm, compressed, plain) for arm in (reference, own))
        last = difference_of_changes(records, task, own, reference, compressed, plain)
        return [*(signed(estimate(values)) for values in found), last]

    whole = f"cache/{number}_{WHOLE}"
    rows = []
    for name in caches(records, task):
        size = " or ".join(dict.fromkeys(f"{r['numbers'][CACHE_SIZE + name]:g}" for r in records))
        if name == WHOLE:
            means = [*(mean(records, task, arm, whole) for arm in (reference, own)), ""]
        else:
            means = cells(f"cache/{number}_{name}", whole)
        rows.append([name.replace("_", " "), size, *means])
    for bits in (8, 4):
        at = f"quantize/{number}_{{}}_bits"
        if at.format(bits) in records[0]["numbers"]:
            rows.append([f"no cache, Q, K and V in {bits} bits", "", *cells(at.format(bits), at.format(16))])
    header = ["cache", "bytes per token", reference, own, f"{own} − {reference}"]
    return markdown(header, rows) + provenance(records)


def mean(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's mean over seeds, as text."""
    return str(estimate(list(of_seeds(records, task, arm, number).values())))


# First word of a placeholder in the template → function of the study's records and the other words.
PLACEHOLDERS: dict[str, Callable[..., str]] = {
    "arms": lambda records, task: arms_table(records, task, TASK_COLUMNS[task], first=True),
    "inside": lambda records, task: arms_table(records, task, INSIDE_COLUMNS[task], first=False),
    "rates": rates_table,
    "growth": growth_table,
    "contrasts": contrasts_table,
    "caches": caches_table,
    "mean": mean,
    "difference": difference,
    "difference_of_changes": difference_of_changes,
    "best_difference": best_difference,
    "at_rate": at_rate,
    "best_rate": best_rate,
    "by_rate": by_rate,
    "solved": solved,
    "seeds": seeds,
    "modes": modes,
}
