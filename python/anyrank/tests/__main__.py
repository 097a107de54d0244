# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.tests [NAME ...]: runs the package's tests with the standard library alone.

The last line is "N passed, M failed", with ", K skipped" and before it a line for each skipped test if there are any.
Exit status: 0 all passed, 1 otherwise.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import sys
import tempfile
import types
import typing
import unittest


def load(names: list[str]) -> unittest.TestSuite:
    loader = unittest.TestLoader()
    found = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    suites = [of_functions(name) or loader.loadTestsFromName(f"anyrank.tests.{name}") for name in names or found]
    return unittest.TestSuite(suites)


def of_functions(name: str) -> unittest.TestSuite | None:
    """The tests of a module that are functions, as pytest runs them: an argument tmp_path is a folder of its own. All
    are skipped where there is no numpy or torch, which such a module imports. None: it has none."""
    try:
        module = importlib.import_module(f"anyrank.tests.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            return None
        skipped = unittest.skip(f"no {error.name} here")(types.FunctionType((lambda: None).__code__, {}, name))
        return unittest.TestSuite([unittest.FunctionTestCase(skipped)])
    except ImportError:
        return None
    tests = [value for key, value in vars(module).items() if key.startswith("test_") and inspect.isfunction(value)]
    return unittest.TestSuite(unittest.FunctionTestCase(in_folder(test)) for test in tests) if tests else None


def in_folder(test: typing.Callable[..., None]) -> typing.Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            test(*([pathlib.Path(folder)] if "tmp_path" in inspect.signature(test).parameters else []))

    return run


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
