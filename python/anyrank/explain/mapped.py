# SPDX-License-Identifier: Apache-2.0
"""An elementwise map of the reference: another format, fewer steps, limits, another function."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.known import earlier, full_shape, sample_of, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import MOST, Array, Case, Name

ROUNDED, TRUNCATED, BITS, STEPS, LIMITED = "rounded", "truncated", "fewer_bits", "steps", "limited"
FUNCTION, ACTIVATION, EXCHANGED = "function", "other_activation", "arguments_exchanged"
ROUNDING, COARSE = "rounding", "coarse_rounding"
FEW = 8
INPUTS = 12   # tensors that are tried as what an activation reads
ROWS = 16     # of a product, that are looked at to tell which function it was
_ALWAYS = 1000  # numbers that a statement about size fits, which explains nothing

Map = typing.Callable[[Array], Array]


# --- formats ----------------------------------------------------------------------------------------------------------

FORMATS = {"bf16": (8, -126, 3.3895e38), "fp16": (11, -14, 65504.0), "tf32": (11, -126, 3.4e38),
           "fp8 e4m3": (4, -6, 448.0), "fp8 e5m2": (3, -14, 57344.0)}  # bits of the mantissa, least exponent, largest


def rounded(x: Array, name: str, cut: bool = False) -> Array:
    """Values in a format, rounded to nearest even, or cut off."""
    bits, least, largest = FORMATS[name]
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, least)
        step = np.ldexp(1.0, exponent - bits + 1)
        result: Array = np.clip((np.trunc(x / step) if cut else np.rint(x / step)) * step, -largest, largest)
    return result


def _formats(case: Case, index: Array) -> typing.Iterator[Pattern]:
    """The reference in another format; or values that this format has, where they were computed in it."""
    val, ref = case.val.reshape(-1)[index], case.ref.reshape(-1)[index]
    off = np.isfinite(val) & np.isfinite(ref) & (val != ref)
    if off.sum() < FEW:
        return
    for name, (bits, _, _) in FORMATS.items():
        unit = 2.0 ** -bits
        is_stored = unit == case.unit and np.array_equal(rounded(ref, name), val)  # by one run alone
        if (unit <= 2.0 * case.unit and not is_stored) or not np.array_equal(rounded(val[off], name), val[off]):
            continue
        if np.array_equal(rounded(ref, name), ref):
            continue
        apart = float(np.sqrt(np.square(val - ref)[off].mean() / np.square(ref)[off].mean())) if ref[off].any() else 1.0
        numbers = {"format": name, "bits": bits - 1}
        yield Pattern(ROUNDED, rounded(case.ref, name), numbers)
        yield Pattern(TRUNCATED, rounded(case.ref, name, cut=True), numbers)
        if apart <= 32.0 * unit:
            yield Pattern(BITS, rounded(case.val, name), numbers, fitted=3)
        return


def _blocks(case: Case) -> typing.Iterator[tuple[str, tuple[int, ...], int]]:
    """Shapes to look at a tensor in, and the axis that one step is for."""
    size, shape = case.ref.size, case.shape
    yield "the tensor", (1, size), 1
    if len(shape) > 1:
        yield "each row", (size // shape[-1], shape[-1]), 1
        yield "each column", (size // shape[-1], shape[-1]), 0
    for n in (16, 32, 64, 128, 256):
        if shape and shape[-1] % n == 0 and shape[-1] > n:
            yield f"each block of {n}", (size // n, n), 1


def _integers(x: Array, axis: int, bits: int, low: bool) -> Array:
    """Rounded to 2^bits steps of each row's largest value, or from its least to its largest (low)."""
    if low:
        least = np.minimum(x.min(axis, keepdims=True), 0.0)
        step = (np.maximum(x.max(axis, keepdims=True), 0.0) - least) / (2 ** bits - 1)
    else:
        least, step = np.zeros(1), np.abs(x).max(axis, keepdims=True) / (2 ** (bits - 1) - 1)
    step = np.where(step > 0.0, step, 1.0)
    zero = np.rint(-least / step)
    result: Array = (np.rint(x / step + zero) - zero) * step
    return result


