"""Architectures that the recipes compare, each with as many parameters as the Transformer."""

from ml_collections import ConfigDict

from difftx.model.abstract import match


def choose(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Change a Transformer's config into that of another architecture with as many parameters.

    Args:
        c: Config with the sizes of the Transformer; changed in place.
        architecture: A value of `model.architecture`, or "diff_fixed_lambda" for diff with λ = λ_init.
        heads: Number of heads of the Transformer.
    """
    match(c, "diff" if architecture == "diff_fixed_lambda" else architecture, heads=heads)
    if architecture == "diff_fixed_lambda":
        c.model.lambda_learned = False
