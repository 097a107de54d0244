#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of weights in MXFP4, as GPT-OSS's files have those of experts: the same model as with the fp32 numbers that
they are, by the format's own definition and by transformers' function; and malformed ones."""

import json
import os
import random
import struct
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, sys.path[0] + "/../support")
from command import Case  # noqa: E402

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
PYTHON = Path(os.environ.get("ANYRANK_PYTHON_VENV") or Path.home() / ".cache/anyrank/python-venv") / "bin/python"
REFERENCE = """
import sys, torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
rows, groups = int(sys.argv[1]), int(sys.argv[2])
data = sys.stdin.buffer.read()
n = rows * groups
blocks = torch.frombuffer(bytearray(data[:16 * n]), dtype=torch.uint8).reshape(1, rows, groups, 16)
scales = torch.frombuffer(bytearray(data[16 * n:]), dtype=torch.uint8).reshape(1, rows, groups)
made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
sys.stdout.buffer.write(made.transpose(1, 2).contiguous().cpu().numpy().tobytes())
"""


def decoded(blocks, scales):
    """The numbers of one row after the other."""
    for i, byte in enumerate(blocks):
        for bits in (byte & 15, byte >> 4):
            yield (-1.0 if bits & 8 else 1.0) * VALUES[bits & 7] * 2.0 ** (scales[i // 16] - 127)


def read(path):
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])
            for k, v in header.items()}


def write(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, values) in sorted(tensors.items(), key=lambda t: (t[1][0] == "U8", t[0])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Mxfp4Test(Case):
    def setUp(self):
        super().setUp()
        self.done("train", "gpt-oss-demo", "--steps", 1, "--batch", 2, "--seq", 8, "--save", self.folder / "run")
        self.tensors = read(self.folder / "run/step-00000001/model.safetensors")
        self.config = json.loads((self.folder / "run/step-00000001/config.json").read_text())

    def packed(self):
        """The model's tensors with experts in MXFP4, and with the same numbers in fp32; the smallest power among them."""
        draw = random.Random(3)
        few, whole = dict(self.tensors), dict(self.tensors)
        for name, (_, (experts, rows, columns), _) in self.tensors_of_experts():
            groups = rows // 32
            blocks = draw.randbytes(experts * columns * groups * 16)
            scales = bytes(draw.choice((0, 118, 119, 120, 121)) for _ in range(experts * columns * groups))
            del few[name]
            few[name + "_blocks"] = ("U8", [experts, columns, groups, 16], blocks)
            few[name + "_scales"] = ("U8", [experts, columns, groups], scales)
            values = list(decoded(blocks, scales))
            turned = [values[e * rows * columns + j * rows + i]
                      for e in range(experts) for i in range(rows) for j in range(columns)]
            whole[name] = ("F32", [experts, rows, columns], struct.pack(f"<{len(turned)}f", *turned))
        return few, whole

    def tensors_of_experts(self):
        return [t for t in self.tensors.items() if t[0].endswith(("gate_up_proj", "down_proj"))]

    def model(self, name, tensors, **keys):
        to = self.folder / name
        to.mkdir(exist_ok=True)
        (to / "config.json").write_text(json.dumps({**self.config, **keys}))
        write(to / "model.safetensors", tensors)
        return to

    def small(self, tensors, **keys):
        return self.model("small", tensors, quantization_config={"quant_method": "mxfp4"}, **keys)

    def test_experts_in_four_bits_are_the_numbers_that_they_are(self):
        few, whole = self.packed()
        outputs = []
        for model in (self.small(few), self.model("whole", whole)):
            done = self.done("train", model, "--steps", 1, "--batch", 2, "--seq", 8, "--tp", 2, "--save", model / "run")
            outputs.append((model / "run/step-00000001/model.safetensors").read_bytes())
            self.assertEqual("in few bits (mxfp4)" in done.stderr, model.name == "small")
            self.assertNotIn("quantization_config", (model / "run/step-00000001/config.json").read_text())
        self.assertEqual(*outputs)

    def test_malformed_weights_are_refused(self):
        few, _ = self.packed()
        blocks, scales = (f"model.layers.1.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))
        dtype, shape, data = few[scales]
        of_blocks = few[blocks]
        cases = [({scales: None}, "scales' is missing from the weights"),
                 ({scales: (dtype, shape[::-1], data)}, "scales' has shape"),
                 ({blocks: (dtype, of_blocks[1][:3] + [8, 2], of_blocks[2])}, "blocks' has shape"),
                 ({scales: ("I8", shape, data)}, "scales' is I8, of rows of 32 elements: in MXFP4 it is U8"),
                 ({scales: (dtype, shape, b"\xff" + data[1:])}, "blocks' holds NaN at element 0"),
                 ({scales: (dtype, shape, b"\xfe" + data[1:]), blocks: (*of_blocks[:2], b"\x07" + of_blocks[2][1:])},
                  "blocks' holds an infinity at element 0"),
                 ({"model.layers.1.mlp.experts.more_blocks": of_blocks}, "more_blocks' is in the weights, but")]
        for change, says in cases:
            with self.subTest(says):
                tensors = {k: v for k, v in {**few, **change}.items() if v is not None}
                self.refused("check", self.small(tensors), "--steps", 1, "--batch", 2, "--seq", 8, says=says)

    @unittest.skipUnless(PYTHON.exists(), "needs scripts/install_deps.sh --pytorch")
    def test_transformers_function_makes_the_same_numbers(self):
        draw = random.Random(4)
        blocks = bytes(range(256)) * 16 + draw.randbytes(16 * 256)
        scales = bytes(range(1, 253)) + bytes(draw.choice(range(1, 253)) for _ in range(len(blocks) // 16 - 252))
        values = list(decoded(blocks, scales))
        done = subprocess.run([PYTHON, "-c", REFERENCE, str(len(scales) // 4), "4"], input=blocks + scales,
                              capture_output=True, check=True)
        self.assertEqual(done.stdout, struct.pack(f"<{len(values)}f", *values))


if __name__ == "__main__":
    unittest.main()
