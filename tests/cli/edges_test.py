#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check and grads at the edges: names that are not UTF-8, options that meet, masks of heads, memory by hand.
"""

import json
import math
import os
import pathlib
import random
import re
import resource
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import command  # noqa: E402
import tensor_files  # noqa: E402

GOLDEN = command.GOLDEN / "llama-gqa-tiny"
CONFIG = (GOLDEN / "config.json").read_bytes()
SMALL = ["--tp", "2", "--batch", "1", "--seq", "4", "--skip-f64", "--strict-predictions"]


def run(*arguments, **options):
    return command.run(*arguments, text=False, **options)


class EdgesTest(command.Case):
    def setUp(self):
        super().setUp()
        self.folder = os.fsencode(self.folder)

    def model(self, name):
        path = os.path.join(self.folder, name)
        os.mkdir(path)
        with open(os.path.join(path, b"config.json"), "wb") as file:
            file.write(CONFIG)
        return path

    def test_the_json_of_check_holds_every_run_whatever_the_folder_is_called(self):
        names = [(b"plain", "plain"), ("\u00e9\u4e16\U0001f600".encode(), "\u00e9\u4e16\U0001f600"),
                 (b"a\xffb\xc3", "a?b?"), (b"\xe0\x80\xaf\xed\xa0\x80\xf5x", "???????x")]
        for name, expected in names:
            with self.subTest(name=name):
                done = run("check", self.model(name), *SMALL, "--json", "-")
                self.assertEqual(done.returncode, 0, done.stderr)
                models = json.loads(done.stdout)["models"]
                self.assertEqual([model["name"] for model in models], [expected])
                dumped = run("check", os.path.join(self.folder, name), *SMALL, "--dump", os.path.join(self.folder, b"d"))
                self.assertEqual(dumped.returncode, 0, dumped.stderr)
                self.assertEqual(len(models[0]["runs"]), 1)

    def test_one_of_a_thing_has_no_plural(self):
        path = self.model(b"one")
        sizes = dict(json.loads(CONFIG), vocab_size=4, hidden_size=2, intermediate_size=1, num_hidden_layers=1,
                     num_attention_heads=1, num_key_value_heads=1, head_dim=2)
        pathlib.Path(os.fsdecode(path), "config.json").write_text(json.dumps(sizes))
        small = ["--batch", "1", "--seq", "2"]
        for line in (["check", "--steps", "0", "--gradcheck"], ["check", "--steps", "1", "--memory"],
                     ["check", "--list-tensors"], ["check", "--micro-batches", "2"], ["check", "--pp", "2"],
                     ["plan", "--flow", "--tp", "2"], ["plan", "--pp", "2"], ["plan", "--gpus", "1"], ["lint"]):
            done = run(line[0], path, *small, *line[1:])
            self.assertNotRegex(done.stdout + done.stderr, rb"(?<![-.,\dx] )(?<![-.,\d])\b1 (?!has|is|was|as)[a-z-]+s\b",
                                line)

    def test_a_small_stack_is_enough(self):
        line = ["sh", "-c", 'ulimit -s 128; exec "$0" "$@"', str(command.COMMAND)]
        for arguments in (["check", str(GOLDEN), *SMALL, "--cluster", "h100"], ["plan", "llama-3-8b", "--gpus", "8"]):
            done = command.start([*line, *arguments])
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_threads_sleep_while_they_wait_unless_the_user_chose(self):
        bare = {name: os.environ[name] for name in os.environ if not name.startswith(("OMP_", "GOMP_"))}
        for own, last in (({}, b"4000"), ({"GOMP_SPINCOUNT": "7"}, b"7")):
            shown = command.start([str(command.COMMAND), "--version"], text=False,
                                  env={**bare, **own, "OMP_DISPLAY_ENV": "verbose"}).stderr
            counts = re.findall(rb"GOMP_SPINCOUNT = '(\d+)'", shown)  # of each start; another runtime has none
            self.assertEqual(counts[-1:], [last] if counts else [], shown)

    def test_a_name_cut_within_a_character_is_still_a_name(self):
        for length in range(58, 64):
            with self.subTest(length=length):
                done = run("check", self.model(b"x" * length + "\u00e9".encode() * 4), *SMALL, "--json", "-")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(len(json.loads(done.stdout)["models"]), 1)

    def test_the_json_of_grads_names_its_files_whatever_they_are_called(self):
        done = run("grads", str(GOLDEN), "--input", str(GOLDEN / "batch.safetensors"), "--out",
                   os.path.join(self.folder, b"out\xff"), "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        files = json.loads(done.stdout)["files"]
        self.assertEqual([file.rsplit("/", 2)[1:] for file in files],
                         [["out?", "outputs.safetensors"], ["out?", "grads.safetensors"]])

    def test_a_given_order_of_the_mlp_stands_beside_a_fault(self):
        done = run("check", "--inject", "column_dx_not_reduced", "--mlp-order", "row-column", *SMALL[2:], "--steps", "0",
                   "--json", "-")
        given = json.loads(done.stdout)["models"][0]["runs"][0]["bytes"]["predicted"]
        done = run("check", "llama-demo", *SMALL, "--steps", "0", "--mlp-order", "row-column", "--json", "-")
        self.assertEqual(json.loads(done.stdout)["models"][0]["runs"][0]["bytes"]["predicted"], given)

    def test_the_memory_of_a_rank_is_what_it_holds(self):
        c = json.loads(CONFIG)
        h, layers, vocab, ffn = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"], c["intermediate_size"]
        d = c.get("head_dim") or h // c["num_attention_heads"]
        q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
        cut = 2 * vocab * h + layers * (2 * q * h + 2 * kv * h + 3 * ffn * h)
        whole = (2 * layers + 1) * h
        self.assertFalse(c["tie_word_embeddings"])
        peaks = []
        for ranks in (1, 2):
            done = run("check", self.model(b"m%d" % ranks), "--tp", str(ranks), *SMALL[2:], "--json", "-")
            run_of = json.loads(done.stdout)["models"][0]["runs"][0]
            self.assertEqual(run_of["peak_bytes_per_rank"]["weights"], 4 * (cut // ranks + whole))
            # A complete gradient has 4 bytes an element, those of two buckets, while terms are added, 17.
            open_bytes = run_of["peak_bytes_per_rank"]["gradients"] - 4 * (cut // ranks + whole)
            self.assertEqual(open_bytes % 13, 0)
            self.assertTrue(0 < open_bytes <= 13 * (cut // ranks + whole), open_bytes)
            self.assertEqual(run_of["peak_bytes_per_rank"]["optimizer"], 8 * (cut // ranks + whole))
            self.assertEqual(run_of["peak_bytes_per_rank"]["buckets"], 0)
            stored = run_of["peak_bytes_per_rank"]["activations_stored"]
            self.assertTrue(0 < stored <= run_of["peak_bytes_per_rank"]["activations_peak"])
            # Of the gradients' norm one rank adds up both sums: 12 bytes a step.
            share, counted = run_of["bytes"]["per_rank_max"] * ranks, run_of["bytes"]["counted"]
            self.assertTrue(counted <= share <= counted + 3 * 12 * ranks, (share, counted))
            peaks.append(run_of["peak_bytes_per_rank"]["activations_peak"])
            # At the end of the forward pass the logits and each norm's output and input are there.
            self.assertGreater(peaks[-1], 4 * 4 * (vocab // ranks + 2 * (2 * layers + 1) * h))
        self.assertLess(peaks[1], peaks[0])

    def test_bits_that_are_nan_on_one_rank_already_are_vacuous(self):
        # Rows of zeros, and no eps to divide by.
        zero = dict(json.loads(CONFIG), rms_norm_eps=0.0, initializer_range=0.0)
        path = self.model(b"zero")
        pathlib.Path(os.fsdecode(path), "config.json").write_text(json.dumps(zero))
        text = run("check", path, *SMALL, "--steps", "0")
        self.assertEqual(text.returncode, 1, text.stderr)
        self.assertIn(b"that holds a NaN or an infinity is model.layers.0.input_layernorm:fwd", text.stdout)
        self.assertIn(b"check: VACUOUS in ", text.stdout.splitlines()[-1])
        result = json.loads(run("check", path, *SMALL, "--steps", "0", "--json", "-").stdout)
        one = result["models"][0]
        self.assertEqual((result["result"], one["runs"][0]["result"]), ("vacuous", "vacuous"))
        self.assertEqual(one["first_nan"], "model.layers.0.input_layernorm:fwd")
        self.assertEqual({key: one["vacuous"][key] for key in ("tensor", "pass", "step", "index", "value")},
                         {"tensor": one["first_nan"], "pass": "forward", "step": 1, "index": [0, 0, 0], "value": "NaN"})
        self.assertEqual(one["vacuous"]["elements_empty"], one["vacuous"]["elements"])
        faulty = json.loads(run("check", path, *SMALL, "--steps", "0", "--inject", "init_local_fan", "--json", "-").stdout)
        self.assertIn(faulty["result"], ("different", "vacuous"))
        self.assertEqual(one["weights"], "fresh")
        clean = json.loads(run("check", self.model(b"clean"), *SMALL, "--json", "-").stdout)["models"][0]
        self.assertIsNone(clean["first_nan"])
        self.assertIsNone(clean["vacuous"])

    def test_an_unknown_exact_path_is_refused_before_the_work(self):
        os.environ["ANYRANK_EXACT_PATH"] = "fastest"
        try:
            done = run("check", self.model(b"m"), *SMALL)
        finally:
            del os.environ["ANYRANK_EXACT_PATH"]
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"ANYRANK_EXACT_PATH is 'fastest'", done.stderr)
        self.assertEqual(done.stdout, b"")

    def test_an_additive_mask_may_differ_by_head(self):
        heads, s = json.loads(CONFIG)["num_attention_heads"], 4
        draw = random.Random(1)
        plane, other = ([draw.uniform(-2, 0) if i % s <= i // s else -math.inf for i in range(s * s)] for _ in range(2))
        masks = {"one for all": (1, plane), "the same for each": (heads, plane * heads),
                 "another for the last": (heads, plane * (heads - 1) + other)}
        for ranks in (1, 2):
            hashes = {}
            for what, (n, values) in masks.items():
                path = os.path.join(self.folder, b"batch.safetensors")
                tensor_files.write(os.fsdecode(path), {
                    "input_ids": ("I64", [1, s], struct.pack(f"<{s}q", *range(s))),
                    "attention_mask": ("F32", [1, n, s, s], struct.pack(f"<{len(values)}f", *values))})
                done = run("grads", str(GOLDEN), "--input", path, "--out", os.path.join(self.folder, b"out"), "--tp",
                           str(ranks), "--json", "-")
                self.assertEqual(done.returncode, 0, done.stderr)
                hashes[what] = json.loads(done.stdout)["outputs_hash"]
            self.assertEqual(hashes["one for all"], hashes["the same for each"])
            self.assertNotEqual(hashes["one for all"], hashes["another for the last"])

    def test_a_tied_head_in_the_file_is_the_embedding(self):
        for golden, prefixes in (("llama-mqa-tied-tiny", ("model.embed_tokens.weight",)),
                                 ("gpt2-tiny", ("transformer.wte.weight", "wte.weight"))):
            given = tensor_files.read(GOLDEN.parent / golden / "model.safetensors")
            embedding = next(name for name in prefixes if name in given)
            config = (GOLDEN.parent / golden / "config.json").read_bytes()
            dtype, shape, values = given[embedding]
            last = struct.unpack_from("<I", values, len(values) - 4)[0]
            cases = {"equal": ((dtype, shape, values), 0, b""),
                     "last bit": ((dtype, shape, values[:-4] + struct.pack("<I", last ^ 1)), 1, b"at element"),
                     "shape": ((dtype, shape[::-1], values), 1, b"has shape")}
            for what, (head, status, message) in cases.items():
                with self.subTest(golden=golden, what=what):
                    path = self.model(f"{golden} {what}".encode())
                    with open(os.path.join(path, b"config.json"), "wb") as file:
                        file.write(config)
                    tensor_files.write(os.fsdecode(os.path.join(path, b"model.safetensors")),
                                       {**given, "lm_head.weight": head})
                    done = run("check", path, "--tp", "1", *SMALL[2:])
                    self.assertEqual(done.returncode == 0, status == 0, done.stderr)
                    self.assertIn(message, done.stderr)
                    if what == "last bit":
                        self.assertIn(b"'lm_head.weight'", done.stderr)
                        self.assertIn(embedding.encode(), done.stderr)

    def test_files_that_belong_together_come_together(self):
        """A file may have as many bytes as the first of the two needs: the second fails and both old ones stay."""
        out = os.path.join(self.folder, b"out")
        names = (b"outputs.safetensors", b"grads.safetensors")

        def grads(prepare=None):
            return run("grads", GOLDEN, "--input", GOLDEN / "batch.safetensors", "--out", out, preexec_fn=prepare)

        self.assertEqual(grads().returncode, 0)
        size = [os.path.getsize(os.path.join(out, name)) for name in names]
        self.assertLess(size[0], size[1])
        for name in names:
            with open(os.path.join(out, name), "wb") as file:
                file.write(b"old " + name)
        done = grads(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size[0], size[0])))
        self.assertGreater(done.returncode, 0, done.stderr)
        self.assertIn(b"grads.safetensors", done.stderr)
        self.assertEqual(sorted(os.listdir(out)), sorted([*names, b"model.json"]))
        for name in names:
            with open(os.path.join(out, name), "rb") as file:
                self.assertEqual(file.read(), b"old " + name)


if __name__ == "__main__":
    unittest.main()
