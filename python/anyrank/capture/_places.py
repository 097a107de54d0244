# SPDX-License-Identifier: Apache-2.0
"""Where a rank's tensor is in the full one: as boxes, from a DTensor's placements or from what the spec says."""

from __future__ import annotations

import itertools
import math
import re
import typing

from anyrank._errors import AnyrankError
from anyrank.capture._mesh import Mesh, lines_of_device_mesh

PACKED = {"c_attn", "qkv_proj", "Wqkv", "query_key_value", "qkv", "in_proj_weight", "in_proj_bias", "gate_up_proj"}
MAX_BOXES = 4096
ROUTED = re.compile(r"\bexperts\.\d+\b")  # within one expert of a list: a row of each token that chose it
OTHERWISE = "a glob before this one can leave it out: {}"
Run = typing.Tuple[int, int]  # the first index along a dimension, and how many follow
Shape = typing.Tuple[int, ...]


class Whole(typing.NamedTuple):
    """The DTensor that a tensor is, or is the local part of."""

    shape: Shape
    mesh: typing.Any
    placements: tuple[typing.Any, ...]


class Box(typing.NamedTuple):
    """Where elements are in the full tensor and in the rank's, and how many in each dimension."""

    full: Shape
    local: Shape
    extent: Shape


class Part(typing.NamedTuple):
    """A DTensor's local part: its runs along each dimension, and what it is divided and summed over."""

    shape: Shape
    runs: tuple[tuple[Run, ...], ...]
    known: dict[str, int | None]  # the dimensions of the run's mesh that the DTensor knows of, and which they divide
    partial: tuple[str, ...]

    def fronted(self, dim: int) -> Part:
        """Returns the same with one of its dimensions in front."""
        order = [dim, *(i for i in range(len(self.shape)) if i != dim)]
        return self._replace(shape=tuple(self.shape[i] for i in order), runs=tuple(self.runs[i] for i in order))


# --- DTensors ---------------------------------------------------------------------------------------------------------

