# SPDX-License-Identifier: Apache-2.0
"""A parameter's gradient as a sum over samples and uses, made again of the reference's activations and gradients; and
which of the summands the other run has."""

from __future__ import annotations

import itertools
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.known import earlier, full_shape, listed, output_gradient, said, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name, Runs

SUMMANDS, USE = "summands", "use_by_ids"
NEAREST = 8         # tensors that are tried as a factor of the product
ROWS = 24           # of the gradient, that are looked at first
MOST_SAMPLES = 64
MOST_PRODUCT = 1 << 31  # multiplications of one gradient that are done
FEW = 4

# The summands of a gradient's rows, [samples, rows, columns].
Source = typing.Callable[[slice], Array]


class Use(typing.NamedTuple):
    """One use of the parameter in the model."""

    text: str
    of: Source


def _by_sample(runs: Runs, name: str) -> Array | None:
    """An activation as [samples, tokens, features]."""
    array: Array = runs.reference[name].astype(np.float64)
    if array.ndim >= 2 and array.shape[0] == runs.batch:
        return array.reshape(runs.batch, -1, array.shape[-1])
    if array.ndim == 2 and runs.batch and array.shape[0] == runs.batch * runs.seq:
        return array.reshape(runs.batch, runs.seq, -1)
    return None


def _names(case: Case, kind: str, width: int) -> list[str]:
    """Activations or gradients of the step with so many features that are computed before the case's tensor, the
    nearest to its module first."""
    runs = case.runs
    names = [name for name in earlier(case) if Name.of(name).kind == kind and Name.of(name).step == case.name.step
             and shape_of(runs.reference, name)[-1:] == (width,)]
    if kind == "fwd":  # those just before the module's own output
        own = Name(case.name.module, "fwd", case.name.step)
        at = names.index(str(own)) if str(own) in names else -1
        order = {name: i for i, name in enumerate(reversed(list(runs.reference)))}
        if at < 0 and str(own) in order:
            names = [n for n in names if order[n] > order[str(own)]] + [n for n in names if order[n] < order[str(own)]]
        elif at >= 0:
            names = names[at:] + names[:at]
    return names[:NEAREST]


def _ids(runs: Runs, step: int) -> list[Array]:
    """Integer inputs of the step, [samples, tokens]."""
    found: list[Array] = []
    for name in runs.reference:
        own = Name.of(name)
        if own.stem.partition(".")[0] == "input" and own.step == step and shape_of(runs.reference, name) == (
                runs.batch, runs.seq):
            array = runs.reference[name]
            if (array == np.rint(array)).all() and array.min() >= 0:
                found.append(array.astype(np.int64))
    return found


def logits_gradient(case: Case, width: int) -> Array | None:
    """The gradient of logits: softmax less one at the label, times each token's weight. Labels and weights are those
    that make the gradient of the head's input, which the dump has."""
    runs, step = case.runs, case.name.step
    weight = runs.reference.get(str(Name(case.name.stem, "init" if step == 1 else "new", max(step - 1, 1))))
    if weight is None or weight.shape != case.shape:
        return None
    w: Array = weight.astype(np.float64)
    of_step = [name for name in runs.reference if Name.of(name).step == step]
    logits = next((name for name in reversed(of_step) if Name.of(name).kind == "fwd"
                   and shape_of(runs.reference, name)[-1:] == (width,)), "")
    back = next((name for name in of_step if Name.of(name).kind == "bwd"
                 and shape_of(runs.reference, name)[-1:] == (w.shape[1],)), "")
    z, dx = (_by_sample(runs, name) if name else None for name in (logits, back))
    if z is None or dx is None or z.shape[:2] != dx.shape[:2]:
        return None
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    target = dx.any(-1)
    if not target.any():
        return None
    d, mean = dx[target], p[target] @ w
    along = (d * mean).sum(1)[:, None] - d @ w.T  # of the softmax's mean less each label's row
    square = np.square(mean).sum(1)[:, None] - 2.0 * mean @ w.T + np.square(w).sum(1)[None]
    size = np.square(d).sum(1)[:, None]
    left = np.where(along > 0.0, square - along ** 2 / size, np.inf) / np.maximum(square, 1e-300)
    label = np.argmin(left, axis=1)
    at = np.arange(len(label))
    if np.sqrt(np.maximum(left[at, label], 0.0)).max() > 4.0 * _near(case):
        return None
    rows = p[target]
    rows[at, label] -= 1.0
    result: Array = np.zeros_like(p)
    result[target] = rows * (size[:, 0] / along[at, label])[:, None]
    return result


