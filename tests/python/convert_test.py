#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that PyTorch, DeepSpeed and megatron-core wrote (golden/checkpoints.py) come out bit for bit, without
torch."""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from anyrank import AnyrankError, _safetensors, convert  # noqa: E402
from anyrank.convert import _pickles  # noqa: E402
from anyrank.tests import anyrank_json  # noqa: E402

sys.path.insert(0, str(ROOT / "tests" / "verify"))
import pages  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "checkpoints"
STEP = int(os.environ.get("ANYRANK_TEST_STEP", "97"))  # every so many bytes are damaged
KINDS = {"dcp": ("torch.distributed.checkpoint", 4), "zero1": ("DeepSpeed", 2), "zero2": ("DeepSpeed", 2),
         "zero3": ("DeepSpeed", 3), "tied": ("DeepSpeed", 2),
         "flattened": ("Megatron torch_dist", 4), "torch_dist": ("Megatron torch_dist", 4), "legacy": ("Megatron", 4)}


class Golden(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def unpack(self, name):
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            archive.extractall(self.path)  # written by golden/checkpoints.py
        return self.path / name

    def verify(self, reference, other, *more):
        found = anyrank_json("verify", str(reference), str(other), *more)
        self.assertEqual(found["result"], "same", found)
        return found["tensors"]

    def convert_command(self, *words):
        return subprocess.run([sys.executable, "-m", "anyrank.convert", *words], cwd=self.path, capture_output=True,
                              text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "python")})

    def change_a_bit(self, path, names):
        bits = bytearray(path.read_bytes())
        size = int.from_bytes(bits[:8], "little")
        header = json.loads(bits[8:8 + size])
        name = next(name for name in header if name in names and header[name]["shape"] != list(names[name].shape))
        bits[8 + size + header[name]["data_offsets"][0]] ^= 1
        path.write_bytes(bits)

    def test_full_tensors_have_the_bits_that_the_library_reads(self):
        for name, (kind, _) in KINDS.items():
            with self.subTest(name):
                done = convert(self.unpack(name), self.path / f"{name}.safetensors", full=True)
                self.assertEqual((done.kind, done.ranks), (kind, 0))
                found, expected = (_safetensors.read(path)[0] for path in (done.path, GOLDEN / f"{name}.safetensors"))
                moments = {key for key in found if key.endswith((":m", ":v"))}
                if kind == "DeepSpeed":  # of which the library gives no step, after two of the run
                    weights = {key[:-2] for key in moments}
                    steps = {key: found.pop(key) for key in sorted(found) if key.endswith(".step")}
                    self.assertEqual({key: (one.dtype, one.shape, one.data.tobytes()) for key, one in steps.items()},
                                     {f"{key}.step": ("F32", (), struct.pack("<f", 2)) for key in weights})
                if name in ("zero2", "tied", "flattened"):  # the library itself reads no moments there
                    self.assertTrue(moments and {key[:-2] for key in moments} <= set(expected))
                    self.assertEqual(set(found) - moments, set(expected))
                else:
                    self.assertEqual(set(found), set(expected))
                for key, entry in expected.items():
                    self.assertEqual((found[key].dtype, found[key].shape), (entry.dtype, entry.shape), key)
                    self.assertEqual(found[key].data, entry.data, key)

    def test_ranks_files_are_the_same_dump_and_one_changed_bit_names_its_rank(self):
        for name, (_, ranks) in KINDS.items():
            with self.subTest(name):
                done = convert(self.unpack(name), self.path / f"{name}-ranks")
                self.assertEqual(done.ranks, ranks)
                reference = GOLDEN / f"{name}.safetensors"
                self.assertEqual(self.verify(reference, done.path, "--common"), len(_safetensors.read(reference)[0]))
                last = pathlib.Path(done.path, f"rank-{ranks - 1:05d}.safetensors")
                self.change_a_bit(last, _safetensors.read(reference)[0])
                found = anyrank_json("verify", str(reference), done.path, "--common")
                self.assertEqual((found["result"], found["first"]["rank"]), ("different", ranks - 1), found["first"])

    def test_two_formats_of_one_model_agree_under_the_names_of_hugging_face(self):
        found = [convert(self.unpack(name), self.path / f"{name}-ranks") for name in ("torch_dist", "legacy")]
        maps = [one.map for one in found]
        self.assertFalse(found[0].needs_map or found[1].needs_map)
        count = self.verify(found[0].path, found[1].path, "--common", "--reference-map", maps[0], "--map", maps[1])
        self.assertEqual(count, 4 * 9 + 3)  # of each layer two norms, q, k, v, o, gate, up and down
        full = convert(self.path / "torch_dist", self.path / "full", full=True)
        self.assertEqual(full.map, str(self.path / "full" / "map.json"))
        both = self.verify(full.path, found[0].path, "--reference-map", full.map, "--map", maps[0])
        self.assertEqual(both, 3 * count)

    def test_the_model_s_own_weights_and_its_master_copies(self):
        source = self.unpack("zero2")
        convert(source, self.path / "model", weights="model", suffix="new", step=2)
        convert(source, self.path / "master")
        model, _ = _safetensors.read(self.path / "model" / "rank-00000.safetensors")
        master, _ = _safetensors.read(self.path / "master" / "rank-00000.safetensors")
        self.assertEqual((model["0.weight:new@2"].dtype, master["0.weight"].dtype), ("BF16", "F32"))
        self.assertIn("0.weight:m@2", model)

    def test_the_page_s_examples(self):
        page = pages.blocks("pytorch.md")
        (session,) = [one for one in page if one.startswith("$ python3 -m anyrank.convert")]
        (command, printed), (compared, _) = pages.session(session)
        self.unpack("dcp").rename(self.path / "checkpoint-100")
        (self.path / "run").symlink_to(self.path)
        done = self.convert_command(*command.split()[3:])
        self.assertEqual((done.returncode, done.stdout), (0, printed), done.stderr)
        self.assertEqual(compared.split(), ["anyrank", "verify", "reference", "converted"])
        self.verify(GOLDEN / "dcp.safetensors", self.path / "converted")
        # Under the names of Hugging Face, with the mapping that the page's line names.
        (mapped,) = re.findall(r"`(anyrank verify hugging-face-folder[^`]*)`", pages.text("pytorch.md"))
        words = mapped.split()
        self.assertEqual(words[3:5], ["converted", "--map"])
        done = self.convert_command(str(self.unpack("torch_dist")), "megatron")
        self.assertEqual(done.returncode, 0, done.stderr)
        legacy = convert(self.unpack("legacy"), self.path / "legacy-converted")
        self.verify(self.path / "legacy-converted", self.path / "megatron", "--reference-map", str(legacy.map),
                    "--map", str(self.path / words[5].replace("converted", "megatron")), *words[6:])

    def test_a_pickle_that_would_run_something_is_refused_as_the_page_says(self):
        (wanted,) = [one for one in pages.blocks("pytorch.md") if one.startswith("anyrank convert: run")]
        folder = self.unpack("dcp").rename(self.path / "run")
        (folder / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
        done = self.convert_command("run", "converted")
        self.assertEqual(done.returncode, 2)
        self.assertTrue(done.stderr.startswith(wanted.split(" ..")[0]), done.stderr)
        self.assertFalse((self.path / "ran").exists() or (self.path / "converted").exists())

    def test_a_missing_rank_is_named(self):
        for name, file, words in (
                ("dcp", "__2_0.distcp", "__2_0.distcp is missing"),
                ("zero1", "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "none of zero_pp_rank_1"),
                ("zero3", "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "none of zero_pp_rank_0"),
                ("torch_dist", "iter_0000003/__3_0.distcp", "__3_0.distcp is missing"),
                ("legacy", "iter_0000003/mp_rank_01_000", "none of tensor-parallel rank 1, stage 0")):
            with self.subTest(name):
                source = self.unpack(name)
                gone = source / file
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
                with self.assertRaisesRegex(AnyrankError, f"MissingShard: .*{words}"):
                    convert(source, self.path / "out")
                self.assertFalse((self.path / "out").exists())

    def test_a_file_cut_short_anywhere_is_an_error(self):
        for name, glob in (("dcp", "__1_0.distcp"), ("zero3", "*/*1_mp_rank_00_optim_states.pt"),
                           ("legacy", "*/*00_001/*.pt")):
            file = next(self.unpack(name).glob(glob))
            whole = file.read_bytes()
            for size in range(0, len(whole), max(1, len(whole) // 19)):
                file.write_bytes(whole[:size])
                with self.assertRaisesRegex(AnyrankError, file.name):
                    convert(self.path / name, self.path / "out")
            self.assertEqual(os.listdir(self.path).count("out"), 0)

    def test_any_damaged_byte_of_a_pickle_is_data_or_an_error(self):
        data = bytearray((self.unpack("dcp") / ".metadata").read_bytes())
        for at in range(0, len(data), STEP):
            for bit in (1, 32):
                data[at] ^= bit
                (self.path / "dcp" / ".metadata").write_bytes(data)
                try:
                    convert(self.path / "dcp", self.path / "out")
                    shutil.rmtree(self.path / "out")
                except AnyrankError:
                    pass
                data[at] ^= bit

    def test_tensor_parallel_files_of_deepspeed(self):
        """Two ranks of a layer, out of one checkpoint's files: the second's are copies with other bits."""
        source = self.unpack("zero2") / "global_step2"
        for file in sorted(source.iterdir()):
            shutil.copy(file, source / file.name.replace("mp_rank_00", "mp_rank_01"))
        with self.assertRaisesRegex(AnyrankError, "how tensor-parallel ranks cut '.*' is not known .* --shard"):
            convert(source, self.path / "out")
        done = convert(source, self.path / "out.safetensors", full=True,
                       shard={"0.weight": 0, "1.*": 0, "4.weight": 1, "3.*": None})
        one, _ = _safetensors.read(GOLDEN / "zero2.safetensors")
        two, _ = _safetensors.read(done.path)
        self.assertEqual((two["0.weight"].shape, two["1.bias"].shape, two["4.weight"].shape, two["3.bias"].shape),
                         ((22, 6), (20,), (3, 20), (10,)))
        self.assertEqual(two["0.weight"].data.tobytes(), one["0.weight"].data.tobytes() * 2)
        rows = [one["4.weight"].data[i * 40:(i + 1) * 40].tobytes() * 2 for i in range(3)]
        self.assertEqual(two["4.weight"].data.tobytes(), b"".join(rows))

    def test_a_layout_of_another_version_is_seen(self):
        source = self.unpack("zero2") / "global_step2"
        state = _pickles.load(source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
        self.assertEqual(state["optimizer_state_dict"]["param_slice_mappings"][0]["1.weight"].numel, 48)
        path = source / "mp_rank_00_model_states.pt"
        with zipfile.ZipFile(path) as old:
            members = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, data in members.items():
                new.writestr(name, data.replace(b"K\x0aK\x06\x86", b"K\x09K\x06\x86"))  # 1.weight is [10, 6]
        with self.assertRaisesRegex(AnyrankError, "a layout of another version"):
            convert(source, self.path / "out")


if __name__ == "__main__":
    unittest.main()
