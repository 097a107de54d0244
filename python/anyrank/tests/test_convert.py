# SPDX-License-Identifier: Apache-2.0
"""Other people's checkpoints: nothing pickled is run, what is damaged is named, and bits come through as they are."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import typing
import unittest
import zipfile

import anyrank
from anyrank import _safetensors, convert, ranks
from anyrank.convert import _parallel, _pickles, _pieces, _tensors, megatron
from anyrank.tests import FolderCase, anyrank_json, needs


class Evil:
    """Unpickled in the usual way, it runs a command."""

    def __init__(self, mark: pathlib.Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return os.system, (f"touch {self.mark}",)


class Settings:
    """A class that the reader does not know."""

    def __init__(self) -> None:
        self.rate = 0.5


def zipped(path: pathlib.Path, program: bytes, **members: bytes) -> None:
    """A file as torch.save writes it, with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for name, data in members.items():
            archive.writestr(f"archive/data/{name}", data)


def metadata(*state: bytes) -> bytes:
    """A pickle of a Metadata with these (key, value) pairs as its state."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return b"\x80\x02" + name + b")\x81}(" + b"".join(state) + b"ub."


class Pickles(FolderCase):
    def refused(self, *words: str) -> str:
        """The message with which the folder is refused, and nothing was written or run."""
        with self.assertRaises(anyrank.AnyrankError) as caught:
            convert.convert(self.path / "source", self.path / "out")
        self.assertEqual(sorted(os.listdir(self.path)), ["source"])
        for word in words:
            self.assertIn(word, str(caught.exception))
        return str(caught.exception)

    def setUp(self) -> None:
        super().setUp()
        (self.path / "source").mkdir()

    def test_no_pickle_runs_anything_wherever_it_lies(self) -> None:
        mark = self.path / "mark"
        evil = pickle.dumps({"module": Evil(mark)})
        name = f"{os.system.__module__}.system"
        for folder, file, data in (("", ".metadata", evil), ("", "mp_rank_00_model_states.pt", None),
                                   ("mp_rank_00", "model_optim_rng.pt", None)):
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                with self.subTest(file=file, protocol=protocol):
                    evil = pickle.dumps({"module": Evil(mark)}, protocol)
                    path = self.path / "source" / folder / file
                    path.parent.mkdir(exist_ok=True)
                    if data is None:
                        zipped(path, evil)
                    else:
                        path.write_bytes(evil)
                    self.refused(str(path), f"names {name}", "nothing of it was run")
                    path.unlink()
            if folder:
                (self.path / "source" / folder).rmdir()

    def test_the_functions_that_a_pickle_may_call_are_a_closed_list(self) -> None:
        for name in ("builtins.eval", "builtins.getattr", "builtins.__import__", "os.system", "posix.system",
                     "nt.system",
                     "subprocess.Popen", "operator.attrgetter", "functools.partial", "importlib.import_module",
                     "torchvision.x", "numpyx.y", "anyrank.convert.convert", "pickle.loads", "collections.defaultdict"):
            module, _, what = name.rpartition(".")
            with self.assertRaisesRegex(anyrank.AnyrankError, name):
                _pickles.read_pickle(io_of(f"c{module}\n{what}\n.".encode()), "x")
        for name in ("torch.hub.load", "numpy.core.multiarray.scalar", "deepspeed.x.Y", "pathlib.PosixPath"):
            module, _, what = name.rpartition(".")
            made = _pickles.read_pickle(io_of(f"c{module}\n{what}\n(S'a'\ntR.".encode()), "x")
            self.assertEqual((_pickles.class_of(made), made._args), (name, ("a",)))

    def test_an_unknown_class_is_refused_and_read_as_data_if_it_is_named(self) -> None:
        name = f"{Settings.__module__}.Settings"
        path = self.path / "source" / "mp_rank_00_model_states.pt"
        weight = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + (
            b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQK\x00K\x02\x85K\x01\x85\x89}tR.")
        program = b"\x80\x02}(X\x06\x00\x00\x00module}X\x01\x00\x00\x00w" + weight[2:-1] + (
            b"sX\x04\x00\x00\x00note" + pickle.dumps(Settings(), 2)[2:-1] + b"u.")
        zipped(path, program, **{"0": struct.pack("<2f", 1, 2)})
        self.refused(name, f"--placeholder {name}")
        done = convert.convert(path.parent, self.path / "out", placeholders=[name])
        self.assertEqual((done.kind, done.tensors, done.bytes), ("DeepSpeed", 1, 8))
        tensors, _ = _safetensors.read(self.path / "out" / "rank-00000.safetensors")
        self.assertEqual((tensors["w"].dtype, tensors["w"].shape, tensors["w"].data.tobytes()),
                         ("F32", (2,), struct.pack("<2f", 1, 2)))

    def test_bytes_that_are_no_checkpoint(self) -> None:
        source = self.path / "source"
        for data, words in ((b"", "not a readable pickle"), (b"\x80\x04N.", "NoneType"), (b"garbage", "not a readable"),
                            (metadata(), "no state_dict_metadata"), (b"(" * 99, "not a readable"),
                            (metadata(b"X\x07\x00\x00\x00versionX\x05\x00\x00\x002.0.0"), "version 2.0.0"),
                            (b"\x80\x02ctorch.distributed.checkpoint.metadata\nOther\n)\x81.", "metadata.Other")):
            (source / ".metadata").write_bytes(data)
            self.refused(".metadata", words)
        (source / ".metadata").unlink()
        (source / "__0_0.distcp").write_bytes(b"")
        self.refused("no .metadata", "the save did not end")
        (source / "__0_0.distcp").unlink()
        for data, words in ((b"", "no file of torch.save"), (b"PK\x03\x04", "cut short"),
                            (b"\x80\x02\x8a", "before PyTorch 1.6")):
            (source / "mp_rank_00_model_states.pt").write_bytes(data)
            self.refused("mp_rank_00_model_states.pt", words)

    def test_containers_that_double_are_refused_before_they_are_hashed_or_printed(self) -> None:
        def chain(head: bytes, wrap: bytes, times: int = 60) -> bytes:
            """A value that is twice in the next, that one twice in the next, .."""
            return head + b"".join(b"q" + bytes([i]) + wrap.replace(b"?", b"h" + bytes([i])) for i in range(times))

        tuples = b"\x80\x04" + chain(b")", b"?\x86")
        slices = b"\x80\x04" + chain(b"N", b"0cbuiltins\nslice\n(???tR")
        for data, words in ((tuples + b"Q.", "containers in containers"),
                            (b"\x80\x04}" + tuples[2:] + b"Ns.", "containers"),
                            (b"\x80\x04(" + tuples[2:] + b"\x91.", "containers"),
                            (b"\x80\x04\x8f(" + tuples[2:] + b"\x90.", "containers"), (slices + b"0N.", "containers"),
                            (b"\x80\x04" + chain(b"]", b"0](??e") + b".", "containers"),
                            (b"\x80\x04" + chain(b"}", b"0}(K\x00?K\x01?u") + b".", "containers"),
                            (b"\x80\x04" + chain(b"]", b"0](??e") + b"Q.", "told by a list"),
                            (b"\x80\x04})" + b"\x85" * 1000 + b"Ns.", "101 deep"),
                            (b"\x80\x04]q\x00h\x00a.", "holds itself")):
            with self.subTest(data=data), self.assertRaisesRegex(anyrank.AnyrankError, words):
                _pickles.read_pickle(io_of(data), "x", storage=lambda *_: memoryview(b""))
        shared = _pickles.read_pickle(io_of(b"\x80\x04" + chain(b"]", b"0](??e", 10) + b"."), "x")
        self.assertEqual(str(shared).count("["), 2 ** 11 - 1)

    def test_tensors_beyond_their_storage_are_refused(self) -> None:
        for count, offset, shape, stride in ((2, 1, 2, 1), (2, 0, 3, 1), (2, 0, 2, 2), (9, 0, 2, 1), (2, 0, 2, 255)):
            program = (b"\x80\x02}X\x06\x00\x00\x00module}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
                       b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK"
                       + bytes([count]) + b"tQK" + bytes([offset]) + b"K" + bytes([shape]) + b"\x85K" + bytes([stride])
                       + b"\x85\x89}tRss.")
            zipped(self.path / "source" / "mp_rank_00_model_states.pt", program, **{"0": bytes(8)})
            self.refused("mp_rank_00_model_states.pt", "storage" if count == 2 else "bytes")

    def test_other_folders_are_nobodys(self) -> None:
        self.refused("is no checkpoint of")
        self.assertFalse(convert.is_foreign(self.path / "source"))
        with convert.as_dump(self.path / "source") as (path, mapping):
            self.assertEqual((path, mapping), (str(self.path / "source"), None))
        for name in ("iter_0000001", "iter_0000002"):
            (self.path / "source" / name).mkdir()
        self.refused("several checkpoints", "iter_0000001, iter_0000002")
        (self.path / "source" / "latest_checkpointed_iteration.txt").write_text("7")
        self.refused("latest_checkpointed_iteration.txt names '7'")
        for told in (b".", b"..", "\u00b2".encode(), b"\xff", b"7\0"):  # folders that are no checkpoint, and no text
            (self.path / "source" / "latest_checkpointed_iteration.txt").write_bytes(told)
            self.refused("latest_checkpointed_iteration.txt names ")
        with self.assertRaises(ValueError):
            convert.convert(self.path / "source", self.path / "out", weights="best")
        (self.path / "source" / "latest_checkpointed_iteration.txt").write_text("1")
        (self.path / "source" / "iter_0000001" / ".metadata").write_bytes(b"")
        self.assertTrue(convert.is_foreign(self.path / "source"))
        (self.path / "source" / "model.safetensors").write_bytes(b"")  # a model beside its training state
        self.assertFalse(convert.is_foreign(self.path / "source"))

    def test_the_command_reports_in_one_line(self) -> None:
        done = subprocess.run([sys.executable, "-m", "anyrank.convert", str(self.path / "source"),
                               str(self.path / "out")],
                              capture_output=True, text=True, check=False,
                              cwd=pathlib.Path(anyrank.__file__).parents[1])
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1))
        self.assertTrue(done.stderr.startswith("anyrank convert: "), done.stderr)


def io_of(data: bytes) -> typing.IO[bytes]:
    import io
    return io.BytesIO(data)


class Views(unittest.TestCase):
    def test_boxes_of_a_stretch_are_its_elements_in_order(self) -> None:
        for shape in ((5,), (3, 4), (2, 3, 2), (1, 4), (4, 1), (2, 1, 3), ()):
            count = 1
            for n in shape:
                count *= n
            every = list(itertools.product(*map(range, shape)))
            for start in range(count + 1):
                for n in range(count - start + 1):
                    boxes = _tensors.flat_boxes(shape, start, n)
                    found = [index for at, extent in boxes for index in itertools.product(
                        *(range(a, a + e) for a, e in zip(at, extent)))]
                    self.assertEqual(found, every[start:start + n], (shape, start, n))

    def test_strided_views_are_copied_row_major(self) -> None:
        data = memoryview(bytes(range(48)))
        for dtype, size in (("U8", 1), ("I16", 2), ("I32", 4)):
            view = _tensors.View(dtype, (3, 4), (1, 3), data)  # a transposed 4x3
            expected = b"".join(bytes(data[(i + 3 * j) * size:(i + 3 * j + 1) * size])
                                for i in range(3) for j in range(4))
            self.assertEqual(view.bytes().tobytes(), expected)
            self.assertEqual(view.narrow(1, 1, 2).select(2).bytes().tobytes(), expected[9 * size:11 * size])
            expanded = _tensors.View(dtype, (2, 3), (1, 0), data)
            self.assertEqual(expanded.bytes().tobytes(), b"".join(
                bytes(data[i * size:(i + 1) * size]) * 3 for i in range(2)))
        self.assertEqual(_tensors.View("I16", (2, 0), (1, 1), data).bytes().tobytes(), b"")

    def test_cuts_by_name(self) -> None:
        cuts = _parallel.Cuts({"head.*": 1, "special": None}, gated=True)
        for name, dim in (("a.linear_qkv.weight", 0), ("a.o_proj.weight", 1), ("a.o_proj.bias", None), ("head.w", 1),
                          ("special", None), ("a.linear_qkv.layer_norm_weight", None), ("a.norm.weight", None)):
            self.assertEqual(cuts.dimension(name, 2), dim, name)
        with self.assertRaisesRegex(anyrank.AnyrankError, "--shard 'mystery=0'"):
            cuts.dimension("mystery", 2)
        full, boxes = cuts.place("a.linear_fc1.weight", [(4, 2), (4, 2)], 1, ((1, 0), (2, 2)))  # over gate's end
        self.assertEqual((full, boxes), ((8, 2), [(((3, 0), (1, 2)), (0, 0)), (((6, 0), (1, 2)), (1, 0))]))


class Cover(unittest.TestCase):
    def boxes(self, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[_pieces.Piece]:
        """Of a tensor [4, 4], one on each rank."""
        view = _tensors.View("U8", (0,), (1,), memoryview(b""))
        return [_pieces.Piece(rank, "x", "weight", "U8", (4, 4), at, extent, lambda: view, f"file{rank}")
                for rank, (at, extent) in enumerate(boxes)]

    def test_every_element_is_in_one_box_but_for_copies(self) -> None:
        left, right = ((0, 0), (4, 2)), ((0, 2), (4, 2))
        self.assertEqual(len(_pieces.check_cover("x", self.boxes(left, right, left))), 2)
        self.assertEqual(len(_pieces.check_cover("x", self.boxes(((0, 0), (4, 4)), ((4, 0), (0, 4))))), 1)
        for boxes, words in (((left, left), "MissingShard.*8 of its 16 .*0:4, 0:2. in file0"),
                             ((left, ((3, 1), (1, 3))), "OverlappingShards: file1.*3:4, 1:4.*0:4, 0:2. of file0"),
                             ((left, ((0, 2), (5, 2))), "file1.*0:5, 2:4. is outside of .4, 4.")):
            with self.assertRaisesRegex(anyrank.AnyrankError, words):
                _pieces.check_cover("x", self.boxes(*boxes))


def save(_rank: int, folder: str) -> dict[str, typing.Any]:
    """Saves DTensors of 2x2 ranks, plain tensors and what is no tensor; returns the full tensors."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from anyrank.tests.torch_names import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    full = {"rows": torch.randn(8, 6), "columns": torch.randn(8, 6).bfloat16(), "both": torch.randn(7, 5),
            "twice": torch.randn(9, 2).double(), "bits": torch.randint(-9, 9, (5, 3)),
            "empty": torch.randn(1, 3).half(),
            "copies": torch.randn(4)}
    place = {"rows": (Replicate(), Shard(0)), "columns": (Replicate(), Shard(1)), "both": (Shard(0), Shard(1)),
             "twice": (Shard(0), Shard(0)), "bits": (Replicate(), Shard(0)), "empty": (Replicate(), Shard(0)),
             "copies": (Replicate(), Replicate())}
    model = {name: distribute_tensor(t, mesh, list(place[name])) for name, t in full.items()}
    plain = {"scalar": torch.tensor(7.0), "view": torch.randn(6, 4).t(), "flags": torch.rand(4, 4) > 0.5,
             "small": torch.randn(6).to(torch.float8_e4m3fn)}
    model.update(plain)
    full.update(plain)
    state = {"model": model, "optim": {"state": {"rows": {"exp_avg": model["rows"], "step": torch.tensor(3)}},
                                       "param_groups": [{"lr": 0.1}]}, "words": "any"}
    dcp.save(state, checkpoint_id=folder)
    full.update({"rows:m": full["rows"], "rows.step": torch.tensor(3)})
    return {name: (tuple(t.shape), bytes(t.contiguous().view(-1).view(torch.uint8).tolist()))
                   for name, t in full.items()}


