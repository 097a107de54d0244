# SPDX-License-Identifier: Apache-2.0
"""What run_tests.py does with the Python package in python/anyrank: its tests, types, syntax and line lengths."""

import ast
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/anyrank"
OLDEST = (3, 9)  # that the package is written for
COLUMNS = 120
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, \d+ skipped)?$", re.MULTILINE)
SKIPPED = re.compile(r"^skipped: \S+: (.*)$", re.MULTILINE)


with_pytorch = False  # whether tests run with what scripts/install_deps.sh --pytorch has installed


def environment():
    """The virtual environment of scripts/install_deps.sh --pytorch: outside the tree, so that a fresh clone finds it."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("ANYRANK_PYTHON_VENV") or pathlib.Path(cache, "anyrank/python-venv"))


def interpreter():
    """The Python of the tests that are written in it: the one with torch and the like, else the running one."""
    venv_python = environment() / "bin/python"
    return str(venv_python) if with_pytorch and os.access(venv_python, os.X_OK) else sys.executable


def too_old():
    """Why the running Python cannot import the package; None if it can."""
    if interpreter() != sys.executable or sys.version_info >= OLDEST:
        return None
    return "the package needs Python {}.{}, this one is {}.{}".format(*OLDEST, *sys.version_info[:2])


def test_files():
    return sorted((PACKAGE / "tests").glob("test_*.py"))


def test_command(path):
    return [interpreter(), "-m", "anyrank.tests", path.stem]


def test_environment():
    return {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "ANYRANK": os.environ.get("ANYRANK", str(ROOT / "build/anyrank")),
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def counts(output):
    """(passed, failed, reasons of skips) of a run of anyrank.tests; None if it has no closing line."""
    lines = CLOSING.findall(output)
    if not lines:
        return None
    return int(lines[-1][0]), int(lines[-1][1]), SKIPPED.findall(output)


def types_command():
    """mypy --strict over the package, as pyproject.toml sets it up."""
    return [interpreter(), "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]


def problems():
    """Files of the package that the oldest Python cannot read, or with lines that are too long."""
    found = []
    for path in sorted(PACKAGE.parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        try:
            if sys.version_info >= OLDEST:
                ast.parse(text, str(path), feature_version=OLDEST)
        except SyntaxError as error:
            found.append(f"{path.relative_to(ROOT)}: {error}")
        found += [f"{path.relative_to(ROOT)}:{number}: {len(line)} columns; at most {COLUMNS}"
                  for number, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]
    return found
