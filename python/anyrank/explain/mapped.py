# SPDX-License-Identifier: Apache-2.0
"""An elementwise map of the reference: another format, fewer steps, limits, another function."""

from __future__ import annotations

import functools
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, kinds
from anyrank.explain.known import at_elements, earlier, formats_apart, full_shape, sample_of, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.attention import best_of
from anyrank.explain.replay.sources import parameter
from anyrank.explain.tensors import Array, Case, Name

ROUNDED, STEPS, LIMITED, FUNCTION, ACTIVATION, CAPPED, ROUNDING, COARSE = (
    "rounded", "steps", "limited", "function", "other_activation", "capped", "rounding", "coarse_rounding")
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
        step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - bits + 1)
        result: Array = np.clip((np.trunc(x / step) if cut else np.rint(x / step)) * step, -largest, largest)
    return result


def _formats(case: Case, index: Array) -> typing.Iterator[Pattern]:
    """The reference in another format; or values that this format has, where they were computed in it."""
    val, ref = case.val.reshape(-1)[index], case.ref.reshape(-1)[index]
    off = np.isfinite(val) & np.isfinite(ref) & (val != ref)
    for name, (bits, _, _) in FORMATS.items() if off.sum() >= FEW else ():
        unit = 2.0 ** -bits
        is_stored = unit == case.unit and np.array_equal(rounded(ref, name), val)  # by one run alone
        if (unit <= 2.0 * case.unit and not is_stored) or not np.array_equal(rounded(val[off], name), val[off]) or (
                np.array_equal(rounded(ref, name), ref)):
            continue
        yield Pattern(ROUNDED, rounded(case.ref, name), {
            "how": f"the reference rounded to {name}: it is stored or sent in it on the way"})
        yield Pattern(ROUNDED, rounded(case.ref, name, True), {"how": f"the reference cut off, not rounded, to {name}"})
        if np.linalg.norm((val - ref)[off]) <= 32.0 * unit * np.linalg.norm(ref[off]):
            yield Pattern(ROUNDED, rounded(case.val, name), {
                "how": f"every value has a mantissa of {bits - 1} bits and the reference's have more: computed, "
                f"stored or sent in {name}"}, fitted=3)
        return


