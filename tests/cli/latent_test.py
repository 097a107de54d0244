# SPDX-License-Identifier: Apache-2.0
"""Latent attention: bits and bytes of every kind of layout, checkpoints that another layout resumes, shards that become
one file again, and layouts that cut what is whole."""
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import Case  # noqa: E402

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

    def test_another_layout_resumes_a_run_and_reshard_splits_and_merges_it(self):
        run, parts, whole = self.folder / "run", self.folder / "parts", self.folder / "whole"
        straight = self.result("train", MODEL, *SMALL)
        self.result("train", MODEL, *SMALL, "--tp", "2", "--sp", "--stop-after", "1", "--save", run)
        resumed = self.result("train", "--resume", run, "--tp", "4", "--dp", "2", "--zero", "2")
        self.assertEqual(resumed["weights_hash"], straight["weights_hash"])
        saved = self.result("train", MODEL, *SMALL, "--save", self.folder / "end")
        self.assertEqual(saved["weights_hash"], straight["weights_hash"])
        self.done("reshard", self.folder / "end", "--tp", "8", "--out", parts)
        self.done("reshard", parts, "--out", whole)
        self.done("reshard", self.folder / "end", "--out", self.folder / "one")
        self.done("verify", self.folder / "one", whole)

    def test_lint_finds_nothing_and_a_head_is_not_cut(self):
        self.done("lint", MODEL, "--tp", "4", "--sp", "--dp", "2", "--ep", "2", "--zero", "1")
        self.refused("check", MODEL, "--tp", "16", says="8 query heads")
        self.refused("check", MODEL, "--tp", "3", says="query heads")


if __name__ == "__main__":
    unittest.main()
