#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what docs/pytest.md shows and tests/pages cannot run: a failure, layouts, options.

    PYTHON tests/python/pytest_page_test.py [unittest options]

ANYRANK names another command than build/anyrank. Exit status 77 (skipped) where there is no torch or pytest. Numbers
with a point are those of one version of PyTorch: they are compared by what they stand beside.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "verify"))

from pages import blocks, flat, text  # noqa: E402

PAGE = "pytest.md"
NEEDS = ("torch", "pytest")
INSTALLED = any(entry.name == "anyrank" for found in importlib.metadata.distributions() for entry in found.entry_points
                if entry.group == "pytest11")


def rounded(output):
    output = re.sub(r"in \d+\.\d+s", "in #s", flat(output))
    output = re.sub(r"in \S+ of test_mlp", "in NAME of test_mlp", output)
    output = re.sub(r"(\S+/)(one|ranks|allowed.safetensors)\b", r"../\2", output)
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+", "#", output)


class Page(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="anyrank-page-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def pytest(self, *arguments):
        plugin = [] if INSTALLED else ["-p", "anyrank.pytest_plugin"]
        return subprocess.run([sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-q",
                               "--anyrank-timeout=3600",
                               f"--rootdir={self.folder}", f"--basetemp={self.folder / 'tmp'}", *arguments],
                              capture_output=True, text=True, check=False, cwd=self.folder, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": str(ROOT / "python")})

    def first(self):
        (found,) = [block for block in blocks(PAGE) if block.startswith("# test_mlp.py")]
        return found

    def test_the_failure(self):
        bug = re.search(r"With `(model\[0\].*?)` on rank (\d)", text(PAGE))
        step = "model(torch.randn(4, 16, 32)).square().mean().backward()\n"
        self.assertIn(step, self.first())
        broken = f"{step}    if mesh and mesh.get_rank() == {bug[2]}:\n        {bug[1]}\n"
        (self.folder / "test_mlp.py").write_text(self.first().replace(step, broken))
        done = self.pytest("test_mlp.py")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        (shown,) = [block for block in blocks(PAGE) if block.startswith("E ")]
        lines = "".join(line + "\n" for line in done.stdout.split("\n") if line.startswith("E "))
        self.assertEqual(rounded(lines), rounded(shown), lines)

    def test_layouts_are_the_tests_that_the_page_names(self):
        (block,) = [block for block in blocks(PAGE) if block.startswith("@pytest.mark.anyrank")]
        (self.folder / "test_it.py").write_text("import pytest\n" + block)
        done = self.pytest("--collect-only")
        for name in re.findall(r"(test_\w+\[.*?\])", block):
            self.assertIn(f"test_it.py::{name}\n", done.stdout)

    def test_options_are_the_plugins(self):
        printed = self.pytest("--help").stdout
        options = set(re.findall(r"--anyrank-\w+", printed))
        page = set(re.findall(r"--anyrank-\w+", text(PAGE)))
        workflow = set(re.findall(r"--anyrank-\w+", (ROOT / "examples" / "pytest" / "ci.yml").read_text()))
        self.assertEqual(options, page)
        self.assertLessEqual(workflow, options)


if __name__ == "__main__":
    for module in NEEDS:
        if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            print(f"no {module} here, which the examples of docs/pytest.md need")
            sys.exit(77)
    unittest.main()
