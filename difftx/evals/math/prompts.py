"""Prompts of suite `math`: demonstrations, which are solved problems, then a question.

A demonstration, followed by an empty line, is:

    Question: A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?
    Answer: It takes 2/2=1 bolt of white fiber. So the total amount of fabric is 2+1=3 bolts. The answer is 3.
"""

import dataclasses

import numpy as np

from difftx.config.eval import MathTaskConfig
from difftx.errors import UserError
from difftx.evals.math.formats import Problem, read_problems
from difftx.inference.generate import Request
from difftx.inference.sampling import derived_seed
from difftx.training.run import Run

STOP = ("\nQuestion:",)  # After its answer, the model may continue with a new problem.
NUDGE = " Let's think step by step."  # Ends prompts without demonstrations (arXiv 2205.11916).


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathItem(Request):
    """The request for an answer to a problem."""

    id: str
    problem: Problem


class MathTask:
    """A task's problems with their prompts. The same files, settings and tokenizer always give the same prompts."""

    def __init__(self, run: Run, config: MathTaskConfig):
        """Make the prompts, which share demonstrations, or raise `UserError` for an invalid file or a long prompt."""
        settings = run.config.eval.math
        self.name, self._settings = config.name, settings
        rng = np.random.default_rng(settings.seed)
        field = f"eval.math.tasks, {config.name}"
        context = self._demonstrations(config, field, rng)
        problems = read_problems(config.test, config.format, field=f"{field}.test")
        if settings.questions is not None:
            problems = [problems[i] for i in sorted(rng.permutation(len(problems))[: settings.questions])]
        nudge = NUDGE if settings.chain_of_thought and not settings.shots else ""
        context_length = run.config.data.sequence_length
        self.items: list[MathItem] = []
        for number, problem in enumerate(problems):
            prompt = run.tokenizer.encode_prompt(f"{context}Question: {problem.question}\nAnswer:{nudge}")
            if len(prompt) >= context_length:
                raise UserError(
                    f"{problem.name}: the prompt has {len(prompt)} tokens, and the model's context "
                    f"data.sequence_length={context_length}; remove the line"
                    + (f", or use fewer demonstrations than eval.math.shots={settings.shots}" if settings.shots else "")
                )
            item = MathItem(
                id=f"{self.name}/{number}",
                problem=problem,
                prompt=prompt,
                new_tokens=min(settings.new_tokens, context_length - len(prompt)),
                seed=derived_seed(settings.seed, number),
            )
            self.items.append(item)

    def _demonstrations(self, config: MathTaskConfig, field: str, rng: np.random.Generator) -> str:
        settings, form = self._settings, config.train_format or config.format
        if not settings.shots or config.train is None:
            return ""
        problems = read_problems(config.train, form, field=f"{field}.train")
        if len(problems) < settings.shots:
            raise UserError(
                f"{field}.train={config.train} has {len(problems)} problems, but eval.math.shots={settings.shots}"
            )
        chosen = [problems[i] for i in rng.permutation(len(problems))[: settings.shots]]
        if settings.chain_of_thought and any(problem.solution is None for problem in chosen):
            raise UserError(
                f"{field}: format {form!r} has no solutions to show; set train and train_format to a file of a format "
                "with solutions, or use eval.math.chain_of_thought=false"
            )
        return "".join(self._demonstration(problem) for problem in chosen)

    def _demonstration(self, problem: Problem) -> str:
        answer = f"The answer is ${problem.answer}$." if problem.latex else f"The answer is {problem.answer}."
        reasoning = f"{problem.solution} " if self._settings.chain_of_thought else ""
        return f"Question: {problem.question}\nAnswer: {reasoning}{answer}\n\n"
