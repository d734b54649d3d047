"""Run difftx's commands on tiny inputs and record what they compute.

    python tests/golden/driver.py --root=DIR --part=training --out=FILE.json

DIR is a source tree of difftx, of this commit or another one. The driver uses only commands and run directories, which
a redesign keeps. `batches.py` is the only exception. All commands of a part run in this one process, since imports
would take most of their time.

Values of the record: integers, texts and hashes are exact. Floats are exact on one machine and differ by rounding
between machines. A text that begins with "bits:" is the hash of floats: it is comparable on one machine only.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import inputs
import numpy as np

BITS = "bits:"  # Prefix of the hash of floats.
LONGEST = 16  # Lists of more numbers are recorded as a summary, texts of more than 8 × 16 characters as a hash.

# All fields that the numbers depend on. configs/quickstart.py sets those that an architecture determines.
FIELDS = {
    "model.vocab_size": 264,
    "model.d_model": 32,
    "model.num_layers": 2,
    "model.mlp_dim": 64,
    "model.rope_theta": 10_000.0,
    "model.norm_eps": 1e-5,
    "model.init": "fan_in",
    "model.embedding_std": 0.02,
    "model.zero_init_output": "false",  # Attention with zero output would agree with any attention.
    "model.tie_embeddings": "true",
    "model.compute_dtype": "float32",
    "model.remat": "none",
    "model.attention_implementation": "auto",
    "data.path": "text/*.txt",
    "data.tokenizer": "bytes",
    "data.sequence_length": 64,
    "data.packing": "concat",
    "data.document_mask": "false",
    "data.valid_fraction": 0.2,
    "data.seed": 0,
    "data.prefetch_batches": 1,
    "data.cache_path": "cache",
    "optimizer.learning_rate": 1e-2,
    "optimizer.final_learning_rate": 0.0,
    "optimizer.warmup_steps": 1,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 1.0,
    "train.steps": 4,
    "train.global_batch_tokens": 4 * 64,
    "train.accumulation": 1,
    "train.seed": 0,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.context": 1,
    "mesh.tensor": 1,
    "checkpoint.every_steps": 1000,
    "eval.every_steps": 1000,
    "eval.suites": "",
    "logging.every_steps": 1,
    "logging.trackers": "",
}
DIFF = {"model.num_heads": 2, "model.head_norm": "rms_affine"}
# Runs of the part "training", one per family of attention kernels. The other runs belong to the part "variants".
FAMILIES = ("diff", "transformer", "top_k")
# Name of a run → architecture of configs/quickstart.py and fields. Heads have width 8 unless grouped.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "diff": ("diff", DIFF | {"model.head_norm_eps": 1e-5, "model.lambda_std": 0.1}),
    "transformer": ("transformer", {"model.num_heads": 4}),
    "diff_v2": ("diff_v2", {"model.num_heads": 4}),
    "gda": ("gda", {"model.num_heads": 3, "model.gda.signal_heads": 3, "model.head_norm": "rms_affine"}),
    "motif": ("motif", {"model.num_heads": 3, "model.motif.signal_heads": 3, "model.head_norm": "rms_affine"}),
    "gdla": ("gdla", {"model.num_heads": 4, "model.gdla.signal_heads": 2}),
    "zero_branch": ("zero_branch", {"model.num_heads": 4, "model.zero_branch.anneal_steps": 2}),
    "dex": ("dex", {"model.num_heads": 4, "model.dex.anneal_steps": 2}),
    "gated": ("gated", {"model.num_heads": 4}),
    "off_by_one": ("off_by_one", {"model.num_heads": 4}),
    "sink": ("sink", {"model.num_heads": 4}),
    "top_k": ("top_k", {"model.num_heads": 4, "model.top_k.k": 8}),
    "signed_mask": ("signed_mask", DIFF),
    "diff fixed lambda": ("diff_fixed_lambda", DIFF),
    "diff lambda_init=0.5": ("diff", DIFF | {"model.lambda_init": 0.5}),
    "diff num_kv_heads=2": ("diff", DIFF | {"model.num_heads": 4, "model.num_kv_heads": 2}),
    "diff head_norm=rms": ("diff", DIFF | {"model.head_norm": "rms"}),
    "diff head_norm=scalar": ("diff", DIFF | {"model.head_norm": "scalar"}),
    "diff head_norm=none": ("diff", DIFF | {"model.head_norm": "none"}),
    "diff untied": ("diff", DIFF | {"model.tie_embeddings": "false"}),
    "diff remat=full": ("diff", DIFF | {"model.remat": "full"}),
    "diff remat=dots": ("diff", DIFF | {"model.remat": "dots"}),
    "diff accumulation=2": ("diff", DIFF | {"train.accumulation": 2}),
    "diff document_mask": ("diff", DIFF | {"data.document_mask": "true", "data.packing": "best_fit"}),
    "diff bfloat16": ("diff", DIFF | {"model.compute_dtype": "bfloat16"}),
    "transformer num_kv_heads=2": ("transformer", {"model.num_heads": 4, "model.num_kv_heads": 2}),
    "transformer init=normal": ("transformer", {"model.num_heads": 4, "model.init": "normal", "model.init_std": 0.05}),
}

STORE = {"data.path": "store"}
CHATS = {"data.path": "chats"}
SYNTHETIC = {
    "data.synthetic.vocab_size": 64,
    "data.synthetic.pairs": 4,
    "data.synthetic.query_power": 0.01,
    "data.synthetic.train_examples": 200,
    "data.synthetic.valid_examples": 16,
    "data.synthetic.seed": 0,
}
BEST_FIT, MASK = {"data.packing": "best_fit"}, {"data.document_mask": "true"}
UPSAMPLED = {"data.upsampling.longer_than_tokens": 300, "data.upsampling.share": 0.9}
MIXTURE = {
    "data.path": "None",
    "data.sources": json.dumps(
        [
            {"name": "books", "path": "store", "weight": 0.7},
            {"name": "web", "path": "text/*.txt", "weight": 0.3},
            {"name": "held out", "path": "chats", "weight": 0},
        ]
    ),
    "data.stages": json.dumps([{"from_tokens": 256 * 64, "weights": [0.1, 0.5, 0.4]}]),
}
# Number of batches of 4 rows. They cover more than one epoch of the small inputs, and both stages of a mixture.
BATCHES = 80
ORDERS: dict[str, dict[str, Any]] = {
    "text concat": {},
    "text other seed": {"data.seed": 7},
    "store concat": STORE,
    "store concat document_mask": STORE | MASK,
    "store best_fit": STORE | BEST_FIT,
    "store best_fit document_mask": STORE | BEST_FIT | MASK,
    "chats concat": CHATS,
    "chats best_fit document_mask": CHATS | BEST_FIT | MASK,
    "store upsampled": STORE | UPSAMPLED,
    "store upsampled best_fit document_mask": STORE | UPSAMPLED | BEST_FIT | MASK,
    "mixture": MIXTURE,
    "mixture best_fit document_mask": MIXTURE | BEST_FIT | MASK,
    "synthetic mqar": SYNTHETIC | {"data.path": "synthetic:mqar"},
    "synthetic retrieval": SYNTHETIC | {"data.path": "synthetic:retrieval", "data.synthetic.distractors": 8},
    "synthetic copy": SYNTHETIC | {"data.path": "synthetic:copy"},
}

WINDOW = 512  # Tokens per row of the checkpoint that suites measure. A needle prompt takes about 300.
# The weights are so large that, after a few steps, the generated text depends on the whole prompt.
MEASURED = DIFF | {
    "model.tie_embeddings": "false",
    "model.init": "normal",
    "model.init_std": 0.3,
    "model.embedding_std": 1.0,
    "optimizer.learning_rate": 3e-3,
    "data.sequence_length": WINDOW,
    "train.global_batch_tokens": 2 * WINDOW,
    "train.steps": 4,
}
SUITES: dict[str, dict[str, Any]] = {
    "loss": {"loss_tokens": 4096},
    "recall": {"loss_tokens": 4096, "recall_max_bigram_count": 40},
    "position": {"position_documents": 3},
    "needle": {
        "needle.cases": json.dumps([{"needles": 1, "queries": 1}, {"needles": 2, "queries": 2}]),
        "needle.depths": "0,0.5,1",
        "needle.lengths": WINDOW,
        "needle.samples": 1,
        "needle.new_tokens": 10,
        "needle.seed": 0,
    },
    "attention": {
        "needle.depths": "0,1",
        "needle.new_tokens": 10,
        "needle.seed": 0,
        "attention.needles": 2,
        "attention.queries": 1,
        "attention.samples": 1,
        "attention.l0_share": 1e-3,
        "attention.shown_queries": 4,
    },
    "icl": {
        "icl.tasks": json.dumps(
            [{"name": "trec", "train": "icl_train.jsonl", "test": "icl_test.jsonl", "text": "text", "label": "label",
              "text_word": "Question", "label_word": "Type"}]
        ),
        "icl.shots": "1,4",
        "icl.questions": 3,
        "icl.orders": "random,alternating",
        "icl.permutations": 2,
        "icl.seed": 0,
    },
    "hallucination": {
        "hallucination.sets": json.dumps(
            [{"name": "qa", "path": "towns.jsonl", "kind": "question_answering", "document": "context",
              "question": "input", "answers": "answers", "new_tokens": 8},
             {"name": "news", "path": "towns.jsonl", "kind": "summarisation", "document": "context",
              "question": None, "answers": "summary", "new_tokens": 8}]
        ),
        "hallucination.samples": 3,
        "hallucination.support_words": 2,
        "hallucination.support_threshold": 0.5,
        "hallucination.seed": 0,
    },
    "sample": {"sample_tokens": 24, "sample_temperature": 0.8},
    "outliers": {"outliers.tokens": 2048, "outliers.ranks": "1,2,10,100"},
    "quantize": {
        "loss_tokens": 2048,
        "quantize.bits": "16,6",
        "quantize.granularity": "query",
        "quantize.suites": "loss",
    },
    "gradients": {
        "gradients.tokens": 1024,
        "gradients.at_initialization": "as_configured,no_scale,no_norm,no_scale_no_norm,counterpart",
    },
    "throughput": {"throughput_rounds": 1, "throughput_steps": 1},
    "exact_match": {},
    "harness": {"harness.data_path": "harness", "harness.limit": 2, "harness.num_fewshot": 0, "harness.seed": 1234},
    "math": {
        "math.tasks": json.dumps(
            [{"name": "gsm8k", "format": "gsm8k", "test": "gsm8k_test.jsonl", "train": "gsm8k_train.jsonl",
              "train_format": None}]
        ),
        "math.shots": 2,
        "math.questions": 3,
        "math.new_tokens": 8,
        "math.temperature": 0.0,
        "math.seed": 0,
    },
}  # fmt: skip
SUITES_OF_PART = {
    "suites": ("loss", "recall", "position", "needle", "sample"),
    "more_suites": ("attention", "icl", "hallucination", "outliers", "quantize", "gradients", "throughput"),
    "extras": ("harness", "math"),  # They need the extra "eval".
}


class Commands:
    """Runs the commands of one source tree of difftx in this process."""

    def __init__(self, root: Path):
        self.root = root

    def run(self, command: str, *flags: str) -> str:
        """Run train.py, eval.py or a command of `python -m difftx`; return what it printed.

        Raises:
            RuntimeError: the command ends with an exit code other than 0.
        """
        out, before = io.TextIOWrapper(io.BytesIO(), "utf-8"), sys.argv
        code: Any = 0
        sys.argv = [command, *flags]
        try:
            with contextlib.redirect_stdout(out):
                if command.endswith(".py"):
                    runpy.run_path(str(self.root / command), run_name="__main__")
                else:
                    sys.argv.insert(0, "difftx")
                    runpy.run_module("difftx", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.argv = before
        out.flush()
        text = out.buffer.getvalue().decode()
        if code:
            raise RuntimeError(f"{command} {' '.join(flags)}: exit code {code}\n{text}")
        return text

    def train(self, workdir: str, architecture: str, fields: Mapping[str, Any]) -> None:
        """Train a run."""
        self.run("train.py", f"--workdir={workdir}", *self.config(architecture, fields))

    def config(self, architecture: str, fields: Mapping[str, Any]) -> list[str]:
        """Return the flags of a config."""
        changed = FIELDS | fields
        if "## model.gda" not in (self.root / "docs/config.md").read_text():  # Its architectures have no own groups.
            flat = functools.partial(re.sub, r"model\.(top_k)\.k|model\.\w+\.(\w+)", r"model.\1\2")
            changed = {flat(name): value for name, value in changed.items()}
        return [f"--config={self.spec(architecture)}", *(f"--config.{name}={changed[name]}" for name in changed)]

    def spec(self, architecture: str) -> str:
        """Return the config file of an architecture."""
        return f"{self.root}/configs/quickstart.py:{architecture}"


# ── Parts. Each function returns its record. ──


def training(commands: Commands) -> dict[str, Any]:
    """Return loss and gradient norm of every step of a run of each family."""
    return {name: _steps(commands, name, *RUNS[name]) for name in FAMILIES}


def variants(commands: Commands) -> dict[str, Any]:
    """Return loss and gradient norm of every step of the other runs."""
    known = (commands.root / "docs/config.md").read_text()  # An older tree may lack the architecture of a run.
    names = [name for name in RUNS if name not in FAMILIES and (f'"{name}"' in known or " " in name)]
    return {name: _steps(commands, name, *RUNS[name]) for name in names}


def data(commands: Commands) -> dict[str, Any]:
    """Return hashes of prepared stores, and of the first batches of every order."""
    record: dict[str, Any] = {}
    flags = ["--tokenizer=bytes", "--workers=1", "--valid_fraction=0.1"]
    inputs_of = {
        "store": ["--input=documents.jsonl", "--id_field=name", "--shard_tokens=8000"],
        "chats": ["--input=chats.jsonl", "--prompt_field=ask"],
    }
    for store, of_input in inputs_of.items():
        commands.run("prepare", *of_input, *flags, f"--out={store}")
        files = sorted(path for path in Path(store).rglob("*") if path.is_file() and path.name != "meta.json")
        record[store] = {str(path): _sha256(path.read_bytes()) for path in files}
        meta = json.loads(Path(store, "meta.json").read_text())
        record[store]["meta"] = {name: meta[name] for name in ("dtype", "splits", "tokenizer")}
        record[store]["verify"] = commands.run("data", "verify", store)
        record[store]["show"] = commands.run("data", "show", store, "--row=3", "--sequence_length=64")
    commands.run("data", "bigrams", "store", "--out=bigrams")
    header, _, counts = Path("bigrams").read_bytes().partition(b"\n")
    del header  # It holds absolute paths.
    record["bigrams"] = _sha256(counts)
    adapter = commands.root / "tests" / "golden" / "batches.py"
    adapter = adapter if adapter.exists() else Path(__file__).with_name("batches.py")
    first_batches: Callable[..., list[dict[str, Any]]] = runpy.run_path(str(adapter))["first_batches"]
    for name, fields in ORDERS.items():
        texts = {field: str(value) for field, value in (FIELDS | fields).items()}
        batches = first_batches(commands.spec("diff"), texts, BATCHES)
        record[f"batches of {name}"] = {array: _array_sha256([b[array] for b in batches]) for array in batches[0]}
    return record


def suites(commands: Commands) -> dict[str, Any]:
    """Return results of suites, generated text and converted weights of a fixed checkpoint."""
    record = {"measured": _steps(commands, "measured", "diff", MEASURED)}
    record |= {suite: _result(commands, "measured", suite) for suite in SUITES_OF_PART["suites"]}
    for target in ("diffllama", "official"):
        record[f"convert {target}"] = _converted(commands, "measured", "diff", MEASURED, target)
    return record | {"generate": _generated(commands)}


def more_suites(commands: Commands) -> dict[str, Any]:
    """Return results of the suites that compile most, of a synthetic task, and of a suite in the training loop."""
    commands.train("measured", "diff", MEASURED)
    record: dict[str, Any] = {suite: _result(commands, "measured", suite) for suite in SUITES_OF_PART["more_suites"]}
    # A synthetic task has no text, so it needs a run of its own.
    record["recalled"] = _steps(commands, "recalled", "diff", DIFF | SYNTHETIC | {"data.path": "synthetic:mqar"})
    record["exact_match"] = _result(commands, "recalled", "exact_match")
    in_the_loop = RUNS["transformer"][1] | {"eval.suites": "loss", "eval.loss_tokens": 1024}
    commands.train("evaluated", "transformer", in_the_loop)
    rows = [{name: row[name] for name in row if name != "attempt"} for row in _metrics("evaluated", "valid")]
    converted = _converted(commands, "evaluated", "transformer", RUNS["transformer"][1], "hf")
    return record | {"loss in the training loop": rows, "convert transformer": converted}


def extras(commands: Commands) -> dict[str, Any]:
    """Return results of the suites that need the extra "eval"."""
    commands.train("measured", "diff", MEASURED)
    return {suite: _result(commands, "measured", suite) for suite in SUITES_OF_PART["extras"]}


PARTS = {part.__name__: part for part in (training, variants, data, suites, more_suites, extras)}


def _steps(commands: Commands, workdir: str, architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Train a run and return the numbers of its steps."""
    commands.train(workdir, architecture, fields)
    rows = _metrics(workdir, "train")
    return {name: [row[name] for row in rows] for name in ("step", "loss", "grad_norm")}


