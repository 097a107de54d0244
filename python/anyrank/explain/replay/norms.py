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
from anyrank.explain.replay.sources import earlier, inputs, left, parameter, parameters, where_wrong
from anyrank.explain.tensors import Array, Case, Name

EPSILONS = tuple(10.0 ** -n for n in range(3, 13)) + (0.0,)
SMALL = 0.15  # of the difference that a change may leave to be held against all copies
DETACHED = "along the normalised values"
MOST = 1 << 20  # elements of a norm that is computed again


@dataclasses.dataclass(frozen=True)
class Recipe:
    """units: which statistic each element has. power: of the gain, plus: what is added to it. less: subtracted from the
    number of elements that squares are divided by. padding: zeros that are counted with each unit. how: scaled
    otherwise. parts: of a unit, of whose variances the mean is taken."""

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
    padding: int = 0
    how: str = "root"
    parts: Array | None = None


def statistics(r: Recipe) -> tuple[Array, Array]:
    """x less its mean, and the mean of its squares, of each element's unit."""
    units, x = r.units.reshape(-1), r.x.reshape(-1)
    counts = np.maximum(np.bincount(units), 1) + r.padding
    mean = np.bincount(units, x) / counts * r.centred
    x = x - mean[units]
    own = r.units.reshape(-1) if r.parts is None else r.parts.reshape(-1)
    spread = x - (np.bincount(own, x) / np.maximum(np.bincount(own), 1))[own] * (r.parts is not None)
    square = (np.bincount(units, spread * spread) + r.padding * mean ** 2) / (counts - r.less)
    if r.how == "largest":
        square[:] = 0.0
        np.maximum.at(square, units, x * x)
    return x.reshape(r.x.shape), square[units].reshape(r.x.shape)


def output(r: Recipe) -> Array:
    if r.how == "skipped":
        return r.x
    z, square = statistics(r)
    under, outside = {"outside": (0.0, r.eps), "largest": (0.0, r.eps), "both": (r.eps, r.eps)}.get(r.how, (r.eps, 0.0))
    result: Array = z / (np.sqrt(square + under) + outside) * (r.gain + r.plus) ** r.power + r.shift
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
        index = index * extent + along(kept, a, len(shape))
    return index


def along(values: Array, axis: int, ndim: int) -> Array:
    """Values of the indices of an axis, to be broadcast."""
    return values.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])


def _layouts(shape: tuple[int, ...], width: int) -> typing.Iterator[tuple[int, Array]]:
    """(axis of channels, units): of the last axis, of parts of it, of images' channels."""
    ndim = len(shape)
    if shape[-1] == width:
        for parts in (1, 2, 4, 8, 16, 32, 64):
            if parts == 1 or width % parts == 0 and width > parts:
                yield -1, units_of(shape, (-1,), parts)
        yield -1, units_of(shape, range(ndim - 1))
    elif ndim > 2 and shape[-2] * shape[-1] == width:
        yield -2, units_of(shape, (-1, -2))
    if ndim > 2 and shape[1] == width and (ndim > 3 or width != shape[-1]):
        yield 1, units_of(shape, (0, *range(2, ndim)))
        for parts in (1, 2, 4, 8, 16, 32):
            if width % parts == 0:
                yield 1, units_of(shape, range(1, ndim), parts, 1)


def affine(case: Case, axis: int, width: int) -> tuple[Array, Array]:
    """Gain and shift, to be broadcast: what the module has of its width; its own names say which is which."""
    found: dict[bool, Array] = {}
    for stem in parameters(case, case.name.stem):
        value = parameter(case, stem)
        if value is not None and value.shape == (width,):
            own: Array = value.astype(np.float64)
            found[stem.rpartition(".")[2][0] == "b"] = own.reshape(case.shape[-2:]) if axis == -2 else along(
                own, axis, len(case.shape))
    return found.get(False, np.ones(1)), found.get(True, np.zeros(1))