def _chunk(runs: list[Run], n: int, i: int) -> list[Run]:
    """Returns the i-th of n pieces of these indices, as torch.chunk divides them."""
    total = sum(count for _, count in runs)
    chunk_size = -(-total // n)
    begin, end = min(chunk_size * i, total), min(chunk_size * (i + 1), total)
    out, pos = [], 0
    for start, count in runs:
        a, b = max(begin, pos), min(end, pos + count)
        if b > a:
            out.append((start + a - pos, b - a))
        pos += count
    return out


def _joined(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for start, count in runs:
        if out and sum(out[-1]) == start:
            out[-1] = (out[-1][0], out[-1][1] + count)
        else:
            out.append((start, count))
    return out


def _divide(runs: list[Run], placement: typing.Any, n: int, i: int) -> list[Run]:
    """Returns the part of rank i of n. A strided shard is divided first as the following mesh dimensions will divide
    it."""
    factor = int(getattr(placement, "split_factor", 1) or 1)
    return [run for k in range(factor) for run in _chunk(_chunk(runs, factor, k), n, i)]


def runs_of(full_layout: Whole, coordinates: typing.Sequence[int]) -> list[list[Run]]:
    """Returns what the rank at these coordinates of the DTensor's mesh has along each dimension; all of a partial
    tensor."""
    runs: list[list[Run]] = [[(0, extent)] if extent else [] for extent in full_layout.shape]
    for size, i, placement in zip(full_layout.mesh.mesh.shape, coordinates, full_layout.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and not placement.is_partial():
            runs[dim] = _divide(runs[dim], placement, int(size), i)
    return [_joined(r) for r in runs]


def part_of(mesh: Mesh, full_layout: Whole, local: Shape, label: str) -> Part:
    """Returns where the local part of a DTensor is."""
    coordinates = full_layout.mesh.get_coordinate()
    if coordinates is None:
        raise AnyrankError(f"{label}: this rank is not in the DTensor's mesh {full_layout.mesh}")
    runs = runs_of(full_layout, coordinates)
    cut_dims: dict[str, int | None] = {}
    partial: list[str] = []
    for line, placement in zip(lines_of_device_mesh(full_layout.mesh), full_layout.placements):
        names = mesh.covered(line.ranks, f"{label}: dimension {line.name!r} of a DTensor's mesh")
        cut = None if placement.is_partial() else getattr(placement, "dim", None)
        cut_dims.update(dict.fromkeys(names, None if cut is None else cut % len(full_layout.shape)))
        if placement.is_partial():
            kind = getattr(placement, "reduce_op", "sum")
            if kind not in ("sum", "avg"):
                raise AnyrankError(f"{label}: a DTensor that is to be reduced by {kind!r} cannot be written down")
            partial += names
    expected_shape = tuple(sum(count for _, count in r) for r in runs)
    if expected_shape != local:
        raise AnyrankError(
            f"{label}: by its placements {full_layout.placements} this rank has {list(expected_shape)} of the DTensor "
            f"{list(full_layout.shape)}, it has {list(local)}"
        )
    return Part(full_layout.shape, tuple(tuple(r) for r in runs), cut_dims, tuple(mesh.ordered(partial)))


def boxes_of_runs(runs: typing.Sequence[typing.Sequence[Run]], label: str) -> list[Box]:
    """Returns a box for each choice of a run in every dimension; empty if there are no elements."""
    number = 1
    for r in runs:
        number *= len(r)
    if number > MAX_BOXES:
        raise AnyrankError(f"{label}: its part is {number} boxes, at most {MAX_BOXES} are supported")
    placed = []
    for r in runs:
        local_offset, placed_runs = 0, []
        for start, count in r:
            placed_runs.append((start, local_offset, count))
            local_offset += count
        placed.append(placed_runs)
    return [Box(tuple(c[0] for c in choice), tuple(c[1] for c in choice), tuple(c[2] for c in choice))
            for choice in itertools.product(*placed)]


# --- plain tensors ----------------------------------------------------------------------------------------------------

def looks_packed(name: str) -> bool:
    """Returns whether a name means q, k and v, or gate and up, side by side. The gradient of such a module's input is
    not packed."""
    value = name.split("@")[0]
    return any(part in PACKED for part in value.split(":")[0].split(".")[-2:]) and not value.endswith(":bwd")


class Rule(typing.NamedTuple):
    """What shares out a plain tensor: {dimension of the mesh: dimension of the tensor}, and how packed blocks lie."""

    dims: dict[str, int]
    blocks: tuple[int, ...]
    unit: int  # elements of a head, which blocks then count; 0: they are relative sizes
    copies: int
    zigzag: tuple[str, ...]  # of the dimensions of the mesh


def check_packed(name: str, spec: dict[str, typing.Any], sizes: dict[str, int]) -> None:
    if looks_packed(name) and spec.get("tp") is not None and "blocks" not in spec and sizes.get("tp", 1) > 1:
        raise AnyrankError(f"{name} looks like several tensors packed in one; say their relative sizes, such as "
                           '"blocks": [1, 1, 1], or "blocks": None where one cut goes straight through all of it')


def check_spec(name: str, part: Part, spec: dict[str, typing.Any], partial: typing.Sequence[str],
               sizes: dict[str, int]) -> None:
    """Raises an error if the spec contradicts a DTensor's placement."""
    for key, dim in spec.items():
        dtensor_dim = part.known.get(key)
        if key == "blocks" and dim or key == "copies":
            raise AnyrankError(f"{name}: is a DTensor, of whose parts {key!r} in the spec cannot be true; {OTHERWISE}")
        if key not in part.known or sizes[key] == 1:
            continue
        if key in spec.get("zigzag", ()) or dtensor_dim != (None if dim is None else dim % len(part.shape)):
            says = "divides no dimension" if dtensor_dim is None else f"divides dimension {dtensor_dim}"
            raise AnyrankError(f"{name}: by its DTensor {key} {says}, the spec says {dim}"
                               f"{' in a zigzag' if key in spec.get('zigzag', ()) else ''}; {OTHERWISE}")
    wrong = [key for key in partial if key in part.known and key not in part.partial and sizes[key] > 1]
    if wrong:
        raise AnyrankError(f"{name}: is partial over {wrong[0]} by the spec, and not by its DTensor")


class Spread(typing.NamedTuple):
    """A plain tensor's place along one dimension: what ranks before it have, and all of them; its rank of how many."""

    before: int
    full: int
    rank_index: int
    ranks: int
    lacking: list[int]


def filled(mesh: Mesh, names: typing.Sequence[str], of_ranks: typing.Sequence[typing.Any]) -> list[typing.Any]:
    """Fills in, for a rank without a tensor (None), what another rank at the same place along these dimensions has."""
    places = [tuple(x for n, x in zip(mesh.sizes, mesh.coordinates(rank)) if n in names) for rank in range(mesh.world)]
    have = {place: entry for place, entry in zip(places, of_ranks) if entry is not None}
    return [have.get(place) if entry is None else entry for place, entry in zip(places, of_ranks)]


def spread(mesh: Mesh, name: str, rule: Rule, shapes: typing.Sequence[Shape | None], data: typing.Sequence[str],
           ndim: int) -> dict[int, Spread]:
    """Returns where this rank is along each dimension that the rule divides. shapes: each rank's extents; None: the
    rank has no part of the full tensor, as for a module that it did not call."""
    out = {}
    for dim in sorted(set(rule.dims.values())):
        names = mesh.ordered(n for n, d in rule.dims.items() if d == dim)
        ranks, rank_index = mesh.along(names)
        line = [filled(mesh, names, shapes)[rank] for rank in ranks]
        copies = rule.copies if not set(names) <= set(data) else 1
        if copies > 1 and (len(names) > 1 or len(line) % copies):
            raise AnyrankError(f"{name}: {copies} copies along {' and '.join(names)} of {len(line)} ranks")
        extents = [0 if s is None else s[dim] for s in line][::copies]
        full = sum(rule.blocks) * rule.unit or sum(extents)
        out[dim] = Spread(
            sum(extents[: rank_index // copies]),
            full,
            rank_index,
            len(line),
            [r for r, s in zip(ranks, line) if s is None],
        )
    return out


def sample_starts(mesh: Mesh, name: str, sample_dims: list[str], data: typing.Sequence[str],
                  rows: typing.Sequence[list[int] | None], by_rank: bool) -> list[int]:
    """Returns where this rank's micro-batches begin among all samples. rows: of each rank's micro-batches, None: no
    micro-batches. sample_dims: the mesh dimensions that divide samples. Each micro-batch is divided over all ranks;
    by_rank: a data-parallel rank's micro-batches are consecutive."""
    ranks, _ = mesh.along(sample_dims)
    rows = filled(mesh, sample_dims, rows)
    outer = {rank: tuple(x for n, x in zip(mesh.sizes, mesh.coordinates(rank)) if n in data) for rank in ranks}
    pieces = []
    for i, rank in enumerate(ranks):
        mine = rows[rank] or ()
        pieces += [((outer[rank], m, i) if by_rank else (m, outer[rank], i), rank, n) for m, n in enumerate(mine)]
    starts, row_offset = [], 0
    for _, rank, n in sorted(pieces):
        if rank == mesh.rank:
            starts.append(row_offset)
        row_offset += n
    return starts


def dealt_boxes(mesh: Mesh, sample_dims: list[str], box: Box, before: int, unit: int) -> list[Box]:
    """Returns the boxes of samples that are dealt one by one over ranks. before: the number that this rank had; unit:
    rows of a sample."""
    ranks, rank_index = mesh.along(sample_dims)
    return [
        Box(
            (((before + i) * len(ranks) + rank_index) * unit, *box.full[1:]),
            (box.local[0] + i * unit, *box.local[1:]),
            (unit, *box.extent[1:]),
        )
        for i in range(box.extent[0] // unit)
    ]


def _runs_of_heads(name: str, rule: Rule, rows: int, place: Spread) -> list[tuple[int, int, int]]:
    """Returns for each block of heads where the rank's heads begin, their rows, and all rows; with more ranks than
    heads, ranks hold copies."""
    for n in rule.blocks:
        if max(n, place.ranks) % min(n, place.ranks):
            raise AnyrankError(f"{name}: {n} heads cannot be held alike by {place.ranks} ranks")
    runs = [(place.rank_index * n // place.ranks * rule.unit, max(1, n // place.ranks) * rule.unit, n * rule.unit)
            for n in rule.blocks]
    if sum(rank_rows for _, rank_rows, _ in runs) != rows:
        raise AnyrankError(f"{name}: of {list(rule.blocks)} heads of {rule.unit} rows one of {place.ranks} ranks has "
                           f"{sum(rank_rows for _, rank_rows, _ in runs)} rows, not {rows}")
    return runs


def boxes_of_blocks(name: str, rule: Rule, dim: int, local: Shape, offset: Shape, place: Spread) -> list[Box]:
    """Returns a rank's piece of each of several tensors packed along `dim`."""
    if rule.unit:
        runs = _runs_of_heads(name, rule, local[dim], place)
    else:
        blocks = [n // math.gcd(*rule.blocks) for n in rule.blocks]
        total = sum(blocks)
        if local[dim] % total or place.before % total or place.full % total:
            raise AnyrankError(f"{name}: blocks of {blocks} do not divide its {local[dim]} rows")
        runs = [(place.before // total * n, local[dim] // total * n, place.full // total * n) for n in blocks]
    boxes, full, local_offset = [], 0, 0
    for before, rank_rows, block_rows in runs:
        full_offset, start, extent = list(offset), [0] * len(local), list(local)
        full_offset[dim], start[dim], extent[dim] = full + before, local_offset, rank_rows
        boxes.append(Box(tuple(full_offset), tuple(start), tuple(extent)))
        full, local_offset = full + block_rows, local_offset + rank_rows
    return boxes


def zigzag_boxes(mesh: Mesh, name: str, mesh_dim: str, dim: int, box: Box, local: Shape, full: int) -> list[Box]:
    """Returns the two boxes of a rank that has, of 2n equal pieces along a dimension, the i-th from either end."""
    ranks, rank_index = mesh.along([mesh_dim])
    piece = local[dim] // 2
    if box.extent[dim] != local[dim] or 2 * piece * len(ranks) != full:
        raise AnyrankError(f"{name}: {local[dim]} of {full} along dimension {dim} are not two of {2 * len(ranks)} "
                           f"equal pieces, as a zigzag over {mesh_dim} has them")
    out = []
    for start, index in ((0, rank_index), (piece, 2 * len(ranks) - 1 - rank_index)):
        full_offset, inner, extent = list(box.full), list(box.local), list(box.extent)
        full_offset[dim], inner[dim], extent[dim] = index * piece, start, piece
        out.append(Box(tuple(full_offset), tuple(inner), tuple(extent)))
    return out
