# SPDX-License-Identifier: Apache-2.0
"""The reference plus a constant, a vector or another tensor of the dumps; another tensor in its place; other sums."""

from __future__ import annotations

import itertools
import math
import re
import typing

import numpy as np

from anyrank.explain.causes import Cause, every as all_of, has, kinds
from anyrank.explain.known import at_elements, earlier, full_shape, order, said, sample_of, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import ACTIVATIONS, Array, Case, Name, every

CONSTANT, VECTOR = "constant", "vector"
VALUE, ADDED, BY_ROW, SUM = "value_of_other", "tensor_added", "tensor_added_by_row", "other_sum"
FEW = 4             # values or rows, of which nothing can be said
CANDIDATES = 64     # tensors that are tried as addends or in place of another
TERMS, NEAREST = 3, 10  # terms of a sum, and tensors among which they are looked for
ALONG = 0.999       # cosine of the difference with a tensor of which it may be a multiple
PARAMETERS = ("init", "new", "weight")
_NUMBER = re.compile(r"\d+")


# --- a constant or a vector -------------------------------------------------------------------------------------------


def _is_flat(values: Array, mean: Array, case: Case) -> bool:
    """Whether differences are their mean but for rounding."""
    allowed = case.unit * (8.0 * np.abs(mean) + 64.0 * case.scale)
    share = np.abs(values - mean) <= np.maximum(allowed, 1e-4 * np.abs(mean).max())
    return bool(share.mean() > 0.99)


