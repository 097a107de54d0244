#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden tensors through files alone: `grads`, then `verify` against what PyTorch wrote, right and spoiled in many ways.
"""

import array
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import GOLDEN, run  # noqa: E402

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/grads.safetensors"))


class Tensor:
    def __init__(self, shape, values):
        self.shape, self.values = shape, values

    def rows(self):
        n = self.shape[-1]
        return [self.values[i:i + n] for i in range(0, len(self.values), n)]

    def take_rows(self, rows):
        self.values = array.array("f", [x for row in rows for x in row])


def read(path):
    found = {}
    for name, (dtype, shape, content) in tensor_files.read(path).items():
        assert dtype == "F32", name
        found[name] = Tensor(shape, array.array("f", content))
    return found


def write(path, given):
    return tensor_files.write(path, {name: ("F32", t.shape, t.values.tobytes()) for name, t in given.items()})


# --- what can go wrong with a tensor ------------------------------------------------------------------------------------

def times(factor):
    def spoil(t):
        t.values = array.array("f", [factor * x for x in t.values])
    return spoil


def zero_rows(first, last):
    def spoil(t):
        t.take_rows([[0.0] * len(r) if first <= i < last else r for i, r in enumerate(t.rows())])
    return spoil


def repeat_shard(t):
    """The second quarter of the rows is the first one's."""
    rows, n = t.rows(), len(t.rows()) // 4
    t.take_rows(rows[:n] + rows[:n] + rows[2 * n:])


def rotate_shards(t):
    rows, n = t.rows(), len(t.rows()) // 4
    t.take_rows(rows[n:] + rows[:n])


def roll_heads(t):
    """By one of eight heads."""
    rows, n = t.rows(), len(t.rows()) // 8
    t.take_rows(rows[-n:] + rows[:-n])


def transpose(t):
    t.take_rows(zip(*t.rows()))


def reverse_tokens(t):
    rows, s = t.rows(), t.shape[1]
    t.take_rows([rows[i + s - 1 - k] for i in range(0, len(rows), s) for k in range(s)])


def add_vector(t):
    bias = [0.1 * ((7 * k) % 11 - 5) for k in range(t.shape[-1])]
    t.take_rows([[x + b for x, b in zip(row, bias)] for row in t.rows()])


def cut_to_bf16(t):
    bits = array.array("I")
    bits.frombytes(t.values.tobytes())
    t.values = array.array("f")
    t.values.frombytes(array.array("I", [b & 0xFFFF0000 for b in bits]).tobytes())


def not_a_number(t):
    t.values[5] = float("nan")


def other_layer(tensors):
    a, b = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


LAYER = "model.layers.0."
# file, tensor, what is done to it, the cause (causes.md), what the pattern says
SPOILED = [
    ("grads", LAYER + "mlp.down_proj.weight", times(0.25), "missing_all_reduce", "1/4"),
    ("grads", LAYER + "input_layernorm.weight", times(2.0), "reduced_again", "2 times"),
    ("grads", LAYER + "self_attn.o_proj.weight", times(-1.0), "sign_flipped", "-1 times"),
    ("grads", LAYER + "mlp.gate_proj.weight", zero_rows(88, 132), "block_not_written", "rows 88..131"),
    ("grads", LAYER + "mlp.up_proj.weight", repeat_shard, "shard_repeated", "rows 44..87"),
    ("grads", LAYER + "mlp.up_proj.weight", rotate_shards, "shards_rotated", "another place"),
    ("grads", LAYER + "self_attn.q_proj.weight", roll_heads, "heads_rotated", "another place"),
    ("grads", LAYER + "self_attn.o_proj.weight", transpose, "weight_transposed", "transposed"),
    ("outputs", "hidden_states.1", reverse_tokens, "sequence_reversed", "another place"),
    ("outputs", "hidden_states.1", add_vector, "bias_counted_again", ""),
    ("grads", LAYER + "mlp.down_proj.weight", cut_to_bf16, "fewer_bits", "bf16"),
    ("grads", LAYER + "self_attn.v_proj.weight", not_a_number, "few_elements", "row 0, column 5; 1 NaN"),
]


class Golden(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory(prefix="anyrank-golden-")
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)

    def ours(self, model):
        out = self.folder / model
        if not out.exists():
            provenance = GOLDEN / model / "provenance.json"
            made = json.loads(provenance.read_text()) if provenance.exists() else {}
            loss = [x for key in ("label_smoothing", "z_loss", "balance", "balance_weight", "router_z_loss") if key in made
                    for x in (f"--{key.replace('_', '-')}", made[key])]
            done = run("grads", GOLDEN / model, "--input", GOLDEN / model / "batch.safetensors", "--out", out,
                       "--sensitivity", *loss)
            self.assertEqual(done.returncode, 0, done.stderr)
        return out

    def verify(self, reference, other, out):
        done = run("verify", reference, other, "--sensitivity", out / "allowed.safetensors", "--json", "-")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        return json.loads(done.stdout), done.returncode

    def test_every_model_is_pytorch_s_within_its_sensitivity(self):
        self.assertGreaterEqual(len(MODELS), 20)
        for model in MODELS:
            out = self.ours(model)
            for name in ("outputs.safetensors", "grads.safetensors"):
                with self.subTest(model=model, file=name):
                    result, code = self.verify(GOLDEN / model / name, out / name, out)
                    self.assertEqual((code, result["result"]), (0, "same"))

    def test_every_spoiled_reference_is_found_located_and_named(self):
        model = "llama-gqa-tiny"
        out = self.ours(model)
        for number, (file, name, spoil, cause, pattern) in enumerate(SPOILED):
            with self.subTest(number=number, tensor=name, cause=cause):
                tensors = read(GOLDEN / model / f"{file}.safetensors")
                spoil(tensors[name])
                spoiled = write(self.folder / f"spoiled-{number}.safetensors", tensors)
                result, code = self.verify(out / f"{file}.safetensors", spoiled, out)
                self.assertEqual((code, result["tensors_different"]), (1, 1))
                worst = result["worst"][0]
                self.assertEqual(worst["tensor"], name)
                self.assertEqual(worst["cause"], cause)
                self.assertIn(pattern, worst["pattern"])

    def test_tensors_that_changed_places_are_named(self):
        out = self.ours("llama-gqa-tiny")
        tensors = read(GOLDEN / "llama-gqa-tiny/grads.safetensors")
        other_layer(tensors)
        spoiled = write(self.folder / "swapped.safetensors", tensors)
        result, code = self.verify(out / "grads.safetensors", spoiled, out)
        self.assertEqual((code, result["tensors_different"]), (1, 2))
        self.assertIn("model.layers.0.mlp.up_proj.weight", result["first"]["hint"])

    def test_a_tensor_that_is_missing_is_named(self):
        out = self.ours("llama-gqa-tiny")
        tensors = read(GOLDEN / "llama-gqa-tiny/grads.safetensors")
        del tensors["model.norm.weight"]
        spoiled = write(self.folder / "missing.safetensors", tensors)
        result, code = self.verify(out / "grads.safetensors", spoiled, out)
        self.assertEqual((code, result["missing"]), (1, ["model.norm.weight"]))


if __name__ == "__main__":
    unittest.main()
