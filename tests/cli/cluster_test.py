#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of what check and grads do with the simulated cluster: records of a run, predicted times, schedules, faults of
the transport, collectives that do not match, and 64 ranks."""

import json
import os
import pathlib
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, ROOT, Case, run  # noqa: E402

GOLDEN = ROOT / "tests/golden/llama-gqa-tiny"
SMALL = ("--batch", "2", "--seq", "8", "--steps", "1", "--skip-f64", "--strict-predictions")
SCHEDULED = ("--schedule", "1")  # by the scheduler a timeout is over when nobody can go on, however busy the machine is
TWO = (GOLDEN, "--tp", "2", *SMALL)
GRADS = ("grads", GOLDEN, "--input", GOLDEN / "batch.safetensors")
CLUSTER = "2x inside=1us:100GB/s between=5us:10GB/s flops=1T"


class ClusterTest(Case):
    def run_of(self, *arguments, code=0):
        """The one run of a check."""
        (model,) = self.result("check", *arguments, code=code)["models"]
        (one,) = model["runs"]
        return one


class Records(ClusterTest):
    def events(self, path):
        """The records of a trace, by phase."""
        trace = json.loads(path.read_text(encoding="utf-8"))
        found = {}
        for event in trace["traceEvents"]:
            found.setdefault(event["ph"], []).append(event)
        return found

    def test_a_check_writes_it_and_stays_the_same(self):
        trace = self.folder / "run.json"
        plain = self.run_of(*TWO)
        said = self.passes("check", *TWO, "--trace", trace)
        self.assertIn(f"{trace}: the run by this machine's clock", said)
        self.assertTrue(said.strip().splitlines()[-1].startswith("check: the same bits"))
        self.assertEqual({event["pid"] for event in self.events(trace)["X"]}, {0, 1})
        self.assertEqual(json.loads(trace.read_text(encoding="utf-8"))["otherData"]["title"], f"{GOLDEN.name}, tp=2")
        self.assertEqual(os.listdir(self.folder), ["run.json"])
        recorded = self.run_of(*TWO, "--trace", trace)
        for key in ("weights_hash", "gradients_hash", "loss", "bytes", "collectives", "tensors"):
            self.assertEqual(recorded[key], plain[key], key)

    def test_modules_and_collectives_are_in_it_by_name(self):
        trace = self.folder / "run.json"
        self.passes("check", *TWO, "--trace", trace)
        names = " ".join(event["name"] for event in self.events(trace)["X"])
        for word in ("model.layers.0.mlp", "all_reduce"):
            self.assertIn(word, names)

    def test_json_names_the_file(self):
        trace = self.folder / "run.json"
        result = self.result("check", *TWO, "--trace", trace, "--cluster", "a100")
        self.assertEqual(result["trace"], str(trace))
        self.assertIn("flops=", result["cluster"])
        self.assertNotIn("trace", self.result("check", *TWO))

    def test_grads_writes_it_too(self):
        trace, out = self.folder / "run.json", self.folder / "out"
        said = self.passes(*GRADS, "--tp", "2", "--out", out, "--trace", trace, "--cluster", "h100")
        self.assertIn(f"{trace}: the run by the cluster's clock", said)
        self.assertIn("predicted on a cluster", said)
        self.assertTrue(said.strip().splitlines()[-1].startswith("26 tensors in "))
        self.assertEqual({event["pid"] for event in self.events(trace)["X"]}, {0, 1})
        self.assertTrue((out / "grads.safetensors").exists())

    def test_files_that_cannot_be_are_refused_before_the_work(self):
        place = self.folder / "there"
        self.refused("check", *TWO, "--trace", "/nowhere/x", says="/nowhere/x")
        self.refused("check", *TWO, "--trace", "-", says="no file")
        self.refused("check", *TWO, "--trace", "", says="--trace")
        self.refused(*GRADS, "--out", place / "out", "--trace", "/nowhere/x", says="/nowhere/x")
        self.refused("check", *TWO, "--trace", place, "--json", place, says=["--json", "replace"])

    def test_a_full_disk_is_told(self):
        done = self.done("check", *TWO, "--trace", "/dev/full", code=2)
        self.assertIn("/dev/full: cannot write: No space left on device", done.stderr)
        self.assertIn("check: the same bits", done.stdout)
        link = self.folder / "link"
        link.symlink_to(self.folder / "nowhere/file")
        done = self.done("check", *TWO, "--trace", link, code=2)
        self.assertIn("link: cannot follow the link: No such file", done.stderr)
        self.assertTrue(link.is_symlink())

    def test_several_runs_are_refused_with_what_would_make_one(self):
        place = self.folder / "x"
        for option, value in (("--trace", place), ("--net-fault", "kill rank 0 collective 3")):
            self.refused("check", option, value, says=[option, "a MODEL and a layout", "llama-demo --tp 4"])
            self.refused("check", "llama-demo", option, value, says=[option, "--tp 4"])
            self.refused("check", "--tp", "2", option, value, says=[option, "two models"])
            self.refused("check", GOLDEN, "--sweep", "4", option, value, says=[option, "--tp 4"])
            self.refused("check", *TWO, "--list-tensors", option, value, says=[option, "--list-tensors"])
        self.refused("check", *TWO, "--trace", place, "--schedule", "3..5", says=["--schedule 3..5", "one seed"])


class Predicted(ClusterTest):
    KEYS = {"seconds", "compute", "communication", "exposed", "overlap", "bytes", "collectives", "critical_path"}

    def test_every_layout_has_a_row_and_every_run_its_numbers(self):
        arguments = (GOLDEN, *SMALL, "--cluster", CLUSTER)
        said = self.passes("check", "--tp", "2", *arguments)
        self.assertIn("predicted on a cluster 2x inside=1us:100GB/s between=5us:10GB/s flops=1T", said)
        result = self.result("check", "--sweep", "3", *arguments)
        runs = result["models"][0]["runs"]
        self.assertEqual(result["cluster"], CLUSTER)
        self.assertGreater(len(runs), 5)
        for one in runs:
            predicted = one["predicted"]
            self.assertEqual(set(predicted), self.KEYS)
            path = predicted["critical_path"]
            self.assertAlmostEqual(path["compute"] + path["communication"] + path["wait"], predicted["seconds"],
                                   delta=1e-6 * predicted["seconds"])
            self.assertGreaterEqual(predicted["seconds"] * (1 + 1e-9), predicted["compute"])
            self.assertLessEqual(predicted["exposed"], predicted["communication"] * (1 + 1e-9))
            self.assertEqual(predicted["communication"] > 0, one["layout"]["world"] > 1)
            self.assertEqual(predicted["bytes"], one["bytes"]["counted"])
            self.assertTrue(0 < len(path["longest"]) <= 8)
            self.assertEqual(set(path["longest"][0]), {"what", "rank", "seconds"})

    def test_a_slower_network_takes_longer(self):
        fast, slow = [self.run_of(GOLDEN, "--dp", "2", *SMALL, "--cluster", f"1x inside=1us:1TB/s between={link} flops=1T")
                      ["predicted"] for link in ("1us:100GB/s", "50us:1GB/s")]
        self.assertGreater(slow["seconds"], fast["seconds"])
        self.assertEqual(slow["compute"], fast["compute"])

    def test_without_a_cluster_there_is_none(self):
        self.assertNotIn("predicted", self.run_of(*TWO))

    def test_clusters_that_make_no_sense_are_refused(self):
        for spec, says in (("v100", ["v100", "a100, h100"]), ("8x", "inside"), ("inside=2us", "LATENCY:RATE"),
                           ("8x inside=2us:300GB/s flops=1T", "between"), ("", "--cluster"),
                           ("8x inside=2us:300XB/s between=5us:25GB/s flops=1T", "300XB/s")):
            self.refused("check", *TWO, "--cluster", spec, says=says)
            self.refused(*GRADS, "--out", self.folder / "out", "--cluster", spec, says=says)


class Schedules(ClusterTest):
    def test_a_seed_decides_who_goes_on_and_the_bits_stay(self):
        plain = self.run_of(*TWO)
        one = self.run_of(*TWO, "--schedule", "0..9")
        self.assertEqual(one["schedules"], {"run": 10, "last_seed": 9})
        for key in ("result", "weights_hash", "gradients_hash", "bytes"):
            self.assertEqual(one[key], plain[key])
        self.assertIn("tp=2: the same under schedules 0 to 9", self.passes("check", *TWO, "--schedule", "0..9"))

    def test_the_first_that_differs_is_told(self):
        arguments = (*TWO, "--inject", "norm_backward_missing", "--schedule")
        one = self.run_of(*arguments, "5..9", code=1)
        self.assertEqual((one["result"], one["schedules"]), ("different", {"run": 1, "last_seed": 5}))
        self.assertIn("--schedule 5 replays it", self.passes("check", *arguments, "5..9", code=1))

    def test_what_is_no_seed_is_refused(self):
        for text in ("x", "-1", "1..", "..4", "5..3", "1.5", "1..2..3", "18446744073709551616", "0..9223372036854775808"):
            self.refused("check", *TWO, "--schedule", text, says=["--schedule", "0..999"])


class Transport(ClusterTest):
    def test_a_killed_rank_ends_the_run_on_all(self):
        one = self.run_of(GOLDEN, "--tp", "2", "--dp", "2", *SMALL, "--net-fault", "kill rank 3 collective 9", code=1)
        self.assertEqual(one["result"], "error")
        self.assertIn("rank 3", one["error"]["message"])
        self.assertEqual([rank["rank"] for rank in one["error"]["ranks"]], [0, 1, 2, 3])
        self.assertTrue(all(rank["status"] != "AR_OK" for rank in one["error"]["ranks"]))

    def test_a_rank_of_a_pipeline_is_named_with_its_stage(self):
        for fault, named in (("kill rank 3 collective 9", r"rank 3 \(pp 1, dp 0, tp 1; stage 1, layers 1\)"),
                             ("stall rank 3 collective 9", r"rank (\d) \(pp (\d), dp 0, tp \d; stage \2, layers \2\)")):
            one = self.run_of(GOLDEN, "--pp", "2", "--tp", "2", *SMALL, "--net-fault", fault, *SCHEDULED, code=1)
            self.assertRegex(one["error"]["message"], rf"\n  {named}\n")
        said = self.passes("check", GOLDEN, "--pp", "2", "--tp", "2", *SMALL, "--inject", "column_dx_not_reduced", code=1)
        self.assertIn(" of rank 2 (pp 1, dp 0, tp 0; stage 1, layers 1)\n", said)

    def test_a_drawn_fault_is_told_and_is_the_same_again(self):
        for seed in range(6):
            first, second = [run("check", *TWO, "--net-fault", f"seed:{seed}", *SCHEDULED, "--json", "-")
                             for _ in range(2)]
            self.assertIn(first.returncode, (0, 1), first.stderr)
            self.assertEqual(first.returncode, second.returncode)
            what = json.loads(first.stdout)["net_fault"]
            self.assertEqual(what, json.loads(second.stdout)["net_fault"])
            self.assertEqual(self.result("check", *TWO, "--net-fault", what, *SCHEDULED, code=first.returncode)
                             ["net_fault"], what)

    def test_what_is_no_fault_is_refused(self):
        for text, says in (("kil rank 0 collective 3", ["'kil'", "kill", "corrupt rank"]), ("kill", "rank is missing"),
                           ("kill rank 0", "collective is missing"), ("kill rank 2 collective 3", "the layout's ranks are 0 to 1"),
                           ("kill rank x collective 3", "'x'"), ("kill rank 0 collective 0", "from 1"),
                           ("kill rank 0 rank 1 collective 3", "twice"), ("delay rank 0 collective 3", "how long"),
                           ("stall rank 0 collective 3 bit 4", "'bit'"), ("kill rank 0 collective", "''"),
                           ("kill rank 0 collective 3 for 4", "'for'"), ("seed:", "seed:7"), ("seed:-1", "seed:7"),
                           ("seed:7x", "seed:7"), ("x" * 200, "too long"), ("", "--net-fault")):
            self.refused("check", *TWO, "--net-fault", text, says=says)


class Mismatches(ClusterTest):
    """Faults that end in an error which every rank hears."""

    FAULTS = {"collective_order_swapped": "so they call in different orders", "collective_size_mismatch": "count",
              "collective_dtype_mismatch": "dtype F32 against BF16"}

    def expect(self, one, says):
        self.assertEqual(one["result"], "error")
        self.assertIn("disagree", one["error"]["message"])
        self.assertIn(says, one["error"]["message"])
        self.assertEqual(len(one["error"]["ranks"]), one["layout"]["world"])
        for rank in one["error"]["ranks"]:
            self.assertIn(rank["status"], ("AR_ERR_MISMATCH", "AR_ERR_ABORTED"))
            self.assertTrue(rank["last"] and rank["current"])
        self.assertIn("AR_ERR_MISMATCH", [rank["status"] for rank in one["error"]["ranks"]])

    def test_each_ends_a_layout_that_is_given(self):
        for fault, layout, says in (("collective_order_swapped", ("--dp", "2", "--tp", "2"), "which expects"),
                                    ("collective_size_mismatch", ("--tp", "2", "--sp"), "against"),
                                    ("collective_dtype_mismatch", ("--dp", "2", "--tp", "2"), "against")):
            with self.subTest(fault=fault):
                arguments = (GOLDEN, *layout, *SMALL, "--inject", fault)
                self.expect(self.run_of(*arguments, code=1), says)
                said = self.passes("check", *arguments, code=1)
                self.assertIn("last finished", said)
                self.assertIn("1 of 1 run ended in an ERROR", said.strip().splitlines()[-1])

    def test_the_default_layouts_show_them_where_they_matter(self):
        for fault in self.FAULTS:
            runs = self.result("check", GOLDEN, *SMALL, "--inject", fault, code=1)["models"][0]["runs"]
            self.assertIn("error", {one["result"] for one in runs})
            self.assertNotIn("different", {one["result"] for one in runs})


class ManyRanks(ClusterTest):

    def test_a_thread_has_little_of_its_own(self):
        """Two threads of each rank pay for every thread_local of the program, whether they use it or not."""
        elf = pathlib.Path(COMMAND).read_bytes()
        at, size, n = struct.unpack_from("<Q14xHH", elf, 32)[0], *struct.unpack_from("<HH", elf, 54)
        headers = [struct.unpack_from("<I36xQ", elf, at + i * size) for i in range(n)]
        own = [memory for kind, memory in headers if kind == 7]  # PT_TLS
        self.assertTrue(own and sum(own) < 100000, own)


if __name__ == "__main__":
    unittest.main()
