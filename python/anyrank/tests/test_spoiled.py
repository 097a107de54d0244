# SPDX-License-Identifier: Apache-2.0
"""Causes of runs that numpy spoils: the dump of a right run, in which a mistake's values stand for the right ones."""

from __future__ import annotations

import json
import pathlib
import shutil
import typing

import anyrank
from anyrank import _safetensors
from anyrank.tests import FolderCase, needs

if typing.TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[typing.Any, np.dtype[typing.Any]]
    Dump = dict[str, Array]
    Spoil = typing.Callable[[Dump, int], dict[str, Array]]  # whole tensors of a rank, from the reference's


def read(path: pathlib.Path) -> Dump:
    import numpy as np

    return {name: np.frombuffer(entry.data, "<f4").reshape(entry.shape)
            for name, entry in _safetensors.read(path)[0].items() if entry.dtype == "F32"}


def put(path: pathlib.Path, whole: dict[str, Array]) -> None:
    """Puts the parts of whole tensors that a file of a rank has in the place of its own."""
    import numpy as np

    tensors, metadata = _safetensors.read(path)
    offsets = json.loads(metadata["DCP_SHARDING_INFO"])
    for name in whole.keys() & tensors.keys():
        shape, first = tensors[name].shape, offsets[name]["saved_offsets"]
        part = whole[name][tuple(slice(at, at + size) for at, size in zip(first, shape))]
        tensors[name] = _safetensors.Entry("F32", shape, memoryview(np.float32(part).tobytes()))
    path.unlink()
    _safetensors.write(path, tensors, metadata)


# --- Muon -------------------------------------------------------------------------------------------------------------

def orthogonal(u: Array, norm: float | None = None, last_shards: int = 1) -> Array:
    """Newton-Schulz of u [outputs, inputs] in five iterations, times the rate of its shape; in the last one each of so
    many shards of its columns has its own X X^T."""
    import numpy as np

    rate = max(1.0, u.shape[0] / u.shape[1]) ** 0.5
    x = np.float64(u) / (norm or np.linalg.norm(u))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for step in range(5):
        parts = np.split(x, last_shards if step == 4 else 1, axis=1)
        grams = [part @ part.T for part in parts]
        x = np.hstack([3.4445 * part + (-4.775 * gram + 2.0315 * gram @ gram) @ part
                       for part, gram in zip(parts, grams)])
    result: Array = rate * (x.T if tall else x)
    return result


def step_by(reference: Dump, name: str, right: Array, wrong: Array) -> Array:
    """The weights after a step by `wrong`, where the reference's is by `right`, at the rate of the latter."""
    import numpy as np

    weight = np.float64(reference[f"{name}:new"])
    moved = np.float64(reference[f"{name}:init"]) - weight
    spoiled: Array = weight + (moved * right).sum() / (right * right).sum() * (right - wrong)
    return spoiled


def norm_of_shards(u: Array) -> Array:
    import numpy as np

    halves = np.split(u, 2)
    result: Array = np.vstack([np.split(orthogonal(u, float(np.linalg.norm(half))), 2)[i]
                               for i, half in enumerate(halves)])
    return result


