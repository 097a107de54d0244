#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the table of causes: causes.md is what it gives, and a test expects each of them."""

import json
import re
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, run  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
import causes_page  # noqa: E402


class Causes(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.table = json.loads(run("causes").stdout)

    def test_page_has_the_table(self):
        text = causes_page.PAGE.read_text(encoding="utf-8")
        self.assertEqual(text, causes_page.page(self.table, text), "anyrank causes | scripts/causes_page.py --write")

    # A test says an identifier alone, in a list, or before a colon.
    def test_every_cause_stands_in_a_test(self):
        said = set()
        for path in [path for folder in ("tests", "python/anyrank/tests") for suffix in ("c", "h", "py")
                     for path in (ROOT / folder).rglob(f"*.{suffix}")]:
            for listed in re.findall(r'"([\w |]+)[":]', path.read_text(encoding="utf-8")):
                said.update(listed.split())
        causes = {row["cause"] for row in self.table}
        self.assertGreater(len(causes), 100)
        self.assertEqual(sorted(causes - said), [])


if __name__ == "__main__":
    unittest.main()
