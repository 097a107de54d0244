# SPDX-License-Identifier: Apache-2.0
"""What was captured of each tensor, and its place in the full one once all ranks have said how much they have."""

from __future__ import annotations

import bisect
import collections
import difflib
import fnmatch
import hashlib
import itertools
import json
import math
import pathlib
import re
import typing
import zlib

import torch

from anyrank._errors import AnyrankError
from anyrank.capture._exchange import Alone, Store
from anyrank.capture._files import Placed, RankFiles
from anyrank.capture._listen import is_index, local_of
from anyrank.capture._mesh import SPEC_HINT
from anyrank.capture._model import Groups
from anyrank.capture._places import (ROUTED, Box, Part, Rule, Shape, Whole, boxes_of_blocks, boxes_of_runs,
                                     check_packed, check_spec, dealt_boxes, part_of, sample_starts, spread,
                                     zigzag_boxes)
from anyrank.capture._sketches import SketchFiles
from anyrank.capture._spec import EXTRAS, Spec


STEPS = "steps:count"
UNREAD = "ranks have other gradients of it and update it alike: hand in those that the update reads, to gradients()"
COUNTS = "it counts within a batch, on each rank and in each micro-batch from 0"
LEAST_BITS = 16  # of values that are the same on all ranks: fewer may be the same by chance
MOST_SAMPLES = 16384  # of a micro-batch, and of all steps together, whose digests are written


class RanksEnded(AnyrankError):
    """Another rank makes no further step."""


class Value:
    """A tensor of which a part or more is written."""

    def __init__(self, base: str, full_layout: Whole | None, ndim: int, samples: int | None = None) -> None:
        self.base, self.full_layout, self.ndim = base, full_layout, ndim
        self.samples = samples  # the run's dimension of the samples, which are written in front; None: it has none
        self.per_sample = samples is not None
        self.said = False  # the spec says where it is, or which dimension has the samples
        self.digests: list[int] = []  # of the parts' values
        self.bits = 0.0  # how much the parts' values tell, if they are an input's
        self.counting: list[bool] = []  # of each micro-batch that an input of integers has: whether it counts from 0
        self.rows_alike = True  # in each of the parts: no value tells one of several samples from one for all of them
        self.mean = False  # divided by the ranks that are to be summed
        self.units: list[int] = []  # of each part: rows of a sample
        self.parts: dict[int, tuple[int, Shape]] = {}  # of each micro-batch: the file, and the local shape
        self.lengths: set[Shape] = set()  # extents of all micro-batches, but for the rows that are joined
        self.part: Part | None = None

    def written(self, dim: int) -> int:
        """Returns the dimension of the written tensor that corresponds to a dimension of the run's tensor."""
        if not -self.ndim <= dim < self.ndim:
            raise AnyrankError(f"{self.base}: has {self.ndim} dimensions, the spec divides dimension {dim}")
        dim %= self.ndim
        if self.samples is None:
            return dim
        return 0 if dim == self.samples else dim + (dim < self.samples)

    def rows(self) -> list[int]:
        """Returns the rows of each micro-batch; 0 if none came, as for an expert that no token chose."""
        return [self.parts[part][1][0] if part in self.parts else 0 for part in range(max(self.parts) + 1)]

    def extents(self) -> Shape:
        """Returns the extents of all its micro-batches, before the mesh's other ranks are added."""
        shape = self.part.shape if self.part else next(iter(self.parts.values()))[1]
        return (sum(self.rows()), *shape[1:]) if len(self.parts) > 1 else tuple(shape)

    def hear_part(self, tensor: torch.Tensor) -> None:
        """Counts a micro-batch that has this tensor, whether it is written or left to the first as one for all
        samples."""
        self.lengths.add(tuple(n for dim, n in enumerate(tensor.shape) if dim != self.samples))
        if self.base.endswith(":fwd") and not tensor.is_floating_point():
            self.counting.append(is_index(local_of(tensor)))

    def is_ragged(self) -> bool:
        """Returns whether its micro-batches have different lengths: each was padded to its longest row."""
        return len(self.lengths) > 1