def _constants(case: Case, gap: Array) -> typing.Iterator[Pattern]:
    """One number, or one vector along a dimension."""
    if gap.size < FEW or case.reference.dtype.kind != "f":
        return
    mean = gap.mean()
    if mean != 0.0 and _is_flat(gap, mean, case):
        added = snapped(float(mean))
        yield Pattern(CONSTANT, case.ref + added, {"text": f"the difference is {added:.4g} in each of {gap.size} "
                                                   "elements", "rows": gap.size}, fitted=1)
        return
    for axis, extent in enumerate(gap.shape if gap.ndim > 1 else ()):
        vector = gap.mean(tuple(i for i in range(gap.ndim) if i != axis), keepdims=True)
        if extent < 2 or gap.size // extent < FEW or not _is_flat(gap, vector, case):
            continue
        yield Pattern(VECTOR, case.ref + vector, {"rows": gap.size // extent, "last": axis == gap.ndim - 1}, extent)


# --- other tensors ----------------------------------------------------------------------------------------------------


class Candidate(typing.NamedTuple):
    name: str
    here: bool  # the other run's, which the reference does not have
    later: bool  # an activation or gradient of the same step that is computed after it
    values: Array  # of the sample

    @property
    def label(self) -> str:
        return f"{self.name} of this run" if self.here else self.name

    def all(self, case: Case) -> Array:
        source = case.runs.other if self.here else case.runs.reference
        found = at_elements(case, source[self.name])
        assert found is not None  # the sample is of it
        return found


def _candidates(case: Case, index: Array) -> typing.Iterator[Candidate]:
    """Tensors with as many elements: the same one of other steps, its like in other layers, then the nearest."""
    runs, own, at = case.runs, case.name, order(case)
    here, count, like = at.get(str(own), len(at)), math.prod(full_shape(case)), _NUMBER.sub("*", own.stem)

    def place(name: str) -> tuple[int, bool, int]:
        n = Name.of(name)
        alike = n.kind == own.kind and _NUMBER.sub("*", n.stem) == like
        return 2 - alike - (alike and n.stem == own.stem), at[name] > here, abs(here - at[name])

    def may_enter(name: str, tensors: typing.Mapping[str, Array]) -> bool:
        n = Name.of(name)
        return (n.kind == own.kind or (own.kind == "fwd" and n.kind in PARAMETERS)) and name != str(own) and (
            n.step <= own.step) and math.prod(shape_of(tensors, name)) == count

    known = sorted((name for name in at if may_enter(name, runs.reference)), key=place)
    more = [name for name in runs.other if name not in at and may_enter(name, runs.other)]
    for name, tensors in (*((name, runs.reference) for name in known[:CANDIDATES]),
                          *((name, runs.other) for name in more[:CANDIDATES])):
        values = at_elements(case, tensors[name], index)
        if values is not None and np.isfinite(values).all():
            yield Candidate(name, tensors is runs.other, own.kind in ACTIVATIONS and at.get(name, 0) > here
                            and Name.of(name).kind == own.kind, values)


def relation(case: Case, name: str) -> str:
    """How another tensor is related to the one that differs."""
    own = Name.of(name)
    if (own.stem, own.kind) == (case.name.stem, case.name.kind):
        return "step"
    if own.kind == case.name.kind and own.step == case.name.step and _NUMBER.sub("*", own.stem) == _NUMBER.sub(
            "*", case.name.stem):
        parts = zip(("", *own.stem.split(".")), own.stem.split("."), case.name.stem.split("."))
        return "expert" if any("expert" in before and x != y for before, x, y in parts) else "layer"
    if own.stem.startswith(case.name.stem + "."):
        return "inner"
    return "other"


def _others(case: Case, gap: Array) -> typing.Iterator[Pattern]:
    index = sample_of(case.ref.size)
    ref, val, apart = (x.reshape(-1)[index] for x in (case.ref, case.val, gap))
    if not np.isfinite(val).all() or case.ref.size < 2 * FEW or not apart.any():
        return
    found = [c for c in _candidates(case, index) if not np.array_equal(c.values, ref)]
    near = max(1e-6, 4.0 * case.unit) * max(float(np.abs(val).max()), 1e-300)
    for i, other in enumerate(found):
        numbers = {"tensor": other.label, "name": other.name, "here": other.here, "later": other.later,
                   "relation": relation(case, other.name)}
        if not other.here and np.abs(other.values - val).max() <= near and np.ptp(val) > 0.0:
            whole = other.all(case)
            numbers["positions"] = _is_by_position(case, case.ref - whole)
            yield Pattern(VALUE, whole, numbers, 0, 1 + i)
        norm = float(np.linalg.norm(other.values) * np.linalg.norm(apart))
        if not other.later and norm > 0.0 and ref.any() and abs(float(other.values @ apart)) > ALONG * norm:
            whole = other.all(case)
            times = float((whole * gap).sum() / (whole * whole).sum())
            ratio = snapped(times, 1e-3 if case.unit > 1e-5 else 1e-5)
            numbers |= {"c": ratio, "times": said(ratio)}
            yield Pattern(ADDED, case.ref + ratio * whole, numbers, 0 if ratio != times else 1, 1 + i)
        elif not other.later and norm > 0.0 and case.name.kind == "fwd" and len(case.shape) > 1:
            yield from _by_row(case, gap, other, numbers)
    if case.name.kind in ("fwd", "bwd"):
        terms = [c for c in found if not (c.here or c.later)
                 and (Name.of(c.name).kind, Name.of(c.name).step) == (case.name.kind, case.name.step)]
        yield from _sums(case, ref, val, terms[:NEAREST])


def _by_row(case: Case, gap: Array, other: Candidate, numbers: dict[str, typing.Any]) -> typing.Iterator[Pattern]:
    """A number of each row's own times another tensor: a multiple of what a tensor of one number for each row gives."""
    width, whole = case.shape[-1], other.all(case)
    if width < 2 * FEW or math.prod(case.shape[:-1]) < FEW or not _rows_along(gap, whole):
        return
    square = (whole * whole).sum(-1)
    times: Array = ((whole * gap).sum(-1) / np.where(square > 0.0, square, 1.0)).ravel()
    for name in earlier(case):
        shape = shape_of(case.runs.reference, name)
        gate: Array = case.runs.reference[name].reshape(-1).astype(np.float64) if shape[-1:] == (1,) else np.zeros(1)
        ways = (("", gate), ("the sigmoid of ", 1.0 / (1.0 + np.exp(-gate))), ("1 less the sigmoid of ", 1.0 / (
            1.0 + np.exp(gate)))) if gate.size == times.size else ()
        for how, x in ways:
            if abs(float(x @ times)) > (1.0 - 1e-8) * float(np.linalg.norm(x) * np.linalg.norm(times)):
                yield Pattern(BY_ROW, case.ref + times.reshape(*case.shape[:-1], 1) * whole, {
                    **numbers, "gate": f"{said(snapped(float(x @ times) / float(x @ x)))} times {how}what {name} "
                    "gives"})
                return


def _rows_along(gap: Array, whole: Array) -> bool:
    a, b = (x.reshape(-1, x.shape[-1])[:16] for x in (gap, whole))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    off = norms > 0.0
    return bool(off.sum() >= FEW and (np.abs((a * b).sum(1)[off]) > ALONG * norms[off]).all())


def _is_by_position(case: Case, added: Array) -> bool:
    """Whether what the reference adds is the same for all samples, and another for each token."""
    return case.axes[:2] == ("batch", "token") and case.shape[0] > 1 and bool(
        np.abs(added - added[:1]).max() <= 64.0 * case.unit * case.scale < np.abs(added - added[:, :1]).max())


def coefficients(gram: Array, right: Array, square: float, near: float) -> tuple[tuple[int, ...], Array] | None:
    """The fewest terms of which a tensor is a sum, and their coefficients, by their products."""
    for size in range(1, TERMS + 1):
        for terms in itertools.combinations(range(len(right)), size):
            at = np.array(terms)
            part = gram[np.ix_(at, at)]
            if np.linalg.cond(part) > 1e10:
                continue
            c = np.linalg.solve(part, right[at])
            if square - float(c @ right[at]) <= near * square and np.abs(c).min() > 1e-3:
                return terms, c
    return None


def _sums(case: Case, ref: Array, val: Array, terms: list[Candidate]) -> typing.Iterator[Pattern]:
    """Two sums of the same run's tensors, which differ in terms or coefficients."""
    if len(terms) < 2:
        return
    table = np.stack([c.values for c in terms])
    near = max(1e-11, (8.0 * case.unit) ** 2)
    gram = table @ table.T
    wanted, found = (coefficients(gram, table @ x, float(x @ x), near) for x in (ref, val))
    if wanted is None or found is None or len(wanted[0]) == len(found[0]) == 1:
        return
    has = [dict(zip(at, (snapped(float(x), 1e-4) for x in c))) for at, c in (wanted, found)]
    changed = [i for i in {*has[0], *has[1]} if has[0].get(i) != has[1].get(i)]
    expected = sum((x * terms[i].all(case) for i, x in has[1].items()), np.zeros(case.shape))
    fitted = sum(said(x) == f"{x:.6g}" and not float(x).is_integer() for x in has[1].values())
    yield Pattern(SUM, expected, {
        "reference": sum_text(has[0], [c.label for c in terms]), "other": sum_text(has[1], [c.label for c in terms]),
        "changed": [terms[i].name for i in changed], "kept": is_scaled(*has)}, fitted, 0)


def is_scaled(wanted: typing.Mapping[int, float], found: typing.Mapping[int, float]) -> bool:
    """Whether the same terms have other coefficients, and none counts twice."""
    return {*wanted} == {*found} and all(
        abs(x) != 1.0 or abs(found[i] - 2.0 * x) > 1e-3 for i, x in wanted.items())


def sum_text(has: typing.Mapping[int, float], names: typing.Sequence[str]) -> str:
    return " + ".join(f"{'' if x == 1.0 else said(x) + ' '}{names[i]}" for i, x in sorted(has.items()))


def patterns(case: Case) -> typing.Iterator[Pattern]:
    with np.errstate(invalid="ignore"):
        gap: Array = case.val - case.ref
    gap = np.where(np.isfinite(gap), gap, 0.0)
    yield from _constants(case, gap)
    yield from _others(case, gap)


# --- causes -----------------------------------------------------------------------------------------------------------


def _scaled(case: Case, pattern: Pattern) -> bool:
    """Whether a term has another coefficient, neither left out nor counted again as a whole."""
    if pattern.kind == ADDED:
        return pattern.numbers["c"] not in (1.0, -1.0) or pattern.numbers["relation"] == "inner"
    return bool(pattern.numbers["kept"])


def _may_stand_in(case: Case, pattern: Pattern) -> bool:
    """Whether another tensor in place of this one is a mistake: of experts, which may be alike, it is not."""
    return case.name.kind in ("fwd", "bwd", "grad", *PARAMETERS) and case.name.stem.partition(".")[0] != "input" and (
        pattern.numbers["relation"] != "expert")


_STALE = ("new", "m", "v", "state", "count")  # whose values follow from each other
_IS = "these are the values of {tensor}"
_PLUS = "the difference is {times} times {tensor}"
_SUM = "{other}, where the reference is {reference}"
_SCALE = "the multiplier of the embedding, the scale of the branch, an adapter's alpha over its rank"
CAUSES = (
    Cause("bias_counted_again", (VECTOR,), "the same vector is added to each of {rows} rows: a bias counts again, or "
          "is left out", "a bias that each rank adds before the sum, or that none adds",
          all_of(kinds("fwd"), has(last=True))),
    Cause("constant_added", (CONSTANT,), "a constant was added: {text}", "an offset, an epsilon, a fill value",
          kinds("fwd", "bwd", "grad", "init", "weight", "buffer")),
    Cause("constant_added", (VECTOR,), "the same vector is added to each of {rows} rows", "a mean that is not "
          "subtracted, a gradient of a bias", all_of(kinds("fwd", "bwd"), has(rows=lambda n: n >= 8))),
    Cause("batch_of_other_step", (VALUE,), _IS + ": an earlier step's batch again",
          "the state of the data loader and its iterator; `set_epoch`", lambda case, pattern: (
              case.name.stem.partition(".")[0] == "input" and pattern.numbers["relation"] == "step")),
    Cause("stale_value", (VALUE,), _IS + ": an earlier step's value, not written again or read too early",
          "buffers that outlive a step, buckets that are not filled again or copied back before their reduction ends",
          lambda case, pattern: pattern.numbers["relation"] == "step" and case.name.kind not in _STALE),
    Cause("shards_misplaced", (VALUE,), _IS + ": another expert's, which is at another place too",
          "which experts each rank has", all_of(kinds("init"), has(relation="expert"), lambda case, pattern: (
              pattern.numbers["name"] in case.runs.other and pattern.numbers["name"] not in case.runs.same))),
    Cause("shards_seeded_alike", (VALUE,), _IS + ": another expert's, which has them too", "the seed by which each "
          "rank draws its experts, and the number from which it counts them",
          all_of(kinds("init"), has(relation="expert"))),
    Cause("positions", (VALUE,), _IS + " alone: what the reference adds is the same for each sample, and another for "
          "each token", "the position embedding", has(positions=True)),
    Cause("other_tensor", (VALUE,), _IS + ", which is computed later: it was written over, one buffer for both",
          "saved views of one buffer; `clone` before saving", has(later=True)),
    Cause("other_tensor", (VALUE,), _IS + ": one tensor in place of another, or what lies between is left out",
          "names in a mapping, offsets of layers, the order of packed weights; what is passed on here; `detach`",
          _may_stand_in),
    Cause("gradient_not_zeroed", (ADDED,), _PLUS + ": an earlier step's gradient is still in it",
          "`optimizer.zero_grad()`, and whether it reaches this parameter",
          all_of(kinds("grad"), has(relation="step"))),
    Cause("wrong_group", (ADDED,), _PLUS + ", another expert's: gradients of different experts are added up",
          "the group over which experts' gradients are reduced", all_of(kinds("grad"), has(relation="expert"))),
    Cause("residual_scale", (ADDED,), _PLUS + ": this term has another factor", _SCALE, all_of(kinds("fwd"), _scaled)),
    Cause("residual_scale", (SUM,), _SUM + ": a term has another factor", _SCALE, _scaled),
    Cause("residual", (ADDED,), _PLUS + ": a residual or a branch counts twice, or is left out",
          "residual additions and hooks", kinds("fwd")),
    Cause("residual", (SUM,), _SUM + ": other terms are added", "residual additions and hooks"),
    Cause("tensor_added", (BY_ROW,), "the difference is {tensor} times a number of each row's own, {gate}: this term "
          "counts again, or less", "the gate of a shared expert, left out or on one side alone; a term that each rank "
          "adds before the sum over them"),
    Cause("tensor_added", (ADDED,), _PLUS, "additions and hooks between these", kinds("bwd", "grad")),
)
