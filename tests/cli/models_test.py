#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests from outside of what a config.json of Hugging Face may say: notes for keys that nobody knows, refusals, and
checkpoints of the models of Llama's form."""

import json
import shutil
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import GOLDEN, Case, run  # noqa: E402

NOTE = "config.json: key '%s' is not known here and was ignored"


class ModelsTest(Case):
    def model(self, name, **keys):
        """A copy of a golden model with some keys of its config set."""
        to = self.folder / name
        shutil.copytree(GOLDEN / name, to)
        config = json.loads((to / "config.json").read_text())
        config.update(keys)
        (to / "config.json").write_text(json.dumps(config))
        return to

    def tokens(self):
        """Ids that a vocabulary of 40 has, as u16."""
        path = self.folder / "tokens.u16"
        path.write_bytes(b"".join(bytes([i * 7 % 40, 0]) for i in range(600)))
        return path

    def commands(self, model):
        return {"check": ("check", model, "--tp", 2, "--steps", 1, "--seq", 8, "--batch", 2,
                          "--strict-predictions"),
                "grads": ("grads", model, "--input", model / "batch.safetensors", "--out", self.folder / "out"),
                "train": ("train", model, "--data", self.tokens(), "--data-format", "u16", "--steps", 1, "--seq", 8,
                          "--batch", 2)}



class Buckets(ModelsTest):
    def test_blocks_for_further_tokens_are_packed_after_the_head(self):
        """Buckets of few bytes over three ranks: what a rank has of each is one element off where they are cut elsewhere."""
        for layout in (("--dp", "3", "--zero", "1"), ("--cp", "3", "--zero", "2"), ("--pp", "2", "--dp", "3", "--zero", "1")):
            with self.subTest(layout):
                self.done("check", GOLDEN / "experts/deepseek-v3-mtp-tiny", "--batch", 3, "--seq", 12, "--steps", 1,
                          "--skip-f64", "--strict-predictions", "--bucket-bytes", 4096, *layout)


class Experts(ModelsTest):
    def test_their_activation_may_be_relu_in_exact_numerics(self):
        model = self.model("experts/qwen2moe-tiny", hidden_act="relu")
        check = ("check", model, "--tp", 2, "--dp", 2, "--ep", 2, "--batch", 2, "--seq", 8, "--steps", 1)
        self.done(*check, "--gradcheck", "--strict-predictions")
        self.refused(*check, "--numerics", "native", says="experts with relu: expected Llama's form")


