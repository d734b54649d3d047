"""SGLang's norms in model folders. `engines_test.py` starts this script in `.venv-engines`, which has no JAX.

in_sglang.py FOLDERS.json RESULTS.json

FOLDERS.json maps names to model folders. RESULTS.json maps them to the results of `replace_norms`, or to {"error":
message}.

On CPUs, SGLang 0.5.23 serves only with kernels that its wheels lack: `No module named 'sgl_kernel'`. The replacement of
norms is the part of its Transformers backend that runs without kernels, servers and processes.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import torch
import transformers
from transformers.utils import is_torchvision_available

# SGLang imports these packages for images, notebooks and its server. torchvision of PyPI does not fit torch for CPUs.
UNUSED = ["IPython", "IPython.display", "gguf", "orjson", "torchvision"]
UNUSED += ["torchvision.transforms", "torchvision.transforms.functional"]
assert not is_torchvision_available()  # transformers keeps the answer, and does not use the mock.
sys.modules.update({name: MagicMock(__spec__=ModuleSpec(name, None)) for name in UNUSED})

from sglang.srt.models.transformers import replace_rms_norm_class  # noqa: E402 (after the mocks)


def replace_norms(folder):
    """Replace norms as `recursive_replace` of SGLang does. Return their number, and the largest relative change."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        norms = [name for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
        for name in norms:
            norm = model.get_submodule(name)
            replaced = replace_rms_norm_class(norm, model.config.hidden_size)
            replaced.load_state_dict(norm.state_dict())
            model.set_submodule(name, replaced)
        change = (model(tokens).logits - expected).abs().max() / expected.abs().max()
    return {"norms": len(norms), "change": change.item()}


def main(folders, results):
    found = {}
    for name, folder in json.loads(Path(folders).read_text()).items():
        try:
            found[name] = replace_norms(folder)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    Path(results).write_text(json.dumps(found))


main(*sys.argv[1:])
