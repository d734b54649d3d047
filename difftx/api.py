"""The public names of difftx. `python -m difftx.api > docs/api.md` lists them with their signatures."""

import importlib
import inspect
import re
from typing import Any

# The public names by module. All other names may change without notice.
PUBLIC = {
    "difftx": ("load", "DiffAttention", "AttentionLayer", "kernels"),
    "difftx.inference.trained_run": ("TrainedRun", "AttentionWeights"),
    "difftx.kernels": ("diff_attention", "attention", "weighted_attention", "weight_functions"),
    "difftx.kernels.weight_functions": (
        "WeightFunction",
        "MASKED",
        "softmax",
        "difference",
        "softmax_with_sink",
        "top_k_softmax",
        "signed_softmax",
    ),
    "difftx.errors": ("UserError",),
    "difftx.registry": ("Registry",),
    "difftx.config": ("ModelConfig",),
    "difftx.config.eval": ("EvalConfig",),
    "difftx.config.training": ("OptimizerConfig",),
    "difftx.config.fields": ("add_group",),
    "difftx.model.architectures": ("ARCHITECTURES", "Heads", "heads_of"),
    "difftx.model.attention": ("SelfAttention", "DiffAttention", "Attention", "LayerConstants"),
    "difftx.model.layers": ("linear", "projection", "vector"),
    "difftx.parallel.layout": ("Layout",),
    "difftx.data.synthetic": ("TASKS", "Task"),
    "difftx.data.records": ("open_stream",),
    "difftx.data.prepare.readers": ("READERS", "read_rows"),
    "difftx.training.optimizer": ("OPTIMIZERS", "SCHEDULES"),
    "difftx.evals": ("SUITES",),
    "difftx.evals.evaluation": ("Evaluation",),
    "difftx.evals.suite": ("Suite", "register_suite"),
    "difftx.evals.result": ("Measure", "Result"),
    "difftx.inference.score": ("Item", "loglikelihoods"),
}

HEADER = """# Python interface

`python -m difftx.api > docs/api.md` makes this page. It lists the public names of difftx. All other names may change
without notice. [layer.md](layer.md) and [extend.md](extend.md) have examples, [docstrings.md](docstrings.md) explains
arguments and errors, and [config.md](config.md) lists the fields of configs.
"""


def api_page() -> str:
    """Return docs/api.md: the public names by module, each with its signature, its meaning and its own members."""
    sections = ((importlib.import_module(module), names) for module, names in PUBLIC.items())
    entries = (f"\n## {m.__name__}\n\n" + "".join(_entry(n, getattr(m, n)) for n in names) for m, names in sections)
    return HEADER + "".join(entries)


def _entry(name: str, value: Any, indent: str = "") -> str:
    is_class, signature, meaning, members = inspect.isclass(value), "", "", []
    if callable(value) and not is_class:  # Names of modules and addresses of functions are left out.
        signature = re.sub(
            r"(?<![\w'])([A-Za-z_]\w*\.)+(?=\w)| at 0x\w+|<class '|'>", "", str(inspect.signature(value))
        )
    if not indent and (is_class or signature):
        meaning = f": {(inspect.getdoc(value) or '').partition('\n')[0]}"
    if is_class:
        fields = (*getattr(value, "__dataclass_fields__", ()), "__init__" * name.endswith("Config"))
        members = [m for m in vars(value) if (m[0] != "_" or m in ("__init__", "__call__")) and m not in fields]
    entry = f"{indent}- `{name}{signature}`{meaning}\n"
    return entry + "".join(_entry(member, getattr(value, member), indent + "    ") for member in members)


if __name__ == "__main__":
    print(api_page(), end="")