class Notes(ModelsTest):
    def test_each_command_names_the_keys_that_it_does_not_know(self):
        model = self.model("mistral-window-tiny", foo=1, another={"key": [2]}, unset=None)
        for name, command in self.commands(model).items():
            with self.subTest(name):
                path = self.folder / f"{name}.json"
                done = self.done(*command, "--json", path)
                self.assertEqual(done.stderr, f"note: {NOTE % 'foo'}\nnote: {NOTE % 'another'}\n")
                report = json.loads(path.read_text())
                report = report["models"][0] if name == "check" else report
                self.assertEqual(report["notes"], [NOTE % "foo", NOTE % "another"])
                self.assertEqual(run(*command, "--quiet").stderr, "")

    def test_a_file_of_transformers_has_no_notes(self):
        for name, command in self.commands(self.model("qwen2-window-tiny")).items():
            with self.subTest(name):
                self.assertEqual(run(*command).stderr, "")

    def test_quantized_weights_are_left_out_and_never_read(self):
        """The config of a published model is planned with; training starts afresh and saves what can be read again."""
        model = self.model("llama3-rope-tiny", quantization_config={"quant_method": "fp8"})
        self.refused("check", model, says="weights are stored in few bits (fp8)")
        (model / "model.safetensors").unlink()
        plan = self.done("plan", model / "config.json", "--tp", 2, "--batch", 2, "--seq", 8)
        self.assertIn("note: config.json: weights are stored in few bits (fp8)", plan.stderr)
        self.done(*self.commands(model)["train"], "--save", self.folder / "saved")
        saved, = (self.folder / "saved").glob("step-*")
        self.assertNotIn("quantization_config", json.loads((saved / "config.json").read_text()))
        self.done("check", saved, "--tp", 2, "--steps", 1, "--seq", 8, "--batch", 2, "--skip-f64")

    def test_the_language_model_of_one_with_images_has_its_bits(self):
        """Under the names of transformers 4 and of 5, beside a tower that is not its."""
        plain = self.model("gemma3-tiny")
        tensors = tensor_files.read(plain / "model.safetensors")
        config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"n": 1},
                  "text_config": json.loads((plain / "config.json").read_text())}
        want = self.done(*self.commands(plain)["train"], "--save", self.folder / "plain").stdout
        for names in ("language_model.{}", "model.language_model.{}"):
            with self.subTest(names):
                wrapped = self.folder / names[:5]
                wrapped.mkdir()
                (wrapped / "config.json").write_text(json.dumps(config))
                inner = (lambda n: n) if names.startswith("lang") else (lambda n: n.removeprefix("model."))
                tensor_files.write(wrapped / "model.safetensors", {
                    **{names.format(inner(n)): t for n, t in tensors.items()},
                    "vision_tower.weight": next(iter(tensors.values()))}, {"format": "pt"})
                saved = self.folder / f"saved-{names[:5]}"
                done = self.done(*self.commands(wrapped)["train"], "--save", saved)
                self.assertIn("of key 'text_config' alone", done.stderr)
                self.assertEqual(done.stdout.splitlines()[-1], want.splitlines()[-1])
                step, = saved.glob("step-*")
                self.assertEqual(json.loads((step / "config.json").read_text())["model_type"], "gemma3_text")

    def test_keys_beyond_the_eighth_are_counted(self):
        model = self.model("llama3-rope-tiny", **{f"key_{i}": 1 for i in range(10)})
        lines = run(*self.commands(model)["grads"]).stderr.splitlines()
        self.assertEqual(len(lines), 9)
        self.assertEqual(lines[8], "note: config.json: 2 more keys are not known here and were ignored")


class Refusals(ModelsTest):
    def refused(self, says, name, **keys):
        done = run("check", self.model(name, **keys))
        shutil.rmtree(self.folder / name)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("config.json", done.stderr)
        self.assertIn(says, done.stderr)

    def test_name_the_key_the_value_and_what_is_expected(self):
        self.refused("'model_type' is 'qwen4', expected one of 'llama', 'qwen2', 'mistral', ", "qwen2-tiny",
                     model_type="qwen4")
        self.refused("'model_type' is 'mamba2', which is not computed: every layer is a selective state-space model",
                     "qwen2-tiny", model_type="mamba2")
        self.refused("'sliding_window' is 0, expected an integer from 1", "mistral-window-tiny", sliding_window=0)
        self.refused("'attention_bias' is true, but Mistral has no biases; expected false", "mistral-window-tiny",
                     attention_bias=True)
        self.refused("'final_logit_softcapping' changes the mathematics", "llama3-rope-tiny",
                     final_logit_softcapping=30.0)
        self.refused("entry 2 is 'linear_attention', expected 'full_attention' or 'sliding_attention'",
                     "qwen2-layers-tiny", layer_types=["full_attention", "sliding_attention", "linear_attention"])


class Checkpoints(ModelsTest):
    def test_what_training_saves_is_a_model_folder_with_the_same_config(self):
        for name in ("qwen2-window-tiny", "mistral-window-tiny", "llama3-rope-tiny", "llama-bias-headdim-tiny"):
            with self.subTest(name):
                model, saved = self.model(name), self.folder / f"{name}-saved"
                done = self.done(*self.commands(model)["train"], "--save", saved)
                latest = saved / "latest"
                self.assertEqual((latest / "config.json").read_bytes(), (model / "config.json").read_bytes())
                done = self.done("check", latest, "--tp", 2, "--steps", 1, "--seq", 8, "--batch", 2)
                self.assertIn("weights of the folder", done.stdout)


if __name__ == "__main__":
    unittest.main()
