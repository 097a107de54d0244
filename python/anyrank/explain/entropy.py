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
IGNORED, NONE = -1, -2  # of a row that is no target, and of one that can be none


@dataclasses.dataclass(frozen=True)
class Loss:
    """Logits of each token and the label that it has. smoothing, z: what the loss has besides. weights: of each row in
    the gradient; None: that is not known."""

    logits: Array  # [samples * tokens, classes]
    labels: Array  # [samples * tokens]; below 0: not counted
    shape: tuple[int, int]  # samples, tokens
    smoothing: float = 0.0
    z: float = 0.0
    weights: Array | None = None

    @property
    def counted(self) -> Array:
        result: Array = self.labels >= 0
        return result

    def of(self, labels: Array, **other: typing.Any) -> Loss:
        return dataclasses.replace(self, labels=labels, **other)

    def each(self) -> Array:
        """What each row adds: -log p of its label, and what the loss has besides."""
        lse = log_sum(self.logits)
        taken = np.take_along_axis(self.logits, np.maximum(self.labels, 0)[:, None], 1)[:, 0]
        result: Array = lse - (1.0 - self.smoothing) * taken + self.z * lse ** 2
        if self.smoothing:  # of minus infinities there is no mean
            result -= self.smoothing * self.logits.mean(-1)
        return result

    def mean(self) -> float:
        return mean(self.each(), self.counted)


def log_sum(logits: Array) -> Array:
    top = logits.max(-1)
    result: Array = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return result


def mean(values: Array, counted: Array) -> float:
    return float(values[counted].mean()) if counted.any() else math.nan


def shifted(labels: Array, by: int, classes: int) -> Array:
    """The label of each token, [samples * tokens], which is `by` tokens on in [samples, tokens]."""
    moved = np.roll(np.where((labels >= 0) & (labels < classes), labels, IGNORED), -by, axis=1)
    if by:
        moved[:, slice(-by, None) if by > 0 else slice(0, -by)] = NONE
    result: Array = moved.ravel()
    return result


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the reference's loss is made: of these logits and labels, `by` tokens on. factor: by how much it is more than
    the mean. other: the other run's loss, where its labels are read from gradients. rest: what the loss has besides."""

    logits: str
    labels: str
    by: int
    loss: Loss
    all_labels: Array  # [samples, tokens]
    factor: float
    other: Loss | None = None
    rest: float = 0.0

    def value(self, x: float) -> float:
        return self.factor * x + self.rest


