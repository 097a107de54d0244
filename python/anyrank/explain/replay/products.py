# SPDX-License-Identifier: Apache-2.0
"""Products with weights, computed again with one thing changed."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.sources import Named, earlier, inputs, left, parameter, rows_of, where_wrong
from anyrank.explain.tensors import Array, Case, Name

MOST = 1 << 29  # multiplications of one product
SMALL = 0.15
ADDED, TRANSPOSED, WEIGHT, INPUT = (f"product {what}" for what in ("bias", "transposed", "weight", "input"))


def _bias(case: Case) -> typing.Iterator[Pattern]:
    """The reference's bias left out, or added again by each rank: needs no input."""
    bias = parameter(case, f"{case.name.stem}.bias")
    if bias is None or bias.ndim != 1 or bias.shape[0] != case.shape[-1] or not bias.any():
        return
    sizes = case.runs.group_sizes
    for times, text in {0.0: "0", 2.0: "2", **{float(n): f"{n}" for n in sizes}, **{1.0 / n: f"1/{n}" for n in sizes}
                        }.items():
        expected = case.ref + (times - 1.0) * bias.astype(np.float64)
        yield Pattern(ADDED, where_wrong(case, expected), {"times": text})


def reading(case: Case) -> tuple[Array, Array] | None:
    """(rows read, matrix [in, out]) that give the reference."""
    weight, bias = (parameter(case, f"{case.name.stem}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.ndim != 2 or case.shape[-1] not in weight.shape:
        return None
    added = np.zeros(case.shape[-1]) if bias is None or bias.shape != (case.shape[-1],) else bias.astype(np.float64)
    wanted = rows_of(case.ref)
    some = np.unique(np.linspace(0, len(wanted) - 1, 8).astype(int))
    matrix: Array
    rows: Array
    for matrix in (weight.T.astype(np.float64), weight.astype(np.float64)):
        for _, x in inputs(case, matrix.shape[0]) if matrix.shape[1] == case.shape[-1] else ():
            rows = rows_of(x).astype(np.float64)
            if rows.shape == (len(wanted), matrix.shape[0]) and left(rows[some] @ matrix + added, wanted[some]) <= (
                    1e-4 if case.unit < 1e-4 else 4.0 * case.unit):
                return rows, matrix
    return None


def _products(case: Case) -> typing.Iterator[Pattern]:
    found = reading(case)
    if found is None or found[0].size * found[1].shape[1] > MOST:
        return
    x, matrix = found
    wrong = np.flatnonzero(rows_of(case.off).any(-1))[:64]  # rows by which others are ruled out
    apart, difference = rows_of(case.val - case.ref)[wrong], case.val[case.off] - case.ref[case.off]

    def held(kind: str, rows: Array, by: Array, **numbers: typing.Any) -> typing.Iterator[Pattern]:
        if left(rows[wrong] @ by - x[wrong] @ matrix, apart) <= 2.0 * SMALL:
            expected = case.ref + (rows @ by - x @ matrix).reshape(case.shape)
            if left(expected[case.off], case.val[case.off], difference) <= SMALL:
                yield Pattern(kind, where_wrong(case, expected), numbers)

    if matrix.shape[0] == matrix.shape[1]:
        yield from held(TRANSPOSED, x, matrix.T)
    for name, other in _weights(case, matrix):
        yield from held(WEIGHT, x, other, other=name, stale=Name.of(name).stem == f"{case.name.stem}.weight")
    for name, rows in _others(case, *x.shape):
        yield from held(INPUT, rows, matrix, other=name, norm=_reads(x, rows))


def _weights(case: Case, matrix: Array) -> typing.Iterator[Named]:
    """Weights of other modules, and of other steps, as [in, out]."""
    now = ("new", case.name.step - 1) if case.name.step > 1 else ("init", 1)
    for text in case.runs.reference:
        name, value = Name.of(text), case.runs.reference[text]
        beside = name.stem.endswith(".weight") and (name.kind, name.step) == now
        if name.kind in ("init", "new", "weight") and beside != (name.stem == f"{case.name.stem}.weight") and (
                value.shape in (matrix.shape, matrix.T.shape)):
            yield text, (value.T if value.shape == matrix.T.shape else value).astype(np.float64)


def _others(case: Case, rows: int, width: int) -> typing.Iterator[Named]:
    """Outputs that ran before, and sums of two (a residual stream), as rows."""
    arrays = ((name, case.runs.reference[name]) for name in reversed(earlier(case)))
    found: list[Named] = [(name, rows_of(x).astype(np.float64)) for name, x in arrays
                          if x.dtype.kind == "f" and x.shape[-1:] == (width,) and x.size == rows * width][:12]
    yield from found
    for i, (a, x) in enumerate(found[:8]):
        yield from ((f"{a} + {b}", x + y) for b, y in found[i + 1:8])


def _reads(x: Array, other: Array) -> bool:
    """Whether x is a norm of the other tensor: each row points the same way, up to a gain and a mean."""
    a, b = (y[:64] - y[:64].mean(-1, keepdims=True) for y in (other, x))
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return bool((np.abs((a * b).sum(-1)) > 0.9 * size).all())


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "fwd" and case.reference.dtype.kind == "f" and len(case.shape) > 1 and not case.every:
        yield from _bias(case)
        yield from _products(case)


# --- causes -----------------------------------------------------------------------------------------------------------

CAUSES = (
    Cause("bias_counted_again", (ADDED,), "the bias is added {times} times", "the bias of a row-parallel product, "
          "which one rank alone, or the sum afterwards, adds"),
    Cause("transposed", (TRANSPOSED,), "the product of the same input with the transposed weight", "the layout of the "
          "weight: Linear is [out, in], Conv1D [in, out]"),
    Cause("stale_weights", (WEIGHT,), "the product with {other}: weights of another step", "weights that were gathered "
          "or cast before the update and kept", has(stale=True)),
    Cause("other_module", (WEIGHT,), "the product of the same input with {other}", "names in a mapping of weights"),
    Cause("norm_missing", (INPUT,), "the product with {other} as its input, which the reference normalises first",
          "the norm before this product", has(norm=True)),
    Cause("other_input", (INPUT,), "the product with {other} as its input", "what this module is called on"),
)
