#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what verify.md and pytorch.md show and tests/pages cannot run: fields, files that have to be made, and
errors. What needs torch is in pytorch_page_test.py.
"""

import json
import pathlib
import re
import sys
import unittest

from pages import ROOT, PageTest, block, flat, text, without_remarks

sys.path.insert(0, str(ROOT / "tests/cli"))
from verify_test import write  # noqa: E402


def data(found):
    """The JSON of a block whose lines end in remarks, in which "..." continues a list."""
    return json.loads(re.sub(r",\s*\.\.\.\]", "]", "\n".join(map(without_remarks, found.splitlines()))))


def numbers(*shape, start=0):
    """F32, each element another number."""
    count = 1
    for n in shape:
        count *= n
    return "F32", list(shape), [float(start + i) for i in range(count)]


def rows(tensor, first, last):
    dtype, shape, values = tensor
    width = len(values) // shape[0]
    return dtype, [last - first, *shape[1:]], values[first * width:last * width]


def stacked(*tensors):
    return tensors[0][0], [sum(t[1][0] for t in tensors), *tensors[0][1][1:]], [x for t in tensors for x in t[2]]


def columns(tensor, first, last):
    dtype, (height, width), values = tensor
    return dtype, [height, last - first], [x for r in range(height) for x in values[r * width + first:r * width + last]]


class VerifyPage(PageTest):
    def test_the_fields_of_json_are_those_of_the_page(self):
        page = block("verify.md", '{"tool"')
        parts = dict(zip(("report", "row"), page.split("\nROW: ")))
        named = {key: set(re.findall(r'"(\w+)"', part)) for key, part in parts.items()}
        line, _ = block("verify.md", "$ anyrank check --inject").split("$ ")[1:]
        self.run_line(line.strip())
        reports = [json.loads(self.run_line(f"anyrank verify D/{a} D/{b} {rule} --json -"))
                   for a, b, rule in (("reference.safetensors", "tp2", ""), ("tp2", "reference.safetensors", "--rtol 1e-5"))]
        for report in reports:
            self.assertEqual(set(report) - named["report"], set())
            for row in [report["first"], *report["worst"]]:
                self.assertEqual(set(row) - named["row"], set())
        self.assertLessEqual({"tensors", "first", "worst", "wrappers", "left_out"}, set(reports[0]))


class DumpsOfPytorchPage(PageTest):
    def test_the_placement_is_read_and_means_what_it_says(self):
        placement = data(block("pytorch.md", '{"version": 1,\n "rank"'))
        rank, placed = placement["rank"], placement["tensors"]["NAME"]
        extent = placed["boxes"][0]["extent"]
        write(self.folder / "run/rank.safetensors", {"NAME": numbers(*extent)},
              {"ANYRANK_PLACEMENT": json.dumps(placement)})
        others = ", ".join(str(r) for r in range(placement["world"]) if r != rank)
        done = self.run_refused("anyrank verify run run")
        self.assertIn("MissingShard: run: tensor 'NAME': ", done)
        self.assertIn(f"no file of rank {others}", done)
        placement["tensors"]["NAME"]["box"] = 1
        write(self.folder / "run/rank.safetensors", {"NAME": numbers(*extent)},
              {"ANYRANK_PLACEMENT": json.dumps(placement)})
        self.assertIn("unknown key 'box'", self.run_refused("anyrank verify run run"))

    def test_errors_are_those_of_the_page(self):
        missing, overlapping = block("pytorch.md", "MissingShard: run7").splitlines()
        name = re.search(r"tensor '([^']+)'", missing)[1]

        def rank(r, first, count):
            placement = {"version": 1, "rank": r, "world": 2, "tensors": {name: {"shape": [4, 2]}}}
            write(self.folder / f"run7/rank-{r:05d}.safetensors", {name: numbers(count, 2)},
                  {"ANYRANK_PLACEMENT": json.dumps(placement),
                   "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [first, 0]}})})

        rank(0, 0, 2)
        self.assertIn(missing, self.run_refused("anyrank verify run7 run7"))
        rank(1, 1, 3)
        self.assertIn(overlapping, self.run_refused("anyrank verify run7 run7"))
        rank(1, 2, 2)
        self.assertEqual(self.run_line("anyrank verify run7 run7", [0])[:22], "verify: the same bits:")

    def test_the_mapping_puts_megatron_s_files_together(self):
        mapping = data(block("pytorch.md", '{"version": 1,\n "mesh"'))
        (self.folder / "map.json").write_text(json.dumps(mapping))
        (_, copies), (_, shards) = mapping["mesh"]
        width, features, ids = 2, 8, mapping["tensors"][3]["shape"][0]
        groups, unit, layer = mapping["tensors"][0]["groups"], 4, "model.layers.16"
        full = {"model.embed_tokens.weight": numbers(ids, width)}
        padded = stacked(full["model.embed_tokens.weight"], numbers(-ids % (8 * shards) + 8 * shards, width))
        q, k, v = (numbers(n * groups * unit, width, start=1000 * i) for i, n in enumerate((4, 1, 1)))
        gate, up, down = (numbers(*shape, start=7 * i) for i, shape in
                          enumerate(([features, width], [features, width], [width, features])))
        full.update({f"{layer}.self_attn.{n}_proj.weight": t for n, t in zip("qkv", (q, k, v))})
        full.update({f"{layer}.mlp.{n}_proj.weight": t for n, t in zip(("gate", "up", "down"), (gate, up, down))})
        for shard in range(shards):
            own = range(groups // shards * shard, groups // shards * (shard + 1))
            cut = [features // shards * (shard + i) for i in (0, 1)]
            each = padded[1][0] // shards
            tensors = {
                "decoder.layers.16.self_attention.linear_qkv.weight": stacked(*(
                    rows(t, g * n * unit, (g + 1) * n * unit) for g in own for n, t in ((4, q), (1, k), (1, v)))),
                "decoder.layers.16.mlp.linear_fc1.weight": stacked(rows(gate, *cut), rows(up, *cut)),
                "decoder.layers.16.mlp.linear_fc2.weight": columns(down, *cut),
                "decoder.layers.16.mlp._extra_state": numbers(3, start=shard),
                "embedding.word_embeddings.weight": rows(padded, each * shard, each * (shard + 1))}
            for copy in range(copies):
                write(self.folder / f"run/mp_rank_{shard:02d}_{copy:03d}.safetensors", tensors)
        write(self.folder / "full.safetensors", full)
        self.assertIn(f"the same bits: {len(full)} tensors",
                      self.run_line("anyrank verify full.safetensors run --map map.json --all-matched", [0]))

    def test_dumps_of_a_check_are_the_same_as_it_says(self):
        lines = block("pytorch.md", "anyrank verify DIR/reference").splitlines()
        self.assertIn("`anyrank check MODEL --dump DIR`", flat(text("pytorch.md")))
        for n, (line, layout) in enumerate(zip(lines, ("--tp 4 --sp", "--dp 2"))):
            numerics = re.search(r"\((--numerics native)\)$", line)
            self.run_line(f"anyrank check torch --dump D{n} {layout} --batch 2 --seq 16 --steps 1 "
                          f"{numerics[1] if numerics else ''}", [0])
            printed = self.run_line(without_remarks(line).replace("DIR", f"D{n}"), [0])
            self.assertTrue(printed.splitlines()[-1].startswith("verify: the same "), printed)

    def test_an_injected_fault_shows_from_outside(self):
        (line,) = re.findall(r"`(anyrank\s+verify\s+right/[^`]+)`", text("pytorch.md"))
        for out, options in (("right", "--activations"), ("wrong", "--activations --per-rank --tp 2 "
                                                          "--inject column_dx_not_reduced")):
            self.run_line(f"anyrank grads torch --input torch/batch.safetensors --out {out} {options}", [0])
        self.assertIn("verify: DIFFERENT", self.run_line(" ".join(line.split()), [1]))

    def test_the_listener_s_functions_are_there(self):
        headers = "\n".join(p.read_text() for p in sorted((ROOT / "include/anyrank").glob("*.h")))
        code = re.sub(r"/\*.*?\*/", "", block("pytorch.md", "ar_dump_listener *"))
        names = set(re.findall(r"\b(?:ar|AR)_\w+", code))
        self.assertGreater(len(names), 8)
        for name in names:
            self.assertRegex(headers, rf"\b{name}\b")


if __name__ == "__main__":
    unittest.main()
