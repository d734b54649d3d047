"""Fixtures and helpers of tests/, which the tests of the studies share. Eight virtual CPU devices, as there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from conftest import config  # noqa: F401
