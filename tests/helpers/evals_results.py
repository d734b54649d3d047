"""Suites that share one forward pass, and parts of their results."""

LOSS_SUITES = ["loss", "recall", "position"]


def flat(value):
    """Return the numbers in a JSON value, in order."""
    if isinstance(value, dict):
        return [x for item in value.values() for x in flat(item)]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    return [value] if isinstance(value, (int, float)) else []


def chance_of(result):
    """Return the numbers of a model that guesses, of those that have one."""
    return {name: number.chance for name, number in result.numbers.items() if number.chance is not None}
