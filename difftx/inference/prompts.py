"""Prompts from a file, checked line by line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from difftx.errors import UserError, did_you_mean

SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to complete."""

    name: str  # Where it stands, for messages.
    text: str
    seed: int
    record: dict[str, Any]  # What came with it.


def read_prompts(path: Path, seed: int) -> list[Prompt]:
    """Read a JSON object a line, with "prompt" and, if it likes, "seed"; else prompt i has `seed + i`.

    Raises:
        UserError: the file cannot be read, or a line is not such an object; says which.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--prompts={path}: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts={path}: the file has no prompts")
    return [_prompt(f"{path}: line {number}", line, seed + i) for i, (number, line) in enumerate(numbered)]


def _prompt(name: str, line: bytes, seed: int) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # Not UTF-8 too.
        raise UserError(f"{name} is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f'{name} is not a JSON object, such as {{"prompt": "Once"}}')
    if "prompt" not in record:
        raise UserError(f"{name} has no field 'prompt'.{did_you_mean('prompt', record)}")
    text, seed = record["prompt"], record.get("seed", seed)
    if not isinstance(text, str) or not text:
        raise UserError(f"{name}: prompt={text!r} must be text, and not empty")
    if type(seed) is not int or not 0 <= seed < SEEDS:
        raise UserError(f"{name}: seed={seed!r} must be an integer in 0 … 2**32 - 1")
    return Prompt(name=name, text=text, seed=seed, record=record)
