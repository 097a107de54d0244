# SPDX-License-Identifier: Apache-2.0
"""Norms computed again from their input: y = gain (x - mean) / sqrt(mean of squares + eps) + shift, with one thing
changed. Which elements share a statistic is an array of numbers, one for each element, so that layer, group and batch
norms are one recipe."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.sources import earlier, inputs, left, parameter, parameters, thinned, where_wrong
from anyrank.explain.tensors import Array, Case, Name

EPSILONS = tuple(10.0 ** -n for n in range(3, 13)) + (0.0,)
SMALL = 0.15  # of the difference that a change may leave to be held against all copies
MOST = 1 << 20  # elements of a norm that is computed again


@dataclasses.dataclass(frozen=True)
class Recipe:
    """units: which statistic each element has; channels: the axis of gain and shift. power: of the gain, plus: what is
    added to it. less: subtracted from the number of elements that squares are divided by. how: scaled otherwise."""

    x: Array
    units: Array
    gain: Array  # broadcast to x
    shift: Array
    eps: float
    centred: bool
    terms: tuple[str, ...] = ()  # names of what is added up to x
    power: int = 1
    plus: float = 0.0
    less: float = 0.0
    how: str = "root"


def statistics(r: Recipe) -> tuple[Array, Array]:
    """x less its mean, and the mean of its squares, of each element's unit."""
    units, x = r.units.reshape(-1), r.x.reshape(-1)
    counts = np.maximum(np.bincount(units), 1)
    if r.centred:
        x = x - (np.bincount(units, x) / counts)[units]
    if r.how == "largest":
        most = np.zeros(len(counts))
        np.maximum.at(most, units, np.abs(x))
        return x.reshape(r.x.shape), (most ** 2)[units].reshape(r.x.shape)
    square = np.bincount(units, x * x) / (counts - r.less)
    return x.reshape(r.x.shape), square[units].reshape(r.x.shape)


def output(r: Recipe) -> Array:
    if r.how == "skipped":
        return r.x
    z, square = statistics(r)
    outside = r.eps if r.how in ("outside", "both", "largest") else 0.0
    z = z / (np.sqrt(square + (0.0 if r.how in ("outside", "largest") else r.eps)) + outside)
    result: Array = z * (r.gain + r.plus) ** r.power + r.shift
    return result


# --- the reference's recipe -------------------------------------------------------------------------------------------


def units_of(shape: tuple[int, ...], axes: typing.Iterable[int], parts: int = 1, axis: int = -1) -> Array:
    """Numbers of statistics that are taken over these axes, and apart in so many parts of one of them."""
    axes = {a % len(shape) for a in axes}
    index: Array = np.zeros(shape, np.int64)
    for a, extent in enumerate(shape):
        kept = np.arange(extent)
        if a == axis % len(shape) and parts > 1:
            kept, extent = kept * parts // extent, parts
        elif a in axes:
            continue
        index = index * extent + kept.reshape([-1 if i == a else 1 for i in range(len(shape))])
    return index


def _layouts(case: Case, width: int) -> typing.Iterator[tuple[int, Array]]:
    """(axis of channels, units): of the last axis, of parts of it, of images' channels."""
    shape = case.shape
    if shape[-1] == width:
        yield -1, units_of(shape, (-1,))
        for parts in (2, 4, 8, 16, 32, 64):
            if width % parts == 0 and width // parts > 1:
                yield -1, units_of(shape, (-1,), parts)
        yield -1, units_of(shape, range(len(shape) - 1))
    elif shape[-1] and width % shape[-1] == 0 and len(shape) > 2 and shape[-2] * shape[-1] == width:
        yield -2, units_of(shape, (-1, -2))
    if len(shape) > 2 and shape[1] == width and len(shape) != 3 or len(shape) == 3 and shape[1] == width != shape[-1]:
        yield 1, units_of(shape, (0, *range(2, len(shape))))
        for parts in (1, 2, 4, 8, 16, 32):
            if width % parts == 0:
                rest = tuple(range(1, len(shape)))
                yield 1, units_of(shape, rest, parts, 1)


