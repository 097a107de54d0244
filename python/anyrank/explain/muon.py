# SPDX-License-Identifier: Apache-2.0
"""Updates of matrices that are made orthogonal (Muon): of what, and in which parts, each run has made them so."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.patterns import Pattern
from anyrank.explain.steps import before, sum_of
from anyrank.explain.tensors import Array, Case

ORTHOGONAL, OF_ROW, TURNED = "made orthogonal", "vector made orthogonal", "update of another place"
QUINTIC = (3.4445, -4.775, 2.0315)  # of Newton and Schulz's iteration, of which Muon makes five
MOST_WORK = 1 << 26  # products of one matrix multiplication
CLOSE, FAR = 1e-2, 5e-2  # what a sum leaves of an update that it is, and of one that it is not
RATIOS = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1))  # of matrices that are packed side by side

Block = tuple[slice, ...]


class Form(typing.NamedTuple):
    """text: which parts are made orthogonal. blocks: they. norms: parts by whose norms the whole is divided first."""

    text: str
    blocks: list[Block]
    norms: list[Block] = []


def orthogonal(x: Array, norm: float) -> Array:
    """x, divided by its norm, with singular values near one."""
    a, b, c = QUINTIC
    y: Array = (x.T if len(x) > len(x.T) else x) / max(norm, 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if len(x) > len(x.T) else y


def _cut(block: Block, axis: int, sizes: typing.Sequence[int]) -> list[Block]:
    edges = list(itertools.accumulate(sizes, initial=block[axis].start))
    return [(*block[:axis], slice(start, stop), *block[axis + 1:]) for start, stop in zip(edges, edges[1:])]


def _packed(case: Case, axis: int, sizes: typing.Sequence[int]) -> Form:
    what = f"each of {len(sizes)} matrices, of {sizes} {('rows', 'columns')[axis]}," if len(sizes) > 1 else "the whole"
    return Form(what, _cut(tuple(slice(0, n) for n in case.shape), axis, sizes))


def _packings(case: Case) -> list[tuple[int, list[int]]]:
    """The whole, equal matrices side by side, and queries with fewer keys and values: axis and sizes."""
    heads, kv_heads = max(case.runs.heads, 1), max(case.runs.kv_heads, 1)
    return [(axis, [case.shape[axis] // sum(ratio) * n for n in ratio])
            for ratio, axis in itertools.product((*RATIOS, (heads, kv_heads, kv_heads)), (0, 1))
            if case.shape[axis] % sum(ratio) == 0]


def _forms(case: Case, packings: list[tuple[int, list[int]]], axis: int, sizes: list[int]) -> typing.Iterator[Form]:
    """Parts of what the reference makes orthogonal, as ranks hold them; other packings; a packing that is cut where a
    rank's part of it would be."""
    mine = _packed(case, axis, sizes)
    for n, along in itertools.product(case.runs.group_sizes, (0, 1)):
        extents = [block[along].stop - block[along].start for block in mine.blocks]
        if all(extent % n == 0 for extent in extents):
            parts = [_cut(block, along, [extent // n] * n) for block, extent in zip(mine.blocks, extents)]
            text = f"each of {n} parts along the {('rows', 'columns')[along]}"
            yield Form(text, sum(parts, []))
            if len(sizes) == 1:
                yield Form(f"the whole, divided by the norm of {text},", mine.blocks, parts[0])
    cut = [[size // n for size in sizes[:-1]] for n in case.runs.group_sizes if len(sizes) > 1]
    yield from (_packed(case, *packing) for packing in (
        *packings, *((axis, [*some, sum(sizes) - sum(some)]) for some in cut)) if packing != (axis, sizes))


def _directions(case: Case) -> dict[str, Array]:
    """What may be made orthogonal: the momentum with the gradient in it once more (Nesterov's), or one of them."""
    g, m = (case.beside(case.name.with_kind(kind)) for kind in ("grad", "m"))
    kept = case.beside(case.name.with_kind("m", case.name.step - 1)) if case.name.step > 1 else None
    made = sum_of(m, (g,) if kept is None else (g, kept)) if g is not None and m is not None else None
    if g is None or m is None or made is None or made.left > CLOSE:
        return {}
    again = () if kept is None else (("Nesterov's momentum", made.numbers[1] * m + made.numbers[0] * g),
                                     ("the momentum", m), ("the former momentum", kept))
    return {**dict(again), "the gradient": g}


def _fitted(w: Array, now: Array, u: Array, form: Form) -> tuple[Array, int] | None:
    """The weights that a form's update with the best decay and rates gives, one for each shape of its parts, and how
    many rates these are."""
    made: dict[tuple[int, ...], Array] = {}
    for block in form.blocks:
        column = made.setdefault(u[block].shape, np.zeros(u.shape))
        column[block] = orthogonal(u[block], float(np.linalg.norm(u[block])))
        for part in form.norms:
            column[part] = orthogonal(u, float(np.linalg.norm(u[part])))[part]
    found = sum_of(w - now, (*made.values(), w))
    if found is None or found.left > CLOSE or min(found.numbers[:-1]) <= 0.0:
        return None
    expected: Array = w - sum(x * column for x, column in zip(found.numbers, (*made.values(), w)))
    return expected, len(made)


def _matrices(case: Case, w: Array) -> typing.Iterator[Pattern]:
    directions, packings = _directions(case), _packings(case)
    what, mine = next(((what, packing) for what, packing in itertools.product(directions, packings)
                       if _fitted(w, case.ref, directions[what], _packed(case, *packing))), ("", None))
    if mine is None:
        return
    text = _packed(case, *mine).text
    for other, form in (*((what, form) for form in _forms(case, packings, *mine)),
                        *((other, _packed(case, *mine)) for other in directions if other != what)):
        found = _fitted(w, case.val, directions[other], form)
        if found is not None:
            yield Pattern(ORTHOGONAL, found[0], {
                "other": form.text, "reference": text, "input": other, "reference input": what,
                "changed": "input" if other != what else "scale" if form.norms else "parts"}, found[1])


def _of_row(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """A vector's update is the gradient times a number, as a matrix of one row that is made orthogonal has it."""
    g = case.beside(case.name.with_kind("grad"))
    here, there = (sum_of(w - now, (g, w)) if g is not None else None for now in (case.val, case.ref))
    if g is not None and here is not None and there is not None and here.left < CLOSE and there.left > FAR:
        yield Pattern(OF_ROW, w - here.numbers[0] * g - here.numbers[1] * w, {"rate": here.numbers[0]}, 1)


def _turned(case: Case, w: Array) -> typing.Iterator[Pattern]:
    """Each part of the weight got the update of another part, and its own decay."""
    update, size = case.ref - w, float(np.linalg.norm(case.val - w))
    for n, axis in itertools.product(case.runs.group_sizes, range(len(case.shape))):
        for i in range(1, n if case.shape[axis] % n == 0 and 0.9 < size / np.linalg.norm(update) < 1.1 else 1):
            moved, away = (x - np.roll(x, -i * case.shape[axis] // n, axis) for x in (update, w))
            found = sum_of(case.val - case.ref + moved, (away,))
            yield Pattern(TURNED, case.ref - moved + (found.numbers[0] if found is not None else 0.0) * away, {
                "n": n, "by": i, "axis": axis}, fitted=1, trials=n)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    w = before(case) if case.name.kind == "new" and not case.every else None
    if w is not None and len(case.shape) == 1:
        yield from _of_row(case, w)
    elif w is not None and len(case.shape) == 2:
        if math.prod(case.shape) * min(case.shape) <= MOST_WORK and (
                case.name.with_kind("v") not in case.runs.reference):
            yield from _matrices(case, w)
        yield from _turned(case, w)


_MADE = "the update makes {other} orthogonal, and the reference's makes {reference} so"
CAUSES = (
    Cause("muon_by_parts", (ORTHOGONAL,), _MADE, "what Muon's Newton-Schulz iteration is given: the whole matrix, "
          "gathered from its shards; q, k and v (gate and up) of a packed weight each by itself, cut where the whole "
          "weight has them", has(changed="parts")),
    Cause("muon_scale", (ORTHOGONAL,), _MADE, "the norm before Muon's Newton-Schulz iteration: of the whole matrix, "
          "its squares added over the ranks", has(changed="scale")),
    Cause("muon_input", (ORTHOGONAL,), "the update makes {input} orthogonal, and the reference's {reference input}",
          "what Muon's Newton-Schulz iteration is given: `nesterov=`, the momentum before or after it is updated"),
    Cause("muon_input", (OF_ROW,), "the update of this vector is the gradient times {rate}, as SGD makes it and Muon "
          "of one row; the reference's is not", "which parameters each optimizer has: Muon matrices alone, AdamW "
          "vectors and embeddings"),
    Cause("update_misplaced", (TURNED,), "each of {n} parts along dimension {axis} has the update of the part {by} "
          "further on", "which part of the update each rank takes of what was gathered; shares of weights and of "
          "gradients that do not line up"),
)
