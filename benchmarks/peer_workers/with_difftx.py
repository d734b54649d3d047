"""Worker of benchmarks/peers.py: difftx's train step with its loader, and difftx's generation."""

import sys
from pathlib import Path

import jax
from worker import Task, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.throughput import prepare
from difftx.config.recipes import load_config
from difftx.data.tokenizers import load_tokenizer
from difftx.inference.decode import LanguageModel
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.model.abstract import count_parameters


def main() -> None:
    """Serve the task: fields `config` and `overrides`."""
    task = Task()
    config = load_config(task.config, task.overrides)
    contestant = prepare(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    longer = load_config(task.config, task.overrides | {"data.sequence_length": "2304"})  # Prompt and new tokens fit.
    models: list[LanguageModel] = []

    def generate_tokens(prompt: int, new: int) -> None:
        if not models:
            params = jax.tree.map(jax.numpy.copy, contestant.state.params)  # The train step donates its own.
            models.append(LanguageModel(longer, contestant.mesh, params, tokenizer))
            models[0].allowed[tokenizer.eot_token] = False
        request = Request(prompt=[1] * prompt, new_tokens=new, seed=0)
        (completion,) = generate(models[0], [request], GREEDY)
        assert len(completion.tokens) == new, completion

    def peak_bytes() -> int:
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]

    parameters = count_parameters(config.model).total
    serve(contestant.run, generate_tokens, parameters, None if task.platform == "cpu" else peak_bytes)


main()
