#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The plugin's options are those of pytest.md and of the workflow in examples/pytest.

    PYTHON tests/python/pytest_page_test.py [unittest options]

Exit status 77 (skipped) where there is no pytest.
"""

import os
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/pages"))
import engine  # noqa: E402

OPTION = re.compile(r"--anyrank-\w+")


class Page(unittest.TestCase):
    def test_options_are_the_plugins(self):
        done = subprocess.run([sys.executable, "-m", "pytest", *engine.plugin_words().split(), "--help"], check=False,
                              capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
        options = set(OPTION.findall(done.stdout))
        self.assertEqual(options, set(OPTION.findall((ROOT / "docs/guide/pytest.md").read_text(encoding="utf-8"))))
        self.assertLessEqual(set(OPTION.findall((ROOT / "examples/pytest/ci.yml").read_text(encoding="utf-8"))), options)


if __name__ == "__main__":
    if subprocess.run([sys.executable, "-c", "import pytest"], capture_output=True, check=False).returncode:
        print("no pytest here, whose plugin pytest.md describes")
        sys.exit(77)
    unittest.main()