def _scaled_format(x: Array, axis: int, name: str) -> Array:
    scale = np.abs(x).max(axis, keepdims=True) / FORMATS[name][2]
    scale = np.where(scale > 0.0, scale, 1.0)
    result: Array = rounded(x / scale, name) * scale
    return result


def _quantised(case: Case) -> typing.Iterator[Pattern]:
    """Integers and fp8 with a scale of the tensor, of rows, columns or blocks: few values in each."""
    if case.ref.size < 32 or not np.isfinite(case.ref).all() or not np.isfinite(case.val).all():
        return
    ways: list[tuple[str, int, typing.Callable[[Array, int], Array]]] = [
        (f"int{bits}{' from least to largest' if low else ''}", bits,
         lambda x, axis, bits=bits, low=low: _integers(x, axis, bits, low))  # type: ignore[misc]
        for bits in (8, 4) for low in (False, True)]
    ways += [(name, 8, lambda x, axis, name=name: _scaled_format(x, axis, name))  # type: ignore[misc]
             for name in ("fp8 e4m3", "fp8 e5m2")]
    gap = math.sqrt(float(np.square(case.val - case.ref).mean())) / max(case.scale, 1e-300)
    if not 1e-5 < gap < 0.2:
        return
    ends = np.array([case.ref.argmin(), case.ref.argmax()])
    for of, shape, axis in _blocks(case):
        ref, val = case.ref.reshape(shape), case.val.reshape(shape)
        part: typing.Any = (slice(None), slice(0, 8)) if axis == 0 else (slice(0, 8), slice(None))
        if shape[0] == 1:  # a sample, with the least and the largest value
            part = (slice(None), np.concatenate([sample_of(shape[1]), ends]))
        near = 1e-4 * np.abs(ref[part]).max()
        for name, _, way in ways:
            if np.mean(np.abs(way(ref[part], axis) - val[part]) <= near) > 0.9:
                yield Pattern(STEPS, way(ref, axis).reshape(case.shape), {"format": name, "of": of})
                return
        found = _multiples(ref[part], val[part], axis)
        if found:
            yield Pattern(STEPS, case.val, {"format": "an integer format", "of": of}, fitted=3)
            return


def _multiples(ref: Array, val: Array, axis: int) -> bool:
    """Whether the values of each row are multiples of one step, within one step of the reference, and few."""
    rows = list(zip(ref.T, val.T) if axis == 0 else zip(ref, val))[:8]
    for own, x in rows:
        steps = np.diff(np.unique(np.abs(x)))
        steps = steps[steps > 1e-6 * np.abs(x).max()] if x.any() else steps
        if x.size < 16 or not steps.size or np.unique(x).size > 256 or np.unique(x).size > 0.8 * np.unique(own).size:
            return False
        step = steps.min()
        if np.abs(x / step - np.rint(x / step)).max() > 0.02 or np.abs(x - own).max() > 1.01 * step:
            return False
    return bool(rows)


# --- limits and functions ---------------------------------------------------------------------------------------------


def _limits(case: Case) -> typing.Iterator[Pattern]:
    """Values cut off at a largest or least one, which several have."""
    off = case.off & np.isfinite(case.val) & np.isfinite(case.ref)
    if off.sum() < 3:
        return
    val, ref = case.val[off], case.ref[off]
    low, high = float(val.min()), float(val.max())
    upper, lower = ref > val, ref < val
    if (np.ptp(val[upper]) if upper.any() else 0.0) > 1e-6 * abs(high) or (
            np.ptp(val[lower]) if lower.any() else 0.0) > 1e-6 * abs(low) or low == high == 0.0:
        return
    top, bottom = high if upper.any() else math.inf, low if lower.any() else -math.inf
    both = f"{bottom:.4g} to {top:.4g}" if upper.any() and lower.any() else (
        f"at most {top:.4g}" if upper.any() else f"at least {bottom:.4g}")
    yield Pattern(LIMITED, np.clip(case.ref, bottom, top), {"limits": both, "cut": int(off.sum())}, fitted=1)