def _of_output(case: Case) -> Array | None:
    """The gradient of a linear layer's output, which gives that of its input: of more inputs than outputs."""
    name = case.name.with_kind("bwd")
    back = Name(case.name.module, "bwd", case.name.step)
    array = output_gradient(case, case.runs.reference, back)
    dx = case.runs.reference.get(str(back))
    if array is None or dx is None or name in case.runs.reference:
        return None
    runs = case.runs
    if dx.ndim >= 2 and dx.shape[0] == runs.batch:
        return array.reshape(runs.batch, -1, array.shape[-1])
    return array.reshape(runs.batch, runs.seq, -1) if runs.seq and len(array) == runs.batch * runs.seq else None


def _near(case: Case) -> float:
    return 2e-3 if case.unit <= 2.0 ** -20 else 6e-2


def _matrix_uses(case: Case) -> typing.Iterator[Use]:
    """Products of a gradient with what the module read; rows of an embedding."""
    out, width = case.shape
    runs = case.runs
    gradients = [(name, _by_sample(runs, name)) for name in _names(case, "bwd", out)]
    gradients.append(("the logits' gradient", logits_gradient(case, out)))
    gradients.append(("the output's gradient", _of_output(case)))
    inputs = [(name, _by_sample(runs, name)) for name in _names(case, "fwd", width)]
    for (a, dy), (b, x) in itertools.product(gradients, inputs):
        if dy is not None and x is not None and dy.shape[:2] == x.shape[:2]:
            yield Use(f"{a} and {b}", lambda rows, dy=dy, x=x: np.matmul(  # type: ignore[misc]
                dy[:, :, rows].transpose(0, 2, 1), x))
    for text, dy, ids in _by_ids(case):
        yield Use(text, lambda rows, dy=dy, ids=ids: _scattered(dy, ids, out)[:, rows])  # type: ignore[misc]


def _by_ids(case: Case) -> typing.Iterator[tuple[str, Array, Array]]:
    """What an embedding's gradient may be made of: the last gradients of the backward pass, and ids."""
    runs, (out, width) = case.runs, case.shape
    for name in [n for n in runs.reference if Name.of(n).kind == "bwd" and Name.of(n).step == case.name.step
                 and shape_of(runs.reference, n) == (runs.batch, runs.seq, width)][-NEAREST:]:
        for ids in _ids(runs, case.name.step):
            if ids.max() < out:
                yield f"{name} by ids", runs.reference[name].astype(np.float64), ids


def _one_use(case: Case) -> typing.Iterator[Pattern]:
    """The gradient of an embedding's own use, in place of the whole or missing in it."""
    gap = case.val - case.ref
    for i, (text, dy, ids) in enumerate(_by_ids(case)):
        whole = _scattered(dy.reshape(1, -1, case.shape[1]), ids.reshape(1, -1), case.shape[0])[0]
        square = float((whole * whole).sum())
        for kind, target in (("all", case.val), ("part", gap)):
            times = float((whole * target).sum()) / square if square > 0.0 else 0.0
            if times != 0.0 and np.linalg.norm(times * whole - target) <= _near(case) * np.linalg.norm(target):
                ratio = snapped(times, _near(case))
                says = f"is {said(ratio)} times" if kind == "all" else f"has {said(ratio)} times more of"
                yield Pattern(USE, ratio * whole + (0.0 if kind == "all" else case.ref), {"says": says, "use": text},
                              0 if ratio != times else 1, 1 + i)


def _scattered(dy: Array, ids: Array, rows: int) -> Array:
    result: Array = np.zeros((dy.shape[0], rows, dy.shape[2]))
    for sample in range(dy.shape[0]):
        np.add.at(result[sample], ids[sample], dy[sample])
    return result


