"""Plans of the faults of a run, and of their times. A seed and the run's number determine a plan."""

import dataclasses
from collections.abc import Collection, Sequence
from random import Random

KEEP = 3  # Number of checkpoints that retention keeps.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Processes of one run, and how much they train. A run takes seconds."""

    processes: int
    devices: int  # Per process.
    steps: int
    every_steps: int  # Steps from one checkpoint to the next.


ONE = Layout(processes=1, devices=1, steps=120, every_steps=6)
TWO = Layout(processes=2, devices=2, steps=30, every_steps=3)


@dataclasses.dataclass(frozen=True)
class Episode:
    """An interruption of a running training, and a corruption of its files after it has stopped."""

    interruption: str
    moment: str
    step: int  # Earliest step of the interruption. The moments of `STARTS` ignore it.
    corruption: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: episodes, each followed by another start if it stops the run, then an undisturbed end."""

    name: str
    layout: Layout
    seed: str  # Seed of the random choices that the driver makes during the run.
    episodes: tuple[Episode, ...]
    nan: tuple[int, ...] = ()  # Batches whose loss is NaN.
    stretches: int = 0  # Number of contiguous stretches of those batches.
    small_disk: str | None = None  # Folder on its own disk, which can fill up: "checkpoints" or "workdir".

    @property
    def faults(self) -> int:
        return sum(1 + (episode.corruption is not None) for episode in self.episodes) + self.stretches


STARTS = ("start", "restore", "compile")
MOMENTS = (*STARTS, "step", "step", "saving", "saving", "saving", "naming", "removing")
INTERRUPTIONS_OF_ONE = ("SIGTERM", "SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP")
INTERRUPTIONS_OF_TWO = (
    "SIGTERM",
    "SIGTERM to all",
    "SIGKILL",
    "SIGKILL of process 0",
    "SIGKILL of process 1",
    "SIGSTOP, killed",
    "SIGSTOP, continued",
    "SIGSTOP, continued later",
)
CORRUPTIONS = (
    "flipped bit",
    "flipped bit",
    "flipped bit",
    "truncated file",
    "truncated file",
    "removed file",
    "removed manifest",
    "empty step folder",
    "leftover of a save",
    "leftover of a removal",
    "checkpoint under another step",
    "all checkpoints corrupt",
    "symlinked step",
)
UNREADABLE = ("unreadable file", "unreadable manifests")  # By their modes. They need not be corrupt.
CONFIGS = "processes of different configs"
HARMLESS = ("leftover of a save", "empty step folder", "leftover of a removal")
# Corruptions that are dealt first, so that the 40 faults of CI include all of them.
FIRST = {"one": ("unreadable file",), "two": ("unreadable manifests", CONFIGS), "nan": ("symlinked step",)}
# After these interruptions the run is still training, so its files are not corrupted.
RUNNING = ("SIGSTOP", "SIGSTOP, continued later")
FULL = ("disk full, then free", "disk full")
RUNS = ("one", "two", "disk", "nan", "one", "two")  # Kinds of runs, in turn.


def make_plan(seed: int, number: int, without: Collection[str] = ()) -> Plan:
    """Return the plan of a run. It excludes the faults `without`, which are impossible on this machine."""
    kind, turn = RUNS[number % len(RUNS)], number // len(RUNS)
    random = Random(f"{seed} {number}")
    seen = turn * RUNS.count(kind) + RUNS[: number % len(RUNS)].count(kind)  # Number of earlier runs of this kind.
    name = f"{number:03} {kind}"
    if kind == "disk":
        lies = ("checkpoints", "workdir")[(seed + seen) % 2]
        interruptions = _dealt(FULL, seed, kind, seen * 3, 3) if lies == "checkpoints" else ["disk full"] * 3
        episodes = [
            Episode(interruption, "step", step)
            for interruption, step in zip(interruptions, _steps(ONE, 3, random), strict=True)
        ]
        return Plan(name, ONE, f"{seed} {number}", tuple(episodes), small_disk=lies)
    layout, interruptions, corruptions, count = {
        "one": (ONE, INTERRUPTIONS_OF_ONE, (*CORRUPTIONS, *UNREADABLE), 4),
        "two": (TWO, INTERRUPTIONS_OF_TWO, (*CORRUPTIONS, *UNREADABLE, CONFIGS), 3),
        "nan": (ONE, ("SIGTERM", "SIGKILL"), (*HARMLESS, "symlinked step"), 3),
    }[kind]
    # The texts "interruptions" and "corruptions" seed the decks. With others, a recorded seed would give another plan.
    dealt = _dealt(interruptions, seed, f"{kind} strikes", 0, (seen + 1) * count)
    earlier, now = dealt[: seen * count], dealt[seen * count :]
    corrupted = [interruption not in RUNNING for interruption in earlier].count(True)
    deck = [corruption for corruption in corruptions if corruption not in without]
    first = [corruption for corruption in FIRST[kind] if corruption not in without]
    corruption = iter(_dealt(deck, seed, f"{kind} damages", corrupted, count, first))
    parts = zip(
        now, _dealt(MOMENTS, seed, f"{kind} moments", seen * count, count), _steps(layout, count, random), strict=True
    )
    episodes = [
        Episode(interruption, moment, step, None if interruption in RUNNING else next(corruption))
        for interruption, moment, step in parts
    ]
    nan, stretches = _bad_batches(seed, seen % 2) if kind == "nan" else ((), 0)
    return Plan(name, layout, f"{seed} {number}", tuple(episodes), nan, stretches)


def _dealt(cards: Sequence[str], seed: int, name: str, start: int, count: int, first: Sequence[str] = ()) -> list[str]:
    """Return cards of a shuffled deck with `first` on top. The deck repeats, so each card comes equally often."""
    random = Random(f"{seed} {name}")
    rest = [card for card in cards if card not in first]
    deck = [*random.sample(first, len(first)), *random.sample(rest, len(rest))]
    return [deck[i % len(deck)] for i in range(start, start + count)]


def _steps(layout: Layout, count: int, random: Random) -> list[int]:
    """Return ascending steps. The last one is so early that a save still follows."""
    window = (layout.steps - 3 * layout.every_steps) // count
    return [2 * layout.every_steps + i * window + random.randrange(window) for i in range(count)]


def _bad_batches(seed: int, variant: int) -> tuple[tuple[int, ...], int]:
    """Return bad batches in stretches, and the number of stretches.

    One or two bad batches in a row are skipped, three to five cause a rewind.
    """
    random = Random(f"{seed} nan {variant}")
    batches, first, lengths = [], 4, random.sample((1, 2, 3, 3, 4, 5), 6)
    for length in lengths:
        first += random.randrange(9, 15)
        batches += range(first, first + length)
        first += length
    return tuple(batches), len(lengths)
