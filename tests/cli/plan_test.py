#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `anyrank plan` from outside: the flow table of the founding plan row by row, the page's example, other
layouts, and what it refuses."""

import json
import os
import re
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, ROOT, Case, run  # noqa: E402

PAGE = (ROOT / "docs/guide/planner.md").read_text(encoding="utf-8")
LARGE = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
         "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}


class Reports(Case):
    """What runs say of their plan."""

    def setUp(self):
        super().setUp()
        self.model = ROOT / "tests/golden/llama-gqa-tiny"
        self.small = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]
        self.put("small.json", self.small)

    def run_json(self, *arguments):
        """The text for people, and the report."""
        done = self.done(*arguments, "--json", "r.json")
        return done.stdout, json.loads((self.folder / "r.json").read_text(encoding="utf-8"))

    def check(self, *arguments):
        text, report = self.run_json("check", self.model, "--tp", 2, "--batch", 2, "--seq", 6,
                                     "--strict-predictions", *arguments)
        return text, report["models"][0]

    def test_a_report_is_enough_to_repeat_its_run(self):
        text, model = self.check("--plan", "small.json")
        plan = model["plan"]
        self.assertEqual((plan["file"], plan["mlp_order"], len(plan["rules"])), ("small.json", None, 4))
        self.assertIn(f"plan small.json: 4 rules, sha256 {plan['sha256'][:12]}\n", text)
        self.assertTrue(f"sha256 {plan['sha256'][:12]}" in PAGE.replace("\n", " "), plan["sha256"])
        self.put("again.json", {"rules": plan["rules"]})
        _, again = self.check("--plan", "again.json")
        self.assertEqual(again["plan"], plan | {"file": "again.json"})
        self.assertEqual([run["bytes"] for run in again["runs"]], [run["bytes"] for run in model["runs"]])

    def test_norms_that_gather_their_input_keep_the_memory_that_is_predicted(self):
        for norm in ("model.norm", "*input_layernorm", "*post_attention_layernorm", "model.layers.1.*norm"):
            self.put("p.json", {norm: "sequence_parallel"})
            _, model = self.check("--plan", "p.json", "--steps", 1)
            self.assertEqual([(run["result"], run["memory_difference"]) for run in model["runs"]], [("same", None)])

    def test_a_shared_expert_may_be_whole_beside_cut_ones(self):
        """transformers' plan of qwen2_moe has no rule for it."""
        self.model = GOLDEN / "experts/qwen2moe-tiny"
        rules = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
        rules |= {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
                  "layers.*.mlp.experts.down_proj": "rowwise", "layers.*.mlp.experts": "moe_tp_experts"}
        self.put("p.json", rules)
        for layout in ((), ("--sp",), ("--dp", 2, "--ep", 2, "--sp", "--etp", 1), ("--recompute", "full")):
            _, model = self.check("--plan", "p.json", "--steps", 1, *layout)
            self.assertEqual([(run["result"], run["memory_difference"]) for run in model["runs"]], [("same", None)])

    def test_default_plans_say_the_order_of_their_mlps(self):
        text, model = self.check()
        self.assertEqual(model["plan"], {"file": None, "mlp_order": "column-row", "sha256": None, "rules": None})
        self.assertNotIn("plan", text)
        text, model = self.check("--mlp-order", "row-column")
        self.assertEqual(model["plan"]["mlp_order"], "row-column")
        self.assertIn("plan of the architecture, with MLPs row-column\n", text)

    def test_train_grads_lint_and_dumps_have_it_too(self):
        hash_of = self.check("--plan", "small.json")[1]["plan"]["sha256"]
        (self.folder / "text").write_bytes(bytes(range(200)))
        batch = self.model / "batch.safetensors"
        for arguments in (["train", self.model, "--data", "text", "--steps", 1, "--batch", 2, "--seq", 6],
                          ["grads", self.model, "--input", batch, "--out", "out", "--per-rank"],
                          ["lint", self.model], ["plan", self.model, "--flow"]):
            text, report = self.run_json(*arguments, "--tp", 2, "--plan", "small.json")
            self.assertEqual((report["plan"]["file"], report["plan"]["sha256"]), ("small.json", hash_of))
            self.assertIn(f"plan small.json: 4 rules, sha256 {hash_of[:12]}\n", text)
        os.rename(os.fsencode(self.folder / "small.json"), os.fsencode(self.folder) + b"/p\xff.json")
        _, report = self.run_json("grads", self.model, "--input", batch, "--out", "odd", "--per-rank", "--tp", 2,
                                  "--plan", os.fsdecode(b"p\xff.json"))
        self.assertEqual((report["plan"]["file"], report["plan"]["sha256"]), ("p?.json", hash_of))
        for file in sorted((self.folder / "out/ranks").glob("*.safetensors")):
            self.assertIn(f"small.json, 4 rules, sha256 {hash_of}".encode(), file.read_bytes())


