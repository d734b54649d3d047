"""Fields of another format's config.json, and those of ours that no format has."""

from pathlib import Path
from typing import Any

from difftx.errors import UserError
from difftx.files import read_json

# What the models of other formats are, whatever their config says.
FIXED = {
    "signal_heads": None,
    "top_k": None,
    "lambda_init": None,
    "lambda_learned": True,
    "post_scale": None,
    "attention_logit_bits": None,
}
EXPECTED: dict[type, str] = {
    int: "a count",
    float: "a positive number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "an object",
}


class Fields:
    """A config.json whose fields are checked as they are read."""

    def __init__(self, path: Path):
        self.path = path
        self._raw = read_json(path)
        if not isinstance(self._raw, dict):
            raise UserError(f"{path}: not an object")

    def get[T](self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a field of a type; `default` where it is absent or null.

        Raises:
            UserError: it is missing without a default, of another type, or a number that is not positive.
        """
        value = self._raw.get(name)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is not bool and isinstance(value, int | float) and not value > 0):
            raise UserError(f"{self.path}: {name}={value!r}: expected {EXPECTED[kind]}")
        return value

    def require(self, name: str, *values: Any) -> None:
        """Raise `UserError` where a field has none of these values; the first is what it is where absent."""
        value = self._raw.get(name, values[0])
        if value not in values:
            raise UserError(f"{self.path}: {name}={value!r} does not convert; only {values[0]!r} does")


def heads_from(d_model: int, groups: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int | None]:
    """Return the fields of our heads; what follows from the others is None, as a config file would have it."""
    usual = d_model % (groups * heads) == 0 and head_dim == d_model // (groups * heads)
    return {
        "num_heads": heads,
        "num_kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if usual else head_dim,
    }
