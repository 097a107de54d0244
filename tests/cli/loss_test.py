#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of label smoothing and z-loss from outside, in check, train and grads, and of the order of buckets.
"""

import json
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, Case, run  # noqa: E402

MODEL = str(GOLDEN / "llama-labels-tiny")  # 4 heads, a vocabulary of 32
SMALL = ["--batch", "4", "--seq", "8"]
BOTH = ["--label-smoothing", "0.1", "--z-loss", "0.01"]


class LossTest(Case):
    def checked(self, *options, model=MODEL):
        return self.result("check", model, *SMALL,
                           "--skip-f64", "--strict-predictions", "--steps", "2", *options)["models"][0]

    def trained(self, *options):
        data = self.folder / "data"
        data.write_bytes(bytes(i * 7 % 32 for i in range(500)))
        return self.result("train", MODEL, *SMALL, "--data", data, *options)

    def test_rows_of_padding_add_no_nan_to_a_model_that_has_some(self):
        """A position's gradient is 0 on one rank, whose rows all dropped the element, and so do their copies."""
        folder = self.checkpoint_with("gpt2-demo", "mlp.c_fc.weight", 1e38)
        done = self.done("check", folder, "--dp", 2, "--batch", 2, "--seq", 8, "--steps", 1, "--padding", 1, "--dropout", 0.5,
                         "--clip", 0, "--json", "-", code=1)
        one = json.loads(done.stdout)["models"][0]["runs"][0]
        self.assertEqual((one["result"], one["first_difference"]), ("vacuous", None))

    def test_every_layout_has_the_bits_of_one_rank(self):
        losses = set()
        for options, world in ((["--label-smoothing", "0.1"], 2), (["--z-loss", "0.01"], 2), (BOTH, 3)):
            model = self.checked(*options, "--sweep", world)
            self.assertGreater(len(model["runs"]), 2 * world)
            for one in model["runs"]:
                self.assertEqual((one["result"], one["tensors_different"]), ("same", 0), one["layout"])
                self.assertEqual(one["bytes"]["counted"], one["bytes"]["predicted"], one["layout"])
                self.assertEqual(one["loss"], model["baseline"]["loss"])
            losses.add(tuple(model["baseline"]["loss"]))
        self.assertEqual(len(losses), 3)

    def test_rows_of_padding_change_no_bit(self):
        for model, options in ((MODEL, ("--sweep", "3", *BOTH)), (MODEL, ("--dp", "3", "--cp", "2", "--documents", "3")),
                               (GOLDEN / "experts/qwen2moe-tiny", ("--dp", "2", "--ep", "2", "--micro-batches", "2")),
                               (MODEL, ("--dp", "2", "--numerics", "native"))):
            plain, padded = (self.checked(*options, *more, model=model) for more in ((), ("--padding", "4")))
            self.assertEqual((plain["padding"], padded["padding"]), (0, 4))
            self.assertEqual(padded["baseline"]["gradients_hash"], plain["baseline"]["gradients_hash"])
            for one in padded["runs"]:
                self.assertEqual((one["result"], one["tensors_different"]), ("same", 0), one["layout"])

    def test_rows_of_padding_are_copies_under_dropout_too(self):
        """What is a number in a row is one in its copies: with an epsilon of 0, a row that dropout makes zeros is NaN
        behind a norm, and 0 times that would be in every gradient."""
        (self.folder / "config.json").write_text(json.dumps({
            "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 64, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 0, "max_position_embeddings": 64,
            "tie_word_embeddings": False, "attention_bias": True, "partial_rotary_factor": 0.5}))
        for model, options in ((self.folder, ("--dp", "2", "--tp", "2", "--dropout", "0.5")),
                               (self.folder, ("--micro-batches", "2", "--cp", "2", "--zigzag", "--dropout", "0.5")),
                               (GOLDEN / "experts/qwen2moe-tiny", ("--dp", "3", "--dropout", "0.3")),
                               (MODEL, ("--dp", "2", "--dropout", "0.3", "--optimizer", "muon", "--qk-clip", "0.01"))):
            one = self.checked("--padding", "5", *options, model=model)["runs"][0]
            self.assertEqual((one["result"], one["tensors_different"]), ("same", 0), one["layout"])

    def test_rows_of_padding_show_a_loss_of_each_ranks_own_mean(self):
        fault = ("check", MODEL, *SMALL, "--dp", "2", "--steps", "1", "--skip-f64", "--json", "-",
                 "--inject", "dp_mean_of_means")
        self.refused(*fault, says="acts where ranks have unlike numbers of targets")
        padded = json.loads(self.done(*fault, "--padding", "2", code=1).stdout)["models"][0]["runs"][0]
        self.assertEqual(padded["first_difference"]["tensor"], "loss:fwd")
        for options, says in ((("check", "stack-demo"), "a loss that is the sum of all outputs"),
                              (("check", "mixtral-demo", "--balance", "batch"), "losses of routers"),
                              (("check", "glm4-moe-demo", "--router-bias-update", "0.01"), "the update of routers' biases"),
                              (("check", MODEL, "--dump", self.folder / "dump"), "a dump")):
            self.refused(*options, "--padding", "2", "--dp", "2", says="rows of padding would count in " + says)

    def test_a_balance_has_its_default_weight_in_grads_too(self):
        folder = GOLDEN / "experts/qwen2moe-tiny"
        grads = ("grads", folder, "--input", folder / "batch.safetensors", "--out", self.folder / "out")
        hashes = [self.result(*grads, *more)["outputs_hash"]
                  for more in ((), ("--balance", "batch"), ("--balance", "batch", "--balance-weight", "0.01"))]
        self.assertEqual(hashes[1], hashes[2])
        self.assertNotEqual(hashes[0], hashes[1])
        self.refused(*grads, "--balance-weight", "1", says="--balance-weight 1 is that of --balance")

    def test_native_numerics_stay_within_the_allowance(self):
        for precision in ("f32", "bf16"):
            (one,) = self.checked(*BOTH, "--tp", "4", "--numerics", "native", "--precision", precision)["runs"]
            self.assertEqual(one["result"], "same")
            self.assertEqual(one["bytes"]["counted"], one["bytes"]["predicted"])

    def test_zeros_are_the_cross_entropy_alone(self):
        plain, zeros = (self.checked("--tp", "2", *more) for more in ([], ["--label-smoothing", "0", "--z-loss", "0"]))
        for key in ("bytes", "loss", "weights_hash", "collectives"):
            self.assertEqual(plain["runs"][0][key], zeros["runs"][0][key])
        smoothed = self.checked("--tp", "2", *BOTH)["runs"][0]
        self.assertEqual(smoothed["collectives"], plain["runs"][0]["collectives"])
        tokens, passes, steps, width = 4 * 8, 2, 2, 4 + 8
        self.assertEqual(smoothed["bytes"]["counted"] - plain["runs"][0]["bytes"]["counted"],
                         tokens * passes * steps * width)

    def test_gradients_agree_with_central_differences(self):
        report = self.checked(*BOTH, "--tp", "2", "--gradcheck")["gradcheck"]
        self.assertTrue(report["ok"])

    def test_text_and_json_tell_of_them(self):
        model = self.checked("--tp", "2", *BOTH)
        self.assertEqual((model["label_smoothing"], model["z_loss"]), (0.1, 0.01))
        done = run("check", MODEL, *SMALL, "--skip-f64", "--strict-predictions", "--tp", "2", "--steps", "1", *BOTH)
        self.assertIn(", clip 1, label smoothing 0.1, z-loss 0.01, exact numerics", done.stdout)
        trained = self.trained("--steps", "1", *BOTH)
        self.assertEqual((trained["label_smoothing"], trained["z_loss"]), (0.1, 0.01))

    def test_grads_takes_them_and_leaves_the_logits_alone(self):
        given = ("grads", MODEL, "--input", GOLDEN / "llama-labels-tiny/batch.safetensors", "--out")
        plain, smoothed, shared = (self.result(*given, self.folder / name, *more)
                                   for name, more in (("plain", []), ("smoothed", BOTH), ("shared", [*BOTH, "--tp", "4"])))
        self.assertEqual((smoothed["label_smoothing"], smoothed["z_loss"]), (0.1, 0.01))
        self.assertEqual((plain["label_smoothing"], plain["z_loss"]), (0.0, 0.0))
        self.assertNotEqual(plain["loss"], smoothed["loss"])
        self.assertEqual(shared["outputs_hash"], smoothed["outputs_hash"])

    def test_a_resumed_run_keeps_them(self):
        whole = self.trained("--steps", "4", *BOTH)
        self.trained("--steps", "4", *BOTH, "--tp", "2", "--stop-after", "2", "--save", self.folder / "run")
        resumed = self.result("train", "--resume", self.folder / "run", "--dp", "2")
        self.assertEqual(resumed["weights_hash"], whole["weights_hash"])
        self.assertEqual((resumed["note"], resumed["label_smoothing"], resumed["z_loss"]), (None, 0.1, 0.01))
        for option in ("label-smoothing", "z-loss"):
            other = self.result("train", "--resume", self.folder / "run", f"--{option}", "0")
            self.assertIn(f"another {option}: from step 3 on", other["note"])
            self.assertNotEqual(other["weights_hash"], whole["weights_hash"])

    def test_faults_of_the_loss_are_found(self):
        for fault in ("loss_parallel_no_max", "collective_size_mismatch"):
            with self.subTest(fault=fault):
                done = self.done("check", MODEL, "--tp", "2", *SMALL, "--steps", "1", "--skip-f64", *BOTH,
                                 "--inject", fault, code=1)

    def test_what_makes_no_sense_is_refused(self):
        for option, values in (("--label-smoothing", ("-0.1", "1", "1.5", "nan", "inf", "x", "")),
                               ("--balance-weight", ("0", "-1", "nan")),
                               ("--z-loss", ("-1", "-1e-9", "nan", "inf", "x", ""))):
            for value in values:
                with self.subTest(option=option, value=value):
                    self.refused("check", MODEL, option, value, says=option)
                    self.refused("train", MODEL, option, value, says=option)
        for option in ("--label-smoothing", "--z-loss"):
            self.refused("check", "stack-demo", "--tp", "2", option, "0.1", says="has no logits")
            self.refused("train", "stack-demo", option, "0.1", says="has no logits")
            self.refused("grads", "--block", GOLDEN / "block-mha", "--out", self.folder / "out", option, "0.1",
                         says="a block has no logits")
        self.assertFalse((self.folder / "out").exists())

    def test_a_checkpoint_says_which_loss(self):
        self.trained("--steps", "2", "--stop-after", "1", "--save", self.folder / "run", *BOTH)
        (path,) = (self.folder / "run").glob("step-*/training.json")
        self.assertEqual(json.loads(path.read_text())["loss"], {"label_smoothing": 0.1, "z_loss": 0.01})

    def test_buckets_in_either_order_have_the_same_bits(self):
        reverse, largest = (self.checked("--dp", "2", "--bucket-bytes", "1600", "--bucket-order", order)
                            for order in ("reverse", "largest-first"))
        self.assertEqual((reverse["ddp"]["order"], largest["ddp"]["order"]), ("reverse", "largest-first"))
        for key in ("result", "weights_hash"):
            self.assertEqual(reverse["runs"][0][key], largest["runs"][0][key])
        for of in (reverse, largest):  # other matrices share a bucket with vectors, whose sums take more bytes
            self.assertEqual(of["runs"][0]["bytes"]["counted"], of["runs"][0]["bytes"]["predicted"])
        self.assertNotEqual(reverse["runs"][0]["collectives"], largest["runs"][0]["collectives"])
        trained = [self.trained("--steps", "2", "--dp", "2", "--bucket-bytes", "1600", "--bucket-order",
                                order)["weights_hash"] for order in ("reverse", "largest-first")]
        self.assertEqual(trained[0], trained[1])
        self.refused("check", MODEL, "--dp", "2", "--bucket-order", "smallest", says="reverse or largest-first")


if __name__ == "__main__":
    unittest.main()
