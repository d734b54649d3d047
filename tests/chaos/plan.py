"""Which faults strike a run, and when: all of it follows from a seed and the run's number."""

import dataclasses
from collections.abc import Sequence
from random import Random

KEEP = 3  # Checkpoints.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Processes of one run, and how much they train: a run takes seconds."""

    processes: int
    devices: int  # Of each process.
    steps: int
    every_steps: int  # From one checkpoint to the next.


ONE = Layout(processes=1, devices=1, steps=120, every_steps=6)
TWO = Layout(processes=2, devices=2, steps=30, every_steps=3)


@dataclasses.dataclass(frozen=True)
class Episode:
    """What a running training meets, and what its files meet once it has stopped."""

    strike: str
    moment: str
    step: int  # Not before this step, unless the moment is one of a start.
    damage: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: episodes, between which it is started again, then a start that nothing disturbs."""

    name: str
    layout: Layout
    seed: str  # Of what is chosen on the way.
    episodes: tuple[Episode, ...]
    nan: tuple[int, ...] = ()  # Batches whose loss is no number.
    stretches: int = 0  # In how many pieces those batches are.
    small_disk: str | None = None  # What lies on a disk of its own that can fill up: "checkpoints" or "workdir".

    @property
    def faults(self) -> int:
        return sum(1 + (episode.damage is not None) for episode in self.episodes) + self.stretches


STARTS = ("start", "restore", "compile")
MOMENTS = (*STARTS, "step", "step", "saving", "saving", "saving", "naming", "removing")
STRIKES_OF_ONE = ("SIGTERM", "SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP")
STRIKES_OF_TWO = (
    "SIGTERM",
    "SIGTERM to all",
    "SIGKILL",
    "SIGKILL of process 0",
    "SIGKILL of process 1",
    "SIGSTOP, killed",
    "SIGSTOP, continued",
    "SIGSTOP, continued later",
)
DAMAGES = (
    "flipped bit",
    "flipped bit",
    "flipped bit",
    "truncated file",
    "truncated file",
    "removed file",
    "removed commit marker",
    "removed manifest",
    "empty step folder",
    "leftover of a save",
    "leftover of a removal",
    "checkpoint under another step",
    "all checkpoints damaged",
    "flipped bit in metrics.jsonl",
    "flipped bit in config.json",
)
HARMLESS = ("flipped bit in journal.jsonl", "leftover of a save", "empty step folder", "leftover of a removal")
FULL = ("disk full, then free", "disk full")
RUNS = ("one", "two", "disk", "nan", "one", "two")  # In turns.


def plan(seed: int, number: int) -> Plan:
    """Return the plan of a run."""
    kind, turn = RUNS[number % len(RUNS)], number // len(RUNS)
    random = Random(f"{seed} {number}")
    seen = turn * RUNS.count(kind) + RUNS[: number % len(RUNS)].count(kind)  # Runs of this kind before.
    name = f"{number:03} {kind}"
    if kind == "disk":
        lies = ("checkpoints", "workdir")[(seed + seen) % 2]
        strikes = _dealt(FULL, seed, kind, seen * 3, 3) if lies == "checkpoints" else ["disk full"] * 3
        episodes = [Episode(strike, "step", step) for strike, step in zip(strikes, _steps(ONE, 3, random), strict=True)]
        return Plan(name, ONE, f"{seed} {number}", tuple(episodes), small_disk=lies)
    layout, strikes, damages, count = {
        "one": (ONE, STRIKES_OF_ONE, DAMAGES, 4),
        "two": (TWO, STRIKES_OF_TWO, DAMAGES, 3),
        "nan": (ONE, ("SIGTERM", "SIGKILL"), HARMLESS, 3),
    }[kind]
    parts = zip(
        _dealt(strikes, seed, f"{kind} strikes", seen * count, count),
        _dealt(MOMENTS, seed, f"{kind} moments", seen * count, count),
        _dealt(damages, seed, f"{kind} damages", seen * count, count),
        _steps(layout, count, random),
        strict=True,
    )
    episodes = [
        # A frozen process alone goes on; nothing is damaged under its feet.
        Episode(strike, moment, step, None if strike == "SIGSTOP" else damage)
        for strike, moment, damage, step in parts
    ]
    nan, stretches = _bad_batches(seed, seen % 2) if kind == "nan" else ((), 0)
    return Plan(name, layout, f"{seed} {number}", tuple(episodes), nan, stretches)


def _dealt(cards: Sequence[str], seed: int, name: str, start: int, count: int) -> list[str]:
    """Return cards of a shuffled deck that is dealt again and again: each comes equally often."""
    deck = Random(f"{seed} {name}").sample(cards, len(cards))
    return [deck[i % len(deck)] for i in range(start, start + count)]


def _steps(layout: Layout, count: int, random: Random) -> list[int]:
    """Return ascending steps, the last so early that a save still follows."""
    window = (layout.steps - 3 * layout.every_steps) // count
    return [2 * layout.every_steps + i * window + random.randrange(window) for i in range(count)]


def _bad_batches(seed: int, variant: int) -> tuple[tuple[int, ...], int]:
    """Return batches in stretches: one or two are skipped, three to five in a row make the run go back."""
    random = Random(f"{seed} nan {variant}")
    batches, first, lengths = [], 4, random.sample((1, 2, 3, 3, 4, 5), 6)
    for length in lengths:
        first += random.randrange(9, 15)
        batches += range(first, first + length)
        first += length
    return tuple(batches), len(lengths)
