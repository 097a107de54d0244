# SPDX-License-Identifier: Apache-2.0
"""Cases for tests of anyrank.explain: a reference, and what ranks hold of it."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain import explain
from anyrank.explain.dumps import worst_of
from anyrank.explain.tensors import Array, Case, Copy, Name, Runs

Parts = typing.Sequence[tuple[tuple[slice, ...], Array]]


def values(*shape: int, seed: int = 0) -> Array:
    result: Array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return result


def case_of(name: str, reference: Array, held: Array | Parts, /, mesh: dict[str, int] | None = None,
            **facts: typing.Any) -> Case:
    """held: the whole tensor of a run of one rank; or each rank's (box, values), in the order of ranks."""
    parts = [(tuple(slice(0, n) for n in reference.shape), held)] if isinstance(held, np.ndarray) else held
    copies = tuple(Copy(rank, (box,), (value,)) for rank, (box, value) in enumerate(parts))
    runs = Runs(mesh=mesh or {}, **facts)
    return Case(Name.of(name), reference, worst_of(reference, copies), copies, runs)


def shards(reference: Array, held: Array, n: int, axis: int = 0) -> Parts:
    """Equal parts of `held` on n ranks, at the places of the reference's parts."""
    size = reference.shape[axis] // n
    found = []
    for rank in range(n):
        box = tuple(slice(rank * size, (rank + 1) * size) if a == axis else slice(0, extent)
                    for a, extent in enumerate(reference.shape))
        found.append((box, np.ascontiguousarray(held[box])))
    return found


def cause(name: str, reference: Array, other: Array, runs: Runs | None = None, parts: int = 1) -> str:
    """The answer to a whole tensor, or to one of which some ranks have equal parts of the first dimension."""
    other = other.astype(np.float32)
    case = case_of(name, reference, shards(reference, other, parts) if parts > 1 else other)
    return explain.explain(dataclasses.replace(case, runs=runs or Runs())).cause


def copies(*held: Array) -> Parts:
    return [(tuple(slice(0, n) for n in value.shape), value) for value in held]
