#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden tensors through files alone: `grads`, then `verify` against what PyTorch wrote. tests/verify/explain_test.c spoils
them in many ways."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, run  # noqa: E402

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/grads.safetensors"))


class Golden(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory(prefix="anyrank-golden-")
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)

    def ours(self, model):
        out = self.folder / model
        if not out.exists():
            provenance = GOLDEN / model / "provenance.json"
            made = json.loads(provenance.read_text()) if provenance.exists() else {}
            loss = [x for key in ("label_smoothing", "z_loss", "balance", "balance_weight", "router_z_loss") if key in made
                    for x in (f"--{key.replace('_', '-')}", made[key])]
            done = run("grads", GOLDEN / model, "--input", GOLDEN / model / "batch.safetensors", "--out", out,
                       "--sensitivity", *loss)
            self.assertEqual(done.returncode, 0, done.stderr)
        return out

    def verify(self, reference, other, out):
        done = run("verify", reference, other, "--sensitivity", out / "allowed.safetensors", "--json", "-")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        return json.loads(done.stdout), done.returncode

    def test_every_model_is_pytorch_s_within_its_sensitivity(self):
        self.assertGreaterEqual(len(MODELS), 20)
        for model in MODELS:
            out = self.ours(model)
            for name in ("outputs.safetensors", "grads.safetensors"):
                with self.subTest(model=model, file=name):
                    result, code = self.verify(GOLDEN / model / name, out / name, out)
                    self.assertEqual((code, result["result"]), (0, "same"))


if __name__ == "__main__":
    unittest.main()
