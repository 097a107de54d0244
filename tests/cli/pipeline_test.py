#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the options of a pipeline from outside: schedules by name and as files, layers of stages, the pictures of
`anyrank plan --pipeline`, and what is refused."""

import re
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case  # noqa: E402

GOLDEN = ROOT / "tests/golden/schedules"
OWN = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"  # back in the other order
SMALL = ("--batch", 2, "--seq", 16, "--steps", 1)


class Pipeline(Case):
    def setUp(self):
        super().setUp()
        self.put("own.csv", OWN)

    def shown(self, *arguments):
        return self.result("plan", "llama-demo", "--pipeline", *arguments)

    def test_a_picture_says_what_time_a_stage_without_layers_has(self):
        counts = "a stage without layers counts as one layer"
        self.assertIn(counts, self.passes("plan", "llama-demo", "--pipeline", "--pp", 3, "--stages", "0,3,1"))
        self.assertNotIn(counts, self.passes("plan", "llama-demo", "--pipeline", "--pp", 3, "--stages", "1,2,1"))

    def test_a_picture_has_what_json_has(self):
        result = self.shown("--pp", 2, "--micro-batches", 3)["pipeline"]
        self.assertEqual((result["makespan"], result["in_flight"], result["unit_layers"]), (12, 2, 2))
        self.assertAlmostEqual(result["bubble"], 1 / 3)
        first, last = result["ranks"]
        self.assertEqual([c["operation"] for c in last["computations"]], "1F0 1B0 1F1 1B1 1F2 1B2".split())
        self.assertEqual(last["computations"][1], {"operation": "1B0", "begin": 2, "end": 4})
        self.assertEqual((first["stages"], first["layers"], first["computes"], first["waits"]), ([0], [2], 9, 3))
        self.assertEqual(set(first["operations"]), {f"0{k}{m}" for k in ("F", "B", "SEND_F", "RECV_B") for m in range(3)})

    def test_uneven_stages_take_as_long_as_their_layers(self):
        result = self.shown("--pp", 2, "--stages", "3,1", "--micro-batches", 1)["pipeline"]
        self.assertEqual((result["unit_layers"], result["makespan"]), (1, 12))
        self.assertEqual([r["layers"] for r in result["ranks"]], [[3], [1]])

    def test_a_file_gives_stages_and_micro_batches(self):
        interleaved = GOLDEN / "interleaved-2-2-4-transfers.csv"
        result = self.shown("--pp", 2, "--schedule-pp", interleaved)
        layout = result["layout"]
        self.assertEqual((layout["virtual_stages"], layout["micro_batches"], layout["schedule_pp"]), (2, 4, "own"))
        words = [c for c in interleaved.read_text(encoding="utf-8").splitlines()[0].split(",")
                 if not re.search("SHARD|WAIT|REDUCE", c)]
        self.assertEqual(result["pipeline"]["ranks"][0]["operations"], words)

    def test_what_csv_writes_is_read(self):
        for kind in ("1f1b", "gpipe", "interleaved", "zero-bubble"):
            made = self.shown("--pp", 2, "--schedule-pp", kind, "--micro-batches", 4, "--csv", "s.csv")["pipeline"]
            self.assertEqual(self.shown("--pp", 2, "--schedule-pp", "./s.csv")["pipeline"], made)

    def test_runs_take_files_and_stages(self):
        own = ("--pp", 2, "--schedule-pp", "own.csv")
        self.assertIn("own schedule", self.passes("check", "llama-demo", *own, "--stages", "3,1", "--skip-f64", *SMALL))
        plain, piped = (self.passes("train", "llama-demo", *SMALL, *layout).splitlines()[-1] for layout in ((), own))
        self.assertEqual(plain, piped)

    def test_stages_whose_attentions_a_plan_splits_otherwise_make_groups_of_their_own(self):
        self.put("model/config.json", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, '
                 '"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, '
                 '"vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, '
                 '"tie_word_embeddings": false, "hidden_act": "silu"}')
        self.put("plan.json", '{"layers.0.self_attn.[qkv]_proj": "colwise", "layers.0.self_attn.o_proj": "rowwise", '
                 '"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", '
                 '"layers.*.mlp.down_proj": "rowwise"}')
        said = self.passes("check", "model", "--pp", 2, "--stages", "2,1", "--tp", 2, "--cp", 2, "--cp-inner", 2, "--plan",
                           "plan.json", *SMALL)
        self.assertIn("the same bits", said)

    def test_what_cannot_be_is_refused_before_anything_runs(self):
        self.refused("check", "llama-demo", "--pp", 2, "--schedule-pp", "gpip", says="did you mean gpipe?")
        self.refused("check", "llama-demo", "--pp", 2, "--schedule-pp", "./none.csv", says="none.csv")
        self.refused("check", "llama-demo", "--schedule-pp", "gpipe", says="--pp N of at least 2")
        self.refused("check", "llama-demo", "--stages", "2,2", says="--stages is about the ranks of --pp")
        self.refused("check", "llama-demo", "--pp", 2, "--stages", "2,x", says="--stages: got '2,x'")
        self.refused("check", "llama-demo", "--pp", 2, "--stages", "1,2,1", says="for 3 stages of 2")
        self.refused("check", "llama-demo", "--pp", 2, "--stages", "1,2", says="the model has 4")
        self.refused("train", "llama-demo", "--pp", 4, "--schedule-pp", "own.csv", says="one of 2 ranks, 2 stages and 2")
        self.refused("lint", "llama-demo", "--pp", 2, "--schedule-pp", "own.csv", "--micro-batches", 3,
                     says="2 micro-batches, the layout")
        self.put("stuck.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
        self.refused("grads", "llama-demo", "--input", "none", "--out", "out", "--pp", 2, "--schedule-pp", "stuck.csv",
                     says="rank 0 with 0B0 (stage 0, micro-batch 0) waits for 1SEND_B0 of rank 1")
        self.refused("plan", "llama-demo", "--pipeline", says="give --pp N")
        self.refused("plan", "llama-demo", "--pipeline", "--pp", 2, "--rank", 1, says="leave one out")


if __name__ == "__main__":
    unittest.main()
