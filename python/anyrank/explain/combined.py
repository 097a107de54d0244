# SPDX-License-Identifier: Apache-2.0
"""The reference plus a constant, a vector or another tensor of the dumps; another tensor in its place; other sums."""

from __future__ import annotations

import itertools
import math
import re
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.known import at_elements, earlier, full_shape, is_norm, said, sample_of, sampled, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import ACTIVATIONS, Array, Case, Name, every

CONSTANT, VECTOR, ROW_NUMBERS = "constant", "vector", "row_numbers"
VALUE, ADDED, BY_ROW, SUM = "value_of_other", "tensor_added", "tensor_added_by_row", "other_sum"
FEW = 4             # values or rows, of which nothing can be said
CANDIDATES = 64     # tensors that are tried as addends or in place of another
TERMS, NEAREST = 3, 10  # terms of a sum, and tensors among which they are looked for
ALONG = 0.999       # cosine of the difference with a tensor of which it may be a multiple
PARAMETERS = ("init", "new", "weight")
WEIGHTS = ("init", "weight", "new")
_NUMBER = re.compile(r"\d+")


def _gap(case: Case) -> Array:
    """The difference, zero where a value is not finite."""
    with np.errstate(invalid="ignore"):
        gap: Array = case.val - case.ref
    gap = np.where(np.isfinite(gap), gap, 0.0)
    return gap


# --- a constant or a vector -------------------------------------------------------------------------------------------


def _is_flat(values: Array, mean: Array, case: Case) -> bool:
    """Whether differences are their mean but for rounding."""
    allowed = case.unit * (8.0 * np.abs(mean) + 64.0 * case.scale)
    share = np.abs(values - mean) <= np.maximum(allowed, 1e-4 * np.abs(mean).max())
    return bool(share.mean() > 0.99)


def _constants(case: Case, gap: Array) -> typing.Iterator[Pattern]:
    if gap.size < FEW or case.reference.dtype.kind != "f":
        return
    mean = gap.mean()
    if mean != 0.0 and _is_flat(gap, mean, case):
        added = snapped(float(mean))
        yield Pattern(CONSTANT, case.ref + added, {"added": added, "count": gap.size}, fitted=1)
        return
    for axis in range(gap.ndim):
        rest = tuple(i for i in range(gap.ndim) if i != axis)
        if gap.ndim < 2 or math.prod(gap.shape[i] for i in rest) < FEW or gap.shape[axis] < 2:
            continue
        vector = gap.mean(rest, keepdims=True)
        if _is_flat(gap, vector, case):
            yield _vector(case, vector, axis)
    rows = gap.mean(-1, keepdims=True)
    if gap.ndim > 1 and gap.shape[-1] >= FEW and _is_flat(gap, rows, case):
        yield Pattern(ROW_NUMBERS, case.ref + rows, {"rows": rows.size}, fitted=rows.size)