def _norm_of_cut(case: Case) -> typing.Iterator[Pattern]:
    """The norm of gradients of which each element is cut off at a round number."""
    runs = case.runs
    if case.name.kind != "clip" or case.ref.size != 1 or not 0.0 < float(case.val.sum()) < float(case.ref.sum()):
        return
    names = [n for n in runs.reference if Name.of(n).kind == "grad" and Name.of(n).step == case.name.step]
    if sum(math.prod(shape_of(runs.reference, n)) for n in names) > MOST:
        return
    all_of = np.concatenate([runs.reference[n].reshape(-1) for n in names] or [np.zeros(1)]).astype(np.float64)
    wanted, norm = float(case.val.sum()), float(np.linalg.norm(all_of))
    if abs(norm / float(case.ref.sum()) - 1.0) > 1e-3:
        return
    low, high = 0.0, float(np.abs(all_of).max())
    for _ in range(60):
        limit = 0.5 * (low + high)
        low, high = (limit, high) if np.linalg.norm(np.clip(all_of, -limit, limit)) < wanted else (low, limit)
    round_limit = float(f"{limit:.1e}")
    if abs(limit / round_limit - 1.0) < 1e-3:
        norm = float(np.linalg.norm(np.clip(all_of, -round_limit, round_limit)))
        yield Pattern(LIMITED, np.full(case.shape, norm), {
            "limits": f"{-round_limit:g} to {round_limit:g}", "cut": int((np.abs(all_of) > round_limit).sum())})


def _erf(x: Array) -> Array:
    """To 1e-7 or better: by the complementary function of Numerical Recipes."""
    t = 1.0 / (1.0 + 0.5 * np.abs(x))
    poly = np.polyval([0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418,
                       0.37409196, 1.00002368, -1.26551223], t)
    result: Array = np.sign(x) * (1.0 - t * np.exp(-x * x + poly))
    return result


def _sigmoid(x: Array) -> Array:
    result: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result


FUNCTIONS: dict[str, Map] = {
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu's tanh form": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x ** 3))),
    "silu": lambda x: x * _sigmoid(x), "relu": lambda x: np.maximum(x, 0.0),
    "quick gelu": lambda x: x * _sigmoid(1.702 * x),
    "sigmoid": _sigmoid, "tanh": np.tanh, "relu squared": lambda x: np.maximum(x, 0.0) ** 2,
    "leaky relu": lambda x: np.where(x > 0.0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0))),
    "softplus": lambda x: np.logaddexp(0.0, x), "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "the identity": lambda x: x,
}
SIMPLE: dict[str, Map] = {"its absolute value": np.abs, "its square": np.square, "its square root": np.sqrt,
                          "its exponential": np.exp, "its logarithm": np.log, "its reciprocal": lambda x: 1.0 / x,
                          "its tanh": np.tanh, "its sigmoid": _sigmoid, "its relu": lambda x: np.maximum(x, 0.0),
                          "1 minus it": lambda x: 1.0 - x}


def _near(case: Case, x: Array, y: Array) -> bool:
    """Whether values of a sample are equal, up to rounding and what the table's functions are worth."""
    return bool(np.abs(x - y).max() <= max(1e-5, 8.0 * case.unit) * max(float(np.abs(y).max()), 1e-300))


def _simple(case: Case, index: Array) -> typing.Iterator[Pattern]:
    ref, val = case.ref.reshape(-1)[index], case.val.reshape(-1)[index]
    if ref.size < FEW or not np.isfinite(ref).all() or not np.isfinite(val).all() or np.ptp(ref) == 0.0:
        return
    with np.errstate(all="ignore"):
        for name, f in SIMPLE.items():
            if _near(case, f(ref), val):
                yield Pattern(FUNCTION, f(case.ref), {"function": name, "of": "the reference"})
            elif _near(case, f(val), ref) and np.ptp(val) > 0.0:
                yield Pattern(FUNCTION, case.val, {"function": name, "of": "this"}, fitted=2)


