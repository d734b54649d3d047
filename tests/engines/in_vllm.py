"""Greedy text of model folders in vLLM. `engines_test.py` starts this script in `.venv-engines`, which has no JAX.

in_vllm.py TASKS.json RESULTS.json

TASKS.json maps names to arguments of `serve`. RESULTS.json maps them to its results, or to {"error": message}.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # `apply_model` needs the model in this process.

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

# Requests wait for each other, and sixteen tokens per step split prompts and mix them with decoding.
SMALL = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 64}


def serve(folder, prompts, new_tokens, vocabulary, options):
    """Return the greedy tokens after each prompt, a list of token ids, and the dtypes of parameters by name.

    Tokens from `vocabulary` are never chosen. `options` are further arguments of `vllm.LLM`. If several processes have
    the parameters, there are no dtypes.
    """
    llm = LLM(folder, model_impl="transformers", trust_remote_code=True, enforce_eager=True, **SMALL, **options)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, allowed_token_ids=[*range(vocabulary)])
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    result = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    return result | ({} if "distributed_executor_backend" in options else {"dtypes": llm.apply_model(dtypes_of)[0]})


def dtypes_of(model):
    return {name: str(parameter.dtype) for name, parameter in model.named_parameters()}


def main(tasks, results):
    found = {}
    for name, task in json.loads(Path(tasks).read_text()).items():
        try:
            found[name] = serve(**task)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        Path(results).write_text(json.dumps(found))
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":  # vLLM's workers import this file.
    main(*sys.argv[1:])
