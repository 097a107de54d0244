# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities: which side is off, by the function and by the program."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
import unittest

import anyrank
from anyrank.tests import FolderCase, needs


@needs("numpy")
class Sides(FolderCase):
    def test_the_side_that_is_off_is_named(self) -> None:
        said: dict[str, typing.Any] = {"tokens": [3, 1, 4, 1, 5]}
        tokens, out = self.path / "tokens.json", self.path / "out.jsonl"
        tokens.write_text(json.dumps(said), encoding="utf-8")
        exact = anyrank.logprobs.compare("llama-demo", input=tokens)
        report = anyrank.logprobs.compare("llama-demo", input=tokens, binary64=True, out=out)
        self.assertEqual((exact.numerics, report.numerics, report.tokens), ("exact", "binary64", 4))
        self.assertTrue(report.ok and report.hash != exact.hash)
        said = json.loads(out.read_text(encoding="utf-8"))
        said["logprobs"][2] += 2e-6
        tokens.write_text(json.dumps(said), encoding="utf-8")
        report = anyrank.logprobs.compare("llama-demo", trainer=out, rollout=tokens, binary64=True, within=1e-6)
        assert report.trainer is not None and report.rollout is not None
        self.assertEqual((report.ok, report.trainer["off"], report.rollout["off"]), (False, False, True))
        words = ["llama-demo", f"--rollout={tokens}", "--binary64", "--within=1e-6"]
        done = subprocess.run([sys.executable, "-m", "anyrank.logprobs", *words], capture_output=True, text=True,
                              check=False)
        self.assertEqual((done.returncode, done.stdout.splitlines()[:1]), (1, ["the rollout is off"]), done.stderr)

    def test_unknown_options_are_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "did you mean tp?"):
            anyrank.logprobs.compare("llama-demo", input=self.path / "tokens.json", tpp=2)


if __name__ == "__main__":
    unittest.main()
