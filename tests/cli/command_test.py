#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check, grads, bugs and info from outside: exit codes, messages, JSON, and every kind of bad input.
"""

import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, EXTENDED, GOLDEN, LIMIT_S, ROOT, Case  # noqa: E402
import tensor_files  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
import fault_table  # noqa: E402

SMALL_KIB = 300 * 1024

# As the documentation lists them.
FAULTS = [row["fault"] for row in fault_table.figures()]
# They end a run in an error, which says so.
ENDS = {**{f"collective_{how}": "disagree" for how in ("order_swapped", "size_mismatch", "dtype_mismatch")},
        "unused_skips_collective": "returned while"}


class Done:
    """How a command ended: code (negative: the signal), out, err, peak_kib."""

    def __init__(self, arguments, environment=None, limit=LIMIT_S):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = subprocess.Popen([COMMAND, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                     env={**os.environ, **(environment or {})})
            guard = threading.Timer(limit, child.kill)
            guard.start()
            _, status, usage = os.wait4(child.pid, 0)
            guard.cancel()
            child.returncode = self.code = os.waitstatus_to_exitcode(status)
            if self.code == -signal.SIGKILL:
                raise AssertionError(f"killed, as after {limit} s: {arguments}")
            self.peak_kib = usage.ru_maxrss
            self.out, self.err = (os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode("utf-8", "replace")
                                  for f in (out, err))

    def __str__(self):
        return f"exit {self.code}\n{self.out}\n{self.err}"


def run(*arguments, **options):
    return Done(arguments, **options)


def i32(*values):
    return struct.pack(f"<{len(values)}i", *values)


def i64(*values):
    return struct.pack(f"<{len(values)}q", *values)


def f32(*values):
    return struct.pack(f"<{len(values)}f", *values)


LLAMA = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.2}


class CommandTest(Case):
    def config(self, name="model", **changes):
        """A folder with a small Llama's config.json; a change to None leaves the key out."""
        return self.put(f"{name}/config.json",
                        {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}).parent

    def golden(self, name="gpt2-tiny"):
        """A copy of a golden model, to be spoilt."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir(parents=True)
            for file in ("config.json", "model.safetensors", "batch.safetensors"):
                shutil.copy(GOLDEN / name / file, folder / file)
        return folder

    def sane(self, done):
        """No crash, no sanitizer's report, no colours."""
        self.assertGreaterEqual(done.code, 0, str(done))
        for sign in ("Sanitizer", "runtime error:", "\x1b"):
            self.assertNotIn(sign, done.out + done.err)

    def refused(self, *arguments, says, code=2, fast=True, **options):
        """Exit 2, nothing on stdout, one clear message on stderr, quickly and with little memory."""
        done = run(*arguments, **options)
        self.sane(done)
        self.assertEqual((done.code, done.out), (code, ""), str(done))
        self.assertTrue(done.err.startswith("anyrank"), done.err)
        self.assertLessEqual(done.err.count("\n"), 3, done.err)
        for word in [says] if isinstance(says, str) else says:
            self.assertIn(word, done.err)
        if fast and "san" not in COMMAND:
            self.assertLess(done.peak_kib, SMALL_KIB, str(arguments))
        return done

    def passes(self, *arguments, code=0, **options):
        done = run(*arguments, **options)
        self.sane(done)
        self.assertEqual((done.code, done.err), (code, ""), str(done))
        return done

    def result(self, *arguments, code=0):
        done = self.passes(*arguments, "--json", "-", code=code)
        return json.loads(done.out, parse_constant=lambda name: self.fail(f"{name} is no JSON"))


# --- what a good run prints and writes ---------------------------------------------------------------------------------


SMALL = ("--batch", "2", "--seq", "8", "--skip-f64", "--strict-predictions")
# Of a run on --tp 2.
LAYOUT = {"world": 2, "tp": 2, "dp": 1, "cp": 1, "cp_inner": 1, "zigzag": False, "ep": 1, "etp": 2, "dispatch": None,
          "pp": 1, "virtual_stages": 1, "stages": [], "schedule_pp": None, "sp": False, "zero": 0, "dp_replicate": 1,
          "micro_batches": 1, "samples_per_rank": [2], "keep_gathered": False, "forward_first": False, "overlap": 1,
          "recompute": "none", "recompute_every": 1}


