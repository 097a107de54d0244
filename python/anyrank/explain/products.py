# SPDX-License-Identifier: Apache-2.0
"""A parameter's gradient made again of the reference's activations and gradients, whichever of the dump's tensors these
are: which samples, tokens, micro-batches and uses of the parameter each rank's copy has, and how often."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import full_shape, listed, order, said, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.steps import last
from anyrank.explain.tensors import MOST, Array, Case, Copy, Name
from anyrank.explain.words import ranks_of

CELLS, CROSSED, USES = "cells_of_product", "crossed_product", "uses_of_weight"
MOST_FACTORS = {"bwd": 12, "fwd": 48}  # tensors that are tried as each factor
ROWS, FEW = 24, 4  # rows of the gradient by which they are found, and those that rule most of them out
MOST_READ, MOST_WORK = 1 << 24, 1 << 30  # elements of each factor's tensors; multiplications by which pairs are tried
MOST_CELLS, MOST_CROSSED = 64, 6
LOGITS, OUTPUT = "the logits' gradient", "the output's gradient"


class Use(typing.NamedTuple):
    """One use of a parameter: its gradient is left^T @ right. left: [samples, tokens, rows], or ids [samples, tokens]
    of rows; right: [samples, tokens, columns]."""

    rows: int
    gradient: str
    given: str
    left: Array
    right: Array

    @property
    def exact(self) -> Use:
        """In binary64; to find one, less is enough."""
        left = self.left if self.left.ndim == 2 else self.left.astype(np.float64)
        return self._replace(left=left, right=self.right.astype(np.float64))

    def of(self, weights: Array | None = None, rows: typing.Any = slice(None)) -> Array:
        """Rows of the gradient, of tokens that count by these weights [samples, tokens]."""
        left, right = self.left.reshape(-1, *self.left.shape[2:]), self.right.reshape(-1, self.right.shape[-1])
        if weights is not None:
            some = weights.ravel() != 0.0
            left, right = left[some], right[some] * weights.ravel()[some, None]
        if left.ndim == 2:
            result: Array = left[:, rows].T @ right
            return result
        whole = np.zeros((self.rows, right.shape[1]))
        np.add.at(whole, left, right)
        result = whole[rows]
        return result


# --- what a gradient may be made of -----------------------------------------------------------------------------------


def _near(case: Case) -> float:
    """How far a gradient that is made again is from what it was, in parts of it."""
    return 2e-3 if case.unit <= 2.0 ** -20 else 6e-2


def _by_sample(case: Case, array: Array) -> Array:
    """[samples, tokens, features]."""
    batch, seq = case.runs.batch, case.runs.seq
    lead = (batch, seq) if array.ndim == 2 and seq > 0 and len(array) == batch * seq else (len(array), -1)
    result: Array = array.astype(np.promote_types(array.dtype, np.float32), copy=False)
    return result.reshape(*lead, array.shape[-1])


def _named(case: Case, kind: str, width: int) -> list[tuple[str, Array]]:
    """Activations or gradients of the step with so many features: the module's own, then those computed just before."""
    own, at = case.name.module, order(case)
    by = str(Name(own, "fwd", case.name.step)) if kind == "fwd" else str(case.name)
    here = at.get(by, len(at))
    names = [name for name in at if (n := Name.of(name)).kind == kind and n.step == case.name.step
             and (shape := shape_of(case.runs.reference, name))[-1:] == (width,) and len(shape) > 1
             and math.prod(shape) <= MOST]
    names.sort(key=lambda name: (not Name.of(name).stem.startswith(own), at[name] > here, abs(here - at[name])))
    read = itertools.accumulate(math.prod(shape_of(case.runs.reference, name)) for name in names)
    return [(name, _by_sample(case, case.runs.reference[name]))
            for name, size in zip(names[:MOST_FACTORS[kind]], read) if size <= MOST_READ]


def _before(case: Case, stem: str) -> Array | None:
    """A parameter before the step."""
    found = case.runs.reference.get(last(Name(stem, "new", case.name.step)))
    return None if found is None else found.astype(np.float64)