class Megatron(unittest.TestCase):
    def test_layers_are_counted_through_stages_and_virtual_stages(self) -> None:
        cases: list[tuple[list[list[int]], list[list[int]]]] = [  # of each stage: layers of its chunks, their numbers
            ([[2], [1], [3]], [[0, 1], [2], [3, 4, 5]]),
            ([[1, 2], [2, 1], [1, 1]], [[0, 4, 5], [1, 2, 6], [3, 7]])]
        for layers, numbers in cases:
            stages = [megatron._File(0, p, f"stage {p}", {}, [
                {f"decoder.layers.{i}.weight": typing.cast(typing.Any, (v, i)) for i in range(n)}
                for v, n in enumerate(chunks)]) for p, chunks in enumerate(layers)]
            megatron._number_layers(stages[::-1])
            for stage, chunks, own in zip(stages, layers, numbers):
                held = [(v, i) for v, n in enumerate(chunks) for i in range(n)]
                self.assertEqual(stage.tensors, {f"decoder.layers.{n}.weight": at for n, at in zip(own, held)})


@needs("torch")
class Dcp(FolderCase):
    saved: typing.Any
    full: typing.Any

    @classmethod
    def setUpClass(cls) -> None:
        cls.saved = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.saved.cleanup)
        cls.full = ranks.spawn(4, save, str(pathlib.Path(cls.saved.name, "source")))[0]

    def setUp(self) -> None:
        super().setUp()
        shutil.copytree(pathlib.Path(self.saved.name, "source"), self.path / "source")

    def expect(self, tensors: dict[str, _safetensors.Entry]) -> None:
        self.assertEqual({name: (entry.shape, entry.data.tobytes()) for name, entry in tensors.items()}, self.full)

    def test_every_bit_comes_back(self) -> None:
        done = convert.convert(self.path / "source", self.path / "full.safetensors", full=True)
        self.assertEqual((done.ranks, done.tensors, len(done.notes)), (0, len(self.full), 1))
        self.expect(_safetensors.read(self.path / "full.safetensors")[0])
        done = convert.convert(self.path / "source", self.path / "out")
        self.assertEqual((done.ranks, len(list((self.path / "out").iterdir()))), (4, 4))
        with self.assertRaisesRegex(anyrank.AnyrankError, "is there already"):
            convert.convert(self.path / "source", self.path / "out")

    def test_names_with_a_suffix_and_a_step(self) -> None:
        convert.convert(self.path / "source", self.path / "out", full=True, suffix="new", step=3)
        names = set(_safetensors.read(self.path / "out" / "model.safetensors")[0])
        self.assertTrue({"rows:new@3", "rows:m@3", "rows.step"} <= names, names)

    def test_damaged_folders_name_the_file_and_the_tensor(self) -> None:
        files = sorted((self.path / "source").glob("*.distcp"))
        whole = files[3].read_bytes()
        files[3].write_bytes(whole[:-700])
        self.fails(files[3].name, "cut short")
        files[3].write_bytes(whole[:200] + bytes(300) + whole[500:])
        self.fails(files[3].name)
        files[3].unlink()
        self.fails("MissingShard", files[3].name, "is missing")
        (self.path / "source" / ".metadata").write_bytes((self.path / "source" / ".metadata").read_bytes()[:900])
        self.fails(".metadata", "cut short")

    def fails(self, *words: str) -> None:
        for full in (False, True):
            with self.assertRaises(anyrank.AnyrankError) as caught:
                convert.convert(self.path / "source", self.path / "out", full=full)
            for word in words:
                self.assertIn(word, str(caught.exception))
            self.assertEqual(os.listdir(self.path), ["source"])


