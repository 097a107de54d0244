# SPDX-License-Identifier: Apache-2.0
"""How a run's loss is made: a cross entropy of dumped logits. Which logits, labels and divisor give its value is tried,
not known by name; labels are dumped, or read from the gradient of the logits' input."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.tensors import Array, Case, Name

MOST, MOST_PRODUCTS = 1 << 22, 1 << 31  # elements of logits; products of a gradient with them
TRIED = 6  # tensors that may be the logits: the last before the loss
NEAR = 2e-6  # relative; a loss is a mean in fp32


@dataclasses.dataclass(frozen=True)
class Loss:
    """Rows of logits, the label of each and which are counted. rows: where each is within [samples, tokens]. smoothing,
    z: what the loss has besides. weights: of each row in the gradient; None: that is not known."""

    logits: Array  # [rows, classes]
    labels: Array  # [rows]; what is no class is not counted
    counted: Array
    rows: Array
    shape: tuple[int, int]
    smoothing: float = 0.0
    z: float = 0.0
    weights: Array | None = None

    def classes(self) -> Array:
        result: Array = np.where(self.counted, self.labels, 0)
        return result


def log_sum(logits: Array) -> Array:
    top = logits.max(-1)
    result: Array = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return result


def entropies(loss: Loss, logits: Array | None = None) -> Array:
    """What each row adds: -log p of its label, and what the loss has besides."""
    x = loss.logits if logits is None else logits
    lse = log_sum(x)
    taken = np.take_along_axis(x, loss.classes()[:, None], 1)[:, 0]
    result: Array = lse - (1.0 - loss.smoothing) * taken + loss.z * lse ** 2
    if loss.smoothing:  # of minus infinities there is no mean
        result -= loss.smoothing * x.mean(-1)
    return result


def mean(values: Array, counted: Array) -> float:
    return float(values[counted].sum() / counted.sum()) if counted.any() else math.nan


def shifted(logits: Array, labels: Array, by: int) -> Loss:
    """The row of a token takes the label `by` tokens on; rows without one are none."""
    samples, tokens = labels.shape
    rows = np.arange(samples * tokens).reshape(labels.shape)
    x = logits.reshape(samples, tokens, -1)
    if by > 0:
        x, y, rows = x[:, :-by], labels[:, by:], rows[:, :-by]
    elif by < 0:
        x, y, rows = x[:, -by:], labels[:, :by], rows[:, -by:]
    else:
        y = labels
    flat = y.ravel()
    return Loss(x.reshape(-1, x.shape[-1]), flat, (flat >= 0) & (flat < x.shape[-1]), rows.ravel(), (samples, tokens))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the reference's loss is made: of these logits and labels, `by` tokens on. factor: by how much it is more than
    the mean."""

    logits: str
    labels: str
    by: int
    loss: Loss
    all_labels: Array  # [samples, tokens]
    factor: float
    other: Loss | None = None  # the other run's, where its labels are read from gradients
    rest: float = 0.0  # what the loss has besides the cross entropy

    def value(self, x: float) -> float:
        return self.factor * x + self.rest


