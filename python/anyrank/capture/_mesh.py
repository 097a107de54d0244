# SPDX-License-Identifier: Apache-2.0
"""The mesh of a run: dimensions with names and sizes, outermost first; the last one's coordinate counts fastest.

It is found from what the model has: the meshes of its DTensors, the process groups of FSDP2 and DDP. Each of them is a
line of ranks through this one with equal steps, and lines that lie within one another make a mesh.
"""

from __future__ import annotations

import typing

from anyrank._errors import AnyrankError

MAX_DIMS, MAX_NAME = 6, 15
SPEC_HINT = 'say it: spec={"mesh": {"dp": 2, "tp": 4}}, the outermost dimension first'


class Line(typing.NamedTuple):
    """The ranks along one dimension, this one among them. name: None where nobody named it."""

    name: str | None
    ranks: tuple[int, ...]


class Mesh:
    """sizes: {"dp": 2, "tp": 4}, outermost first."""

    def __init__(self, sizes: dict[str, int], rank: int, world: int) -> None:
        ranks = 1
        for name, size in sizes.items():
            if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME:
                raise AnyrankError(f"mesh: {name!r} is no name of 1 to {MAX_NAME} bytes")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise AnyrankError(f"mesh: {name!r} has the size {size!r}, which has to be an integer from 1")
            ranks *= size
        if len(sizes) > MAX_DIMS:
            raise AnyrankError(f"mesh: {len(sizes)} dimensions, at most {MAX_DIMS} are supported")
        if ranks != world:
            raise AnyrankError(f"the mesh {sizes} has {ranks} ranks, the run has {world}; {SPEC_HINT}")
        self.sizes, self.rank, self.world = sizes, rank, world
        self.strides: dict[str, int] = {}
        stride = 1
        for name in reversed(sizes):
            self.strides[name] = stride
            stride *= sizes[name]

    def coordinates(self, rank: int) -> list[int]:
        """Returns a rank's coordinates, in the order of sizes."""
        return [rank // self.strides[name] % size for name, size in self.sizes.items()]

    def is_last(self, name: str) -> bool:
        """Returns whether no rank comes after this one along a dimension, which the mesh may lack."""
        return (name not in self.sizes or
                self.coordinates(self.rank)[list(self.sizes).index(name)] == self.sizes[name] - 1)

    def is_first(self, name: str) -> bool:
        """Returns whether no rank comes before this one along a dimension, which the mesh may lack."""
        return name not in self.sizes or self.coordinates(self.rank)[list(self.sizes).index(name)] == 0

    def size(self, names: typing.Iterable[str]) -> int:
        """Returns the number of ranks along all of these dimensions together."""
        n = 1
        for name in names:
            n *= self.sizes[name]
        return n

    def ordered(self, names: typing.Iterable[str]) -> list[str]:
        requested = set(names)
        return [name for name in self.sizes if name in requested]

    def along(self, names: typing.Sequence[str]) -> tuple[list[int], int]:
        """Returns the ranks that differ from this one only in these dimensions, the first slowest; and its place among
        them."""
        ranks = [self.rank - sum(self.rank // self.strides[n] % self.sizes[n] * self.strides[n] for n in names)]
        for name in names:
            ranks = [base_rank + i * self.strides[name] for base_rank in ranks for i in range(self.sizes[name])]
        return ranks, ranks.index(self.rank)

    def covered(self, ranks: typing.Sequence[int], label: str) -> list[str]:
        """Returns the dimensions along which these ranks run; they have to be all ranks along them."""
        coordinates = [self.coordinates(rank) for rank in ranks]
        names = [name for i, name in enumerate(self.sizes) if len({c[i] for c in coordinates}) > 1]
        if set(self.along(names)[0]) != set(ranks):
            raise AnyrankError(f"{label} has the ranks {list(ranks)}, which are none of the lines of the mesh "
                               f"{self.sizes} through rank {self.rank}; {SPEC_HINT}")
        return names


def _step(line: Line) -> int:
    """Returns the distance from one rank of a line to the next."""
    ranks = line.ranks
    step = ranks[1] - ranks[0]
    if step < 1 or any(b - a != step for a, b in zip(ranks, ranks[1:])):
        raise AnyrankError(f"the ranks {list(ranks)} of the mesh's dimension {line.name!r} do not follow at equal "
                           f"steps; {SPEC_HINT}")
    return step


def _split(line: Line, measures: set[tuple[int, int]]) -> list[tuple[int, int, str | None]]:
    """Splits a line into (step, size, name); empty if it consists of other lines, as after flattening."""
    step, size = _step(line), len(line.ranks)
    nested = sorted((s, n) for s, n in measures if s >= step and s * n <= step * size and (s, n) != (step, size))
    reach = step
    for s, n in nested:
        if s == reach:
            reach *= n
    if nested and reach == step * size:
        return []
    return [(step, size, line.name)]


def mesh_of_lines(lines: typing.Sequence[Line], rank: int, world: int) -> Mesh:
    """Returns the mesh that has all of these lines as dimensions; the remaining ranks are "tp", or "rest" if that name
    is taken."""
    texts = [list(line.ranks) for line in lines]
    several = [line for line in lines if len(line.ranks) > 1]
    measures = {(_step(line), len(line.ranks)) for line in several}
    dims: dict[tuple[int, int], str | None] = {}
    for line in several:
        for step, size, name in _split(line, measures):
            dims[(step, size)] = dims.get((step, size)) or name
    used = {name for name in dims.values() if name}
    found: list[tuple[str, int]] = []

    def add(size: int, name: str | None) -> None:
        free = [n for n in (name, "tp", "rest", "rest2", "rest3") if n and n not in {f for f, _ in found}]
        if name is None:
            free = [n for n in free if n not in used]
        found.append((free[0], size))

    reach = 1
    for (step, size), name in sorted(dims.items()):
        if step % reach:
            raise AnyrankError(f"the groups of ranks {texts} lie across one another; {SPEC_HINT}")
        if step > reach:
            add(step // reach, None)
        add(size, name)
        reach = step * size
    if world % reach:
        raise AnyrankError(f"the groups of ranks {texts} do not divide a run of {world}; {SPEC_HINT}")
    if world > reach or not found:
        add(world // reach, None)
    return Mesh(dict(reversed(found)), rank, world)


# --- what a model has -------------------------------------------------------------------------------------------------

def lines_of_device_mesh(mesh: typing.Any) -> list[Line]:
    """Returns the lines of a DeviceMesh through this rank; empty if the rank is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    names = mesh.mesh_dim_names or [None] * mesh.ndim
    lines = []
    for i, name in enumerate(names):
        ranks = mesh.mesh
        for k in reversed(range(mesh.ndim)):
            if k != i:
                ranks = ranks.select(k, coordinate[k])
        lines.append(Line(name, tuple(ranks.tolist())))
    return lines


def root_of(mesh: typing.Any) -> typing.Any:
    """Returns the mesh that a DeviceMesh was cut out of; the mesh itself if this version of PyTorch does not say."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    import torch.distributed.device_mesh as home

    resources: typing.Any = getattr(home, "_mesh_resources", None)
    if hasattr(resources, "get_root_mesh"):  # before PyTorch 2.9
        return resources.get_root_mesh(mesh)
    parent = getattr(resources, "get_parent_mesh", None)  # before PyTorch 2.5
    return (parent(mesh) if parent else None) or mesh


def ranks_of_group(group: typing.Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(sorted(dist.get_process_group_ranks(group)))
