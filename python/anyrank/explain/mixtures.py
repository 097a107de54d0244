# SPDX-License-Identifier: Apache-2.0
"""A norm, or a linear layer, of another sum of the run's tensors: which terms there are, with which coefficients."""

from __future__ import annotations

import itertools
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.combined import coefficients, is_embedding, is_scaled, sum_text
from anyrank.explain.known import earlier, full_shape, is_norm, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name

NORM, LINEAR = "norm_of_other_sum", "linear_of_other_sum"
NEAREST, FIRST, TERMS = 8, 4, 3
ROWS = 64         # that are looked at
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
Mixture = typing.Mapping[int, float]  # a coefficient of each term


def _terms(case: Case, width: int) -> list[str]:
    """Names of the step's activations of the same tokens, with so many features: the nearest, and the first ones."""
    runs = case.runs
    names = [name for name in earlier(case) if Name.of(name).kind == "fwd" and Name.of(name).step == case.name.step
             and shape_of(runs.reference, name) == (*case.shape[:-1], width)]
    return list(dict.fromkeys([*names[:NEAREST], *names[-FIRST:]]))


def _values(case: Case, names: typing.Iterable[str]) -> list[tuple[str, Array]]:
    """Terms in binary64, those that are another's copy left out."""
    found: list[tuple[str, Array]] = []
    for name in names:
        x: Array = case.runs.reference[name].reshape(-1, shape_of(case.runs.reference, name)[-1]).astype(np.float64)
        if np.isfinite(x).all() and x.any() and not any(np.array_equal(x, y) for _, y in found):
            found.append((name, x))
    return found


def _parameter(case: Case, name: str) -> Array | None:
    step = case.name.step
    for kind in ("init", "weight") if step == 1 else ("new",):
        found = case.runs.reference.get(str(Name(f"{case.name.stem}.{name}", kind, max(step - 1, 1))))
        if found is not None:
            values: Array = found.astype(np.float64)
            return values
    return None


def _some(count: int) -> Array:
    result: Array = np.unique(np.linspace(0, count - 1, min(count, ROWS)).astype(int))
    return result


# --- norms ------------------------------------------------------------------------------------------------------------


def _directions(y: Array, terms: typing.Sequence[Array]) -> Array:
    """Products of the terms' parts that are not along each row of y: a mixture that is a multiple of y in each row has
    no such part."""
    unit = y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-300)
    across = np.stack([t - unit * (unit * t).sum(1, keepdims=True) for t in terms])
    flat = across.reshape(len(terms), -1)
    result: Array = flat @ flat.T
    return result


def _mixture(y: Array, terms: typing.Sequence[Array], near: float) -> Mixture | None:
    """The fewest terms of which each row of y is a multiple of one sum; the largest coefficient is 1."""
    across = _directions(y, terms)
    squares = np.array([float((t * t).sum()) for t in terms])
    for size in range(1, TERMS + 1):
        for some in itertools.combinations(range(len(terms)), size):
            at = np.array(some)
            scale = np.sqrt(squares[at])
            values, vectors = np.linalg.eigh(across[np.ix_(at, at)] / np.outer(scale, scale))
            if values[0] > near or (size > 1 and values[1] < 1e3 * near):
                continue
            c = vectors[:, 0] / scale
            c = c / c[np.argmax(np.abs(c) * scale)]
            if size > 1 and np.abs(c * scale).min() < 1e-3 * scale.max() * np.abs(c).max():
                continue
            total = sum(x * terms[i] for i, x in zip(some, c))
            sign = np.sign(float((np.asarray(total) * y).sum())) or 1.0
            return {i: float(sign * x) for i, x in zip(some, c.tolist())}
    return None


def _normed(x: Array, gain: Array, shift: Array, centred: bool, eps: float) -> Array:
    x = x - x.mean(-1, keepdims=True) if centred else x
    result: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * gain + shift
    return result


