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
        placement_test.c and map_errors_test.c of tests/read."""
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
            done = self.ran("verify", reference, self.folder / "ranks", "--map", mapping)
            self.assertEqual(done.returncode, 2 if name in packed else 0, done.stdout + done.stderr)
            if name in packed:
                self.assertIn(f"tensor '{tensor}' of rank 0: looks like several tensors packed in one", done.stderr)
                self.assertIn('say their relative sizes, such as "blocks": [1, 1, 1], or "blocks": null', done.stderr)


if __name__ == "__main__":
    unittest.main()
