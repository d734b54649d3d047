"""Which faults strike a run, and when: all of it follows from a seed and the run's number."""

import dataclasses
from collections.abc import Collection, Sequence
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
    "symlinked step",
)
# They need not be damage: modes and read errors.
UNREADABLE_BY_MODE = ("unreadable file", "unreadable manifests")
UNREADABLE_BY_ERROR = ("EIO while reading", "ESTALE while opening")
UNREADABLE = (*UNREADABLE_BY_MODE, *UNREADABLE_BY_ERROR)
INDEX = "truncated packing index"
CONFIGS = "processes of different configs"
HARMLESS = ("flipped bit in journal.jsonl", "leftover of a save", "empty step folder", "leftover of a removal")
# Dealt before the others, so that the 40 faults of CI have each of them.
FIRST = {
    "one": ("unreadable file", "EIO while reading", INDEX),
    "two": ("unreadable manifests", "ESTALE while opening", CONFIGS),
    "nan": ("symlinked step",),
}
# After these strikes the run is going on, and nothing is damaged under its feet.
RUNNING = ("SIGSTOP", "SIGSTOP, continued later")
FULL = ("disk full, then free", "disk full")
RUNS = ("one", "two", "disk", "nan", "one", "two")  # In turns.


def plan(seed: int, number: int, without: Collection[str] = ()) -> Plan:
    """Return the plan of a run, without the faults that cannot be made on this machine."""
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
        "one": (ONE, STRIKES_OF_ONE, (*DAMAGES, *UNREADABLE, INDEX), 4),
        "two": (TWO, STRIKES_OF_TWO, (*DAMAGES, *UNREADABLE, INDEX, CONFIGS), 3),
        "nan": (ONE, ("SIGTERM", "SIGKILL"), (*HARMLESS, "symlinked step"), 3),
    }[kind]
    dealt = _dealt(strikes, seed, f"{kind} strikes", 0, (seen + 1) * count)
    earlier, now = dealt[: seen * count], dealt[seen * count :]
    damaged = [strike not in RUNNING for strike in earlier].count(True)
    deck = [damage for damage in damages if damage not in without]
    first = [damage for damage in FIRST[kind] if damage not in without]
    damage = iter(_dealt(deck, seed, f"{kind} damages", damaged, count, first))
    parts = zip(
        now,
        _dealt(MOMENTS, seed, f"{kind} moments", seen * count, count),
        _steps(layout, count, random),
        strict=True,
    )
    episodes = [
        Episode(strike, moment, step, None if strike in RUNNING else next(damage)) for strike, moment, step in parts
    ]
    nan, stretches = _bad_batches(seed, seen % 2) if kind == "nan" else ((), 0)
    return Plan(name, layout, f"{seed} {number}", tuple(episodes), nan, stretches)


def _dealt(cards: Sequence[str], seed: int, name: str, start: int, count: int, first: Sequence[str] = ()) -> list[str]:
    """Return cards of a shuffled deck that is dealt again and again: each comes equally often, `first` on top."""
    random = Random(f"{seed} {name}")
    rest = [card for card in cards if card not in first]
    deck = [*random.sample(first, len(first)), *random.sample(rest, len(rest))]
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
