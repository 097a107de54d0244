#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the example of docs/placements.md with the program that it is taken from, and with what that prints.

    tests/placement/page_test.py [BINARY] [unittest options]

BINARY is the command of another build, next to which its examples are; default build/anyrank.
"""

import os
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/verify"))
from pages import blocks, text  # noqa: E402

COMMAND = pathlib.Path(os.environ.get("ANYRANK", ROOT / "build/anyrank"))


class PlacementsPage(unittest.TestCase):
    def setUp(self):
        self.code, self.output = blocks("placements.md")

    def test_the_code_is_the_examples(self):
        self.assertIn(self.code, (ROOT / "examples/redistribute.c").read_text(encoding="utf-8"))

    def test_the_example_prints_what_the_page_shows(self):
        done = subprocess.run([COMMAND.parent / "example_redistribute"], capture_output=True, text=True, timeout=300,
                              check=True, stdin=subprocess.DEVNULL)
        self.assertEqual(done.stdout, self.output)

    def test_the_bytes_that_the_page_adds_up_are_those_that_moved(self):
        rows = re.findall(r"^    \S.*= +([\d,]+)$", text("placements.md"), re.MULTILINE)
        *parts, total = (int(row.replace(",", "")) for row in rows)
        self.assertEqual((len(parts), sum(parts)), (6, total))
        self.assertIn(f" {total} bytes moved", self.output)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        COMMAND = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