def _inputs(case: Case) -> typing.Iterator[tuple[tuple[str, ...], Array]]:
    """What the norm may have read: an output before it, or a sum of two (a residual stream), with the terms' names."""
    found: list[tuple[str, Array]] = [(name, x.reshape(case.shape).astype(np.float64))
                                      for name, x in inputs(case, most=8) if x.size == case.reference.size]
    yield from (((name,), x) for name, x in found)
    for i, (a, x) in enumerate(found):
        yield from (((a, b), x + y) for b, y in found[i + 1:])


def base_of(case: Case) -> Recipe | None:
    """The recipe that gives the reference."""
    widths = {value.shape[0] for stem in parameters(case, case.name.stem)
              if (value := parameter(case, stem)) is not None and value.ndim == 1}
    best: Recipe | None = None
    least = max(64.0 * case.unit, 1e-5) if case.unit < 1e-3 else 2.0 * case.unit
    for width in widths:
        for axis, units in _layouts(case.shape, width):
            gain, shift = affine(case, axis, width)
            for terms, x in _inputs(case):
                for centred in (True, False) if units.max() + 1 < units.size else ():
                    for plus in (0.0, 1.0):
                        r = with_epsilon(case, Recipe(x, units, gain, shift, 0.0, centred, terms, plus=plus), case.ref)
                        if r is not None and (apart := left(output(r), case.ref)) < least:
                            best, least = r, apart
                if best is not None and least < 32.0 * case.unit:
                    return best
    return best


def _scales(r: Recipe, values: Array) -> tuple[Array, Array, Array]:
    """(z, values without gain and shift, the factor of each unit that takes the one to the other)."""
    z = statistics(r)[0].reshape(-1)
    bare = ((values - r.shift) / np.where(r.gain + r.plus == 0.0, np.inf, r.gain + r.plus)).reshape(-1)
    dot, square = (np.bincount(r.units.reshape(-1), z * y) for y in (bare, z))
    return z, bare, np.divide(dot, square, out=np.zeros_like(dot), where=square > 0.0)


