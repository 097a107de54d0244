# SPDX-License-Identifier: Apache-2.0
"""Moves in what a linear module reads, where its output alone is recorded."""

from __future__ import annotations

import dataclasses
import itertools
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.moved import of_tensor
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import near
from anyrank.explain.tensors import Array, Case, Copy, Name
from anyrank.explain.transposed import are_conserved, transpositions

MOST_INPUTS = 512  # features of a module whose weight is inverted
CAUSES: tuple[Cause, ...] = ()  # those of the moves


def _weights(case: Case) -> typing.Iterator[tuple[Array, Array | float]]:
    """(weight [in, out], bias) of a linear module that gave this activation, by the reference's parameters."""
    name, known = case.name, case.runs.reference
    of = ("init", 1) if name.step == 1 else ("new", name.step - 1)
    weight, bias = (Name(f"{name.stem}.{leaf}", *of) for leaf in ("weight", "bias"))
    if name.kind != "fwd" or len(case.shape) < 2 or str(weight) not in known or known[str(weight)].ndim != 2:
        return
    added: Array | float = known[str(bias)].astype(np.float64) if str(bias) in known else 0.0
    w: Array = known[str(weight)].astype(np.float64)
    for matrix in (w.T, w):
        if matrix.shape[1] == case.shape[-1] and matrix.shape[0] <= min(matrix.shape[1], MOST_INPUTS):
            yield matrix, added


def patterns(case: Case) -> typing.Iterator[Pattern]:
    """Moves in what a linear module reads, which its output and its weight say where the weight has an inverse."""
    for matrix, added in _weights(case):
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        if values[-1] <= 1e-5 * values[0]:
            continue
        inverse = right.T / values @ left.T

        def read(x: Array) -> Array:
            result: Array = (x.astype(np.float64) - added) @ inverse
            return result

        inputs = read(case.reference)
        if not are_conserved(inputs, read(case.other)) or np.abs(inputs @ matrix + added - case.ref).max() > near(case):
            continue
        boxes = [tuple((*box[:-1], slice(0, matrix.shape[0])) for box in copy.boxes) for copy in case.copies]
        if any(v.shape[-1] != case.shape[-1] for copy in case.copies for v in copy.values):
            return
        inner = dataclasses.replace(case, reference=inputs, other=read(case.other), copies=tuple(
            Copy(copy.rank, b, tuple(map(read, copy.values))) for copy, b in zip(case.copies, boxes)),
            allowed=near(case) / float(values[-1]), rtol=0.0)
        for pattern in itertools.chain(of_tensor(inner), transpositions(inner)):
            if isinstance(pattern.expected, np.ndarray):
                numbers = {**pattern.numbers, "within": f"{pattern.numbers['within']}, in what the module reads",
                           "inputs": True}
                yield Pattern(pattern.kind, pattern.expected @ matrix + added, numbers, pattern.fitted + 1, trials=3)