def _metrics(workdir: str, split: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


def _result(commands: Commands, workdir: str, suite: str) -> dict[str, Any]:
    flags = [f"--eval.{field}={value}" for field, value in SUITES[suite].items()]
    commands.run("eval.py", f"--workdir={workdir}", f"--suite={suite}", *flags)
    (path,) = Path(workdir, "evals", suite).glob("*.json")
    result = json.loads(path.read_text())
    if suite == "throughput":  # The numbers measure the machine.
        return {name: sorted(result[name]) for name in ("numbers", "details")}
    result["details"].pop("lm_eval", None)  # The version of lm_eval.
    charts = {chart["name"]: _digest(chart) for chart in result["charts"]}
    return {"numbers": result["numbers"], "details": _short(result["details"]), "charts": charts}


def _generated(commands: Commands) -> dict[str, Any]:
    run = ["--workdir=measured", "--new_tokens=24"]
    greedy = commands.run("generate", *run, "--prompt=The river", "--temperature=0")
    sampled = ["--temperature=0.9", "--top_k=20", "--top_p=0.95", "--repetition_penalty=1.1", "--seed=3"]
    lines = commands.run("generate", *run, "--prompts=prompts.jsonl", *sampled).splitlines()
    penalised = commands.run("generate", *run, "--prompt=red", "--temperature=0", "--repetition_penalty=1.5")
    return {"greedy": greedy, "greedy, penalty": penalised, "sampled": [json.loads(line) for line in lines]}


def _converted(
    commands: Commands, source: str, architecture: str, fields: Mapping[str, Any], target: str
) -> dict[str, Any]:
    """Convert a run to another format, back, and to that format again. Record whether the files stay the same."""
    there, back, again = (Path(f"{source} {target} {i}") for i in range(3))
    commands.run("convert", "--from=difftx", f"--to={target}", f"--input={source}", f"--out={there}")
    # The exported folder determines the model's fields.
    kept = {field: value for field, value in (FIELDS | fields).items() if not field.startswith("model.")}
    config = [f"--config={commands.spec(architecture)}", *(f"--config.{field}={kept[field]}" for field in kept)]
    source_format = "hf" if target == "diffllama" else target
    commands.run("convert", f"--from={source_format}", "--to=difftx", f"--input={there}", f"--out={back}", *config)
    commands.run("convert", "--from=difftx", f"--to={target}", f"--input={back}", f"--out={again}")
    files = sorted(path for path in there.iterdir() if path.suffix == ".safetensors")
    return {
        "files": sorted(path.name for path in there.iterdir()),
        "config": json.loads((there / "config.json").read_text()),
        "same after a round trip": [f.read_bytes() == (again / f.name).read_bytes() for f in files],
        "bytes": [BITS + _sha256(path.read_bytes()) for path in files],
        "tensors": {name: _summary(x) for path in files for name, x in _read_safetensors(path).items()},
    }


# ── Hashes and summaries ──


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _array_sha256(arrays: Sequence[np.ndarray | None]) -> str | None:
    """Return dtype, shape and hash of arrays of integers, or of floats that are whole numbers."""
    if arrays[0] is None:
        return None
    whole = np.stack(arrays)
    return f"{whole.dtype} {list(whole.shape)} {_sha256(whole.tobytes())}"


def _summary(x: np.ndarray) -> list[Any]:
    """Return dtype and shape, and a well-conditioned number that depends on sign and index of every element."""
    flat = x.ravel().astype(np.float64)
    weights = 1 + np.arange(flat.size) % 97 / 97
    return [f"{x.dtype} {list(x.shape)}", float(np.mean(np.abs(flat + 0.1) * weights)) if flat.size else 0.0]


def _digest(chart: dict[str, Any]) -> dict[str, Any]:
    """Return a hash of a chart's texts and structure, and a summary of its numbers."""
    numbers: list[float] = []

    def without_numbers(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_numbers(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [without_numbers(inner) for inner in value]
        if isinstance(value, float):
            numbers.append(value)
            return 0.0
        return value

    if chart["name"].startswith(("icl_", "quantize_")):  # These axes had the name of a number without its unit.
        chart = chart | {"y_label": re.sub(r" \(.*\)$", "", chart["y_label"]).replace(" ", "_")}
    texts = _sha256(json.dumps(without_numbers(chart), sort_keys=True).encode())
    return {"texts": texts, "numbers": _summary(np.array(numbers))}


def _short(value: Any) -> Any:
    """Return JSON with long texts and long lists of numbers replaced by a hash or a summary."""
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        if len(value) > LONGEST and all(isinstance(x, (int, float)) for x in value):
            return _summary(np.array(value, np.float64))
        return [_short(inner) for inner in value]
    if isinstance(value, str) and len(value) > 8 * LONGEST:
        return f"{value[:20]}… {_sha256(value.encode())}"
    return value


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    tensors.pop("__metadata__", None)
    found = {}
    for name, tensor in sorted(tensors.items()):
        assert tensor["dtype"] == "F32", (path, name, tensor)
        begin, end = (start + offset for offset in tensor["data_offsets"])
        found[name] = np.frombuffer(content[begin:end], "<f4").reshape(tensor["shape"])
    return found


def main() -> int:
    """Run one part in a temporary folder and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="source tree of difftx to measure")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args()
    root, out = options.root.resolve(), options.out.resolve()
    # The programs are the same on every machine: for one device, and without most of LLVM's passes, which take long.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0 "
        "--xla_cpu_multi_thread_eigen=false --xla_llvm_disable_expensive_passes=true"
    )
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory(prefix="difftx-golden-") as folder:
        inputs.write_all(Path(folder))
        os.chdir(folder)  # Results contain paths, so paths are relative.
        record = PARTS[options.part](Commands(root))
        os.chdir(root)
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
