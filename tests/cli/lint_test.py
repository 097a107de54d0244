#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `anyrank lint` from outside: verdicts, findings and exit codes on right layouts and wrong plans, large layouts,
and what it refuses."""

import re
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case  # noqa: E402

PAGE = (ROOT / "docs/guide/planner.md").read_text(encoding="utf-8")
LARGE = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
         "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}

# Model, layout, rules of a plan as globs, styles, inputs and outputs; then rule, module, pass, has, needs of all findings,
# over tp, by hand.
LLAMA, GPT2 = "model.layers.*.", "transformer.h.*."
QKV = ("layers.*.self_attn.[qkv]_proj", "colwise", None, None)
EXPECTED = [
    ("llama-demo", "--tp 2", [QKV, ("layers.*.self_attn.o_proj", "rowwise", None, "P(sum)")],
     [("missing_reduction", LLAMA + "self_attn.o_proj, product", "forward", "P(sum)", "R")]),
    ("llama-demo", "--pp 2 --dp 2 --tp 2 --micro-batches 2 --recompute full",
     [("layers.1.self_attn.[qkv]_proj", "colwise", None, None),
      ("layers.1.self_attn.o_proj", "rowwise", None, "P(sum)")],
     [("missing_reduction", "model.layers.1.self_attn.o_proj, product", computed, "P(sum)", "R") for computed in
      ("forward", "backward")]),
    ("llama-demo", "--tp 2", [("layers.*.self_attn", "prepare", [["P(sum)", "R"], None], None)],
     [("redundant_reduction", LLAMA + "self_attn, redistribute", "forward", "R", "P(sum)")]),
    ("llama-demo", "--tp 2 --dp 3", [("layers.0.mlp", "prepare", None, ["P(sum)", "R"]),
                                     ("layers.1.mlp.down_proj", "replicate", "P(sum)", None)],
     [("redundant_reduction", f"model.layers.{module}, redistribute", "forward", "R", "P(sum)") for module in
      ("0.mlp", "1.mlp.down_proj")]),
    ("gpt2-demo", "--tp 2 --cp 2", [("h.*.attn.c_attn", "colwise", None, "R"), ("h.*.attn.c_proj", "rowwise", "R", None)],
     []),  # queries, keys and values are parts of one value
    ("phi-3-mini-4k", "--tp 2", [("layers.*.mlp.gate_up_proj", "colwise", None, "R"),
                                 ("layers.*.mlp.down_proj", "rowwise", "R", None)], []),  # gate and up too
    ("gpt2-demo", "--tp 4", [("h.*.mlp.c_fc", "rowwise", "R", "P(sum)")],
     [("whole_added_to_partial", GPT2 + "mlp.c_fc, bias", "forward", "P(sum)", "R"),
      ("missing_reduction", GPT2 + "mlp.c_fc, product", "forward", "P(sum)", "R")]),
]


# Model, layout, injected bug; then rule, module and axis of the first finding.
FAULTS = [
    ("llama-demo", "--tp 2", "column_dx_not_reduced", "missing_reduction", "lm_head", "tp"),
    ("llama-demo", "--tp 2 --sp", "sp_norm_grad_local", "unsummed_gradient", "model.norm.weight", "tp"),
    ("llama-demo", "--tp 8", "kv_replica_grad_local", "missing_reduction", LLAMA + "self_attn", "KV copies"),
    ("llama-demo", "--dp 2", "dp_group_missing", "unsummed_gradient", "model.embed_tokens.weight", "dp"),
    ("llama-demo", "--tp 2 --dp 2", "dp_broadcast_over_world", "wrong_group", "model.embed_tokens.weight", "dp"),
    ("llama-demo", "--dp 2", "bucket_reduced_twice", "redundant_reduction", "lm_head.weight", "dp"),
    ("llama-demo", "--dp 2 --zero 1", "zero_gather_missing", "missing_gather", "model.embed_tokens.weight", "dp"),
    ("llama-demo", "--tp 2", "gradnorm_local_clip", "missing_reduction", None, "tp"),
    ("gpt2-demo", "--pp 2 --micro-batches 2", "pp_tied_not_summed", "unsummed_gradient", "transformer.wte.weight", "pp"),
    ("gpt2-demo", "", "embedding_tied_once", "missing_gradient", "transformer.wte.weight", None),
    ("mixtral-demo", "--tp 2", "experts_not_reduced", "missing_reduction", LLAMA + "block_sparse_moe.experts", "tp"),
    ("deepseek-demo", "--tp 2", "latent_key_grad_local", "missing_reduction", LLAMA + "self_attn", "tp"),
]


class Lint(Case):
    subcommand = ("lint",)

    def model(self, name, config):
        self.put(f"{name}/config.json", config)

    def lint(self, *arguments, status=0):
        result = self.result(*arguments, code=status)
        self.assertEqual((result["tool"], result["command"]), ("anyrank", "lint"))
        self.assertEqual(result["result"], "findings" if status else "clean")
        return result

    def test_right_layouts_have_no_findings(self):
        for arguments in ("llama-demo", "llama-demo --tp 8 --dp 2 --sp --zero 1", "gpt2-demo --tp 3 --micro-batches 2",
                          "gpt2-demo --tp 4 --sp --mlp-order row-column --dp 3 --forward-first --micro-batches 2",
                          "stack-demo --tp 4 --sp --dp 2 --dropout 0.1 --find-unused",
                          "mixtral-8x22b --tp 2 --dp 8 --ep 8", "qwen2-moe-demo --cp 2 --dp 2 --ep 4 --zero 1",
                          "mixtral-demo --tp 2 --sp --dp 2 --ep 2 --etp 1 --recompute full"):
            with self.subTest(arguments=arguments):
                result = self.lint(*arguments.split())
                self.assertEqual(result["findings"], [])
                self.assertGreater(result["operations"], 50)

    def test_each_wrong_rule_is_found_where_it_is(self):
        for model, layout, rules, findings in EXPECTED:
            with self.subTest(rules=rules, layout=layout):
                members = [dict(zip(("modules", "style", "input", "output"), rule)) for rule in rules]
                plan = {"rules": [{name: value for name, value in rule.items() if value} for rule in members]}
                self.put("plan.json", plan)
                result = self.lint(model, *layout.split(), "--plan", "plan.json", status=1 if findings else 0)
                got = [(f["rule"], f"{f['module']}, {f['operation']}", f["pass"], f["has"], f["needs"])
                       for f in result["findings"]]
                self.assertEqual(got, findings)
                self.assertLessEqual({f["axis"] for f in result["findings"]}, {"tp"})
                self.assertIsNone(result["fault"])

    def test_bugs_of_running_code_are_found(self):
        for model, layout, fault, rule, module, axis in FAULTS:
            with self.subTest(fault=fault):
                result = self.lint(model, *layout.split(), "--inject", fault, status=1)
                first = result["findings"][0]
                self.assertEqual((first["rule"], first["module"], first["axis"]), (rule, module, axis))
                self.assertEqual(result["fault"], fault)

    def test_the_pages_rules_are_the_headers(self):
        header = (ROOT / "include/anyrank/lint.h").read_text(encoding="utf-8")
        rules = re.findall(r'X\((\w+), "(.*?)"\)', header)
        self.assertGreater(len(rules), 15)
        for name, _ in rules:
            self.assertIn(f"`{name}`", PAGE)

    def test_ranks_and_batch_cost_nothing(self):
        self.model("large", LARGE)
        small = self.lint("large", "--dp", 2, "--tp", 8, "--sp", "--zero", 1, "--batch", 4)
        large = self.lint("large", "--dp", 2048, "--tp", 8, "--sp", "--zero", 1, "--batch", 4096)
        self.assertEqual(large["operations"], small["operations"])
        self.assertEqual(large["layout"]["world"], 16384)

    def test_what_makes_no_sense_is_refused(self):
        self.refused(says="MODEL is missing")
        self.refused("llama-demo", "--tp", 5, says="5")
        self.refused("nowhere", says="nowhere")
        self.refused("llama-demo", "--tp", 2, "--sp", "--seq", 63, says="63")


if __name__ == "__main__":
    unittest.main()