def _vector_uses(case: Case) -> typing.Iterator[Use]:
    """A bias's: gradients added up; a gain's: gradients times what the gain multiplied."""
    runs, (width,) = case.runs, case.shape
    own = Name(case.name.module, "fwd", case.name.step)
    before = runs.reference.get(str(Name(case.name.stem, "init", 1)))
    shift = runs.reference.get(str(Name(case.name.module + ".bias", "init", 1)))
    out = _by_sample(runs, str(own)) if str(own) in runs.reference else None
    named = [(name, _by_sample(runs, name)) for name in _names(case, "bwd", width)]
    for name, dy in (*named, ("the output's gradient", _of_output(case))):
        if dy is None:
            continue
        yield Use(f"{name}", lambda rows, dy=dy: dy.sum(1)[:, rows, None])  # type: ignore[misc]
        if out is not None and out.shape == dy.shape and before is not None and case.name.step == 1:
            added: Array = np.zeros(1) if shift is None or shift.shape != before.shape else shift.astype(np.float64)
            weight: Array = before.astype(np.float64)
            for gain in (weight, 1.0 + weight):
                if (gain != 0.0).all():
                    yield Use(f"{name} and {own}", lambda rows, dy=dy, x=(out - added) / gain: (  # type: ignore[misc]
                        dy * x).sum(1)[:, rows, None])


def _uses(case: Case, rows: slice) -> list[tuple[Use, Array]]:
    """The uses whose summands add up to the reference: one, or two."""
    ref = case.ref.reshape(case.shape[0], -1)[rows]
    norm = float(np.linalg.norm(ref))
    made = []
    for use in _matrix_uses(case) if len(case.shape) == 2 else _vector_uses(case):
        part = use.of(rows)
        if part.any() and np.isfinite(part).all():
            if np.linalg.norm(part.sum(0) - ref) <= _near(case) * norm:
                return [(use, part)]
            made.append((use, part))
    for a, b in itertools.combinations(made, 2):
        if np.linalg.norm(a[1].sum(0) + b[1].sum(0) - ref) <= _near(case) * norm:
            return [a, b]
    return []


