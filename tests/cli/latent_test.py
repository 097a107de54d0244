# SPDX-License-Identifier: Apache-2.0
"""Latent attention: bits and bytes of every kind of layout, checkpoints that another layout resumes, shards that become
one file again, and layouts that cut what is whole."""
import json
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import Case, convert  # noqa: E402

MODEL = "deepseek-demo"
SMALL = ("--batch", "4", "--seq", "16", "--steps", "2")


class LatentTest(Case):
    def test_every_layout_has_the_bits_of_one_rank_and_the_predicted_bytes(self):
        for layout in (("--tp", "8", "--sp"), ("--tp", "2", "--sp", "--keep-gathered", "--overlap", "2"),
                       ("--cp", "4", "--zigzag"), ("--cp", "4", "--cp-inner", "2", "--tp", "2"),
                       ("--dp", "2", "--ep", "2", "--zero", "3", "--recompute", "full"),
                       ("--pp", "3", "--schedule-pp", "zero-bubble", "--micro-batches", "3", "--tp", "2", "--sp"),
                       ("--tp", "4", "--recompute", "selective", "--dropout", "0.1")):
            with self.subTest(layout=layout):
                model = self.result("check", MODEL, *SMALL, *layout, "--strict-predictions")["models"][0]
                self.assertEqual(model["runs"][0]["result"], "same")

    def test_another_layout_resumes_a_run_and_its_checkpoint_is_split_and_merged(self):
        for model in (MODEL, "gpt-oss-demo"):
            with self.subTest(model=model):
                run, parts, whole, end, one = (self.folder / f"{model}-{n}" for n in ("run", "parts", "whole", "end", "one"))
                straight = self.result("train", model, *SMALL)
                self.result("train", model, *SMALL, "--tp", "2", "--sp", "--stop-after", "1", "--save", run)
                resumed = self.result("train", "--resume", run, "--tp", "4", "--dp", "2", "--zero", "2")
                self.assertEqual(resumed["weights_hash"], straight["weights_hash"])
                saved = self.result("train", model, *SMALL, "--save", end)
                self.assertEqual(saved["weights_hash"], straight["weights_hash"])
                for source, *words in (end, "--tp", "8", "--out", parts), (parts, "--out", whole), (end, "--out", one):
                    done = convert(source, *words)
                    self.assertEqual(done.returncode, 0, done.stderr)
                self.done("verify", one, whole)
                self.done("verify", end / "latest", one)

    def test_a_checkpoint_of_gpt_oss_has_the_experts_as_transformers_has_them(self):
        self.result("train", "gpt-oss-demo", *SMALL, "--ep", "2", "--dp", "2", "--save", self.folder / "run")
        data = (self.folder / "run/latest/model.safetensors").read_bytes()
        tensors = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        experts = {name.split("experts.")[1]: t["shape"] for name, t in tensors.items() if "layers.0.mlp.experts" in name}
        self.assertEqual(experts, {"gate_up_proj": [8, 64, 64], "gate_up_proj_bias": [8, 64], "down_proj": [8, 32, 64],
                                   "down_proj_bias": [8, 64]})

    def test_lint_finds_nothing_and_a_head_is_not_cut(self):
        self.done("lint", MODEL, "--tp", "4", "--sp", "--dp", "2", "--ep", "2", "--zero", "1")
        self.refused("check", MODEL, "--tp", "16", says="8 query heads")
        self.refused("check", MODEL, "--tp", "3", says="query heads")


if __name__ == "__main__":
    unittest.main()