def _inputs(case: Case, width: int) -> list[str]:
    """Names of what was computed before, with so many features, the nearest first."""
    runs = case.runs
    return [name for name in earlier(case) if Name.of(name).kind == "fwd" and Name.of(name).step == case.name.step
            and shape_of(runs.reference, name)[-1:] == (width,)
            and shape_of(runs.reference, name)[:-1] == case.shape[:-1]][:INPUTS]


Gates = typing.Callable[[Map, bool], Array]  # of a function, with its arguments exchanged or not


def _gated(case: Case, rows: slice) -> typing.Iterator[tuple[str, Gates, Array | None, Array]]:
    """Ways in which the tensor may be made of a function of earlier ones: of one, of one times another, or of two
    halves; itself, or multiplied by the module's weight."""
    weight = next((case.runs.reference[name] for name in (case.name.stem + ".weight:init", case.name.stem + ".weight")
                   if name in case.runs.reference), None)
    bias = case.runs.reference.get(case.name.stem + ".bias:init")
    ways: list[tuple[int, Array | None]] = [(case.shape[-1], None)]
    if weight is not None and weight.ndim == 2 and case.shape[-1] in weight.shape:
        right = weight.T if weight.shape[0] == case.shape[-1] else weight
        ways.append((right.shape[0], right.astype(np.float64)))
    added = np.zeros(1) if bias is None or bias.shape != case.shape[-1:] else bias.astype(np.float64)

    def of(name: str) -> Array:
        array = case.runs.reference[name]
        return array.reshape(-1, array.shape[-1])[rows].astype(np.float64)

    for width, right in ways:
        names = _inputs(case, width)
        for name in names:
            yield name, lambda f, swap, n=name: f(of(n)), right, added  # type: ignore[misc]
        for a, b in itertools.permutations(names[:4], 2):
            yield f"{a} times {b}", lambda f, swap, a=a, b=b: f(of(b)) * of(a) if swap else f(  # type: ignore[misc]
                of(a)) * of(b), right, added
        for name in _inputs(case, 2 * width)[:3]:
            for first in (0, 1):
                yield f"halves of {name}", lambda f, swap, n=name, k=first: (  # type: ignore[misc]
                    lambda h: f(h[k != swap]) * h[k == swap])(np.split(of(n), 2, -1)), right, added


def _activations(case: Case) -> typing.Iterator[Pattern]:
    """Another function of what the module reads, where the dump has that."""
    if case.name.kind != "fwd" or len(case.shape) < 2 or case.shape != full_shape(case) or case.shape[-1] < FEW:
        return
    few = slice(0, ROWS)
    ref, val = (x.reshape(-1, case.shape[-1])[few] for x in (case.ref, case.val))
    if not np.isfinite(val).all() or not ref.any():
        return

    def out(h: Array, right: Array | None, added: Array) -> Array:
        return h if right is None else h @ right + added

    functions = list(FUNCTIONS.items())
    for number, (name, gates, right, added) in enumerate(_gated(case, few)):
        made = {f: out(gates(g, False), right, added) for f, g in functions}
        wanted = min(made, key=lambda f: float(np.abs(made[f] - ref).max()))
        if not _near(case, made[wanted], ref) or wanted == "the identity" and " " not in name:
            continue
        numbers = {"input": name, "wanted": wanted}
        whole = next(way for i, way in enumerate(_gated(case, slice(None))) if i == number)
        for swap in (False, True):
            made = {f: out(gates(g, swap), right, added) for f, g in functions}
            found = min(made, key=lambda f: float(np.abs(made[f] - val).max()))
            if _near(case, made[found], val) and (swap or found != wanted):
                expected = out(whole[1](FUNCTIONS[found], swap), right, added).reshape(case.shape)
                yield Pattern(EXCHANGED if swap else ACTIVATION, expected, numbers | {"function": found})
                return
        return


# --- rounding ---------------------------------------------------------------------------------------------------------


