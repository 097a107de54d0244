# SPDX-License-Identifier: Apache-2.0
"""open_dump: files and folders of ranks as full tensors."""

from __future__ import annotations

import json
import pathlib
import struct
import typing
import unittest

import anyrank
from anyrank import _safetensors
from anyrank._safetensors import Entry
from anyrank.tests import FolderCase, needs, run_python


def floats(*values: float) -> memoryview:
    return memoryview(struct.pack(f"<{len(values)}f", *values))


def write_rank(folder: pathlib.Path, rank: int, w: typing.Sequence[float], norm: typing.Sequence[float]) -> None:
    """Rank 0 or 1 of two: its two rows of w [4, 2], its copy of norm [2, 3], its summand of s [1]."""
    placement = {"version": 1, "rank": rank, "world": 2, "mesh": [["tp", 2]], "at": [rank], "order": ["s", "w", "norm"],
                 "tensors": {"w": {"shape": [4, 2]}, "norm": {"replica": rank, "replicas": 2}, "s": {"partial": "tp"}}}
    sharding = {"w": {"saved_offsets": [2 * rank, 0]}}
    tensors = {"w": Entry("F32", (2, 2), floats(*w)), "norm": Entry("F32", (2, 3), floats(*norm)),
               "s": Entry("F32", (1,), floats(1 + rank))}
    _safetensors.write(folder / f"rank-0000{rank}.safetensors", tensors,
                       {"ANYRANK_PLACEMENT": json.dumps(placement), "a": "b",
                        "DCP_SHARDING_INFO": json.dumps(sharding)})


class Ranks(FolderCase):
    def setUp(self) -> None:
        super().setUp()
        write_rank(self.path, 0, [1, 2, 3, 4], [1] * 6)
        write_rank(self.path, 1, [5, 6, 7, 8], [1, 1, 1, 1, 3, 1])

    def test_a_tensor_is_put_together_from_the_ranks_parts(self) -> None:
        with anyrank.open_dump(self.path) as dump:
            self.assertEqual(dump.entry("w"), Entry("F32", (4, 2), floats(*range(1, 9))))
            self.assertEqual(bytes(dump.entry("s").data), bytes(floats(3)))
            self.assertEqual(bytes(dump.entry("norm").data), bytes(floats(*[1] * 6)))  # the first copy

    def test_it_is_a_mapping_in_execution_order(self) -> None:
        dump = anyrank.open_dump(str(self.path))
        self.assertEqual(list(dump), ["s", "w", "norm"])
        self.assertEqual((len(dump), "w" in dump, "v" in dump, dump.get("v")), (3, True, False, None))
        self.assertEqual([name for name, _ in dump.items()], list(dump.keys()))
        with self.assertRaises(KeyError):
            dump["v"]

    def test_who_holds_what_is_told_without_reading_values(self) -> None:
        dump = anyrank.open_dump(self.path)
        self.assertEqual((dump.ranks, dump.mesh, dump.metadata("a"), dump.metadata("c")), (2, {"tp": 2}, "b", None))
        w, norm, s = map(dump.tensor, ("w", "norm", "s"))
        self.assertEqual((w.dtype, w.shape, w.order), ("F32", (4, 2), 1))
        self.assertEqual((w.ranks, w.replicas, w.partial), ((0, 1), 1, False))
        self.assertEqual([box.offset + box.extent for part in w.parts for box in part.boxes],
                         [(0, 0, 2, 2), (2, 0, 2, 2)])
        self.assertEqual([pathlib.Path(part.file).name for part in w.parts],
                         ["rank-00000.safetensors", "rank-00001.safetensors"])
        self.assertEqual((norm.replicas, [part.replica for part in norm.parts], norm.partial), (2, [0, 1], False))
        self.assertTrue(s.partial)

    @needs("numpy")
    def test_a_part_is_read_alone(self) -> None:
        dump = anyrank.open_dump(self.path)
        self.assertEqual([box.tolist() for box in dump.part("w", 1)], [[[5, 6], [7, 8]]])
        self.assertEqual([dump.part("s", i)[0].tolist() for i in (0, 1)], [[1], [2]])
        self.assertEqual(dump.part("norm", 1)[0].tolist(), [[1, 1, 1], [1, 3, 1]])

    def test_copies_that_differ_are_told_with_ranks_place_and_values(self) -> None:
        dump = anyrank.open_dump(self.path)
        self.assertIsNone(dump.disagreement("w"))
        found = dump.disagreement("norm")
        assert found is not None
        self.assertEqual((found.ranks, found.index, found.values, found.elements, found.count),
                         ((0, 1), (1, 1), (1.0, 3.0), 1, 6))

    def test_a_missing_rank_is_an_error_with_tensor_and_rank(self) -> None:
        (self.path / "rank-00001.safetensors").unlink()
        with self.assertRaisesRegex(anyrank.AnyrankError, "MissingShard: .*'norm': copy 1 of 2 .*no file of rank 1"):
            anyrank.open_dump(self.path)

    def test_what_was_read_stays_when_the_dump_is_closed(self) -> None:
        dump = anyrank.open_dump(self.path)
        entry = dump.entry("w")
        dump.close()
        dump.close()
        self.assertEqual(bytes(entry.data), bytes(floats(*range(1, 9))))
        self.assertEqual((list(dump), "closed" in repr(dump)), (["s", "w", "norm"], True))
        for read in (dump.entry, dump.tensor, dump.disagreement, dump.metadata):
            with self.assertRaisesRegex(ValueError, "is closed"):
                read("w")


