# SPDX-License-Identifier: Apache-2.0
"""The order of slices along an axis: which slice of the reference stands where, and by what rule.

Slices are matched by random projections. The order found is described by the largest blocks that move as a whole and
the smallest period within which one rule moves them.
"""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.tensors import Array, Case

ROTATED, REVERSED, DEALT, ZIGZAG, EXCHANGED, REPEATED, REORDERED, SHIFTED = (
    "rotated", "reversed", "dealt", "zigzag", "exchanged", "repeated", "reordered", "shifted")
MOST_SLICES = 1 << 16  # that are matched along an axis
LEAST = 8  # elements that move: fewer are at another place by accident
PROBED = 64  # elements by which a move is ruled out
ROWS = -1  # all dimensions but the last, in a row


# --- matching ---------------------------------------------------------------------------------------------------------


def projections(x: Array, outer: int, n: int, inner: int) -> Array:
    """[n, 3]: random projections of n slices. Slices that are equal have equal ones up to rounding of binary64."""
    random = np.random.default_rng(1)
    x = np.nan_to_num(x, nan=0.5, posinf=0.25, neginf=0.125).reshape(outer, n * inner)
    columns = []
    for _ in range(3):
        of_outer, of_inner = random.standard_normal(outer), random.standard_normal(inner)
        columns.append((of_outer @ x).reshape(n, inner) @ of_inner)
    result: Array = np.stack(columns, axis=1)
    return result


def _nearest(known: Array, asked: Array) -> tuple[Array, Array]:
    """Of each row asked for: the nearest known one, and how far it is."""
    order = np.argsort(known[:, 0], kind="stable")
    at: Array = np.asarray(np.searchsorted(known[order, 0], asked[:, 0]))
    some = np.clip(at[:, None] + np.arange(-4, 4), 0, len(known) - 1)
    apart = np.abs(known[order][some] - asked[:, None, :]).max(axis=2)
    best: Array = apart.argmin(axis=1)
    rows = np.arange(len(asked))
    return np.asarray(order[some[rows, best]]), np.asarray(apart[rows, best])


def _classes(known: Array) -> Array:
    """Equal numbers for equal slices: the first one's."""
    order = np.lexsort(known.T[::-1])
    limit = 1e-12 * max(float(np.abs(known).max(initial=0.0)), 1e-300)
    new = np.concatenate(([True], np.abs(np.diff(known[order], axis=0)).max(axis=1) > limit))
    result: Array = np.empty(len(known), np.int64)
    first = np.minimum.reduceat(order, np.flatnonzero(new))
    result[order] = first[np.cumsum(new) - 1]
    return result


