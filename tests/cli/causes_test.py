#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of anyrank causes: the list, one cause in full, causes.md, and that a test expects each cause."""

import json
import re
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case, run  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
import causes_page  # noqa: E402


class Causes(Case):
    @classmethod
    def setUpClass(cls):
        cls.table = json.loads(run("causes", "--json", "-").stdout)["causes"]

    def test_page_has_the_table(self):
        text = causes_page.PAGE.read_text(encoding="utf-8")
        self.assertEqual(text, causes_page.page(self.table, text), "anyrank causes --json - | scripts/causes_page.py --write")

    def test_list_has_every_cause_once(self):
        *rows, last = run("causes").stdout.strip().splitlines()
        listed = [row.split()[0] for row in rows[1:] if row]
        self.assertEqual(listed, list(dict.fromkeys(row["cause"] for row in self.table)))
        self.assertEqual(last, f"{len(listed)} causes; anyrank causes CAUSE prints one in full")

    def test_one_cause_is_printed_in_full(self):
        for cause in ("averaged_again", "collective_left_out", "missing_all_gather"):
            rows = [row for row in self.table if row["cause"] == cause]
            shown = run("causes", cause).stdout
            self.assertEqual(shown.splitlines()[0], cause)
            self.assertEqual(shown.count("\n- "), len(rows))
            shown = " ".join(shown.split()) + " "
            for row in rows:
                self.assertIn(f"- {row['says']} ", shown)
                self.assertIn(row["look_at"], shown)
            self.assertEqual(json.loads(run("causes", cause, "--json", "-").stdout)["causes"], rows)

    # A sentence shows the names of its facts without their formats, and its beginning is a part of it.
    def test_sentences_are_for_people(self):
        for row in self.table:
            self.assertNotRegex(row["says"], r"\{[^}]*:|\n")
            self.assertIn(row["gist"], row["says"])
            self.assertTrue(row["gist"])

    def test_arguments_that_it_does_not_take_are_refused(self):
        for words, says in ((["foo"], "unknown cause 'foo'; anyrank causes lists them"),
                            (["averaged_agian"], "unknown cause 'averaged_agian'; did you mean averaged_again?"),
                            (["--x"], "unknown option --x"), (["reversed", "rounding"], "rounding")):
            self.refused("causes", *words, says=says)

    def test_unlisted_subcommands_refuse_arguments_too(self):
        for words in (["describe", "foo"], ["describe", "--help"]):
            self.refused(*words, says="")

    # A test says an identifier alone, in a list, or before a colon.
    def test_every_cause_stands_in_a_test(self):
        said = set()
        for path in [path for folder in ("tests", "python/anyrank/tests") for suffix in ("c", "h", "py")
                     for path in (ROOT / folder).rglob(f"*.{suffix}")]:
            for listed in re.findall(r'"([\w |]+)[":]', path.read_text(encoding="utf-8")):
                said.update(listed.split())
        causes = {row["cause"] for row in self.table}
        self.assertGreater(len(causes), 100)
        self.assertEqual(sorted(causes - said), [])

    def test_layouts_and_models_beside_those_of_the_faults_own_cases(self):
        llama = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        qwen = {**llama, "model_type": "qwen2"}
        gpt2 = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 12, "n_positions": 64}
        groups = {**llama, "model_type": "dots1", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
                  "topk_group": 1, "moe_intermediate_size": 24, "n_shared_experts": 1}
        latent = {**groups, "model_type": "deepseek_v3", "num_key_value_heads": 4, "topk_group": 2, "q_lora_rank": None,
                  "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
                  "routed_scaling_factor": 2.5, "first_k_dense_replace": 0}
        sinks = {**llama, "model_type": "gpt_oss", "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
        for fault, config, layout, cause, says in (
                ("row_input_grad_not_gathered", gpt2, "--tp 2 --dp 2 --cp 2 --mlp-order row-column --batch 4",
                 "missing_all_gather", "has its own part"),
                ("kv_replica_wrong_head", qwen, "--tp 4 --cp 2 --batch 1", "wrong_kv_head", "floor(r * 2 / 4)"),
                ("weight_grad_leading_dims", qwen, "--tp 4 --micro-batches 3 --batch 7", "part_of_tokens", ""),
                ("bucket_not_packed", qwen, "--dp 2 --tp 2 --pp 2 --zero 2 --micro-batches 2 --batch 4", "no_gradient", ""),
                # Values of bf16 are sums up to their rounding.
                ("bias_added_twice", {**qwen, "attention_bias": True}, "--tp 2 --batch 2 --precision bf16",
                 "bias_counted_again", ""),
                ("column_dx_not_reduced", qwen, "--tp 2 --batch 2 --precision bf16", "missing_all_reduce", "add up"),
                ("bucket_reduced_twice", qwen, "--dp 2 --zero 2 --batch 4 --precision bf16", "counted_twice",
                 "2, 2, 1, 1 times"),
                ("dp_group_missing", qwen, "--dp 2 --zero 1 --batch 4", "missing_all_reduce", "2 of 4 samples"),
                ("sinks_left_out", sinks, "--dp 2 --batch 4", "sinks_missing", ""),
                ("router_weights_not_normalised", sinks, "--dp 2 --batch 4", "routing_weights", ""),
                ("sp_latent_key_grad_summed", latent, "--tp 2 --sp --dp 2 --batch 4", "reduced_again", "times 2"),
                # Nothing of a sequence shorter than two chunks a rank is rounded down.
                ("norm_backward_missing", {**llama, "model_type": "mixtral", "num_local_experts": 4},
                 "--cp 4 --seq 4 --batch 3 --balance layers", "no_backward", ""),
                # The head is in no block that is recomputed.
                ("weight_grad_leading_dims", {**llama, "model_type": "seed_oss", "intermediate_size": 36, "head_dim": 4,
                                              "num_hidden_layers": 6, "num_key_value_heads": 1, "attention_bias": False,
                                              "attention_out_bias": True, "max_position_embeddings": 128},
                 "--tp 1 --batch 8 --seq 16 --recompute full --dropout 0.9 --z-loss 0.01 --seed 70",
                 "part_of_tokens", "")):
            with self.subTest(fault):
                first = self.result("check", self.put("config.json", config), "--inject", fault, *layout.split(),
                                    *([] if "--seq" in layout else ["--seq", "24"]), "--steps", "1", "--skip-f64",
                                    code=1)["models"][0]["runs"][0]["first_difference"]
                self.assertEqual(first["cause"], cause, first)
                self.assertIn(says, first["hint"])


if __name__ == "__main__":
    unittest.main()