def _of_logits(case: Case) -> Array | None:
    """The gradient of logits: softmax less one at the label, times each token's weight. Labels and weights are those
    that make the gradient of the head's input, which the dump has."""
    known, w = case.runs.reference, _before(case, case.name.stem)
    of_step = [name for name in known if Name.of(name).step == case.name.step]
    logits = next((name for name in reversed(of_step) if Name.of(name).kind == "fwd"
                   and shape_of(known, name)[-1:] == case.shape[:1]), "")
    back = next((name for name in of_step if Name.of(name).kind == "bwd"
                 and shape_of(known, name)[-1:] == case.shape[1:]), "")
    if w is None or w.shape != case.shape or not logits or not back:
        return None
    z, dx = (_by_sample(case, known[name]) for name in (logits, back))
    target = dx.any(-1)
    if z.shape[:2] != dx.shape[:2] or not target.any():
        return None
    p: Array = np.exp(z.astype(np.float64) - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    count = int(target.sum())
    for some in (slice(None, None, 1 + count // 16), slice(None)):  # a few rule most logits out
        d, mean = dx[target][some], p[target][some] @ w
        along = (d * mean).sum(1)[:, None] - d @ w.T  # of the softmax's mean less each label's row
        square = np.square(mean).sum(1)[:, None] - 2.0 * mean @ w.T + np.square(w).sum(1)[None]
        size = np.square(d).sum(1)[:, None]
        left = np.where(along > 0.0, square - along ** 2 / size, np.inf) / np.maximum(square, 1e-300)
        label, at = np.argmin(left, axis=1), np.arange(len(d))
        if np.sqrt(np.maximum(left[at, label], 0.0)).max() > 4.0 * _near(case):
            return None
    rows = p[target]
    rows[at, label] -= 1.0
    result: Array = np.zeros_like(p)
    result[target] = rows * (size[:, 0] / along[at, label])[:, None]
    return result


def _of_output(case: Case) -> Array | None:
    """The gradient of a linear layer's output, of that of its input and its weight: of more inputs than outputs."""
    dx = case.runs.reference.get(str(Name(case.name.module, "bwd", case.name.step)))
    w = _before(case, f"{case.name.module}.weight")
    if w is None or dx is None or w.ndim != 2 or dx.ndim < 2 or dx.shape[-1:] != w.shape[1:] or w.shape[0] > w.shape[1]:
        return None
    d = _by_sample(case, dx)
    if not (np.isfinite(d).all() and np.isfinite(w).all()):
        return None
    rows: Array = d.reshape(-1, w.shape[1]).T
    x, _, rank, _ = np.linalg.lstsq(w.T, rows, rcond=1e-4)
    right = rank == len(w) and np.linalg.norm(w.T @ x - rows) <= 64.0 * case.unit * np.linalg.norm(d)
    return x.T.reshape(*d.shape[:2], -1) if right else None


def _uses(case: Case) -> typing.Iterator[Use]:
    out, width = (*case.shape, 1)[:2]
    gradients = _named(case, "bwd", out)
    made = ((LOGITS, _of_logits(case) if len(case.shape) == 2 else None), (OUTPUT, _of_output(case)))
    gradients += [(name, array) for name, array in made if array is not None]
    if len(case.shape) == 2:
        for (a, dy), (b, x) in itertools.product(gradients, _named(case, "fwd", width)):
            if dy.shape[:2] == x.shape[:2]:
                yield Use(out, a, b, dy, x)
        for name, dy in _named(case, "bwd", width):
            for given, ids in _ids(case, out):
                if ids.shape == dy.shape[:2]:
                    yield Use(out, name, given, ids, dy)
        return
    own, gain = str(Name(case.name.module, "fwd", case.name.step)), _before(case, case.name.stem)
    output = case.runs.reference.get(own)
    shift = _before(case, f"{case.name.module}.bias")
    for name, dy in gradients:
        ones = np.ones((*dy.shape[:2], 1))
        yield Use(out, name, "ones", dy, ones)
        if gain is not None and gain.all() and output is not None and output.shape[-1:] == gain.shape:
            normed = (_by_sample(case, output) - (0.0 if shift is None else shift)) / gain
            if normed.shape == dy.shape:
                yield Use(out, name, f"{own} without its gain", dy * normed, ones)


def _ids(case: Case, rows: int) -> typing.Iterator[tuple[str, Array]]:
    """Integer inputs of the step that may be rows' numbers; those of the table's rows that its module gave."""
    known, w = case.runs.reference, _before(case, case.name.stem)
    for name in known:
        own = Name.of(name)
        if own.stem.partition(".")[0] == "input" and own.step == case.name.step and len(shape_of(known, name)) == 2:
            array = known[name]
            if array.size and (array == np.rint(array)).all() and 0 <= array.min() and array.max() < rows:
                yield name, array.astype(np.int64)
    output = str(Name(case.name.module, "fwd", case.name.step))
    if w is not None and output in known and shape_of(known, output)[-1:] == w.shape[1:]:
        numbers = {row.tobytes(): i for i, row in enumerate(w)}
        given: Array = _by_sample(case, known[output]).astype(np.float64)
        found = [numbers.get(row.tobytes(), -1) for row in given.reshape(-1, w.shape[1])]
        if min(found) >= 0:
            yield output, np.array(found).reshape(given.shape[:2])


# --- which of it is there ---------------------------------------------------------------------------------------------


def _rows(gap: Array) -> Array:
    """Rows that tell: some that differ most, then some at equal distances."""
    most, some = np.argsort(-np.abs(gap).max(1))[:ROWS // 2], np.linspace(0, len(gap) - 1, min(ROWS, len(gap)))
    result: Array = np.array(list(dict.fromkeys([*most.tolist(), *some.astype(int).tolist()])))
    return result


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "grad" or len(case.shape) not in (1, 2) or case.shape != full_shape(case) or not (
            case.ref.any() and case.seen.any()) or not (np.isfinite(case.val).all() and np.isfinite(case.ref).all()):
        return
    ref, val = (x.reshape(case.shape[0], -1) for x in (case.ref, case.val))
    rows = _rows(val - ref) if len(case.shape) == 2 else np.arange(len(ref))
    work, found, others = 0, None, []
    for use in _uses(case):
        work += use.right.size * FEW
        if work > MOST_WORK:
            break
        for some in (rows[:FEW], rows) if len(case.shape) == 2 else (rows,):
            own = use.of(None, some)
            is_it = own.any() and np.linalg.norm(own - ref[some]) <= _near(case) * np.linalg.norm(ref[some])
            times = None if is_it or len(case.shape) == 1 else _times(case, own, ref[some], val[some])
            if not (is_it or times):
                break
        else:
            found = found or (use.exact if is_it else None)
            others += [(use.exact, times)] if times else []
    if found is not None and case.ref.size * found.right.size <= MOST_WORK * case.shape[-1]:
        yield from _cells(case, found)
        if len(case.shape) == 2 and found.left.ndim == 3:
            yield from _crossed(case, found, rows)
            yield from _other_input(case, found)
    for use, (own_times, rest_times) in others[:2]:
        is_input = found is not None and use.gradient == found.gradient and (own_times, rest_times) == (1.0, 0.0)
        if found is None or is_input or use.left.ndim == 2:
            text = f"{said(own_times)} times what these make" + (
                f" and {said(rest_times)} times the reference" if rest_times else "")
            yield Pattern(USES, own_times * use.of() + rest_times * case.ref, {
                "gradient": use.gradient, "given": use.given, "what": text, "is_input": is_input},
                sum(not (16.0 * x).is_integer() for x in (own_times, rest_times)))


def _times(case: Case, own: Array, ref: Array, val: Array) -> tuple[float, float] | None:
    """How often one use, and how often the reference, is in the other run's rows; None: they are no such sum."""
    table = np.stack([own.ravel(), ref.ravel()], 1)
    x, _, rank, _ = np.linalg.lstsq(table, val.ravel(), rcond=1e-6)
    left = np.linalg.norm(table @ x - val.ravel())
    if rank < 2 or left > _near(case) * np.linalg.norm(val - ref):
        return None
    a, b = (0.0 if abs(n) < _near(case) else snapped(float(n), _near(case)) for n in x)
    return (a, b) if a else None


def _grids(case: Case, use: Use) -> typing.Iterator[tuple[Array, int]]:
    """A number of each token's cell, and cells of each sample: samples, parts of the sequence, micro-batches."""
    samples, tokens = use.right.shape[:2]
    sizes, micro = case.runs.group_sizes, case.runs.micro_batches
    for chunks in (1, *(n for n in sizes if tokens % n == 0)):
        yield np.arange(samples)[:, None] * chunks + np.arange(tokens) // (tokens // chunks), chunks
    for n in (1, *sizes) if micro > 1 else ():
        if samples % (n * micro) == 0:
            at = np.arange(samples) // (samples // (n * micro)) % micro
            yield np.broadcast_to(at[:, None], (samples, tokens)), 0


def _cells(case: Case, use: Use) -> typing.Iterator[Pattern]:
    """By how much each rank's copy has each cell's part of the gradient."""
    whole = Copy(None, (tuple(slice(0, n) for n in case.shape),), (case.val,))
    copies = case.copies if all(len(copy.boxes) == 1 for copy in case.copies) else (whole,)
    for cells, chunks in _grids(case, use):
        if cells.max() < MOST_CELLS:
            found = [_weights(case, use, cells, copy) for copy in copies]
            some = [w for w in found if w is not None]
            if len(some) == len(found):
                if any((w != 1.0).any() for w in some):
                    yield _cells_pattern(case, use, cells, chunks, some)
                return


def _weights(case: Case, use: Use, cells: Array, copy: Copy) -> Array | None:
    """Of each cell the number by which it is in a copy's values; None: they are no such sum."""
    box, count = copy.boxes[0], int(cells.max()) + 1
    columns = box[1] if len(box) > 1 else slice(None)
    values: Array = copy.values[0].astype(np.float64).reshape(box[0].stop - box[0].start, -1)
    ref: Array = case.ref[box].reshape(values.shape)
    rows = _rows(values - ref) if len(case.shape) == 2 else np.arange(len(ref))
    parts = np.stack([use.of((cells == k).astype(float), rows + box[0].start)[:, columns].ravel()
                      for k in range(count)], 1)
    live = np.abs(parts).max(0) > 0.0
    target, near = values[rows].ravel(), 0.5 * _near(case)
    if target.size < count + 2 or live.sum() < 2 or (2 * count > target.size and not case.runs.micro_batches == count):
        return None
    x, _, rank, singular = np.linalg.lstsq(parts[:, live], target, rcond=None)
    left = np.linalg.norm(parts[:, live] @ x - target)
    if rank < live.sum() or singular[-1] < 1e-3 * singular[0] or left > 0.05 * np.linalg.norm(
            target - ref[rows].ravel()) + 0.1 * near * np.linalg.norm(target):
        return None
    result: Array = np.ones(count)
    result[live] = [snapped(n, near) if abs(n) > near else 0.0 for n in x.tolist()]
    return result if result[live].any() else None


def _cells_pattern(case: Case, use: Use, cells: Array, chunks: int, found: list[Array]) -> Pattern:
    gaps = [use.of((w - 1.0)[cells]).reshape(case.shape) if (w != 1.0).any() else np.zeros(case.shape) for w in found]
    parts: typing.Any = case.ref + gaps[0] if len(found) < len(case.copies) else [
        [case.ref[box] + gap[box] for box in copy.boxes] for gap, copy in zip(gaps, case.copies)]
    wrong = [i for i, w in enumerate(found) if (w != 1.0).any()]
    w = found[wrong[0]]
    kept = w != 0.0
    alike = len(wrong) == len(found) and all(np.array_equal(w, other) for other in found)
    factors = {float(x) for i in wrong for x in found[i][found[i] != 0.0]}
    by_sample = w[cells[:, 0]] if chunks < 2 else None
    weights = by_sample if alike or len(wrong) == 1 else None
    numbers = {
        "gradient": use.gradient, "given": use.given, "kept": int(kept.sum()), "all": kept.size,
        "what": {0: "micro-batches", 1: "samples"}.get(chunks, f"parts of samples ({chunks} of each sequence)"),
        "values": listed(w.tolist(), 16), "weights": weights, "micro": _micro(case, weights),
        "ranks": ranks_of(case.copies[i].rank or 0 for i in wrong), "near": 0.5 * _near(case),
        "unreduced": _unreduced(case, found) if chunks == 1 else "",
        "is_sum": factors == {1.0}, "is_mean": factors == {kept.size / max(1, int(kept.sum()))},
        "of_ranks": chunks > 0 and not alike and all(_group_part(case, found[i].reshape(-1, chunks)) for i in wrong)}
    fitted = 0 if numbers["of_ranks"] else sum(not (16.0 * x).is_integer() for x in {*w.tolist()})
    # A sum or mean of the copies says it more simply, but not of which micro-batches.
    return Pattern(CELLS, parts, numbers, fitted, 0 if numbers["unreduced"] else 2)


def _unreduced(case: Case, found: list[Array]) -> str:
    """Micro-batches of which each copy has some samples alone, where all have all of the others', in words."""
    table = np.stack(found)
    common, most = (table == 1.0).all(axis=0), float(table.max())
    lone = ((table == 0.0) | (table == most)).all(axis=0) & (np.ptp(table, axis=0) > 0.0)
    micro = _micro(case, common.astype(float))
    own = [str(i + 1) for i, w in enumerate(micro) if w == 0.0] if micro is not None and (common | lone).all() else []
    return f"{', '.join(own)} of {len(micro)}" if 0 < len(own) < len(micro) else ""


def _group_part(case: Case, w: Array) -> bool:
    """Whether these are the samples, or the tokens, of one rank of a group."""
    kept = w != 0.0
    for axis in range(2):
        flat: Array = np.asarray(kept.any(axis=1 - axis))
        at = np.flatnonzero(flat)
        if (kept == (flat[:, None] if axis == 0 else flat)).all() and at[-1] - at[0] + 1 == len(at) and (
                at[0] % len(at) == 0 and flat.size / len(at) in case.runs.group_sizes):
            return True
    return False


def _crossed(case: Case, use: Use, rows: Array) -> typing.Iterator[Pattern]:
    """Each part's gradient multiplied by another part's input: parts in another order, or an input written over."""
    values = case.val[rows].ravel()
    for n in (n for n in range(2, MOST_CROSSED + 1) if len(use.right) % n == 0 and 2 * n * n <= values.size):
        a = use.left[..., rows].reshape(n, -1, len(rows))
        b = use.right.reshape(n, -1, use.right.shape[-1])
        table = np.einsum("ptr,qti->riqp", a, b).reshape(values.size, -1)
        x, _, rank, _ = np.linalg.lstsq(table, values, rcond=1e-6)
        taken = x.reshape(n, n)  # [input, gradient]
        source = taken.argmax(axis=0)
        if rank == n * n and (source != np.arange(n)).any() and np.abs(
                taken - (np.arange(n)[:, None] == source)).max() <= 1e-3:
            crossed = use._replace(right=b[source].reshape(use.right.shape))
            yield Pattern(CROSSED, crossed.of(), {
                "gradient": use.gradient, "given": use.given, "parts": n,
                "order": ", ".join(f"{i} that of {j}" for i, j in enumerate(source) if i != j)}, trials=4)
            return


def _other_input(case: Case, use: Use) -> typing.Iterator[Pattern]:
    """The product of the right gradient with any other input: of fewer tokens than rows, that leaves most out; and no
    product of another gradient with the right input."""
    left = {}
    for key, of, values in (("input", use.left, case.val), ("gradient", use.right, case.val.T)):
        factor = of.reshape(-1, of.shape[-1])
        if 2 * len(factor) > factor.shape[1]:
            return
        _, sizes, rows = np.linalg.svd(factor, full_matrices=False)
        rows = rows[sizes > 1e-6 * sizes[0]]
        left[key] = rows.T @ (rows @ values)
    if np.linalg.norm(left["gradient"].T - case.val) > 1e-2 * np.linalg.norm(case.val - case.ref):
        yield Pattern(USES, left["input"], {"gradient": use.gradient, "given": "another input", "is_input": True},
                      fitted=8)


# --- causes -----------------------------------------------------------------------------------------------------------


def _micro(case: Case, w: Array | None) -> typing.Any:
    """The weight of each micro-batch, if all of its samples have it, on all ranks."""
    m = case.runs.micro_batches
    for n in (1, *case.runs.group_sizes) if w is not None and m > 1 else ():
        if w is not None and w.size % (n * m) == 0:
            each: Array = w.reshape(n, m, -1).transpose(1, 0, 2).reshape(m, -1)
            if np.ptp(each, axis=1).max() <= _near(case) * max(abs(w).max(), 1.0):
                return each.mean(1)
    return None


def _alone(of_all: bool) -> typing.Callable[[typing.Any], bool]:
    """Whether one micro-batch alone is there, as often as there are micro-batches, or once."""
    return lambda w: w is not None and np.count_nonzero(w) == 1 and (
        abs(w.max() / w.size - 1.0) <= 0.03 if of_all else w.max() <= 1.03)


def _one_sample(case: Case, pattern: Pattern) -> bool:
    """Whether of all samples, or of each equal part of them, the first or only one is there."""
    w = pattern.numbers["weights"]
    if w is None or {*w.tolist()} != {0.0, 1.0}:
        return False
    parts = (n * m for n in (1, *case.runs.group_sizes) for m in {1, case.runs.micro_batches})
    return np.count_nonzero(w) == 1 < w.size - 1 or any(
        w.size % n == 0 and w.size > n and np.array_equal(np.flatnonzero(w), np.arange(0, w.size, w.size // n))
        for n in parts)


def _means(case: Case, pattern: Pattern) -> bool:
    """Whether weights are those of means over parts of several sizes, or their sum."""
    w = pattern.numbers["weights"]
    sizes = {1, *case.runs.group_sizes, case.runs.micro_batches}
    return w is not None and (w > 0.0).all() and np.ptp(w) > 1e-3 and any(
        abs(float(np.mean(1.0 / w)) * n - 1.0) <= 4.0 * pattern.numbers["near"] for n in sizes)


def _is(*values: float) -> typing.Callable[[typing.Any], bool]:
    return lambda w: w is not None and {*w.tolist()} == {*values}


_MADE = "made again of {gradient} and {given}"
_HAS = _MADE + ", this gradient has {values} times each of {all} {what}: "
CAUSES = (
    Cause("other_saved_input", (USES,), _MADE + " the other run's gradient comes out, of another input than the "
          "reference's", "what is saved for the backward pass: written over in place, one buffer for several, a "
          "recomputation that reads or draws something else", has(is_input=True)),
    Cause("tied_weight", (USES,), "a weight that is used twice: the gradient is {what} (of {gradient} and {given}), so "
          "one use is lost or counts again", "the sum of both uses' gradients: `tie_weights()` after wrapping, the "
          "all-reduce over the stages or ranks that share the weight"),
    Cause("missing_average", (CELLS,), _MADE + ", of micro-batches {unreduced} each rank has its own samples alone, "
          "and of the others those of all ranks: gradients are reduced before all are there", "`no_sync`: around all "
          "micro-batches but the last; a reduction that each backward pass starts", has(unreduced=bool)),
    Cause("missing_all_reduce", (CELLS,), _MADE + ", the gradient on {ranks} is what the samples or tokens of one rank "
          "give alone ({kept} of {all} {what}), not the sum over all",
          "the all-reduce of gradients: hooks of DDP, `no_sync`, a reduction into another buffer",
          has(of_ranks=True, is_sum=True)),
    Cause("missing_average", (CELLS,), _MADE + ", the gradient on {ranks} is the mean over one rank's own samples "
          "or tokens ({kept} of {all} {what}), not that over all",
          "the average did not run: `no_sync`, the module inside called, a parameter that DDP does not know",
          has(of_ranks=True, is_mean=True)),
    Cause("input_of_other_micro_batch", (CELLS,), _HAS + "all micro-batches have that of one of them",
          "buffers between stages and micro-batches that are not filled again", has(micro=_alone(True))),
    Cause("one_micro_batch", (CELLS,), _HAS + "one micro-batch alone is in it", "`=` where `+=` belongs; `zero_grad` "
          "inside the loop; a reduction that writes over the sum", has(micro=_alone(False))),
    Cause("part_of_tokens", (CELLS,), _HAS + "of each rank's samples one alone is in it", "leading dimensions that are "
          "not flattened, `x[0]`, `squeeze`; a loop that ends early", _one_sample),
    Cause("counted_twice", (CELLS,), _HAS + "some count twice", "a second backward pass, a reduction after each "
          "micro-batch", has(weights=_is(1.0, 2.0))),
    Cause("mean_of_means", (CELLS,), _HAS + "each rank or micro-batch divided by its own count",
          "divide by the global number of targets", _means),
    Cause("micro_batches_weighted", (CELLS,), _HAS + "micro-batches count differently", "the divisor by the number of "
          "micro-batches, inside of the loop or after it; clipping between micro-batches",
          has(micro=lambda w: w is not None)),
    Cause("part_of_tokens", (CELLS,), _HAS + "some are in it, and the others are not",
          "which samples or tokens go backward through this module", has(is_sum=True)),
    Cause("samples_weighted", (CELLS,), _HAS + "samples count differently", "weights of samples, and what they are "
          "normalised by", has(weights=lambda w: w is not None)),
    Cause("input_of_other_micro_batch", (CROSSED,), _MADE + ": of {parts} parts of the batch some have the input of "
          "another: {order}", "the order of micro-batches' inputs and of their gradients; one buffer for several"),
)
