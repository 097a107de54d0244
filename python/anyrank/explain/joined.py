# SPDX-License-Identifier: Apache-2.0
"""What a linear module or a convolution reads, as tensors that are joined along the features: in which order."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import earlier, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import near
from anyrank.explain.tensors import Array, Case, Name

JOINED = "joined"
MOST_TENSORS, MOST_PARTS, MOST_STEPS = 24, 16, 600
MOST_WORK = 1 << 33
SAMPLED = 96  # places of the output by which an order is found
BRANCHES = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor, or a block of its features. values: [samples, features, places ..], as the module reads it."""

    name: str
    values: Array

    @property
    def width(self) -> int:
        return int(self.values.shape[1])


@dataclasses.dataclass(frozen=True)
class Reader:
    """output = weight * input + bias. weight: [out, in, kernel ..]; without a kernel features are the last dimension of
    what it reads and gives."""

    weight: Array
    bias: Array
    shape: tuple[int, ...]  # of the output, [samples, out, places ..]

    @classmethod
    def of(cls, case: Case) -> Reader | None:
        name, known = case.name, case.runs.reference
        of = ("init", 1) if name.step == 1 else ("new", name.step - 1)
        weight, bias = (str(Name(f"{name.stem}.{leaf}", *of)) for leaf in ("weight", "bias"))
        if name.kind != "fwd" or len(case.shape) < 2 or weight not in known or known[weight].ndim < 2:
            return None
        w: Array = known[weight].astype(np.float64)
        shape = case.shape
        if w.ndim == 2:
            shape = (math.prod(shape[:-1]), shape[-1])
            w = w if len(w) == shape[-1] else w.T
        if len(w) != shape[1] or w.ndim != len(shape):
            return None
        added: Array = known[bias].astype(np.float64) if bias in known else np.zeros(len(w))
        return cls(w, added, shape) if added.shape == (len(w),) else None

    def own(self, array: Array) -> Array:
        """An output as [samples, out, places ..]."""
        return array.reshape(self.shape)

    def reads(self, array: Array) -> Array | None:
        """A tensor as this may read it, repeated to as many places; None: it has others."""
        x = array
        if self.weight.ndim == 2:
            return x.reshape(-1, x.shape[-1]) if math.prod(x.shape[:-1]) == self.shape[0] else None
        if x.ndim != len(self.shape) or len(x) != self.shape[0]:
            return None
        for axis in range(2, x.ndim):
            times = self.shape[axis] // x.shape[axis]
            if times > 1 and self.shape[axis] % x.shape[axis] == 0:
                x = np.repeat(x, times, axis)
            if x.shape[axis] % self.shape[axis]:
                return None
        return x

    def places(self) -> tuple[Array, ...]:
        """A sample of the output's samples and places."""
        rest = (self.shape[0], *self.shape[2:])
        flat = np.unique(np.linspace(0, math.prod(rest) - 1, min(SAMPLED, math.prod(rest))).astype(int))
        return tuple(np.asarray(at) for at in np.unravel_index(flat, rest))

    def patches(self, x: Array, at: tuple[Array, ...]) -> Array:
        """[places, features, kernel ..]: what the module reads for some of its output."""
        if self.weight.ndim == 2:
            rows: Array = x[at[0]].astype(np.float64)
            return rows
        kernel = self.weight.shape[2:]
        steps = [n // own for n, own in zip(x.shape[2:], self.shape[2:])]
        padded = np.pad(x, ((0, 0), (0, 0), *((k // 2, k // 2) for k in kernel)))
        columns = []
        for offset in itertools.product(*map(range, kernel)):
            index = (at[0], slice(None), *(a * s + o for a, s, o in zip(at[1:], steps, offset)))
            columns.append(padded[index])
        result: Array = np.stack(columns, axis=2).reshape(len(at[0]), x.shape[1], -1).astype(np.float64)
        return result

    def some(self, output: Array, at: tuple[Array, ...]) -> Array:
        """[places, out] of an output, less the bias."""
        index = (at[0], slice(None), *at[1:])
        result: Array = self.own(output)[index] - self.bias
        return result

    def whole(self, parts: typing.Sequence[Part], shape: tuple[int, ...]) -> Array:
        x = np.concatenate([part.values for part in parts], axis=1)
        rest = np.indices((self.shape[0], *self.shape[2:])).reshape(len(self.shape) - 1, -1)
        w = self.weight.reshape(len(self.weight), -1)
        y = self.patches(x, tuple(rest)).reshape(rest.shape[1], -1) @ w.T + self.bias
        result: Array = np.moveaxis(y.reshape(self.shape[0], *self.shape[2:], -1), -1, 1).reshape(shape)
        return result


class Search:
    """Looks for parts whose products with the weight's columns, one after the other, add up to an output."""

    def __init__(self, reader: Reader, parts: typing.Sequence[Part], at: tuple[Array, ...], limit: float) -> None:
        self.reader, self.parts, self.limit = reader, parts, limit
        self.patches = [reader.patches(part.values, at).reshape(len(at[0]), -1) for part in parts]
        self.steps = 0

    def _gives(self, i: int, first: int) -> Array:
        columns = self.reader.weight[:, first:first + self.parts[i].width].reshape(len(self.reader.weight), -1)
        result: Array = self.patches[i] @ columns.T
        return result

    def orders(self, wanted: Array, once: bool) -> list[int] | None:
        """Numbers of the parts in their order. once: each is there once."""
        return self._next(wanted, 0, [], once)

    def _next(self, rest: Array, first: int, used: list[int], once: bool) -> list[int] | None:
        width = self.reader.weight.shape[1]
        if first == width:
            return used if float(np.abs(rest).max()) <= self.limit else None
        if len(used) == MOST_PARTS or self.steps > MOST_STEPS:
            return None
        self.steps += 1
        tried = [(float(((rest - given) ** 2).sum()), i, given) for i, part in enumerate(self.parts)
                 if first + part.width <= width and not (once and i in used) for given in [self._gives(i, first)]]
        for _, i, given in sorted(tried, key=lambda row: row[:2])[:BRANCHES]:
            if (found := self._next(rest - given, first + self.parts[i].width, [*used, i], once)) is not None:
                return found
        return None


def _parts(case: Case, reader: Reader) -> list[Part]:
    """Tensors that were computed before, and the model's inputs, as the module may read them."""
    found: list[Part] = []
    for name in earlier(case):
        own = Name.of(name)
        shape = shape_of(case.runs.reference, name)
        if own.kind != "fwd" or own.step != case.name.step or len(shape) < 2 or len(found) == MOST_TENSORS:
            continue
        features = shape[-1] if reader.weight.ndim == 2 else shape[1]
        if features <= reader.weight.shape[1] and case.runs.reference[name].dtype.kind == "f":
            x = reader.reads(case.runs.reference[name])
            if x is not None:
                found.append(Part(name, x))
    return found


def _blocks(part: Part, counts: typing.Iterable[int]) -> typing.Iterator[list[Part]]:
    for n in counts:
        if part.width % n == 0 and part.width > n:
            yield [Part(f"block {i} of {n}", x) for i, x in enumerate(np.split(part.values, n, axis=1))]


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.every or case.reference.dtype.kind != "f" or not case.seen.any() or not np.isfinite(case.val).all():
        return
    reader = Reader.of(case)
    if reader is None or case.reference.size * reader.weight[0].size > MOST_WORK:
        return
    at, limit = reader.places(), 4.0 * near(case)
    parts = _parts(case, reader)
    order = Search(reader, parts, at, limit).orders(reader.some(case.ref, at), False)
    if order is None:
        return
    wanted = [parts[i] for i in order]
    runs = case.runs
    counts = {2, 3, 4, runs.heads, runs.kv_heads, *runs.group_sizes, *(2 * n for n in runs.group_sizes)}
    ways = [wanted] if len(wanted) > 1 else _blocks(wanted[0], (n for n in sorted(counts) if 1 < n <= MOST_PARTS))
    for pieces in ways:
        found = Search(reader, pieces, at, limit).orders(reader.some(case.val, at), False)
        if found is None or found == list(range(len(pieces))):
            continue
        yield Pattern(JOINED, reader.whole([pieces[i] for i in found], case.shape), {
            "has": ", ".join(pieces[i].name for i in found), "wanted": ", ".join(part.name for part in pieces),
            "source": "" if len(wanted) > 1 else f" of {wanted[0].name}",
            "once": sorted(found) == list(range(len(pieces)))}, fitted=0 if len(pieces) < 5 else 1)
        return


# --- causes -----------------------------------------------------------------------------------------------------------

CAUSES = (
    Cause("slices_reordered", (JOINED,), "what this module reads is joined in another order: {has}{source}, where the "
          "reference has {wanted}", "the order of `torch.cat`, of gathered parts and of packed features in front of "
          "this module", has(once=True)),
    Cause("slices_repeated", (JOINED,), "what this module reads has a part twice and another not at all: "
          "{has}{source}, where the reference has {wanted}", "what is joined in front of this module"),
)