def _vector(case: Case, vector: Array, axis: int) -> Pattern:
    """One vector along a dimension, and the tensor of the dumps that it is a multiple of."""
    numbers: dict[str, typing.Any] = {"axis": axis, "rows": case.ref.size // vector.size, "tensor": "", "source": ""}
    full, flat = full_shape(case), vector.reshape(-1)
    best: tuple[float, str, float, Array] | None = None
    for name in itertools.islice(_vectors(case, full[axis]), 256):
        own: Array = case.runs.reference[name].reshape(-1).astype(np.float64)[every(full)[axis]]
        norm = float(np.linalg.norm(own) * np.linalg.norm(flat))
        cosine = abs(float(own @ flat)) / norm if own.shape == flat.shape and norm > 0.0 else 0.0
        if cosine > 0.9999 and (best is None or cosine > best[0] + 1e-7):
            best = cosine, name, float(own @ flat) / float(own @ own), own.reshape(vector.shape)
    if best is None:
        return Pattern(VECTOR, case.ref + vector, numbers, fitted=flat.size)
    _, name, times, own = best
    times = snapped(times, 1e-3)
    numbers |= {"tensor": name, "source": f", {said(times)} times {name}", "c": times}
    return Pattern(VECTOR, case.ref + times * own, numbers, fitted=0 if (48.0 * times).is_integer() else 1)


def _vectors(case: Case, extent: int) -> typing.Iterator[str]:
    """Names of vectors as long as a dimension, those of the same module first."""
    names = [name for name in case.runs.reference if math.prod(shape_of(case.runs.reference, name)) == extent
             and Name.of(name).step <= case.name.step]
    yield from sorted(names, key=lambda name: (Name.of(name).stem.rpartition(".")[0] != case.name.stem,
                                               Name.of(name).kind not in PARAMETERS))


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


def _may_enter(case: Case, name: str, before: set[str]) -> bool:
    """Whether a tensor may be a term of the one that differs, or stand in its place."""
    own = Name.of(name)
    if own.kind != case.name.kind and not (case.name.kind == "fwd" and own.kind in PARAMETERS):
        return False
    return name in before or own.kind == "init" or own.step == case.name.step


def _candidates(case: Case, index: Array) -> typing.Iterator[Candidate]:
    """Tensors with as many elements: the same one of other steps, its like in other layers, then the nearest."""
    runs, own, count = case.runs, str(case.name), math.prod(full_shape(case))
    before = earlier(case)
    like = _NUMBER.sub("*", case.name.stem)

    def rank(name: str) -> int:
        other = Name.of(name)
        return 0 if (other.stem, other.kind) == (case.name.stem, case.name.kind) else 1 if (
            _NUMBER.sub("*", other.stem), other.kind) == (like, case.name.kind) else 2

    after = [name for name in runs.reference if name not in set(before)]
    names = [name for name in [*before, *after] if name != own and _may_enter(case, name, set(before))
             and math.prod(shape_of(runs.reference, name)) == count]
    for name in sorted(names, key=rank)[:CANDIDATES]:
        values = sampled(case, runs.reference[name], index)
        if values is not None and np.isfinite(values).all():
            later = case.name.kind in ACTIVATIONS and name not in set(before) and Name.of(name).kind == case.name.kind
            yield Candidate(name, False, later, values)
    here = [name for name in runs.other if name not in runs.reference and _may_enter(case, name, {name})
            and math.prod(shape_of(runs.other, name)) == count]
    for name in here[:CANDIDATES]:
        values = sampled(case, runs.other[name], index)
        if values is not None and np.isfinite(values).all():
            yield Candidate(name, True, False, values)


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
                   "relation": relation(case, other.name), "rest": ""}
        if not other.here and np.abs(other.values - val).max() <= near and np.ptp(val) > 0.0:
            rest = [c.label for c in found if c is not other and np.abs(other.values + c.values - ref).max() <= near]
            whole = other.all(case)
            numbers |= {"rest": rest[0] if rest else "", "positions": _is_by_position(case, case.ref - whole)}
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
    """A number of each row's own times another tensor, of which the rows are not multiples of each other."""
    width = case.shape[-1]
    some = gap.reshape(-1, width)[:16]
    whole = other.all(case).reshape(-1, width)
    if width < 2 * FEW or len(whole) < FEW or not _along_rows(some, whole[:16]):
        return
    square = (whole * whole).sum(1)
    times = (whole * gap.reshape(-1, width)).sum(1) / np.where(square > 0.0, square, 1.0)
    expected = (case.ref.reshape(-1, width) + times[:, None] * whole).reshape(case.shape)
    numbers |= {"low": float(times.min()), "high": float(times.max()), "gate": _gate(case, times)}
    yield Pattern(BY_ROW, expected, numbers, 0 if numbers["gate"] else len(times))


def _gate(case: Case, times: Array) -> str:
    """A tensor of one number for each row, of which, or of whose sigmoid, the numbers are a multiple."""
    for name in earlier(case):
        shape = shape_of(case.runs.reference, name)
        if shape[-1:] == (1,) and math.prod(shape) == times.size:
            gate: Array = case.runs.reference[name].reshape(-1).astype(np.float64)
            for x in (gate, 1.0 / (1.0 + np.exp(-gate))):
                if abs(float(x @ times)) > (1.0 - 1e-8) * float(np.linalg.norm(x) * np.linalg.norm(times)):
                    return f"{said(snapped(float(x @ times) / float(x @ x)))} times what {name} gives"
    return ""


def _along_rows(gap: Array, whole: Array) -> bool:
    norms = np.linalg.norm(gap, axis=1) * np.linalg.norm(whole, axis=1)
    off = norms > 0.0
    return bool(off.sum() >= FEW and (np.abs((gap * whole).sum(1)[off]) > ALONG * norms[off]).all())


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
    gap = _gap(case)
    yield from _constants(case, gap)
    yield from _others(case, gap)


# --- causes -----------------------------------------------------------------------------------------------------------


