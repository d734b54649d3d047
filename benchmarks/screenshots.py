"""Screenshots of the documentation site and of a report, in Chromium: on a desktop, on a phone, and in the dark.

    make docs quickstart
    for arm in transformer diff; do difftx eval --workdir=runs/quickstart/$arm --suite=position; done
    difftx report --workdir=runs/quickstart/transformer,runs/quickstart/diff --out=runs/quickstart/report.html
    python benchmarks/screenshots.py --report=runs/quickstart/report.html --out=docs/images/screens

Look at them after a change of the site or of the report. `--only=report` needs no site.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.errors import UserError, import_extra, run_command

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
PAGES = {"home": SITE / "index.html", "tutorial": SITE / "tutorials" / "compare.html"}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
KINDS = {
    "desktop": DESKTOP,
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
    "dark": DESKTOP | {"color_scheme": "dark"},
}
# Name of a picture → the section of the report that it begins with. A report without the section has no such picture.
SECTIONS = {"report-suite": "#suite-attention", "report-samples": "#suite-sample"}
COLOURS = 256  # Number of colours in the palette of a picture; few colours keep its file small.
LOADING_MILLISECONDS = 2000


def main(arguments: Sequence[str]) -> int:
    """Write a PNG file for each page and kind of device, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--report", type=Path, required=True, metavar="FILE.html", help="a page of `difftx report`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--only", choices=(*PAGES, "report"), help="one of the pages; default: all")
    args = parser.parse_args(arguments)
    pages = PAGES | {"report": args.report.absolute()}
    pages = {name: page for name, page in pages.items() if args.only in (None, name)}
    for name, page in pages.items():
        if not page.exists():
            raise UserError(f"{page}: {'no such report' if name == 'report' else 'run `make docs` first'}")
    args.out.mkdir(parents=True, exist_ok=True)
    playwright = import_extra("playwright.sync_api", "browser")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for kind, options in KINDS.items():
            tab = chromium.new_context(**options).new_page()
            for name, page in pages.items():
                tab.goto(page.as_uri())
                tab.wait_for_timeout(LOADING_MILLISECONDS)
                take(tab, args.out / f"{name}-{kind}.png")
                for section, selector in SECTIONS.items() if name == "report" else ():
                    if tab.locator(selector).count():
                        tab.locator(selector).evaluate("section => section.scrollIntoView()")
                        tab.wait_for_timeout(LOADING_MILLISECONDS)
                        take(tab, args.out / f"{section}-{kind}.png")
    return 0


def take(tab: Any, path: Path) -> None:
    """Write what a tab shows as a small PNG file, and print its path."""
    tab.screenshot(path=path)
    with PIL.Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS, PIL.Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