def _rounding(case: Case) -> typing.Iterator[Pattern]:
    """Differences of the size of rounding: a statement of size, which all others go before."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(case.val - case.ref)
    if not np.isfinite(gap).all() or not gap.any():
        return
    largest = float(gap.max() / case.scale) if case.scale > 0.0 else math.inf
    if (gap <= case.rounding(case.ref)).all():
        yield Pattern(ROUNDING, case.val, {"largest": largest}, _ALWAYS)
        return
    size = math.sqrt(float(np.square(gap).sum() / max(float(np.square(case.ref).sum()), 1e-300)))
    along = abs(float(((case.val - case.ref) * case.ref).sum())) / max(float(np.square(case.ref).sum()), 1e-300)
    if case.ref.size >= 64 and 2.0 ** -13 < size < 2.0 ** -7 and along < 0.2 * size and largest < 16.0 * size:
        yield Pattern(COARSE, case.val, {"size": size}, 2 * _ALWAYS)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    index = sample_of(case.ref.size)
    if case.reference.dtype.kind == "f":
        yield from _formats(case, index)
        yield from _quantised(case)
        yield from _limits(case)
        yield from _norm_of_cut(case)
        yield from _simple(case, index)
        yield from _activations(case)
        yield from _rounding(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _dtypes_differ(case: Case, pattern: Pattern) -> bool:
    """Whether a format is recorded that one run alone has, and numerics are not exact."""
    a, b = case.runs.facts
    return not case.runs.exact and a.recorded and b.recorded and (a.autocast != b.autocast or a.dtypes != b.dtypes)


def _is_gradient(case: Case, pattern: Pattern) -> bool:
    return case.name.kind in ("grad", "clip", "m")


_CAST = "casts on the way: autocast, `param_dtype`, `reduce_dtype`, communication in 16 bits"
CAUSES = (
    Cause("fewer_bits", (ROUNDED,), "the reference rounded to {format}: it is stored or sent in it on the way", _CAST),
    Cause("fewer_bits", (TRUNCATED,), "the reference cut off, not rounded, to {format}", _CAST),
    Cause("fewer_bits", (BITS,), "every value has a mantissa of {bits} bits and the reference's have more: computed, "
          "stored or sent in {format}", _CAST),
    Cause("quantised", (STEPS,), "quantised to {format}, with a scale for {of}", "quantised weights or communication"),
    Cause("clipped", (LIMITED,), "clipped by value, {limits}: {cut} elements of the gradients are cut off",
          "`clip_grad_value_`", _is_gradient),
    Cause("values_limited", (LIMITED,), "limited to {limits}: {cut} elements are cut off, and all others are right",
          "a clamp", lambda case, pattern: pattern.numbers["cut"] >= FEW and case.name.kind not in ("init", "m", "v")),
    Cause("activation_function", (ACTIVATION,), "these values are {function} of {input}, and the reference's {wanted}",
          "the activation function, gelu's tanh form"),
    Cause("activation_arguments", (EXCHANGED,), "these values are {function} of the other argument of {input}: gate "
          "and up are exchanged", "the order of gate and up in a packed weight, and of the arguments"),
    Cause("other_function", (FUNCTION,), "{of} is mapped: {function} is what the other has",
          "a function applied once more or left out",
          lambda case, pattern: case.name.stem.partition(".")[0] != "input"),
    Cause("rounding", (ROUNDING,), "rounding: the largest difference is {largest} of the largest value, as sums in "
          "another order leave it"),
    Cause("small_change", (ROUNDING,), "small, in no pattern, and the bits of exact numerics do not depend on the "
          "order of sums: the largest difference is {largest} of the largest value", "sums outside of exact "
          "numerics (atomic additions, code of one's own), parts that are rounded before they are summed, a value that "
          "changed on its way",
          lambda case, pattern: case.runs.exact),
    Cause("low_precision", (COARSE,), "rounding of low precision: the difference is {size} of the values, and the runs "
          "have other formats", "autocast, TF32, types of parameters", _dtypes_differ),
)
