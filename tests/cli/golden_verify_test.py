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

    def test_a_native_bf16_run_is_within_what_an_exact_bf16_reference_allows_and_a_fault_is_not(self):
        for model in ("gpt2-tiny", "llama-gqa-tiny"):
            given = ("grads", GOLDEN / model, "--input", GOLDEN / model / "batch.safetensors", "--precision", "bf16")
            exact, native, wrong = (self.folder / f"{model}-{kind}" for kind in ("exact", "native", "wrong"))
            self.done(*given, "--out", exact, "--sensitivity")
            self.done(*given, "--out", native, "--numerics", "native")
            self.done(*given, "--out", wrong, "--numerics", "native", "--inject", "norm_backward_missing")
            for other, result, code in ((native, "same", 0), (wrong, "different", 1)):
                with self.subTest(model=model, other=other.name):
                    found = self.result("verify", exact / "grads.safetensors", other / "grads.safetensors",
                                        "--sensitivity", exact / "allowed.safetensors", code=code)
                    self.assertEqual(found["result"], result)


if __name__ == "__main__":
    unittest.main()