def integers(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """Integer inputs of the step, as [samples, tokens]."""
    for name in case.runs.reference:
        parsed = Name.of(name)
        if parsed.kind not in ("fwd", "buffer") or parsed.step != case.name.step or not parsed.stem.startswith("input"):
            continue
        array = case.runs.reference[name]
        if array.dtype.kind in "iu" and array.ndim in (1, 2) and array.size > 1:
            yield name, array.astype(np.int64).reshape(array.shape[0], -1)


def _candidates(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """Tensors that may be logits, the last of the step first."""
    names = [name for name in case.runs.reference if (n := Name.of(name)).kind == "fwd" and n.step == case.name.step]
    if str(case.name) in names:
        names = names[:names.index(str(case.name))]
    tried = 0
    for name in reversed(names):
        array = case.runs.reference[name]
        if array.ndim >= 2 and array.dtype.kind == "f" and array.size <= MOST and array.shape[-1] > 1:
            tried += 1
            yield name, array
        if tried == TRIED:
            return


def recipe_of(case: Case, value: float) -> Recipe | None:
    """The logits, labels and divisor that give a value; None: none do."""
    for (name, array), (label_name, labels) in itertools.product(list(_candidates(case)), list(integers(case))):
        if array.size // array.shape[-1] != labels.size or labels.max() >= array.shape[-1]:
            continue
        for by in (1, 0, 2):
            if by < labels.shape[1]:
                loss = shifted(array.astype(np.float64).reshape(labels.size, -1), labels, by)
                factor = _factor(loss, value)
                if factor:
                    return Recipe(name, label_name, by, loss, labels, factor, recovered(case, name, True))
    for name, array in _candidates(case):
        read = recovered(case, name, False)
        factor = _factor(read, value) if read is not None else 0.0
        if read is not None and (factor or _is_mean(read)):
            grid = np.where(read.counted, read.labels, -1).reshape(read.shape)
            rest = 0.0 if factor else value - mean(entropies(read), read.counted)
            return Recipe(name, "gradients", 0, read, grid, factor or 1.0, recovered(case, name, True), rest)
    return _by_ids(case, value)


def _by_ids(case: Case, value: float) -> Recipe | None:
    """Ids as labels, of the tokens whose gradients are not zero; with a z-loss where that gives a round number."""
    for (name, array), (label_name, labels) in itertools.product(list(_candidates(case)), list(integers(case))):
        if array.size // array.shape[-1] != labels.size or labels.max() >= array.shape[-1]:
            continue
        for by in (1, 0):
            loss = shifted(array.astype(np.float64).reshape(labels.size, -1), labels, by)
            mine = _counted(case, loss, case.runs.reference)
            if mine is None or not mine.counted.any():
                continue
            factor = _factor(mine, value)
            square = mean(log_sum(mine.logits) ** 2, mine.counted)
            z = (value - mean(entropies(mine), mine.counted)) / square
            if not factor and 0.0 < z < 0.1 and abs(float(f"{z:.1g}") / z - 1.0) < 1e-3:
                mine = dataclasses.replace(mine, z=float(f"{z:.1g}"))
                factor = _factor(mine, value)
            if factor:
                other = _counted(case, loss, case.runs.other)
                full = _grid(other) if other is not None else None
                return Recipe(name, label_name, by, mine, labels, factor, full)
    return None


def _counted(case: Case, loss: Loss, run: typing.Mapping[str, Array]) -> Loss | None:
    """The loss of the rows that have a gradient in a run, by the tensor with fewest of the first ones."""
    best: Array | None = None
    names = [name for name in run if (n := Name.of(name)).kind == "bwd" and n.step == case.name.step]
    for name in names[:TRIED]:
        array = run[name]
        if array.ndim >= 3 and array.shape[:2] == loss.shape:
            rows: Array = np.any(array.reshape(*loss.shape, -1), -1)
            best = rows if rows.any() and (best is None or rows.sum() < best.sum()) else best
    return None if best is None else dataclasses.replace(loss, counted=loss.counted & best.ravel()[loss.rows])


def _grid(loss: Loss) -> Loss:
    """Rows for all tokens, of which those that the loss has not are not counted."""
    n = loss.shape[0] * loss.shape[1]
    logits, labels = np.zeros((n, loss.logits.shape[1])), np.full(n, -1)
    logits[loss.rows], labels[loss.rows] = loss.logits, np.where(loss.counted, loss.labels, -1)
    return dataclasses.replace(loss, logits=logits, labels=labels, counted=labels >= 0, rows=np.arange(n))


def _is_mean(loss: Loss) -> bool:
    """Whether the rows' weights in the gradient are those of a mean: then the loss has other terms besides."""
    return loss.weights is not None and bool(
        (np.abs(loss.weights[loss.counted] * loss.counted.sum() - 1.0) < 1e-3).all())


def with_logits(case: Case, recipe: Recipe) -> Recipe:
    """Of the other run's own logits, which its rounding made."""
    own = case.runs.other.get(recipe.logits)
    if own is None or own.shape[-1] != recipe.loss.logits.shape[1]:
        return recipe
    x: Array = own.astype(np.float64).reshape(-1, own.shape[-1])
    if len(x) != recipe.loss.shape[0] * recipe.loss.shape[1]:
        return recipe
    return dataclasses.replace(recipe, loss=dataclasses.replace(recipe.loss, logits=x[recipe.loss.rows]))


def _factor(loss: Loss, value: float) -> float:
    """By how much a value is more than the loss's mean, where it is the mean, the sum or the mean in bits; else 0."""
    if not loss.counted.any():
        return 0.0
    x = mean(entropies(loss), loss.counted)
    return next((f for f in (1.0, float(loss.counted.sum()), 1.0 / math.log(2.0))
                 if abs(f * x - value) <= 4.0 * NEAR * abs(value) + 1e-7), 0.0)


# --- labels from gradients --------------------------------------------------------------------------------------------


def recovered(case: Case, name: str, other: bool) -> Loss | None:
    """The loss of logits x W^T = z whose input's gradient is dumped: s ((1 + 2 z lse) p W - (1 - e) W_y - e mean(W)) of
    each row. The row of W that fits is the label's; s is the row's weight, z and e those of z-loss and smoothing."""
    run = case.runs.other if other else case.runs.reference
    own = Name.of(name)
    back = own.with_kind("bwd")
    if name not in run or back not in run:
        return None
    whole: Array = np.asarray(run[name], np.float64)
    d: Array = np.asarray(run[back], np.float64)
    shape = (whole.shape[0], whole[0].size // whole.shape[-1])
    x: Array = whole.reshape(-1, whole.shape[-1])
    d = d.reshape(-1, d.shape[-1])
    if len(d) != len(x) or d.shape[1] < 4 or len(x) * x.shape[1] * d.shape[1] > MOST_PRODUCTS:
        return None
    for weight in _weights(run, own, (x.shape[1], d.shape[1])):
        found = _labels_of(x, d, weight)
        if found is not None:
            labels, weights, smoothing, z = found
            return Loss(x, labels, labels >= 0, np.arange(len(x)), shape, smoothing, z, weights)
    return None


def _weights(run: typing.Mapping[str, Array], own: Name, shape: tuple[int, int]) -> typing.Iterator[Array]:
    """Matrices of the shape before the step, that of the logits' own module first."""
    names = [name for name in run if (n := Name.of(name)).kind in ("init", "weight") and own.step == 1
             or n.kind == "new" and n.step == own.step - 1]
    for name in sorted(names, key=lambda name: not Name.of(name).stem.startswith(own.stem + ".")):
        array = run[name]
        if array.shape == shape:
            yield np.asarray(array, np.float64)


def _labels_of(x: Array, d: Array, w: Array) -> tuple[Array, Array, float, float] | None:
    """Labels (-1: not counted), weights, smoothing and z; None: the gradients are not of this kind."""
    sizes = np.sqrt((d ** 2).sum(1))
    counted = sizes > 1e-7 * sizes.max(initial=0.0)
    if not counted.any():
        return None
    lse = log_sum(x[counted])
    p = np.exp(x[counted] - lse[:, None])
    g, d, center = p @ w, d[counted], w.mean(0)
    u = center / np.linalg.norm(center)
    v = g - (g @ u)[:, None] * u
    v /= np.linalg.norm(v, axis=1)[:, None]
    rest = d - (d @ u)[:, None] * u
    rest -= (rest * v).sum(1)[:, None] * v
    lengths = np.sqrt(np.maximum((w ** 2).sum(1)[None] - ((w @ u) ** 2)[None] - (v @ w.T) ** 2, 1e-300))
    cosines = -(rest @ w.T) / (lengths * np.linalg.norm(rest, axis=1)[:, None] + 1e-300)
    best = cosines.argmax(1)
    top = cosines[np.arange(len(best)), best]
    second = np.partition(cosines, -2, axis=1)[:, -2]
    if not ((top > 1.0 - 1e-4) & (1.0 - second > 10.0 * (1.0 - top))).all():
        return None
    columns = np.stack([g, np.broadcast_to(center, g.shape), w[best]], 2)
    a, c, b = np.linalg.solve(columns.transpose(0, 2, 1) @ columns + 0.0, (columns.transpose(0, 2, 1) @ d[:, :, None])
                              )[:, :, 0].T
    s = -b - c
    smoothing, z = float(np.median(-c / s)), float(np.median((a / s - 1.0) / (2.0 * lse)))
    labels, weights = np.full(len(x), -1), np.zeros(len(x))
    labels[counted], weights[counted] = best, s
    return labels, weights, _rounded(smoothing, 1e-3), _rounded(z, 1e-6)


def _rounded(x: float, least: float) -> float:
    """To three digits; 0 of less than is seen."""
    return float(f"{x:.3g}") if x > least else 0.0
