"""Suite `sample`: the model's continuations of the first tokens of validation documents."""

from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Result
from difftx.evals.suite import Suite
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import Sampling
from difftx.training.run import Run

PROMPTS = 2
PROMPT_TOKENS = 48


def evaluate(evaluation: Evaluation) -> Result:
    """Continue the beginnings of the first validation documents.

    A continuation has `eval.sample_tokens` tokens, or fewer if the context holds fewer.
    """
    run, config = evaluation.run, evaluation.run.config
    store = validation_text(run)
    prompt_tokens = min(PROMPT_TOKENS, config.data.sequence_length // 2)
    prompts = [
        store.slice(int(start), min(int(start) + prompt_tokens, int(end) - 1)).tolist()
        for start, end in zip(store.offsets[:PROMPTS], store.offsets[1:], strict=False)
    ]
    new_tokens = min(config.eval.sample_tokens, config.data.sequence_length - prompt_tokens)
    completions = generate(
        evaluation.lm,
        [
            Request(prompt=prompt, new_tokens=new_tokens, seed=(config.train.seed + number) % 2**32)
            for number, prompt in enumerate(prompts)
        ],
        Sampling(repetition_penalty=None, temperature=config.eval.sample_temperature, top_k=None, top_p=None),
    )
    samples = [
        {"prompt": run.tokenizer.decode(prompt), "completion": completion.text}
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return Result(numbers={"new_tokens": float(new_tokens)}, details={"samples": samples})


def validation_text(run: Run) -> TokenStore:
    """Return the first validation set of text.

    Raises:
        UserError: no validation set is text.
    """
    stores = [rows.store for rows in run.data.valid.values() if isinstance(rows, PackedRows)]
    if not stores:
        raise UserError("suite 'sample': no validation set is text; synthetic tasks have the suite 'exact_match'")
    return stores[0]


SUITE = Suite(evaluate=evaluate, reads=("sample_tokens", "sample_temperature"), check=validation_text)
