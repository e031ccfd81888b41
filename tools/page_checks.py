"""Run the 22 checks of the page in a real browser, and print a line for each.

python -m tools.page_checks
"""

from __future__ import annotations

import re
import sys
from typing import Final

import pytest

TESTS: Final = "tests/browser/test_page.py"


class Lines:
    """Prints what came of each check, and at the end why some failed."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a line when a check has ended."""
        found = re.search(r"test_(\d\d)_(\w+)", report.nodeid)
        if found is None or (report.when != "call" and not report.failed and not report.skipped):
            return
        word = "ok" if report.passed else "FAILED" if report.failed else "left out"
        print(f"{found[1]}  {word:8}  {found[2].replace('_', ' ')}  ({report.duration:.1f} s)", flush=True)
        if report.failed:
            self.failures.append(report.longreprtext)


def main() -> None:
    lines = Lines()
    options = ["-p", "no:terminal", "-o", "addopts=--import-mode=importlib", "-k", "not without_a_browser"]
    code = pytest.main([*options, TESTS], plugins=[lines])
    for failure in lines.failures:
        print(f"\n{failure}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