class Files(FolderCase):
    def write(self, **tensors: Entry) -> pathlib.Path:
        path = self.path / "f.safetensors"
        _safetensors.write(path, tensors)
        return path

    def test_a_file_has_names_in_byte_order_and_no_ranks(self) -> None:
        dump = anyrank.open_dump(self.write(b=Entry("F32", (), floats(2)), a=Entry("F32", (0, 3), floats())))
        self.assertEqual((list(dump), dump.ranks, dump.mesh), (["a", "b"], 0, {}))
        self.assertEqual((dump.tensor("a").order, dump.tensor("a").ranks), (None, ()))
        self.assertEqual(dump.entry("a"), Entry("F32", (0, 3), memoryview(b"")))
        self.assertEqual(dump.entry("b"), Entry("F32", (), floats(2)))

    def test_names_may_be_of_any_script(self) -> None:
        self.assertEqual(list(anyrank.open_dump(self.write(**{"Gewicht.ü": Entry("U8", (1,), memoryview(b"x"))}))),
                         ["Gewicht.ü"])

    def test_a_mapping_file_renames_and_its_mistakes_are_errors(self) -> None:
        path, map = self.write(a=Entry("F32", (2,), floats(1, 2))), self.path / "map.json"
        map.write_text('{"version": 1, "tensors": [{"match": "a", "rename": "b"}]}')
        self.assertEqual(list(anyrank.open_dump(path, map=map)), ["b"])
        map.write_text('{"version": 1, "tensors": [{"match": "a", "renam": "b"}]}')
        with self.assertRaisesRegex(anyrank.AnyrankError, "InvalidMapping: .*rename"):
            anyrank.open_dump(path, map=map)

    def test_names_are_aligned_with_a_reference(self) -> None:
        wrapped = self.path / "wrapped.safetensors"
        _safetensors.write(wrapped, {"module.a.weight": Entry("F32", (1,), floats(1)),
                                     "module.b.weight": Entry("F32", (1,), floats(2))})
        plain = self.write(**{"a.weight": Entry("F32", (1,), floats(1)), "b.weight": Entry("F32", (1,), floats(2))})
        reference, other = anyrank.open_dump(plain), anyrank.open_dump(wrapped)
        other.align(reference)
        self.assertEqual(list(other), ["a.weight", "b.weight"])
        self.assertEqual(other.entry("b.weight"), Entry("F32", (1,), floats(2)))

    def test_what_is_no_dump_is_an_error(self) -> None:
        bad = self.path / "bad.safetensors"
        bad.write_bytes(b"\xff" * 20)
        for path, says in ((self.path / "none", "none"), (bad, "HeaderTooLarge"), (self.path, "bad.safetensors"),
                           ("a\0b", "byte 0")):
            with self.assertRaisesRegex(anyrank.AnyrankError, says):
                anyrank.open_dump(path)

    @needs("numpy")
    def test_with_numpy_values_are_arrays(self) -> None:
        import numpy

        dump = anyrank.open_dump(self.write(
            a=Entry("F32", (2, 1), floats(1, 2)), b=Entry("BF16", (2,), memoryview(b"\x80\x3f\x00\xc0")),
            c=Entry("I64", (), memoryview((-5).to_bytes(8, "little", signed=True))),
            d=Entry("BOOL", (1,), memoryview(b"\1"))))
        self.assertEqual((dump["a"].dtype, dump["a"].tolist()), (numpy.float32, [[1.0], [2.0]]))
        self.assertEqual((dump["b"].dtype, dump["b"].tolist()), (numpy.float32, [1.0, -2.0]))
        self.assertEqual((dump["c"].dtype, dump["c"].tolist()), (numpy.int64, -5))
        self.assertEqual((dump["d"].dtype, dump["d"].tolist()), (numpy.bool_, [True]))
        dump["a"][0] = 7  # a copy of its own
        self.assertEqual(dump["a"].tolist(), [[1.0], [2.0]])

    @needs("torch")
    def test_torch_gives_tensors_of_their_own_type(self) -> None:
        import torch

        dump = anyrank.open_dump(self.write(a=Entry("BF16", (1, 2), memoryview(b"\x80\x3f\x00\xc0")),
                                            e=Entry("F32", (0, 4), floats())))
        self.assertEqual((dump.torch("a").dtype, dump.torch("a").tolist()), (torch.bfloat16, [[1.0, -2.0]]))
        self.assertEqual((dump.torch("e").dtype, tuple(dump.torch("e").shape)), (torch.float32, (0, 4)))

    def test_without_numpy_values_are_entries(self) -> None:
        path = self.write(a=Entry("F32", (2,), floats(1, 2)))
        done = run_python("import sys\nsys.modules['numpy'] = None\nimport importlib.util as u\nfind = u.find_spec\n"
                          "u.find_spec = lambda name: None if name == 'numpy' else find(name)\nimport anyrank\n"
                          "print(anyrank.open_dump(sys.argv[1])['a'].data.cast('f').tolist())", str(path))
        self.assertEqual(done.stdout, "[1.0, 2.0]\n", done.stderr)


class Library(unittest.TestCase):
    def test_its_version_is_the_packages(self) -> None:
        from anyrank._library import library

        self.assertEqual(library()["version"]().decode(), anyrank.__version__)

    def test_another_library_is_refused_by_name(self) -> None:
        code = "import anyrank\ntry:\n    anyrank.open_dump('x')\nexcept anyrank.AnyrankError as error: print(error)"
        self.assertIn("none.so cannot be used", run_python(code, ANYRANK_LIBRARY="/none.so").stdout)


if __name__ == "__main__":
    unittest.main()
