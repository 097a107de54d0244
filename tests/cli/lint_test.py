#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `anyrank lint` from outside: verdicts, findings and exit codes, the table of faults in docs/lint.md, large
layouts, and what it refuses.

    tests/cli/lint_test.py [BINARY] [unittest options]

BINARY (or the environment variable ANYRANK) is another build; default build/anyrank.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMMAND = str(pathlib.Path(os.environ.get("ANYRANK", ROOT / "build/anyrank")).resolve())
PAGE = (ROOT / "docs/lint.md").read_text(encoding="utf-8")
LARGE = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
         "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}

# Model, layout, fault; then rule, module, pass, axis, has, needs of all findings, by hand.
BLOCK = "model.layers.*."
EXPECTED = [
    ("llama-demo", "--tp 2", "column_dx_not_reduced",
     [("missing_reduction", module, "backward", "tp", "P(sum)", "I") for module in
      ("lm_head", BLOCK + "mlp.gate_proj, up_proj", BLOCK + "self_attn.q_proj, k_proj, v_proj")]),
    ("llama-demo", "--tp 4 --sp", "column_dx_not_reduced",
     [("missing_reduction", module, "backward", "tp", "P(sum)", "S(1)") for module in
      ("lm_head", BLOCK + "mlp.gate_proj, up_proj", BLOCK + "self_attn.q_proj, k_proj, v_proj")]),
    ("gpt2-demo", "--tp 2 --sp", "row_bias_every_rank",
     [("whole_added_to_partial", f"transformer.h.*.{module}.c_proj", "forward", "tp", "P(sum)", "I") for module in
      ("attn", "mlp")]),
    ("gpt2-demo", "--tp 2 --mlp-order row-column", "row_input_grad_not_gathered",
     [("missing_gather", "transformer.h.*.ln_2", "backward", "tp", "S(2)", "I")]),
    ("llama-demo", "--tp 2 --sp", "sp_norm_grad_local",
     [("unsummed_gradient", module + ".weight", "backward", "tp", "P(sum)", "I") for module in
      ("model.norm", BLOCK + "post_attention_layernorm", BLOCK + "input_layernorm")]),
    ("gpt2-demo", "--tp 3 --sp --seq 24", "sp_position_grad_local",
     [("unsummed_gradient", "transformer.wpe.weight", "backward", "tp", "P(sum)", "I")]),
    ("llama-demo", "--tp 8", "kv_replica_grad_local",
     [("missing_reduction", BLOCK + "self_attn", "backward", "KV copies", "P(sum)", "I")]),
    ("llama-demo", "--tp 2", "loss_parallel_no_max", [("missing_reduction", "loss", "forward", "tp", "P(max)", "I")]),
    ("gpt2-demo", "--dp 2", "embedding_tied_once",
     [("missing_gradient", "transformer.wte.weight", "backward", None, "1 of its uses", "2")]),
    ("llama-demo", "--dp 3 --tp 2", "dp_mean_of_means", [("local_count", "loss", "forward", "dp", "P(sum)", "I")]),
    ("llama-demo", "--micro-batches 2", "accum_sum_of_means",
     [("local_count", "loss", "forward", "micro-batches", "V", "I")]),
    ("gpt2-demo", "--tp 2", "gradnorm_local_clip", [("missing_reduction", None, "step", "tp", "P(sum)", "I")]),
    ("llama-demo", "--dp 2 --bucket-bytes 1GiB", "bucket_reduced_twice",
     [("redundant_reduction", "lm_head.weight and 38 more", "step", "dp", "I", "I")]),
    ("llama-demo", "--dp 2 --bucket-bytes 1GiB", "dp_group_missing",
     [("unsummed_gradient", "lm_head.weight and 38 more", "step", "dp", "P(sum)", "I")]),
    ("llama-demo", "--dp 2 --zero 1 --bucket-bytes 1GiB", "zero_gather_missing",
     [("missing_gather", "lm_head.weight and 38 more", "step", "dp", "S(0)", "I")]),
    ("llama-demo", "--tp 2", "heads_divided_twice",
     [("wrong_extent", BLOCK + "self_attn", "forward", "tp", "64 of 256", "128 of 256")]),
]


