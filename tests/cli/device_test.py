#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of --device: what ranks compute on the emulated device, whose memory the host cannot touch, has the bits that
the CPU gives, faults are found alike, and what is no device here is refused."""

import json
import os
import pathlib
import re
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, Case, run  # noqa: E402

SMALL = ("--batch", "2", "--seq", "8", "--steps", "2", "--skip-f64", "--strict-predictions")


def has_emulated():
    return "no emulated device" not in run("check", "stack-demo", "--tp", "2", *SMALL, "--device", "emulated").stderr


class DeviceTest(Case):
    def result(self, *arguments, device, code=0):
        result = super().result(*arguments, "--device", device, code=code)
        self.assertEqual(result["device"], device)
        return result

    def run_of(self, *arguments, device, code=0):
        (model,) = self.result("check", *arguments, device=device, code=code)["models"]
        (one,) = model["runs"]
        return one

    def alike(self, *arguments, keys, code=0):
        """What a run on each device says under these keys is one thing."""
        host, device = (self.run_of(*arguments, device=d, code=code) for d in ("cpu", "emulated"))
        for key in keys:
            self.assertEqual(device[key], host[key], key)
        return device


@unittest.skipUnless(has_emulated(), "this build has no emulated device")
class Emulated(DeviceTest):
    HASHES = ("result", "tensors", "tensors_different", "loss", "weights_hash", "gradients_hash", "bytes",
              "collectives")

    def test_every_tensor_of_every_layout_has_the_bits_of_one_rank(self):
        for model, *layout in (("llama-gqa-tiny", "--tp", "2", "--dp", "2", "--sp"),
                               ("gpt2-tiny", "--cp", "2", "--zigzag", "--zero", "1", "--micro-batches", "2"),
                               ("llama-mqa-tied-tiny", "--dp", "2", "--find-unused", "--bucket-bytes", "4096"),
                               ("gpt2-tiny", "--tp", "2", "--dropout", "0.1", "--optimizer", "sgd", "--momentum", "0.9")):
            with self.subTest(model=model, layout=layout):
                one = self.alike(GOLDEN / model, *SMALL, *layout, keys=self.HASHES)
                self.assertEqual((one["result"], one["tensors_different"]), ("same", 0))
                self.assertEqual(one["bytes"]["counted"], one["bytes"]["predicted"])

    def test_the_memory_of_experts_is_predicted_from_their_routes(self):
        for layout in (("--dp", "2"), ("--dp", "2", "--ep", "2")):
            with self.subTest(layout=layout):
                one = self.run_of("qwen2-moe-demo", "--steps", "1", "--batch", "4", "--seq", "48", "--skip-f64",
                                  "--recompute", "full", *layout, "--strict-predictions", device="emulated")
                self.assertEqual((one["result"], one["tensors_different"]), ("same", 0))

    def test_native_numerics_stay_within_the_allowance(self):
        for precision in ("f32", "bf16"):
            one = self.run_of(GOLDEN / "llama-gqa-tiny", *SMALL, "--tp", "2", "--dp", "2", "--numerics", "native",
                              "--precision", precision, device="emulated")
            self.assertEqual(one["result"], "same")
            self.assertGreater(one["max_ratio"], 0)

    def test_gradients_have_the_bits_of_the_cpu(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-device-") as folder:
            made = {}
            for device in ("cpu", "emulated"):
                out = pathlib.Path(folder) / device
                model = GOLDEN / "llama-gqa-tiny"
                made[device] = self.result("grads", model, "--input", model / "batch.safetensors", "--out", out, "--dp",
                                           "2", "--tp", "2", "--per-rank", "--activations", device=device)
                made[device]["content"] = {path.relative_to(out): path.read_bytes()
                                           for path in sorted(out.rglob("*.safetensors"))}
            for key in ("outputs_hash", "loss", "tensors", "activations", "bytes"):
                self.assertEqual(made["emulated"][key], made["cpu"][key], key)
            self.assertGreater(len(made["cpu"]["content"]), 3)
            self.assertEqual(made["emulated"]["content"], made["cpu"]["content"])

    def against(self, *options, code=0):
        """Gradients on the emulated device against the CPU's: the result, and what is left of temporary files."""
        model = GOLDEN / "llama-gqa-tiny"
        with tempfile.TemporaryDirectory(prefix="anyrank-device-") as folder:
            done = run("grads", model, "--input", model / "batch.safetensors", "--device", "emulated", "--against", "cpu",
                       "--json", f"{folder}/result.json", *options, env={**os.environ, "TMPDIR": folder})
            self.assertEqual(done.returncode, code, done.stderr)
            result = json.loads(pathlib.Path(folder, "result.json").read_text())
            pathlib.Path(folder, "result.json").unlink()
            left = {str(path.relative_to(folder)) for path in pathlib.Path(folder).glob("*/*/*")}
        return done, result, left

    def test_one_command_compares_gradients_with_the_cpu(self):
        done, result, left = self.against("--tp", "2")
        self.assertEqual(done.stdout.splitlines()[-1],
                         "grads: emulated against cpu: the same bits: 26 tensors, 149,825 elements")
        self.assertEqual((result["result"], result["device"], result["files"]), ("same", "emulated", []))
        self.assertEqual(left, set())
        told = result["against"]
        self.assertEqual((told["device"], told["result"], told["rule"]), ("cpu", "same", {"name": "bits"}))
        self.assertTrue(told["exact_numerics"])

    def test_native_gradients_are_compared_within_the_allowance(self):
        done, result, left = self.against("--numerics", "native", "--dp", "2")
        last = done.stdout.splitlines()[-1]
        self.assertRegex(last, "^grads: emulated against cpu: the same within what rounding of f32 explains: 26 tensors, ")
        self.assertLess(int(re.search(r" (\d+) tensors? bit for bit", last).group(1)), 26)  # two devices did compute
        self.assertEqual((result["against"]["rule"], left), ({"name": "sensitivity", "allows": "f32"}, set()))
        self.assertEqual((result["result"], result["against"]["result"]), ("same", "same"))

    def test_a_difference_from_the_cpu_is_found_and_its_files_are_kept(self):
        for numerics in ("exact", "native"):
            done, result, left = self.against("--tp", "2", "--inject", "column_dx_not_reduced", "--activations",
                                              "--numerics", numerics, code=1)
            self.assertRegex(done.stdout.splitlines()[-1],
                             r"^grads: emulated against cpu: DIFFERENT: \d+ of 139 tensors not .*; first lm_head:bwd: ")
            self.assertNotIn("--rtol", done.stdout)
            self.assertEqual((result["result"], result["against"]["result"]), ("different", "different"))
            self.assertEqual(result["against"]["first"]["tensor"], "lm_head:bwd")
            self.assertEqual({path.split("/", 1)[1] for path in left if "model.json" not in path},
                             {f"{device}/{name}.safetensors" for device in ("cpu", "emulated")
                              for name in ("outputs", "grads", "activations")} |
                             ({"cpu/allowed.safetensors"} if numerics == "native" else set()))

    def test_files_that_nobody_is_told_of_are_not_kept(self):
        model = GOLDEN / "llama-gqa-tiny"
        for options, code in ((("--input", model / "batch.safetensors", "--inject", "column_dx_not_reduced", "-q"), 1),
                              (("--input", model / "no-such-file"), 2)):
            with tempfile.TemporaryDirectory(prefix="anyrank-device-") as folder:
                done = run("grads", model, *options, "--tp", "2", "--device", "emulated", "--against", "cpu",
                           env={**os.environ, "TMPDIR": folder})
                self.assertEqual((done.returncode, done.stdout, os.listdir(folder)), (code, "", []), done.stderr)

    def test_both_runs_are_written_to_the_named_folder(self):
        model = GOLDEN / "llama-gqa-tiny"
        with tempfile.TemporaryDirectory(prefix="anyrank-device-") as folder:
            command = ("grads", model, "--input", model / "batch.safetensors", "--out", folder, "--against", "cpu", "--tp",
                       "2")
            first = self.result(*command, "--activations", "--per-rank", device="emulated")
            self.assertEqual([str(pathlib.Path(file).relative_to(folder)) for file in first["files"]],
                             ["emulated/outputs.safetensors", "emulated/grads.safetensors",
                              "emulated/activations.safetensors", "emulated/ranks"])
            self.assertEqual(first["against"]["tensors"], 139)
            # Activations of the first run are not compared in the second one, which has none.
            self.assertEqual(self.result(*command, device="emulated")["against"]["tensors"], 26)
            self.assertEqual(run("verify", f"{folder}/cpu", f"{folder}/emulated").returncode, 0)

    def test_training_ends_with_the_weights_of_the_cpu(self):
        trained = [self.result("train", GOLDEN / "gpt2-tiny", "--steps", "20", "--batch", "2", "--seq", "4", *layout,
                               device=device)
                   for device, layout in (("cpu", ()), ("emulated", ("--tp", "2", "--verify-every", "10")))]
        self.assertEqual(trained[0]["weights_hash"], trained[1]["weights_hash"])
        self.assertEqual(trained[0]["loss"], trained[1]["loss"])

    def test_weights_of_16_bits_have_the_loss_of_the_cpu(self):
        # A learned position's row is one of these, and is added to activations of 32 bits.
        losses = [self.result("train", "gpt2-demo", "--numerics", "native", "--storage", "bf16", "--steps", "1", "--batch",
                              "2", "--seq", "8", device=device)["loss"][0] for device in ("cpu", "emulated")]
        self.assertAlmostEqual(*losses, places=5)

    def test_a_checkpoint_goes_from_one_device_to_the_other(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-device-") as folder:
            options = ("train", "stack-demo", "--steps", "4", "--batch", "2", "--seq", "4")
            whole = self.result(*options, device="cpu")
            self.result(*options, "--dp", "2", "--zero", "1", "--stop-after", "2", "--save", folder, device="emulated")
            done = self.result("train", "--resume", folder, "--tp", "2", device="cpu")
            self.assertEqual(done["weights_hash"], whole["weights_hash"])

    def test_an_injected_fault_is_found_and_named_alike(self):
        for fault in ("column_dx_not_reduced", "dp_group_missing"):
            one = self.alike(GOLDEN / "llama-gqa-tiny", *SMALL, "--tp", "2", "--dp", "2", "--inject", fault, code=1,
                             keys=("result", "tensors_different", "first_difference"))
            self.assertEqual(one["result"], "different")

    def test_a_fault_of_the_transport_is_found_and_named_alike(self):
        one = self.alike(GOLDEN / "llama-gqa-tiny", *SMALL, "--tp", "2", "--net-fault",
                         "corrupt rank 1 collective 14 transfer 0 bit 30", code=1,
                         keys=("result", "tensors_different", "first_difference"))
        self.assertEqual(one["result"], "different")
        host, device = (self.run_of(GOLDEN / "llama-gqa-tiny", *SMALL, "--tp", "2", "--net-fault",
                                    "corrupt rank 1 collective 14 transfer 0 bit 30", "--verify-transfers", code=1,
                                    device=d)["error"]["message"].splitlines()[0] for d in ("cpu", "emulated"))
        self.assertIn("rank 1, transfer 0 from rank 0 in ", device)
        self.assertEqual(device, host)

    def test_the_ranks_do_compute_there(self):
        """Native sums are taken in the device's own order, so their last bits tell where they were taken."""
        model = GOLDEN / "llama-gqa-tiny"
        native = ("--tp", "2", "--numerics", "native")
        with tempfile.TemporaryDirectory(prefix="anyrank-device-") as folder:
            for command, key in ((("train", model, "--steps", "2", "--batch", "2", "--seq", "8"), "weights_hash"),
                                 (("grads", model, "--input", model / "batch.safetensors", "--out", folder),
                                  "outputs_hash")):
                host, device = (self.result(*command, *native, device=d)[key] for d in ("cpu", "emulated"))
                self.assertNotEqual(device, host)
        host, device = (self.run_of(model, *SMALL, *native, device=d)["weights_hash"] for d in ("cpu", "emulated"))
        self.assertNotEqual(device, host)

    def test_the_text_says_what_the_ranks_compute_on(self):
        done = run("check", GOLDEN / "llama-gqa-tiny", *SMALL, "--tp", "2", "--device", "emulated")
        self.assertIn("\ndevice: on the emulated device, the kernels of cuda on the host\n", done.stdout)
        self.assertNotIn("device:", run("check", GOLDEN / "llama-gqa-tiny", *SMALL, "--tp", "2").stdout)


class Refused(DeviceTest):
    def refused(self, *arguments, says):
        done = run(*arguments)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertIn(says, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_what_is_no_device(self):
        for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "emulated:1", "CUDA"):
            for command in ("check", "train"):
                self.refused(command, "stack-demo", "--device", wrong, says=f"'{wrong}': cpu, cuda (")

    def test_a_gpu_that_is_not_there(self):
        model = GOLDEN / "llama-gqa-tiny"
        grads = ("grads", model, "--input", model / "batch.safetensors")
        for command in (("check", "stack-demo"), ("train", "stack-demo"), (*grads, "--out", "/nonexistent/out"),
                        (*grads, "--against", "cpu")):
            done = run(*command, "--device", "cuda:1000")
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertRegex(done.stderr, "CUDA|GPU 1000")
        done = run(*grads, "--against", "cuda:1000")
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        self.assertRegex(done.stderr, "CUDA|GPU 1000")

    def test_what_cannot_be_compared_with_another_device(self):
        model = GOLDEN / "llama-gqa-tiny"
        grads = ("grads", model, "--input", model / "batch.safetensors", "--against")
        for options, says in ((("cpu",), "--against cpu is the device of the run itself"),
                              (("cpu", "--device", "cpu"), "--against cpu is the device of the run itself"),
                              (("emulated", "--device", "emulated"), "--against emulated is the device of the run itself"),
                              (("gpu",), "'gpu': cpu, cuda ("),
                              (("emulated", "--logprobs", "no-such.safetensors"), "--logprobs has neither"),
                              (("emulated", "--per-rank"), "DIR/cpu/ranks: give --out DIR too"),
                              (("emulated", "--stacked", "--numerics", "native"), "leave --stacked out")):
            self.refused(*grads, *options, says=says)

    def test_a_fault_of_a_module(self):
        self.refused("check", "--inject", "unused_set_empty", "--device", "emulated", says="--device is about a model's run")


if __name__ == "__main__":
    unittest.main()
