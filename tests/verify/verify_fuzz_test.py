#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dumps of runs from which tensors, dimensions and ranks are taken away, or that are changed in other ways: `verify`
compares each pair and explains what differs, and ends with 0, 1 or 2, whatever the dumps are.

150 cases run by default, 50 in plain ./test and 10,000 with --extended. ANYRANK_FUZZ_CASES is another number and
ANYRANK_FUZZ_SEED another seed; ANYRANK_FUZZ_KEEP is a folder that keeps the dumps of cases that fail. BINARY is best a
build with sanitizers: tests/verify/verify_fuzz_test.py build/asan/anyrank.
"""

import array
import concurrent.futures
import copy
import json
import math
import os
import pathlib
import random
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import EXTENDED, GOLDEN, Case, run  # noqa: E402

SMALL = "ANYRANK_TEST_SMALL" in os.environ  # plain ./test
CASES = int(os.environ.get("ANYRANK_FUZZ_CASES", 10000 if EXTENDED else 50 if SMALL else 150))
SEED = int(os.environ.get("ANYRANK_FUZZ_SEED", 20261129))
# The command does not start itself again with a policy for OpenMP where one is given.
ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "OMP_WAIT_POLICY": "passive"}
KEEP = os.environ.get("ANYRANK_FUZZ_KEEP")
MOST_TENSORS, MOST_ELEMENTS = 14, 1 << 13
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8}
CODES = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?"}

# Runs that differ: a fault with its model, or none, where mutations make the differences.
CHECKS = (("gpt2-tiny", "row_bias_every_rank", "--tp", 2), ("gpt2-tiny", "gradnorm_local_clip", "--tp", 2),
          ("llama-gqa-tiny", "dp_sum_of_local_means", "--dp", 2), ("llama-gqa-tiny", None, "--dp", 2, "--tp", 2),
          ("experts/gpt-oss-defaults-tiny", "experts_not_reduced", "--tp", 2),
          ("experts/deepseek-v3-tiny", None, "--tp", 2))
GRADS = (("gpt2-tiny", "--tp", 2), ("llama-gqa-tiny", "--dp", 2))
MODULES = ("act", "act_fn", "norm", "ln_f", "attn", "self_attn", "router", "gate", "experts.0", "mlp", "mlp.down_proj",
           "lm_head", "lm_head.logits", "loss", "wte", "embed_tokens", "rotary_emb", "q_proj", "qkv", "softmax",
           "dropout", "moe.experts.1.down_proj", "shared_experts", "layers.0", "layers.1", "1", "x", "output",
           "grad_norm", "balance", "pooler", "score", "position_ids", "probs", "scores", "input_ids", "labels")
SUFFIXES = (":fwd", ":bwd", ":fwd@2", ".weight:grad", ".bias:grad", ".weight:new", ".weight:init", ".weight", ":clip",
            ".weight:m", ".weight:v", ".weight:new@2", ".weight:grad@2", "")
RULES = (("--bits",), ("--rtol", "1e-4", "--atol", "1e-6"), ("--atol", "0"), ("--rtol", "0.3"), ("--ulp", "3"))


class Dump:
    """Files of one dump: {file: (tensors, metadata)}; a single file, or one of each rank."""

    def __init__(self, path):
        path = pathlib.Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        self.is_folder = path.is_dir()
        self.files = {f.name: (tensor_files.read(f), tensor_files.unpacked(f)[0].get("__metadata__", {}))
                      for f in files}

    def names(self):
        return sorted({name for tensors, _ in self.files.values() for name in tensors})

    def chosen(self, names):
        """The same dump with these tensors alone."""
        out = copy.copy(self)
        out.files = {}
        for file, (tensors, metadata) in self.files.items():
            kept = {name: [dtype, list(shape), data] for name, (dtype, shape, data) in tensors.items() if name in names}
            if kept:
                out.files[file] = (kept, {key: chosen_text(key, text, names) for key, text in metadata.items()})
        return out

    def write(self, path):
        path.mkdir(parents=True)
        for file, (tensors, metadata) in self.files.items():
            tensor_files.write(path / file, tensors, metadata)
        return path if self.is_folder else path / next(iter(self.files), "none.safetensors")


def chosen_text(key, text, names):
    """A value of the metadata without what it says of other tensors."""
    if key not in ("ANYRANK_PLACEMENT", "DCP_SHARDING_INFO"):
        return text
    value = json.loads(text)
    if key == "DCP_SHARDING_INFO":
        return {name: value[name] for name in value if name in names}
    value["tensors"] = {name: x for name, x in value.get("tensors", {}).items() if name in names}
    value["order"] = [name for name in value.get("order", []) if name in names]
    return value


def numbers(tensor):
    dtype, _, data = tensor
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]
    if dtype == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    return list(array.array("f" if dtype == "C64" else CODES[dtype].replace("?", "B"), data))


def packed(dtype, values):
    if dtype == "C64":
        return array.array("f", [part for x in values for part in (x, -0.5 * x)]).tobytes()
    if dtype == "BF16":
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    if dtype in ("F32", "F64"):
        return array.array(CODES[dtype], values).tobytes()
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *(max(-6e4, min(6e4, x)) if math.isfinite(x) else x for x in values))
    if dtype == "BOOL":
        return bytes(x > 0 for x in values)
    bits = 8 * SIZES[dtype]
    low, high = (0, 2 ** bits - 1) if dtype == "U8" else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)
    return struct.pack(f"<{len(values)}{CODES[dtype]}",
                       *(max(low, min(high, int(16 * x) if math.isfinite(x) else 0)) for x in values))


class Mutation:
    """Changes of two dumps, some of both alike and some of one."""

    def __init__(self, dumps, draw):
        self.dumps, self.draw = dumps, draw

    def entries(self, dump, name):
        """Of each file that has it: its tensor, what the placement says of it, where it begins."""
        for tensors, metadata in dump.files.values():
            if name in tensors:
                placement = metadata.get("ANYRANK_PLACEMENT", {})
                offsets = metadata.get("DCP_SHARDING_INFO", {}).get(name, {}).get("saved_offsets")
                yield tensors[name], (placement.get("tensors", {}) if isinstance(placement, dict) else {}).get(name), \
                    offsets

    def pick(self):
        names = sorted({name for dump in self.dumps for name in dump.names()})
        return self.draw.choice(names) if names else "x"

    def targets(self):
        """Both dumps, or one of them."""
        return self.dumps if self.draw.random() < 0.6 else [self.draw.choice(self.dumps)]

    def each(self, change):
        name = self.pick()
        for dump in self.targets():
            for tensor, place, offsets in self.entries(dump, name):
                change(tensor, place, offsets)

    def drop(self):
        name = self.pick()
        for dump in self.targets():
            for tensors, _ in dump.files.values():
                tensors.pop(name, None)

    def drop_from_one_file(self):
        name, dump = self.pick(), self.draw.choice(self.dumps)
        dump.files[self.draw.choice(sorted(dump.files))][0].pop(name, None)

    def drop_file(self):
        dump = self.draw.choice(self.dumps)
        if len(dump.files) > 1:
            del dump.files[self.draw.choice(sorted(dump.files))]

    def add_dimension(self):
        at = self.draw.randrange(3)

        def change(tensor, place, offsets):
            tensor[1].insert(at, 1)
            if place:
                place["shape"].insert(at, 1)
            if offsets is not None:
                offsets.insert(at, 0)
        self.each(change)

    def join_dimensions(self):
        def change(tensor, place, offsets):
            if len(tensor[1]) > 1:
                tensor[1][:2] = [tensor[1][0] * tensor[1][1]]
                if place:
                    place["shape"][:2] = [math.prod(place["shape"][:2])]
                if offsets:
                    offsets[:2] = [sum(offsets[:2])]
        self.each(change)

    def reverse_shape(self):
        def change(tensor, place, offsets):
            for shape in (tensor[1], place and place["shape"], offsets):
                if shape:
                    shape.reverse()
        self.each(change)

    def shrink(self):
        """The first indices of a dimension alone: none, one or a few."""
        kept, dim = self.draw.choice((0, 0, 1, 1, 2, 3)), self.draw.randrange(3)

        def change(tensor, place, offsets):
            dtype, shape, data = tensor
            if (dim >= len(shape) or not data or shape[dim] <= kept or
                    (place and place["shape"][dim:dim + 1] != [shape[dim]])):
                return
            inner = math.prod(shape[dim + 1:]) * SIZES[dtype]
            tensor[2] = b"".join(data[i:i + kept * inner] for i in range(0, len(data), shape[dim] * inner))
            shape[dim] = kept
            if place:
                place["shape"][dim] = kept
        self.each(change)

    def scalar(self):
        empty = self.draw.random() < 0.3

        def change(tensor, place, offsets):
            dtype, shape, data = tensor
            if len(data) < SIZES[dtype]:
                return
            shape[:] = [0] if empty else []
            tensor[2] = b"" if empty else data[:SIZES[dtype]]
            if place:
                place["shape"][:] = shape
            if offsets:
                offsets[:] = [0] * len(shape)
        self.each(change)

    def other_dtype(self):
        dtype = self.draw.choice(sorted(SIZES))

        def change(tensor, place, _):
            values = numbers(tensor)
            tensor[2] = packed(dtype, values[::2] if tensor[0] == "C64" else values)
            tensor[0] = dtype
        self.each(change)

    def change_values(self):
        """Of the other dump, and often of one file alone."""
        kind, name = self.draw.randrange(9), self.pick()
        dump = self.dumps[self.draw.random() < 0.8]
        factor, special = self.draw.choice((2.0, 0.5, -1.0, 0.0, 1.0 + 1e-6, 3.7)), self.draw.choice(
            (math.nan, math.inf, -math.inf, 1e38, 0.0))
        for tensor, _, _ in list(self.entries(dump, name))[:1 if self.draw.random() < 0.4 else None]:
            x, n = numbers(tensor), len(tensor[2]) // SIZES[tensor[0]]
            if not x:
                continue
            begin = self.draw.randrange(len(x))
            end = min(len(x), begin + 1 + self.draw.randrange(len(x)))
            if kind < 2:
                x = [factor * v for v in x]
            elif kind == 2:
                x[begin:end] = [special] * (end - begin)
            elif kind == 3:
                x = [special] * len(x)
            elif kind == 4:
                x = x[begin:] + x[:begin]
            elif kind == 5:
                x = [v + self.draw.gauss(0.0, 1e-3) for v in x]
            elif kind == 6:
                x = [v + 1e-6 * abs(v) * self.draw.random() for v in x]
            elif kind == 7:
                x[begin] = special
            else:
                x[begin:end] = x[begin:end][::-1]
            if tensor[0] not in ("C64", "I64", "U8", "I8", "I16", "I32", "BOOL"):
                tensor[2] = packed(tensor[0], [clipped(v, tensor[0]) for v in x])
                assert len(tensor[2]) == n * SIZES[tensor[0]]

    def swap(self):
        """The values of two tensors of a dump."""
        a, b, dump = self.pick(), self.pick(), self.draw.choice(self.dumps)
        for tensors, _ in dump.files.values():
            if a in tensors and b in tensors and tensors[a][:2] == tensors[b][:2]:
                tensors[a][2], tensors[b][2] = tensors[b][2], tensors[a][2]

    def rename(self):
        old = self.pick()
        prefix = self.draw.choice(("", "model.layers.0.", "model.", "transformer.h.1.", "layers.1.mlp."))
        new = prefix + self.draw.choice(MODULES) + self.draw.choice(SUFFIXES)
        if self.draw.random() < 0.5 and ":" in old:  # the same pass
            new = new.split(":")[0].replace(".weight", "").replace(".bias", "") + ":" + old.split(":")[1]
        for dump in self.targets():
            for tensors, metadata in dump.files.values():
                places = [tensors]
                for value in (metadata.get("ANYRANK_PLACEMENT"), metadata.get("DCP_SHARDING_INFO")):
                    if isinstance(value, dict):
                        places.append(value.get("tensors", value))
                        value["order"] = [new if x == old else x for x in value["order"]] if "order" in value else []
                        if not value["order"]:
                            del value["order"]
                for place in places:
                    if old in place and new not in place:
                        place[new] = place.pop(old)

    def metadata(self):
        key = self.draw.choice(("numerics", "num_attention_heads", "num_key_value_heads", "targets", "layout", "model"))
        value = self.draw.choice((None, "", "0", "1", "3", "-1", "99999999999999999999", "native", "tp=0", "x"))
        for dump in self.targets():
            for _, metadata in dump.files.values():
                metadata.pop(key, None)
                if value is not None:
                    metadata[key] = value

    def mesh(self):
        sizes = self.draw.choice(([["dp", 2]], [["tp", 2]], [["pp", 1], ["ep", 2]], [["cp", 2], ["tp", 1]]))
        for dump in self.dumps:
            for rank, (_, metadata) in enumerate(dump.files.values()):
                placement = metadata.get("ANYRANK_PLACEMENT")
                if isinstance(placement, dict) and "mesh" in placement and placement.get("world") == 2:
                    placement["mesh"], placement["at"] = sizes, [rank % 2 if n == 2 else 0 for _, n in sizes]


MUTATIONS = ((Mutation.drop, 3), (Mutation.drop_from_one_file, 1), (Mutation.drop_file, 1), (Mutation.add_dimension, 2),
             (Mutation.join_dimensions, 2), (Mutation.reverse_shape, 1), (Mutation.shrink, 4), (Mutation.scalar, 2),
             (Mutation.other_dtype, 2), (Mutation.change_values, 12), (Mutation.swap, 2), (Mutation.rename, 10),
             (Mutation.metadata, 1), (Mutation.mesh, 1))


def clipped(x, dtype):
    most = {"F32": 3.4e38, "BF16": 3.3e38, "F16": 6e4}.get(dtype, 1e300)
    return max(-most, min(most, x)) if math.isfinite(x) else x


def small_names(dumps, draw):
    """Tensors next to each other in execution order, and some from anywhere."""
    order = [name for _, metadata in dumps[0].files.values()
             for name in json.loads(metadata.get("ANYRANK_PLACEMENT", "{}")).get("order", [])] or dumps[0].names()
    sizes = {}
    for dump in dumps:
        for tensors, _ in dump.files.values():
            for name, (_, shape, _) in tensors.items():
                sizes[name] = max(sizes.get(name, 0), math.prod(shape))
    order = [name for name in order if sizes.get(name, 0) <= MOST_ELEMENTS]
    begin, n = draw.randrange(len(order)), draw.randrange(1, MOST_TENSORS)
    return set(order[begin:begin + n]) | set(draw.sample(order, min(len(order), draw.randrange(4))))


class Fuzz(Case):
    def bases(self):
        """Pairs of a reference and another dump."""
        pairs = []
        for i, (model, fault, *layout) in enumerate(CHECKS):
            inject = ("--inject", fault) if fault else ()
            folder = self.folder / f"check{i}"
            words = (GOLDEN / model, "--dump", folder, "--batch", 2, "--seq", 8, "--steps", 2, *layout, *inject)
            self.done("check", *words, code=1 if fault else 0)
            others = [path for path in sorted(folder.iterdir()) if path.is_dir()]
            self.assertTrue(others, model)
            pairs.append((folder / "reference.safetensors", others[0]))
        for i, (model, *layout) in enumerate(GRADS):
            out, batch = self.folder / f"grads{i}", GOLDEN / model / "batch.safetensors"
            self.done("grads", GOLDEN / model, "--input", batch, "--out", out / "one", "--per-rank", "--activations")
            self.done("grads", GOLDEN / model, "--input", batch, "--out", out / "two", "--per-rank", "--activations",
                      *layout)
            pairs.append((out / "one/ranks", out / "two/ranks"))
        return [(Dump(a), Dump(b)) for a, b in pairs]

    def one_case(self, bases, number):
        """Why the case fails, else None, and its exit status."""
        draw = random.Random(SEED * 1000003 + number)
        pair = draw.choice(bases)
        names = small_names(pair, draw)
        dumps = [dump.chosen(names) for dump in pair]
        if draw.random() < 0.3:  # of two files alone every change of a shape is a valid one
            dumps[1] = copy.deepcopy(dumps[0])
        mutation = Mutation(dumps, draw)
        for change in draw.choices(*zip(*MUTATIONS), k=draw.randrange(1, 9)):
            change(mutation)
        with tempfile.TemporaryDirectory(prefix="anyrank-fuzz-") as holder:
            folder = pathlib.Path(holder)
            for dump in dumps:
                for tensors, metadata in dump.files.values():
                    metadata.update({k: json.dumps(v) for k, v in metadata.items() if not isinstance(v, str)})
            paths = [dump.write(folder / side) for dump, side in zip(dumps, "ab")]
            rule = self.rule(draw, dumps, folder)
            options = draw.choice(((), (), ("--heads", 4, "--kv-heads", 2), ("--common",), ("--tp", 2, "--dp", 1),
                                   ("--no-equal-nan",), ("--json", "-"), ("--html", folder / "page.html")))
            done = run("verify", *paths, *rule, *options, env=ENVIRONMENT)
            why = None
            if done.returncode not in (0, 1, 2):
                why = f"exit status {done.returncode}"
            elif any(text in done.stdout + done.stderr for text in ("explaining ended", "Warning: ", "Sanitizer",
                                                                    "runtime error")):
                why = "a crash"
            if why and KEEP:
                kept = pathlib.Path(KEEP) / f"case{SEED}-{number}"
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                (kept / "stderr").write_text(f"{rule} {options}\n{done.stderr}")
            return why and f"case {number}: {why}: {rule} {options}\n{done.stderr[:3000]}{done.stdout[:1000]}", done.returncode

    @staticmethod
    def rule(draw, dumps, folder):
        if draw.random() < 0.7:
            return draw.choice(RULES)
        names = {name for dump in dumps for name in dump.names()}
        allowed = {name: ("F64", [], struct.pack("<d", 10.0 ** draw.randrange(-9, 0))) for name in names}
        return "--sensitivity", tensor_files.write(folder / "allowed.safetensors", allowed)

    def test_no_pair_of_dumps_ends_verify_by_a_crash(self):
        bases = self.bases()
        found, statuses = [], {}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for why, status in pool.map(lambda number: self.one_case(bases, number), range(CASES)):
                statuses[status] = statuses.get(status, 0) + 1
                if why:
                    found.append(why)
        print(f"{CASES} cases of seed {SEED}: exit statuses {dict(sorted(statuses.items()))}, {len(found)} failed")
        self.assertEqual(found, [], f"{len(found)} of {CASES} cases, seed {SEED}")
        self.assertGreater(statuses.get(1, 0), CASES // 4)  # most cases reach the explanation


if __name__ == "__main__":
    unittest.main()
