#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `--scale` from outside: large models, shrunk, in every subcommand that takes it; and what is refused.
"""

import json
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case, run  # noqa: E402

SMALL = ("--batch", "2", "--seq", "8", "--steps", "1")
LARGE = ("llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b", "gpt-22b", "gpt3-175b",
         "gpt-530b", "gpt-1t", "stack-4.8b")


class Scale(Case):
    def test_a_shrunk_model_has_the_same_bits_and_says_what_it_is(self):
        done = self.done("check", "llama-3-8b", "--scale", "1/64", "--tp", 8, "--sp", *SMALL,
                   "--skip-f64", "--strict-predictions", "--json", "-")
        report = json.loads(done.stdout)
        model = report["models"][0]
        self.assertEqual((report["result"], model["name"], model["weights"]), ("same", "llama-3-8b at 1/64", "fresh"))
        self.assertEqual(len(model["notes"]), 1)
        self.assertIn("note: " + model["notes"][0], done.stderr)
        self.assertIn("2 of 32 layers, hidden 64 of 4096, heads of 2 of 128", model["notes"][0])

    def test_layouts_are_those_of_the_large_model(self):
        for part in ((), ("--scale", "1/64")):
            self.refused("lint", "llama-3-8b", "--tp", 3, *part, says="the number of query heads = 32 cannot be split")
            self.refused("lint", "llama-3-8b", "--tp", 64, *part, says="more than the 32 query heads")
            self.assertEqual(run("lint", "llama-3-8b", "--tp", 32, *part).returncode, 0)

    def test_other_subcommands_take_it(self):
        done = self.done("train", "qwen2.5-7b", "--scale", "1/64", "--tp", 4, "--batch", 2, "--seq", 8, "--steps", 2)
        self.assertIn("qwen2.5-7b at 1/64", done.stdout + done.stderr)
        done = self.done("plan", "gpt-1t", "--scale", "1/16", "--flow", "--tp", 8)
        self.assertIn("gpt-1t at 1/16, tp=8", done.stdout)

    def test_weights_beside_a_config_are_not_taken(self):
        model = ROOT / "tests/golden/llama-gqa-tiny"
        batch = ("--input", model / "batch.safetensors", "--out", self.folder, "--tp", 2)
        self.assertIn("fresh weights", self.done("grads", model, "--scale", "1/2", *batch).stdout)
        self.refused("grads", "--block", ROOT / "tests/golden/block-gqa", "--out", self.folder, "--scale", "1/2",
                     says="--scale and --mtp go with a MODEL")

    def test_a_checkpoint_is_of_the_smaller_model(self):
        small = ("--batch", 2, "--seq", 8, "--steps", 4)
        whole = self.done("train", "gpt-22b", "--scale", "1/32", *small)
        self.done("train", "gpt-22b", "--scale", "1/32", "--tp", 2, *small, "--stop-after", 2, "--save", self.folder)
        done = self.done("train", "--resume", self.folder, "--dp", 2, *small)
        self.assertEqual(done.stdout.splitlines()[-1], whole.stdout.splitlines()[-1])
        config = json.loads((self.folder / "latest/config.json").read_text(encoding="utf-8"))
        self.assertEqual((config["n_embd"], config["n_layer"], config["n_head"]), (256, 2, 64))
        self.refused("train", "--resume", self.folder, "--scale", "1/2", says="resume it without scale and mtp")

    def test_what_cannot_be_shrunk_is_refused(self):
        for text in ("1/0", "0.5", "2/3", "1/", "1/x", "16", "1/-2", "1/99999999999999999999"):
            self.refused("check", "llama-3-8b", "--scale", text, says="expected 1/N with an integer N")
        self.refused("check", "llama-3-8b", "--scale", "1/128", says="the smallest is 1/64")

    def test_a_large_model_is_refused_for_memory_at_once(self):
        for model in LARGE:
            for command in ("check", "train"):
                self.refused(command, model, says=["shrink the model (scale 1/N)", "--scale"])


if __name__ == "__main__":
    unittest.main()
