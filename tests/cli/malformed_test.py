#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote, from outside: verify names the rule that a malformed one breaks and ends with status 2, and puts
together what a mapping describes."""

import ast
import json
import re
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case  # noqa: E402
from tensor_files import joined, packed  # noqa: E402

def tensors(metadata=None, **values):
    """A file of fp32 tensors, name -> (shape, values)."""
    return joined({name: ("F32", shape, struct.pack(f"<{len(numbers)}f", *numbers))
                   for name, (shape, numbers) in values.items()},
                  {key: json.dumps(value) for key, value in (metadata or {}).items()})


RULE = '{"version":1,"mesh":[["tp",2]],"files":"r{rank}.safetensors","tensors":[{"match":"w",%s}]}'

class Malformed(Case):
    def refused(self, rule, *arguments):
        """Status 2 and one message that names the rule."""
        said = super().refused("verify", *arguments, says="")
        self.assertRegex(said, rf"\b{rule}\b")
        return said

    def placed(self, rank, rows):
        """The metadata of a rank whose tensor w is these rows of the full one."""
        return {"ANYRANK_PLACEMENT": {"version": 1, "rank": rank, "world": 2, "tensors": {"w": {
            "shape": [4, 2], "boxes": [{"global": [rows[0], 0], "local": [0, 0], "extent": [len(rows), 2]}]}}}}

    def test_each_kind_of_file(self):
        """The library's tests have every rule: tests/io/safetensors_read_test.c and safetensors_model_test.c, and npy_test.c,
        placement_test.c and map_errors_test.c of tests/dump."""
        good = self.put("good.safetensors", tensors(w=([4, 2], range(8))))
        self.put("model/s1", tensors(a=([1], [1])))
        ranks = self.folder / "ranks"
        for rank in range(2):
            self.put(f"ranks/r{rank}.safetensors", tensors(w=([2, 2], range(4 * rank, 4 * rank + 4))))
        for rule, bad, *more in (
                ("InvalidHeaderDeserialization", self.put("bad.safetensors", packed("{", b"ab"))),
                ("InvalidNpy", self.put("bad.npy", b"\x93NUMPY\x04\x00" + bytes(8))),
                ("InvalidIndex", self.put("model/model.safetensors.index.json", '{"weight_map":{"a":"../s1"}}')),
                ("InvalidMapping", ranks, "--map", self.put("map.json", RULE % '"shards":{"tp":0}')),
                ("map.json", ranks, "--map", self.folder / "no" / "map.json")):
            with self.subTest(rule):
                self.assertIn("map.json" if more else bad.name, self.refused(rule, good, bad, *more))
                if not more:
                    self.refused(rule, bad, good)
        for rule, rows in (("MissingShard", [3]), ("OverlappingShards", [1, 2, 3]), ("InvalidPlacement", [3, 4])):
            with self.subTest(rule):
                for rank, of in enumerate(([0, 1], rows)):
                    self.put(f"ranks/r{rank}.safetensors",
                             tensors(self.placed(rank, of), w=([len(of), 2], range(2 * len(of)))))
                self.refused(rule, good, ranks)


class Mapped(Case):
    """A pipeline of two stages by two tensor-parallel ranks, with the names, layer numbers and packing of Megatron."""

    HIDDEN = 4
    MAP = {
        "version": 1, "mesh": [["pp", 2], ["tp", 2]], "files": "mp_rank_{tp}_{pp}.safetensors",
        "tensors": [
            {"match": "layers.{n}.qkv", "shard": {"tp": 0}, "groups": 2, "blocks": [2, 1, 1], "unit": 1,
             "into": ["model.{n + pp}.q", "model.{n + pp}.k", "model.{n + pp}.v"]},
            {"match": "layers.{n}.fc1", "shard": {"tp": 0}, "blocks": [1, 1],
             "into": ["model.{n + pp}.gate", "model.{n + pp}.up"]},
            {"match": "layers.{n}.fc2", "shard": {"tp": 1}, "transpose": True, "rename": "model.{n + pp}.down"},
            {"match": "embed", "shard": {"tp": 0}, "shape": [3, None]},
            {"match": "*._extra_state", "leave": True}]}

    @staticmethod
    def rows(seed, n):
        return [[1000 * seed + 10 * i + j for j in range(Mapped.HIDDEN)] for i in range(n)]

    @staticmethod
    def flat(rows):
        return ([len(rows), len(rows[0])], [x for row in rows for x in row])

    def write_both(self):
        full = {"embed": self.rows(1, 3)}
        for stage in range(2):
            names = {"q": 4, "k": 2, "v": 2, "gate": 4, "up": 4, "down": 2}
            full.update({f"model.{stage}.{name}": self.rows(10 * stage + 2 + i, n)
                         for i, (name, n) in enumerate(names.items())})
        for stage in range(2):
            q, k, v, gate, up, down = (full[f"model.{stage}.{name}"] for name in ("q", "k", "v", "gate", "up", "down"))
            for rank in range(2):
                half = slice(2 * rank, 2 * rank + 2)
                local = {"layers.0.qkv": q[half] + [k[rank]] + [v[rank]], "layers.0.fc1": gate[half] + up[half],
                         "layers.0.fc2": [[row[i] for row in down] for i in range(4)]}
                local["layers.0.fc2"] = [row[rank:rank + 1] for row in local["layers.0.fc2"]]
                local["layers.0._extra_state"] = [[0.0]]
                if stage == 0:
                    local["embed"] = (full["embed"] + [[0.0] * 4])[half]
                self.put(f"ranks/mp_rank_{rank:02}_{stage:03}.safetensors",
                         tensors(**{name: self.flat(rows) for name, rows in local.items()}))
        reference = self.put("reference.safetensors", tensors(**{name: self.flat(rows) for name, rows in full.items()}))
        return reference, self.put("map.json", json.dumps(self.MAP))

    def verify(self, *arguments):
        return self.ran("verify", *arguments)

    def test_a_dump_of_other_names_and_order_is_the_same(self):
        reference, mapping = self.write_both()
        done = self.verify(reference, self.folder / "ranks", "--map", mapping)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("13 tensors", done.stdout)

    def test_one_value_of_one_rank_is_found_by_its_full_name(self):
        reference, mapping = self.write_both()
        path = self.folder / "ranks" / "mp_rank_01_001.safetensors"
        content = bytearray(path.read_bytes())
        place = content.find(struct.pack("<4f", *self.rows(13, 2)[1]))  # row 1 of model.1.k
        content[place:place + 4] = struct.pack("<f", 7)
        path.write_bytes(content)
        done = self.verify(reference, self.folder / "ranks", "--map", mapping)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("model.1.k", done.stdout)

    def test_packed_names_without_blocks_are_refused_as_capture_refuses_them(self):
        source = (ROOT / "python/anyrank/capture/_places.py").read_text(encoding="utf-8")
        packed = ast.literal_eval(re.search(r"^PACKED = (\{.*\})$", source, re.MULTILINE)[1])
        self.assertGreater(len(packed), 5)
        mapping = self.put("map.json", json.dumps({
            "version": 1, "mesh": [["tp", 2]], "files": "r{tp}.safetensors",
            "tensors": [{"match": "*", "shard": {"tp": 0}}]}))
        for name in sorted(packed) + ["linear_qkv"]:
            tensor = f"layers.0.{name}.weight"
            reference = self.put("reference.safetensors", tensors(**{tensor: ([4], range(4))}))
            for rank in range(2):
                self.put(f"ranks/r{rank}.safetensors", tensors(**{tensor: ([2], [2 * rank, 2 * rank + 1])}))
            done = self.verify(reference, self.folder / "ranks", "--map", mapping)
            self.assertEqual(done.returncode, 2 if name in packed else 0, done.stdout + done.stderr)
            if name in packed:
                self.assertIn(f"tensor '{tensor}' of rank 0: looks like several tensors packed in one", done.stderr)
                self.assertIn('say their relative sizes, such as "blocks": [1, 1, 1], or "blocks": null', done.stderr)

    def test_partial_sums_with_copies_are_summed_once(self):
        reference = self.put("reference.safetensors", tensors(y=([2], [5, 7])))
        for rank in range(4):  # copies over dp
            self.put(f"ranks/r{rank}.safetensors", tensors(y=([2], [[1, 3], [4, 4]][rank % 2])))
        rule = {"version": 1, "mesh": [["dp", 2], ["tp", 2]], "files": "r{rank}.safetensors",
                "tensors": [{"match": "y", "partial": "tp"}]}
        done = self.verify(reference, self.folder / "ranks", "--map", self.put("map.json", json.dumps(rule)))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
