"""The model with lm-eval's interface. Only the suite `harness` imports this module, because lm-eval is optional."""

import collections
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.harness.requests import GenerationRequest, Tokens, complete_all, score_all
from difftx.inference.sampling import Sampling, derived_seed
from difftx.inference.score import Score

GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}


class HarnessModel(TemplateLM):
    """An lm-eval model. Each process runs lm-eval by itself, with the same requests and answers in all processes."""

    def __init__(self, evaluation: Evaluation):
        super().__init__()
        self.truncated = 0  # Number of requests truncated on the left.
        self._evaluation = evaluation
        self._settings = evaluation.run.config.eval.harness
        self._context_length = evaluation.lm.context_length
        self._end_of_text = evaluation.lm.tokenizer.decode([self.eot_token_id])

    @property
    def eot_token_id(self) -> int:
        return self._evaluation.lm.tokenizer.eot_token

    @property
    def prefix_token_id(self) -> int:
        """The token that lm-eval uses as context for a text without one."""
        return (self.eot_token_id, *self._evaluation.lm.tokenizer.prefix)[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text. Names of special tokens are encoded as ordinary text.

        By default, add the tokens that precede each text, as lm-eval's Hugging Face models do.
        """
        tokenizer = self._evaluation.lm.tokenizer
        return tokenizer.encode_ordinary(string) if add_special_tokens is False else tokenizer.encode_prompt(string)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Score]:
        # The last token of a continuation is only a target, so it needs no position in the context.
        pairs = [
            (self._truncated(tuple(context), self._context_length + 1 - len(continuation)), tuple(continuation))
            for _, context, continuation in requests
        ]
        return score_all(self._evaluation, pairs, what="answers to choose from")

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return log p of each text and, as in lm-eval, of the ids before it. Windows score each token once."""
        windows = []
        for request in requests:
            text = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(text, self.prefix_token_id, self._context_length, context_len=1)
            windows.append([(tuple(context), tuple(tokens)) for context, tokens in map(make_disjoint_window, parts)])
        scores = iter(score_all(self._evaluation, [pair for text in windows for pair in text], what="windows of texts"))
        return [sum(next(scores).loglikelihood for _ in text) for text in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the model's completion of each context, up to the first stop string of the task."""
        repeats: collections.Counter[tuple[str, str]] = collections.Counter()
        found = []
        for request in requests:
            context, options = request.args
            key = context, repr(options)
            found.append(self._generation_request(context, options, repeats[key]))
            repeats[key] += 1
        return complete_all(self._evaluation, found, what="texts to write")

    def _generation_request(self, context: str, options: dict[str, Any], repeat: int) -> GenerationRequest:
        """Return a request. `repeat` is the number of equal requests before it. It changes the seed."""
        options = normalize_gen_kwargs(options)
        if unknown := options.keys() - GENERATION:
            raise UserError(
                f"suite 'harness': a task requires the generation option {min(unknown)!r}, which difftx does not "
                "support; remove the task from eval.harness.tasks"
            )
        new_tokens, greedy = options["max_gen_toks"], not options["do_sample"]
        tokens = tuple(self.tok_encode(context)) or (self.eot_token_id,)
        return GenerationRequest(
            prompt=self._truncated(tokens, self._context_length - new_tokens),
            new_tokens=new_tokens,
            # As in lm-eval's models, the name of the end-of-text token in ordinary text also ends the completion.
            stop=tuple(filter(None, handle_stop_sequences(options["until"], eos=self._end_of_text))),
            sampling=Sampling(
                repetition_penalty=options.get("repetition_penalty"),
                temperature=0.0 if greedy else options.get("temperature", 1.0),
                top_k=None if greedy else options.get("top_k") or None,  # 0 means all tokens, as in Hugging Face.
                top_p=None if greedy else options.get("top_p"),
            ),
            seed=0 if greedy else derived_seed(self._settings.seed, repeat),
        )

    def _truncated(self, tokens: Tokens, room: int) -> Tokens:
        """Return the last `room` tokens. Raise `UserError` if tokens are lost and `eval.harness.truncate` is False."""
        if len(tokens) <= room:
            return tokens
        if room < 1 or not self._settings.truncate:
            way = ", or truncate long requests on the left with eval.harness.truncate=true" if room > 0 else ""
            raise UserError(
                f"suite 'harness': a request takes {self._context_length + len(tokens) - room} tokens, and the model's "
                f"context data.sequence_length={self._context_length}; remove its task from eval.harness.tasks{way}"
            )
        self.truncated += 1
        return tokens[-room:]
