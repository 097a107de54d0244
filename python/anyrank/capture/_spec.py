# SPDX-License-Identifier: Apache-2.0
"""What a user says of a run that its model does not: spec=, a dictionary or a JSON file.

    {"mesh": {"dp": 2, "tp": 4},                               outermost dimension first
     "shard": {"*.q_proj.weight:*": {"tp": 0}, "*.q_proj:fwd": {"tp": -1}, "*:fwd": {"cp": {"dim": 1, "zigzag": True}}},
     "partial": {"*.q_proj:bwd": "tp"},
     "mean_over": "dp",
     "samples": "by_micro_batch"}

"samples" says how a batch is divided over data-parallel ranks: each micro-batch over all of them (as loaders do that
give every rank its next samples), "by_rank": each rank's micro-batches are neighbours, "dealt": sample after sample to
rank after rank, as DistributedSampler does.

"tied": {"head.weight": "embed.weight"}: the last stage of a pipeline has the first one's table under a name of its own,
and it is written as a copy of that.

A mapping file's spelling ("tensors": a list of rules with "match", "shard", "blocks" and "partial") means the same.

What the model is given is written as `input.NAME:fwd`. A glob for activations, such as "*:fwd", does not mean it; one
that has the word input in it does.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import re
import typing

from anyrank._errors import AnyrankError

KEYS = ("mesh", "shard", "partial", "mean_over", "samples", "tied", "tensors", "version", "note")
USUAL = ("dp", "tp", "cp", "pp", "ep")  # may be said of a run that lacks them: one program serves one rank and many
SAMPLES = ("by_micro_batch", "by_rank", "dealt")
EXTRAS = ("blocks", "unit", "copies", "zigzag")  # what a `shard` has besides dimensions; zigzag: those that are cut so
RULE_KEYS = ("match", "shard", "partial", "blocks", "unit", "copies", "note")
Names = typing.Union[str, typing.Sequence[str], None]


def _unknown(key: object, valid_keys: typing.Sequence[str], location: str) -> AnyrankError:
    near = difflib.get_close_matches(str(key), valid_keys, 1)
    hint = f"is {near[0]!r} meant?" if near else f"the keys are {list(valid_keys)}"
    return AnyrankError(f"{location}: unknown key {key!r}; {hint}")


def _names(value: typing.Any, location: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise AnyrankError(f"{location}: {value!r} is neither a dimension of the mesh nor a list of them")
    return list(names)


def _deals_out_samples(dims: typing.Mapping[str, typing.Any]) -> bool:
    """Returns whether dims say only how samples are distributed: all ranks have the same samples, or blocks of rows are
    joined in a batch, chosen before rejected. What is said so of activations holds for the model's batch."""
    cut = {key: dim for key, dim in dims.items() if key not in EXTRAS and dim is not None}
    return not cut or bool(dims.get("blocks")) and all(dim == 0 for dim in cut.values())


