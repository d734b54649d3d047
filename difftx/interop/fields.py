"""Fields of another format's config.json, and the `model` fields that have one value in all other formats."""

from pathlib import Path
from typing import Any

from difftx.errors import UserError
from difftx.files import read_json

# Values of `model` fields that are the same for every model of another format.
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
    """A config.json whose fields are checked when they are read."""

    def __init__(self, path: Path):
        self.path = path
        self._raw = read_json(path)
        if not isinstance(self._raw, dict):
            raise UserError(f"{path}: not an object")

    def get[T](self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a field of the given type, or `default` if the field is absent or null.

        Raises:
            UserError: If the field is missing and has no default, has another type, or is a number that is not
                positive.
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
        """Raise `UserError` unless a field has one of `values`. An absent field counts as the first of them."""
        value = self._raw.get(name, values[0])
        if value not in values:
            raise UserError(f"{self.path}: {name}={value!r} does not convert; only {values[0]!r} does")


def heads_from(d_model: int, groups: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int | None]:
    """Return the head fields of `model`. As in a config file, a field that follows from others is None."""
    usual = d_model % (groups * heads) == 0 and head_dim == d_model // (groups * heads)
    return {
        "num_heads": heads,
        "num_kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if usual else head_dim,
    }
