#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every rule about files that others wrote, from outside: verify names the rule and the file and ends with status 2.
"""

import ast
import json
import re
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case  # noqa: E402
from tensor_files import joined, packed  # noqa: E402

U8 = '"dtype":"U8","shape":[2],"data_offsets":'
HEADER, OFFSET = "InvalidHeaderDeserialization", "InvalidOffset"


def safetensors(header, data=b"ab", length=None):
    return packed(header, data, length)


def tensors(metadata=None, **values):
    """A file of fp32 tensors, name -> (shape, values)."""
    return joined({name: ("F32", shape, struct.pack(f"<{len(numbers)}f", *numbers))
                   for name, (shape, numbers) in values.items()},
                  {key: json.dumps(value) for key, value in (metadata or {}).items()})


def npy(header, data=b"abcd"):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def one(fields):
    return safetensors('{"w":{' + fields + "}}")


# rule, file
SAFETENSORS = {
    "nothing at all": ("is it a safetensors file?", b""),
    "seven bytes": ("HeaderTooSmall", b"1234567"),
    "a header beyond the cap": ("HeaderTooLarge", safetensors("{}", length=100000001)),
    "a length beyond any file": ("is it a safetensors file?", safetensors("{}", length=2**64 - 1)),
    "a header longer than the file": ("InvalidHeaderLength", safetensors("{}", b"", 3)),
    "no UTF-8": ("InvalidHeader", safetensors(b'{"\xff":0}')),
    "no JSON": (HEADER, safetensors("{")),
    "nothing": (HEADER, safetensors("", b"")),
    "a list": (HEADER, safetensors("[]")),
    "a name twice": (HEADER, safetensors('{"w":{' + U8 + '[0,2]},"\\u0077":{' + U8 + "[0,2]}}")),
    "metadata twice": (HEADER, safetensors('{"__metadata__":{},"__metadata__":{}}', b"")),
    "a key of the metadata twice": (HEADER, safetensors('{"__metadata__":{"a":"1","a":"2"}}', b"")),
    "metadata that is no text": (HEADER, safetensors('{"__metadata__":{"a":1}}', b"")),
    "a surrogate": (HEADER, safetensors('{"\\ud800":{' + U8 + "[0,2]}}")),
    "padding of zeros": (HEADER, safetensors("{}\0\0", b"")),
    "text after the header": (HEADER, safetensors("{} x", b"")),
    "a byte order mark": (HEADER, safetensors(b"\xef\xbb\xbf{}", b"")),
    "a name with a NUL": (HEADER, safetensors('{"\\u0000":1}', b"")),
    "no dtype": (HEADER, one('"shape":[2],"data_offsets":[0,2]')),
    "a dtype of another case": (HEADER, one('"dtype":"u8","shape":[2],"data_offsets":[0,2]')),
    "an unknown dtype": (HEADER, one('"dtype":"F33","shape":[2],"data_offsets":[0,2]')),
    "no shape": (HEADER, one('"dtype":"U8","data_offsets":[0,2]')),
    "an extent below 0": (HEADER, one('"dtype":"U8","shape":[-2],"data_offsets":[0,2]')),
    "an extent that is no integer": (HEADER, one('"dtype":"U8","shape":[2.0],"data_offsets":[0,2]')),
    "an extent beyond 64 bits": (HEADER, one('"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,2]')),
    "no offsets": (HEADER, one('"dtype":"U8","shape":[2]')),
    "one offset": (HEADER, one(U8 + "[0]")),
    "three offsets": (HEADER, one(U8 + "[0,2,2]")),
    "an offset below 0": (HEADER, one(U8 + "[-2,0]")),
    "depth": (HEADER, one(U8 + '[0,2],"x":' + "[" * 3000 + "]" * 3000)),
    "a gap before the first": (OFFSET, one(U8 + "[1,3]")),
    "an end before the beginning": (OFFSET, one(U8 + "[2,0]")),
    "an overlap": (OFFSET, safetensors('{"v":{' + U8 + '[0,2]},"w":{' + U8 + "[1,3]}}", b"abc")),
    "a range twice": (OFFSET, safetensors('{"v":{' + U8 + '[0,2]},"w":{' + U8 + "[0,2]}}")),
    "another size": ("TensorInvalidInfo", one('"dtype":"U16","shape":[2],"data_offsets":[0,2]')),
    "a size beyond 64 bits": ("ValidationOverflow",
                              one('"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,2]')),
    "bytes beyond 64 bits": ("ValidationOverflow",
                             one('"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]')),
    "nine dimensions": ("dimensions", one('"dtype":"U8","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,2]')),
    "fewer bytes than the shape has": ("TensorInvalidInfo", one('"dtype":"U8","shape":[3],"data_offsets":[0,2]')),
    "half a byte": ("MisalignedSlice", one('"dtype":"F4","shape":[3],"data_offsets":[0,2]')),
    "data cut off": ("MetadataIncompleteBuffer", safetensors('{"w":{' + U8 + "[0,2]}}", b"a")),
    "more data": ("MetadataIncompleteBuffer", safetensors('{"w":{' + U8 + "[0,2]}}", b"abc")),
}

NPY = {
    "no magic": b"\x93NUMPX\x01\x00",
    "version 4": b"\x93NUMPY\x04\x00" + bytes(8),
    "a header beyond the end": b"\x93NUMPY\x01\x00\xff\xff{}",
    "a call in the header": npy("{'descr': print('<f4'), 'fortran_order': False, 'shape': (1,)}"),
    "no shape": npy("{'descr': '<f4', 'fortran_order': False}"),
    "data cut off": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"),
    "more data": npy("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", b"abcde"),
}

INDEX = {  # of files s1 with tensor a, s2 with b, s3 with both
    "no object": ("InvalidIndex", "[]"),
    "no map": ("InvalidIndex", '{"weight_map":[]}'),
    "a folder above": ("InvalidIndex", '{"weight_map":{"a":"../s1","b":"s2"}}'),
    "another folder": ("InvalidIndex", '{"weight_map":{"a":"/s1","b":"s2"}}'),
    "no file name": ("InvalidIndex", '{"weight_map":{"a":1,"b":"s2"}}'),
    "a tensor that is not listed": ("InvalidIndex", '{"weight_map":{"a":"s3"}}'),
    "a tensor in two files": ("InvalidIndex", '{"weight_map":{"a":"s1","b":"s3"}}'),
    "a tensor in another file": ("TensorNotFound", '{"weight_map":{"a":"s2","b":"s1"}}'),
    "a file that is not there": ("cannot open", '{"weight_map":{"a":"s4","b":"s2"}}'),
    "no JSON": ("not JSON", '{"weight_map":{'),
}

RULE = '{"version":1,"mesh":[["tp",2]],"files":"r{rank}.safetensors","tensors":[{"match":"w",%s}]}'
MAPS = {
    "no version": "{}",
    "an unknown key": RULE % '"shards":{"tp":0}',
    "no such dimension of the mesh": RULE % '"shard":{"dp":0}',
    "no such dimension of the tensor": RULE % '"shard":{"tp":3}',
    "blocks that do not divide": RULE % '"shard":{"tp":0},"blocks":[2,3]',
    "a name that cannot be computed": RULE % '"rename":"{1/(tp-1)}"',
    "no JSON": '{"version":1,',
}


class Malformed(Case):
    def refused(self, rule, *arguments):
        """Status 2 and one message that names the rule."""
        said = super().refused("verify", *arguments, says="")
        self.assertRegex(said, rf"\b{rule}\b")
        return said

    def test_safetensors(self):
        good = self.put("good.safetensors", one(U8 + "[0,2]"))
        for what, (rule, content) in SAFETENSORS.items():
            with self.subTest(what):
                bad = self.put("bad.safetensors", content)
                self.assertIn("bad.safetensors", self.refused(rule, good, bad))
                self.refused(rule, bad, good)

    def test_npy(self):
        good = self.put("good.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"))
        for what, content in NPY.items():
            with self.subTest(what):
                self.refused("InvalidNpy", good, self.put("bad.npy", content))
        self.refused("big-endian",
                     good, self.put("bad.npy", npy("{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}")))

    def test_indexes(self):
        good = self.put("good.safetensors", one(U8 + "[0,2]"))
        self.put("model/s1", tensors(a=([1], [1])))
        self.put("model/s2", tensors(b=([1], [2])))
        self.put("model/s3", tensors(a=([1], [1]), b=([1], [2])))
        for what, (rule, text) in INDEX.items():
            with self.subTest(what):
                index = self.put("model/model.safetensors.index.json", text)
                self.refused(rule, good, self.folder / "model")
                self.refused(rule, index, good)

    def placed(self, rank, boxes, shape=(4, 2), **more):
        """The text of a rank whose tensor w is these rows of the full one."""
        return {"ANYRANK_PLACEMENT": {"version": 1, "rank": rank, "world": 2, "tensors": {"w": {
            "shape": list(shape), "boxes": [{"global": [row, 0], "local": [local, 0], "extent": [rows, 2]}
                                            for row, local, rows in boxes], **more}}}}

    def test_placements(self):
        good = self.put("good.safetensors", tensors(w=([4, 2], range(8))))
        ranks = self.folder / "ranks"
        first = tensors(self.placed(0, [(0, 0, 2)]), w=([2, 2], range(4)))
        cases = {
            "a row that no rank holds": ("MissingShard", self.placed(1, [(3, 0, 1)]), 1),
            "a row that both hold": ("OverlappingShards", self.placed(1, [(1, 0, 3)]), 3),
            "a box outside the shape": ("InvalidPlacement", self.placed(1, [(3, 0, 2)]), 2),
            "a box outside the file's tensor": ("InvalidPlacement", self.placed(1, [(2, 1, 2)]), 2),
            "more elements than the boxes": ("InvalidPlacement", self.placed(1, [(2, 0, 2)]), 3),
            "another shape": ("InvalidPlacement", self.placed(1, [(2, 0, 2)], shape=(5, 2)), 2),
            "an unknown version": ("InvalidPlacement", {"ANYRANK_PLACEMENT": {"version": 2}}, 2),
            "offsets that are no list": ("InvalidPlacement", {"DCP_SHARDING_INFO": {"w": {"saved_offsets": 2}}}, 2),
            "offsets of another dimension": ("InvalidPlacement", {"DCP_SHARDING_INFO": {"w": {"saved_offsets": [2]}}},
                                             2),
            "offsets below 0": ("InvalidPlacement", {"DCP_SHARDING_INFO": {"w": {"saved_offsets": [-2, 0]}}}, 2),
        }
        for what, (rule, placement, rows) in cases.items():
            with self.subTest(what):
                self.put("ranks/rank-0.safetensors", first)
                self.put("ranks/rank-1.safetensors", tensors(placement, w=([rows, 2], range(2 * rows))))
                self.refused(rule, good, ranks)

    def test_mappings(self):
        good = self.put("good.safetensors", tensors(w=([4, 2], range(8))))
        self.put("ranks/r0.safetensors", tensors(w=([2, 2], range(4))))
        self.put("ranks/r1.safetensors", tensors(w=([2, 2], range(4, 8))))
        for what, text in MAPS.items():
            with self.subTest(what):
                mapping = self.put("map.json", text)
                message = self.refused("InvalidMapping", good, self.folder / "ranks", "--map", mapping)
                self.assertIn("map.json", message)
        self.refused("map.json", good, self.folder / "ranks", "--map", self.folder / "no" / "map.json")
        self.put("ranks/r2.safetensors", tensors(w=([2, 2], range(4))))
        mapping = self.put("map.json", RULE % '"shard":{"tp":0}')
        self.refused("InvalidMapping", good, self.folder / "ranks", "--map", mapping)


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