def affine(case: Case, axis: int, width: int) -> tuple[Array, Array, bool]:
    """Gain and shift, to be broadcast: what the module has of its width; its own names say which is which."""
    gain: Array = np.ones(1)
    shift: Array = np.zeros(1)
    found = False
    for stem in parameters(case, case.name.stem):
        value = parameter(case, stem)
        if value is None or value.shape != (width,):
            continue
        own: Array = value.astype(np.float64)
        shaped = own.reshape(case.shape[-2:]) if axis == -2 else own.reshape(
            [-1 if i == axis % len(case.shape) else 1 for i in range(len(case.shape))])
        if stem.rpartition(".")[2][0] == "b":
            shift = shaped
        else:
            gain, found = shaped, True
    return gain, shift, found


def _inputs(case: Case) -> typing.Iterator[tuple[tuple[str, ...], Array]]:
    """What the norm may have read: an output before it, or a sum of two (a residual stream), with the terms' names."""
    found: list[tuple[str, Array]] = []
    for name, x in inputs(case, most=8):
        found += [(name, x.reshape(case.shape).astype(np.float64))] if x.size == case.reference.size else []
    yield from (((name,), x) for name, x in found)
    for i, (a, x) in enumerate(found):
        for b, y in found[i + 1:]:
            yield (a, b), x + y


def base_of(case: Case) -> Recipe | None:
    """The recipe that gives the reference."""
    widths = {value.shape[0] for stem in parameters(case, case.name.stem)
              if (value := parameter(case, stem)) is not None and value.ndim == 1}
    best: Recipe | None = None
    least = max(64.0 * case.unit, 1e-5) if case.unit < 1e-3 else 2.0 * case.unit
    for width in widths:
        for axis, units in _layouts(case, width):
            gain, shift, _ = affine(case, axis, width)
            for terms, x in _inputs(case):
                for centred in (True, False) if units.max() + 1 < units.size else ():
                    for plus in (0.0, 1.0):
                        r = with_epsilon(case, Recipe(x, units, gain, shift, 0.0, centred, terms, plus=plus), case.ref)
                        if r is not None and (apart := left(output(r), case.ref)) < least:
                            best, least = r, apart
                if best is not None and least < 32.0 * case.unit:
                    return best
            if axis == -1 and best is None:
                best = _of_mixture(case, Recipe(np.zeros(1), units, gain, shift, 0.0, False), least)
    return best


