# SPDX-License-Identifier: Apache-2.0
"""grads: the exact reference of a bundled model, and of one of transformers in memory."""

from __future__ import annotations

import math
import tempfile
import typing
import unittest

import anyrank
from anyrank.tests import FolderCase, needs

IDS = [[5, 3, 250, 7, 7, 1, 0, 9], [1, 2, 3, 4, 5, 6, 7, 8]]


def grads(batch: typing.Any, **options: typing.Any) -> anyrank.Reference:
    """Of a small model."""
    return anyrank.grads("llama-demo", batch, scale=8, **options)


class Bundled(FolderCase):
    def test_loss_outputs_and_gradients(self) -> None:
        ref = grads(IDS)
        self.assertTrue(math.isfinite(ref.loss))
        self.assertEqual(sorted(ref.outputs)[-2:], ["logits", "loss"])
        self.assertEqual(tuple(ref.logits.shape), (2, 8, 256))
        self.assertEqual(len(ref.grads["model.norm.weight"].shape), 1)
        self.assertEqual((dict(ref.allowed), dict(ref.activations)), ({}, {}))
        self.assertIn("tensors in", str(ref))
        self.assertIn("<Reference: loss ", repr(ref))
        self.assertIn("<td>model.norm.weight</td>", ref._repr_html_())

    def test_every_layout_has_the_same_bits(self) -> None:
        one = grads(IDS, out=self.path / "one")
        many = grads({"input_ids": IDS}, tp=2, dp=2, out=self.path / "many")
        self.assertEqual(one.report.outputs_hash, many.report.outputs_hash)
        anyrank.testing.assert_same(one.folder / "grads.safetensors", many.folder / "grads.safetensors")

    def test_another_device_gives_the_same_bits(self) -> None:
        try:
            ref = grads(IDS, device="emulated", against="cpu", out=self.path / "both")
        except anyrank.AnyrankError as error:
            self.skipTest(str(error))
        assert ref.report.against is not None
        self.assertEqual((ref.report.result, ref.report.against["device"]), ("same", "cpu"))
        self.assertEqual(ref.folder, self.path / "both" / "emulated")
        self.assertEqual(ref.loss, grads(IDS).loss)

    def test_a_fault_is_found_within_what_is_allowed(self) -> None:
        ref = grads(IDS, sensitivity=True)
        self.assertGreater(ref.allowed["loss"], 0)
        same = grads(IDS, numerics="native")
        ref.assert_same(dict(same.grads), same.outputs)
        wrong = grads(IDS, tp=2, inject="column_dx_not_reduced")
        with self.assertRaisesRegex(anyrank.testing.NotSame, "not close") as caught:
            ref.assert_same(dict(wrong.grads))
        assert caught.exception.report is not None
        self.assertEqual(caught.exception.report.rule["name"], "sensitivity")
        with self.assertRaisesRegex(anyrank.testing.NotSame, "item 'loss'"):
            ref.assert_same(dict(same.grads), {"loss": [2 * ref.loss]})

    def test_progress_of_the_sensitivity(self) -> None:
        seen: list[str] = []
        grads(IDS, sensitivity=True, progress=lambda fraction, text: seen.append(text))
        self.assertIn("baseline, binary64", seen)

    def test_without_an_allowance_a_rule_is_needed(self) -> None:
        ref = grads(IDS)
        with self.assertRaisesRegex(TypeError, "make it with sensitivity=True, or give rtol"):
            ref.assert_same(dict(ref.grads))
        ref.assert_same(dict(ref.grads), ref.outputs, rtol=0)

    def test_wrong_batches_and_models(self) -> None:
        cases: list[tuple[typing.Any, typing.Any, type[Exception], str]] = [
            ("llama-demo", {"input_ids": IDS, "pixels": [1]}, anyrank.AnyrankError, "holds a tensor 'pixels'"),
            ("llama-demo", {"input_ids": [[1, 999999]]}, anyrank.AnyrankError, "999999"),
            ("llama-demo", {"labels": IDS}, anyrank.AnyrankError, "^anyrank grads: batch: there is no tensor input_i"),
            ("llama-demo", [[]], anyrank.AnyrankError, r"^anyrank grads: batch: input_ids is \[1,0\], expected"),
            ("llama-demo", None, TypeError, "batch is missing"),
            ("llama-demo", {"input_ids": "text"}, TypeError, r"batch\['input_ids'\]: str is no tensor"),
            ("llama-demo", self.path / "no.safetensors", anyrank.AnyrankError, "no.safetensors: cannot open"),
            ("no-model", IDS, anyrank.AnyrankError, "no such folder or file"),
            (object(), IDS, TypeError, "object is no model of transformers")]
        for model, batch, error, pattern in cases:
            with self.assertRaisesRegex(error, pattern):
                anyrank.grads(model, batch)
        with self.assertRaisesRegex(TypeError, "did you mean sensitivity"):
            grads(IDS, sensitivit=True)
        with self.assertRaisesRegex(ValueError, "tensors='jax': expected 'torch' or 'numpy'"):
            anyrank.grads("llama-demo", [[1, 2]], tensors="jax")  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "batch and input are the same"):
            grads(IDS, input="x")