def integers(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """Integer inputs of the step, as [samples, tokens]."""
    for name in case.runs.reference:
        own = Name.of(name)
        if own.kind in ("fwd", "buffer") and own.step == case.name.step and own.stem.startswith("input"):
            array = case.runs.reference[name]
            if array.dtype.kind in "iu" and array.ndim in (1, 2) and array.size > 1:
                yield name, array.astype(np.int64).reshape(array.shape[0], -1)


def _candidates(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """Tensors that may be logits, the last of the step first."""
    names = [name for name in case.runs.reference if (n := Name.of(name)).kind == "fwd" and n.step == case.name.step]
    if str(case.name) in names:
        names = names[:names.index(str(case.name))]
    fitting = ((name, array) for name in reversed(names) if (array := case.runs.reference[name]).ndim >= 2
               and array.dtype.kind == "f" and array.size <= MOST and array.shape[-1] > 1)
    yield from itertools.islice(fitting, TRIED)


def _tries(case: Case) -> typing.Iterator[tuple[str, str, Array, int, Loss]]:
    """Logits with dumped labels: names, the labels, by how much they are moved, and the loss."""
    for (name, array), (label_name, labels) in itertools.product(list(_candidates(case)), list(integers(case))):
        if array.size // array.shape[-1] == labels.size and labels.max() < array.shape[-1]:
            x: Array = array.astype(np.float64).reshape(labels.size, -1)
            for by in (by for by in (1, 0, 2) if by < labels.shape[1]):
                yield name, label_name, labels, by, Loss(x, shifted(labels, by, x.shape[1]), labels.shape)


def recipe_of(case: Case, value: float) -> Recipe | None:
    """The logits, labels and divisor that give a value; None: none do."""
    for name, label_name, labels, by, loss in _tries(case):
        if factor := _factor(loss, value):
            return Recipe(name, label_name, by, loss, labels, factor, recovered(case, name, True))
    for name, _ in _candidates(case):
        read = recovered(case, name, False)
        factor = _factor(read, value) if read is not None else 0.0
        if read is not None and (factor or _is_mean(read)):
            rest = 0.0 if factor else value - read.mean()
            return Recipe(name, "gradients", 0, read, read.labels.reshape(read.shape), factor or 1.0,
                          recovered(case, name, True), rest)
    for name, label_name, labels, by, loss in _tries(case):  # ids, of the tokens whose gradients are not zero
        mine = _with_gradients(case, loss, case.runs.reference) if by < 2 else None
        if mine is None or not mine.counted.any():
            continue
        factor = _factor(mine, value)
        z = (value - mine.mean()) / mean(log_sum(mine.logits) ** 2, mine.counted)
        if not factor and 0.0 < z < 0.1 and abs(float(f"{z:.1g}") / z - 1.0) < 1e-3:  # a round number
            mine = dataclasses.replace(mine, z=float(f"{z:.1g}"))
            factor = _factor(mine, value)
        if factor:
            return Recipe(name, label_name, by, mine, labels, factor, _with_gradients(case, loss, case.runs.other))
    return None


def _with_gradients(case: Case, loss: Loss, run: typing.Mapping[str, Array]) -> Loss | None:
    """The loss of the rows that have a gradient in a run, by the tensor with fewest of the first ones."""
    best: Array | None = None
    names = [name for name in run if (n := Name.of(name)).kind == "bwd" and n.step == case.name.step]
    for array in (run[name] for name in names[:TRIED]):
        if array.ndim >= 3 and array.shape[:2] == loss.shape:
            rows: Array = np.any(array.reshape(len(loss.labels), -1), -1)
            best = rows if rows.any() and (best is None or rows.sum() < best.sum()) else best
    return None if best is None else loss.of(np.where(best | ~loss.counted, loss.labels, IGNORED))


def _is_mean(loss: Loss) -> bool:
    """Whether the rows' weights in the gradient are those of a mean: then the loss has other terms besides."""
    return loss.weights is not None and bool(
        (np.abs(loss.weights[loss.counted] * loss.counted.sum() - 1.0) < 1e-3).all())


def with_logits(case: Case, recipe: Recipe) -> Recipe:
    """Of the other run's own logits, which its rounding made."""
    own = case.runs.other.get(recipe.logits)
    if own is None or own.size != recipe.loss.logits.size:
        return recipe
    x: Array = own.astype(np.float64).reshape(recipe.loss.logits.shape)
    return dataclasses.replace(recipe, loss=dataclasses.replace(recipe.loss, logits=x))


def _factor(loss: Loss, value: float) -> float:
    """By how much a value is more than the loss's mean, where it is the mean, the sum or the mean in bits; else 0."""
    x = loss.mean()
    return next((f for f in (1.0, float(loss.counted.sum()), 1.0 / math.log(2.0))
                 if abs(f * x - value) <= 4.0 * NEAR * abs(value) + 1e-7), 0.0)


# --- labels from gradients --------------------------------------------------------------------------------------------


def recovered(case: Case, name: str, other: bool) -> Loss | None:
    """The loss of logits x W^T = z whose input's gradient is dumped: s ((1 + 2 z lse) p W - (1 - e) W_y - e mean(W)) of
    each row. The row of W that fits is the label's; s is the row's weight, z and e those of z-loss and smoothing."""
    run, own = case.runs.other if other else case.runs.reference, Name.of(name)
    back = own.with_kind("bwd")
    if name not in run or back not in run:
        return None
    whole: Array = np.asarray(run[name], np.float64)
    x: Array = whole.reshape(-1, whole.shape[-1])
    d: Array = np.asarray(run[back], np.float64).reshape(-1, run[back].shape[-1])
    if len(d) != len(x) or d.shape[1] < 4 or len(x) * x.shape[1] * d.shape[1] > MOST_PRODUCTS:
        return None
    names = [n for n in run if (of := Name.of(n)).kind in ("init", "weight") and own.step == 1
             or of.kind == "new" and of.step == own.step - 1]
    for weight in sorted(names, key=lambda n: not Name.of(n).stem.startswith(own.stem + ".")):
        found = _labels_of(x, d, run[weight].astype(np.float64)) if run[weight].shape == (
            x.shape[1], d.shape[1]) else None
        if found is not None:
            labels, weights, smoothing, z = found
            return Loss(x, labels, (len(whole), len(x) // len(whole)), smoothing, z, weights)
    return None


def _labels_of(x: Array, d: Array, w: Array) -> tuple[Array, Array, float, float] | None:
    """Labels, weights, smoothing and z; None: the gradients are not of this kind."""
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
    a, c, b = np.linalg.solve(columns.transpose(0, 2, 1) @ columns, columns.transpose(0, 2, 1) @ d[:, :, None])[
        :, :, 0].T
    s = -b - c
    labels, weights = np.full(len(x), IGNORED), np.zeros(len(x))
    labels[counted], weights[counted] = best, s
    smoothing, z = float(np.median(-c / s)), float(np.median((a / s - 1.0) / (2.0 * lse)))
    smoothing, z = (float(f"{of:.3g}") if of > least else 0.0 for of, least in ((smoothing, 1e-3), (z, 1e-6)))
    return labels, weights, smoothing, z