def _of_mixture(case: Case, r: Recipe, least: float) -> Recipe | None:
    """The norm of a residual sum, one of whose terms is times a number."""
    single = [(terms[0], x) for terms, x in _inputs(case) if len(terms) == 1]
    for centred, plus in ((True, 0.0), (False, 0.0), (False, 1.0)):
        for i, (a, x) in enumerate(single):
            for b, y in single[i + 1:]:
                own = dataclasses.replace(r, x=x, centred=centred, plus=plus, terms=(a, b))
                times = _mixture(case, own, x, y, case.ref, np.arange(0, x.size // x.shape[-1], 7))
                if times is None:
                    continue
                found = with_epsilon(case, dataclasses.replace(own, x=x + times * y), case.ref)
                if found is not None and left(output(found), case.ref) < least:
                    return found
    return None


def with_epsilon(case: Case, r: Recipe, values: Array, units: Array | None = None) -> Recipe | None:
    """The recipe with the epsilon that these values show, of some units alone; None: they are no such norm."""
    z, square = statistics(r)
    bare = (values - r.shift) / np.where(r.gain + r.plus == 0.0, np.inf, r.gain + r.plus)
    some = slice(None) if z.size <= 1 << 16 else slice(None, None, max(z.shape[0] >> 6, 1))
    n = np.bincount(r.units[some].reshape(-1), (z[some] * z[some]).reshape(-1))
    dot = np.bincount(r.units[some].reshape(-1), (z[some] * bare[some]).reshape(-1))
    own = n > 0.0
    scale = np.zeros_like(n)
    scale[own] = dot[own] / n[own]
    apart = bare[some] - scale[r.units[some]] * z[some]
    if not np.isfinite(apart).all() or np.linalg.norm(apart) > max(4e3 * case.unit, 1e-3) * np.linalg.norm(bare[some]):
        return None
    squares = np.zeros_like(n)
    np.maximum.at(squares, r.units[some].reshape(-1), square[some].reshape(-1))
    known = own & (scale > 0.0)
    if units is not None:
        known &= np.isin(np.arange(len(known)), units)
    if not known.any():
        return None
    with np.errstate(divide="ignore", over="ignore"):
        epsilons = 1.0 / scale[known] ** 2 - squares[known]
    # Epsilon is seen best where squares are small.
    epsilon = float(np.median(epsilons[np.argsort(squares[known])[:max(len(epsilons) // 4, 1)]]))
    return dataclasses.replace(r, eps=rounded(case, epsilon, float(np.min(squares[known]))))


def rounded(case: Case, epsilon: float, square: float) -> float:
    """The usual epsilon that this is up to rounding."""
    near = 64.0 * case.unit * square
    for usual in EPSILONS:
        if abs(usual - epsilon) <= near + 0.02 * usual:
            return usual
    return max(epsilon, 0.0)


# --- what is wrong with it --------------------------------------------------------------------------------------------

Changes = typing.Iterator[tuple[str, Recipe, dict[str, typing.Any], int]]


def changes(case: Case, r: Recipe) -> Changes:
    again = dataclasses.replace
    seen = with_epsilon(case, r, case.val, np.unique(r.units[case.off]))
    if seen is not None and seen.eps != r.eps:
        usual = seen.eps in EPSILONS
        yield "epsilon", seen, {"now": seen.eps, "was": r.eps}, 0 if usual else 1
    yield "outside", again(r, how="both"), {"eps": r.eps}, 0
    for eps in {r.eps, math.sqrt(r.eps), *EPSILONS[:6]}:
        yield "outside", again(r, how="outside", eps=eps), {"eps": eps}, 0
    yield "mean", again(r, centred=not r.centred), {"how": "not subtracted" if r.centred else "subtracted"}, 0
    for plus in (0.0, 1.0, 2.0):
        if plus != r.plus:
            yield "gain_offset", again(r, plus=plus), {"now": _gain(plus), "was": _gain(r.plus)}, 0
    for power in (0, 2):
        yield "gain", again(r, power=power), {"how": "left out" if power == 0 else "applied twice"}, 0
    yield "gain", again(r, gain=_rounded_gain(r), plus=0.0), {"how": "rounded to bf16"}, 0
    yield from _other_gains(case, r)
    yield "unbiased", again(r, less=1.0), {}, 0
    yield "largest", again(r, how="largest", centred=False), {}, 0
    yield "skipped", again(r, how="skipped"), {}, 0
    yield from _other_units(case, r)
    yield from _other_inputs(case, r)


def _other_gains(case: Case, r: Recipe) -> Changes:
    """Gains of norms beside this one."""
    prefix = case.name.stem.rpartition(".")[0]
    for name in case.runs.reference:
        stem = Name.of(name).stem
        if stem.startswith(prefix) and Name.of(name).kind in ("init", "weight") and not stem.startswith(case.name.stem):
            value = parameter(case, stem)
            if value is not None and value.ndim == 1 and value.size == r.gain.size:
                gain = value.astype(np.float64).reshape(r.gain.shape)
                yield "gain_of", dataclasses.replace(r, gain=gain), {"other": stem}, 0


def _gain(plus: float) -> str:
    return f"{plus:g} + the gain" if plus else "the gain itself"


def _rounded_gain(r: Recipe) -> Array:
    bits = (r.gain + r.plus).astype(np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    result: Array = kept.astype(np.uint32).view(np.float32).astype(np.float64)
    return result


def _other_units(case: Case, r: Recipe) -> Changes:
    """Statistics over other elements: shards, heads, other axes, own samples."""
    again, shape = dataclasses.replace, r.x.shape
    for parts in sorted({2, 4, 8, 16, *case.runs.group_sizes}):
        for axis in range(len(shape)):
            if shape[axis] % parts == 0 and shape[axis] // parts >= 1:
                part = np.arange(shape[axis]) * parts // shape[axis]
                own = part.reshape([-1 if i == axis else 1 for i in range(len(shape))])
                units = r.units * parts + own
                kind = "samples" if axis == 0 else "shard"
                yield kind, again(r, units=np.unique(units, return_inverse=True)[1].reshape(shape)), {
                    "parts": parts, "axis": axis}, 0
    for axes in [(-1,), (-2, -1), (-2,), (0,), tuple(range(1, len(shape))), tuple(range(len(shape))),
                 tuple(range(len(shape) - 1))]:
        if len(shape) >= max(len(axes), 2):
            units = units_of(shape, axes)
            if not np.array_equal(units, r.units):
                yield "axes", again(r, units=units), {"axes": sorted(a % len(shape) for a in axes)}, 0
    for parts in (2, 3, 4, 6, 8, 12, 16):  # the statistic of several heads, where the reference has one for each
        if len(shape) > 2 and r.units.max() > parts and r.units.size % parts == 0 and shape[-2] == parts:
            yield "axes", again(r, units=units_of(shape, (-1, -2))), {"axes": [len(shape) - 2, len(shape) - 1]}, 0
            break


def _other_inputs(case: Case, r: Recipe) -> Changes:
    """Another input: a term of a sum alone, other tensors, or one term times a number."""
    again = dataclasses.replace
    candidates = [(terms, x) for terms, x in _inputs(case) if not np.array_equal(x, r.x)][:24]
    for terms, x in candidates:
        yield "input", again(r, x=x), {"other": " + ".join(terms), "wanted": " + ".join(r.terms),
                                       "sum": max(len(terms), len(r.terms)) > 1}, 0
    single = {terms[0]: x for terms, x in candidates if len(terms) == 1}
    if len(r.terms) != 2 or any(name not in single for name in r.terms):
        return
    for name, other in (r.terms, r.terms[::-1]):
        yield "stream", again(r, x=single[name], shift=r.shift + single[other]), {"branch": name, "stream": other}, 0
    wrong = np.flatnonzero(case.off.reshape(-1, case.shape[-1]).any(-1))
    times = _mixture(case, r, single[r.terms[0]], single[r.terms[1]], case.val, wrong)
    if times is not None:
        (a, b), said = r.terms, round(times, 6)
        simple = 0 if said in (2.0, -1.0, 0.5) else 1
        yield "mixture", again(r, x=single[a] + times * single[b]), {"a": a, "b": b, "times": said}, simple
        yield "mixture", again(r, x=single[a] / times + single[b]), {"a": b, "b": a, "times": 1.0 / times}, simple


def _mixture(case: Case, r: Recipe, a: Array, b: Array, values: Array, rows: Array) -> float | None:
    """The number that the second term of the input is multiplied by, as rows of the values show it."""
    if r.units.max() + 1 != a.size // a.shape[-1]:
        return None
    bare = ((values - r.shift) / (r.gain + r.plus)).reshape(-1, case.shape[-1])
    found = []
    for row in rows[:64]:
        x, y = (t.reshape(-1, case.shape[-1])[row] for t in (a, b))
        columns = np.stack([x, y, np.ones_like(x)] if r.centred else [x, y], axis=1)
        by = np.linalg.lstsq(columns, bare[row], rcond=None)[0]
        found.append(by[1] / by[0] if by[0] else np.inf)
    times = float(np.median(found)) if found else np.inf
    return times if np.isfinite(times) and times and np.ptp(found) <= 0.02 * abs(times) + 1e-3 else None


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) < 2 or case.reference.size > MOST:
        return
    if thinned(case) or not earlier(case):
        return
    base = base_of(case)
    if base is None:
        return
    whole, difference = output(base), np.where(np.isfinite(case.val), case.val - case.ref, 0.0)
    rows = case.off
    for kind, r, numbers, fitted in changes(case, base):
        with np.errstate(all="ignore"):
            expected = case.ref + output(r) - whole
        if left(expected[rows], case.val[rows], difference[rows]) <= SMALL:
            yield Pattern(f"norm_{kind}", where_wrong(case, expected), numbers, fitted)
    yield from _other_scales(case, base)


def _other_scales(case: Case, r: Recipe) -> typing.Iterator[Pattern]:
    """Each unit times a number of its own, and moved: another statistic, of something that is not known."""
    z, _ = statistics(r)
    units = r.units.reshape(-1)
    counts = np.bincount(units)
    if counts[counts > 0].min() < 8:
        return
    bare = ((case.val - r.shift) / (r.gain + r.plus)).reshape(-1)
    flat = z.reshape(-1)
    dot, square = np.bincount(units, flat * bare), np.bincount(units, flat * flat)
    scale = np.divide(dot, square, out=np.zeros_like(dot), where=square > 0.0)
    made = (scale[units] * flat).reshape(r.x.shape)
    expected = made * (r.gain + r.plus) + r.shift
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.unique(r.units[case.off])
        times = scale[off] * np.sqrt(square[off] / np.maximum(counts[off], 1) + r.eps)
    if len(off) > 1 and np.isfinite(times).all():
        numbers = {"low": float(times.min()), "high": float(times.max())}
        yield Pattern("norm_scales", where_wrong(case, expected), numbers, 3)


# --- causes -----------------------------------------------------------------------------------------------------------

AGAIN = "the norm, computed again from its input in the reference, gives these values with "


def _is_a_stream(case: Case, pattern: Pattern) -> bool:
    return bool(pattern.numbers["sum"])


CAUSES = (
    Cause("norm_epsilon", ("norm_epsilon",), AGAIN + "an epsilon of {now}, {was} in the reference", "eps of this norm"),
    Cause("norm_epsilon", ("norm_outside",), AGAIN + "an epsilon of {eps} that is added after the root and not under "
          "it", "where eps is added"),
    Cause("norm_mean", ("norm_mean",), AGAIN + "the mean {how}", "LayerNorm against RMSNorm"),
    Cause("gain_offset", ("norm_gain_offset",), AGAIN + "the factor {now}, {was} in the reference", "norms whose "
          "weights are stored less 1 (Gemma; Megatron's apply_layernorm_1p), in conversion and in forward"),
    Cause("gain_twice_or_missing", ("norm_gain",), AGAIN + "the gain {how}", "the norm's weight"),
    Cause("norm_statistic", ("norm_unbiased",), AGAIN + "squares divided by one less than their number", "torch.std "
          "and torch.var, whose correction is 1"),
    Cause("norm_statistic", ("norm_largest",), AGAIN + "the largest magnitude in place of the root of the mean square",
          "the norm's statistic"),
    Cause("norm_missing", ("norm_skipped",), "these are the values that the norm reads: the norm is left out",
          "whether the norm is called"),
    Cause("statistic_of_own_samples", ("norm_samples",), AGAIN + "statistics of each of {parts} parts of the samples "
          "alone", "SyncBatchNorm, micro-batches of a batch norm"),
    Cause("norm_statistic", ("norm_shard",), AGAIN + "statistics of each of {parts} parts of dimension {axis} alone",
          "the all-reduce of a norm's statistics, or the heads that it takes together"),
    Cause("norm_statistic", ("norm_axes",), AGAIN + "statistics over the dimensions {axes}", "the shape that is "
          "normalised"),
    Cause("residual", ("norm_stream",), "the norm of {branch} alone, to which {stream} is added afterwards, and not "
          "the norm of their sum", "norms before or after the residual sum"),
    Cause("other_module", ("norm_gain_of",), AGAIN + "the gain {other}", "names in a mapping of weights"),
    Cause("residual_scale", ("norm_mixture",), AGAIN + "{times} times {b} added to {a} as its input", "the factor of "
          "the residual's branch or of the stream"),
    Cause("residual", ("norm_input",), AGAIN + "{other} as its input, {wanted} in the reference", "the residual "
          "connection before this norm", _is_a_stream),
    Cause("other_input", ("norm_input",), AGAIN + "{other} as its input", "what this norm is called on"),
    Cause("norm_statistic", ("norm_scales",), "each wrong row has the reference's direction, times {low} to {high}: "
          "the norm's statistic is another one", "what the norm's mean square is taken over: padding, a shard, its "
          "format"),
)
