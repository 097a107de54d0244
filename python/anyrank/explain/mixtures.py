# SPDX-License-Identifier: Apache-2.0
"""A norm, or a linear layer, of another sum of the run's tensors: which terms there are, with which coefficients."""

from __future__ import annotations

import itertools
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.combined import coefficients, is_scaled, sum_text
from anyrank.explain.joined import parameter
from anyrank.explain.known import full_shape, is_norm, order, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name

READS, OF_THIS_RUN = "reads another sum", " of this run"
NEAREST, FIRST, TERMS = 8, 4, 3
ROWS = 64         # that are looked at
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
Mixture = typing.Mapping[int, float]  # a coefficient of each term
Named = typing.Sequence[tuple[str, Array]]


def _terms(case: Case, width: int, later: bool) -> Named:
    """The step's activations of the same tokens, [tokens, width], of copies one: the nearest, and the first ones;
    later: also those that the reference computes after it, as this run has them."""
    known, other, at = case.runs.reference, case.runs.other, order(case)
    names = [name for name in at if Name.of(name).kind == "fwd" and Name.of(name).step == case.name.step
             and name != str(case.name) and shape_of(known, name) == (*case.shape[:-1], width)]
    here = sum(at[name] < at.get(str(case.name), len(at)) for name in names)
    before, after = names[:here][::-1], [name for name in names[here:] if name in other and shape_of(
        other, name) == shape_of(known, name)]
    found: list[tuple[str, Array]] = []
    for name, source in (*((name, known) for name in dict.fromkeys([*before[:NEAREST], *before[-FIRST:]])),
                         *((name, other) for name in after[:FIRST * later])):
        x: Array = source[name].reshape(-1, width).astype(np.float64)
        if np.isfinite(x).all() and x.any() and not any(np.array_equal(x, y) for _, y in found):
            found.append((name if source is known else name + OF_THIS_RUN, x))
    return found


def _sum(named: Named, has: Mixture) -> Array:
    return typing.cast(Array, sum(x * named[i][1] for i, x in has.items()))


def _scaled(mixture: Mixture, k: int, to: float = 1.0) -> Mixture:
    """The same up to a factor, by which term k has this coefficient."""
    return {i: snapped(x / mixture[k] * to, 1e-4) for i, x in mixture.items()}


def _along(y: Array, terms: typing.Sequence[Array], near: float) -> Mixture | None:
    """The fewest terms of which each row of y is a multiple of one sum: it has no part that is not along the row."""
    unit = y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-300)
    flat = np.stack([t - unit * (unit * t).sum(1, keepdims=True) for t in terms]).reshape(len(terms), -1)
    across, sizes = flat @ flat.T, np.array([np.linalg.norm(t) for t in terms])
    for some in (some for size in range(1, TERMS + 1) for some in itertools.combinations(range(len(terms)), size)):
        at = np.array(some)
        values, vectors = np.linalg.eigh(across[np.ix_(at, at)] / np.outer(sizes[at], sizes[at]))
        shares = np.abs(vectors[:, 0])
        apart = values[1:2].sum() >= min(1e3 * near, 0.05) and shares.min() >= 1e-3 * shares.max()
        if values[0] <= near and (len(at) == 1 or apart):
            c = vectors[:, 0] / sizes[at]
            sign = np.sign(float((sum(x * terms[i] for i, x in zip(some, c)) * y).sum())) or 1.0
            return {i: float(sign * x) for i, x in zip(some, c.tolist())}
    return None


def _normed(x: Array, gain: Array, shift: Array, centred: bool, eps: float) -> Array:
    x = x - x.mean(-1, keepdims=True) if centred else x
    result: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * gain + shift
    return result


def _norms(case: Case, weight: Array, shift: Array, rows: Array) -> typing.Iterator[Pattern]:
    width = case.shape[-1]
    named, near = _terms(case, width, True), max(1e-10, (8.0 * case.unit) ** 2)
    for gain in (weight, 1.0 + weight) if len(named) > 1 and weight.any() else ():
        if (gain == 0.0).any():
            continue
        y, z = ((of.reshape(-1, width) - shift) / gain for of in (case.ref, case.val))
        centred = bool(np.abs(y.mean(1)).max() < 1e-4 * np.abs(y).max() + 2.0 * case.unit)
        terms = [t[rows] - t[rows].mean(1, keepdims=True) if centred else t[rows] for _, t in named]
        has, other = _along(y[rows], terms, near), _along(z[rows], terms, near)
        if has is None or other is None:
            continue

        def made(way: Mixture, eps: float) -> Array:
            return _normed(_sum(named, way), gain, shift, centred, eps).reshape(case.shape)  # noqa: B023

        wanted, eps = min(((_scaled(has, k), e) for k in has for e in EPSILONS),
                          key=lambda way: float(np.abs(made(*way) - case.ref).max()))
        kept = [k for k in other if k in wanted] or list(other)
        found = min((_scaled(other, k, wanted.get(k, 1.0)) for k in kept),
                    key=lambda way: float(np.abs(made(way, eps) - case.val).max()))
        yield _pattern("the norm of", made(found, eps), named, wanted, found, {*wanted} == {*found})
        return