def rolled(u: Array) -> Array:
    import numpy as np

    result: Array = np.roll(orthogonal(u), len(u) // 2, axis=0)
    return result


def blocks(u: Array, sizes: typing.Sequence[int]) -> Array:
    """Matrices of so many rows each, made orthogonal by themselves."""
    import numpy as np

    result: Array = np.vstack([orthogonal(part) for part in np.split(u, np.cumsum(sizes)[:-1])])
    return result


QUERIES, OUTPUT = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"
PACKED, BIAS = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.bias"  # [inputs, outputs]


def spoil_matrix(wrong: typing.Callable[[Array], Array], name: str) -> Spoil:
    def spoil(reference: Dump, rank: int) -> dict[str, Array]:
        u = reference[f"{name}:grad"]
        return {f"{name}:new": step_by(reference, name, orthogonal(u), wrong(u))}
    return spoil


def spoil_packed(wrong: typing.Callable[[Array], Array]) -> Spoil:
    def spoil(reference: Dump, rank: int) -> dict[str, Array]:
        u = reference[f"{PACKED}:grad"].T
        return {f"{PACKED}:new": step_by(reference, PACKED, blocks(u, [len(u) // 3] * 3).T, wrong(u).T)}
    return spoil


def spoil_vector(reference: Dump, rank: int) -> dict[str, Array]:
    return {f"{BIAS}:new": reference[f"{BIAS}:init"] - 0.02 * reference[f"{BIAS}:grad"]}


def spoil_heads(reference: Dump, rank: int) -> dict[str, Array]:
    new = reference[f"{QUERIES}:new"].copy()
    heads = new.reshape(8, 32, -1)
    heads[0] *= 0.9 if rank else 0.8
    heads[3] *= 0.7 if rank else 1.0
    return {f"{QUERIES}:new": new}


# --- shares -----------------------------------------------------------------------------------------------------------

TABLE = "model.embed_tokens.weight"


def spoil_share(reference: Dump, rank: int) -> dict[str, Array]:
    new = reference[f"{TABLE}:new"].copy()
    new[128, 0] = reference[f"{TABLE}:init"][128, 0]
    return {f"{TABLE}:new": new}


# --- further tokens ---------------------------------------------------------------------------------------------------

def further_uses(reference: Dump) -> Array:
    """The part of the embedding's gradient that is of its uses by further tokens."""
    import numpy as np

    rows = reference["model.embed_tokens:fwd"]
    ids = np.array([[int(np.abs(reference[f"{TABLE}:init"] - row).sum(1).argmin()) for row in line] for line in rows])
    total = np.zeros(reference[f"{TABLE}:grad"].shape)
    for depth in (1, 2):
        further = np.zeros_like(ids)
        further[:, :-depth] = ids[:, depth:]
        np.add.at(total, further, np.float64(reference[f"model.layers.{2 + depth}.enorm:bwd"]))
    return total


def spoil_uses(times: int) -> Spoil:
    return lambda reference, rank: {f"{TABLE}:grad": reference[f"{TABLE}:grad"] + times * further_uses(reference)}


def spoil_roll(reference: Dump, rank: int) -> dict[str, Array]:
    name = "model.layers.3.embed_tokens:fwd"
    rows = reference[name].copy()
    rows[:, rows.shape[1] // 2 - 1] = reference[f"{TABLE}:init"][0]  # where the first of two ranks ends
    return {name: rows}


MUON: dict[str, object] = {"optimizer": "muon"}
CASES: list[tuple[str, str, str, str, dict[str, object], Spoil]] = [
    ("norm of shards", "muon_scale", "the norm of each of 2 parts along the rows", "llama-demo", {**MUON, "tp": 2},
     spoil_matrix(norm_of_shards, QUERIES)),
    ("product of shards", "unknown", "", "llama-demo", {**MUON, "tp": 2},
     spoil_matrix(lambda u: orthogonal(u, last_shards=2), OUTPUT)),
    ("shards misplaced", "update_misplaced", "the update of the part 1 further on", "llama-demo", {**MUON, "tp": 2},
     spoil_matrix(rolled, QUERIES)),
    ("packed as one", "muon_by_parts", "each of 3 matrices", "gpt2-demo", {**MUON, "tp": 2}, spoil_packed(orthogonal)),
    ("heads of one rank", "muon_by_parts", "[96, 96, 384] columns", "gpt2-demo", {**MUON, "tp": 2},
     spoil_packed(lambda u: blocks(u, [96, 96, 384]))),
    ("vector", "muon_input", "times 0.02", "gpt2-demo", {**MUON, "tp": 2}, spoil_vector),
    ("heads clipped", "unknown", "a number of its own: 0.8", "llama-demo", {**MUON, "dp": 2}, spoil_heads),
    ("share", "no_update", "no rank's share of the optimizer", "llama-demo", {"dp": 2, "zero": 2}, spoil_share),
    ("use lost", "tied_weight", "one use is lost", "mtp-demo", {"pp": 2, "micro_batches": 2}, spoil_uses(-1)),
    ("use twice", "tied_weight", "counts again", "mtp-demo", {"pp": 2, "micro_batches": 2}, spoil_uses(1)),
    ("rolled", "tokens_shifted", "the last tokens of ranks' parts alone", "mtp-demo", {"cp": 2}, spoil_roll),
]


@needs("numpy")
class Spoiled(FolderCase):
    def dump_of(self, model: str, options: dict[str, object]) -> pathlib.Path:
        """The dump of a right run, which is made once."""
        folder = self.path / "-".join([model, *map(str, options.values())])
        if not folder.exists():
            anyrank.check(model, batch=4, seq=24, steps=1, skip_f64=True, dump=folder,
                          **options)  # type: ignore[arg-type]
        return folder

    def test_each_mistake_is_named(self) -> None:
        for mistake, cause, words, model, options, spoil in CASES:
            with self.subTest(mistake):
                folder = self.path / mistake
                shutil.copytree(self.dump_of(model, options), folder)
                reference = folder / "reference.safetensors"
                right = read(reference)
                for path in folder.glob("*/rank-*.safetensors"):
                    put(path, spoil(right, int(path.name[5:10])))
                first = anyrank.verify(reference, path.parent).first
                assert first is not None
                self.assertEqual(first.cause, cause, f"{first.tensor}: {first.hint}")
                self.assertIn(words, first.hint)
