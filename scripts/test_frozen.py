#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/frozen.py: what a mask hides and what it does not, and that a record with one other byte differs."""

import array
import contextlib
import io
import json
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

    def compare(self, before, after):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = frozen.compare(before, after)
        return status, said.getvalue()

    def test_a_record_is_the_same_twice_and_differs_by_one_word(self):
        original, repeat, changed = (self.record(name, answer) for name, answer in zip("abc", ("one", "one", "two")))
        text = (original / "check-default.txt").read_text()
        self.assertIn("--- stdout\nloss 4.5, TIME; DATA/text.txt\n--- stderr\none\n--- exit status 1\n", text)
        self.assertEqual(self.compare(original, repeat)[0], 0)
        status, said = self.compare(original, changed)
        self.assertEqual(status, 1)
        self.assertIn("-one\n+two\n", said)

    def test_nothing_compared_is_no_success(self):
        (self.folder / "empty").mkdir()
        self.assertEqual(self.compare(self.folder / "empty", self.folder / "empty")[0], 1)

    def test_another_cause_is_told(self):
        for name, cause in (("a", "rounding"), ("b", "residual")):
            (self.folder / name).mkdir()
            report = {"seconds": "?", "first": {"tensor": "x", "cause": cause}, "worst": [{"tensor": "y", "cause": "filled"}]}
            text = json.dumps(report, indent=2).replace('"?"', "TIME")
            (self.folder / name / "spoiled.txt").write_text(f"$ anyrank verify p q\n--- stdout\n{text}\n--- exit\n")
            trial = [{"case": "tp", "tensor": "z", "cause": cause, "verdict": "right"}]
            (self.folder / name / "trial.json").write_text(json.dumps(trial))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(frozen.causes(self.folder / "a", self.folder / "a"), 0)
            self.assertEqual(frozen.causes(self.folder / "a", self.folder / "b"), 1)
        self.assertIn("trial tp: z: rounding right -> residual right\n"
                      "spoiled verify p q: x (first): rounding -> residual\n", said.getvalue())
        self.assertIn("3 tensors, 2 with another cause", said.getvalue())

    def test_bf16_is_the_nearest(self):
        self.assertEqual(list(frozen.in_bf16(array.array("f", [1 + 2**-8, 1 + 3 * 2**-8, -1.0, 1 + 2**-8 + 2**-20]))),
                         [1.0, 1 + 2**-6, -1.0, 1 + 2**-7])

    def test_a_predicted_time_is_no_measured_one(self):
        self.assertEqual(frozen.masked("a step of 4.5 ms\n", "plan-one", {}), "a step of 4.5 ms\n")
        self.assertEqual(frozen.masked("a step of 4.5 ms, 3 tokens/s\n", "train", {}), "a step of TIME, TOKENS/s\n")

    def test_every_subcommand_has_its_cases(self):
        words = {command.split()[0] for commands in (*frozen.RUNS.values(), frozen.HELP) for command in commands}
        self.assertGreaterEqual(words, {"check", "grads", "train", "verify", "plan", "lint", "bugs", "info"})


if __name__ == "__main__":
    unittest.main()
