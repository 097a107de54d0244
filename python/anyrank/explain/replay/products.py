# SPDX-License-Identifier: Apache-2.0
"""Products with weights, computed again with one thing changed."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Parts, Pattern
from anyrank.explain.replay.sources import Named, earlier, inputs, left, parameter, rows_of, thinned, where_wrong
from anyrank.explain.tensors import Array, Case, Name

MOST = 1 << 29  # multiplications of one product
SMALL = 0.15


# --- y = x W^T + b ----------------------------------------------------------------------------------------------------


def _bias(case: Case) -> typing.Iterator[Pattern]:
    """The reference's bias left out, or added again by each rank: needs no input."""
    bias = parameter(case, f"{case.name.stem}.bias")
    if bias is None or bias.ndim != 1 or not case.shape or bias.shape[0] != case.shape[-1] or not bias.any():
        return
    for times in sorted({-1, 1, *(n - 1 for n in case.runs.group_sizes)}):
        expected = case.ref + times * bias.astype(np.float64)
        yield Pattern("product_bias", where_wrong(case, expected), {"times": times + 1})
    for n in case.runs.group_sizes:
        expected = case.ref + (1.0 / n - 1.0) * bias.astype(np.float64)
        yield Pattern("product_bias", where_wrong(case, expected), {"times": f"1/{n}"})


def _matrices(case: Case, weight: Array) -> typing.Iterator[Array]:
    """[in, out]"""
    for matrix in (weight.T, weight):
        if matrix.shape[1] == case.shape[-1]:
            yield matrix.astype(np.float64)


