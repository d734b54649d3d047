"""README.md and docs/: links, the example, commands that no test runs, and the site that MkDocs builds."""

import html
import json
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import jax
import pytest
from conftest import ROOT
from helpers.page_commands import check_line, commands_of, fences, inline_commands, stray_commands
from helpers.pages import DOCS

from difftx.errors import UserError
from difftx.inference.trained_run import TrainedRun
from difftx.model.architectures import ARCHITECTURES

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(DOCS.rglob("*.md"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
READ = [
    page for page in PAGES if page.stem not in ("results", "results_appendix", "exploratory")
]  # These are generated.
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


def test_messages_name_sections_that_exist():
    source = "".join(path.read_text() for path in (ROOT / "difftx").rglob("*.py"))
    named = re.findall(r'see "([^"]+)" in docs/([\w/]+\.md)', source)
    assert named
    assert [(title, page) for title, page in named if f"# {title}\n" not in (DOCS / page).read_text()] == []


def test_the_readme_is_short_and_its_example_runs():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    code, loaded = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert {"attention", "generate"} == {*re.findall(r"= run\.(\w+)", loaded)} <= {*dir(TrainedRun)}
    assert len([line for line in code.splitlines() if line]) <= 10
    names = {}
    exec(code, names)
    assert (names["y"].shape, names["y"].dtype) == ((2, 32, 64), jax.numpy.float32)


def test_the_readme_counts_the_architectures():
    (count,) = re.findall(r"and (\w+) further architectures", (ROOT / "README.md").read_text())
    assert count == {10: "ten", 11: "eleven", 12: "twelve"}[len(ARCHITECTURES) - len(["diff", "transformer"])]


def unexecuted():
    """Return each command, in a block or sentence of a page, that no test executes, with the first page that has it."""
    executed = {"tutorials_test", "differentialize_test", "extend_test"}
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in executed)
    found = {}
    for page, name in zip(PAGES, IDS, strict=True):
        text = page.read_text()
        if page not in READ:  # Generated pages have commands in indented blocks.
            text = re.sub(r"(?m)((?:^    .*\n)+)", "```console\n\\1```\n", text)
        elif page.is_relative_to(DOCS):
            text = text.replace("```bash", "```executed")  # test_pages_with_commands_are_executed lists these pages.
        for line in commands_of(text) + (inline_commands(text) if page in READ else []):
            found.setdefault(line, name)
    return [(name, line) for line, name in found.items()]


def with_extras(page, line):
    """Return a test case. It requires the extras of `make test-long` if the command names a bucket."""
    return pytest.param(page, line, marks=[pytest.mark.long] if re.search("(gs|s3)://", line) else [])


@pytest.mark.parametrize(("page", "line"), [with_extras(*command) for command in unexecuted()])
def test_commands_that_no_test_runs_are_valid(page, line, tmp_path):
    check_line(line, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "difftx trian --config=quickstart",
        "difftx train --config=quickstart --workdir=runs/a --config.train.step=3",
        "difftx eval --workdir=runs/a --suite=lose",
        "make quickstrat",
        "pip install -e '.[tpus]'",
    ],
)
def test_a_wrong_command_is_found(line, tmp_path):
    with pytest.raises((AssertionError, UserError, OSError)):
        check_line(line, tmp_path)


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_commands_are_in_blocks_that_tests_read(page):
    assert stray_commands(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_of_all_pages_is_valid(page):
    for language, block in fences(page.read_text()):
        if language == "python":
            compile(block, page.name, "exec")
        elif language == "json":
            json.loads(block)


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
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} == {*map(str, pages)} - {
        "404.md",
        "first-model.md",
    }
    for path in site.rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?=\"([^\"]+)", text)
        loaded += re.findall(r'<link\b[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)', text)
        loaded += re.findall(r'<link\b[^>]*href="([^"]+)"[^>]*rel="(?:stylesheet|preconnect|icon)"', text)
        assert loaded
        assert [link for link in loaded if re.match(r"(https?:)?//", link)] == [], path
        assert len(text) < 1_500_000


@pytest.mark.long
@pytest.mark.parametrize("name", ["index.html", "tutorials/own-text.html"])
def test_the_search_works_without_a_server(site, name):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, said = browser.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((site / name).as_uri())
        page.locator(".md-search__input").click()
        page.keyboard.type("zigzag")
        page.wait_for_selector(".md-search-result__item", timeout=60_000)
        links = page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
        browser.close()
    assert said == []
    assert links
    assert all((site / re.match(rf"{site.as_uri()}/([^?#]+)", link)[1]).is_file() for link in links)


@pytest.mark.long
def test_the_site_shows_the_notebook(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "first-model.html").read_text()))
    cells = json.loads((DOCS / "first-model.ipynb").read_text())["cells"]
    code = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    assert code
    assert [line for line in code if line not in text] == []
    assert (site / "first-model.ipynb").is_file()
    assert 'href="first-model.html"' in (site / "getting-started.html").read_text()
    assert not (site / "notebook.py").exists()


@pytest.mark.long
def test_the_site_documents_the_layer(site):
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text())
    assert "difftx.DiffAttention" in text
    assert "arXiv 2410.05258" in text
