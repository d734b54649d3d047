"""Greedy texts of a serving engine, compared with those of difftx.

python benchmarks/served_texts.py FOLDER [--port=8000] [--new_tokens=32] -- COMMAND …

FOLDER is an export of `difftx convert --to=hf` with a tokenizer. COMMAND starts the engine, such as
`vllm serve FOLDER --model-impl transformers --trust-remote-code`; `--port=PORT` is added to it. The script computes the
texts of 20 prompts with difftx on the CPU, starts the engine, asks it for the same texts through its OpenAI API
(/v1/completions), and stops it.

An engine may choose another token where difftx's most likely tokens are nearly equally likely. The script therefore
scores each different text with difftx. The exit code is 1 if a token is less likely than difftx's choice by more than
0.1 nats, which is far more than the rounding of bfloat16 changes.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # The engine needs the memory of the GPU.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx2
import numpy as np

import difftx
from difftx.inference.trained_run import TrainedRun

PROMPTS = (
    *("def main(", "import ", "class Test", "for i in range(", "    return ", "if x is None:", "# This is", "try:\n"),
    *("The first ", "Once upon a time", "In the year 1", "He said that", "She was", "1, 2, 3,", "A list of", "Why "),
    *("Question: ", "It is not", "All of the", "print("),
)
TOLERANCE_NATS = 0.1
START_SECONDS = 1800  # Engines compile and load for minutes.


def wait_for(url: str, engine: subprocess.Popen) -> None:
    """Return when the engine answers, or exit if its process ends or does not answer in time."""
    for _ in range(START_SECONDS):
        if engine.poll() is not None:
            sys.exit(f"the engine ended with exit code {engine.returncode} before it answered")
        try:
            if httpx2.get(f"{url}/health").is_success:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(1)
    sys.exit(f"the engine did not answer within {START_SECONDS} s")


def choices_of(folder: str, port: int, new_tokens: int, command: list[str]) -> list[dict[str, Any]]:
    """Start the engine, return its greedy continuations of the prompts, and stop it.

    A continuation has its "text", and the "finish_reason" "stop" if the end-of-text token followed.
    """
    url = f"http://127.0.0.1:{port}"
    engine = subprocess.Popen([*command, f"--port={port}"])
    try:
        wait_for(url, engine)
        body = {"model": folder, "max_tokens": new_tokens, "temperature": 0}
        answers = [
            httpx2.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=600) for prompt in PROMPTS
        ]
        return [answer.raise_for_status().json()["choices"][0] for answer in answers]
    finally:
        engine.terminate()
        engine.wait(120)


def nats_behind(run: TrainedRun, prompt: str, choice: dict[str, Any]) -> float:
    """Return the largest difference between the log probabilities of the most likely token and the engine's token."""
    start = len(run.tokenizer.encode_prompt(prompt))
    tokens_T = run.tokenizer.encode_prompt(prompt + choice["text"])
    tokens_T += [run.tokenizer.eot_token] * (choice["finish_reason"] == "stop")
    logits_TV = run.logits(tokens_T)[start - 1 : -1]
    chosen_T1 = np.take_along_axis(logits_TV, np.array(tokens_T[start:])[:, None], -1)
    return float((logits_TV.max(-1, keepdims=True) - chosen_T1).max())


def main() -> int:
    """Compare the texts, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    run = difftx.load(args.folder)
    ours = [run.generate(prompt, new_tokens=args.new_tokens, temperature=0) for prompt in PROMPTS]
    choices = choices_of(args.folder, args.port, args.new_tokens, args.command)
    behind = []
    for prompt, text, choice in zip(PROMPTS, ours, choices, strict=True):
        if choice["text"] != text:
            behind.append(nats_behind(run, prompt, choice))
            print(f"{prompt!r}: difftx {text!r}, engine {choice['text']!r}, a token of it {behind[-1]:.2g} nats behind")
    print(f"{len(ours) - len(behind)} of {len(ours)} greedy texts are equal")
    return int(max(behind, default=0) > TOLERANCE_NATS)


if __name__ == "__main__":
    sys.exit(main())
