"""Suite `sample`: the model's continuations of the first tokens of validation documents (docs/suites.md)."""

from difftx.evals.evaluation import Evaluation, text_sets
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import Sampling, derived_seed

PROMPTS = 2
PROMPT_TOKENS = 48


def evaluate(evaluation: Evaluation) -> Result:
    """Continue the first validation documents by `eval.sample_tokens`, or until the context is full."""
    run, config = evaluation.run, evaluation.run.config
    store = next(iter(text_sets(run, "sample").values())).store
    prompt_tokens = min(PROMPT_TOKENS, config.data.sequence_length // 2)
    prompts = [
        store.slice(int(start), min(int(start) + prompt_tokens, int(end) - 1)).tolist()
        for start, end in zip(store.offsets[:PROMPTS], store.offsets[1:], strict=False)
    ]
    new_tokens = min(config.eval.sample_tokens, config.data.sequence_length - prompt_tokens)
    requests = [
        Request(prompt=prompt, new_tokens=new_tokens, seed=derived_seed(config.train.seed, number))
        for number, prompt in enumerate(prompts)
    ]
    sampling = Sampling(repetition_penalty=None, temperature=config.eval.sample_temperature, top_k=None, top_p=None)
    samples = [
        {"prompt": run.tokenizer.decode(prompt), "completion": completion.text}
        for prompt, completion in zip(prompts, generate(evaluation.lm, requests, sampling), strict=True)
    ]
    return Result(numbers={"new_tokens": Number(new_tokens, "tokens")}, details={"samples": samples})


SUITE = Suite(
    evaluate=evaluate,
    check=lambda run: text_sets(run, "sample"),
    revision=1,
    title="Samples",
    explanation="Continuations of the same validation text. They show style and gross errors, not quality.",
)
