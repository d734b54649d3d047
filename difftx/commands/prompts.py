"""Reading of prompts from a JSON Lines file."""

import dataclasses
from pathlib import Path
from typing import Any

from difftx.data.records import Record, read_records
from difftx.errors import UserError

SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to complete."""

    name: str  # Position in the file, for messages.
    text: str
    seed: int
    record: dict[str, Any]  # All fields of the prompt's JSON object.


def read_prompts(path: Path, seed: int) -> list[Prompt]:
    """Read one JSON object per line, with "prompt" and optionally "seed". The default seed of prompt i is `seed + i`.

    Raises:
        UserError: the file cannot be read, or a line is not such an object. The message names the line.
    """
    records = read_records(path, field="--prompts", what="prompts")
    return [_prompt(record, seed + i) for i, record in enumerate(records)]


def _prompt(record: Record, seed: int) -> Prompt:
    text, seed = record.text("prompt"), record.values.get("seed", seed)
    if type(seed) is not int or not 0 <= seed < SEEDS:
        raise UserError(f"{record.name}: seed={seed!r} must be an integer in 0 … 2**32 - 1")
    return Prompt(name=record.name, text=text, seed=seed, record=record.values)
