"""The architectures that recipes compare, each with as many parameters as the Transformer."""

from ml_collections import ConfigDict

from difftx.model.matching import match


def choose(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Turn the config of a Transformer of `heads` heads into another architecture's.

    Args:
        c: config, changed in place.
        architecture: a value of `model.architecture`, or "diff_fixed_lambda": diff with λ = λ_init.
        heads: number of heads of the Transformer.
    """
    match(c, "diff" if architecture == "diff_fixed_lambda" else architecture, heads=heads)
    if architecture == "diff_fixed_lambda":
        c.model.lambda_learned = False
