#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of --optimizer muon: resumed under another layout, refused with another's options, and what plan counts.
"""

import json
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case, run  # noqa: E402

MODEL = str(ROOT / "tests/golden/experts/qwen2moe-tiny")
SMALL = ["check", MODEL, "--batch", "1", "--seq", "4", "--skip-f64", "--strict-predictions"]


class MuonTest(Case):
    subcommand = SMALL

    def trained(self, *options):
        done = run("train", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in done.stdout.splitlines() if line.startswith("weights after step")]

    def test_twenty_steps_resumed_under_another_layout_have_the_same_weights(self):
        step = ["mixtral-demo", "--scale", "1/4", "--steps", "20", "--batch", "4", "--seq", "16", "--optimizer", "muon", "--lr", "0.01",
                "--qk-clip", "0.05"]
        with tempfile.TemporaryDirectory() as at:
            self.trained(*step, "--stop-after", "8", "--dp", "2", "--tp", "2", "--ep", "2", "--zero", "2", "--save", at)
            resumed = self.trained("--resume", at, "--pp", "2", "--tp", "2", "--dp", "2", "--zero", "3",
                                   "--micro-batches", "2")
        self.assertEqual(resumed, self.trained(*step))

    def test_a_matrix_whose_gradient_was_not_reduced_is_a_difference_under_zero(self):
        """A rank may have no share of a matrix, and in the second step nothing says that its gradient is shared out."""
        done = run("check", ROOT / "tests/golden/qwen3-tiny", "--dp", "2", "--zero", "1", "--optimizer", "muon",
                   "--batch", "2", "--seq", "8", "--steps", "2", "--skip-f64", "--inject", "bucket_stale_done")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("first tensor that differs is lm_head.weight:grad", done.stdout)

    def test_biases_are_clipped_within_the_allowance_of_the_factor(self):
        model = self.put("config.json", {"model_type": "gpt2", "vocab_size": 256, "n_embd": 4, "n_layer": 1, "n_head": 1,
                                         "n_positions": 64})
        done = run("check", model.parent, "--dp", "2", "--optimizer", "muon", "--qk-clip", "0.2", "--numerics", "native",
                   "--batch", "4", "--seq", "5", "--steps", "2", "--seed", "120")
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_options_of_other_optimizers_are_refused(self):
        self.refused("--optimizer", "muon", "--nesterov",
                     says="--nesterov goes with --optimizer sgd; muon has Nesterov's variant always")
        self.refused("--momentum", "0.5", says="--momentum goes with --optimizer sgd or muon; adamw has --betas")
        self.refused("--match-rms", says="--match-rms goes with --optimizer muon")
        self.refused("--muon-shards", says="--muon-shards goes with --optimizer muon")
        self.refused("--qk-clip", "1", says="--qk-clip goes with --optimizer muon")
        normed = run("check", ROOT / "tests/golden/qwen3-tiny", "--steps", "1", "--optimizer", "muon", "--qk-clip", "1")
        self.assertEqual((normed.returncode, "normalises q and k" in normed.stderr), (2, True), normed.stderr)
        self.refused("--optimizer", "muon", "--momentum", "1", says="momentum is 1, expected at least 0 and below 1")

    def test_the_options_reach_the_run_and_its_json(self):
        optimizer = self.result("--tp", "2", "--steps", "1", "--optimizer", "muon", "--match-rms", "--momentum",
                                "0.9", "--muon-shards")["models"][0]["optimizer"]
        self.assertEqual({key: optimizer[key] for key in ("name", "match_rms", "muon_shards", "momentum", "nesterov",
                                                          "weight_decay")},
                         {"name": "muon", "match_rms": True, "muon_shards": True, "momentum": 0.9, "nesterov": True,
                          "weight_decay": 0.1})

    def test_queries_and_keys_of_all_heads_are_clipped_where_a_plan_leaves_them_whole(self):
        for style in ("rowwise", "replicate"):
            rules = [{"modules": "layers.*.self_attn.[qkv]_proj", "style": style, "input": "R", "output": "S(-1)"},
                     {"modules": "layers.*.self_attn.o_proj", "style": "rowwise"}]
            with self.subTest(style), tempfile.NamedTemporaryFile("w", suffix=".json") as plan:
                json.dump({"rules": rules}, plan)
                plan.flush()
                done = run("check", "llama-demo", "--scale", "1/4", "--plan", plan.name, "--tp", "2", "--optimizer", "muon",
                           "--qk-clip", "0.05", "--lr", "0.01", "--steps", "2", "--batch", "1", "--seq", "8", "--skip-f64")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_shards_have_the_same_weights_and_other_bytes(self):
        layout = ["--tp", "2", "--steps", "2", "--optimizer", "muon", "--lr", "0.01"]
        gathered, cut = (self.result(*layout, *more)["models"][0]["runs"][0] for more in ([], ["--muon-shards"]))
        self.assertEqual(gathered["weights_hash"], cut["weights_hash"])
        self.assertNotEqual(gathered["bytes"]["counted"], cut["bytes"]["counted"])

    def test_a_plan_has_a_momentum_alone_of_matrices(self):
        layout = ["plan", "llama-3-8b", "--gpus", "8", "--tp", "8", "--top", "1", "--micro-batches", "1", "--json", "-"]
        done = [run(*layout, *more) for more in ((), ("--muon",))]
        adam, muon = (json.loads(each.stdout)["layouts"][0]["memory"]["production"] for each in done)
        outside = 2 * 128256 * 4096 + 65 * 4096  # two tables and the norms
        self.assertAlmostEqual((adam["optimizer"] - muon["optimizer"]) / (4 * (8030261248 - outside) / 8), 1.0, delta=1e-3)

    def test_a_plan_of_shards_has_the_bytes_that_check_counts_and_another_time(self):
        layout = ["llama-demo", "--tp", "4", "--batch", "4", "--seq", "16"]
        seconds = []
        for shards in ((), ("--muon-shards",)):
            done = run("check", *layout, "--steps", "1", "--optimizer", "muon", "--skip-f64", *shards, "--json", "-")
            counted = json.loads(done.stdout)["models"][0]["runs"][0]["bytes"]["counted"]
            planned = [json.loads(run("plan", *layout, *more, "--muon", *shards, "--json", "-").stdout)
                       for more in (("--flow", "--backward"), ("--micro-batches", "1"))]
            self.assertEqual(planned[0]["bytes"]["predicted"], counted, shards)
            seconds.append(planned[1]["layouts"][0]["seconds"])
        self.assertNotEqual(*seconds)
        refused = run("plan", *layout, "--muon-shards")
        self.assertEqual((refused.returncode, refused.stderr), (2, "anyrank plan: --muon-shards goes with --muon\n"))


if __name__ == "__main__":
    unittest.main()
