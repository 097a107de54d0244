#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/frozen.py: what a mask hides and what it does not, and that a record with one other byte differs."""

import contextlib
import io
import pathlib
import tempfile
import unittest

import frozen

COMMAND = """#!/bin/sh
[ "$1" = bugs ] && echo '{"faults": [{"name": "a_fault"}]}' && exit 0
[ "$1" = info ] && echo '{"data_dir": "/somewhere/data"}' && exit 0
echo "loss 4.5, $$ ms; /somewhere/data/text.txt"; echo "ANSWER" >&2; exit 1
"""


class Frozen(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="anyrank-frozen-")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def record(self, name, answer):
        command = self.folder / f"{name}-command"
        command.write_text(COMMAND.replace("ANSWER", answer))
        command.chmod(0o755)
        with contextlib.redirect_stdout(io.StringIO()):
            frozen.record(command, self.folder / name, ["check-default"])
        return self.folder / name

    def compare(self, a, b):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = frozen.compare(a, b)
        return status, said.getvalue()

    def test_a_record_is_the_same_twice_and_differs_by_one_word(self):
        first, again, other = (self.record(name, answer) for name, answer in zip("abc", ("one", "one", "two")))
        text = (first / "check-default.txt").read_text()
        self.assertIn("--- stdout\nloss 4.5, TIME; DATA/text.txt\n--- stderr\none\n--- exit status 1\n", text)
        self.assertEqual(self.compare(first, again)[0], 0)
        status, said = self.compare(first, other)
        self.assertEqual(status, 1)
        self.assertIn("-one\n+two\n", said)

    def test_nothing_compared_is_no_success(self):
        (self.folder / "empty").mkdir()
        self.assertEqual(self.compare(self.folder / "empty", self.folder / "empty")[0], 1)

    def test_a_predicted_time_is_no_measured_one(self):
        self.assertEqual(frozen.masked("a step of 4.5 ms\n", "plan-one", {}), "a step of 4.5 ms\n")
        self.assertEqual(frozen.masked("a step of 4.5 ms, 3 tokens/s\n", "train", {}), "a step of TIME, TOKENS/s\n")

    def test_every_subcommand_has_its_cases(self):
        words = {command.split()[0] for commands in (*frozen.RUNS.values(), frozen.HELP) for command in commands}
        self.assertGreaterEqual(words, {"check", "grads", "train", "verify", "reshard", "plan", "lint", "bugs", "info"})


if __name__ == "__main__":
    unittest.main()