def with_epsilon(case: Case, r: Recipe, values: Array, units: Array | None = None) -> Recipe | None:
    """The recipe with the epsilon that these values show, of some units alone; None: they are no such norm."""
    z, bare, scale = _scales(r, values)
    flat = r.units.reshape(-1)
    apart = bare - scale[flat] * z
    if not np.isfinite(apart).all() or np.linalg.norm(apart) > max(4e3 * case.unit, 1e-3) * np.linalg.norm(bare):
        return None
    squares = np.bincount(flat, z * z) / np.maximum(np.bincount(flat), 1)
    known = np.flatnonzero((scale > 0.0) & (squares > 0.0))
    known = known if units is None else np.intersect1d(known, units)
    if not known.size:
        return None
    with np.errstate(divide="ignore", over="ignore"):
        epsilons = 1.0 / scale[known] ** 2 - squares[known]
    # Epsilon is seen best where squares are small.
    epsilon = float(np.median(epsilons[np.argsort(squares[known])[:max(len(epsilons) // 4, 1)]]))
    near = 64.0 * case.unit * float(np.min(squares[known]))
    return dataclasses.replace(r, eps=next((usual for usual in EPSILONS if abs(usual - epsilon) <= near + 0.02 * usual),
                                           max(epsilon, 0.0)))


# --- what is wrong with it --------------------------------------------------------------------------------------------

Changes = typing.Iterator[tuple[str, str, Recipe, int]]
_with = dataclasses.replace


def changes(case: Case, r: Recipe) -> Changes:
    """(cause, what is said of it, recipe, numbers that were fitted)"""
    seen = with_epsilon(case, r, case.val, np.unique(r.units[case.off]))
    if seen is not None and seen.eps != r.eps:
        said = f"an epsilon of {seen.eps:.4g}, {r.eps:.4g} in the reference"
        yield "norm_epsilon", said, seen, int(seen.eps not in EPSILONS)
    for how, eps in (("both", r.eps), *(("outside", eps) for eps in {r.eps, math.sqrt(r.eps), *EPSILONS[:6]})):
        said = f"an epsilon of {eps:.4g} that is added after the root and not under it"
        yield "norm_epsilon", said, _with(r, how=how, eps=eps), 0
    yield "norm_statistic", f"the mean {'not ' * r.centred}subtracted", _with(r, centred=not r.centred), 0
    for plus in {0.0, 1.0, 2.0} - {r.plus}:
        now, was = (f"{x:g} + the gain" if x else "the gain itself" for x in (plus, r.plus))
        yield "norm_gain", f"the factor {now}, {was} in the reference", _with(r, plus=plus), 0
    yield "norm_gain", "the gain left out", _with(r, power=0), 0
    yield "norm_gain", "the gain applied twice", _with(r, power=2), 0
    bits = (r.gain + r.plus).astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    yield "fewer_bits", "the gain rounded to bf16", _with(r, gain=rounded.astype(np.float64), plus=0.0), 0
    outer = case.name.module.rpartition(".")[0]
    for stem in dict.fromkeys(name.stem for name in map(Name.of, case.runs.reference) if name.kind in ("init", "weight")
                              and name.stem.startswith(outer) and not name.stem.startswith(case.name.stem)):
        value = parameter(case, stem)
        if value is not None and value.ndim == 1 and value.size == r.gain.size:
            gain = value.astype(np.float64).reshape(r.gain.shape)
            yield "other_module", f"the gain {stem}", _with(r, gain=gain), 0
    yield "norm_statistic", "squares divided by one less than their number", _with(r, less=1.0), 0
    n = int(np.bincount(r.units.reshape(-1)).max())
    for padding in {-n % to for to in (32, 64, 128, 256, 512, 1024, 4096, 1 << n.bit_length())} - {0}:
        yield "norm_statistic", f"{padding} zeros beside the {n} elements: padding is counted", _with(
            r, padding=padding), 0
    yield "norm_statistic", "the largest magnitude in place of the root of the mean square", _with(
        r, how="largest", centred=False), 0
    yield "norm_missing", "no norm: these are the values that it reads", _with(r, how="skipped"), 0
    yield from _other_units(case, r)
    for terms, x in [(terms, x) for terms, x in _inputs(case) if not np.array_equal(x, r.x)][:24]:
        yield "residual" if max(len(terms), len(r.terms)) > 1 else "other_input", (
            f"{' + '.join(terms)} as its input, {' + '.join(r.terms)} in the reference"), _with(r, x=x), 0


def _other_units(case: Case, r: Recipe) -> Changes:
    """Statistics over other elements: shards, heads, other axes, own samples."""
    shape, ndim = r.x.shape, len(r.x.shape)
    for parts in sorted({2, 4, 8, 16, *case.runs.group_sizes}):
        for axis in (axis for axis in range(ndim) if shape[axis] % parts == 0):
            units = r.units * parts + along(np.arange(shape[axis]) * parts // shape[axis], axis, ndim)
            of = "the samples" if axis == 0 else f"dimension {axis}"
            if r.centred:
                how = f"the mean of the variances of {parts} parts of {of}, without how far their means are apart"
                yield "norm_statistic", how, _with(r, parts=units), 0
            yield "norm_statistic" if axis else "statistic_of_own_samples", (
                f"statistics of each of {parts} parts of {of} alone"), _with(
                r, units=np.unique(units, return_inverse=True)[1].reshape(shape)), 0
    for axes in ((-1,), (-2, -1), (-2,), (0,), range(1, ndim), range(ndim), range(ndim - 1)):
        units = units_of(shape, axes)
        if not np.array_equal(units, r.units):
            said = f"statistics over the dimensions {sorted(a % ndim for a in axes)}"
            yield "norm_statistic", said, _with(r, units=units), 0


def _detached(case: Case) -> typing.Iterator[Pattern]:
    """A norm's input's gradient has in each row a part along the normalised values, of which the reference's is free as
    the statistic goes back too."""
    given = case.runs.reference.get(str(Name(case.name.stem, "fwd", case.name.step)))
    if given is None or given.shape != case.shape or len(case.shape) < 2 or case.every:
        return
    gain, shift = affine(case, -1, case.shape[-1])
    y = (given - shift) / gain
    of_ref, of_gap = ((x * y).sum(-1, keepdims=True) / np.maximum((y * y).sum(-1, keepdims=True), 1e-300) * y
                      for x in (case.ref, case.val - case.ref))
    if np.linalg.norm(of_ref) <= 1e-3 * np.linalg.norm(case.ref) and gain.size == case.shape[-1] >= 8:
        yield Pattern(DETACHED, where_wrong(case, case.ref + of_gap), fitted=of_gap.size // case.shape[-1])


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "bwd":
        yield from _detached(case)
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) < 2 or (
            case.reference.size > MOST) or case.every or not earlier(case):
        return
    base = base_of(case)
    if base is None:
        return
    whole, difference = output(base), np.where(np.isfinite(case.val), case.val - case.ref, 0.0)
    for cause, how, r, fitted in changes(case, base):
        with np.errstate(all="ignore"):
            expected = case.ref + output(r) - whole
        if left(expected[case.off], case.val[case.off], difference[case.off]) <= SMALL:
            yield Pattern(f"norm {cause}", where_wrong(case, expected), {"how": how}, fitted)
    yield from _other_scales(case, base)


def _other_scales(case: Case, r: Recipe) -> typing.Iterator[Pattern]:
    """Each unit times a number of its own: another statistic, of something that is not known."""
    z, _, scale = _scales(r, case.val)
    units = r.units.reshape(-1)
    counts, off = np.maximum(np.bincount(units), 1), np.unique(r.units[case.off])
    times = scale[off] * np.sqrt(np.bincount(units, z * z)[off] / counts[off] + r.eps)
    if len(off) > 1 and counts[off].min() >= 8 and np.isfinite(times).all():
        expected = (scale[units] * z).reshape(r.x.shape) * (r.gain + r.plus) + r.shift
        how = f"another statistic in each wrong row, which it takes {times.min():.4g} to {times.max():.4g} times as far"
        yield Pattern("norm norm_statistic", where_wrong(case, expected), {"how": how}, 3)


# --- causes -----------------------------------------------------------------------------------------------------------

LOOKS = {
    "norm_epsilon": "eps of this norm, and whether it is added under the root",
    "norm_statistic": "LayerNorm against RMSNorm, torch.var with its correction of 1, the shape that is normalised, "
                      "padding in it, the all-reduce of statistics over shards (of x and x^2, not of variances)",
    "norm_gain": "the norm's weight, which some store less 1 (Gemma, Megatron's apply_layernorm_1p), in conversion and "
                 "in forward",
    "fewer_bits": "the format in which the norm's weight is kept, and 1 is added to it",
    "norm_missing": "whether the norm is called",
    "statistic_of_own_samples": "SyncBatchNorm, micro-batches of a batch norm",
    "other_module": "names in a mapping of weights",
    "residual": "the residual connection before this norm",
    "other_input": "what this norm is called on"}
CAUSES = (*(Cause(name, (f"norm {name}",), "the norm, computed again from its input in the reference, gives these "
                  "values with {how}", look) for name, look in LOOKS.items()),
          Cause("norm_statistic_detached", (DETACHED,), "each row has a part along the normalised values, of which the "
                "reference is free: this gradient does not go through the norm's statistic", "`detach` and `no_grad` "
                "around the statistic; the backward pass of a norm that is written by hand"))
