"""Generator of docs/api.md, the list of all public names with their signatures.

Usage: python -m difftx.api > docs/api.md
"""

import ast
import importlib
import inspect
import textwrap
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
    "difftx.config.architectures": ("ARCHITECTURES",),
    "difftx.config.eval": ("EvalConfig",),
    "difftx.config.training": ("OptimizerConfig",),
    "difftx.config.fields": ("add_group",),
    "difftx.model.attention": ("SelfAttention", "DiffAttention", "Attention", "LayerConstants"),
    "difftx.model.layers": ("linear", "projection", "vector"),
    "difftx.parallel.layout": ("Layout",),
    "difftx.data.synthetic": ("TASKS", "Task"),
    "difftx.data.records": ("open_stream",),
    "difftx.data.prepare.readers": ("READERS", "read_rows"),
    "difftx.training.optimizer": ("OPTIMIZERS", "SCHEDULES"),
    "difftx.evals": ("Evaluation",),
    "difftx.evals.suite": ("SUITES", "Suite", "register_suite"),
    "difftx.evals.result": ("Measure", "Result"),
    "difftx.inference.score": ("Item", "loglikelihoods"),
}

DECORATORS = ("classmethod", "staticmethod", "property")  # Those that change how a method is called.

HEADER = """# Python interface

`python -m difftx.api > docs/api.md` makes this page. It lists the public names of difftx. [layer.md](layer.md) and
[extend.md](extend.md) have examples. All other names are internal and may change without notice. The docstrings explain
arguments and errors. Classes have the listed methods and fields; [config.md](config.md) lists the fields of configs.
"""


def api_page() -> str:
    """Return docs/api.md, which has a section per module with the signature and the meaning of each public name."""
    return HEADER + "".join(_section(module, names) for module, names in PUBLIC.items())


def _section(module_name: str, names: tuple[str, ...]) -> str:
    module = importlib.import_module(module_name)
    entries = [_entry(name, getattr(module, name)) for name in names]
    return f"\n## {module_name}\n\n" + "\n".join(entries)


def _entry(name: str, value: Any) -> str:
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        what = f"module `{value.__name__}`" if inspect.ismodule(value) else f"{type(value).__name__}"
        return f"- `{name}`: {what}\n"
    summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    lines = "\n".join(_signatures(definition))
    return f"{summary}\n\n```python\n{lines}\n```\n"


def _signatures(definition: ast.stmt) -> list[str]:
    """Return the signature of a function, or those of a class with its public methods and fields."""
    if isinstance(definition, ast.FunctionDef):
        result = "" if definition.returns is None else f" -> {ast.unparse(definition.returns)}"
        decorators = [f"@{name}" for name in map(ast.unparse, definition.decorator_list) if name in DECORATORS]
        return [*decorators, f"def {definition.name}({ast.unparse(definition.args)}){result}"]
    assert isinstance(definition, ast.ClassDef)
    lines = [f"class {definition.name}({', '.join(map(ast.unparse, definition.bases))})".removesuffix("()")]
    for member in definition.body:
        if isinstance(member, ast.FunctionDef) and (member.name[0] != "_" or member.name in ("__init__", "__call__")):
            lines += [f"    {line}" for line in _signatures(member)]
        elif isinstance(member, ast.AnnAssign) and not definition.name.endswith("Config"):
            lines.append(f"    {ast.unparse(member)}")
    return lines


if __name__ == "__main__":
    print(api_page(), end="")
