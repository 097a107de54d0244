# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.tests [NAME ...]: runs the package's tests with the standard library alone.

The last line is "N passed, M failed", with ", K skipped" and before it a line for each skipped test if there are any.
Exit status: 0 all passed, 1 otherwise.
"""

from __future__ import annotations

import pathlib
import sys
import typing
import unittest


def load(names: list[str]) -> unittest.TestSuite:
    loader = unittest.TestLoader()
    found = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    return loader.loadTestsFromNames([f"anyrank.tests.{name}" for name in names or found])


class Result(unittest.TextTestResult):
    """Counts what passed: of a test with subtests several may fail or be skipped."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed += 1


def main() -> int:
    counting: typing.Any = Result
    result = unittest.TextTestRunner(stream=sys.stdout, resultclass=counting).run(load(sys.argv[1:]))
    assert isinstance(result, Result)
    troubles = [*(test for test, _ in result.failures + result.errors), *result.unexpectedSuccesses]
    passed, failed = result.passed, len({getattr(test, "test_case", test).id() for test in troubles})
    for test, reason in result.skipped:
        print(f"skipped: {test.id()}: {reason}")
    if not passed and not failed and not result.skipped:
        print("no test was run")
        failed = 1
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    print(f"{passed} passed, {failed} failed{skipped}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
