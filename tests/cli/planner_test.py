#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `anyrank plan` without --flow, from outside: rankings, a layout in depth, tables, files, and what it refuses.
"""

import csv
import json
import pathlib
import re
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, ROOT, Case, start  # noqa: E402

SMALL = ("llama-3-8b", "--gpus", 8, "--batch", 16, "--seq", 4096)


class PlannerTest(Case):
    subcommand = ("plan",)

    def test_published_runs_take_what_their_table_says(self):
        done = start([sys.executable, ROOT / "scripts/planner_runs.py", COMMAND, "--check"])
        self.assertEqual(done.returncode, 0, done.stderr)
        tested = re.search(r"^test: (\d+) runs, (\d+) within 10 %, (\d+) within 20 %", done.stdout, re.M)
        runs, within, almost = map(int, tested.groups())
        page = (ROOT / "docs/guide/planner.md").read_text()
        self.assertIn(f"{within} of the {runs} runs that it was not fitted to within 10 %, {almost} within 20 %",
                      " ".join(page.split()))

    def test_the_first_layout_says_why_it_is(self):
        large = ("llama-3.1-405b", "--gpus", 576, "--batch", 252, "--seq", 8192, "--tp", 8, "--zero", 1, "--sp",
                 "--recompute", "none")
        text = self.passes(*large, "--why", "cp=1, pp=18")
        why = re.findall(r"^why: (.*)", text, re.M)
        self.assertRegex(why[0], r"^\d+ layouts within 5 % of the fastest are equal by what is known, and it is ")
        self.assertRegex(why[1], r"^its step is bound by \w+: products \d+ %, .* with --overlap \d$")
        self.assertRegex(why[2], r"^the best of another kind: tp=.* zero=\d takes \d+ % (longer|less) \(.*\)$")
        self.assertEqual(why[3], "few would take cp in sequences of at most 8,192 tokens: nothing without it fits")
        rows = [re.split(r"  +", line.strip()) for line in text.split("time of a step")[1].splitlines()]
        self.assertEqual(rows[0][1].split()[:3], ["tp=8", "cp=1", "pp=18"])
        self.assertEqual([row[0] for row in rows[-3:-1]], ["sum", "memory of a rank"])
        for asked in ("tp=x", "tp", "tp=7", "np=1", "tp=8 pp=73"):
            self.refused(*large, "--why", asked, says=f"--why '{asked}'")
        self.refused("llama-3-8b", "--tp", 2, "--why", "tp=1", says="--gpus N")
        report = self.result(*SMALL, "--why", "tp=2, pp=2")
        self.assertEqual(report["why"], re.findall(r"^why: (.*)", self.passes(*SMALL), re.M))
        self.assertEqual(report["asked"], next(one for one in self.result(*SMALL, "--top", 0)["layouts"] if
                                               (one["layout"]["tp"], one["layout"]["pp"]) == (2, 2)))
        # At a given rate nothing is known of how far off a prediction is.
        self.assertNotIn("why:", self.passes(*SMALL, "--cluster", "h100 flops=400T"))

    def test_a_system_is_asked_for_in_its_own_words(self):
        found = self.result("llama-3-8b", "--gpus", 8, "--batch", 16, "--seq", 4096, "--system", "torchtitan", "--top", 1)
        self.assertEqual({one["layout"]["zero"] for one in found["layouts"]} - {0}, {2, 3})
        text = self.passes(*SMALL, "--system", "torchtitan")
        self.assertRegex(text, r"\ntorchtitan: --parallelism\.data_parallel_shard_degree=\d")
        depth = self.passes("llama-3-8b", "--tp", 2, "--sp", "--batch", 8, "--system", "megatron")
        self.assertIn("megatron: --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", depth)
        self.refused("llama-3-8b", "--dp", 2, "--zero", 3, "--system", "megatron",
                     says="megatron lacks that stage of ZeRO")
        self.refused("llama-3-8b", "--gpus", 8, "--router-z-loss", 0.1, says="has no experts")
        self.refused("llama-3-8b", "--table", "memory", "--system", "megatron", says="leave one out")
        # Megatron-LM sums gradients in fp32; a reserve is kept of the GPU's memory, unless its rate is given.
        of = [self.result("llama-3-8b", "--tp", 2, *more)["layouts"][0]["memory"]["production"]
              for more in (("--system", "megatron"), ("--system", "deepspeed"), ("--cluster", "h100 flops=989T"))]
        self.assertEqual(of[0]["gradients"], 2 * of[1]["gradients"])
        self.assertEqual([memory["reserve"] for memory in of], [4.8e9, 4.8e9, 0])

    def test_a_rate_that_is_given_leaves_shapes_out(self):
        named, given = (self.result("llama-3-8b", "--tp", 2, "--cluster", cluster) for cluster in ("a100", "a100 flops=312T"))
        self.assertEqual((named["cluster"]["gpu"], given["cluster"]["gpu"]), ("a100", None))
        times = [one["layouts"][0]["time"]["production"] for one in (named, given)]
        self.assertGreater(times[0]["memory-bound"], 0)
        self.assertEqual(times[1]["memory-bound"], 0)
        self.assertGreater(times[0]["products"], 1.2 * times[1]["products"])
        self.assertIn("a lower bound", self.passes("llama-3-8b", "--tp", 2, "--cluster", "a100 flops=312T"))

    def test_the_first_screen_has_the_answer_and_what_bounds_it(self):
        text = self.passes(*SMALL)
        lines = text.splitlines()
        self.assertIn("8,030,261,248 parameters, on 8 GPUs", lines[0])
        self.assertLessEqual(len(lines), 18)
        self.assertEqual(lines[2].split()[:4], ["tp", "cp", "pp", "dp"])
        self.assertRegex(lines[-1], r"^advice: the step is bound by \w+, \d+ % of it: ")

    def test_json_has_every_layout_that_is_listed_in_full(self):
        report = self.result(*SMALL, "--top", 0)
        found = report["layouts"]
        self.assertEqual(report["searched"]["meshes"], 20)
        self.assertEqual((report["parameters"], report["gpus"], report["batch"]), (8030261248, 8, 16))
        for one in found:
            layout, time = one["layout"], one["time"]["production"]
            self.assertEqual(layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"], 8)
            kinds = ("products", "recomputation", "memory-bound", "tp", "cp", "dp", "pp", "bubble")
            self.assertAlmostEqual(sum(time[k] for k in kinds), one["seconds"], delta=1e-9 * one["seconds"])
            memory = one["memory"]["production"]
            self.assertAlmostEqual(sum(v for k, v in memory.items() if k != "sum"), one["bytes"], delta=1)
            self.assertEqual(one["memory"]["own"] is None, layout["zero"] >= 2)
            self.assertTrue(0 < one["mfu"] <= one["hfu"] <= 1)
        fits = [one["seconds"] for one in found if one["fits"]]
        equal = report["searched"]["equal"]
        self.assertEqual(fits[equal:], sorted(fits[equal:]))
        self.assertLessEqual(max(fits[:equal]), 1.05 * min(fits))
        self.assertGreater(min(fits[equal:]), 1.05 * min(fits))

    def test_a_layout_in_depth_is_the_one_of_the_ranking(self):
        best = self.result(*SMALL)["layouts"][0]
        layout = best["layout"]
        options = [f"--{k.replace('_', '-')}={layout[k]}" for k in ("tp", "cp", "pp", "dp", "zero", "dp_replicate", "recompute")]
        options += [f"--micro-batches={layout['micro_batches']}"] + (["--sp"] if layout["sp"] else [])
        if layout["pp"] > 1:
            options += [f"--schedule-pp={layout['schedule']}", f"--virtual-stages={layout['virtual_stages']}"]
        alone = self.result("llama-3-8b", "--batch", 16, "--seq", 4096, *options)["layouts"]
        self.assertEqual(alone, [best])
        text = self.passes("llama-3-8b", "--batch", 16, "--seq", 4096, *options)
        for words in ("memory of a rank", "time of a step", "moved over", "tokens/s", "advice:"):
            self.assertIn(words, text)

    def test_a_layout_has_the_same_members_in_every_result(self):
        given = ("llama-demo", "--tp", 2, "--cp", 2, "--zigzag", "--pp", 2, "--dp", 2, "--sp", "--overlap", 2, "--zero", 1,
                 "--micro-batches", 2, "--recompute", "selective", "--recompute-every", 2)
        planned, run = self.result(*given)["layouts"][0]["layout"], self.result(*given, "--flow")["layout"]
        self.assertEqual(planned.pop("schedule"), run["schedule_pp"])
        self.assertEqual(planned, {name: run[name] for name in planned})
        self.assertEqual((run["world"], run["samples_per_rank"]), (16, [4, 4]))

    def test_collectives_beside_products_are_exposed_less(self):
        depth = ("llama-3-8b", "--tp", 8, "--sp", "--batch", 8, "--seq", 8192)
        plain, cut = (self.result(*depth, *more)["layouts"][0] for more in (("--overlap", 1), ("--overlap", 2)))
        self.assertEqual((plain["layout"]["overlap"], cut["layout"]["overlap"]), (1, 2))
        self.assertIn("sp overlap=2", cut["name"])
        self.assertIn("overlap of collectives", plain["advice"])
        before, after = plain["time"]["production"], cut["time"]["production"]
        self.assertLess(before["products"], after["products"])  # in chunks
        self.assertLess(after["products"], 1.05 * before["products"])
        self.assertLess(after["tp"], 0.9 * before["tp"])
        self.assertGreater(after["hidden"], before["hidden"])
        bytes_of = [sum(row["bytes"] for row in time["moved"] if row["over"] == "tp") for time in (before, after)]
        self.assertAlmostEqual(bytes_of[0], bytes_of[1], delta=1e-9 * bytes_of[0])
        self.assertIn(" sp overlap=2 zero=0", self.passes(*depth, "--overlap", 2))
        # A search keeps it wherever there is sequence parallelism.
        listed = self.result(*SMALL, "--pp", 1, "--overlap", 2, "--all")["layouts"]
        self.assertEqual({one["layout"]["overlap"] for one in listed if one["layout"]["sp"]}, {2})
        self.assertEqual({one["layout"]["overlap"] for one in listed if not one["layout"]["sp"]}, {1})
        self.refused("llama-3-8b", "--tp", 8, "--overlap", 2, says="--sp")
        # Of the first layout the best K is searched, unless it is given.
        first, given = (self.result("llama-3-8b", "--gpus", 8, "--tp", 8, "--batch", 8, "--seq", 8192, *more)["layouts"][0]
                        for more in ((), ("--overlap", 4)))
        self.assertEqual((first["layout"]["overlap"], given["layout"]["overlap"]), (8, 4))
        self.assertLess(first["seconds"], given["seconds"])

    def test_extents_that_are_given_are_fixed(self):
        report = self.result(*SMALL, "--tp", 2, "--cp", 1, "--sp", "--zero", 1, "--recompute", "none", "--all",
                             "--top", 0)
        legal = [one["layout"] for one in report["layouts"] if one["legal"]]
        self.assertTrue(legal)
        for layout in legal:
            self.assertEqual([layout[key] for key in ("tp", "cp", "sp", "zero", "recompute")], [2, 1, True, 1, "none"])

    def test_illegal_layouts_are_listed_on_request_with_the_reason(self):
        report = self.result("llama-3-8b", "--gpus", 3, "--batch", 6, "--all", "--top", 0)
        reasons = [one["reason"] for one in report["layouts"] if not one["legal"]]
        self.assertTrue(any("query heads = 32 cannot be split over tp=3" in reason for reason in reasons), reasons)
        self.assertNotIn("query heads", self.passes("llama-3-8b", "--gpus", 3, "--batch", 6))
        self.assertIn("query heads = 32", self.passes("llama-3-8b", "--gpus", 3, "--batch", 6, "--all", "--top", 0))

    def test_what_does_not_fit_says_by_how_much(self):
        text = self.passes("llama-3-70b", "--gpus", 8, "--batch", 8, "--seq", 4096)
        self.assertIn("does not fit, by ", text)
        self.assertRegex(text, r"advice: it does not fit: a rank needs [\d.]+ GB, [\d.]+ GB more than it has")

    def test_what_hardly_fits_is_marked_and_remedies_that_are_used_are_not_given(self):
        self.assertRegex(self.passes("llama-3-8b", "--gpus", 2, "--batch", 2, "--seq", 4096, "--all", "--top", 0),
                         r"\d\d\.\d GB .* tight, by \d\.\d GB")
        text = self.passes("llama-3-70b", "--gpus", 1, "--recompute", "full")
        self.assertRegex(text, r"a rank needs 1\.\d TB, 1\.\d TB more than it has; more GPUs would make it fit")
        self.assertIn(" 1 micro-batch of 1, ", self.passes("llama-demo", "--tp", 2, "--batch", 1))

    def test_csv_has_a_line_for_each(self):
        self.passes(*SMALL, "--all", "--csv", "all.csv", "--top", 3)
        with open(self.folder / "all.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertGreater(len(rows), 300)
        for row in rows:
            extents = [int(row[k]) for k in ("tp", "cp", "pp", "dp")]
            self.assertEqual(extents[0] * extents[1] * extents[2] * extents[3], 8)
            self.assertEqual(row["seconds"] == "", row["legal"] == "0")
            self.assertEqual(row["reason"] == "", row["legal"] == "1")

    def test_csv_and_json_give_the_same_reasons_for_a_model_with_quotes_in_its_name(self):
        folder = self.put('a "model", <b>/config.json', {
            "model_type": "llama", "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 3, "vocab_size": 16, "max_position_embeddings": 8}).parent
        report = self.result(folder, "--gpus", 4, "--all", "--csv", "quoted.csv")
        with open(self.folder / "quoted.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        reasons = [layout["reason"] or "" for layout in report["layouts"]]
        self.assertEqual([row["reason"] for row in rows], reasons)
        self.assertTrue(any(folder.name in reason for reason in reasons))

    def test_only_models_with_experts_have_ep(self):
        for model, experts in (("mixtral-demo", True), ("llama-demo", False)):
            report = self.result(model, "--gpus", 4, "--batch", 8, "--csv", "x.csv")
            layout, time = report["layouts"][0]["layout"], report["layouts"][0]["time"]["production"]
            titles = (self.folder / "x.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
            heads = self.passes(model, "--gpus", 4, "--batch", 8).splitlines()[2].split()
            for where in (layout, time, titles, heads):
                self.assertEqual("ep" in where, experts)
            self.assertEqual("etp" in layout and "etp" in titles, experts)
        heads = self.passes("mixtral-demo", "--gpus", 2, "--table", "decision", "--seq", 64).splitlines()[2].split()
        self.assertEqual(heads[:8], ["GPUs", "seq", "tp", "cp", "pp", "dp", "ep", "sp"])

    def test_experts_are_shared_out_as_it_is_asked_for(self):
        found = self.result("mixtral-demo", "--gpus", 8, "--batch", 8, "--ep", 4, "--zero", 1, "--recompute", "none", "--all",
                            "--top", 0)["layouts"]
        self.assertEqual({one["layout"]["ep"] for one in found}, {4})
        self.assertTrue(any("ep=4 does not divide the 2 ranks" in one["reason"] for one in found if not one["legal"]))
        given = ("--tp", 2, "--sp", "--dp", 4, "--batch", 8)
        sizes = {}
        for ep, etp in ((1, 2), (4, 2), (8, 1)):
            one = self.result("mixtral-demo", *given, "--ep", ep, "--etp", etp)["layouts"][0]
            self.assertEqual((one["layout"]["ep"], one["layout"]["etp"]), (ep, etp))
            self.assertEqual(one["time"]["production"]["ep"] > 0, ep > 1)
            sizes[ep] = one["memory"]["own"]["weights"]
        self.assertGreater(sizes[1], 2 * sizes[4])
        self.assertEqual(sizes[4], sizes[8])  # an eighth of them either way
        text = self.passes("mixtral-demo", *given, "--ep", 8, "--etp", 1)
        self.assertIn("tp=2 cp=1 pp=1 dp=4 ep=8 (etp 1) sp", text)
        self.assertRegex(text, r"\n +ep +all_to_all +8 +inside ")

    def test_gathered_tokens_are_counted_and_rule_no_layout_out(self):
        given = ("qwen2-moe-demo", "--batch", 4, "--seq", 32)
        one = self.result(*given, "--dp", 4, "--ep", 4, "--dispatch", "all-gather")["layouts"][0]
        (gathers,) = [row for row in one["time"]["production"]["moved"]
                      if (row["over"], row["call"]) == ("ep", "all_gather")]
        # In each of 2 layers the three others' tokens [32, 64], gradients, four weights a token, and counts of rows.
        self.assertEqual(gathers["bytes"], 2 * 3 * (2 * 32 * 64 * 2 + 32 * 4 * 2 + 32 * 2))
        searches = [self.result(*given, "--gpus", 4, *more)["layouts"] for more in ((), ("--dispatch", "all-gather"))]
        self.assertEqual(*([row["layout"]["ep"] for row in found if row["layout"]["ep"] == 1] for found in searches))
        self.assertIn(1, [row["layout"]["ep"] for row in searches[1]])

    def test_the_founding_table_of_memory_with_what_is_replicated(self):
        # Without its head the model of 32 layers has 4,754,202,624 parameters; of tp=8 a rank holds 594,848,768, and
        # not an eighth of all.
        report = self.result("stack-4.8b", "--table", "memory", "--seq", 4096)
        self.assertEqual(report["batch"], 1)
        rows = report["rows"]
        at = {row["tp"]: row for row in rows}
        self.assertEqual(list(at), [1, 2, 4, 8, 16, 32])
        self.assertEqual((at[1]["parameters"], at[8]["parameters"]), (4754202624, 594848768))
        self.assertAlmostEqual(at[8]["states"] / 1e9, 9.518, delta=5e-4)
        self.assertAlmostEqual(at[8]["divided"] / 1e9, 9.508, delta=5e-4)
        self.assertAlmostEqual(at[16]["states"] / 1e9, 5.032, delta=5e-4)
        self.assertAlmostEqual(at[32]["states"] / 1e9, 2.790, delta=5e-4)
        self.assertLess(at[8]["activations_sp"], at[8]["activations"])

    def model(self, **sizes):
        config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
                  "max_position_embeddings": 4096, **sizes}
        return self.put("config.json", config)

    def test_a_sliding_window_makes_no_step_better_than_the_peak(self):
        for window in (None, 64, 4000):
            model = self.model(model_type="mistral", sliding_window=window)
            best = self.result(model, "--dp", 1, "--batch", 1, "--seq", 4096, "--cluster", "h100 flops=989T")["layouts"][0]
            # All is products at the peak rate; of attention's, seven for each six that MFU counts.
            self.assertGreater(best["mfu"], 6 / 7)
            self.assertLess(best["mfu"], 1.001)

    def test_sums_of_gradients_wait_for_no_head_that_their_stage_lacks(self):
        model = self.model(vocab_size=65536)
        best = self.result(model, "--pp", 2, "--dp", 2, "--batch", 2, "--seq", 4096)["layouts"][0]
        time = best["time"]["production"]
        alone = sum(row["seconds"] for row in time["moved"] if row["over"] == "dp")
        self.assertGreaterEqual(time["hidden"], 0.0)
        self.assertLessEqual(time["dp"], alone * (1 + 1e-9))

    def test_tables_of_scaling_and_decisions(self):
        rows = self.result("stack-4.8b", "--table", "scaling", "--seq", 4096)["rows"]
        self.assertEqual([row["between_nodes"] for row in rows], [False] * 4 + [True] * 2)
        computing = [row["computing"] for row in rows]
        self.assertEqual(computing, sorted(computing, reverse=True))
        rows = self.result("llama-3-8b", "--gpus", 4, "--table", "decision", "--seq", 4096, "--batch", 4)["rows"]
        self.assertEqual([(row["gpus"], row["seq"]) for row in rows],
                         [(1, 4096), (2, 4096), (4, 4096), (4, 32768), (4, 131072)])
        self.assertIn("GPUs", self.passes("llama-3-8b", "--gpus", 2, "--table", "decision", "--seq", 4096))

    def test_a_decision_keeps_what_is_given(self):
        rows = self.result("llama-demo", "--gpus", 8, "--table", "decision", "--tp", 2, "--zero", 1)["rows"]
        self.assertEqual([row["gpus"] for row in rows], [4, 8, 8, 8], "tp=2 shares optimizer states out from 4 GPUs on")
        for row in rows:
            layout = row["best"]["layout"]
            self.assertEqual((layout["tp"], layout["zero"]), (2, 1))

    def test_bad_input_is_refused_and_leaves_no_file(self):
        for options, says in ((("--gpus", 0), "--gpus"), (("--gpus", 10**18), "--gpus"), ((), "how many GPUs?"),
                              (("--gpus", 8, "--cluster", "nope"), "'nope' is none of"),
                              (("--gpus", 8, "--cluster", "h100 memory=0GB"), "more than 0 bytes"),
                              (("--gpus", 8, "--cluster", "inside=1us:0GB/s flops=1T"), "0 bytes/s"),
                              (("--tp", 3), "query heads = 8 cannot be split over tp=3"),
                              (("--pp", 100), "4 layers cannot be split over 100 stages (pp=100)"),
                              (("--dp", 4, "--zero", 2, "--dp-replicate", 3, "--batch", 8), "dp=4 is not 3 groups"),
                              (("--pp", 2, "--virtual-stages", 2), "give --schedule-pp interleaved too"),
                              (("--schedule-pp", "gpipe", "--dp", 2), "--schedule-pp is about the ranks of --pp"),
                              (("--dispatch", "all-gather", "--dp", 2), "--dispatch all-gather is about the ranks of --ep"),
                              (("--tp", 65536, "--dp", 4096, "--pp", 4096), "are more than"),
                              (("--gpus", 7, "--batch", 5), "no layout of 7 GPUs is legal"),
                              (("--gpus", 8, "--cp-inner", 3, "--all"), "groups of --cp-inner 3"),
                              (("--gpus", 8, "--cp", 4, "--cp-inner", 3), "give one that divides 4"),
                              (("--gpus", 8, "--cp", 2, "--cp-inner", 2, "--zigzag"), "which has 2 / 2 = 1 here"),
                              (("--gpus", 8, "--tp", 2, "--dp", 2, "--cp", 1, "--pp", 1), "are 4 ranks, not --gpus 8: leave one"),
                              (("--gpus", 7, "--tp", 2), "--gpus 7 cannot be divided by tp=2; use one that divides 7"),
                              (("--gpus", 8, "--tp", 4, "--dp", 4), "by tp=4 dp=4; use extents whose product divides 8"),
                              (("--gpus", 7, "--tp", 2, "--table", "decision"), "--gpus 7 cannot be divided by tp=2"),
                              (("--table", "memory", "--tp", 2), "leave one out"),
                              (("--tp", 2, "--rank", 1), "give --flow too"),
                              (("--table", "scaling", "--gpus", 4, "--pp", 2), "leave one out"),
                              *((("--table", "memory", *option), "leave one out")
                                for option in (["--ep", 2], ["--zigzag"], ["--forward-first"],
                                               ["--dispatch", "all-gather"])),
                              (("--gpus", 8, "--ep", 2), "ep=2 shares out experts, and llama-demo has none"),
                              (("--tp", 2, "--ep", 2), "give --dp N or --cp N too"),
                              (("--gpus", 8, "--flow"), "--flow"), (("--gpus", 8, "--rank", 1), "--rank"),
                              (("--tp", 2, "--csv", "x.csv"), "--gpus N too"),
                              (("--tp", 2, "--top", 3), "--gpus N too"),
                              (("--gpus", 8, "--table", "memory", "--top", 3), "leave one out"),
                              (("--table", "memory", "--batch", 3), "is of one sample"),
                              (("--table", "memory", "--shared-links"), "leave one out"),
                              (("--gpus", 8, "--hierarchical"), "clusters of given rates"),
                              (("--table", "scaling", "--batch", 2), "is of one sample"),
                              (("--flow", "--tp", 2, "--top", 3), "leave one out"),
                              (("--flow", "--tp", 2, "--no-flash"), "leave one out"),
                              (("--flow", "--tp", 2, "--hierarchical"), "leave one out"),
                              (("--flow", "--tp", 2, "--shared-links"), "leave one out"),
                              (("--dp", 2, "--sp"), "give --tp N too"),
                              (("--tp", 2, "--keep-gathered"), "give --tp N --sp too"),
                              (("--tp", 2, "--forward-first", "--micro-batches", 1), "of at least 2"),
                              (("--gpus", 8, "--forward-first", "--micro-batches", 1), "of at least 2"),
                              (("--gpus", 8, "--dropout", 1), "drops everything"),
                              (("--tp", 2, "--label-smoothing", 1), "leaves nothing"),
                              (("--gpus", 8, "--batch", 10**9, "--seq", 10**9, "--json", "x"), "does not fit a size"),
                              (("--gpus", 8, "--csv", "no/such/x.csv"), "no/such/x.csv"),
                              (("--gpus", 8, "--table", "no"), "memory, scaling or decision")):
            with self.subTest(options=options):
                self.refused("llama-demo", *options, says=says)
        self.refused("gpt2-demo", "--tp", 2, "--seq", 10**6, says="longer than the")
        self.refused("no-such-model", "--gpus", 8, says="no-such-model")

    def test_a_config_of_absurd_sizes_is_refused(self):
        config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "vocab_size": 32000}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
                for value in (0, 10**18, "many"):
                    path.write_text(json.dumps(config | {key: value}), encoding="utf-8")
                    with self.subTest(key=key, value=value):
                        self.refused(path, "--gpus", 8, says="config")


if __name__ == "__main__":
    unittest.main()