@needs("torch", "transformers")
class Transformers(unittest.TestCase):
    def make(self, **changes: typing.Any) -> typing.Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**dict(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=2), **changes}))

    def batch(self) -> dict[str, typing.Any]:
        import torch

        ids = torch.arange(24).reshape(2, 12) * 5 % 64
        mask = torch.ones_like(ids)
        mask[0, 9:] = 0
        labels = torch.where(mask > 0, ids, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask, "use_cache": False}

    def test_a_model_in_memory(self) -> None:
        import torch

        for dtype in (torch.float32, torch.bfloat16):
            for tied in (False, True):
                model, batch = self.make(tie_word_embeddings=tied).to(dtype), self.batch()
                ref = anyrank.grads(model, batch, sensitivity=True)
                output = model(**batch, output_hidden_states=True)
                output.loss.backward()
                self.assertEqual(set(ref.grads), {name for name, _ in model.named_parameters()})
                self.assertEqual(ref.grads["model.norm.weight"].dtype, torch.float32)
                ref.assert_same(model, output)
                for name, p in model.named_parameters():
                    anyrank.testing.assert_same(ref.grads[name], p.grad, sensitivity=ref.allowed[name])

    def experts(self) -> list[typing.Any]:
        """Models that have the experts of a layer in two parameters, as transformers has them from version 5 on."""
        import torch
        from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

        sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, bos_token_id=1, eos_token_id=2, num_experts_per_tok=2,
                     initializer_range=0.2)
        torch.manual_seed(0)
        models = [MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=3)),
                  Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, num_experts=4, moe_intermediate_size=12,
                                                     shared_expert_intermediate_size=20, mlp_only_layers=[0]))]
        for model in models:
            model.set_attn_implementation("eager")
            model.config._experts_implementation = "eager"
        return models

    def test_experts_in_memory(self) -> None:
        for model in self.experts():
            batch = self.batch()
            ref = anyrank.grads(model, batch, sensitivity=True)
            output = model(**batch, output_hidden_states=True)
            output.loss.backward()
            ref.assert_same(model, output)
            wrong = model.model.layers[1].mlp.experts.down_proj.grad
            wrong[2] *= 2
            with self.assertRaisesRegex(AssertionError, r"experts\.2\.(w2|down_proj)\.weight"):
                ref.assert_same(model)

    def test_experts_that_are_captured(self) -> None:
        import torch

        for model in self.experts():
            ids = self.batch()["input_ids"]
            with tempfile.TemporaryDirectory() as folder:
                with anyrank.capture(model, f"{folder}/dump"):
                    model(input_ids=ids, labels=ids).loss.backward()
                    torch.optim.SGD(model.parameters(), lr=0.0).step()
                ref = anyrank.grads(model, {"input_ids": ids}, activations=True, out=f"{folder}/ref")
                report = anyrank.verify(f"{folder}/ref/activations.safetensors", f"{folder}/dump", common=True,
                                        rtol=1e-4, atol=1e-5)
            self.assertEqual(report.different, 0, str(report))
            # of each parameter its value and gradient; of 2 layers 8 outputs at least and the gradients of 6 inputs
            self.assertGreater(report.compared, 2 * len(ref.grads) + 2 * 14)

    def test_packed_batches_of_the_collator(self) -> None:
        import torch
        from transformers import DataCollatorWithFlattening

        model = self.make()
        samples = [{"input_ids": list(range(first, first + n))} for first, n in ((3, 7), (20, 1), (31, 5))]
        flat = DataCollatorWithFlattening(return_tensors="pt")(samples)
        apart = {**flat, "use_cache": False}
        for batch, words in ((apart, "attention stays inside"), ({**apart, "labels": flat["input_ids"]}, "; 2 of them"),
                             ({**apart, "attention_mask": torch.ones(1, 13)}, "attention crosses"),
                             (flat, "attention crosses")):  # by default a model makes a cache
            model.zero_grad()
            ref = anyrank.grads(model, batch, sensitivity=True)
            output = model(**batch)
            output.loss.backward()
            ref.assert_same(model, output)
            self.assertIn(words, ref.report.notes[0])

    def test_a_wrong_gradient_is_named(self) -> None:
        model, batch = self.make(), self.batch()
        ref = anyrank.grads(model, batch, sensitivity=True)
        model(**batch).loss.backward()
        model.model.layers[1].mlp.up_proj.weight.grad *= 2
        with self.assertRaisesRegex(AssertionError, "item 'model.layers.1.mlp.up_proj.weight'") as caught:
            ref.assert_same(model)
        self.assertIn("counted_twice", str(caught.exception))

    def test_missing_and_frozen_gradients(self) -> None:
        model, batch = self.make(), self.batch()
        ref = anyrank.grads(model, batch, sensitivity=True)
        with self.assertRaisesRegex(AssertionError, r"was backward\(\) called"):
            ref.assert_same(model)
        model.model.embed_tokens.weight.requires_grad_(False)
        model(**batch).loss.backward()
        ref.assert_same(model)

    def test_other_commands_take_it_too(self) -> None:
        model = self.make()
        self.assertTrue(anyrank.check(model, tp=2, steps=1, batch=2, seq=8).ok)
        report = anyrank.lint(model, tp=2)
        self.assertTrue(report.ok)
        self.assertTrue(str(report).startswith("lint: LlamaForCausalLM, tp=2: "), report)

    def test_wrapped_models_and_refusals(self) -> None:
        import torch

        model, batch = torch.nn.Module(), self.batch()
        model.module = self.make()  # as DistributedDataParallel has it
        ref = anyrank.grads(model, batch, sensitivity=True)
        model.module(**batch).loss.backward()
        ref.assert_same(model)
        with self.assertRaisesRegex(anyrank.AnyrankError, "^anyrank grads: LlamaForCausalLM/config.json"):
            anyrank.grads(self.make(hidden_act="relu6"), batch)
        with self.assertRaisesRegex(anyrank.AnyrankError, "meta device"):
            with torch.device("meta"):
                empty = self.make()
            anyrank.grads(empty, batch)

    def test_fully_sharded_ranks_compare_their_parts(self) -> None:
        from anyrank.tests.torch_names import since
        since("2.6", "FSDP2 on processors")
        import torch

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            self.skipTest("no gloo in this torch")
        found = anyrank.ranks.spawn(2, sharded, self.make(), self.batch())
        self.assertEqual([first for first, _ in found], ["", ""])
        self.assertEqual(found[0][1], "")
        self.assertIn("item 'model.norm.weight:grad'", found[1][1])
        self.assertIn("the part of rank 1", found[1][1])


def sharded(rank: int, model: typing.Any, batch: dict[str, typing.Any]) -> tuple[str, str]:
    """What a rank finds of a model that FSDP2 shards, and once more when rank 1's part of a gradient is wrong."""
    from torch.distributed.device_mesh import init_device_mesh
    from anyrank.tests.torch_names import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    ref = anyrank.grads(model, batch, sensitivity=True)
    model(**batch).loss.backward()
    found = []
    for factor in (1, 2 if rank == 1 else 1):
        model.model.norm.weight.grad.to_local().mul_(factor)
        try:
            ref.assert_same(model)
            found.append("")
        except AssertionError as error:
            found.append(str(error))
    return found[0], found[1]


if __name__ == "__main__":
    unittest.main()