class Check(CommandTest):
    def test_text_ends_with_the_verdict(self):
        done = self.passes("check", self.config(), "--tp", "2", *SMALL)
        self.assertIn("the same bits", done.out.strip().splitlines()[-1])
        self.assertIn("tp=2", done.out)
        self.assertEqual(self.passes("check", self.config(), "--tp", "2", "--quiet", *SMALL).out, "")

    def test_json_has_every_key(self):
        result = self.result("check", self.config(), "--tp", "2", "--batch", "2", "--seq", "8", "--strict-predictions")
        self.assertEqual({key: result[key] for key in ("tool", "command", "numerics", "device", "result")},
                         {"tool": "anyrank", "command": "check", "numerics": "exact", "device": "cpu", "result": "same"})
        self.assertRegex(result["version"], r"^\d+\.\d+\.\d+$")
        (model,) = result["models"]
        self.assertIsNone(model["gradcheck"])
        # embedding and head 40*16, q and o 16*16, k and v 8*16, gate, up, down 24*16, three norms
        self.assertEqual(model["parameters"], 2 * 640 + 2 * 256 + 2 * 128 + 3 * 384 + 3 * 16)
        baseline = model["baseline"]
        digits = baseline["outputs_hash"] + baseline["gradients_hash"] + baseline["weights_hash"]
        self.assertRegex(digits, r"^[0-9a-f]{192}$")
        self.assertEqual(result["hash"], hashlib.sha256(digits.encode()).hexdigest())
        self.assertEqual(len(baseline["loss"]), 3)
        self.assertEqual(len(set(baseline["loss"])), 3)
        self.assertEqual((model["steps"], model["clip"], model["dropout"]), (3, 1.0, 0.0))
        self.assertEqual({key: model["optimizer"][key] for key in ("name", "lr", "weight_decay", "beta1", "beta2")},
                         {"name": "adamw", "lr": 0.001, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999})
        self.assertTrue(0.0 < baseline["max_error_vs_f64"] < 1e-5)
        (one,) = model["runs"]
        self.assertEqual(one["layout"], LAYOUT)
        self.assertEqual((one["result"], one["tensors_different"], one["elements_different"], one["max_ulp"]),
                         ("same", 0, 0, 0))
        self.assertGreater(one["tensors"], 50)
        self.assertGreater(one["elements"], model["parameters"])
        self.assertEqual(one["bytes"]["counted"], one["bytes"]["predicted"])
        self.assertLess(one["bytes"]["bf16"] * 2, one["bytes"]["predicted"])  # exact sums take four times a bf16
        self.assertGreaterEqual(one["bytes"]["counted"], one["bytes"]["per_rank_max"])
        self.assertGreaterEqual(2 * one["bytes"]["per_rank_max"], one["bytes"]["counted"])
        self.assertTrue(set(one["collectives"]) <= {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                                    "broadcast", "exchange", "barrier"})
        self.assertGreater(one["collectives"]["all_reduce"], 0)
        self.assertGreater(one["peak_bytes_per_rank"]["weights"], 0)
        self.assertGreater(one["peak_bytes_per_rank"]["activations_peak"], 0)
        self.assertGreater(one["seconds"], 0)
        self.assertEqual((one["loss"], one["weights_hash"], one["gradients_hash"]),
                         (baseline["loss"], baseline["weights_hash"], baseline["gradients_hash"]))
        self.assertIsNone(one["first_difference"])
        self.assertIsNone(one["error"])

    def test_json_of_a_difference_tells_where(self):
        result = self.result("check", self.config(), "--tp", "2", *SMALL, "--inject", "norm_backward_missing", code=1)
        self.assertEqual((result["result"], result["hash"]), ("different", None))
        first = result["models"][0]["runs"][0]["first_difference"]
        self.assertEqual({key: first[key] for key in ("step", "pass", "tensor", "layer", "rank", "actual")},
                         {"step": 1, "pass": "backward", "tensor": "model.layers.0.post_attention_layernorm:bwd",
                          "layer": 0, "rank": 0, "actual": 0.0})
        self.assertEqual((len(first["index"]), len(first["local_index"])), (3, 3))
        self.assertNotEqual(first["reference"], 0.0)
        self.assertGreater(first["ulp"], 0)
        self.assertTrue(0 < first["elements_different"] <= first["elements"] == 2 * 8 * 16)
        self.assertEqual(first["pattern"], "224 of 256 elements")

    def test_json_tells_a_layout_in_full(self):
        result = self.result("check", self.config(), "--tp", "2", "--sp", "--keep-gathered", "--dp", "3",
                             "--micro-batches", "2", "--forward-first", "--batch", "8", "--seq", "8",
                             "--skip-f64", "--strict-predictions",
                             "--steps", "2", "--dropout", "0.25", "--optimizer", "sgd", "--momentum", "0.5",
                             "--nesterov", "--lr", "0.5", "--weight-decay", "0.125", "--clip", "0")
        self.assertEqual(result["result"], "same")
        (model,) = result["models"]
        (one,) = model["runs"]
        self.assertEqual(one["layout"], {**LAYOUT, "world": 6, "dp": 3, "sp": True, "micro_batches": 2,
                                         "samples_per_rank": [3, 3, 2], "keep_gathered": True, "forward_first": True})
        self.assertEqual(len(one["loss"]), 2)
        self.assertEqual((model["steps"], model["clip"], model["dropout"]), (2, 0.0, 0.25))
        self.assertEqual({key: model["optimizer"][key] for key in ("name", "lr", "momentum", "nesterov", "weight_decay")},
                         {"name": "sgd", "lr": 0.5, "momentum": 0.5, "nesterov": True, "weight_decay": 0.125})
        self.assertGreater(one["collectives"]["reduce_scatter"], 0)
        # one moment in fp32, where Adam has two
        self.assertEqual(one["peak_bytes_per_rank"]["optimizer"], one["peak_bytes_per_rank"]["weights"])

    def test_a_step_without_update_has_no_optimizer(self):
        (model,) = self.result("check", self.config(), "--dp", "2", "--steps", "0", *SMALL)["models"]
        self.assertEqual((model["steps"], model["optimizer"], model["clip"]), (0, None, 0.0))
        self.assertEqual(len(model["baseline"]["loss"]), 1)
        self.assertEqual(model["runs"][0]["peak_bytes_per_rank"]["optimizer"], 0)

    def test_each_option_of_a_step_changes_the_weights(self):
        seen = {}
        for options in ((), ("--steps", "0"), ("--steps", "1"), ("--lr", "0.01"), ("--optimizer", "sgd"),
                        ("--optimizer", "adam"), ("--optimizer", "sgd", "--momentum", "0.9"),
                        ("--optimizer", "sgd", "--momentum", "0.9", "--nesterov"), ("--betas", "0.5,0.999"),
                        ("--betas", "0.9,0.5"), ("--weight-decay", "0.5"), ("--clip", "0.001"), ("--dropout", "0.5"),
                        ("--seed", "1")):
            (model,) = self.result("check", self.config(), "--dp", "2", *options, *SMALL)["models"]
            self.assertNotIn(model["baseline"]["weights_hash"], seen, f"{options} as {seen}")
            seen[model["baseline"]["weights_hash"]] = options
        same = self.result("check", self.config(), "--tp", "2", "--steps", "3", "--optimizer", "adamw", "--lr", "1e-3",
                           "--betas", "0.9,0.999", "--weight-decay", "0.01", "--clip", "1", "--dropout", "0", *SMALL)
        self.assertEqual(seen[same["models"][0]["runs"][0]["weights_hash"]], ())

    def test_text_tells_steps_layouts_and_memory(self):
        done = self.passes("check", self.config(), "--dp", "3", "--batch", "8", "--seq", "8",
                           "--skip-f64", "--strict-predictions", "--memory")
        self.assertIn("3 steps of AdamW (lr 0.001, weight decay 0.01), clip 1, exact numerics", done.out)
        self.assertIn("dp=3 (3+3+2)", done.out)
        self.assertIn("memory of a rank", done.out)
        self.assertIn("weights after the last step: one hash", done.out)
        self.assertRegex(done.out.splitlines()[-2], "^hash of outputs, gradients and weights: [0-9a-f]{64}, the same on")
        self.assertIn("    predicted", done.out)
        self.assertNotIn("memory of a rank", self.passes("check", self.config(), "--tp", "2", *SMALL).out)

    def test_memory_that_nothing_predicts_is_no_prediction_of_nothing(self):
        packed = ("check", self.config(), "--cp", "2", "--documents", "3", "--memory", *SMALL)
        self.assertNotIn("    predicted", self.passes(*packed).out)
        run = self.result(*packed)["models"][0]["runs"][0]
        self.assertIsNone(run["predicted_bytes_per_rank"])
        self.assertGreater(run["peak_bytes_per_rank"]["weights"], 0)

    def test_memory_that_depends_on_routes_is_predicted_where_these_are_known(self):
        for numerics, known in (("exact", True), ("native", False)):
            run = self.result("check", "mixtral-demo", "--dp", "2", "--ep", "2", "--batch", "2", "--seq", "8",
                              "--numerics", numerics, "--strict-predictions")["models"][0]["runs"][0]
            self.assertEqual(run["predicted_bytes_per_rank"], run["peak_bytes_per_rank"] if known else None)
            self.assertEqual(run["unpredicted"] is None, known)

    def test_strict_predictions_say_what_they_cannot_check(self):
        small = ("--batch", "2", "--seq", "8", "--skip-f64")
        experts, of_experts = ("check", "mixtral-demo", "--dp", "2", "--ep", "2", *small), "routes of tokens decide"
        for words, why in (((*experts, "--numerics", "native"), of_experts), (experts, ""),
                           (("check", self.config(), "--cp", "2", "--documents", "3", *small), "packed documents"),
                           (("check", self.config(), "--tp", "2", "--numerics", "native", *small), "")):
            note = next((line for line in self.passes(*words, "--strict-predictions").out.splitlines()
                         if "--strict-predictions cannot check memory and shapes of" in line), "")
            self.assertEqual((bool(note), why in note), (bool(why), True), words)
            self.assertNotIn("cannot check memory", self.passes(*words).out)

    def test_the_dropout_of_a_config_is_noted_and_left_out(self):
        folder = self.config(attention_dropout=0.1)
        self.assertIn("note: the config's dropout of 0.1 is ignored", self.passes("check", folder, "--tp", "2", *SMALL).out)
        self.assertNotIn("ignored", self.passes("check", folder, "--tp", "2", "--dropout", "0.1", *SMALL).out)
        dropped = [self.result("check", folder, "--tp", "2", *more, *SMALL)["models"][0]["baseline"]["loss"]
                   for more in ((), ("--dropout", "0"), ("--dropout", "0.1"))]
        self.assertEqual(dropped[0], dropped[1])
        self.assertNotEqual(dropped[0], dropped[2])

    def test_tensors_are_listed_in_the_order_of_execution(self):
        done = self.passes("check", self.config(), "--list-tensors", "--batch", "2", "--seq", "8")
        self.assertEqual(done.out.strip().splitlines()[-1], "100 tensors")
        result = self.result("check", self.config(), "--list-tensors", "--batch", "2", "--seq", "8")
        tensors = [(t["name"], t["pass"], t["shape"]) for t in result["models"][0]["tensors"]]
        self.assertEqual(len(tensors), 100)
        self.assertEqual(tensors[0], ("model.embed_tokens.weight:init", "init", [40, 16]))
        for before, after in ((("loss:fwd", "forward", []), ("lm_head.logits:bwd", "backward", [2, 8, 40])),
                              (("model.embed_tokens.weight:grad", "backward", [40, 16]), ("grad_norm:clip", "clip", []))):
            self.assertEqual(tensors.index(after), tensors.index(before) + 1)
        self.assertEqual(tensors[-3:], [(f"lm_head.weight:{of}", "update", [40, 16]) for of in ("new", "m", "v")])
        checked = self.result("check", self.config(), "--tp", "2", "--steps", "1", *SMALL)
        self.assertEqual(checked["models"][0]["runs"][0]["tensors"], 100)

    def test_layouts_are_those_asked_for(self):
        def layouts(*arguments):
            runs = [r["layout"] for r in self.result("check", *SMALL, *arguments, "--steps", "1")["models"][0]["runs"]]
            for run_of in runs:
                self.assertIn(run_of["zero"], (0, 1) if run_of["dp"] * run_of["cp"] > 1 else (0,))
            return [(r["dp"], r["tp"], r["sp"], r["micro_batches"]) + ("zero",) * r["zero"] for r in runs if r["cp"] == 1]
        # tests/verify/steps_test.c has what a sweep lists, and the default.
        self.assertEqual(len(layouts(self.config(), "--sweep", "4")), 16)
        usual = layouts(self.config())
        self.assertTrue({(1, 2, False, 1), (1, 4, True, 1), (2, 1, False, 1), (2, 2, False, 1, "zero"),
                         (1, 1, False, 2)} <= set(usual), usual)
        self.assertEqual(layouts(self.config(), "--tp", "1", "--mlp-order", "row-column"), [(1, 1, False, 1)])
        self.assertEqual(layouts(self.config(), "--dp", "2"), [(2, 1, False, 1)])
        self.assertEqual(layouts(self.config(), "--dp", "2", "--zero", "1"), [(2, 1, False, 1, "zero")])
        self.assertEqual(layouts(self.config(), "--micro-batches", "2"), [(1, 1, False, 2)])
        self.assertEqual(layouts(self.config(num_key_value_heads=1), "--tp", "4", "--sp"), [(1, 4, True, 1)])

    def test_probabilities_of_long_sequences_are_compared_by_rows(self):
        model = self.config(model_type="mistral", max_position_embeddings=4096, num_hidden_layers=1, sliding_window=600)
        long = ("--batch", "1", "--seq", "2056", "--skip-f64", "--dropout", "0.1")
        listed = self.passes("check", model, "--tp", "2", *long, "--steps", "1", "--list-tensors").out
        for name in ("probs_rows:fwd", "probs_rows:bwd", "attn_dropout_rows:fwd"):
            self.assertIn(f"self_attn.{name}", listed)
        self.assertNotIn("self_attn.probs:", listed)
        done = self.passes("check", model, "--cp", "4", "--zigzag", *long, "--steps", "1")
        self.assertIn("note: attention's probabilities of more than 2,048 tokens are told by two numbers of each row", done.out)
        done = self.passes("check", model, "--tp", "2", *long, "--inject", "dropout_same_mask_in_shard", code=1)
        self.assertIn("self_attn.attn_dropout_rows", done.out)
        native = self.passes("check", model, "--tp", "2", *long[:-2], "--numerics", "native", "--steps", "0")
        self.assertIn("more than 2,048 tokens are left out", native.out)

    def test_json_tells_buckets_and_zero(self):
        def one(*options):
            (model,) = self.result("check", self.config(), "--dp", "2", *options, *SMALL)["models"]
            (run_of,) = model["runs"]
            self.assertEqual((run_of["result"], run_of["layout"]["zero"]), ("same", int("--zero" in options)))
            return model["ddp"], run_of["peak_bytes_per_rank"], run_of["collectives"]["all_to_all"]
        ddp, plain, usual = one()
        self.assertEqual(ddp["mode"], "overlap")
        self.assertTrue(0 < 8 * ddp["bucket_bytes"] <= plain["weights"] < 9 * ddp["bucket_bytes"], (ddp, plain))
        ddp, memory, many = one("--bucket-bytes", "0", "--bucket-mode", "eager")
        self.assertEqual(ddp, {"bucket_bytes": 0, "mode": "eager", "order": "reverse"})
        ddp, _, few = one("--bucket-bytes", "25MiB")
        self.assertEqual(ddp, {"bucket_bytes": 26214400, "mode": "overlap", "order": "reverse"})
        self.assertTrue(few < usual < many, (few, usual, many))
        self.assertTrue(0 < memory["buckets"] < plain["buckets"], (plain, memory))  # of one parameter: in place
        self.assertTrue(plain["buckets"] < 2 * 17 * plain["weights"] // 4, plain)  # storage and room of the largest
        _, shared, _ = one("--zero", "1")
        self.assertTrue(plain["optimizer"] == 2 * plain["weights"] > shared["optimizer"], (plain, shared))

    def test_a_fault_that_shows_in_a_module_alone(self):
        done = self.passes("check", "--inject", "unused_set_empty", code=1)
        self.assertIn("pair.spare:new", done.out)
        self.assertTrue(done.out.endswith("check: DIFFERENT in 1 of 1 run\n"), done.out)
        (model,) = self.result("check", "--inject", "unused_set_empty", code=1)["models"]
        self.assertEqual((model["name"], model["runs"][0]["first_difference"]["tensor"]),
                         ("module", "pair.spare:new"))
        self.refused("check", "--inject", "unused_set_empty", "--trace", self.folder / "x", says="module")
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_fault_without_a_model_picks_a_case_in_which_it_matters(self):
        # tests/verify/fault_test.c has the case of every fault.
        for fault, layout, says in (("dp_mean_of_means", "dp=3 (2+1+1)", ""), ("sp_norm_grad_local", "tp=2 sp", ""),
                                    ("kv_replica_wrong_head", "tp=4", ""), ("world_rank_in_group", "dp=2 tp=2", ""),
                                    ("saved_input_overwritten", "micro-batches=2 (forward first)", ""),
                                    ("dropout_same_mask_in_shard", "tp=2", "dropout 0.1"))[:6 if EXTENDED else 1]:
            with self.subTest(fault=fault):
                done = self.passes("check", "--inject", fault, "--skip-f64", "--steps", "1", code=1)
                self.assertIn(f"injected: {fault}", done.out)
                self.assertIn(f"  {layout}: the first tensor that differs is", done.out)
                self.assertIn("hint", done.out)
                self.assertIn(says, done.out)
        if not EXTENDED:
            return
        given = self.passes("check", "--inject", "dropout_same_mask_in_shard", "--skip-f64", "--steps", "1",
                            "--dropout", "0.5", code=1)
        self.assertIn("dropout 0.5", given.out)

    def test_a_wrong_prediction_is_a_result_of_its_own(self):
        fault = ("check", self.config(), "--tp", "2", "--sp", *SMALL[:-1], "--steps", "1", "--inject",
                 "qkv_gathered_three_times")
        done = self.passes(*fault, code=1)  # as every fault that is caught
        self.assertRegex(done.out, r"\n  tp=2 sp: bits equal; prediction wrong: [\d,]+ bytes were moved between ranks, the ")
        self.assertRegex(done.out, r"\nhash of .*\ncheck: bits equal; prediction wrong in 1 of 1 run\n$")
        self.assertNotIn("DIFFERENT", done.out)
        result = self.result(*fault, code=1)
        (run,) = result["models"][0]["runs"]
        self.assertEqual((result["result"], run["result"], run["passed"]), ("mispredicted", "mispredicted", False))
        self.assertTrue(result["hash"] and run["first_difference"] is None)

    def test_a_fault_that_cannot_matter_is_refused(self):
        for fault, layout, says in (("sp_norm_grad_local", "--dp 2", "sequence parallelism: give tp of at least 2 and sp"),
                                    ("comm_before_producer", "--dp 2 --zero 2", "has whole gradients: give zero of at most 1"),
                                    ("bucket_stale_done", "--dp 2 --zero 2 --steps 2", "give zero of at most 1"),
                                    ("bucket_first_ready", "--dp 2 --bucket-bytes 0", "give larger buckets"),
                                    ("dp_mean_of_means", "--dp 2 --batch 4", "that dp does not divide"),
                                    ("accum_mean_of_means", "--micro-batches 2 --batch 4", "do not divide"),
                                    ("unused_in_last_micro_batch", "--dp 2 --batch 4", "give a batch below dp times"),
                                    ("cp_tail_dropped", "--cp 2", "give another seq"),
                                    ("adam_step_not_synced", "--micro-batches 2", "that hold copies of a parameter"),
                                    ("unused_in_last_micro_batch", "--dp 2 --micro-batches 2 --batch 3 --forward-first",
                                     "give a batch below dp times"),
                                    ("muon_of_shards", "--tp 2 --dp 2 --zero 1 --optimizer muon", "give no zero"),
                                    ("dp_broadcast_over_world", "--dp 2 --zero 2", "have other parameters"),
                                    ("norm_padded_lanes", "--dp 2", "no power of two"),
                                    ("world_rank_in_group", "--tp 2", "wider than a tensor-parallel group"),
                                    ("silent_truncation", "--tp 2", "does not divide the vocabulary"),
                                    ("zero_gather_missing", "--dp 2 --zero 3", "give dp of at least 2 and zero 1 or 2"),
                                    ("init_local_fan", "--dp 2", "tensor-parallel ranks")):
            for command in ("check", "train"):
                self.refused(command, self.config(), "--seq", "8", *layout.split(), "--inject", fault,
                             says=[f"fault {fault} ", says])
        for fault, model, layout in (("world_rank_in_group", "llama-gqa-tiny", "--dp 2"),
                                     ("positions_local", "gpt2-tiny", "--cp 2"),
                                     ("step_before_copy_back", "gpt2-tiny", "--pp 2 --micro-batches 2"),
                                     ("collective_dtype_mismatch", "llama-gqa-tiny", "--cp 2"),
                                     ("dp_broadcast_over_world", "llama-gqa-tiny", "--pp 2 --dp 2 --micro-batches 2")):
            done = run("check", ROOT / "tests/golden" / model, *layout.split(), "--batch", "4", "--seq", "8", "--steps",
                       "2", "--skip-f64", "--inject", fault)
            self.assertEqual(done.code, 1, f"{fault}, {layout}: shows, {done}")
        unseen = self.done("check", self.config(), "--dp", "2", "--seq", "8", "--bucket-mode", "eager", "--inject",
                           "comm_before_producer", code=2)
        self.assertIn("fault comm_before_producer changed nothing here: without MODEL", unseen.stderr)
        for command in ("check", "train"):
            self.refused(command, ROOT / "tests/golden/llama-gqa-tiny", "--tp", "2", "--seq", "8", "--inject",
                         "init_local_fan", says="these are read")
        self.refused("check", "stack-demo", "--cp", "2", "--inject", "cp_targets_whole", says="this model's loss is not")

    def test_gradcheck_has_a_row_for_each_step_size(self):
        larger = ("--batch", "3", "--seq", "24", "--skip-f64", "--strict-predictions", "--steps", "1", "--gradcheck")
        result = self.result("check", self.config(), "--tp", "2", *larger)
        check = result["models"][0]["gradcheck"]
        self.assertTrue(check["ok"])
        self.assertEqual((check["batch"], check["seq"], check["parameters"]), (2, 16, 12))
        self.assertGreater(check["elements"], check["parameters"])
        self.assertLess(check["max_relative_error"], 1e-6)
        self.assertEqual(min(row["max_relative_error"] for row in check["rows"]), check["max_relative_error"])
        steps = [row["step"] for row in check["rows"]]
        self.assertEqual(len(set(steps)), len(steps))
        self.assertGreater(max(steps) / min(steps), 1000)
        done = self.passes("check", self.config(), "--tp", "2", *larger)
        self.assertIn("gradcheck: the binary64 baseline against central differences, on 2 sequences of 16", done.out)
        self.assertIn("worst relative error", done.out)

    def test_native_numerics_are_held_to_an_allowance(self):
        for layout in (("--tp", "2", "--sp"), ("--dp", "2"), ("--cp", "4", "--cp-inner", "2", "--zigzag")):
            result = self.result("check", self.config(), *layout, "--numerics", "native", *SMALL)
            self.assertEqual((result["numerics"], result["result"], result["hash"]), ("native", "same", None))
            (one,) = result["models"][0]["runs"]
            self.assertTrue(0 < one["max_ratio"] <= 1, one["max_ratio"])
            self.assertTrue(one["max_ratio_tensor"])
            done = self.passes("check", self.config(), *layout, "--numerics", "native", *SMALL)
            self.assertIn("within the allowance", done.out.strip().splitlines()[-1])
        result = self.result("check", self.config(), "--tp", "2", "--numerics", "native", "--inject",
                             "column_dx_not_reduced", *SMALL, code=1)
        self.assertGreater(result["models"][0]["runs"][0]["max_ratio"], 1)

    def test_an_infinity_or_nan_is_a_string(self):
        folder = self.golden()
        tensors = tensor_files.read(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if "weight" in name and "ln_" not in name:
                tensor[2] = f32(*([3e38] * (len(tensor[2]) // 4)))
        tensor_files.write(folder / "model.safetensors", tensors)
        result = self.result("check", folder, "--tp", "2", "--steps", "0", *SMALL, code=1)
        self.assertEqual(result["result"], "vacuous")
        self.assertEqual(result["models"][0]["baseline"]["loss"], ["NaN"])
        self.assertIn("NaN", self.passes("check", folder, "--tp", "2", "--steps", "0", *SMALL, code=1).out)
        self.refused("check", folder, "--tp", "2", *SMALL, says=["gradient norm", "step 1"], fast=False)


class Grads(CommandTest):
    def test_experts_are_stacked_where_asked_for(self):
        folder = GOLDEN / "experts/qwen2moe-tiny"
        command = ("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out", "--tp", "2")
        self.passes(*command)
        apart = tensor_files.read(self.folder / "out/grads.safetensors")
        self.passes(*command, "--stacked")
        stacked = tensor_files.read(self.folder / "out/grads.safetensors")
        mlp = "model.layers.1.mlp.experts."
        parts = [[apart[f"{mlp}{e}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")]
                 for e in range(sum(n.startswith(mlp) for n in apart) // 3)]
        (width, hidden), n = parts[0][0][1], len(parts)
        self.assertEqual(stacked[f"{mlp}gate_up_proj"],
                         ["F32", [n, 2 * width, hidden], b"".join(gate[2] + up[2] for gate, up, _ in parts)])
        self.assertEqual(stacked[f"{mlp}down_proj"], ["F32", [n, hidden, width], b"".join(down[2] for _, _, down in parts)])
        others = {name for name in apart if ".experts." not in name}
        self.assertEqual({name: stacked[name] for name in others}, {name: apart[name] for name in others})
        self.refused(*command, "--stacked", "--sensitivity", says="allowances have the names of checkpoints")

    def test_files_and_json(self):
        out = self.folder / "out"
        result = self.result("grads", GOLDEN / "gpt2-tiny", "--input", GOLDEN / "gpt2-tiny/batch.safetensors", "--out",
                             out, "--tp", "2")
        self.assertEqual((result["tool"], result["schema"], result["command"], result["result"]), ("anyrank", 1, "grads", "same"))
        self.assertRegex(result["outputs_hash"], "^[0-9a-f]{64}$")
        self.assertEqual(sorted(os.listdir(out)), ["grads.safetensors", "model.json", "outputs.safetensors"])
        self.assertEqual([pathlib.Path(f).name for f in result["files"]], ["outputs.safetensors", "grads.safetensors"])
        outputs, grads = (tensor_files.read(out / f"{name}.safetensors") for name in ("outputs", "grads"))
        self.assertEqual(set(outputs), {"logits", "loss", "hidden_states.0", "hidden_states.1", "hidden_states.2"})
        expected = tensor_files.read(GOLDEN / "gpt2-tiny/grads.safetensors")
        self.assertEqual({n: t[:2] for n, t in grads.items()}, {n: t[:2] for n, t in expected.items()})
        self.assertEqual(result["tensors"], len(outputs) + len(grads))
        (loss,) = struct.unpack("<f", outputs["loss"][2])
        self.assertEqual(result["loss"], [loss])
        (reference,) = struct.unpack("<f", tensor_files.read(GOLDEN / "gpt2-tiny/outputs.safetensors")["loss"][2])
        self.assertLess(abs(loss - reference) / reference, 1e-5)

    def test_a_block(self):
        out = self.folder / "out"
        done = self.passes("grads", "--block", GOLDEN / "block-gqa", "--out", out, "--tp", "3")
        self.assertIn("block.safetensors", done.out)
        self.assertIn("hash", done.out.strip().splitlines()[-1])
        tensors = tensor_files.read(out / "block.safetensors")
        self.assertEqual(set(tensors), set(tensor_files.read(GOLDEN / "block-gqa/expected_f64.safetensors")))

    def test_a_block_that_shares_out_positions_has_the_same_bytes(self):
        one, other = self.folder / "one", self.folder / "other"
        self.passes("grads", "--block", GOLDEN / "block-mha", "--out", one)
        for layout in ("--tp 2 --sp", "--cp 4 --cp-inner 2", "--cp 2 --zigzag --tp 2 --sp"):
            with self.subTest(layout=layout):
                self.passes("grads", "--block", GOLDEN / "block-mha", "--out", other, *layout.split())
                self.assertEqual((one / "block.safetensors").read_bytes(), (other / "block.safetensors").read_bytes())

    def test_documents_are_those_of_every_spelling(self):
        """Rows of 20 and 12 tokens, and of 32: bounds of all tokens, of each row, under the names of transformers, and the
        mask, positions and labels that say the same."""
        row = [0] * 20 + [1] * 12
        apart = f32(*[0.0 if key <= query and a[key] == a[query] else -math.inf
                      for a in (row, [0] * 32) for query in range(32) for key in range(32)])
        folder = self.golden()
        ids = tensor_files.read(folder / "batch.safetensors")["input_ids"]
        tokens = list(struct.unpack("<64q", ids[2]))
        flat = i32(0, 20, 32, 64)
        without = {"position_ids": ["I64", [2, 32], i64(*range(20), *range(12), *range(32))],
                   "labels": ["I64", [2, 32], i64(*[-100 if i == 20 else t for i, t in enumerate(tokens)])]}
        same = [{"cu_seqlens": ["I32", [4], flat]}, {"cu_seqlens": ["I64", [5], i64(0, 20, 20, 32, 64)]},
                {"cu_seqlens": ["I32", [2, 3], i32(0, 20, 32, 0, 32, 32)]},
                {"cu_seq_lens_q": ["I32", [4], flat], "cu_seq_lens_k": ["I32", [4], flat]},
                {"attention_mask": ["F32", [2, 1, 32, 32], apart], **without}, without]
        layouts = [("--tp", "2"), ("--tp", "2"), ("--cp", "2", "--zigzag"), ("--cp", "4"),
                   ("--cp", "2", "--cp-inner", "2"), ("--cp", "2"), ("--cp", "4")]
        self.assertEqual(len(layouts), 1 + len(same))
        results = []
        for extra, layout in zip([{}] + same, layouts):
            tensor_files.write(folder / "batch.safetensors", {"input_ids": ids, **extra})
            results.append(self.result("grads", folder, "--input", folder / "batch.safetensors", "--out",
                                       self.folder / "out", "--quiet", *layout))
        hashes = [result["outputs_hash"] for result in results]
        self.assertEqual(len(set(hashes[1:])), 1, hashes)
        self.assertNotEqual(hashes[0], hashes[1])
        ones, positions = ["I64", [2, 32], i64(*[1] * 64)], without["position_ids"]
        for batch, note in (
                ({"cu_seqlens": ["I32", [4], flat], "position_ids": ["I64", [1, 32], i64(*range(32))]},
                 "1 of 3 documents begin at another position than 0"),
                (without, "restart or jump 1 time within a row: attention stays inside the documents that begin there, as in "
                          "transformers without attention_mask and use_cache\n"),
                ({"position_ids": positions}, "attention_mask and use_cache; 1 of them is predicted by the one before"),
                ({**without, "attention_mask": ones}, "jump 1 time within a row: attention crosses these places")):
            tensor_files.write(folder / "batch.safetensors", {"input_ids": ids, **batch})
            done = Done(["grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out"])
            self.assertEqual(done.code, 0, str(done))
            self.assertIn(note, done.err)
        tensor_files.write(folder / "batch.safetensors", {"input_ids": ["I64", [64], ids[2]]})
        done = Done(["grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out"])
        self.assertIn("input_ids is [64], expected [batch, seq]", done.err)

    def test_a_mask_of_four_dimensions_hides_what_the_models_own_does(self):
        """transformers takes it in place of its own: a mask that shows more would give other numbers there."""
        for name, reach, says in (("gpt2-tiny", 0, None), ("gpt2-tiny", 1, "key 1 is later than query 0"),
                                  ("mistral-window-tiny", 0, "key 0 is beyond the window of query 7")):
            folder = self.golden(name)
            ids = tensor_files.read(GOLDEN / name / "batch.safetensors")["input_ids"]
            rows, s = ids[1]
            mask = f32(*[0.0 if key <= query + reach else -1e9 for query in range(s) for key in range(s)])
            tensor_files.write(folder / "batch.safetensors", {"input_ids": ids, "attention_mask": ["F32", [1, 1, s, s], mask]})
            grads = ("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out")
            if says is None:
                self.assertEqual(self.passes(*grads).err, "")
            else:
                self.refused(*grads, says=[says, "expected -inf"])

    def test_targets_of_places_that_see_no_key_are_told(self):
        folder = self.golden()
        ids = tensor_files.read(folder / "batch.safetensors")["input_ids"]
        tokens, mask = struct.unpack("<64q", ids[2]), [0, 0, 0] + [1] * 61
        for label, told in ((tokens[3], True), (-100, False)):
            labels = [-100, -100, -100, label, *tokens[4:]]
            tensor_files.write(folder / "batch.safetensors", {"input_ids": ids, "labels": ["I64", [2, 32], i64(*labels)],
                                                              "attention_mask": ["I64", [2, 32], i64(*mask)]})
            done = Done(["grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out"])
            self.assertEqual(done.code, 0, str(done))
            self.assertEqual("note: 1 target is predicted where no key is seen" in done.err, told, done.err)
        # A key of the document before is none of the next one's.
        hidden = {"input_ids": ids, "attention_mask": ["I64", [2, 32], i64(*[1] * 4, 0, 0, *[1] * 58)]}
        bounds = {"cu_seqlens": ["I64", [4], i64(0, 4, 32, 64)]}
        for batch, told in ((hidden, 0), ({**hidden, **bounds}, 2)):
            tensor_files.write(folder / "batch.safetensors", batch)
            done = run("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out")
            self.assertEqual("note: 2 targets are predicted where no key is seen" in done.err, told > 0, done.err)

    def test_a_model_without_logits_has_no_targets(self):
        file = self.folder / "batch.safetensors"
        batch = {"input_ids": ["I64", [1, 4], i64(1, 2, 3, 4)], "attention_mask": ["I64", [1, 4], i64(0, 0, 1, 1)]}
        tensor_files.write(file, batch)
        self.passes("grads", "stack-demo", "--input", file, "--out", self.folder / "out")
        tensor_files.write(file, {**batch, "labels": ["I64", [1, 4], i64(*[-100] * 4)]})
        self.refused("grads", "stack-demo", "--input", file, "--out", self.folder / "out", says=["holds labels", "no logits"])

    def test_positions_alone_keep_no_documents_of_gpt_oss_apart(self):
        folder = self.golden("experts/gpt-oss-tiny")
        ids = tensor_files.read(folder / "batch.safetensors")["input_ids"]
        rows, s = ids[1]
        places = {"position_ids": ["I64", [rows, s], i64(*[*range(5), *range(s - 5)] * rows)]}
        ones = {"attention_mask": ["I64", [rows, s], i64(*[1] * rows * s)]}
        grads = ("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out")
        hashes = []
        for batch in (places, {**places, **ones}):
            tensor_files.write(folder / "batch.safetensors", {"input_ids": ids, **batch})
            hashes.append(self.result(*grads, "--quiet")["outputs_hash"])
            self.assertIn("attention crosses these places, as transformers' GPT-OSS", Done(grads).err)
        self.assertEqual(*hashes)

    def test_what_compares_nothing_refuses_a_plan_that_declares_what_is_not_there(self):
        """On two ranks a loss of 5.705 where the model has 5.784, with exit status 0, was what grads gave."""
        folder = self.golden("llama-gqa-tiny")
        plan = self.put("plan.json", {"rules": [{"modules": "*.self_attn", "style": "prepare", "input": [["P(sum)", "R"]]}]})
        grads = ("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out", "--plan", plan)
        train = ("train", folder, "--data", GOLDEN / "make_golden.py", "--steps", "1", "--batch", "1", "--seq", "8",
                 "--plan", plan)
        for command in (grads, train):
            self.refused(*command, "--tp", "2", says="the input that arrives of model.layers.0.self_attn is declared P(sum)")
            self.passes(*command)


class Others(CommandTest):
    def test_bugs_lists_every_fault(self):
        result = self.result("bugs")
        self.assertEqual([fault["name"] for fault in result["faults"]], FAULTS)
        self.assertTrue(all(fault["text"] for fault in result["faults"]))
        self.assertIn(f"{len(FAULTS)} faults", self.passes("bugs").out.strip().splitlines()[-1])
        self.refused("bugs", "--curves", says="--run")
        self.refused("bugs", "--rnu", says="--run")

    def test_bugs_explains_a_fault(self):
        for fault in self.result("bugs")["faults"]:
            name = fault["name"]
            said = self.passes("bugs", name).out
            self.assertTrue(said.startswith(f"{name}: {fault['text']}\n\n"))
            self.assertIn(fault["explained"], " ".join(said.split()))
            self.assertRegex(fault["explained"], r"(?s)^.{40,}[.)]$")
            self.assertTrue(said.endswith(f"\nanyrank check --inject {name} runs its case: {fault['case']}\n"), said)
        self.assertEqual(self.result("bugs", name)["faults"], [fault])
        self.refused("bugs", "zero_gather_mising", says="did you mean 'zero_gather_missing'")
        run = self.result("bugs", "zero_gather_missing", "--run")
        self.assertEqual((run["result"], [one["name"] for one in run["faults"]]), ("same", ["zero_gather_missing"]))

    def test_page_has_every_fault(self):
        old = fault_table.PAGE.read_text(encoding="utf-8")
        texts = {fault["name"]: fault["text"] for fault in self.result("bugs")["faults"]}
        self.assertEqual(old, fault_table.page(texts, fault_table.figures(), old),
                         "anyrank bugs --run --curves --json - | scripts/fault_table.py --write")

    def test_every_fault_is_documented(self):
        rows = re.findall(r"^(\w+)\t", (ROOT / "docs/evidence/sensitivity.tsv").read_text(encoding="utf-8"), re.MULTILINE)
        self.assertEqual(sorted(set(FAULTS) - set(rows)), [])
        readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
        self.assertIn(f"one of {len(FAULTS)} known faults", readme)

    # Most of a minute for what tests/verify/fault_test.c holds in more cases: among the long tests.
    @unittest.skipUnless(EXTENDED, "a long test")
    def test_bugs_run_catches_every_fault(self):
        path = self.folder / "bugs.json"
        done = self.passes("bugs", "--run", "--json", path, limit=900)
        self.assertEqual(done.out.strip().splitlines()[-1],
                         f"bugs: {len(FAULTS)} of {len(FAULTS)} faults are caught, and each of these layouts has the same bits "
                         "without them")
        result = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual([fault["name"] for fault in result["faults"]], FAULTS)
        self.assertEqual(result["result"], "same")
        for fault in result["faults"]:
            with self.subTest(fault=fault["name"]):
                self.assertTrue(fault["caught"] and fault["clean"])
                self.assertRegex(done.out, rf"(?m)^{fault['name']} .* caught ")
                if fault["name"] in ENDS:
                    self.assertIn(ENDS[fault["name"]], fault["error"])
                    continue
                self.assertIsNone(fault["error"])
                if fault["first_difference"] is None:
                    self.assertTrue(fault["call_cause"] and fault["call_difference"])
                    continue
                self.assertIn(fault["first_difference"]["pass"], ("init", "forward", "backward", "clip", "update"))
                self.assertTrue(fault["first_difference"]["hint"])

    def test_info(self):
        result = self.result("info")
        self.assertEqual((result["tool"], result["command"]), ("anyrank", "info"))
        for key in ("cpu", "blas", "cuda"):
            self.assertIn(key, result)

    def test_json_to_a_file_leaves_that_file_alone_behind(self):
        path = self.folder / "result.json"
        path.write_text("old", encoding="utf-8")
        self.passes("check", self.config(), "--tp", "2", *SMALL, "--json", path)
        self.assertEqual(json.loads(path.read_text(encoding="utf-8"))["result"], "same")
        self.assertEqual(sorted(os.listdir(self.folder)), ["model", "result.json"])


# --- options ------------------------------------------------------------------------------------------------------------


class Options(CommandTest):
    def test_unknown_ones_name_the_nearest(self):
        self.refused("check", "--bacth", "2", says=["--bacth", "did you mean --batch"])
        self.refused("check", "--inject", "column_dx_not_reducd", says="column_dx_not_reduced")
        self.refused("check", "llama-dmeo", says="llama-demo")
        self.refused("check", "--optimizer", "adm", says=["sgd, adam, adamw or muon", "did you mean adam?"])
        self.refused("check", "--numerics", "nativ", says="did you mean native?")
        self.refused("check", "--inject", "dx_not_reduced", says="did you mean 'column_dx_not_reduced'")
        done = self.refused("grads", "--sensitivity-of", "foo", says="expected f32, tf32")
        self.assertNotIn("did you mean", done.err)

    def test_an_option_that_is_given_twice_is_noted(self):
        done = run("check", self.config(), "--tp", "1", "--tp", "2", *SMALL)
        self.assertEqual((done.code, done.err), (0, "note: --tp is given more than once; the last counts\n"))
        self.assertIn("tp=2", done.out)

    def test_values_are_checked(self):
        model = self.config()
        for option, values in (
                ("--tp", ["0", "-1", "two", "2x", "99999999999999999999"]), ("--dp", ["0", "x"]), ("--cp", ["0", "two"]),
                ("--cp-inner", ["-1"]), ("--micro-batches", ["0"]), ("--batch", ["0"]), ("--seq", ["0", ""]),
                ("--seed", ["-1", "18446744073709551616"]), ("--threads", ["0"]), ("--timeout", ["nan", "0"]),
                ("--numerics", ["exactly"]), ("--mlp-order", ["column"]), ("--sweep", ["0", "-1"]),
                ("--steps", ["-1", "1.5"]), ("--clip", ["-1", "inf"]),
                ("--lr", ["-0.1", "nan"]), ("--dropout", ["-0.1", "1", "1.5"]), ("--weight-decay", ["-1"]),
                ("--betas", ["0.9", "0.9,1", "-0.1,0.9", "0.9,0.99,0.999", "nan,0.9"])):
            for value in values:
                with self.subTest(option=option, value=value):
                    self.refused("check", model, option, value, says=option)
        for option, value, says in (("--collectives", "rings", "ring"), ("--inject", "nothing", "nothing"),
                                    ("--optimizer", "foo", "sgd, adam, adamw or muon"), ("--optimizer", "Adam", "adam")):
            self.refused("check", model, option, value, says=says)
        self.refused("check", model, "--tp", says="--tp")
        self.refused("check", model, "--optimizer", "sgd", "--momentum", "1", says="momentum")
        self.refused("check", model, "--momentum", "0.9", says=["--momentum", "sgd"])
        self.refused("check", model, "--optimizer", "sgd", "--nesterov", says="momentum")
        self.refused("check", model, "--optimizer", "sgd", "--betas", "0.9,0.9", says=["--betas", "adam"])
        self.refused("check", model, "--sp", says=["--sp", "--tp"])
        self.refused("check", model, "--dp", "2", "--sp", says=["--sp", "--tp"])
        self.refused("check", model, "--tp", "2", "--keep-gathered", says=["--keep-gathered", "--sp"])
        self.refused("check", model, "--tp", "2", "--zero", "1", says=["give --dp N or --cp N too"])
        self.refused("check", model, "--forward-first", says=["--forward-first", "--micro-batches"])
        for option in (("--tp", "2"), ("--dp", "2"), ("--cp", "2"), ("--micro-batches", "2")):
            self.refused("check", model, "--sweep", "4", *option, says="--sweep")
        for option, says in ((("--cp-inner", "2"), ["--cp-inner", "--cp N"]),
                             (("--zigzag",), ["--zigzag", "--cp N"]),
                             (("--cp", "2", "--cp-inner", "2", "--zigzag"), "which has 2 / 2 = 1 here"),
                             (("--sweep", "--text", "none"), "none"), (("--seq", "1"), "has no target"),
                             (("--seq", "100000000"), "longer than the"),
                             (("--cp", "4", "--cp-inner", "3"), "divides 4"),
                             (("--cp", "3", "--seq", "8"), "use a multiple of 3"),
                             (("--documents", "9", "--seq", "8"), "use at most 8"),
                             (("--cp", "4", "--zigzag", "--seq", "12"), "8 chunks of a zigzag over 4 places; use a "
                              "multiple of 8"),
                             (("--cp", "2", "--tp", "4", "--sp", "--seq", "12"), "use a multiple of 8")):
            with self.subTest(option=option):
                self.refused("check", model, *option, says=says)
        self.refused("check", model, "another", says="another")
        self.refused("check", "--sweep", "abc", says=["'abc': no such folder", "--sweep takes a number of ranks"])
        self.refused("grads", model, "--input", "x", says="--out")
        self.refused("grads", model, "--out", "x", says="--input")
        self.refused("grads", "--out", "x", says="MODEL")
        self.refused("grads", model, "--block", "x", "--out", "x", says="--block")

    def test_no_colour_codes_whatever_the_terminal(self):
        environment = {"TERM": "xterm-256color", "CLICOLOR_FORCE": "1"}
        self.passes("check", self.config(), "--tp", "2", *SMALL, environment=environment)
        self.passes("check", self.config(), "--tp", "2", *SMALL, "--inject", "init_local_fan", code=1,
                    environment=environment)


# --- bad input ----------------------------------------------------------------------------------------------------------


class Configs(CommandTest):
    def check_refused(self, folder, says, *more):
        return self.refused("check", folder, *(more or ("--tp", "2")), "--batch", "1", "--seq", "4", says=says)

    # Without ZeRO a rank's experts are on no other rank of its dp group, and the norm adds them up all the same.
    def test_experts_apart_have_the_bits_of_one_rank(self):
        for layout in ("--dp 2 --ep 2", "--tp 2 --sp --etp 1 --ep 2", "--tp 2 --sp --etp 1 --dp 2",
                       "--tp 2 --sp --etp 1 --dp 2 --zero 3 --dp-replicate 2"):
            self.passes("check", "mixtral-demo", *layout.split(), "--steps", "2", "--batch", "2", "--seq", "8",
                        "--skip-f64", "--strict-predictions")

    def test_a_rounding_that_chooses_other_experts_is_refused(self):
        for precision in "tf32", "bf16":
            self.refused("check", "mixtral-demo", "--numerics", "native", "--precision", precision,
                         says=f"in {precision}: rounding so coarse chooses other experts")

    def test_absurd_sizes_are_refused_before_anything_is_allocated(self):
        for changes in ({"hidden_size": 1 << 31}, {"vocab_size": 1 << 31}, {"intermediate_size": 1 << 31},
                        {"num_hidden_layers": 1 << 31}, {"hidden_size": 1 << 31, "num_attention_heads": 1 << 31,
                                                         "num_key_value_heads": 1 << 31},
                        {"hidden_size": 1 << 40, "vocab_size": 1 << 40}, {"max_position_embeddings": 1 << 31},
                        {"head_dim": 1 << 31}, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1 << 30},
                        {"hidden_size": 1 << 20, "intermediate_size": 1 << 22,
                                                "num_hidden_layers": 100}):
            with self.subTest(changes=changes):
                folder = self.config(**changes)
                if changes == {"max_position_embeddings": 1 << 31}:
                    self.passes("check", folder, "--tp", "2", *SMALL)  # rotary: nothing is as long as that
                    continue
                self.check_refused(folder, "")
                self.refused("check", folder, says="")
        model = self.config(max_position_embeddings=1 << 40)
        for batch, seq in ((1_000_000_000, 1_000_000_000), (1_000_000_000, 4), (1, 1_000_000_000), (1, 1_000_000)):
            with self.subTest(batch=batch, seq=seq):
                self.refused("check", model, "--tp", "2", "--batch", batch, "--seq", seq, says="")
        self.refused("check", self.config(), "--seq", "33", says=["33", "32"])
        gpt2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_head": 4, "n_layer": 1,
                "n_positions": 1 << 40}
        self.check_refused(self.put("gpt2/config.json", gpt2).parent, "")


class Files(CommandTest):
    def input_refused(self, path, says):
        out = self.folder / "out"
        self.refused("grads", self.golden(), "--input", path, "--out", out, says=says)
        self.assertFalse(out.exists(), "a refused input leaves a folder behind")

    def test_no_result_replaces_what_is_read(self):
        config, batch = self.config() / "config.json", self.batch()
        for command in (("plan", config, "--gpus", "2", "--csv", config), ("check", config, *SMALL, "--json", config),
                        ("grads", self.golden(), "--input", batch, "--out", self.folder / "out", "--json", batch),
                        ("grads", self.golden(), "--input", batch, "--logprobs", batch)):
            with self.subTest(command=command):
                before = pathlib.Path(command[-1]).read_bytes()
                self.refused(*command, says=[f"{command[-2]} {command[-1]}: that is", "give the name of another file"])
                self.assertEqual(pathlib.Path(command[-1]).read_bytes(), before)

    def test_weights_that_are_not_read_are_named_by_every_command(self):
        folder = self.config()
        (folder / "pytorch_model.bin").write_bytes(b"PK\3\4archive/data.pkl")
        for command in (("check", folder, "--tp", "2", *SMALL), ("train", folder, "--steps", "1", "--batch", "2", "--seq", "8"),
                        ("grads", folder, "--input", self.batch(), "--out", self.folder / "out")):
            self.refused(*command, says=["pytorch_model.bin", "from_pretrained("])

    def test_fresh_weights_are_said_to_be_fresh(self):
        folder, out = self.config(vocab_size=512), self.folder / "out"
        grads = ("grads", folder, "--input", self.batch(), "--out", out)
        self.assertIn("fresh weights", self.passes(*grads).out)
        self.assertEqual(self.result(*grads)["weights"], "fresh")
        given = ("grads", self.golden(), "--input", GOLDEN / "gpt2-tiny/batch.safetensors", "--out", out)
        self.assertIn("weights of the folder", self.passes(*given).out)
        self.assertEqual(self.result(*given)["weights"], "folder")

    def batch(self):
        return tensor_files.write(self.folder / "ids.safetensors", {"input_ids": ["I64", [1, 4], i64(1, 2, 3, 4)]})

    def spoil(self, change):
        """The golden weights with one thing changed."""
        folder = self.golden()
        tensors = tensor_files.read(GOLDEN / "gpt2-tiny/model.safetensors")
        change(tensors)
        tensor_files.write(folder / "model.safetensors", tensors)
        return folder

    def test_weights_that_are_not_the_models(self):
        name = next(n for n in tensor_files.read(GOLDEN / "gpt2-tiny/model.safetensors") if "h.1.mlp.c_fc.weight" in n)

        def poke(value):
            def change(tensors):
                content = bytearray(tensors[name][2])
                content[40:44] = f32(value)
                tensors[name][2] = bytes(content)
            return change

        cases = [
            (lambda t: t.pop(name), [name, "missing"]),
            (lambda t: t.update({"extra.weight": ["F32", [1], f32(0.0)]}), "extra.weight"),
            (lambda t: t[name].__setitem__(1, t[name][1][::-1]), [name, "64", "256"]),
            (lambda t: t[name].__setitem__(1, [len(t[name][2]) // 4]), name),
            (lambda t: t[name].__setitem__(0, "I32"), [name, "I32"]),
            (lambda t: t[name].__setitem__(0, "U32"), [name, "U32"]),
            (poke(math.nan), [name, "NaN", "10"]),
            (poke(math.inf), [name, "infinity", "10"]),
            (poke(-math.inf), [name, "infinity"]),
            (lambda t: t.clear(), "missing"),
        ]
        for change, says in cases:
            with self.subTest(says=says):
                folder = self.spoil(change)
                self.refused("check", folder, "--tp", "2", "--batch", "1", "--seq", "4", says=says)
                self.refused("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out",
                             says=says)
        self.assertFalse((self.folder / "out").exists())

    def test_inputs_that_do_not_fit(self):
        path = self.folder / "input.safetensors"
        good = ["I64", [1, 4], i64(1, 2, 3, 4)]
        nan, inf = f32(*[math.nan] + [0.0] * 15), f32(*[0.0] * 15 + [math.inf])
        cases = [
            ({}, "input_ids"),
            ({"input_ids": ["I64", [4], i64(1, 2, 3, 4)]}, "input_ids"),
            ({"input_ids": ["I64", [0, 4], b""]}, "input_ids"),
            ({"input_ids": ["I64", [1, 0], b""]}, "input_ids"),
            ({"input_ids": ["F32", [1, 4], f32(1, 2, 3, 4)]}, ".safetensors: tensor 'input_ids' is F32, expected integers"),
            ({"input_ids": ["I64", [1, 4], i64(1, 256, 3, 4)]}, ["input_ids[0, 1]", "256"]),
            ({"input_ids": ["I64", [1, 4], i64(1, 2, 3, -1)]}, ["input_ids[0, 3]", "-1"]),
            ({"input_ids": ["I64", [1, 4], i64(1 << 62, 2, 3, 4)]}, "input_ids[0, 0]"),
            ({"input_ids": ["U64", [1, 4], struct.pack("<4Q", 1, 2, 3, (1 << 64) - 1)]}, "input_ids"),
            ({"input_ids": ["I64", [1, 65], i64(*range(65))]}, ["65", "64"]),
            ({"input_ids": good, "labels": ["I64", [1, 4], i64(1, 2, 300, 4)]}, ["labels[0, 2]", "300"]),
            ({"input_ids": good, "labels": ["I64", [1, 4], i64(1, -1, 3, 4)]}, ["labels[0, 1]", "-1"]),
            ({"input_ids": good, "labels": ["I64", [4], i64(1, 2, 3, 4)]}, "labels"),
            ({"input_ids": good, "labels": ["F32", [1, 4], f32(1, 2, 3, 4)]}, ["labels", "F32"]),
            ({"input_ids": good, "attention_mask": ["I64", [1, 4], i64(1, 1, 2, 0)]}, "attention_mask[0, 2]"),
            ({"input_ids": good, "attention_mask": ["F32", [1, 4], f32(1, 0.5, 1, 0)]}, "attention_mask[0, 1]"),
            ({"input_ids": good, "attention_mask": ["I64", [4], i64(1, 1, 1, 1)]}, "attention_mask"),
            ({"input_ids": good, "attention_mask": ["I64", [1, 5], i64(1, 1, 1, 1, 1)]}, "attention_mask"),
            ({"input_ids": good, "attention_mask": ["F32", [1, 1, 4, 4], nan]}, ["attention_mask", "NaN"]),
            ({"input_ids": good, "attention_mask": ["F32", [1, 1, 4, 4], inf]}, ["attention_mask", "inf"]),
            ({"input_ids": good, "attention_mask": ["F32", [2, 1, 2, 4], f32(*[0] * 16)]}, "attention_mask"),
            ({"input_ids": good, "attention_mask": ["I64", [1, 1, 4, 4], i64(*[0] * 16)]}, ["attention_mask", "I64"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [3], i32(1, 2, 4)]}, ["cu_seqlens", "from 1 to 4"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [3], i32(0, 2, 3)]}, ["cu_seqlens", "from 0 to 3", "4 tokens"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [3], i32(0, 2, 1 << 30)]}, ["cu_seqlens", "4 tokens"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [4], i32(0, 3, 2, 4)]}, ["cu_seqlens", "falls from 3 to 2"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [4], i32(0, -7, 2, 4)]}, ["cu_seqlens", "falls from 0 to -7"]),
            ({"input_ids": good, "cu_seqlens": ["I64", [1], i64(4)]}, ["cu_seqlens", "from 4 to 4"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [0], b""]}, ["cu_seqlens", "from 0 to 0"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [2, 2], i32(0, 4, 0, 4)]}, ["cu_seqlens", "[1, documents + 1]"]),
            ({"input_ids": good, "cu_seqlens": ["I32", [], i32(4)]}, "cu_seqlens"),
            ({"input_ids": good, "cu_seqlens": ["F32", [2], f32(0, 4)]}, ["cu_seqlens", "F32"]),
            ({"input_ids": ["I64", [2, 2], i64(1, 2, 3, 4)], "cu_seqlens": ["I32", [3], i32(0, 3, 4)]},
             ["cu_seqlens", "goes on from row 0"]),
            ({"input_ids": ["I64", [2, 2], i64(1, 2, 3, 4)], "cu_seqlens": ["I32", [2, 2], i32(0, 2, 0, 1)]},
             ["cu_seqlens[1]", "the 2 tokens"]),
            ({"input_ids": good, "cu_seq_lens_q": ["I32", [2], i32(0, 4)],
              "cu_seq_lens_k": ["I32", [3], i32(0, 1, 4)]}, ["cu_seq_lens_q", "cu_seq_lens_k", "differ"]),
            ({"input_ids": ["U8", [1, 1 << 26], bytes(1 << 26)]}, "64"),
        ]
        for tensors, says in cases:
            with self.subTest(says=says):
                tensor_files.write(path, tensors)
                out = self.folder / "out"
                self.refused("grads", self.golden(), "--input", path, "--out", out, says=says,
                             fast=len(tensors) != 1 or tensors.get("input_ids", [0, [0]])[1] != [1, 1 << 26])
                self.assertFalse(out.exists())

    def test_blocks_that_do_not_fit(self):
        block, out = self.folder / "block", self.folder / "out"
        shutil.copytree(GOLDEN / "block-mha", block)
        case = json.loads((block / "case.json").read_text(encoding="utf-8"))
        for change, says in (({"heads": 5}, "heads"), ({"heads": None}, "heads"), ({"hidden": "x"}, "hidden"),
                             ({"ffn": 1 << 40}, "ffn"), ({"seq": 17}, "'x'"), ({"activation": "tan"}, "tan"),
                             ({"eps": -1.0}, "eps"), ({"causal": 3}, "causal")):
            with self.subTest(change=change):
                self.put("block/case.json", {k: v for k, v in {**case, **change}.items() if v is not None})
                self.refused("grads", "--block", block, "--out", out, says=says)
        (block / "case.json").unlink()
        self.refused("grads", "--block", block, "--out", out, says="case.json")
        self.refused("grads", "--block", GOLDEN / "block-gqa", "--tp", "5", "--out", out, says="heads")
        self.refused("grads", "--block", GOLDEN / "block-mha", "--tp", "3", "--out", out, says="heads")
        self.assertFalse(out.exists())

    def test_texts_that_cannot_be_read(self):
        model, text = self.config(), self.folder / "text"
        text.write_bytes(b"")
        self.refused("check", model, "--text", text, says=["text", "empty"])
        self.refused("check", model, "--text", self.folder / "no", says="no")
        self.refused("check", model, "--text", self.folder, says=str(self.folder))
        self.refused("check", model, "--text", "/dev/zero", says="/dev/zero")
        os.mkfifo(self.folder / "pipe")
        self.refused("check", model, "--text", self.folder / "pipe", says="pipe")
        self.input_refused(self.folder / "pipe", "pipe")
        self.input_refused(self.folder, str(self.folder))
        self.input_refused(self.folder / "no", "no")
        if os.geteuid() != 0:
            text.write_bytes(b"abc")
            text.chmod(0)
            self.refused("check", model, "--text", text, says="text")
        text.chmod(0o600)
        text.write_bytes(b"x")
        self.passes("check", model, "--tp", "2", "--text", text, *SMALL)

    def test_places_that_cannot_be_written(self):
        folder, file = self.golden(), self.folder / "file"
        file.write_text("mine", encoding="utf-8")
        batch = folder / "batch.safetensors"
        for out in (file, file / "below", file / "below" / "deeper", "/proc/nothing", ""):
            with self.subTest(out=out):
                self.refused("grads", folder, "--input", batch, "--out", out, says=str(out), fast=False)
        for path in (file / "x.json", self.folder / "no" / "x.json", self.folder, "/proc/x.json"):
            with self.subTest(json=path):
                self.refused("check", self.config(), "--tp", "2", *SMALL, "--json", path, says=str(path))
        self.assertEqual(file.read_text(encoding="utf-8"), "mine")
        self.assertEqual(sorted(os.listdir(self.folder)), ["file", "gpt2-tiny", "model"])


if __name__ == "__main__":
    unittest.main()
