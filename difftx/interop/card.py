"""The model card and the generation config of an exported model folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftx.config.fields import flat, values_of
from difftx.data.tokenizer import Tokenizer
from difftx.errors import printable
from difftx.files import write_atomically
from difftx.interop.fields import function_fields
from difftx.interop.remote_code_config import EAGER, MODELING
from difftx.interop.tokenizers import GENERATION, has_tokenizer
from difftx.json_files import read_json
from difftx.model.abstract import count_parameters
from difftx.model.architectures import describe_heads
from difftx.training.checkpoint.reading import Checkpoint
from difftx.training.metrics import read_metrics

NO_TOKENIZER = "The folder has no tokenizer. The model was trained with the tokenizer {name!r}."
SERVABLE = "Each layer calls the attention function once, so engines with one key/value cache per layer can serve it."
SERVING = {
    EAGER: "**This model is not servable**: vLLM, SGLang and similar engines cannot compute its attention weights.",
    "DiffLlamaForCausalLM": "**This folder is not servable**: DiffLlama calls the attention function twice per layer, "
    "but engines keep one key/value cache per layer. `--to=hf` exports a servable folder.",
}  # Engines can serve all other classes.


def write_card(folder: Path, name: str, settings: dict[str, Any], checkpoint: Checkpoint, files: Path) -> None:
    """Write the model card of an export.

    `name` is the name that `folder` will have in the end, `settings` the content of its config.json, and `files` a
    folder with the small files of the run.
    """
    config, step = checkpoint.config, checkpoint.manifest.step
    (causal,) = settings["architectures"]
    has_remote_code = "auto_map" in settings
    arguments = f"{name!r}, trust_remote_code=True" if has_remote_code else f"{name!r}"
    load = f"import transformers\n\nmodel = transformers.AutoModelForCausalLM.from_pretrained({arguments})"
    if has_tokenizer(folder):
        load += f"\ntokenizer = transformers.AutoTokenizer.from_pretrained({arguments})"
    rows = list(read_metrics(files / "metrics.jsonl"))
    row = next((row for row in reversed(rows) if row["split"] == "train" and row["step"] == step), {})
    tokens = row.get("tokens", step * config.train.global_batch_tokens)
    code = f"The class `{causal}` is in `{MODELING.name}`." if has_remote_code else f"The class is `{causal}`."
    values = values_of(config.model)
    fields = [(name, (values | flat(values))[name]) for name in function_fields(config.model)]
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"tags: [difftx, {config.model.architecture}]\n---",
        f"# {name}",
        f"A language model trained with difftx: architecture `{config.model.architecture}` with "
        f"{describe_heads(config.model)}, {count_parameters(config.model).total:,} parameters, step {step:,} of "
        f"{config.train.steps:,}, {tokens:,} tokens.",
        f"{code} {SERVING.get(causal, SERVABLE)}",
        _code("python", load),
        *([] if has_tokenizer(folder) else [NO_TOKENIZER.format(name=config.data.tokenizer)]),
        "## Model",
        _table(("field", "value"), [(f"`{field}`", f"`{value}`") for field, value in fields]),
        "## Losses",
        _table(("number", "value"), _losses(checkpoint, files, step, row)) or "No loss of this step is recorded.",
        "## Data",
        "The signature of the training data, which also identifies the tokenizer:",
        _code("json", json.dumps(checkpoint.manifest.data, indent=2)),
        "## Config",
        "The config of the training:",
        _code("json", config.to_json().strip()),
    ]
    write_atomically(folder / "README.md", "\n\n".join(map(printable, parts)) + "\n")


def write_generation_config(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Write the generation defaults for transformers: greedy decoding, as in `difftx generate --temperature=0`."""
    end, known = tokenizer.eot_token, tokenizer.token_bytes
    unused = [token for token in range(vocab_size) if token >= len(known) or known[token] is None]
    settings = {"do_sample": False, "eos_token_id": end, "pad_token_id": end}
    settings |= {"suppress_tokens": unused} if unused else {}  # Embedding rows without a token.
    write_atomically(folder / GENERATION, json.dumps(settings) + "\n")


def _losses(checkpoint: Checkpoint, files: Path, step: int, row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) pairs for the card: the training loss in `row`, and all suite results of these weights."""
    found: list[tuple[str, Any]] = [("training loss", row.get("loss"))] if checkpoint.part == "params" else []
    for path in sorted(files.glob(f"evals/*/{step}*.json")):
        if (result := read_json(path)).get("weights") == checkpoint.weights:
            found += [(f"{path.parent.name}: {name}", number) for name, number in result["numbers"].items()]
    return [(name, f"{number:.4f}") for name, number in found if isinstance(number, int | float)]


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in lines) if rows else ""


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
