#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The sample project examples/pytest under pytest: right, and with each of several bugs in its layers or tests.

    PYTHON tests/python/pytest_example_test.py [unittest options]

ANYRANK names another command than build/anyrank. Exit status 77 (skipped) where there is no torch or pytest.
"""

import importlib.metadata
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pytest"
sys.path.insert(0, str(ROOT / "python"))

try:
    import pytest
    import torch  # noqa: F401  once, for all sessions of pytest, which are forked from here
except ImportError as missing:
    print(f"no {missing.name} here, which examples/pytest needs")
    sys.exit(77)

import anyrank.pytest_plugin  # noqa: E402

# pytest loads the plugin of an installed package by itself.
INSTALLED = any(entry.name == "anyrank" for found in importlib.metadata.distributions() for entry in found.entry_points
                if entry.group == "pytest11")
LAYERS, TESTS = "parallel_layers.py", "test_layers.py"


class Session:
    """A run of pytest in a process of its own, in a folder with the sample project."""

    def __init__(self, folder, *arguments, edits=()):
        for name in (LAYERS, TESTS):
            shutil.copy(EXAMPLE / name, folder)
        for name, before, after in edits:
            text = (folder / name).read_text()
            assert before in text, f"{name} has no {before!r}"
            (folder / name).write_text(text.replace(before, after))
        output = folder / "output.txt"
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.chdir(folder)
                status = pytest.main(["-p", "no:cacheprovider", f"--rootdir={folder}", f"--basetemp={folder / 'tmp'}",
                                      "--anyrank-timeout=3600", *arguments], [] if INSTALLED else [anyrank.pytest_plugin])
            finally:
                sys.stdout.flush()  # what os._exit would leave in it
                sys.stderr.flush()
                os._exit(status)
        self.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.text = output.read_text()

    def message(self):
        """The first failure's text, as pytest prints it."""
        lines = [line[1:].strip() for line in self.text.split("\n") if re.match(r"E( |$)", line)]
        return re.sub(r"\s+", " ", " ".join(lines))


# What is broken, the test that has to fail, and what its first line, and the rest, have to say.
BUGS = {
    "the backward pass of a column-parallel layer does not sum": (
        [(LAYERS, "        return summed(grad, ctx.group), None\n", "        return grad, None\n")],
        "test_tensor_parallel[tp4]",
        r"^anyrank.RanksDiffer: blocks.1.up:bwd has copies that differ.*: a missing sum over tp",
        ["[missing_all_reduce]"]),
    "the output of a row-parallel layer is not summed": (
        [(LAYERS, "    def forward(ctx, x, group):\n        return summed(x, group)",
          "    def forward(ctx, x, group):\n        return x.clone()")],
        "test_tensor_parallel[tp2]",
        r"^anyrank.RanksDiffer: blocks.0.down:fwd .*: a missing sum over tp", []),
    "every rank adds the bias before the sum": (
        [(LAYERS, "y = functional.linear(x, self.weight)", "y = functional.linear(x, self.weight, self.bias)"),
         (LAYERS, "return y + self.bias", "return y if self.group is not None else y")],
        "test_tensor_parallel[tp4]", r"^anyrank.RanksDiffer: blocks.0.down:fwd differs.*: the bias is added 4 times",
        ["[bias_counted_again]"]),
    "every rank has the first rank's rows": (
        [(LAYERS, "self.weight = nn.Parameter(part(full.weight.detach(), group))",
          "self.weight = nn.Parameter(part(full.weight.detach(), group) if group is None else "
          "full.weight.detach().chunk(group.size())[0].clone())")],
        "test_tensor_parallel[tp2]", r"^anyrank.RanksDiffer: blocks.0.up.weight:init differs", ["rank 1"]),
    "a factor of 1.001 on one rank's gradient": (
        [(TESTS, "        model(batch()).square().mean().backward()\n\n    anyrank_compare(build, step, spec=TENSOR",
          "        model(batch()).square().mean().backward()\n        if mesh and mesh.get_rank() == 1:\n"
          "            model.blocks[0].up.weight.grad *= 1.001\n\n    anyrank_compare(build, step, spec=TENSOR")],
        "test_tensor_parallel[tp4]", r"^anyrank.RanksDiffer: blocks.0.up.weight:grad differs.*the reference times a number of its own",
        ["rank 1 element", "the only one"]),
    "the norm's gradient is that of a rank's own tokens": (
        [(LAYERS, "for p in (*block.norm.parameters(), block.down.bias)", "for p in (block.down.bias,)")],
        "test_sequence_parallel[tp2-seed0]",
        r"^anyrank.RanksDiffer: blocks.1.norm.\w+:grad .*a missing sum over tp", ["seed 0"]),
    "the parts of the sequence are gathered in the wrong order": (
        [(LAYERS, "    return torch.cat(parts, dim)", "    return torch.cat(parts[::-1], dim)")],
        "test_sequence_parallel[tp4-seed1]", r"^anyrank.RanksDiffer: blocks.0.\w+:[fb]wd differs",
        ["seed 1", "repeat pytest 'test_layers.py::test_sequence_parallel[tp4-seed1]'"]),
    "the gradients of data-parallel ranks are not averaged": (
        [(TESTS, "DistributedDataParallel(model) if mesh else model", "model if mesh else model")],
        "test_data_parallel[dp2]", r"^anyrank.RanksDiffer: \S+:grad ", []),
    "every data-parallel rank has the first rank's samples": (
        [(TESTS, 'part(batch(), mesh and mesh.get_group("dp"))', "batch()[:2 if mesh else 4]")],
        "test_data_parallel[dp2]", r"^anyrank.RanksDiffer: input.0:fwd differs .*samples", ["rank 1"]),
    "a plan that leaves out a layer's partner": (
        [(TESTS, '"3": RowwiseParallel()', '"3": ColwiseParallel()')],
        "test_parallelize_module[tp2]", r"^anyrank.RanksFailed: 2 ranks \(tp=2\): ranks? .* of 2 raised ", []),
    "a rank raises": (
        [(LAYERS, "        for block in self.blocks:\n            x = block(x)",
          "        if self.group is not None and self.group.rank() == 1:\n            raise ValueError('no tokens')\n"
          "        for block in self.blocks:\n            x = block(x)")],
        "test_tensor_parallel[tp2]",
        r"^anyrank.RanksFailed: 2 ranks \(tp=2\): rank 1 of 2 raised ValueError: no tokens Traceback", ["in forward"]),
}