def _kind(*kinds: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: case.name.kind in kinds


def _of_step(kind: str = "") -> typing.Callable[[Case, Pattern], bool]:
    """The same tensor, of an earlier step; of other kinds than the optimizer's, whose values follow from each other."""
    def when(case: Case, pattern: Pattern) -> bool:
        if pattern.numbers["relation"] != "step" or pattern.numbers["here"]:
            return False
        if case.name.kind in ("new", "m", "v", "state", "count"):
            return False
        return not kind or case.name.kind == kind
    return when


def _related(*relations: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: pattern.numbers["relation"] in relations


def _of_expert(case: Case, pattern: Pattern) -> bool:
    return case.name.kind == "init" and pattern.numbers["relation"] == "expert"


def is_embedding(case: Case, name: str) -> bool:
    """Whether a tensor is what an embedding gives: by the module's class, or as the first of the step."""
    stem = Name.of(name).stem
    kinds = [facts.modules[stem].kind for facts in case.runs.facts if stem in facts.modules]
    if kinds:
        return any("mbedding" in kind for kind in kinds)
    first = next((n for n in case.runs.reference if Name.of(n).kind == "fwd" and not n.startswith("input")), "")
    return name == first


def _of_embedding(case: Case, pattern: Pattern) -> bool:
    changed = pattern.numbers.get("changed") or [pattern.numbers.get("name", "")]
    return len(changed) == 1 and is_embedding(case, changed[0]) and _scaled(case, pattern)


def _scaled(case: Case, pattern: Pattern) -> bool:
    """Whether a term has another coefficient, neither left out nor counted again as a whole."""
    if pattern.kind == ADDED:
        return pattern.numbers["c"] not in (1.0, -1.0) or pattern.numbers["relation"] == "inner"
    return bool(pattern.numbers["kept"])


def _is_bias(case: Case, pattern: Pattern) -> bool:
    """Whether the vector is a parameter, or of the features of a module whose bias the dump does not have."""
    name, own = pattern.numbers["tensor"], f"{case.name.stem}.bias"
    if case.name.kind != "fwd":
        return False
    if name:
        return Name.of(name).kind in PARAMETERS
    return pattern.numbers["axis"] == len(case.shape) - 1 and not any(
        Name.of(other).stem == own for other in case.runs.reference)


def _tied(case: Case, pattern: Pattern) -> bool:
    own = Name.of(pattern.numbers["name"])
    return case.name.kind == "grad" and own.kind == "grad" and own.step == case.name.step and abs(
        pattern.numbers["c"]) == 1.0 and pattern.numbers["relation"] == "other"


def _gradient_alone(case: Case, pattern: Pattern) -> bool:
    return case.name.kind == "bwd" and Name.of(pattern.numbers["name"]).step == case.name.step


_IS = "these are the values of {tensor}"
_PLUS = "the difference is {times} times {tensor}"
CAUSES = (
    Cause("bias_counted_again", (VECTOR,), "the same vector is added to each of {rows} rows{source}: a bias counts "
          "again, or is left out", "a bias that each rank adds before the sum, or that none adds", _is_bias),
    Cause("constant_added", (CONSTANT,), "a constant was added: the difference is {added} in each of {count} elements",
          "an offset, an epsilon, a fill value",
          lambda case, pattern: case.name.kind in ("fwd", "bwd", "grad", "init", "weight", "buffer")),
    Cause("vector_added", (VECTOR,), "the same vector is added to each of {rows} rows{source}",
          "a bias, a mean that is not subtracted, a gradient of a bias",
          lambda case, pattern: pattern.numbers["rows"] >= 8 and _kind("fwd", "bwd")(case, pattern)),
    Cause("vector_added", (ROW_NUMBERS,), "one number is added to all elements of each of {rows} rows",
          "a mean of each row that is subtracted in one run alone", _kind("fwd", "bwd", "grad")),
    Cause("batch_again", (VALUE,), _IS + ": an earlier step's batch again",
          "the state of the data loader and its iterator; `set_epoch`", lambda case, pattern: (
              case.name.stem.partition(".")[0] == "input" and pattern.numbers["relation"] == "step")),
    Cause("gradient_of_last_step", (VALUE,), _IS + ": the gradient of an earlier step, and nothing of this one's",
          "buckets that are not filled again, or copied back before their reduction ends", _of_step("grad")),
    Cause("stale_value", (VALUE,), _IS + ": an earlier step's value, not written again or read too early",
          "buffers that outlive a step", _of_step()),
    Cause("other_layer", (VALUE,), _IS + ": another layer's", "offsets of layers, names in a mapping",
          _related("layer")),
    Cause("shards_seeded_alike", (VALUE,), _IS + ", which that expert has too: experts are initialised alike",
          "the seed of each rank's experts", lambda case, pattern: _of_expert(case, pattern) and (
              pattern.numbers["name"] in case.runs.same)),
    Cause("shards_misplaced", (VALUE,), _IS + ": another expert's, which is at another place too",
          "which experts each rank has", lambda case, pattern: _of_expert(case, pattern) and (
              pattern.numbers["name"] in case.runs.other and pattern.numbers["name"] not in case.runs.same)),
    Cause("positions", (VALUE,), _IS + " alone: what the reference adds is the same for each sample, and another for "
          "each token", "the position embedding", lambda case, pattern: pattern.numbers["positions"]),
    Cause("residual", (VALUE,), _IS + " alone, where the reference adds {rest}: the residual, or the branch, is not "
          "added", "the addition after the branch", lambda case, pattern: bool(pattern.numbers["rest"])),
    Cause("no_backward", (VALUE,), _IS + " alone: no gradient comes back through what lies between",
          "`detach`, `torch.no_grad`, a collective without a backward", _gradient_alone),
    Cause("one_buffer_for_two", (VALUE,), _IS + ", which is computed later: it was written over, one buffer for both",
          "saved views of one buffer; `clone` before saving", lambda case, pattern: pattern.numbers["later"]),
    Cause("norm_missing", (VALUE,), _IS + ", what the norm reads: the norm is left out", "the call of the norm",
          lambda case, pattern: case.name.kind == "fwd" and is_norm(case, str(case.name))),
    Cause("other_module", (VALUE,), _IS + ": another module's parameter",
          "names in a mapping, the order of packed weights",
          lambda case, pattern: case.name.kind in PARAMETERS and pattern.numbers["relation"] == "other"),
    Cause("other_tensor", (VALUE,), _IS + ": one tensor in place of another, or a module that is left out",
          "what is passed on here", lambda case, pattern: case.name.stem.partition(".")[0] != "input" and (
              pattern.numbers["relation"] != "expert") and case.name.kind in ("fwd", "bwd", "grad", "init", "weight")),
    Cause("gradient_not_zeroed", (ADDED,), _PLUS + ": an earlier step's gradient is still in it",
          "`optimizer.zero_grad()`, and whether it reaches this parameter", _of_step("grad")),
    Cause("tied_weight", (ADDED,), _PLUS + ": one weight used twice has the gradient of one use alone",
          "`tie_weights()` after loading or wrapping; the sum of both uses' gradients", _tied),
    Cause("wrong_group", (ADDED,), _PLUS + ", another expert's: gradients of different experts are added up",
          "the group over which experts' gradients are reduced", lambda case, pattern: case.name.kind == "grad" and (
              pattern.numbers["relation"] == "expert")),
    Cause("embedding_scale", (ADDED,), _PLUS + ", the embedding's output: it is multiplied by another number",
          "the multiplier of embeddings", _of_embedding),
    Cause("embedding_scale", (SUM,), "{other}, where the reference is {reference}: the embedding's output is "
          "multiplied by another number", "the multiplier of embeddings", _of_embedding),
    Cause("residual_scale", (ADDED,), _PLUS + ": this term has another factor",
          "the scale of the branch, an adapter's alpha over its rank", lambda case, pattern: (
              case.name.kind == "fwd" and _scaled(case, pattern))),
    Cause("residual_scale", (SUM,), "{other}, where the reference is {reference}: a term has another factor",
          "the scale of the branch, an adapter's alpha over its rank", _scaled),
    Cause("residual", (ADDED,), _PLUS + ": a residual or a branch counts twice, or is left out",
          "residual additions and hooks", _kind("fwd")),
    Cause("residual", (SUM,), "{other}, where the reference is {reference}: other terms are added",
          "residual additions and hooks"),
    Cause("tensor_added", (BY_ROW,), "the difference is {tensor} times a number of each row's own, {gate}: this term "
          "counts again, or less", "a term that each rank adds before the sum over them", lambda case, pattern: bool(
              pattern.numbers["gate"])),
    Cause("tensor_added", (ADDED,), _PLUS, "additions and hooks between these", _kind("fwd", "bwd", "grad")),
)