def reading(case: Case) -> tuple[Array, Array, Array, bool] | None:
    """(rows read, matrix, bias, whether the module's own record says so) that give the reference."""
    weight, bias = (parameter(case, f"{case.name.stem}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.ndim != 2 or not case.shape or case.shape[-1] not in weight.shape:
        return None
    added = np.zeros(case.shape[-1]) if bias is None or bias.shape != (case.shape[-1],) else bias.astype(np.float64)
    wanted = rows_of(case.ref)
    some = np.unique(np.linspace(0, len(wanted) - 1, 8).astype(int))
    for matrix in _matrices(case, weight):
        for _, x in inputs(case, matrix.shape[0]):
            if len(rows := rows_of(x)) != len(wanted) or rows.shape[1] != matrix.shape[0]:
                continue
            made = rows[some].astype(np.float64) @ matrix + added
            if left(made, wanted[some]) <= (1e-4 if case.unit < 1e-4 else 4.0 * case.unit):
                return rows.astype(np.float64), matrix, added, True
    return None


def _products(case: Case) -> typing.Iterator[Pattern]:
    found = reading(case)
    if found is None or found[0].size * found[1].shape[1] > MOST:
        return
    x, matrix, bias, _ = found
    base = x @ matrix

    def held(kind: str, product: Array, **numbers: typing.Any) -> typing.Iterator[Pattern]:
        expected = case.ref + (product - base).reshape(case.shape)
        if left(expected[case.off], case.val[case.off], case.val[case.off] - case.ref[case.off]) <= SMALL:
            yield Pattern(kind, where_wrong(case, expected), numbers)

    if matrix.shape[0] == matrix.shape[1]:
        yield from held("product_transposed", x @ matrix.T)
    for name, other in _same_shape(case, matrix):
        yield from held("product_weight", x @ other, other=name, stale=Name.of(name).stem == f"{case.name.stem}.weight")
    for name, rows in _other_inputs(case, matrix.shape[0], len(x)):
        if not np.array_equal(rows, x) and _explains(case, (rows[:64] - x[:64]) @ matrix):
            yield from held("product_input", rows @ matrix, other=name, norm=_reads(x, rows))
    yield from _partial(case, x, matrix, bias)


def _same_shape(case: Case, matrix: Array) -> list[Named]:
    """Weights of other modules, and of other steps, as [in, out]."""
    reference, step = case.runs.reference, case.name.step
    found: list[Named] = []
    now = str(Name(f"{case.name.stem}.weight", "new" if step > 1 else "init", max(step - 1, 1)))
    for text in reference:
        name = Name.of(text)
        if text == now or name.kind not in ("init", "new", "weight") or reference[text].ndim != 2:
            continue
        own, current = name.stem == f"{case.name.stem}.weight", name.step == max(step - 1, 1)
        beside = name.stem.endswith(".weight") and current and name.kind == ("new" if step > 1 else "init")
        if (own or beside) and matrix.size == reference[text].size and len(found) < 24:
            value: Array = reference[text].astype(np.float64)
            found.append((text, value.T if value.shape == matrix.T.shape else value))
    return [(text, value) for text, value in found if value.shape == matrix.shape]


def _other_inputs(case: Case, width: int, rows: int) -> typing.Iterator[Named]:
    """Outputs that ran before, and sums of two (a residual stream), as rows."""
    found: list[Named] = []
    for name in reversed(earlier(case)):
        x = case.runs.reference[name]
        if x.dtype.kind == "f" and x.ndim and x.shape[-1] == width and x.size == rows * width and len(found) < 12:
            found.append((name, rows_of(x).astype(np.float64)))
    yield from found
    for i, (a, x) in enumerate(found[:8]):
        for b, y in found[i + 1:8]:
            yield f"{a} + {b}", x + y


def _explains(case: Case, change: Array) -> bool:
    """Whether the change explains what differs in the first rows."""
    apart = rows_of(case.val - case.ref)[:len(change)]
    wrong = rows_of(case.off)[:len(change)].any(-1)
    return not wrong.any() or left(change[wrong], apart[wrong]) <= SMALL


def _reads(x: Array, other: Array) -> bool:
    """Whether x is a norm of the other tensor: each row points the same way, up to a gain and a mean."""
    a, b = (y[:64] - y[:64].mean(-1, keepdims=True) for y in (other, x))
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return bool((np.abs((a * b).sum(-1)) > 0.9 * size).all())


def _partial(case: Case, x: Array, matrix: Array, bias: Array) -> typing.Iterator[Pattern]:
    """Each rank has the product of its own part of the inner dimension alone."""
    world = case.runs.world
    for n in case.runs.group_sizes if case.by_rank and all(copy.rank is not None for copy in case.copies) else ():
        width = matrix.shape[0] // n
        if matrix.shape[0] % n or world % n:
            continue
        shards = [(x[:, i * width:(i + 1) * width] @ matrix[i * width:(i + 1) * width] + bias).reshape(case.shape)
                  for i in range(n)]
        for stride in {1, world // n}:
            for with_bias in (bias, np.zeros_like(bias)) if bias.any() else (bias,):
                own = [shards[(copy.rank or 0) // stride % n] - (bias - with_bias) for copy in case.copies]
                parts: Parts = [[part[box] for box in copy.boxes] for part, copy in zip(own, case.copies)]
                yield Pattern("product_partial", parts, {"n": n})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) < 2:
        return
    if thinned(case):
        return
    yield from _bias(case)
    yield from _products(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _says(key: str, value: typing.Any = True) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: pattern.numbers.get(key) == value


CAUSES = (
    Cause("bias_counted_again", ("product_bias",), "the bias is added {times} times", "the bias of a row-parallel "
          "product, which one rank alone, or the sum afterwards, adds"),
    Cause("weight_transposed", ("product_transposed",), "the product of the same input with the transposed weight",
          "the layout of the weight: Linear is [out, in], Conv1D [in, out]"),
    Cause("stale_weights", ("product_weight",), "the product with {other}: weights of another step", "weights that "
          "were gathered or cast before the update and kept", _says("stale")),
    Cause("other_module", ("product_weight",), "the product of the same input with {other}", "names in a mapping of "
          "weights"),
    Cause("norm_missing", ("product_input",), "the product with {other} as its input, which the reference normalises "
          "first", "the norm before this product", _says("norm")),
    Cause("other_input", ("product_input",), "the product with {other} as its input", "what this module is called on"),
    Cause("partial_sum", ("product_partial",), "each rank has the product of its own part of the inner dimension "
          "alone, of {n}: the partial products are not summed", "the all-reduce after the row-parallel product"),
)