class Record:
    """The tensors of a rank, in its files."""

    def __init__(self, folder: pathlib.Path, groups: Groups, spec: Spec, only: typing.Sequence[str] | None,
                 entries: int, files: SketchFiles | None = None) -> None:
        self.groups, self.spec, self.only = groups, spec, only or ()
        self.files = files or RankFiles(folder, groups.mesh.rank, entries)
        self.values: dict[str, Value] = {}
        self.order: dict[str, None] = {}
        self.scalars: dict[str, list[torch.Tensor]] = {}
        self.sums: set[str] = set()  # scalars whose micro-batches add up
        self.norms: dict[str, tuple[float, float, list[str], torch.dtype]] = {}
        self.seen: set[str] = set()  # names of tensors, without their step, also of those that are not kept
        self.unplaced: set[str] = set()  # names, with their step, of what nothing says the place of
        self.lacking: dict[int, list[str]] = {}  # ranks without a part of tensors that others have
        self.notes: list[str] = []  # what is to be warned of once the files are complete
        self.not_written: dict[str, list[str]] = {}  # names of what is left out, by the reason
        self.magnitudes: dict[str, tuple[float, float]] | None = None  # largest value and step of what is written
        self.unread: set[str] = set()  # gradients of a program whose update is not seen to read them
        self.inputs = 0  # a digest of what the model was given
        self.mine: dict[str, typing.Any] | None = None  # what the others are to know of it, once it is said
        self.round = 0  # the number by which they are heard
        self.samples: dict[int, list[list[int]]] = {}  # of each step's micro-batches: a digest of each sample's inputs

    def carry(self, before: Record) -> None:
        """Takes over what is known from the record of the step before, whose warnings were given."""
        self.seen, self.not_written, self.notes = before.seen, before.not_written, before.notes
        self.unread, self.inputs = before.unread, before.inputs

    # --- as they come -------------------------------------------------------------------------------------------------

    def reserve(self, name: str) -> None:
        """Reserves the place in the order of a tensor that follows."""
        self.order.setdefault(name)

    def count_inputs(self, inputs: dict[str, torch.Tensor], batch: int | None, step: int) -> None:
        """Records the model's inputs, of so many samples, in a micro-batch of a step."""
        inputs = {key: t for key, t in inputs.items() if not t.is_meta}
        for t in inputs.values():
            self.inputs = zlib.crc32(f"{self.inputs} {digest_of(t)}".encode())
        few = batch is not None and batch <= MOST_SAMPLES
        self.samples.setdefault(step, []).append(sample_digests(inputs, batch) if few and batch else [])

    def left_out(self, reason: str, name: str) -> None:
        """Something of the run is not written."""
        names = self.not_written.setdefault(reason, [])
        if name not in names:
            names.append(name)

    def add(self, base: str, name: str, tensor: torch.Tensor, full_layout: Whole | None, samples: int | None, part: int,
            batch: int | None = None) -> None:
        """Writes a tensor, whose dimension `samples` has the samples; of one that has come before, the rows of a
        further micro-batch of `batch` samples."""
        self.reserve(name)
        if tensor.dim() == 0 and base.endswith(":fwd"):
            self.scalars.setdefault(name, []).append(tensor.to("cpu", copy=True))
            return
        value = self.values.get(name)
        if value is not None and (value.samples is None or part in value.parts):
            value.hear_part(tensor)
            return
        if value is None:
            value = Value(base, full_layout, tensor.dim(), samples)
            value.said = bool(_fitting(self.spec.dims_of(base), value))
            value.samples = self._samples(value)
            if full_layout is not None:
                value.part = self._part(value, full_layout, tuple(tensor.shape), name)
        if value.samples is not None:
            whole_rows = batch and not ROUTED.search(base)
            value.units.append(max(1, tensor.shape[value.samples] // batch) if whole_rows else 1)
        value.hear_part(tensor)
        judged = base.endswith((":fwd", ":bwd", ":buffer")) or (self.unread and base.endswith((":grad", ":new")))
        if self.groups.mesh.world > 1 and judged and value.part is None and not value.said and tensor.dim() > 0:
            has_equal_rows = tensor.shape[0] > 1 and rows_are_alike(tensor)
            value.rows_alike = value.rows_alike and has_equal_rows
            value.digests.append(0 if has_equal_rows and not self.spec.is_input(base) else digest_of(tensor))
            value.bits += bits_of(tensor) if self._is_given(base) else 0
        self._write(name, value, tensor, part)

    def _part(self, value: Value, dtensor: Whole, local: Shape, name: str) -> Part:
        """Returns a DTensor's part, which the spec may not contradict, with the samples in front as they are
        written."""
        part = part_of(self.groups.mesh, dtensor, local, name)
        base = value.base
        check_spec(name, part, self._spec_of(base), self.spec.partial_of(base), self.groups.mesh.sizes)
        if value.samples is not None and part.runs[value.samples] != ((0, dtensor.shape[value.samples]),):
            value.samples = None
        return part if value.samples is None else part.fronted(value.samples)

    def _samples(self, value: Value) -> int | None:
        """Returns the dimension of an activation's samples; None if it has none."""
        if value.base.rsplit(":", 1)[1] not in ("fwd", "bwd") or value.ndim == 0:
            return None
        dim = _fitting(self.spec.dims_of(value.base), value).get("dp", value.samples)
        value.samples = None
        return None if dim is None else value.written(dim)

    def _write(self, name: str, value: Value, tensor: torch.Tensor, part: int) -> None:
        if value.samples:
            tensor = tensor.movedim(value.samples, 0)
        if value.full_layout is not None:
            for size, placement in zip(value.full_layout.mesh.mesh.shape, value.full_layout.placements):
                if placement.is_partial() and getattr(placement, "reduce_op", "sum") == "avg":
                    tensor = tensor / size
        if self.magnitudes is not None:
            self.magnitudes[name] = max(self.magnitudes.get(name, (0.0, 0.0)), magnitude_of(tensor))
        placed = self._place_at_once(name, value, tuple(tensor.shape))
        number = self.files.add(name, tensor.detach(), part, placed)
        value.parts[part] = (number, tuple(tensor.shape))
        self.values[name] = value

    def _place_at_once(self, name: str, value: Value, shape: Shape) -> Placed | None:
        """Returns where a parameter or its gradient or state is, if no other rank has to be asked."""
        if name.split("@")[0].endswith((":fwd", ":bwd")) or value.part is None and self._rule(value.base, value).dims:
            return None
        boxes = (boxes_of_runs(value.part.runs, name) if value.part is not None else
                 [Box((0,) * value.ndim, (0,) * value.ndim, shape)])
        partial = self.groups.mesh.ordered([*(value.part.partial if value.part else ()),
                                            *self.spec.partial_of(value.base)])
        return Placed(value.part.shape if value.part is not None else shape, boxes, partial, False, 0, 0)

    def add_norm(self, name: str, norm: torch.Tensor, full_layout: Whole | None, norm_type: float) -> None:
        """Adds a norm; for a DTensor that is not summed yet, the ranks' parts until they exchange them."""
        self.reserve(name)
        self.seen.add(name.split("@")[0])
        partial = [(line, p) for line, p in zip(_lines(full_layout), full_layout.placements)
                   if p.is_partial()] if full_layout else []
        if partial:
            names = [n for line, _ in partial for n in self.groups.mesh.covered(line, name)]
            placement: typing.Any = partial[0][1]  # knows of which kind the norm is, as clip_grads_with_norm_ does not
            norm_type = float(getattr(placement, "norm_type", norm_type))
            self.norms[name] = (float(norm), norm_type, names, norm.dtype)
        else:
            self._write(name, Value(name, None, 0), norm, 0)

    def end_step(self) -> None:
        """Writes the scalars of a step: of several micro-batches only those that are declared sums, as the factor that
        is to average others is outside of the model."""
        for name, parts in self.scalars.items():
            base = name.split("@")[0]
            partial = self.spec.partial_of(base)
            if len(parts) > 1 and not (partial or base in self.sums):
                continue
            value = Value(base, None, 0)
            n = self.groups.mesh.size(self._mean_dims())
            if base in self.sums:
                # What backward() is called on is averaged with the gradients, whatever a model's own loss is.
                partial = [name for name in partial if name not in self.groups.mean]
            value.mean = n > 1 and not set(partial) & set(self._mean_dims())
            total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            self._write(name, value, total / n if value.mean else total, 0)
        self.scalars = {}

    def _mean_dims(self) -> list[str]:
        return self.groups.mesh.ordered([*self.groups.data, *self.groups.mean])

    # --- at the end ---------------------------------------------------------------------------------------------------

    def _spec_of(self, name: str) -> dict[str, typing.Any]:
        """Returns what the spec says of a tensor; "dp" means all dimensions that divide samples if none has that
        name."""
        stated, sizes = self.spec.dims_of(name), self.groups.mesh.sizes
        data_dims = self.groups.data if "dp" in stated and "dp" not in sizes else []
        return {
            **dict.fromkeys(data_dims, stated.get("dp")),
            **{n: d for n, d in stated.items() if n in sizes or n in EXTRAS},
        }

    def _rule(self, name: str, value: Value) -> Rule:
        """Returns what divides a tensor besides what its DTensor knows."""
        mesh, data = self.groups.mesh, self.groups.data
        stated = _fitting(self._spec_of(name), value) if value.ndim else {}
        dtensor_dims = value.part.known if value.part else {}
        dims: dict[str, int | None] = {n: 0 for n in data if mesh.sizes[n] > 1} if value.per_sample else {}
        if value.part is None:
            check_packed(name, stated, mesh.sizes)
        dims.update({n: None if dim is None else value.written(dim) for n, dim in stated.items() if n not in EXTRAS})
        divided_dims = {n: d for n, d in dims.items() if d is not None and n not in dtensor_dims}
        zigzag = tuple(n for n in stated.get("zigzag", ()) if n in divided_dims and mesh.sizes[n] > 1)
        return Rule(
            divided_dims, tuple(stated.get("blocks") or ()), stated.get("unit", 0), stated.get("copies", 1), zigzag
        )

    def _place(self, name: str, value: Value, shapes: list[Shape | None],
               rows: list[list[int] | None]) -> dict[int, Placed]:
        """Returns where a tensor's parts are, by file."""
        mesh, rule = self.groups.mesh, self._rule(name, value)
        partial = [*(value.part.partial if value.part else ()), *self.spec.partial_of(name)]
        partial = mesh.ordered([*partial, *(self._mean_dims() if value.mean else ())])
        places = spread(mesh, name, rule, shapes, self.groups.data, value.ndim)
        for rank in dict.fromkeys(rank for place in places.values() for rank in place.lacking):
            rule = rule._replace(blocks=(), zigzag=())
            if not ROUTED.search(name):
                self.lacking.setdefault(rank, []).append(name)
        shape, offset = list(value.extents()), [0] * value.ndim
        for dim, place in places.items():
            offset[dim], shape[dim] = place.before, place.full
        blocks = [n for n in rule.dims if n not in self.groups.data] or list(rule.dims)
        sample_dims = mesh.ordered(n for n, dim in rule.dims.items() if dim == 0) if value.samples is not None else []
        starts = [0] * (max(value.parts) + 1)
        if value.samples is not None:
            starts = sample_starts(mesh, name, sample_dims, self.groups.data, rows, self.spec.samples == "by_rank")
        dealt, before, out = self.spec.samples == "dealt" and len(sample_dims) > 0 and not value.part, 0, {}
        for part in sorted(value.parts):
            number, local = value.parts[part]
            if value.samples is not None:
                offset[0] = starts[part]
            if value.part:
                runs = value.part.runs if len(value.parts) == 1 else (((0, local[0]),), *value.part.runs[1:])
                boxes = [box._replace(full=tuple(a + b for a, b in zip(box.full, offset)))
                         for box in boxes_of_runs(runs, name)]
            elif rule.blocks and blocks:
                dim = rule.dims[blocks[0]]
                boxes = boxes_of_blocks(name, rule, dim, local, tuple(offset), places[dim])
            else:
                boxes = [Box(tuple(offset), (0,) * value.ndim, local)]
            for n in rule.zigzag:
                dim = rule.dims[n]
                full = places[dim].full
                boxes = [half for box in boxes for half in zigzag_boxes(mesh, name, n, dim, box, local, full)]
            if dealt:
                boxes = [
                    dealt_box
                    for box in boxes
                    for dealt_box in dealt_boxes(mesh, sample_dims, box, before, value.units[0])
                ]
                before += local[0] // value.units[0]
            boxes = boxes or [Box((0,) * value.ndim, (0,) * value.ndim, local)]
            assumed = not (value.full_layout or rule.dims or partial or self.spec.dims_of(name))
            sample_rows = value.units[0] if value.samples is not None else 0
            out[number] = Placed(tuple(shape), boxes, partial, assumed, 0, 0, "", sample_rows, bool(rule.unit))
        return out

    # --- samples ------------------------------------------------------------------------------------------------------

    def _few_samples(self) -> dict[str, list[list[int]]]:
        """Digests of the samples of each step, by its number as JSON has it; none where they are too many to write."""
        few = sum(len(part) for parts in self.samples.values() for part in parts) <= MOST_SAMPLES
        return {str(step): parts for step, parts in self.samples.items()} if few else {}

    def _samples_in_order(self, of_all: list[dict[str, list[list[int]]]]) -> dict[str, list[int]]:
        """Returns the digests of each step's samples in the order in which a full tensor has them."""
        mesh, data = self.groups.mesh, self.groups.data
        ranks, _ = mesh.along(data)
        by_rank, dealt = self.spec.samples == "by_rank", self.spec.samples == "dealt"
        blocks = self._blocks_of_inputs()
        found: dict[str, list[int]] = {}
        for step in of_all[0]:
            pieces = []
            for i, rank in enumerate(ranks):
                before = 0
                for m, part in enumerate(self._samples_of(rank, of_all, step)):
                    for k, digest in enumerate(part):
                        key = (before + k, i, 0) if dealt else (i, m, k) if by_rank else (m, i, k)
                        block = bisect.bisect([b * len(part) for b in blocks], k * blocks[-1])
                        pieces.append(((block, *key), digest))
                    before += len(part)
            found[step] = [digest for _, digest in sorted(pieces)]
        return found

    def _blocks_of_inputs(self) -> list[int]:
        """Returns the ends of the blocks that the spec joins in one batch (chosen and rejected), in parts; one block:
        [1]."""
        input_rules = [self._spec_of(name) for name in self.values if name.startswith("input.")]
        cut = [rule for rule in input_rules if any(rule.get(n) == 0 for n in self.groups.data)]
        blocks = next((rule["blocks"] for rule in cut if rule.get("blocks")), [1])
        return list(itertools.accumulate(blocks))

    def _samples_of(self, rank: int, of_all: list[dict[str, list[list[int]]]], step: str) -> list[list[int]]:
        """Returns what a rank is given in a step; for a later pipeline stage, what the first stage with its samples is
        given."""
        names, coordinates = list(self.groups.mesh.sizes), self.groups.mesh.coordinates(rank)
        free_dims = [name not in self.groups.data for name in names]
        ranks = [peer_rank for peer_rank in range(len(of_all))
                 if all(free or a == b for free, a, b in
                        zip(free_dims, self.groups.mesh.coordinates(peer_rank), coordinates))]
        return next((of_all[source_rank][step] for source_rank in [rank, *ranks] if of_all[source_rank].get(step)), [])

    # --- values that have no place ------------------------------------------------------------------------------------

    def _without_place(self, of_all: list[dict[str, typing.Any]], alone: bool) -> dict[str, str]:
        """Values of which no rank's part has a place in a full tensor, and why: they are written, and not compared.
        alone: what the other ranks have is not known."""
        why: dict[str, str] = {}
        steps = [report["steps"] for report in of_all]
        counting = self._counting(of_all)
        for name, value in self.values.items():
            shapes = [report["shapes"].get(name) for report in of_all]
            units = {tuple(report["units"][name]) for report in of_all if name in report["units"]}
            if value.ndim and self._is_of_stages(name, of_all):
                why[name] = "several stages of the pipeline call the module, each with its own layers in it"
            elif 0 < min(steps) < _step_of(name):
                why[name] = f"a step that not all ranks made ({min(steps)} to {max(steps)})"
            elif (any(name in report["ragged"] for report in of_all) or len({n for rows in units for n in rows}) > 1 or
                  self._has_lengths(value, shapes)):
                why[name] = "each micro-batch or rank pads to a length of its own"
            elif name in counting:
                why[name] = COUNTS
            elif any(name in report["unplaced"] for report in of_all):
                why[name] = "a rank has its own part of it or all, and nothing says which"
            elif self._is_input_of_unknown_place(name, value, alone):
                why[name] = "the spec says how ranks share out activations, and says nothing of the model's inputs"
            elif value.digests:
                text = self._judge_digests(name, value, of_all)
                why.update({name: text} if text else {})
        return why

    def _counting(self, of_all: list[dict[str, typing.Any]]) -> set[str]:
        """Inputs of integers that count within each of several parts of a batch, on all ranks and in all steps: in one
        part labels may look so."""
        found = {name for report in of_all for name in report["counting"]}
        bases = {name.split("@")[0] for name in found}
        excluded_bases = {name.split("@")[0] for report in of_all for name in report["shapes"]
                  if name.split("@")[0] in bases and name not in report["counting"]}
        parts = {name: sum(report["counting"].get(name, 0) for report in of_all) for name in found}
        return {name for name in found if name.split("@")[0] not in excluded_bases and parts[name] > 1}

    def _is_given(self, base: str) -> bool:
        """Returns whether it is the model's or a module's input."""
        return self.spec.is_input(base) or ".in:" in base or ".in." in base

    def _is_alike_by_chance(self, value: Value, of_all: list[dict[str, typing.Any]], ranks: list[int]) -> bool:
        """Whether nothing but few values, as labels of two samples, says that ranks have copies: it has other values on
        them in another step, or too little is the same in all steps together."""
        names = [name for name, candidate in self.values.items() if candidate.base == value.base]
        differs = any(len({of_all[rank]["digests"].get(name) for rank in ranks}) > 1 for name in names)
        return differs or sum(self.values[name].bits for name in names) < LEAST_BITS

    def _is_input_of_unknown_place(self, name: str, value: Value, alone: bool) -> bool:
        """Whether the model's input is a part of a batch, and the spec says of activations alone where samples are, and
        that not in front. What other dimensions of the mesh share out is seen by its values on the ranks."""
        of_samples = len(value.parts) > 1 or self.groups.mesh.size(self.groups.data) > 1
        return any(dim != 0 and (alone or (of_samples and n in ("dp", *self.groups.data)))
                   for n, dim in self.spec.of_activations_alone(name).items())

    def _is_of_stages(self, name: str, of_all: list[dict[str, typing.Any]]) -> bool:
        """Returns whether several stages call a module, such as one that contains layers of each stage; each stage
        counts its calls."""
        if "pp" not in self.groups.mesh.sizes or not name.split("@")[0].endswith((":fwd", ":bwd")):
            return False
        output = re.sub(r"\.call\d+:", ":", name.replace(":bwd", ":fwd"))
        return sum(output in of_all[rank]["shapes"] for rank in self.groups.mesh.along(["pp"])[0]) > 1

    def _names_of_stages(self, of_all: list[dict[str, typing.Any]]) -> bool:
        """Returns whether a pipeline's stages name their layers alike, each from its first layer on: stages cut from
        one model have different names, except for tied parameters."""
        mesh = self.groups.mesh
        if "pp" not in mesh.sizes:
            return False
        pp_dim = list(mesh.sizes).index("pp")
        names = [{name for name in report["shapes"] if name.split("@")[0].endswith((":grad", ":new", ":init"))}
                 for report in of_all]
        return any(mesh.coordinates(i)[pp_dim] != mesh.coordinates(k)[pp_dim] and
                   2 * len(a & b) >= min(len(a), len(b)) > 0
                   for (i, a), (k, b) in itertools.combinations(enumerate(names), 2))

    def _has_lengths(self, value: Value, shapes: list[typing.Any]) -> bool:
        """Returns whether ranks with different samples of an activation have different extents, apart from the number
        of samples."""
        if not value.base.endswith((":fwd", ":bwd")) or value.part is not None or value.said:
            return False
        ranks = self.groups.mesh.along(self.groups.data)[0]
        skip = 1 if value.per_sample else 0
        return len({tuple(shapes[rank][skip:]) for rank in ranks if shapes[rank]}) > 1

    def _judge_digests(self, name: str, value: Value, of_all: list[dict[str, typing.Any]]) -> str:
        """Checks a placement known only from shapes against the values on ranks with different samples: equal values
        are no parts, and different values are no copies."""
        mesh, data = self.groups.mesh, self.groups.data
        ranks = mesh.along(data)[0]
        by_rank = [report["digests"].get(name) for report in of_all]
        if value.base.endswith((":grad", ":new")):
            after = {report["digests"].get(name.replace(":grad", ":new")) for report in of_all}
            has_equal_updates = name in self.unread and len(after) == 1 and None not in after
            return UNREAD if has_equal_updates and len({*by_rank}) > 1 else ""
        digests = {by_rank[rank] for rank in ranks}
        inputs = {of_all[rank]["inputs"] for rank in ranks}
        small = name.startswith("input.") or value.base.endswith(":buffer")
        if small and len({*by_rank} - {None}) > len(digests - {None}):
            return "ranks of one part of the samples have other values of it, and nothing says which"
        if len(ranks) == 1 or len(inputs) < len(ranks) or value.base.endswith(":buffer"):
            return ""
        by_chance = self._is_given(value.base) and self._is_alike_by_chance(value, of_all, ranks)
        if value.per_sample and len(digests) == 1 and not value.rows_alike and not by_chance:
            value.per_sample, value.samples = False, None
            return "of one value for all samples each micro-batch has its own" if len(value.parts) > 1 else ""
        if not value.per_sample and len(digests) > 1:
            return "it depends on the samples, and nothing says in which dimension it has them"
        return ""

    def _add_norms(self, of_all: list[dict[str, typing.Any]]) -> None:
        for name, (local_norm, kind, mesh_dims, dtype) in self.norms.items():
            ranks, _ = self.groups.mesh.along(self.groups.mesh.ordered(mesh_dims))
            parts = [of_all[rank]["norms"].get(name, local_norm) for rank in ranks]
            norm = max(parts) if kind == float("inf") else sum(x ** kind for x in parts) ** (1 / kind)
            self._write(name, Value(name, None, 0), torch.tensor(norm, dtype=dtype), 0)

    def announce(self, exchange: Alone | Store, steps: int = 0) -> None:
        """Tells the other ranks what this one has, and waits for none of them."""
        mesh = self.groups.mesh
        self.mine = {"mesh": list(mesh.sizes.items()), "norms": {name: norm[0] for name, norm in self.norms.items()},
                "steps": steps, "inputs": self.inputs, "samples": self._few_samples(),
                "ragged": [name for name, value in self.values.items() if value.is_ragged()],
                "unplaced": [name for name in self.values if name in self.unplaced],
                "counting": {name: len(value.counting) for name, value in self.values.items()
                             if value.counting and all(value.counting)},
                "units": {name: value.units for name, value in self.values.items() if set(value.units) - {1}},
                "digests": {name: zlib.crc32(repr(value.digests).encode()) for name, value in self.values.items()
                            if value.digests},
                "shapes": {name: value.extents() for name, value in self.values.items()},
                "rows": {name: value.rows() for name, value in self.values.items() if max(value.parts) > 0},
                "unmatched": self.spec.unmatched(self.seen),
                "unused": [glob for glob in self.only if not fnmatch.filter(self.seen, glob)]}
        self.round = exchange.say(self.mine)

    def finish(self, exchange: Alone | Store, metadata: dict[str, str], steps: int) -> list[pathlib.Path]:
        """Places everything and completes the files, when all ranks have announced theirs. steps: how many the rank
        made; 0: not all were to be seen."""
        mesh = self.groups.mesh
        if self.mine is None:
            self.announce(exchange, steps)
        mine, of_all = self.mine or {}, exchange.hear(self.round)
        ended = next((rank for rank, report in enumerate(of_all) if "mesh" not in report), None)
        if ended is not None:
            raise RanksEnded(f"rank {ended} has ended its run, and rank {mesh.rank} captures a further step")
        alone = len(of_all) < mesh.world  # then the others are taken to have as much
        of_all = [mine] * mesh.world if alone else of_all
        for rank, report in enumerate(of_all):
            if [tuple(dim) for dim in report["mesh"]] != mine["mesh"]:
                raise AnyrankError(f"rank {rank} found the mesh {dict(report['mesh'])}, rank {mesh.rank} {mesh.sizes}; "
                                   f"{SPEC_HINT}")
        if mesh.rank == 0:
            if self.groups.assumed and len({report["inputs"] for report in of_all}) == mesh.world:
                self.notes.append("nothing says what the ranks are for, and each is given other inputs: with data "
                                  f'parallelism say spec={{"mesh": {{"dp": {mesh.world}}}, "mean_over": "dp"}}')
            for key, location in (("unmatched", self.spec.source), ("unused", "only")):
                if key == "unused" or mesh.world > 1:
                    self._note(location, set.intersection(*(set(report[key]) for report in of_all)))
        self._add_norms(of_all)
        if steps and not self.only:
            self._write(STEPS, Value(STEPS, None, 0), torch.tensor(steps), 0)
            self.order = {STEPS: None, **self.order}
        without = self._without_place(of_all, alone)
        shapes = [{name: tuple(shape) for name, shape in report["shapes"].items()} for report in of_all]
        places: list[dict[str, Placed]] = [{} for _ in self.files.writers]
        for name, value in self.values.items():
            of_ranks = [shape.get(name) if value.ndim else () for shape in shapes]
            rows = [report["rows"].get(name, [shape[0]]) if shape else None for report, shape in zip(of_all, of_ranks)]
            placed_parts = ({number: _apart(shape, without[name]) for number, shape in value.parts.values()}
                            if name in without else self._place(name, value, of_ranks, rows))
            for number, placed in placed_parts.items():
                places[number][name] = placed
        if not alone and not isinstance(self.files, SketchFiles):
            self._count_copies(exchange, places)
        for rank, names in self.lacking.items():
            self.notes.append(f"rank {rank} has no part of {len(names)} tensors, of modules that it did not call or to "
                              f"which no gradient came; they are without its rows: {names[0]}, ..")
        order = [name for name in self.order if name in self.values]
        rank_info = {"rank": mesh.rank, "world": mesh.world, "mesh": list(mesh.sizes.items()),
                     "at": mesh.coordinates(mesh.rank)}
        samples = self._samples_in_order([report["samples"] for report in of_all])
        in_order = [digest for step in samples.values() for digest in step]
        if isinstance(self.files, SketchFiles) and self._names_of_stages(of_all):
            self.files.stage = dict(zip(mesh.sizes, mesh.coordinates(mesh.rank)))["pp"]
        if isinstance(self.files, SketchFiles) and in_order:
            self.files.samples = [zlib.crc32(repr(digests).encode()) for digests in (in_order, sorted(in_order))]
        if samples:
            metadata = {**metadata, "anyrank.samples": json.dumps(samples, separators=(",", ":"))}
        if self.not_written:
            texts = [f"{reason}: {len(names)}, first {names[0]}" for reason, names in self.not_written.items()]
            metadata = {**metadata, "anyrank.left_out": "; ".join(texts)}
        return self.files.close(rank_info, places, order, metadata)

    def _note(self, location: str, globs: set[str]) -> None:
        """Globs that match no tensor on any rank."""
        if globs:
            near = {glob: difflib.get_close_matches(glob, self.seen, 1, 0.4) for glob in sorted(globs)}
            quoted_globs = ", ".join(repr(glob) + (f" (the nearest is {names[0]!r})" if names else "")
                             for glob, names in near.items())
            self.notes.append(f"{location}: no tensor of this run has a name that matches {quoted_globs}")

    def _count_copies(self, exchange: Alone | Store, places: list[dict[str, Placed]]) -> None:
        """Ranks that hold the same part of the same sum hold copies of it. Of heads in blocks some may have copies and
        others not: those are counted where they are read."""
        mesh = self.groups.mesh
        coordinates = dict(zip(mesh.sizes, mesh.coordinates(mesh.rank)))

        def key(placed: Placed) -> str:
            text = repr((placed.boxes, [coordinates[name] for name in placed.partial]))
            return hashlib.sha256(text.encode()).hexdigest()[:16]

        mine: dict[str, list[str]] = {}
        for placements in places:
            for name, placed in placements.items():
                mine.setdefault(name, []).append(key(placed))
        of_all = exchange.tell(mine)
        for placements in places:
            for name, placed in placements.items():
                if "unit" in self._spec_of(name) or placed.left_out:
                    continue
                placement_key = key(placed)
                holders = [rank for rank, peer_keys in enumerate(of_all) if placement_key in peer_keys.get(name, ())]
                placements[name] = placed._replace(replica=holders.index(mesh.rank), replicas=len(holders))


def _fitting(dims: dict[str, typing.Any], value: Value) -> dict[str, typing.Any]:
    """Returns the part of a spec that applies to a value. A glob for activations [s, b, h] does not mean a vector
    beside them."""
    if not value.base.endswith((":fwd", ":bwd")):
        return dims
    fit = {key: dim for key, dim in dims.items()
           if key in EXTRAS or dim is None or -value.ndim <= dim < value.ndim}
    return fit if all(key in fit for key in dims) else {}


def _step_of(name: str) -> int:
    return int(name.rsplit("@", 1)[1]) if "@" in name else 1


def _apart(shape: Shape, why: str) -> Placed:
    """Returns the placement of a part that belongs to no tensor."""
    return Placed(shape, [Box((0,) * len(shape), (0,) * len(shape), shape)], [], False, 0, 0, why)


def sample_digests(inputs: dict[str, torch.Tensor], batch: int) -> list[int]:
    """A number for each sample by what the model is given of it. Of padded tokens it is that of the tokens alone, which
    does not depend on how far they are padded. Inputs of other lengths may be for all samples, as a mask [1, 1, s, s],
    and count one of a batch of one only by chance."""
    parts = {key: local_of(t) for key, t in inputs.items() if t.dim() > 0}
    lengths = next((t.shape[:2] for t in parts.values()), ())
    rows = {key: t.reshape(batch, -1).cpu() for key, t in parts.items()
            if t.shape[0] == batch and t.shape[:2] == lengths and t.numel()}
    mask = rows.get("attention_mask")
    tokens = {key: t for key, t in rows.items() if mask is not None and t.shape == mask.shape and key == "input_ids"}
    digests = []
    for i in range(batch):
        number = 0
        for key in sorted(tokens or rows):
            row = rows[key][i]
            row = row[mask[i] != 0] if tokens and mask is not None else row[::max(1, row.numel() // 1024)]
            number = zlib.crc32(row.contiguous().view(torch.uint8).numpy().tobytes(), number)
        digests.append(number)
    return digests


def rows_are_alike(t: torch.Tensor) -> bool:
    """Returns whether all rows have the same values in one of a hundred columns: then no value tells a part from a
    copy."""
    rows = local_of(t).reshape(t.shape[0], -1)
    if not rows.numel():
        return True
    columns = rows[:, ::max(1, rows.shape[1] // 100)].contiguous().view(torch.uint8)
    return bool((columns == columns[:1]).all())


def bits_of(t: torch.Tensor) -> float:
    """Returns how much a tensor's values tell, if each is drawn from those that occur. For two values, as in a mask,
    the rows count as drawn."""
    rows = local_of(t).reshape(t.shape[0], -1)
    values = rows.flatten()[::max(1, rows.numel() // 1024)]
    drawn: collections.Counter[typing.Any] = collections.Counter(values.tolist())
    if len(drawn) <= 2:
        drawn = collections.Counter(row.view(torch.uint8).numpy().tobytes() for row in rows.contiguous().cpu())
    total = sum(drawn.values())
    return -sum(count * math.log2(count / total) for count in drawn.values())


def magnitude_of(t: torch.Tensor) -> tuple[float, float]:
    """Returns the largest finite value, and the relative step of the format; 0 for integers, which do not round."""
    if not t.is_floating_point():
        return 0.0, 0.0
    values = t.detach().float() if t.element_size() < 2 else t.detach()  # of 8 bits there is no arithmetic
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0, float(torch.finfo(t.dtype).eps)


def digest_of(t: torch.Tensor) -> int:
    """Returns a number that differs if two tensors of one shape differ in one of a thousand of their elements."""
    flat = local_of(t).reshape(-1)
    elements = flat[::max(1, flat.numel() // 1024)].contiguous().cpu()
    return zlib.crc32(elements.view(torch.uint8).numpy().tobytes()) if elements.numel() else 0


def _lines(dtensor: Whole) -> list[tuple[int, ...]]:
    from anyrank.capture._mesh import lines_of_device_mesh

    return [line.ranks for line in lines_of_device_mesh(dtensor.mesh)]
