"""The runs in docs/results.json, by study, arm and seed."""

import json
import statistics

from benchmarks import results

COLLECTED = json.loads(results.COLLECTED.read_text())
LOSS = "test/loss_bits_per_byte"
FIRST, AGAIN, RECALL = "question-1-novels", "question-1-again", "question-1-recall"
NOISE, MORE_NOISE, DIVERGING = "question-6", "question-6-more", "question-3-recall"
LONGER = "question-6-longer"


def losses(study, arm, number=LOSS, **changes):
    """Return seed → loss of an arm with these changes."""
    wanted = {name.replace("__", "."): value for name, value in changes.items()}
    tuned = ("optimizer.learning_rate", *(["model.post_scale"] if arm.endswith("-gain") else []))
    return {
        r["seed"]: r["numbers"][number]
        for r in COLLECTED[study]
        if r["arm"] == arm and {n: v for n, v in r["changes"].items() if n not in tuned} == wanted
    }


def contrast(study, one, other, number=LOSS):
    own, reference = losses(study, one, number), losses(study, other, number)
    assert own.keys() == reference.keys()
    return [own[seed] - reference[seed] for seed in sorted(own)]


def solved(study, arm, task="recall"):
    accuracies = [
        r["numbers"]["exact_match/retrieval"] for r in COLLECTED[study] if (r["arm"], r["task"]) == (arm, task)
    ]
    return sum(a >= 0.9 for a in accuracies), len(accuracies)


def accuracies(study, arm, task):
    return {
        r["seed"]: r["numbers"]["exact_match/retrieval"]
        for r in COLLECTED[study]
        if (r["arm"], r["task"]) == (arm, task)
    }


def best_of_tuning(study, arm, task):
    """Return the largest accuracy of an arm among the runs that tuned its settings."""
    return max(
        r["numbers"]["exact_match/retrieval"]
        for r in COLLECTED[f"{study}-tuning"]
        if (r["arm"], r["task"]) == (arm, task)
    )


def lambdas(study, layer, **where):
    return [
        r["numbers"][f"lambda/{layer}"]
        for r in COLLECTED[study]
        if all(r[name] == value for name, value in where.items())
    ]


def rates(study, arm, task):
    return {r["learning_rate"] for r in COLLECTED[study] if (r["arm"], r["task"]) == (arm, task)}


def settings(study, arm, task):
    """Return the pairs of gain and learning rate of an arm's runs."""
    return {
        (r["changes"].get("model.post_scale"), r["learning_rate"])
        for r in COLLECTED[study]
        if (r["arm"], r["task"]) == (arm, task)
    }


def tokens_per_parameter(study, task):
    """Return the smallest and the largest number of a study's runs."""
    found = [round(r["tokens"] / r["parameters"]) for r in COLLECTED[study] if r["task"].startswith(task)]
    return min(found), max(found)


def step_time(arm, decimals=1):
    """Return the median over rounds of an arm's step time over that of the Transformer in the same round, as text."""
    times = {
        name: [r["numbers"]["step_milliseconds"] for r in COLLECTED["step-times"] if r["arm"] == name]
        for name in (arm, "transformer")
    }
    ratio = statistics.median(own / of for own, of in zip(times[arm], times["transformer"], strict=True))
    return f"{ratio:.{decimals}f}"


def median_seconds(runs, arm):
    return statistics.median(r["wall_seconds"] for r in runs if r["arm"] == arm)
