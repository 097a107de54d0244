#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden tensors through files alone: `grads`, then `verify` against what PyTorch wrote. tests/verify/explain_test.c
spoils them in many ways."""

import json
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, Case  # noqa: E402

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/grads.safetensors"))


class Golden(Case):
    def ours(self, model):
        out, provenance = self.folder / model, GOLDEN / model / "provenance.json"
        made = json.loads(provenance.read_text()) if provenance.exists() else {}
        loss = [x for key in ("label_smoothing", "z_loss", "balance", "balance_weight", "router_z_loss") if key in made
                for x in (f"--{key.replace('_', '-')}", made[key])]
        self.done("grads", GOLDEN / model, "--input", GOLDEN / model / "batch.safetensors", "--out", out,
                  "--sensitivity", *loss)
        return out

    def test_every_model_is_pytorch_s_within_its_sensitivity(self):
        self.assertGreaterEqual(len(MODELS), 20)
        for model in MODELS:
            out = self.ours(model)
            for name in ("outputs.safetensors", "grads.safetensors"):
                with self.subTest(model=model, file=name):
                    result = self.result("verify", GOLDEN / model / name, out / name, "--sensitivity",
                                         out / "allowed.safetensors")
                    self.assertEqual(result["result"], "same")


if __name__ == "__main__":
    unittest.main()