class Lint(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="anyrank-lint-")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def model(self, name, config):
        (self.folder / name).mkdir()
        (self.folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def run_command(self, *arguments):
        return subprocess.run([COMMAND, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=1800, cwd=self.folder)

    def lint(self, *arguments, status=0):
        done = self.run_command("lint", *arguments, "--json", "-")
        self.assertEqual((done.returncode, done.stderr), (status, ""))
        result = json.loads(done.stdout)
        self.assertEqual((result["tool"], result["command"]), ("anyrank", "lint"))
        self.assertEqual(result["result"], "findings" if status else "clean")
        return result

    def refused(self, *arguments, says):
        done = self.run_command("lint", *arguments)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertIn(says, done.stderr)

    def test_right_layouts_have_no_findings(self):
        for arguments in ("llama-demo", "llama-demo --tp 8 --dp 2 --sp --zero 1", "gpt2-demo --tp 3 --micro-batches 2",
                          "gpt2-demo --tp 4 --sp --mlp-order row-column --dp 3 --forward-first --micro-batches 2",
                          "stack-demo --tp 4 --sp --dp 2 --dropout 0.1 --find-unused"):
            with self.subTest(arguments=arguments):
                result = self.lint(*arguments.split())
                self.assertEqual(result["findings"], [])
                self.assertGreater(result["operations"], 50)

    def test_each_fault_is_found_where_it_is(self):
        for model, layout, fault, findings in EXPECTED:
            with self.subTest(fault=fault, layout=layout):
                result = self.lint(model, *layout.split(), "--inject", fault, status=1)
                got = [(f["rule"], f["module"], f["pass"], f["axis"], f["has"], f["needs"]) for f in result["findings"]]
                self.assertEqual(got, findings)
                self.assertEqual(result["fault"], fault)

    def test_the_pages_table_of_faults_is_the_commands(self):
        listed = self.run_command("bugs", "--json", "-")
        table = subprocess.run([sys.executable, ROOT / "scripts/fault_table.py", "--lint"], input=listed.stdout,
                               capture_output=True, text=True, check=True)
        self.assertGreater(table.stdout.count("\n"), 60)
        self.assertIn(table.stdout.strip(), PAGE)

    def test_the_pages_rules_are_the_headers(self):
        header = (ROOT / "include/anyrank/lint.h").read_text(encoding="utf-8")
        rules = re.findall(r'X\((\w+), "(.*?)"\)', header)
        self.assertGreater(len(rules), 15)
        for name, text in rules:
            self.assertIn(f"| `{name}` | {text} |", PAGE)

    def test_each_fault_has_a_case_without_arguments(self):
        for fault in json.loads(self.run_command("bugs", "--json", "-").stdout)["faults"]:
            with self.subTest(fault=fault["name"]):
                if fault["lint"]["sees"]:
                    result = self.lint("--inject", fault["name"], status=1)
                    self.assertEqual(result["findings"][0]["rule"], fault["lint"]["rule"])
                else:
                    self.refused("--inject", fault["name"], says=fault["lint"]["why"])

    def test_ranks_and_batch_cost_nothing(self):
        self.model("large", LARGE)
        small = self.lint("large", "--dp", 2, "--tp", 8, "--sp", "--zero", 1, "--batch", 4)
        large = self.lint("large", "--dp", 2048, "--tp", 8, "--sp", "--zero", 1, "--batch", 4096)
        self.assertEqual(large["operations"], small["operations"])
        self.assertEqual(large["layout"]["world"], 16384)

    def test_what_makes_no_sense_is_refused(self):
        self.refused(says="MODEL is missing")
        self.refused("llama-demo", "--tp", 5, says="5")
        self.refused("llama-demo", "--inject", "column_dx_not_reduce", says="column_dx_not_reduced")
        self.refused("llama-demo", "--inject", "column_dx_not_reduced", says="changes nothing in this model and layout")
        self.refused("nowhere", says="nowhere")
        self.refused("llama-demo", "--tp", 2, "--sp", "--seq", 63, says="63")


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.access(sys.argv[1], os.X_OK):
        COMMAND = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()