class Plan(Case):
    subcommand = ("plan",)

    def setUp(self):
        super().setUp()
        paper, *self.plans, _ = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        self.model("paper", json.loads(paper))
        self.model("large", LARGE)

    def model(self, name, config):
        self.put(f"{name}/config.json", config)

    def flow(self, *arguments):
        result = self.result(*arguments, "--flow")
        self.assertEqual((result["tool"], result["command"]), ("anyrank", "plan"))
        return result

    def test_the_plans_of_the_page_fit(self):
        self.assertEqual(len(self.plans), 2)
        for plan in self.plans:
            self.put("p.json", plan)
            default, own = (self.passes("llama-demo", "--flow", "--tp", 2, *more) for more in ([], ["--plan", "p.json"]))
            self.assertNotEqual(default, own)

    def test_a_plan_that_does_not_fit_is_refused_by_file_rule_and_module(self):
        for text, says in (('{"layers.*.mlp.gate": "colwise"}', "p.json: rule 1, 'layers.*.mlp.gate': no module"),
                           ('{"rules": [{"modules": "x"}]}', "p.json: rule 1, 'x': 'style' is missing"),
                           ('{"*.q_proj": "colwise"}', "model.layers.0.self_attn.k_proj is replicate"),
                           ("{", "p.json: not JSON")):
            self.put("p.json", text)
            self.refused("llama-demo", "--flow", "--tp", 2, "--plan", "p.json", says=says)
        self.refused("llama-demo", "--flow", "--plan", "p.json", "--mlp-order", "row-column", says="--mlp-order")

    # module, operation, input, weights, collective, output: what the rank holds and its placement over tp
    PAPER = [
        ("model.embed_tokens", "embedding", [2048], [[16000, 768]], "reduce_scatter", [4, 256, 768], "S(1)"),
        ("model.layers.*.input_layernorm", "norm", [4, 256, 768], [[768]], None, [4, 256, 768], "S(1)"),
        ("model.layers.*.self_attn", "redistribute", [4, 256, 768], [], "all_gather", [4, 512, 768], "R"),
        ("model.layers.*.self_attn.q_proj, k_proj, v_proj", "product", [4, 512, 768], [[384, 768]] * 3, None,
         [4, 512, 1152], "S(2)"),
        ("model.layers.*.self_attn", "rope", [4, 512, 384], [], None, [4, 512, 384], "S(2)"),
        ("model.layers.*.self_attn", "rope", [4, 512, 384], [], None, [4, 512, 384], "S(2)"),
        ("model.layers.*.self_attn", "attention", [4, 512, 384], [], None, [4, 512, 384], "S(2)"),
        ("model.layers.*.self_attn.o_proj", "product", [4, 512, 384], [[768, 384]], "reduce_scatter", [4, 256, 768],
         "S(1)"),
        ("model.layers.*", "residual", [4, 256, 768], [], None, [4, 256, 768], "S(1)"),
        ("model.layers.*.post_attention_layernorm", "norm", [4, 256, 768], [[768]], None, [4, 256, 768], "S(1)"),
        ("model.layers.*.mlp", "redistribute", [4, 256, 768], [], "all_gather", [4, 512, 768], "R"),
        ("model.layers.*.mlp.gate_proj, up_proj", "product", [4, 512, 768], [[1024, 768]] * 2, None, [4, 512, 2048],
         "S(2)"),
        ("model.layers.*.mlp", "gate product", [4, 512, 1024], [], None, [4, 512, 1024], "S(2)"),
        ("model.layers.*.mlp.down_proj", "product", [4, 512, 1024], [[768, 1024]], "reduce_scatter", [4, 256, 768],
         "S(1)"),
        ("model.layers.*", "residual", [4, 256, 768], [], None, [4, 256, 768], "S(1)"),
        ("model.norm", "norm", [4, 256, 768], [[768]], None, [4, 256, 768], "S(1)"),
        ("lm_head", "redistribute", [4, 256, 768], [], "all_gather", [4, 512, 768], "R"),
        ("lm_head", "product", [4, 512, 768], [[16000, 768]], None, [4, 512, 16000], "S(2)"),
    ]

    def test_the_founding_plan_is_shown_row_by_row(self):
        rows = self.flow("paper", "--tp", 2, "--sp", "--batch", 4, "--seq", 512, "--numerics", "native")["flow"]
        shown = []
        for row in rows[:-1]:
            calls = [call["collective"] for call in row["communication"]]
            self.assertLessEqual(len(calls), 1, row)
            shown.append((row["module"], row["operation"], row["inputs"][0]["local"],
                          [w["local"] for w in row["weights"]], calls[0] if calls else None,
                          row["outputs"][0]["local"], row["outputs"][0]["placement"]["tp"]))
        self.assertEqual(shown, self.PAPER)
        self.assertEqual((rows[-1]["module"], len(rows[-1]["communication"])), ("lm_head.logits", 3))
        # A reduce-scatter or an all-gather of b*s*h fp32 numbers: half of them are sent by each of two ranks.
        for row in rows[:-1]:
            for call in row["communication"]:
                self.assertEqual((call["elements"], call["bytes"], call["bytes_per_rank"]),
                                 (4 * 512 * 768, 4 * 4 * 512 * 768, 2 * 4 * 512 * 768))

    def test_collectives_in_chunks_are_shown_beside_products(self):
        layout = ("paper", "--tp", 2, "--sp", "--batch", 4, "--seq", 512, "--numerics", "native")
        plain, cut = (self.flow(*layout, *more)["flow"] for more in ((), ("--overlap", 4)))
        calls = [[(call["collective"], call["elements"], call["bytes"], call["tag"]) for row in rows
                  for call in row["communication"]] for rows in (plain, cut)]
        self.assertEqual(calls[0], calls[1])
        beside = [call for row in cut for call in row["communication"] if call["queue"] == "tp"]
        self.assertEqual({call["calls"] for call in beside}, {4})
        self.assertIn("4 all_gather tp", self.passes(*layout, "--flow", "--overlap", 4))

    def test_text_markdown_and_json_have_the_same_operations(self):
        arguments = ("gpt2-demo", "--flow", "--backward", "--tp", 2, "--dp", 3, "--sp", "--zero", 1, "--dropout", 0.1,
                     "--mlp-order", "row-column")
        rows = self.flow(*arguments)["flow"]
        for lines, at in ((self.passes(*arguments), 0), (self.passes(*arguments, "--markdown"), 1)):
            heads = re.findall(r"^  module .*" if at == 0 else r"^\| module .*", lines, re.MULTILINE)
            self.assertEqual(len(heads), 5)  # start, the targets before the passes, forward, backward, step
            for row in rows:
                self.assertIn(row["operation"], lines)
                self.assertIn(row["module"] or "", lines)
        self.assertEqual({row["pass"] for row in rows}, {"start", "forward", "backward", "step"})

    def test_layers_that_differ_and_each_layer_by_itself_have_their_own_rows(self):
        few = self.flow("llama-demo", "--tp", 2)["flow"]
        each = self.flow("llama-demo", "--tp", 2, "--each-layer")["flow"]
        layers = json.loads((ROOT / "ref/data/llama-demo/config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
        inside = [row for row in few if row["layers"]]
        self.assertTrue(all(row["layers"] == [0, layers - 1] for row in inside))
        self.assertEqual(sum(row["layers"] is not None for row in each), layers * len(inside))
        self.assertIn("model.layers.1.mlp.down_proj", [row["module"] for row in each])

    def test_ranks_with_fewer_samples_or_rows_do_less(self):
        def norm(rank):
            flow = self.flow("llama-demo", "--dp", 2, "--tp", 4, "--batch", 5, "--rank", rank)
            (row,) = [r for r in flow["flow"] if r["module"] == "model.norm"]
            return row["inputs"][0]["local"][0], row["inputs"][0]["shape"][0]
        self.assertEqual([norm(0), norm(4)], [(3, 5), (2, 5)])
        config = json.loads((self.folder / "paper/config.json").read_text(encoding="utf-8"))
        self.model("uneven", {**config, "vocab_size": 31})
        heads = [self.flow("uneven", "--tp", 4, "--seq", 8, "--rank", r)["flow"][-2]["weights"][0]["local"]
                 for r in range(4)]
        self.assertEqual(heads, [[8, 768], [8, 768], [8, 768], [7, 768]])

    def test_ranks_that_share_out_experts_have_rows_of_their_own(self):
        layout = ("mixtral-demo", "--dp", 2, "--ep", 2, "--batch", 4, "--seq", 16)
        rows = {(row["pass"], row["operation"]): row for row in self.flow(*layout, "--backward", "--numerics", "native")["flow"]
                if (row["module"] or "").endswith("block_sparse_moe.experts")}
        for key in (("forward", "dispatch"), ("forward", "return"), ("backward", "dispatch"), ("backward", "return")):
            (call,) = rows[key]["communication"]
            # 2 x 16 tokens of each rank go to two experts, half of which are the other's.
            self.assertEqual((call["collective"], call["group"], call["ranks"], call["elements"]),
                             ("all_to_all", "ep", 2, 2 * 16 * 2 * 64))
        dispatch = rows["forward", "dispatch"]
        self.assertEqual([v["placement"]["dp"] for v in dispatch["inputs"] + dispatch["outputs"]], ["S(0)", "V"])
        text = self.passes(*layout, "--flow")
        self.assertRegex(text, r"experts\.\*\.w1, w3 +product +\[64, 64\] V +4 of \[96, 64\] V +\[64, 192\] V")
        self.assertIn("V: each rank its own experts", text)

    def test_broadcasts_of_experts_are_one_row(self):
        text = self.passes(GOLDEN / "experts/mixtral-tiny", "--tp", 2, "--dp", 2, "--flow", "--backward")
        rows = re.findall(r"experts\.\*\.(w\d)\.weight +broadcast +(\d+) of \[.* (\d+) broadcast dp 960 B", text)
        self.assertEqual(rows, [("w1", "5", "5"), ("w3", "5", "5"), ("w2", "5", "5")])

    def test_the_bytes_are_those_that_check_counts(self):
        layout = ("--tp", 2, "--dp", 2, "--sp", "--batch", 5, "--seq", 16)
        predicted = self.flow("stack-demo", *layout, "--backward")["bytes"]["predicted"]
        done = run("check", "stack-demo", *layout, "--bucket-bytes", "25MiB", "--steps", 1, "--strict-predictions",
                   "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["models"][0]["runs"][0]["bytes"]["counted"], predicted)

    def test_totals_count_every_layer_and_micro_batch(self):
        arguments = ("llama-demo", "--tp", 2, "--sp", "--batch", 12, "--seq", 8, "--numerics", "native")
        one = self.flow(*arguments)
        many = self.flow(*arguments, "--micro-batches", 5)
        self.assertEqual((one["micro_batches"], many["micro_batches"]), (1, 5))
        each = sum(len(row["communication"]) * (row["layers"][1] + 1 if row["layers"] else 1) for row in one["flow"])
        self.assertEqual(one["totals"]["forward"]["collectives"], each)
        self.assertEqual(many["totals"]["forward"]["collectives"], each)  # of the first, with a quarter of the samples
        for key in ("multiply_adds", "bytes_per_rank"):
            self.assertEqual(4 * many["totals"]["forward"][key], one["totals"]["forward"][key])

    def test_what_it_cannot_show_is_refused(self):
        self.refused("llama-demo", says="how many GPUs? --gpus N compares their layouts")
        self.refused("--flow", says="MODEL is missing")
        self.refused("nowhere", "--flow", says="model 'nowhere': no such folder or file")
        self.refused("llama-demo", "--flow", "--tp", 3, says="cannot be split over tp=3")
        self.refused("llama-demo", "--flow", "--tp", 4, "--sp", "--seq", 6, says="4")
        self.refused("llama-demo", "--flow", "--tp", 2, "--rank", 2, says="--rank 2: the layout has 2 ranks")
        self.refused("llama-demo", "--flow", "--sp", says="give --tp N too")
        self.refused("llama-demo", "--flow", "--seq", 10**9, says="1000000000")
        self.refused("llama-demo", "--flow", "--batch", 2, "--micro-batches", 3, says="micro-batches")


if __name__ == "__main__":
    unittest.main()
