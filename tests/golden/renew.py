"""Record the golden numbers again: python -m tests.golden.renew --reason="why they change"."""

import argparse
import datetime
import platform
import sys
from importlib.metadata import version

from . import records


def main() -> int:
    """Run every part of the driver on this source tree and write golden.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reason", required=True, help="why the numbers change; kept in golden.json")
    options = parser.parse_args()
    parts = records.PARTS
    if any(map(records.lacks_extra, parts)):
        parser.error("suites harness and math need the extra eval: pip install -e '.[eval]'")
    log, before = records.read_golden() if records.GOLDEN.exists() else ([], {})
    (after,) = records.make_records([records.ROOT], parts)
    entry = {
        "date": datetime.date.today().isoformat(),
        "reason": options.reason,
        "machine": f"jax {version('jax')}, jaxlib {version('jaxlib')}, Python {platform.python_version()}",
    }
    records.write_golden([*log, entry], after)
    changed = records.differences(before, records.read_golden()[1], exact=False)
    print(records.table(changed))
    print(f"{records.GOLDEN}: {len(changed)} values changed by more than their tolerance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