@dataclasses.dataclass
class Slices:
    """n slices of two arrays. known: classes of the reference's slices; found: those of the other's, -1: none. source:
    a slice of the reference that each of the other's equals. telling: those that equal one alone, and are more
    than one value."""

    n: int
    size: int
    known: Array
    found: Array
    source: Array
    telling: Array

    @classmethod
    def of(cls, ref: Array, val: Array, right: Array, limit: float, dims: tuple[int, int, int]) -> Slices:
        """right: which slices have no difference. limit: how far rounding takes an element."""
        outer, n, inner = dims
        known, asked = projections(ref, *dims), projections(val, *dims)
        classes = _classes(known)
        source, apart = _nearest(known, asked)
        found = np.where(apart <= 2.0 * limit * math.sqrt(outer * inner), classes[source], -1)
        found = np.where(right, classes, found)
        source = np.where(found == classes, np.arange(n), np.where(found < 0, -1, found))
        counts = np.bincount(classes, minlength=n)
        view = val.reshape(dims)
        varies = outer * inner == 1 or view.max(axis=(0, 2)) > view.min(axis=(0, 2))
        telling = (found >= 0) & (counts[np.maximum(found, 0)] == 1) & varies
        return cls(n, outer * inner, classes, found, source, telling)

    @property
    def moved(self) -> Array:
        result: Array = self.telling & (self.source != np.arange(self.n))
        return result

    def holds(self, source: Array) -> bool:
        return bool((self.known[source] == self.found).all())

    def blocks(self, size: int) -> Array | None:
        """The block of the reference that each block of so many slices is; None: not all are one."""
        at = np.flatnonzero(self.telling)
        if (self.source[at] % size != at % size).any():
            return None
        source = np.arange(self.n // size)
        source[at // size] = self.source[at] // size
        return source if self.holds(_spread(source, size)) else None


def _spread(source: Array, size: int) -> Array:
    """Of blocks' sources those of their slices."""
    result: Array = (source[:, None] * size + np.arange(size)).ravel()
    return result


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Move:
    """kind: of the pattern. source: of n slices. size: slices of a block that moves as a whole. period: blocks within
    which the rule holds. by: blocks by which a rotation or shift moves; p, q: runs that are dealt out. edge: what
    stands where a shift brings nothing."""

    kind: str
    source: Array
    size: int
    period: int
    by: int = 0
    p: int = 0
    q: int = 0
    a: int = 0
    b: int = 0
    edge: str = ""

    @property
    def fitted(self) -> int:
        return {EXCHANGED: 1, REPEATED: 2, REORDERED: 2, SHIFTED: 1}.get(self.kind, 0)


def _rules(period: int, first: Array) -> typing.Iterator[tuple[str, Array, dict[str, typing.Any]]]:
    """Orders of so many blocks of which `first` may be one."""
    at = np.arange(period)
    if period > 2:
        yield REVERSED, at[::-1], {}
    moved = np.flatnonzero(first != at)
    by = int(first[moved[0]] - moved[0]) % period if moved.size else 0
    if by:
        yield ROTATED, (at + by) % period, {"by": by if by <= period // 2 else by - period}
    for p in divisors(period)[1:-1]:
        yield DEALT, at % p * (period // p) + at // p, {"p": p, "q": period // p}
    if moved.size and 0 < moved[0] and moved[-1] < period - 1:  # runs that are dealt out in a part of each period
        start, many = int(moved[0]) - 1, int(moved[-1] - moved[0]) + 3
        for p in divisors(many)[1:-1] if many < period else ():
            yield DEALT, np.concatenate((at[:start], start + at[:many] % p * (many // p) + at[:many] // p,
                                         at[start + many:])), {"p": p, "q": many // p}
    if period % 2 == 0 and period >= 4:
        ends = np.stack((at, at[::-1]), axis=1).ravel()[:period]
        yield ZIGZAG, ends, {}
        yield ZIGZAG, np.argsort(ends), {}


def _ruled(s: Slices, blocks: Array, size: int) -> Move | None:
    """The rule of the smallest period that moves blocks within each period, or within some, the others being right."""
    n = len(blocks)
    own = np.arange(n)
    for period in divisors(n)[1:]:
        start: Array = own // period * period
        if (blocks // period != own // period).any():
            continue
        moved = np.flatnonzero((blocks != own).reshape(-1, period).any(axis=1))
        within = (blocks - start).reshape(-1, period)
        few = len(moved) < n // period  # two or three blocks among right ones are no rule
        for kind, order, numbers in _rules(period, within[moved[0]]):
            if (within[moved] == order).all() and not (few and int((order != np.arange(period)).sum()) < 4):
                return Move(kind, _spread(blocks, size), size, period, **numbers)
            source = (np.tile(order, n // period) + start) if not few else None
            if source is not None and s.holds(_spread(source, size)):
                return Move(kind, _spread(source, size), size, period, **numbers)
    return None


def _shift(s: Slices, val: Array) -> Move | None:
    """Slices that are those some places further on, from the first that differs to the last; what comes in from
    outside is zero, repeated, or unknown. val: [outer, n, inner]."""
    at = np.flatnonzero(s.moved)
    steps, counts = np.unique(s.source[at] - at, return_counts=True)
    if not steps.size or counts.max() < max(3, 0.75 * len(at)):
        return None
    by = int(steps[counts.argmax()])
    own = np.arange(s.n)
    wrong = np.flatnonzero(s.found != s.known)
    start, end = int(wrong[0]), int(wrong[-1]) + 1
    source = np.where((own >= start) & (own < end), own + by, own)
    outside = (source < 0) | (source >= s.n)
    missed = (s.known[np.clip(source, 0, s.n - 1)] != s.found) & ~outside
    edge = np.flatnonzero(outside | missed)
    if len(edge) > abs(by) or 2 * abs(by) > end - start or (edge.size and edge[-1] - edge[0] >= abs(by)):
        return None
    if not np.any(val[:, edge]):
        said = "zeros"
    elif s.holds(np.clip(source, 0, s.n - 1)):
        return Move(SHIFTED, np.clip(source, 0, s.n - 1), 1, s.n, by, edge="the edge's, repeated")
    else:
        said = "others"
    source[edge] = -1
    return Move(SHIFTED, source, 1, s.n, by, edge=said)


def _few(s: Slices, blocks: Array, size: int) -> Move:
    """Blocks in each other's place, blocks that stand at two places, or any other order."""
    own = np.arange(len(blocks))
    moved = np.flatnonzero(blocks != own)
    pair = bool((blocks[blocks[moved]] == moved).all())
    repeated = len(np.unique(blocks)) < len(blocks)
    kind = EXCHANGED if pair and len(moved) == 2 else REPEATED if repeated else REORDERED
    return Move(kind, _spread(blocks, size), size, len(blocks), a=int(moved[0]), b=int(blocks[moved[0]]))


def _move(s: Slices, val: Array) -> Move | None:
    if not s.moved.any():
        return None
    if (s.found < 0).any():
        return _shift(s, val)
    for size in reversed(divisors(s.n)[:-1]):
        blocks = s.blocks(size)
        if blocks is not None:
            return _ruled(s, blocks, size) or _shift(s, val) or _few(s, blocks, size)
    return None


def _is_evident(move: Move, s: Slices, few_values: bool) -> bool:
    """Whether so many slices of such size are no accident."""
    moved = int(s.moved.sum())
    if moved * s.size < LEAST:
        return False
    if move.kind in (EXCHANGED, REPEATED, REORDERED):
        return s.size >= LEAST * (8 if few_values else 1)
    return True


# --- along each axis --------------------------------------------------------------------------------------------------


def dimensions(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    if axis == ROWS:
        return 1, math.prod(shape[:-1]), shape[-1]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1:])


def near(case: Case) -> float:
    allowed = float(np.max(case.allowed)) if isinstance(case.allowed, np.ndarray) else case.allowed
    return allowed + float(case.rounding(np.full(1, case.scale))[0])


def moves(case: Case, ref: Array, val: Array, off: Array) -> typing.Iterator[tuple[int, Move]]:
    """How slices along each axis moved."""
    few_values = ref.dtype.kind in "iub" and len(np.unique(ref)) <= 16
    for axis in (*range(ref.ndim), *((ROWS,) if ref.ndim > 2 else ())):
        dims = dimensions(ref.shape, axis)
        if not 2 <= dims[1] <= MOST_SLICES:
            continue
        right = np.asarray(~off.reshape(dims).any(axis=(0, 2)))
        s = Slices.of(ref, val, right, near(case), dims)
        if (move := _move(s, val.reshape(dims))) is not None and _is_evident(move, s, few_values):
            at = np.flatnonzero(off)[:: max(1, int(off.sum()) // PROBED)]
            expected = applied(ref, val, axis, move).ravel()[at]
            if np.mean(np.abs(expected - val.ravel()[at]) <= near(case)) > 0.9:
                yield axis, move


def applied(ref: Array, val: Array, axis: int, move: Move) -> Array:
    """The reference with its slices moved; those from outside are zero, or the other's own."""
    dims = dimensions(ref.shape, axis)
    result: Array = ref.reshape(dims)[:, np.maximum(move.source, 0)]
    outside = move.source < 0
    result[:, outside] = 0.0 if move.edge == "zeros" else val.reshape(dims)[:, outside]
    whole: Array = result.reshape(ref.shape)
    return whole