class Example(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_right_layers_pass(self):
        session = Session(self.folder, "-q", "-rA")
        self.assertEqual(session.status, 0, session.text)
        self.assertIn("11 passed", session.text)
        worst = re.search(r"anyrank: 10 comparisons with one rank, .*nearest to it: (\S+) of what", session.text)
        self.assertIsNotNone(worst, session.text)
        self.assertLess(float(worst[1]), 0.5)  # right runs of pytest.md reach 0.1

    def test_bugs_are_named(self):
        for bug, (edits, test, first, rest) in BUGS.items():
            with self.subTest(bug):
                folder = self.folder / re.sub(r"\W", "-", bug)
                folder.mkdir()
                session = Session(folder, "-q", f"{TESTS}::{test}", edits=edits)
                message = session.message()
                self.assertEqual(session.status, 1, session.text)
                self.assertRegex(message, first, session.text)
                for words in rest:
                    self.assertIn(words, message, session.text)
                for plumbing in ("_compare.py", "_rank_process.py", "pytest_plugin.py", "ranks.py"):
                    self.assertNotIn(plumbing, session.text)

    def test_a_rank_that_hangs_is_named(self):
        """The timeout is the test's own: a slow machine needs a longer one to come to where ranks hang."""
        edits = [(LAYERS, "def summed(x, group):\n",
                  "def summed(x, group):\n    if group.rank() == 1:\n        return x  # and leaves the others waiting\n"),
                 (TESTS, "model(batch()).square().mean().backward()\n\n    anyrank_compare(build, step, spec=TENSOR",
                  "model(batch()).square().mean().backward()\n        import time\n"
                  "        while mesh and mesh.get_rank() == 1:\n            time.sleep(1)\n\n"
                  "    anyrank_compare(build, step, spec=TENSOR")]
        for seconds in (4, 16, 64, 256):
            folder = self.folder / str(seconds)
            folder.mkdir()
            session = Session(folder, "-q", f"--anyrank-timeout={seconds}", f"{TESTS}::test_tensor_parallel[tp2]",
                              edits=edits)
            if "rank 1 of 2 hangs" in session.message():
                break
        message = session.message()
        self.assertRegex(message, rf"^anyrank.RanksFailed: 2 ranks \(tp=2\): rank 1 of 2 hangs: after {seconds} s it is "
                                  r"in step \(test_layers.py:\d+\): time.sleep\(1\)")
        self.assertRegex(message, r"rank 0: waiting in all_reduce, called by summed \(parallel_layers.py:\d+\)")


if __name__ == "__main__":
    unittest.main()