def _norms(case: Case) -> typing.Iterator[Pattern]:
    width = case.shape[-1]
    weight, bias = _parameter(case, "weight"), _parameter(case, "bias")
    if weight is None or weight.shape != (width,) or not weight.any():
        return
    shift = bias if bias is not None and bias.shape == (width,) else np.zeros(width)
    named = _values(case, _terms(case, width))
    if len(named) < 2:
        return
    rows = _some(case.ref.size // width)
    near = max(1e-10, (8.0 * case.unit) ** 2)
    for gain in (weight, 1.0 + weight):
        if (gain == 0.0).any():
            continue
        y = (case.ref.reshape(-1, width) - shift) / gain
        centred = bool(np.abs(y.mean(1)).max() < 1e-4 * np.abs(y).max() + 2.0 * case.unit)
        z = (case.val.reshape(-1, width)[rows] - shift) / gain
        terms = [t[rows] - t[rows].mean(1, keepdims=True) if centred else t[rows] for _, t in named]
        wanted = _mixture(y[rows], terms, near)
        found = _mixture(z, terms, near) if wanted is not None else None
        if wanted is None or found is None:
            continue
        expected, found = _best(case, named, wanted, found, lambda x, eps: _normed(  # noqa: B023
            x, gain, shift, centred, eps).reshape(case.shape))
        yield _pattern(NORM, expected, [name for name, _ in named], wanted, found)
        return


def _sum(named: typing.Sequence[tuple[str, Array]], has: Mixture) -> Array:
    return typing.cast(Array, sum(x * named[i][1] for i, x in has.items()))


def _best(case: Case, named: typing.Sequence[tuple[str, Array]], wanted: Mixture, found: Mixture,
          norm: typing.Callable[[Array, float], Array]) -> tuple[Array, Mixture]:
    """What the mixture gives with the epsilon that fits the reference, on the scale on which a term is as there."""
    def off(x: Array, y: Array) -> float:
        return float(np.abs(x - y).max())

    ways = [{i: x / wanted[k] for i, x in wanted.items()} for k in wanted]
    scale, eps = min(((way, e) for way in ways for e in EPSILONS),
                     key=lambda w: off(norm(_sum(named, w[0]), w[1]), case.ref))
    wanted = {i: snapped(x, 1e-4) for i, x in scale.items()}
    kept = [k for k in found if k in wanted] or list(found)
    tries = [{i: snapped(x / found[k] * wanted.get(k, 1.0), 1e-4) for i, x in found.items()} for k in kept]
    best = min(tries, key=lambda way: off(norm(_sum(named, way), eps), case.val))
    return norm(_sum(named, best), eps), best


def _pattern(kind: str, expected: Array, names: typing.Sequence[str], wanted: Mixture, found: Mixture) -> Pattern:
    base = next((k for k in wanted if k in found), None)
    if kind == NORM and base is not None:
        wanted = {i: snapped(x * found[base] / wanted[base], 1e-4) for i, x in wanted.items()}
    changed = [i for i in {*wanted, *found}
               if abs(wanted.get(i, 0.0) - found.get(i, 0.0)) > 1e-3 * abs(wanted.get(i, 1.0))]
    kept = {*wanted} == {*found} if kind == NORM else is_scaled(wanted, found)
    numbers = {"reference": sum_text(wanted, names), "other": sum_text(found, names), "kept": kept,
               "changed": [names[i] for i in changed], "wanted": [names[i] for i in wanted],
               "terms": [names[i] for i in found]}
    fitted = sum(not float(12 * x).is_integer() for x in found.values())
    return Pattern(kind, expected, numbers, fitted, 2)


# --- linear layers ----------------------------------------------------------------------------------------------------


def _linear(case: Case) -> typing.Iterator[Pattern]:
    """A product of the module's weight with another sum."""
    weight, bias = _parameter(case, "weight"), _parameter(case, "bias")
    if weight is None or weight.ndim != 2 or case.shape[-1] not in weight.shape:
        return
    right = weight.T if weight.shape[0] == case.shape[-1] else weight
    added = bias if bias is not None and bias.shape == case.shape[-1:] else np.zeros(case.shape[-1])
    named = _values(case, _terms(case, right.shape[0]))
    if len(named) < 2:
        return
    rows = _some(case.ref.size // case.shape[-1])
    table = np.stack([(t[rows] @ right).reshape(-1) for _, t in named])
    gram, near = table @ table.T, max(1e-11, (8.0 * case.unit) ** 2)
    has = []
    for x in (case.ref, case.val):
        y = (x.reshape(-1, case.shape[-1])[rows] - added).reshape(-1)
        found = coefficients(gram, table @ y, float(y @ y), near)
        if found is None:
            return
        has.append({i: snapped(float(c), 1e-4) for i, c in zip(*found)})
    if max(len(has[0]), len(has[1])) > 1:
        expected = (_sum(named, has[1]) @ right + added).reshape(case.shape)
        yield _pattern(LINEAR, expected, [name for name, _ in named], has[0], has[1])


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "fwd" and len(case.shape) > 1 and case.shape == full_shape(case) and case.shape[-1] >= 4 and (
            np.isfinite(case.val).all() and np.isfinite(case.ref).all()):
        yield from _norms(case)
        yield from _linear(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _same_terms(case: Case, pattern: Pattern) -> bool:
    """Whether the sums share a term."""
    return bool({*pattern.numbers["wanted"]} & {*pattern.numbers["terms"]})


def _of_embedding(case: Case, pattern: Pattern) -> bool:
    changed = pattern.numbers["changed"]
    return len(changed) == 1 and bool(pattern.numbers["kept"]) and is_embedding(case, changed[0])


_OTHER = "{other}, where the reference reads {reference}"
CAUSES = (
    Cause("embedding_scale", (LINEAR,), "the product of the weight with " + _OTHER + ": the embedding's output is "
          "multiplied by another number", "the multiplier of embeddings", _of_embedding),
    Cause("residual_scale", (NORM,), "the norm of " + _OTHER + ": a term has another factor",
          "the scale of the branch or of the stream", lambda case, pattern: bool(pattern.numbers["kept"])),
    Cause("residual_scale", (LINEAR,), "the product of the weight with " + _OTHER + ": a term has another factor",
          "the scale of the branch, an adapter's alpha over its rank",
          lambda case, pattern: bool(pattern.numbers["kept"])),
    Cause("residual", (NORM,), "the norm of " + _OTHER + ": other terms are added", "the addition before the norm"),
    Cause("norm_missing", (LINEAR,), "the layer reads {other}, where the reference reads {reference}: the norm is left "
          "out", "the call of the norm", lambda case, pattern: len(pattern.numbers["wanted"]) == 1 and is_norm(
              case, pattern.numbers["wanted"][0]) and not _same_terms(case, pattern)),
    Cause("residual", (LINEAR,), "the product of the weight with " + _OTHER + ": other terms are added",
          "the addition before the layer", _same_terms),
)
