"""Hook of MkDocs: the notebook as a page of the site. mkdocs.yml names this file, and it is not part of the site."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

NOTEBOOK = "first-model.ipynb"


def on_files(files: Any, config: Any) -> Any:
    """Add the page first-model.md."""
    content = page_of((Path(config.docs_dir) / NOTEBOOK).read_text())
    files.append(File.generated(config, NOTEBOOK.replace(".ipynb", ".md"), content=content))
    return files


def page_of(notebook: str) -> str:
    """Return the cells of a notebook as Markdown, with a link to the file after the title."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, f"[Download this notebook]({NOTEBOOK}).", rest.strip(), *parts[1:]]) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let other pages, which link to the file for readers on GitHub, link to the page."""
    is_notebook = page.file.src_uri == NOTEBOOK.replace(".ipynb", ".md")
    return markdown if is_notebook else markdown.replace(f"{NOTEBOOK})", f"{NOTEBOOK.replace('.ipynb', '.md')})")
