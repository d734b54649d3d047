"""Suite `counting`: whether the model prefers the next number of a sequence to another one."""

import dataclasses

import numpy as np

from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite, register_suite
from difftx.inference.score import Item, loglikelihoods


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt such as "3, 4, 5, ", the right continuation, and a wrong one."""

    text: str
    choices: tuple[str, str]


PROMPTS = [Prompt(f"{n}, {n + 1}, {n + 2}, ", (str(n + 3), str(n + 5))) for n in range(1, 5)]


def evaluate(evaluation: Evaluation) -> Result:
    """Return the share of prompts whose right continuation is more likely than the wrong one."""

    def tokens(text):
        return tuple(evaluation.run.tokenizer.encode_ordinary(text))

    def answer(prompts):
        items = [Item(tokens(prompt.text), tokens(choice)) for prompt in prompts for choice in prompt.choices]
        scores = [score.loglikelihood for score in loglikelihoods(evaluation.lm, items, batch_rows=len(items))]
        return [right > wrong for right, wrong in zip(scores[::2], scores[1::2], strict=True)]

    right = [is_right for _, is_right in evaluation.answers(PROMPTS, answer, what="prompts")]
    return Result(numbers={"right": Number(np.mean(right), "share of prompts", better="higher", chance=0.5)})


register_suite("counting", Suite(evaluate=evaluate))
