#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares python/anyrank/_options.py with what the command writes out of its tables of options."""

import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("ANYRANK", str(ROOT / "build/anyrank"))


class Options(unittest.TestCase):
    def test_the_package_has_those_of_the_command(self):
        with tempfile.TemporaryDirectory() as folder:
            written = pathlib.Path(folder, "_options.py")
            subprocess.run([COMMAND, "describe", ROOT / "python/options.py.in", written], check=True)
            same = written.read_bytes() == (ROOT / "python/anyrank/_options.py").read_bytes()
        self.assertTrue(same, "the command's options have changed: write them to the package by "
                              "build/anyrank describe python/options.py.in python/anyrank/_options.py")


if __name__ == "__main__":
    unittest.main()