def _linear(case: Case, weight: Array, bias: Array, rows: Array) -> typing.Iterator[Pattern]:
    """A product of the module's weight with another sum."""
    right = weight.T if weight.shape[0] == case.shape[-1] else weight
    named = _terms(case, right.shape[0], False)
    if len(named) < 2:
        return
    table = np.stack([(t[rows] @ right).reshape(-1) for _, t in named])
    has = []
    for x in (case.ref, case.val):
        y = (x.reshape(-1, case.shape[-1])[rows] - bias).reshape(-1)
        found = coefficients(table @ table.T, table @ y, float(y @ y), max(1e-11, (8.0 * case.unit) ** 2))
        if found is None:
            return
        has.append({i: snapped(float(c), 1e-4) for i, c in zip(*found)})
    if max(map(len, has)) > 1:
        expected = (_sum(named, has[1]) @ right + bias).reshape(case.shape)
        yield _pattern("the product of the weight with", expected, named, has[0], has[1], is_scaled(*has),
                       _modulated(case, named, *has))


def _modulated(case: Case, named: Named, wanted: Mixture, found: Mixture) -> str:
    """Of x and x - t or x + t: what is said where x is t times a number of each sample and feature, plus another."""
    more = [k for k in found if k not in wanted]
    if (len(wanted), len(found), len(more)) != (1, 2, 1) or abs(found[more[0]]) != 1.0 or case.shape[-2] < 4:
        return ""
    x, t = (y - y.mean(1, keepdims=True) for y in (
        named[k][1].reshape(case.shape[0], case.shape[-2], -1) for k in (*wanted, *more)))
    along = np.abs((x * t).sum(1)) >= 0.9999 * np.sqrt((x * x).sum(1) * (t * t).sum(1))
    now, was = ("s", "1 + s")[::int(-found[more[0]])]
    said = f"{now} times {named[more[0]][0]} plus a shift, where the reference has {was} times it"
    return said if along.all() else ""


def _pattern(what: str, expected: Array, named: Named, wanted: Mixture, found: Mixture, kept: bool,
             scale: str = "") -> Pattern:
    names = [name for name, _ in named]
    numbers = {"what": what, "reference": sum_text(wanted, names), "other": sum_text(found, names), "kept": kept,
               "wanted": [names[i] for i in wanted], "shared": bool({*wanted} & {*found}), "scale": scale,
               "later": any(names[i].endswith(OF_THIS_RUN) for i in found),
               "more": all(found.get(i) == x for i, x in wanted.items())}
    return Pattern(READS, expected, numbers, sum(not float(12 * x).is_integer() for x in found.values()), 2)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    width = case.shape[-1] if len(case.shape) > 1 else 0
    if case.name.kind != "fwd" or width < 4 or case.shape != full_shape(case) or not (
            np.isfinite(case.val).all() and np.isfinite(case.ref).all()):
        return
    weight, bias = parameter(case, "weight"), parameter(case, "bias")
    bias = bias if bias is not None and bias.shape == (width,) else np.zeros(width)
    rows: Array = np.unique(np.linspace(0, case.ref.size // width - 1, min(case.ref.size // width, ROWS)).astype(int))
    if weight is not None and weight.shape == (width,):
        yield from _norms(case, weight, bias, rows)
    elif weight is not None and weight.ndim == 2 and width in weight.shape:
        yield from _linear(case, weight, bias, rows)


# --- causes -----------------------------------------------------------------------------------------------------------


def _norm_left_out(case: Case, pattern: Pattern) -> bool:
    wanted = pattern.numbers["wanted"]
    return len(wanted) == 1 and is_norm(case, wanted[0]) and not (pattern.numbers["shared"] or pattern.numbers["later"])


_OTHER = "{what} {other}, where the reference reads {reference}: "
CAUSES = (
    Cause("norm_gain", (READS,), "what the module reads is {scale}, with numbers s of each sample and feature",
          "the 1 in `x * (1 + scale) + shift`, where a condition modulates a norm", has(scale=bool)),
    Cause("other_input", (READS,), _OTHER + "it comes after this branch and not before it", "pre-norm against "
          "post-norm: where the norm is called", has(later=True, more=True)),
    Cause("residual_scale", (READS,), _OTHER + "a term has another factor", "the scale of the branch or of the "
          "stream, the multiplier of embeddings, an adapter's alpha over its rank", has(kept=True, later=False)),
    Cause("norm_missing", (READS,), _OTHER + "the norm is left out", "the call of the norm", _norm_left_out),
    Cause("residual", (READS,), _OTHER + "other terms are added", "the addition before the layer",
          lambda case, pattern: not pattern.numbers["later"] and (
              bool(pattern.numbers["shared"]) or pattern.numbers["what"] == "the norm of")),
)