def patterns(case: Case) -> typing.Iterator[Pattern]:
    runs = case.runs
    if case.name.kind != "grad" or len(case.shape) not in (1, 2) or case.shape != full_shape(case) or not (
            0 < runs.batch <= MOST_SAMPLES) or not case.ref.any() or not np.isfinite(case.val).all():
        return
    if case.ref.size * runs.batch * max(runs.seq, 1) > MOST_PRODUCT:
        return
    norms = np.abs(case.ref.reshape(case.shape[0], -1)).max(1)
    first = int(np.argmax(norms))
    rows = slice(max(0, min(first - ROWS // 2, case.shape[0] - ROWS)), None) if len(case.shape) == 2 else slice(None)
    rows = slice(rows.start, rows.start + ROWS) if len(case.shape) == 2 else rows
    if len(case.shape) == 2:
        yield from _one_use(case)
    uses = _uses(case, slice(None) if len(case.shape) == 1 else rows)
    if not uses:
        return
    yield from _weighted(case, uses, rows)


def _weighted(case: Case, uses: list[tuple[Use, Array]], rows: slice) -> typing.Iterator[Pattern]:
    """The weights with which the other run has the summands."""
    some: Array = np.concatenate([part.reshape(part.shape[0], -1) for _, part in uses]).T
    live = np.abs(some).max(0) > 0.0
    if some.shape[0] < 2 * live.sum() or live.sum() < 2:
        yield from _of_micro_batches(case, uses)
        return
    val = case.val.reshape(case.shape[0], -1)
    by_use = np.stack([part.sum(0).reshape(-1) for _, part in uses], 1)
    whole = [use.of(slice(None)) for use, _ in uses]
    gap = (case.val - case.ref).reshape(case.shape[0], -1)
    near = 1e-3 if case.unit <= 2.0 ** -20 else 3e-2
    for table, each in ((by_use, False), (some[:, live], True)):
        if not each and len(uses) < 2:
            continue
        target = val[rows].reshape(-1) if len(case.shape) == 2 else val.reshape(-1)
        found = np.linalg.lstsq(table, target, rcond=None)[0]
        left = np.linalg.norm(table @ found - target)
        off = gap[rows] if len(case.shape) == 2 else gap
        if left > 0.05 * np.linalg.norm(off) + near * np.linalg.norm(target) * 0.1:
            continue
        w = np.array([snapped(x, near) if abs(x) > near else 0.0 for x in found.tolist()])
        if not w.any():
            continue  # what is left is another thing
        weights = np.zeros(some.shape[1])
        weights[live] = w if each else np.repeat(w, [part.shape[0] for _, part in uses])[live]
        expected = case.ref + sum(
            np.tensordot(weights[i * len(part):(i + 1) * len(part)] - np.where(
                live[i * len(part):(i + 1) * len(part)], 1.0, 0.0), part, 1)
            for i, part in enumerate(whole)).reshape(case.shape)
        fitted = sum(not float(x * 16).is_integer() for x in set(w.tolist()))
        yield Pattern(SUMMANDS, expected, {
            "weights": w.tolist(), "values": listed(w.tolist(), 16), "uses": [use.text for use, _ in uses],
            "by_use": not each, "near": near, "low": float(w.min()), "high": float(w.max())}, fitted)
        return


def _of_micro_batches(case: Case, uses: list[tuple[Use, Array]]) -> typing.Iterator[Pattern]:
    """The weights of micro-batches, of a gradient that has too few elements to tell those of samples."""
    m, part = case.runs.micro_batches, uses[0][1]
    if m < 2 or len(uses) > 1 or len(case.shape) != 1 or case.ref.size < m + 2:
        return
    near = 1e-4 if case.unit <= 2.0 ** -20 else 3e-2
    for n in (1, *case.runs.group_sizes):
        if len(part) % (n * m):
            continue
        table = part.reshape(n, m, -1, *part.shape[1:]).sum((0, 2)).reshape(m, -1).T
        if np.linalg.cond(table) > 1e3:
            continue
        found = np.linalg.lstsq(table, case.val, rcond=None)[0]
        if np.linalg.norm(table @ found - case.val) <= near * np.linalg.norm(case.val - case.ref):
            w = [snapped(x, near) for x in found.tolist()]
            expected = case.ref + table @ (np.array(w) - 1.0)
            each = np.repeat(np.tile(w, n), len(part) // (n * m)).tolist()
            yield Pattern(SUMMANDS, expected, {
                "weights": each, "values": listed(each, 16), "uses": [uses[0][0].text], "by_use": False, "near": 1e-3,
                "low": min(w), "high": max(w)}, m)


# --- causes -----------------------------------------------------------------------------------------------------------


def _samples(pattern: Pattern) -> Array | None:
    """The weights of samples; None: they are of uses."""
    numbers = pattern.numbers
    return None if numbers["by_use"] or len(numbers["uses"]) > 1 else np.array(numbers["weights"])


def _micro(case: Case, pattern: Pattern) -> Array | None:
    """The weight of each micro-batch, if all of its samples have it, on all ranks."""
    w, m = _samples(pattern), case.runs.micro_batches
    if w is None or m < 2:
        return None
    for n in (1, *case.runs.group_sizes):
        if w.size % (n * m) == 0:
            each = w.reshape(n, m, -1).transpose(1, 0, 2).reshape(m, -1)
            if np.ptp(each, axis=1).max() <= 2.0 * pattern.numbers["near"] * max(abs(w).max(), 1.0):
                result: Array = each.mean(1)
                return result
    return None


def _one_micro(case: Case, pattern: Pattern) -> bool:
    w = _micro(case, pattern)
    return w is not None and np.count_nonzero(w) == 1 and w.max() <= 1.0 + pattern.numbers["near"]


def _one_for_all(case: Case, pattern: Pattern) -> bool:
    """Whether one micro-batch counts as often as there are micro-batches, and the others do not."""
    w = _micro(case, pattern)
    return w is not None and np.count_nonzero(w) == 1 and abs(w.max() / w.size - 1.0) <= pattern.numbers["near"]


def _twice(case: Case, pattern: Pattern) -> bool:
    w = _samples(pattern)
    return w is not None and set(w.tolist()) == {1.0, 2.0}


def _divided(case: Case, pattern: Pattern) -> bool:
    """Whether each micro-batch counts as much less than the next one as there are micro-batches."""
    w, m = _micro(case, pattern), case.runs.micro_batches
    if w is None or (w <= 0.0).any() or w.max() > 1.0 + 4.0 * pattern.numbers["near"]:
        return False
    ratios = w[1:] / w[:-1]
    return any(np.abs(ratios * x - 1.0).max() <= 20.0 * pattern.numbers["near"] for x in (m, 1.0 / m))


def _means(case: Case, pattern: Pattern, most: float) -> bool:
    w = _samples(pattern)
    if w is None or (w <= 0.0).any() or np.ptp(w) <= 1e-3:
        return False
    sizes = {round(1.0 / most)} if most == 1.0 else {*case.runs.group_sizes, case.runs.micro_batches} - {1}
    return any(abs(float(np.mean(1.0 / w)) * n - 1.0) <= 4.0 * pattern.numbers["near"] for n in sizes)


_HAS = "of the summands of this gradient, made again of the reference's values, the other run has {values} times "
CAUSES = (
    Cause("tied_weight", (USE,), "the gradient {says} that of the embedding's own use ({use}): one weight is "
          "used twice, and the uses' gradients are not added up once each",
          "`tie_weights()`; the sum of both uses' gradients"),
    Cause("tied_weight", (SUMMANDS,), _HAS + "those of its uses ({uses}): one weight is used twice, and one use is "
          "lost or counts again", "`tie_weights()`; the sum of both uses' gradients",
          lambda case, pattern: len(pattern.numbers["uses"]) == 2),
    Cause("input_of_other_micro_batch", (SUMMANDS,), _HAS + "each sample's: all micro-batches have that of one of them",
          "buffers between stages and micro-batches that are not filled again", _one_for_all),
    Cause("one_micro_batch", (SUMMANDS,), _HAS + "each sample's: one micro-batch alone is in it",
          "`=` where `+=` belongs; `zero_grad` inside the loop", _one_micro),
    Cause("one_sample", (SUMMANDS,), _HAS + "each sample's: one sample alone is in it", "a product or sum over one "
          "dimension of two, `x[0]`, `squeeze`", lambda case, pattern: (
              w := _samples(pattern)) is not None and w.size > 2 and np.count_nonzero(w) == 1 and w.max() == 1.0),
    Cause("counted_twice", (SUMMANDS,), _HAS + "each sample's: some count twice", "a second backward pass, a reduction "
          "after each micro-batch", _twice),
    Cause("accumulation_divided", (SUMMANDS,), _HAS + "each sample's: the accumulated gradient is divided after each "
          "micro-batch", "`grad /= n` inside the loop over micro-batches", _divided),
    Cause("mean_of_means", (SUMMANDS,), _HAS + "each sample's, and the mean of the reciprocals is 1: each rank or "
          "micro-batch divided by its own count", "divide by the global number of targets",
          lambda case, pattern: _means(case, pattern, 1.0)),
    Cause("sum_of_local_means", (SUMMANDS,), _HAS + "each sample's: each rank or micro-batch divided by its own count, "
          "and the means were added", "divide by the global number of targets",
          lambda case, pattern: _means(case, pattern, 0.5)),
    Cause("micro_batches_weighted", (SUMMANDS,), _HAS + "each sample's: micro-batches count differently",
          "the divisor by the number of micro-batches, and where it is applied; clipping between micro-batches",
          lambda case, pattern: _micro(case, pattern) is not None),
    Cause("part_of_tokens", (SUMMANDS,), _HAS + "each sample's: some are in it, and the others are not",
          "which samples go backward through this module", lambda case, pattern: (
              {*pattern.numbers["weights"]} == {0.0, 1.0} and _samples(pattern) is not None)),
    Cause("samples_weighted", (SUMMANDS,), _HAS + "each sample's: samples count differently", "weights of samples, and "
          "what they are normalised by", lambda case, pattern: not {*pattern.numbers["weights"]} <= {0.0, 1.0} and (
              _samples(pattern) is not None)),
)