class Spec:
    """mesh: None where it is to be found. mean_over: None likewise; [] is none."""

    def __init__(self, document: typing.Any, read: bool = False) -> None:
        """read: from a model, as one that is read again may be."""
        self.source, self.read = "spec", read
        self.of_megatron = document == "megatron"  # to be read from the model, once it is there
        document = None if self.of_megatron else document
        if isinstance(document, (str, os.PathLike)):
            self.source = os.fspath(document)
            try:
                with open(document, encoding="utf-8") as file:
                    document = json.load(file)
            except (OSError, ValueError) as error:
                raise AnyrankError(f"spec: {self.source}: {error}") from None
        document = {} if document is None else document
        if not isinstance(document, dict):
            raise AnyrankError(f"spec: {type(document).__name__} is neither a dictionary nor a file's name")
        for key in document:
            if key not in KEYS:
                raise _unknown(key, KEYS, self.source)
        self.mesh = self._mesh(document.get("mesh"))
        mean = document.get("mean_over")
        self.mean_over = None if mean is None else _names(mean, f"{self.source}: mean_over")
        self.samples = document.get("samples", SAMPLES[0])
        if self.samples not in SAMPLES:
            raise AnyrankError(f"{self.source}: samples: {self.samples!r} is none of {list(SAMPLES)}")
        self.tied: dict[str, str] = document.get("tied", {})
        if not isinstance(self.tied, dict) or not all(isinstance(name, str) for name in self.tied.values()):
            raise AnyrankError(f"{self.source}: tied has to be a dictionary from a parameter's name to another's")
        self.parameters: set[str] = set()  # names on this rank, before what is tied gets another's
        self.modules: set[str] = set()  # the paths of the model's modules, one of which may be called `input`
        self.shard: list[tuple[str, dict[str, typing.Any]]] = []
        self.partial: list[tuple[str, list[str]]] = []
        for glob, dims in self._globs(document, "shard"):
            self._add_shard(glob, dims, f"{self.source}: shard of {glob!r}")
        for glob, dims in self._globs(document, "partial"):
            self.partial.append((glob, _names(dims, f"{self.source}: partial of {glob!r}")))
        for rule in document.get("tensors") or []:
            self._add_rule(rule)

    def _globs(self, spec: dict[str, typing.Any], key: str) -> list[tuple[str, typing.Any]]:
        globs = spec.get(key) or {}
        if not isinstance(globs, dict):
            raise AnyrankError(f"{self.source}: {key} has to be a dictionary from names to dimensions")
        return list(globs.items())

    def _mesh(self, mesh: typing.Any) -> dict[str, int] | None:
        if mesh is None or isinstance(mesh, dict):
            return dict(mesh) if mesh else None
        try:
            return {name: size for name, size in mesh}
        except (TypeError, ValueError):
            raise AnyrankError(f"{self.source}: mesh: {mesh!r} is neither a dictionary nor pairs of a name and a size"
                               ) from None

    def _add_shard(self, glob: str, dims: typing.Any, location: str) -> None:
        if not isinstance(dims, dict):
            raise AnyrankError(f"{location}: {dims!r} is no dictionary such as {{'tp': 0}}")
        for key, value in dims.items():
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if key == "blocks":
                good = value is None or (isinstance(value, (list, tuple)) and len(value) > 0 and
                                         all(isinstance(n, int) and n > 0 for n in value))
                right = "a list of relative sizes, or None"
            elif key == "unit" and not dims.get("blocks"):
                good, right = False, "what 'blocks' are counted in, which are missing"
            elif key == "copies" and dims.get("unit"):
                good, right = False, "left out beside 'unit', which says how many heads there are copies of"
            elif key in ("copies", "unit"):
                good, right = is_integer and value > 0, "an integer from 1"
            else:
                good, right = is_integer or value is None, "a dimension of the tensor, or None"
                if isinstance(value, dict):
                    good = set(value) == {"dim", "zigzag"} and isinstance(value["dim"], int) and value["zigzag"] is True
                    right = "as {'dim': 1, 'zigzag': True}"
            if not good:
                raise AnyrankError(f"{location}: {key!r} is {value!r}, which has to be {right}")
        cut = {key: value for key, value in dims.items() if isinstance(value, dict)}
        if cut:
            dims = {**dims, **{key: value["dim"] for key, value in cut.items()}, "zigzag": tuple(cut)}
        self.shard.append((glob, dims))

    def _add_rule(self, rule: typing.Any) -> None:
        if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
            raise AnyrankError(f"{self.source}: tensors: a rule has to be an object with 'match'")
        glob, location = rule["match"], f"{self.source}: rule {rule['match']!r}"
        for key in rule:
            if key not in RULE_KEYS:
                raise _unknown(key, RULE_KEYS, location)
        shard = dict(rule.get("shard") or {})
        shard.update({key: rule[key] for key in ("blocks", "unit", "copies") if key in rule})
        if shard:
            self._add_shard(glob, shard, location)
        if rule.get("partial") is not None:
            self.partial.append((glob, _names(rule["partial"], location)))

    def dims_of(self, name: str) -> dict[str, typing.Any]:
        """Returns what `shard` says of a tensor; {}: nothing."""
        name = name.split("@")[0]
        return next((dims for glob, dims in self.shard if self._means(glob, name, dims)), {})

    def partial_of(self, name: str) -> list[str]:
        name = name.split("@")[0]
        return next((dims for glob, dims in self.partial if self._means(glob, name)), [])

    def is_input(self, name: str) -> bool:
        """Returns whether a tensor without its step is the model's input, and not the output of a module called
        `input`."""
        path, _, kind = re.sub(r"\.call\d+:", ":", name).rpartition(":")
        of_modules = {path, path.rpartition(".")[0]} & (self.modules - {"input"})  # a module's output, or a further one
        return path.startswith("input.") and kind == "fwd" and not of_modules

    def of_activations_alone(self, name: str) -> dict[str, typing.Any]:
        """Returns, for a model's input, what `shard` says of activations by a glob that does not mean inputs; {}:
        nothing."""
        name = name.split("@")[0]
        if not self.is_input(name) or self.dims_of(name):
            return {}
        return next((dims for glob, dims in self.shard if fnmatch.fnmatchcase(name, glob)), {})

    def _means(self, glob: str, name: str, dims: typing.Mapping[str, typing.Any] | None = None) -> bool:
        """Returns whether a glob applies to this tensor."""
        if not fnmatch.fnmatchcase(name, glob):
            return False
        deals_out = dims is not None and _deals_out_samples(dims)
        return "input" in glob or not self.is_input(name) or deals_out

    def unmatched(self, names: typing.Collection[str]) -> list[str]:
        """Returns the globs that match none of these names."""
        if self.read:
            return []
        kinds = {name.rsplit(":", 1)[-1] for name in names}
        globs = dict.fromkeys(glob for glob, _ in [*self.shard, *self.partial])
        untied = sorted(set(self.tied) - self.parameters)
        return [glob for glob in globs if any(fnmatch.fnmatchcase(kind, glob.rsplit(":", 1)[-1]) for kind in kinds)
                and not any(fnmatch.fnmatchcase(name, glob) for name in names)] + untied

    def check(self, sizes: dict[str, int]) -> None:
        """Refuses dimensions that the mesh does not have."""
        for label, name in self.named():
            if name not in sizes and name not in USUAL:
                raise AnyrankError(f"{self.source}: {label}: the mesh {sizes} has no dimension {name!r}")

    def named(self) -> typing.Iterator[tuple[str, str]]:
        """The dimensions of the mesh that it speaks of, each after what it says of them."""
        for glob, dims in self.shard:
            yield from ((f"shard of {glob!r}", dim) for dim in dims if dim not in EXTRAS)
        for glob, names in self.partial:
            yield from ((f"partial of {glob!r}", name) for name in names)
        yield from (("mean_over", name) for name in self.mean_over or [])
