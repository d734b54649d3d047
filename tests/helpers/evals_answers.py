"""A replacement for `generate` in tests of suites."""

from difftx.inference.generate import Completion


class Writer:
    """Replacement for `generate` in `Evaluation.completions`, which answers the text of each prompt by a rule.

    `prompts` has the texts, and `options` the sampling and the stop strings of each call.
    """

    def __init__(self, monkeypatch, answer):
        self.answer, self.prompts, self.options = answer, [], []
        monkeypatch.setattr("difftx.evals.evaluation.generate", self)

    def __call__(self, lm, requests, sampling, *, stop=(), batch_rows=None):
        self.options.append((sampling, stop))
        completions = []
        for request in requests:
            assert len(request.prompt) + request.new_tokens <= lm.context_length
            self.prompts.append(bytes(request.prompt).decode(errors="replace"))
            tokens = list(self.answer(self.prompts[-1]).encode())[: request.new_tokens]
            ended_by = "limit" if len(tokens) == request.new_tokens else "stop string"
            completions.append(Completion(tokens=tokens, text=f" {bytes(tokens).decode()}\n", ended_by=ended_by))
        return completions
