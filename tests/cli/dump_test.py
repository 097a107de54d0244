#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of what check and grads write of each rank: the folders, their names, and what verify says of them.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, Case  # noqa: E402
from tensor_files import packed, unpacked  # noqa: E402

SMALL = ("--batch", "2", "--seq", "8", "--skip-f64", "--strict-predictions", "--steps", "0")
# Of Llama with 4 query and 2 KV heads: copies of KV heads, sequences and samples shared out, a rank without any.
LAYOUTS = ("", "--tp 4", "--tp 2 --sp", "--dp 3 --tp 2", "--micro-batches 2 --forward-first", "--dp 2 --zero 1",
           "--tp 2 --micro-batches 2 --mlp-order row-column", "--pp 2 --dp 2 --tp 2", "--pp 2 --micro-batches 2 --cp 2")


def header(path):
    return unpacked(path)[0]


def say_otherwise(path, key, old, new):
    """Changes the text of a key of the header's metadata."""
    head, data = unpacked(path)
    assert old in head["__metadata__"][key]
    head["__metadata__"][key] = head["__metadata__"][key].replace(old, new)
    path.write_bytes(packed(head, data))


def names(path):
    return sorted(name for name in header(path) if name != "__metadata__")


def digest(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


class DumpTest(Case):
    def grads(self, *options, model="llama-gqa-tiny", out="out", code=0):
        golden = GOLDEN / model
        return self.result("grads", golden, "--input", golden / "batch.safetensors", "--out", self.folder / out, "-q",
                           *options, code=code)

    def verify(self, reference, other, *options, code=0):
        return self.result("verify", reference, other, "-q", *options, code=code)


class Grads(DumpTest):
    def test_activations_are_the_same_bytes_in_every_layout_and_the_ranks_make_them(self):
        digests, hashes = set(), set()
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                result = self.grads("--per-rank", "--activations", *layout.split())
                digests.add(digest(self.folder / "out/activations.safetensors"))
                hashes.add(result["outputs_hash"])
                self.assertEqual([pathlib.Path(file).name for file in result["files"]],
                                 ["outputs.safetensors", "grads.safetensors", "activations.safetensors", "ranks"])
                told = self.verify(self.folder / "out/activations.safetensors", self.folder / "out/ranks")
                self.assertEqual((told["result"], told["tensors"], told["ranks"]),
                                 ("same", result["activations"], result["layout"]["world"]))
        self.assertEqual((len(digests), len(hashes)), (1, 1))

    def test_their_names_are_those_that_check_lists_in_its_order(self):
        for model in ("gpt2-tiny", "llama-mqa-tied-tiny"):
            self.grads("--activations", model=model)
            listed = self.passes("check", GOLDEN / model, *SMALL, "--list-tensors").splitlines()
            expected = [line.split()[0] for line in listed if line.startswith("  ") and ":" in line]
            written = header(self.folder / "out/activations.safetensors")
            self.assertEqual(sorted(expected), names(self.folder / "out/activations.safetensors"))
            order = json.loads(written["__metadata__"]["ANYRANK_PLACEMENT"])["order"]
            self.assertEqual(sorted(order), sorted(expected))
            forward = [name for name in expected if name.endswith((":fwd", ":bwd"))]
            self.assertEqual([name for name in order if name.endswith((":fwd", ":bwd"))], forward)

    def test_without_activations_the_ranks_have_weights_gradients_and_outputs(self):
        self.grads("--per-rank", "--tp", "2", model="gpt2-tiny")
        self.assertEqual(sorted(os.listdir(self.folder / "out")),
                         ["grads.safetensors", "model.json", "outputs.safetensors", "ranks"])
        held = names(self.folder / "out/ranks/rank-00000.safetensors")
        self.assertEqual({name.rsplit(":", 1)[1] for name in held}, {"init", "grad", "fwd"})
        outputs = ["lm_head:fwd", "loss:fwd", "transformer.drop:fwd", "transformer.h.0:fwd", "transformer.ln_f:fwd"]
        self.assertEqual([name for name in held if name.endswith(":fwd")], outputs)
        self.verify(self.folder / "out/grads.safetensors", self.folder / "out/ranks", "--only", "*:grad,*.weight,*.bias",
                    "--ignore", "*:init,*:fwd")

    def test_a_second_run_replaces_the_ranks_of_the_first(self):
        self.grads("--per-rank", "--tp", "4")
        self.grads("--per-rank", "--dp", "2")
        self.assertEqual(sorted(os.listdir(self.folder / "out/ranks")),
                         ["model.json", "rank-00000.safetensors", "rank-00001.safetensors"])
        facts = header(self.folder / "out/ranks/rank-00001.safetensors")["__metadata__"]
        self.assertEqual((facts["layout"], facts["numerics"], facts["num_key_value_heads"]), ("dp=2", "exact", "2"))
        self.assertEqual(sorted(os.listdir(self.folder / "out")),
                         ["grads.safetensors", "model.json", "outputs.safetensors", "ranks"])

    def test_packed_documents_are_named(self):
        result = self.folder / "documents"
        done = self.ran("check", GOLDEN / "llama-gqa-tiny", "--tp", 2, "--documents", 4, "--batch", 2, "--seq", 16,
                        "--steps", 2, "--skip-f64", "--strict-predictions", "--dump", result)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        (ranks,) = [path for path in result.iterdir() if path.is_dir()]
        of = [header(path)["__metadata__"]["cu_seqlens"] for path in (result / "reference.safetensors",
                                                                     ranks / "rank-00001.safetensors")]
        rows = json.loads(of[0])
        self.assertEqual(of[0], of[1])
        self.assertEqual(len(rows), 4)
        for row in rows:
            self.assertEqual((row[0], row[-1], sorted(set(row))), (0, 16, row))
        self.assertTrue(any(len(row) > 2 for row in rows), rows)

    def test_a_folder_with_something_else_in_it_stays_as_it_is(self):
        golden, ranks = GOLDEN / "gpt2-tiny", self.folder / "out/ranks"
        ranks.mkdir(parents=True)
        for name in ("mine.txt", "model.json", "rank-0.safetensors", "rank-00000.safetensors.part", "rank-00000-.safetensors"):
            with self.subTest(name=name):
                (ranks / name).write_text("mine", encoding="utf-8")
                self.refused("grads", golden, "--input", golden / "batch.safetensors", "--out", self.folder / "out",
                             "--per-rank", says=[name, str(ranks)])
                self.assertEqual(os.listdir(ranks), [name])
                (ranks / name).unlink()
        ranks.rmdir()
        ranks.write_text("a file", encoding="utf-8")
        self.refused("grads", golden, "--input", golden / "batch.safetensors", "--out", self.folder / "out",
                     "--per-rank", says=[str(ranks)])
        self.assertEqual(os.listdir(self.folder / "out"), ["ranks"])

    def test_what_a_killed_run_left_goes_with_the_next(self):
        """A rank's file, and half of one where the file system has no unnamed files."""
        self.grads("--per-rank")
        out, golden = self.folder / "out", GOLDEN / "llama-gqa-tiny"
        before, left = sorted(os.listdir(out)), out / "ranks.new"
        left.mkdir()
        (left / "rank-00003.safetensors").write_bytes((out / "ranks/rank-00000.safetensors").read_bytes())
        (left / ".anyrank-1-0.tmp").write_text("half", encoding="utf-8")
        held = os.open(left, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        self.refused("grads", golden, "--input", golden / "batch.safetensors", "--out", out, "--per-rank",
                     says=["another process writes there"])
        os.close(held)
        self.grads("--per-rank")
        self.assertEqual(sorted(os.listdir(out)), before)
        self.assertEqual(sorted(os.listdir(out / "ranks")), ["model.json", "rank-00000.safetensors"])

    def test_a_block_is_dumped_too_and_takes_tensor_and_context_parallel_ranks_alone(self):
        block = GOLDEN / "block-gqa"
        self.passes("grads", "--block", block, "--out", self.folder / "out", "--tp", "3", "--per-rank", "--activations")
        self.verify(self.folder / "out/activations.safetensors", self.folder / "out/ranks")
        for option in (("--dp", "2"), ("--micro-batches", "2"), ("--dp", "2", "--zero", "1"), ("--pp", "2")):
            with self.subTest(option=option):
                self.refused("grads", "--block", block, "--out", self.folder / "x", *option, says=["tensor-parallel"])
        self.assertFalse((self.folder / "x").exists())

    def test_a_fault_is_found_by_verify_in_the_ranks_that_have_it(self):
        self.grads("--activations", out="right")
        self.grads("--activations", "--per-rank", "--tp", "2", "--inject", "column_dx_not_reduced", out="wrong")
        told = self.verify(self.folder / "right/activations.safetensors", self.folder / "wrong/ranks", code=1)
        self.assertEqual(told["first"]["tensor"], "lm_head:bwd")
        self.assertEqual(told["first"]["cause"], "missing_all_reduce")
        self.assertIn("over tp", told["first"]["hint"])
        facts = header(self.folder / "wrong/ranks/rank-00000.safetensors")["__metadata__"]
        self.assertEqual(facts["fault"], "column_dx_not_reduced")
        self.verify(self.folder / "right/grads.safetensors", self.folder / "wrong/grads.safetensors", code=1)

    def test_the_stages_of_a_pipeline_make_one_model(self):
        self.grads("--activations", "--per-rank", "--pp", "2", model="gpt2-tiny", out="right")
        ranks = [self.folder / f"right/ranks/rank-0000{rank}.safetensors" for rank in range(2)]
        for held, layer, other in ((names(ranks[0]), 0, 1), (names(ranks[1]), 1, 0)):
            self.assertIn(f"transformer.h.{layer}:fwd", held)
            self.assertNotIn(f"transformer.h.{other}:fwd", held)
            self.assertIn("transformer.wte.weight:grad", held)  # tied: on both
        facts = header(ranks[1])["__metadata__"]
        self.assertEqual(facts["layout"], "pp=2 1f1b")
        self.assertIn('"mesh":[["pp",2],["dp",1],["tp",1]],"at":[1,0,0]', facts["ANYRANK_PLACEMENT"])
        # Each rank tells the order of its own stage; from one to the other the names lead.
        self.grads("--activations", "--per-rank", "--pp", "2", "--tp", "2", "--inject", "column_dx_not_reduced",
                   model="gpt2-tiny", out="wrong")
        told = self.verify(self.folder / "right/ranks", self.folder / "wrong/ranks", code=1)
        self.assertEqual(told["first"]["tensor"], "lm_head:bwd")
        for of, new, says in (('"at":[1,0,0]', '"at":[2,0,0]', "InvalidPlacement"),
                              ('"at":[1,0,0]', '"at":[0,0,0]', "InvalidPlacement"),
                              ('["pp",2]', '["pp",3]', "InvalidPlacement")):
            kept = ranks[1].read_bytes()
            say_otherwise(ranks[1], "ANYRANK_PLACEMENT", of, new)
            with self.subTest(said=new):
                self.refused("verify", self.folder / "right/activations.safetensors", self.folder / "right/ranks",
                             says=[says, "rank-00001"])
            ranks[1].write_bytes(kept)
        ranks[1].unlink()
        self.refused("verify", self.folder / "right/activations.safetensors", self.folder / "right/ranks",
                     says=["MissingShard", "no file of rank 1"])

    def test_faults_that_could_not_matter_are_refused_with_what_would_show_them(self):
        llama, gpt2 = GOLDEN / "llama-gqa-tiny", GOLDEN / "gpt2-tiny"
        for model, fault, layout, says in (
                (llama, "adam_step_not_synced", "--dp 2", "after the backward pass"),
                (llama, "zero_grad_not_recursive", "--tp 2", "second step"),
                (llama, "dropout_same_mask_in_shard", "--tp 2", "dropout"),
                (llama, "unused_set_empty", "--dp 2", "module"),
                (llama, "init_local_fan", "--tp 2", "these are read"),
                (llama, "embedding_tied_once", "", "tied"), (llama, "sp_position_grad_local", "--tp 2 --sp", "positions"),
                (llama, "gate_up_interleaved_wrong", "--tp 2", "q|k|v"), (llama, "bias_added_twice", "", "biases"),
                (llama, "column_dx_not_reduced", "--dp 2", "(--tp)"), (llama, "dp_group_missing", "--tp 2", "(--dp)"),
                (gpt2, "sp_norm_grad_local", "--tp 2", "(--tp, --sp)"),
                (llama, "kv_replica_grad_local", "--tp 2", "KV heads"),
                (llama, "accum_last_only", "--dp 2", "--micro-batches"),
                (llama, "saved_input_overwritten", "--micro-batches 2", "--forward-first"),
                (llama, "row_input_grad_not_gathered", "--tp 2", "row-column (--mlp-order)"),
                (llama, "bucket_reduced_twice", "--tp 2", "buckets")):
            with self.subTest(fault=fault):
                self.refused("grads", model, "--input", model / "batch.safetensors", "--out", self.folder / "out",
                             "--inject", fault, *layout.split(), says=[fault, says])
        self.assertFalse((self.folder / "out").exists())
        self.refused("grads", llama, "--input", llama / "batch.safetensors", "--out", self.folder / "out", "--inject",
                     "column_dx_not_reducd", says=["column_dx_not_reduced"])

    def test_native_runs_are_dumped_and_near(self):
        self.grads("--activations", out="exact")
        self.grads("--activations", "--per-rank", "--numerics", "native", "--tp", "2", out="native")
        self.verify(self.folder / "exact/activations.safetensors", self.folder / "native/ranks", code=1)
        self.verify(self.folder / "exact/activations.safetensors", self.folder / "native/ranks", "--rtol", "1e-3",
                    "--atol", "1e-4")


class Check(DumpTest):
    def check(self, *options, model="gpt2-tiny", code=0):
        done = self.passes("check", GOLDEN / model, *SMALL, "--dump", self.folder / "dump", "--json", "-", "-q",
                           *options, code=code)
        (told,) = json.loads(done)["models"]
        return told

    def test_moments_of_another_clip_factor_are_no_second_reduction(self):
        run = ("check", GOLDEN / "gpt2-tiny", *SMALL, "--steps", 1, "--dp", 2, "--lr", "1e-7", "-q", "--clip")
        for limit in 0.02, 0.04:  # and two ranks
            self.passes(*run, limit, "--dump", self.folder / str(limit))
        told = json.loads(self.passes("verify", self.folder / "0.02/reference.safetensors", self.folder / "0.04/dp2",
                                      "--rtol", "1e-4", "--atol", "1e-9", "--json", "-", code=1))
        self.assertEqual((told["first"]["tensor"], told["first"]["cause"]), ("transformer.wte.weight:m", "clip_factor"))

    def test_routes_are_whole_numbers_of_reference_and_ranks(self):
        model = self.folder / "mixtral"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 16, "hidden_size": 8,
            "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32, "hidden_act": "silu"}))
        self.check("--dp", "2", "--steps", "1", model=model)
        for path in "reference.safetensors", "dp2/rank-00000.safetensors":
            of = {name: one["dtype"] for name, one in header(self.folder / "dump" / path).items() if ".routes" in name}
            self.assertEqual((set(of.values()), bool(of)), ({"I32"}, True), path)

    def test_each_layout_has_a_folder_that_verify_calls_the_same(self):
        told = self.check("--sweep", "3")
        self.assertEqual(told["dump"], str(self.folder / "dump/reference.safetensors"))
        folders = [pathlib.Path(one["dump"]).name for one in told["runs"]]
        self.assertEqual(sorted(os.listdir(self.folder / "dump")),
                         sorted([*folders, "model.json", "reference.safetensors"]))
        self.assertLessEqual({"tp1", "tp2", "tp2-sp", "dp2", "dp2-zero1", "micro-batches2"}, set(folders))
        for one in told["runs"][::3]:
            with self.subTest(layout=one["dump"]):
                same = self.verify(told["dump"], one["dump"])
                self.assertEqual((same["tensors"], same["ranks"]), (one["tensors"], one["layout"]["world"]))

    def test_steps_are_told_apart_and_a_fault_is_first_where_the_check_has_it(self):
        told = self.check("--steps", "2", "--dp", "2", "--inject", "zero_grad_not_recursive", code=1)
        (one,) = told["runs"]
        self.assertEqual(one["first_difference"]["step"], 2)
        different = self.verify(told["dump"], one["dump"], code=1)
        self.assertEqual(different["first"]["tensor"], one["first_difference"]["tensor"] + "@2")

    def test_a_dump_alone_names_what_the_ranks_share(self):
        for fault, layout, cause, says in (
                ("column_dx_not_reduced", "--tp 2", "missing_all_reduce", "over tp"),
                ("dp_averaged_again", "--dp 2 --cp 2", "averaged_again", "1/4")):
            told = self.check(*layout.split(), "--inject", fault, code=1)
            first = self.verify(told["dump"], told["runs"][0]["dump"], code=1)["first"]
            with self.subTest(fault=fault):
                self.assertEqual(first["cause"], cause, first["hint"])
                self.assertIn(says, first["hint"])

    def test_native_dumps_say_what_rounding_may_do(self):
        told = self.check("--numerics", "native", "--tp", "2")
        allowed = self.folder / "dump/allowed.safetensors"
        self.verify(told["dump"], told["runs"][0]["dump"], "--sensitivity", allowed)
        self.check("--tp", "2")
        self.assertFalse(allowed.exists())

    def test_what_the_run_was_is_written_beside(self):
        told = self.check("--micro-batches", "2", "--tp", "2", "--steps", "2", "--optimizer", "adamw", "--lr", "0.01")
        (one,) = told["runs"]
        runs = [json.loads((pathlib.Path(path) / "model.json").read_text(encoding="utf-8"))
                for path in (self.folder / "dump", one["dump"])]
        for run in runs:
            self.assertEqual((run["format"], run["version"], run["by"]), ("anyrank model", 1, "anyrank"))
            self.assertEqual((run["config"]["config"]["name"], run["config"]["run"]["seq"]), ("gpt2-tiny", 8))
            (optimizer,) = run["optimizers"]
            self.assertEqual((optimizer["class"], optimizer["groups"][0]["options"]["lr"]), ("adamw", 0.01))
            self.assertEqual(run["learning_rates"], {"1": [[0.01]], "2": [[0.01]]})
            self.assertEqual(run["ranks"]["steps"], [2] * run["world"])
        self.assertEqual([(run["world"], run["ranks"]["micro_batches"]) for run in runs], [(1, [1]), (2, [2, 2])])
        self.assertEqual(runs[1]["mesh"]["tp"], 2)
        self.grads("--per-rank", "--tp", "2")
        runs = [json.loads((self.folder / "out" / path / "model.json").read_text(encoding="utf-8"))
                for path in (".", "ranks")]
        self.assertEqual(runs[0], runs[1])
        self.assertEqual((runs[0]["mesh"]["tp"], "optimizers" in runs[0]), (2, False))

    def test_a_file_of_that_name_that_is_somebodys_stays(self):
        (self.folder / "out").mkdir()
        (self.folder / "out/model.json").write_text("{}", encoding="utf-8")
        self.grads()
        self.assertEqual((self.folder / "out/model.json").read_text(encoding="utf-8"), "{}")

    def test_the_text_names_what_was_written(self):
        out = self.passes("check", GOLDEN / "gpt2-tiny", *SMALL, "--tp", "2", "--dump", self.folder / "dump")
        self.assertIn(str(self.folder / "dump/reference.safetensors"), out)
        self.assertIn(str(self.folder / "dump/tp2"), out)

    def test_what_is_in_the_way_or_makes_no_run_is_refused(self):
        dump = self.folder / "dump"
        dump.mkdir()
        (dump / "mine.txt").write_text("mine", encoding="utf-8")
        self.refused("check", GOLDEN / "gpt2-tiny", *SMALL, "--dump", dump, says=["mine.txt", str(dump)])
        self.assertEqual(os.listdir(dump), ["mine.txt"])
        self.refused("check", GOLDEN / "gpt2-tiny", *SMALL, "--list-tensors", "--dump", self.folder / "x",
                     says=["--list-tensors"])
        self.refused("check", "--inject", "unused_set_empty", "--dump", self.folder / "x", says=["--dump", "module"])
        self.refused("check", GOLDEN / "gpt2-tiny", *SMALL, "--dump", self.folder / "no/such/folder", says=["no/such"])
        self.assertEqual(os.listdir(self.folder), ["dump"])


if __name__ == "__main__":
    unittest.main()