def _blocks(case: Case) -> typing.Iterator[tuple[str, tuple[int, ...], int]]:
    """Shapes to look at a tensor in, and the axis that one step is for."""
    size, last = case.ref.size, case.shape[-1] if case.shape else 1
    yield "the tensor", (1, size), 1
    if len(case.shape) > 1:
        yield "each row", (size // last, last), 1
        yield "each column", (size // last, last), 0
    yield from ((f"each block of {n}", (size // n, n), 1) for n in (16, 32, 64, 128, 256) if last % n == 0 and last > n)


def _integers(x: Array, axis: int, bits: int, low: bool) -> Array:
    """Rounded to 2^bits steps of each row's largest value, or from its least to its largest (low)."""
    least = np.minimum(x.min(axis, keepdims=True), 0.0) if low else np.zeros(1)
    step = (np.maximum(x.max(axis, keepdims=True), 0.0) - least) / (2 ** bits - 1) if low else (
        np.abs(x).max(axis, keepdims=True) / (2 ** (bits - 1) - 1))
    step = np.where(step > 0.0, step, 1.0)
    zero = np.rint(-least / step)
    result: Array = (np.rint(x / step + zero) - zero) * step
    return result


def _scaled_format(x: Array, axis: int, name: str) -> Array:
    scale = np.abs(x).max(axis, keepdims=True) / FORMATS[name][2]
    scale = np.where(scale > 0.0, scale, 1.0)
    result: Array = rounded(x / scale, name) * scale
    return result


QUANTISED: dict[str, typing.Callable[[Array, int], Array]] = {
    **{f"int{bits}{' from least to largest' * low}": functools.partial(_integers, bits=bits, low=low)
       for bits in (8, 4) for low in (False, True)},
    **{name: functools.partial(_scaled_format, name=name) for name in ("fp8 e4m3", "fp8 e5m2")}}


def _quantised(case: Case) -> typing.Iterator[Pattern]:
    """Integers and fp8 with a scale of the tensor, of rows, columns or blocks: few values in each."""
    if case.ref.size < 32 or not np.isfinite(case.ref).all() or not np.isfinite(case.val).all() or not (
            1e-5 < math.sqrt(float(np.square(case.val - case.ref).mean())) / max(case.scale, 1e-300) < 0.2):
        return
    ends = np.array([case.ref.argmin(), case.ref.argmax()])
    for of, shape, axis in _blocks(case):
        ref, val = case.ref.reshape(shape), case.val.reshape(shape)
        part: typing.Any = (slice(None), slice(0, 8)) if axis == 0 else (slice(0, 8), slice(None))
        if shape[0] == 1:  # a sample, with the least and the largest value
            part = (slice(None), np.concatenate([sample_of(shape[1]), ends]))
        near = 1e-4 * np.abs(ref[part]).max()
        for name, way in QUANTISED.items():
            if np.mean(np.abs(way(ref[part], axis) - val[part]) <= near) > 0.9:
                yield Pattern(STEPS, way(ref, axis).reshape(case.shape), {"format": name, "of": of})
                return
        if _multiples(ref[part], val[part], axis):
            yield Pattern(STEPS, case.val, {"format": "an integer format", "of": of}, fitted=3)
            return


def _multiples(ref: Array, val: Array, axis: int) -> bool:
    """Whether the values of each row are multiples of one step, within one step of the reference, and few."""
    for own, x in list(zip(ref.T, val.T) if axis == 0 else zip(ref, val))[:8]:
        steps, count = np.diff(np.unique(np.abs(x))), np.unique(x).size
        step = steps.min(where=steps > 1e-6 * np.abs(x).max(), initial=np.inf)
        if x.size < 16 or not math.isfinite(step) or count > min(256, 0.8 * np.unique(own).size) or (
                np.abs(x / step - np.rint(x / step)).max() > 0.02) or np.abs(x - own).max() > 1.01 * step:
            return False
    return True


# --- limits and functions ---------------------------------------------------------------------------------------------


def _limits(case: Case) -> typing.Iterator[Pattern]:
    """Values cut off at a largest or least one, which several have."""
    off = case.off & np.isfinite(case.val) & np.isfinite(case.ref)
    val, ref = case.val[off], case.ref[off]
    if len(val) < 3 or not val.any() or any(np.ptp(x) > 1e-6 * np.abs(x).max() for x in (val[ref > val], val[ref < val])
                                            if x.size):
        return
    top, bottom = val[ref > val].max(initial=-math.inf), val[ref < val].min(initial=math.inf)
    both = [f"at least {bottom:.4g}"] * bool(np.isfinite(bottom)) + [f"at most {top:.4g}"] * bool(np.isfinite(top))
    expected = np.clip(case.ref, bottom if np.isfinite(bottom) else -math.inf, top if np.isfinite(top) else math.inf)
    yield Pattern(LIMITED, expected, {"limits": " and ".join(both), "cut": len(val)}, fitted=1)


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
SIMPLE: dict[str, Map] = {"absolute value": np.abs, "square": np.square, "square root": np.sqrt,
                          "exponential": np.exp, "logarithm": np.log, "reciprocal": lambda x: 1.0 / x,
                          "tanh": np.tanh, "sigmoid": _sigmoid, "relu": lambda x: np.maximum(x, 0.0),
                          "difference from 1": lambda x: 1.0 - x}


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
                yield Pattern(FUNCTION, f(case.ref), {"how": f"these values are the reference's {name}"})
            elif _near(case, f(val), ref) and np.ptp(val) > 0.0:
                yield Pattern(FUNCTION, case.val + (case.ref - f(case.val)), {
                    "how": f"the reference has these values' {name}"}, fitted=2)


Gates = typing.Callable[[Map, bool, slice], Array]  # of a function, with its arguments exchanged or not, of rows


def _gated(case: Case, width: int) -> typing.Iterator[tuple[str, Gates]]:
    """Ways in which so many features may be made of a function of earlier tensors: of one, of one times another, or of
    two halves."""
    def of(name: str, rows: slice) -> Array:
        array: Array = case.runs.reference[name]
        return array.reshape(-1, array.shape[-1])[rows].astype(np.float64)

    def named(features: int) -> list[str]:
        return [name for name in earlier(case) if Name.of(name).kind == "fwd" and Name.of(name).step == case.name.step
                and shape_of(case.runs.reference, name) == (*case.shape[:-1], features)][:INPUTS]

    def one(f: Map, swap: bool, rows: slice, name: str) -> Array:
        return f(of(name, rows))

    def two(f: Map, swap: bool, rows: slice, a: str, b: str) -> Array:
        result: Array = f(of(b if swap else a, rows)) * of(a if swap else b, rows)
        return result

    def halves(f: Map, swap: bool, rows: slice, name: str, first: int) -> Array:
        parts = np.split(of(name, rows), 2, -1)
        result: Array = f(parts[first != swap]) * parts[first == swap]
        return result

    names = named(width)
    yield from ((name, functools.partial(one, name=name)) for name in names)
    yield from ((f"{a} times {b}", functools.partial(two, a=a, b=b)) for a, b in itertools.permutations(names[:4], 2))
    yield from ((f"halves of {name}", functools.partial(halves, name=name, first=first))
                for name in named(2 * width)[:3] for first in (0, 1))


def _capped(case: Case, index: Array) -> typing.Iterator[Pattern]:
    """An earlier tensor limited smoothly, c tanh(x / c), by another number or not at all."""
    ref, val = case.ref.reshape(-1)[index], case.val.reshape(-1)[index]
    fits = case.name.kind == "fwd" and len(val) >= FEW and bool(np.isfinite(val).all())
    for name in earlier(case)[:INPUTS] if fits else ():
        x = at_elements(case, case.runs.reference[name], index)
        if x is None or not x.any() or name not in case.runs.same:
            continue
        caps = []
        for y in (ref, val):
            def error(c: float, x: Array = x, y: Array = y) -> float:
                return float(np.linalg.norm(c * np.tanh(x / c) - y) / np.linalg.norm(x))

            c, apart = best_of(error, 1e-2 * np.abs(x).max(), 1e4 * np.abs(x).max())
            caps.append(c if apart < max(1e-6, case.unit) else 0.0)
        whole = at_elements(case, case.runs.reference[name])
        if all(caps) and whole is not None and abs(caps[0] / caps[1] - 1.0) > 1e-3:
            of = [f"{c:.4g}" if c < 1e3 * np.abs(x).max() else "none" for c in caps]
            yield Pattern(CAPPED, caps[1] * np.tanh(whole / caps[1]), {"name": name, "was": of[0], "now": of[1]}, 1)
            return


def _made(gates: Gates, matrix: Array | None, added: Array | float, f: str, swap: bool, rows: slice) -> Array:
    h = gates(FUNCTIONS[f], swap, rows)
    result: Array = h if matrix is None else h @ matrix + added
    return result


def _nearest(case: Case, make: typing.Callable[[str, bool, slice], Array], swap: bool, values: Array) -> str:
    """The function that gives the first rows of the values; "": none does."""
    made = {f: make(f, swap, slice(0, ROWS)) for f in FUNCTIONS}
    f = min(made, key=lambda f: float(np.abs(made[f] - values).max()))
    return f if _near(case, made[f], values) else ""


def _activations(case: Case) -> typing.Iterator[Pattern]:
    """Another function of what the module reads, itself or multiplied by the module's weight."""
    if case.name.kind != "fwd" or len(case.shape) < 2 or case.shape != full_shape(case) or case.shape[-1] < FEW:
        return
    ends = case.shape[-1]
    ref, val = (x.reshape(-1, ends)[:ROWS] for x in (case.ref, case.val))
    if not np.isfinite(val).all() or not ref.any():
        return
    weight, bias = (parameter(case, f"{case.name.stem}.{leaf}") for leaf in ("weight", "bias"))
    matrices: list[Array | None] = [None]
    if weight is not None and weight.ndim == 2 and ends in weight.shape:
        matrices.append((weight.T if weight.shape[0] == ends else weight).astype(np.float64))
    added: Array | float = 0.0 if bias is None or bias.shape != (ends,) else bias.astype(np.float64)
    for matrix in matrices:
        for name, gates in _gated(case, ends if matrix is None else len(matrix)):
            make = functools.partial(_made, gates, matrix, added)
            wanted = _nearest(case, make, False, ref)
            for swap in (False, True) if wanted and (wanted != "the identity" or " " in name) else ():
                found = _nearest(case, make, swap, val)
                if found and (swap or found != wanted):
                    how = f"{found} of {'the other argument of ' * swap}{name}, and the reference's {wanted}"
                    yield Pattern(ACTIVATION, make(found, swap, slice(None)).reshape(case.shape), {
                        "how": f"these values are {how}"})
                    return


# --- rounding ---------------------------------------------------------------------------------------------------------


def _rounding(case: Case) -> typing.Iterator[Pattern]:
    """Differences of the size of rounding: a statement of size, which all others go before."""
    with np.errstate(invalid="ignore"):
        gap = case.val - case.ref
    if not np.isfinite(gap).all() or not gap.any():
        return
    largest = float(np.abs(gap).max() / case.scale) if case.scale > 0.0 else math.inf
    if (np.abs(gap) <= case.rounding(case.ref)).all():
        yield Pattern(ROUNDING, case.val, {"largest": largest}, _ALWAYS)
        return
    square = max(float(np.square(case.ref).sum()), 1e-300)
    size, along = math.sqrt(float(np.square(gap).sum()) / square), abs(float((gap * case.ref).sum())) / square
    if case.ref.size >= 64 and 2.0 ** -13 < size < 2.0 ** -7 and along < 0.2 * size and largest < 16.0 * size:
        yield Pattern(COARSE, case.val, {"size": size}, 2 * _ALWAYS)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    index = sample_of(case.ref.size)
    if case.reference.dtype.kind == "f":
        yield from _formats(case, index)
        yield from _quantised(case)
        yield from _limits(case)
        yield from _simple(case, index)
        yield from _activations(case)
        yield from _capped(case, index)
        yield from _rounding(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _formats_differ(case: Case, pattern: Pattern) -> bool:
    return not case.runs.exact and bool(formats_apart(case))


CAUSES = (
    Cause("fewer_bits", (ROUNDED,), "{how}", "casts on the way: autocast, `param_dtype`, `reduce_dtype`, communication "
          "in 16 bits"),
    Cause("quantised", (STEPS,), "quantised to {format}, with a scale for {of}", "quantised weights or communication"),
    Cause("clipped", (LIMITED,), "clipped by value, {limits}: {cut} elements of the gradients are cut off",
          "`clip_grad_value_`", kinds("grad", "m")),
    Cause("clipped", (LIMITED,), "limited, {limits}: {cut} elements are cut off, and all others are right",
          "a clamp", lambda case, pattern: pattern.numbers["cut"] >= FEW and case.name.kind not in ("init", "v")),
    Cause("activation_function", (ACTIVATION,), "{how}", "the activation function, gelu's tanh form; the order of gate "
          "and up in a packed weight, and of the arguments"),
    Cause("activation_function", (FUNCTION,), "{how}", "a function applied once more or left out",
          lambda case, pattern: case.name.stem.partition(".")[0] != "input"),
    Cause("softcap", (CAPPED,), "{name} is limited smoothly by {now}, in the reference by {was}", "the cap of logits "
          "or scores, as final_logit_softcapping"),
    Cause("rounding", (ROUNDING,), "rounding: the largest difference is {largest} of the largest value, as sums in "
          "another order leave it"),
    Cause("small_change", (ROUNDING,), "small, in no pattern, and the bits of exact numerics do not depend on the "
          "order of sums: the largest difference is {largest} of the largest value", "sums outside of exact "
          "numerics (atomic additions, code of one's own), parts that are rounded before they are summed, a value that "
          "changed on its way",
          lambda case, pattern: case.runs.exact),
    Cause("low_precision", (COARSE,), "rounding of low precision: the difference is {size} of the values, and the runs "
          "have other formats", "autocast, TF32, types of parameters", _formats_differ),
)
