#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every example of docs/python.md in the page's order, and compares what it prints with what the page shows.

    tests/python/python_page_test.py [unittest options]

A block of Python is run; a block of text that follows has what it prints. <!-- needs NAME .. --> before a block names
modules without which it is skipped, <!-- numbers differ --> before a text that numbers are those of one machine.
"""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
PAGE = ROOT / "docs/python.md"
BLOCK = re.compile(r"(?:<!-- (?P<remark>[^>]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)


class Example:
    """A block of Python, and what it prints; None where the page shows nothing."""

    def __init__(self, found, line):
        remark = (found["remark"] or "").split()
        self.code, self.line, self.shown, self.exact = found["text"], line, None, True
        self.missing = [name for name in remark[1:] if importlib.util.find_spec(name) is None]


def examples():
    page = PAGE.read_text(encoding="utf-8")
    out = []
    for found in BLOCK.finditer(page):
        if found["kind"] == "python":
            out.append(Example(found, page[:found.start("text")].count("\n")))
        elif found["kind"] == "text":
            out[-1].shown, out[-1].exact = found["text"], found["remark"] != "numbers differ"
        else:
            raise AssertionError(f"docs/python.md: a block of {found['kind']!r}, which nothing runs")
    return out


def plain(text, exact):
    """Without what differs between machines; long lines may be wrapped."""
    text = " ".join(text.split())
    return text if exact else re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?", "#", text)


class Page(unittest.TestCase):
    """A test for each block; those that follow see its names."""

    names: dict = {}

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="anyrank-page-")
        cls.addClassCleanup(folder.cleanup)
        cls.addClassCleanup(os.chdir, os.getcwd())
        os.chdir(folder.name)

    def run_example(self, example):
        if example.missing:
            self.skipTest(f"no {' and no '.join(example.missing)} here")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * example.line + example.code, str(PAGE), "exec"), self.names)
        shown, exact = example.shown or "", example.exact
        line = f"docs/python.md, line {example.line + 1}"
        self.assertEqual(plain(printed.getvalue(), exact), plain(shown, exact), line)


for number, one in enumerate(examples()):
    setattr(Page, f"test_{number:02}_line_{one.line}", lambda self, one=one: self.run_example(one))

if __name__ == "__main__":
    unittest.main()