def save_sharded(_rank: int, folder: str) -> None:
    """Rows of four ranks, the last of which has none, columns of two, copies and moments, as safetensors files."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from anyrank.tests.torch_names import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dcp.save({"model": {"rows": distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0), Shard(0)]),
                        "columns": distribute_tensor(torch.arange(8).reshape(2, 4), mesh, [Replicate(), Shard(1)]),
                        "copies": distribute_tensor(torch.ones(3).bfloat16(), mesh, [Replicate(), Replicate()])},
              "optim": {"state": {"rows": {"exp_avg": distribute_tensor(torch.arange(6.0).reshape(3, 2) + 9, mesh,
                                                                        [Shard(0), Replicate()])}}}},
             storage_writer=dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True))


@needs("torch", "safetensors")
class Sharded(FolderCase):
    """What torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True) writes."""

    def test_parts_become_full_tensors(self) -> None:
        ranks.spawn(4, save_sharded, str(self.path / "source"))
        self.assertTrue((self.path / "source" / "shard-00001-model-00001-of-00001.safetensors").is_file())
        done = convert.convert(self.path / "source", self.path / "out.safetensors", full=True)
        self.assertEqual((done.kind, done.tensors), ("sharded safetensors", 4))
        self.assertIn("do not say full shapes", done.notes[0])
        found = {name: (entry.dtype, entry.shape, entry.data.tobytes())
                 for name, entry in _safetensors.read(self.path / "out.safetensors")[0].items()}
        self.assertEqual(found, {
            "model.rows": ("F32", (3, 2), struct.pack("<6f", 0, 1, 2, 3, 4, 5)),
            "rows:m": ("F32", (3, 2), struct.pack("<6f", 9, 10, 11, 12, 13, 14)),
            "model.columns": ("I64", (2, 4), struct.pack("<8q", 0, 1, 2, 3, 4, 5, 6, 7)),
            "model.copies": ("BF16", (3,), b"\x80\x3f" * 3)})
        convert.convert(self.path / "source", self.path / "out")
        both = anyrank_json("verify", str(self.path / "source"), str(self.path / "out"), "--common")
        self.assertEqual((both["result"], both["tensors"]), ("same", 3))  # the moment has another name there
        self.assertTrue(anyrank.resume.compare(self.path / "source", self.path / "source").same)


class Shards(FolderCase):
    def put(self, rank: int, sharding: object, *rows: float) -> pathlib.Path:
        """A file with rows of a tensor w [.., 2]."""
        path = self.path / "source" / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        path.parent.mkdir(exist_ok=True)
        data = memoryview(struct.pack(f"<{len(rows)}f", *rows))
        metadata = {} if sharding is None else {"DCP_SHARDING_INFO": json.dumps(sharding)}
        _safetensors.write(path, {"w": _safetensors.Entry("F32", (len(rows) // 2, 2), data)}, metadata)
        return path

    def at(self, *offset: object) -> object:
        return {"w": {"saved_offsets": offset}}

    def test_other_layouts_hold_the_same_and_lost_rows_are_seen(self) -> None:
        self.put(1, self.at(0, 0), 1, 2, 3, 4, 5, 6)
        (self.path / "source").rename(self.path / "one")
        self.put(1, self.at(0, 0), 1, 2)
        self.put(2, self.at(1, 0), 3, 4, 5, 6)
        self.assertTrue(anyrank.resume.compare(self.path / "one", self.path / "source").same)
        self.put(2, self.at(1, 0), 3, 4, 5, 7)
        report = anyrank.resume.compare(self.path / "one", self.path / "source")
        self.assertEqual([finding.names for finding in report.findings], [("w",)])
        self.put(2, self.at(2, 0), 5, 6)
        for full in (False, True):
            with self.assertRaisesRegex(anyrank.AnyrankError, "MissingShard: tensor 'w': the files hold 4 of its 6"):
                convert.convert(self.path / "source", self.path / "out", full=full)

    def test_places_that_make_no_sense_are_refused(self) -> None:
        for sharding, words in ((None, "has no DCP_SHARDING_INFO"), ([], "expected .*2 numbers"),
                                ({}, "tensor 'w' of 2 dimensions"), (self.at(0), "expected .*2 numbers"),
                                (self.at(0, -1), "expected"), (self.at(0, "0"), "expected")):
            path = self.put(1, sharding, 1, 2)
            with self.assertRaisesRegex(anyrank.AnyrankError, f"{path.name}.*{words}"):
                convert.convert(self.path / "source", self.path / "out")
            self.assertFalse((self.path / "out").exists())


@needs("torch")
class SGLang(FolderCase):
    """Files as sglang/srt/debug_utils/dumper.py (00d35548) writes them."""

    def dump(self, rank: int, name: str, value: typing.Any, dims: str | None, folder: str = "source", step: int = 0,
             info: dict[str, int] | None = None, tags: typing.Any = None) -> None:
        import torch
        path = self.path / folder
        path.mkdir(exist_ok=True)
        full = {"step": step, "rank": rank, "dump_index": len(list(path.iterdir())) + 1, "name": name,
                "recompute_status": "disabled", **(tags or {})}
        meta = {**full, "world_rank": rank, "sglang_parallel_info": info or {},
                "megatron_parallel_info": {"a_error": True}}
        if dims is not None:
            meta["dims"] = dims
        torch.save({"value": value, "meta": meta}, path / ("___".join(f"{k}={v}" for k, v in full.items()) + ".pt"))

    def ranks_of(self, s: int = 8, b: int = 2, heads: int = 4, d: int = 3) -> None:
        """4 ranks, cp 2 by tp 2, and one rank: the same values."""
        import torch
        q = torch.randint(-99, 99, (s, b, heads, d)).float()
        out, residual = torch.randint(-99, 99, (s, b, 5)).float(), torch.randint(-99, 99, (s, 1, b)).bfloat16()
        self.dump(0, "q", q, "s b num_heads d", "one", tags={"layer_id": 3})
        self.dump(0, "out", out, "s b h", "one")
        self.dump(0, "residual", residual, "s 1 b", "one")
        self.dump(0, "grad__out", out * 2, None, "one", step=1)
        self.dump(0, "tokens", residual[:, 0], None, "one")
        for rank in range(4):
            c, t = divmod(rank, 2)
            info = {"cp_rank": c, "cp_size": 2, "tp_rank": t, "tp_size": 2, "sp_rank": t, "sp_size": 2, "ep_rank": 0,
                    "ep_size": 1}
            mine = torch.tensor([*range(2 * c, 2 * c + 2), *range(6 - 2 * c, 8 - 2 * c)])
            half = out[mine] // 2
            partial = half if t else out[mine] - half
            for name, value, dims, tags in (
                    ("q", q[mine, :, 2 * t:2 * t + 2], "s[cp:zigzag] b num_heads[tp] d # ep:replicated",
                     {"layer_id": 3}),
                    ("out", partial, "s[cp:zigzag,ep] b h[tp:partial]", {}),
                    ("residual", residual[mine][2 * t:2 * t + 2], "s[cp:zigzag,sp] 1 b # tp:replicated", {}),
                    ("tokens", residual[:, 0] if c == 0 else residual[:0, 0], "t h # tp:replicated dp:=attn_dp", {}),
                    ("grad__out", out[4 * c:4 * c + 4] * 2, "s[cp:natural] b h # tp:replicated", {})):
                self.dump(rank, name, value.clone(), dims, step=int(name == "grad__out"), info=info, tags=tags)
        again = {"recompute_status": "recompute", "recompute_pseudo_rank": 1, "recompute_pseudo_size": 2}
        self.dump(0, "out", out + 1, "s b h", info=info, tags=again)
        self.dump(0, "note", "words", None, info={"cp_rank": 0, "cp_size": 2, "tp_rank": 0, "tp_size": 2, "sp_rank": 0,
                                                  "sp_size": 2})

    def test_dims_put_the_ranks_values_together(self) -> None:
        self.ranks_of()
        done = convert.convert(self.path / "source", self.path / "out")
        self.assertEqual((done.kind, done.ranks, done.needs_map, len(done.notes)), ("dump of SGLang", 4, True, 3))
        with convert.as_dump(self.path / "one") as (one, none), convert.as_dump(self.path / "source") as (many,
                                                                                                          mapping):
            self.assertIsNone(none)
            assert mapping is not None
            found = anyrank_json("verify", one, many, "--map", mapping)
        self.assertFalse(os.path.exists(many))
        self.assertEqual((found["result"], found["tensors"], found["missing"], found["unexpected"]), ("same", 5, [],
                                                                                                      []))
        with self.assertRaisesRegex(anyrank.AnyrankError, "need the mapping"):
            convert.convert(self.path / "source", self.path / "full", full=True)

    def test_ranks_of_unequal_sizes_get_the_full_extent(self) -> None:
        import torch
        whole = torch.arange(15.0).reshape(5, 3)
        self.dump(0, "x", whole, "t h", "one")
        for rank, part in enumerate(whole.split([3, 2])):
            self.dump(rank, "x", part.clone(), "t[tp] h", info={"tp_rank": rank, "tp_size": 2})
        with convert.as_dump(self.path / "one") as (one, _), convert.as_dump(self.path / "source") as (many, mapping):
            assert mapping is not None
            self.assertEqual(json.loads(pathlib.Path(mapping).read_text())["tensors"][0]["shape"], [5, None])
            self.assertEqual(anyrank_json("verify", one, many, "--map", mapping)["result"], "same")

    def test_dims_become_shards_and_summands(self) -> None:
        import torch
        zigzag: typing.Any = {"dim": 0, "zigzag": True}
        rule: typing.Any
        for i, (dims, shape, rule) in enumerate((
                ("b h", (2, 2), {}),
                ("b 1 h[tp] # cp:replicated", (2, 1, 2), {"shard": [["tp", 1]]}),
                ("t[tp:sharded,cp:zigzag+sharded] h", (2, 2), {"shard": [["tp", 0], ["cp", zigzag]]}),
                ("t[cp, ep] (heads*d_1)[tp:partial]", (2, 2), {"shard": [["cp", 0]], "partial": ["tp"]}),
                ("h[tp", (2,), "'h\\[tp' is no word"), ("b h()", (2, 2), "is no word"),
                ("b 2", (2, 2), "'2' is no word"),
                ("h[tp:zigzg]", (2,), "'tp:zigzg' is qualified by 'zigzg'"),
                ("h[tp:zigzag+partial]", (2,), "is qualified by"), ("b[tp] h[sp]", (2, 2), "'tp' is there twice"),
                ("b[tp:partial] h[tp]", (2, 2), "'tp' is there twice"), ("b s b", (2, 2, 2), "'b' is there twice"),
                ("(b*b)", (2,), "'b' is there twice"),
                ("1 h", (2, 2), r"shape \[2, 2\], which its dims '1 h' do not fit"),
                ("h", (2, 2), "do not fit"), ("", (2,), "do not fit"))):
            for rank in range(4):
                c, t = divmod(rank, 2)
                self.dump(rank, "x", torch.zeros(shape), dims, f"in{i}", info={
                    "cp_rank": c, "cp_size": 2, "tp_rank": t, "tp_size": 2, "sp_rank": t, "sp_size": 2})
            if isinstance(rule, str):
                with self.assertRaisesRegex(anyrank.AnyrankError, rule, msg=dims):
                    convert.convert(self.path / f"in{i}", self.path / "out")
                continue
            convert.convert(self.path / f"in{i}", self.path / f"out{i}")
            self.assertEqual(json.loads((self.path / f"out{i}" / "map.json").read_text()), {
                "version": 1, "mesh": [["cp", 2], ["tp", 2]], "files": "rank-{rank}.safetensors", "unmatched": "error",
                "tensors": [{"match": "x:fwd", **rule}]})

    def test_what_is_missing_is_named(self) -> None:
        self.ranks_of()
        gone = [path for path in (self.path / "source").iterdir() if "___rank=2___" in path.name]
        self.dump(1, "bare", __import__("torch").zeros(2), None, info={
            "cp_rank": 0, "cp_size": 2, "tp_rank": 1, "tp_size": 2, "sp_rank": 1, "sp_size": 2, "ep_rank": 0,
            "ep_size": 1})
        with self.assertRaisesRegex(anyrank.AnyrankError, "name=bare.*has no dims, of 4 ranks"):
            convert.convert(self.path / "source", self.path / "out")
        for path in gone:
            path.unlink()
        with self.assertRaisesRegex(anyrank.AnyrankError, "MissingShard: .*files of 3 ranks, the mesh of .* has 4"):
            convert.convert(self.path / "source", self.path / "out")


if __name__ == "__main__":
    unittest.main()
