"""README.md and docs/: links, the example, commands that no test runs, and the site that MkDocs builds of them."""

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from urllib.parse import unquote

import jax
import pytest
from conftest import ROOT
from helpers.pages import DOCS, blocks

from difftx import api
from difftx.commands.flags import parse_overrides
from difftx.config.architectures import ARCHITECTURES
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.config.suites import SUITES

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(DOCS.rglob("*.md"))
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page):
    """Return the anchors of a page's headings as GitHub makes them; mkdocs.yml selects the same form."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def why_broken(page, link):
    """Return what is wrong with a relative link, or None."""
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return "no such file"
    if anchor in ("only-light", "only-dark"):  # Images of the site's light and dark modes.
        return None
    return f"no heading #{anchor}" if anchor and anchor not in anchors(target) else None


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_relative_links_lead_to_files_and_headings(page):
    text = without_code(page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    relative = [link for link in links if not re.match(r"https?://", link)]
    assert {link: why for link in relative if (why := why_broken(page, link))} == {}


def test_broken_links_are_found():
    assert why_broken(DOCS / "index.md", "design.md#5-model") is None
    assert why_broken(DOCS / "index.md", "design.md#6-model") == "no heading #6-model"
    assert why_broken(DOCS / "index.md", "../../README.md") == "no such file"


def test_the_readme_is_short_and_its_example_runs():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    names = {}
    exec(code, names)
    assert (names["y"].shape, names["y"].dtype) == ((2, 32, 64), jax.numpy.float32)


def test_the_readme_counts_the_architectures():
    (count,) = re.findall(r"and (\w+) further architectures", (ROOT / "README.md").read_text())
    assert count == {10: "ten", 11: "eleven", 12: "twelve"}[len(ARCHITECTURES) - len(["diff", "transformer"])]


def unexecuted():
    """Return the commands that tests do not run: those of README.md, and the blocks `console` of all pages."""
    readme = re.findall(r"^    (difftx .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    pages = [line for page in DOCS.rglob("*.md") for block in blocks(page, "console") for line in block.splitlines()]
    return readme + [line for line in pages if line.startswith("difftx ")]


@pytest.mark.parametrize("line", unexecuted())
def test_commands_that_no_test_runs_have_existing_flags_and_fields(line):
    _, command, *words = shlex.split(re.sub(r'"\$\(cat \S+\)"', "()", line))
    flags = dict(word.partition("=")[::2] for word in words if re.match(r"--(?!(config|eval|mesh)\.)", word))
    known = (DOCS / "cli.md").read_text().partition(f"\n## difftx {command}\n")[2].partition("\n## ")[0]
    assert {name for name in flags if not re.search(rf"^  {name}\b", known, re.MULTILINE)} == set()
    assert set(flags.get("--suite", "loss").split(",")) <= set(SUITES)
    fields = [word for word in words if word.startswith("--config.")]
    config = load_config(flags.get("--config", "quickstart"), parse_overrides(fields, "config"))
    override(config, parse_overrides([word for word in words if re.match(r"--(eval|mesh)\.", word)], "eval", "mesh"))


def test_docstrings_shows_every_public_function_and_class():
    shown = []
    page = (DOCS / "docstrings.md").read_text()
    for path, members in re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        shown += [getattr(value, member) for member in members.split(", ")] if inspect.ismodule(value) else [value]
    public = [getattr(importlib.import_module(module), name) for module, names in api.PUBLIC.items() for name in names]
    explained = [value for value in public if inspect.isfunction(value) or inspect.isclass(value)]
    # docs/config.md explains the fields of configs.
    assert set(shown) == {value for value in explained if not value.__name__.endswith("Config")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does."""
    pytest.importorskip("material", reason="make docs installs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.long
def test_the_site_has_every_page_and_loads_nothing_from_other_hosts(site):
    pages = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} == {*map(str, pages)} - {"404.md"}
    for path in site.rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?=\"([^\"]+)", text)
        loaded += re.findall(r'<link\b[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)', text)
        loaded += re.findall(r'<link\b[^>]*href="([^"]+)"[^>]*rel="(?:stylesheet|preconnect|icon)"', text)
        assert loaded
        assert [link for link in loaded if re.match(r"(https?:)?//", link)] == [], path
        assert len(text) < 1_500_000


@pytest.mark.long
def test_the_site_documents_the_layer(site):
    text = re.sub(r"<[^>]+>", "", (site / "docstrings.html").read_text())
    assert "difftx.layer.DiffAttention" in text
    assert "arXiv 2410.05258" in text
