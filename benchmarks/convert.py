"""Peak memory and time of `difftx convert`, for random DiffLlama models of several depths.

    python benchmarks/convert.py --out=/tmp/convert --layers=4,16 --d_model=1024

Prints a line for each import from the format of Hugging Face and each export to it: the model's bytes in float32, the
peak resident memory of the process, and its seconds. The line "nothing" has the memory of a process that only imports
the same modules. The growth of the peak from one depth to the next shows how much memory a larger model would need.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.config.recipes import load_config
from difftx.interop import huggingface
from difftx.interop.fields import config_json
from difftx.interop.parameters import shape_of, sizes_of, weights_of
from difftx.interop.safetensors import write_folder
from difftx.training.checkpoint.weights import Streamed

ROOT = Path(__file__).parent.parent
BASE_FLAGS = ["--config=configs/base.py", "--config.data.tokenizer=bytes"]
VOCABULARY = 32_000
FILE_BYTES = 2**28  # Largest size of a file of the random model.


def main() -> None:
    """Write each model, convert it to difftx and back, and print a line per conversion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to work in")
    parser.add_argument("--layers", default="4,16", help="numbers of layers (%(default)s)")
    parser.add_argument("--d_model", type=int, default=1024)
    options = parser.parse_args()
    print(f"{'command':<10}{'layers':>8}{'float32 MiB':>13}{'peak MiB':>10}{'seconds':>9}")
    print(f"{'nothing':<10}{'':>8}{'':>13}{_measure(options.out, ['--help'])[0]:>10.0f}")
    for layers in map(int, options.layers.split(",")):
        folder = options.out / str(layers)
        shutil.rmtree(folder, ignore_errors=True)
        size = _write_random_model(folder / "hf", layers, options.d_model)
        conversions = {
            "import": ["--from=hf", "--to=difftx", f"--input={folder / 'hf'}", f"--out={folder / 'run'}", *BASE_FLAGS],
            "export": ["--from=difftx", "--to=diffllama", f"--input={folder / 'run'}", f"--out={folder / 'back'}"],
        }
        for name, flags in conversions.items():
            peak, seconds = _measure(options.out, flags)
            print(f"{name:<10}{layers:>8}{size / 2**20:>13.0f}{peak:>10.0f}{seconds:>9.1f}", flush=True)
        shutil.rmtree(folder)


def _write_random_model(folder: Path, layers: int, d_model: int) -> int:
    """Write a random DiffLlama model in the format of Hugging Face, and return its size in bytes."""
    config = load_config(str(ROOT / "configs" / "base.py"), {"model.head_norm": "rms"})
    model = dataclasses.replace(
        config.model, d_model=d_model, num_layers=layers, mlp_dim=8 * d_model // 6 * 2, vocab_size=VOCABULARY
    )
    folder.mkdir(parents=True)
    random, sizes = np.random.default_rng(0), sizes_of(model)
    tensors = {
        name.format(layer=layer): Streamed(
            shape, shape[0], lambda _, shape=shape: random.standard_normal(shape, np.float32)
        )
        for weight in weights_of("diffllama", model)
        for shape in [shape_of(weight.axes, sizes)]
        for name in weight.names
        for layer in range(layers if weight.has_layers else 1)
    }
    write_folder(folder, tensors, FILE_BYTES)
    settings = config_json(huggingface, dataclasses.replace(config, model=model), 0)
    (folder / "config.json").write_text(json.dumps(settings))
    return sum(4 * tensor.size for tensor in tensors.values())


def _measure(folder: Path, flags: list[str]) -> tuple[float, float]:
    """Run `difftx convert` and return its peak resident memory in MiB and its time in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        "import sys; from difftx.commands.convert import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: import difftx.interop.runs\n"  # --help measures the memory of the imports alone.
        # VmHWM instead of getrusage, because a child process starts with its parent's ru_maxrss.
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    began = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, check=True, capture_output=True, text=True)
    return int(result.stdout.split()[-1]) / 1024, time.perf_counter() - began


if __name__ == "__main__":
    main()
