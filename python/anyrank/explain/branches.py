# SPDX-License-Identifier: Apache-2.0
"""A gradient as what comes back through one branch, which is in the dump, and the rest, which comes another way."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.joined import parameter
from anyrank.explain.known import earlier, full_shape, said, sample_of, shape_of, snapped
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name
from anyrank.explain.words import RUNS

BRANCH, UNTIED = "branch", "sum of two parameters"
NEAREST = 4       # gradients that are looked at
MOST_PRODUCTS = 1 << 28  # multiplications of one product with a weight
LEAST = 1e-2      # of the gradient, that the rest has to be
MOST_AXES = 4


def _orders(array: Array, shape: tuple[int, ...]) -> typing.Iterator[Array]:
    """An array in this shape: as it lies, or with its dimensions in another order."""
    yield array.reshape(shape)
    for order in [*itertools.permutations(range(array.ndim))][1:] if array.ndim == len(shape) <= MOST_AXES else ():
        if tuple(array.shape[i] for i in order) == shape:
            yield array.transpose(order)


def _branches(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """What comes back through one branch alone: an earlier gradient that is right, or that through the layer itself."""
    weight, size, found = parameter(case, "weight"), case.reference.size, 0
    weight = weight if weight is not None and weight.shape[1:] == case.shape[-1:] else None
    for name in earlier(case):
        own = Name.of(name)
        if own.kind != "bwd" or own.step != case.name.step or name not in case.runs.same or found == NEAREST:
            continue
        count = math.prod(shape_of(case.runs.reference, name))
        of_output = weight is not None and count * case.shape[-1] == size * weight.shape[0] and (
            size * weight.shape[0] <= MOST_PRODUCTS)
        if count == size or of_output:
            found += 1
            p: Array = case.runs.reference[name].astype(np.float64)
            if count == size:
                yield from ((name, x) for x in _orders(p, case.shape))
            if of_output and weight is not None:
                back = p.reshape(-1, weight.shape[0]) @ weight
                yield f"{name} through the layer's weight", back.reshape(case.shape)


def _apart(case: Case) -> bool:
    """Whether ranks' copies of the same elements differ, or they hold parts of other dimensions than the first: then it
    may be what ranks exchange that is wrong."""
    held: dict[str, set[bytes]] = {}
    for copy in case.copies:
        held.setdefault(str(copy.boxes), set()).add(b"".join(x.tobytes() for x in copy.values))
    return any(len(of) > 1 for of in held.values()) or any(axis > 0 for axis, _ in case.cuts)


def _untied(case: Case) -> typing.Iterator[Pattern]:
    """One parameter here and two there: the gradient of one is the sum of both."""
    runs = case.runs.reference, case.runs.other
    stems = [{Name.of(name).stem for name in run} for run in runs]
    for i, said in enumerate(RUNS):  # which has two
        for name in (name for name in runs[i] if Name.of(name).stem not in stems[1 - i]):
            own = Name.of(name)
            extra = case.beside(name, i == 1) if (own.kind, own.step) == ("grad", case.name.step) else None
            if extra is not None and extra.any():
                yield Pattern(UNTIED, case.ref - extra if i else case.ref + extra, {"name": own.stem, "run": said})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "grad" and case.runs.other:
        yield from _untied(case)
    if case.name.kind != "bwd" or not case.shape or case.shape != full_shape(case) or not case.runs.other or not (
            np.isfinite(case.ref).all() and np.isfinite(case.val).all()):
        return
    near = max(1e-4, 8.0 * case.unit)
    some = sample_of(case.ref.size)
    ref, val = case.ref.flat[some], case.val.flat[some]
    size = float(np.linalg.norm(ref))
    for name, branch in _branches(case):
        rest, other = ref - branch.flat[some], val - branch.flat[some]
        lengths = float(np.linalg.norm(rest)), float(np.linalg.norm(other))
        numbers = {"branch": name, "share": lengths[1] / size if size else math.inf}
        if lengths[0] <= near * size and not _apart(case):
            yield Pattern(BRANCH, case.val, {**numbers, "how": "more"}, fitted=1 + case.ref.size // 2)
        elif lengths[0] > LEAST * size:
            times = float((rest * other).sum()) / lengths[0] ** 2
            if abs(times - 1.0) > near and np.linalg.norm(other - times * rest) <= near * size:
                k = 0.0 if abs(times) < near else snapped(times, near)
                numbers |= {"how": "scaled" if k else "alone", "times": said(k)}
                yield Pattern(BRANCH, branch + k * (case.ref - branch), numbers,
                              fitted=1 if k != round(4 * k) / 4 else 0, trials=2)


CAUSES = (
    Cause("tied_weight", (UNTIED,), "a weight that is tied in one run alone: {run} has {name} besides, and the "
          "gradients of both add up to the other's", "the tie of both weights after loading, wrapping or moving"),
    Cause("no_backward", (BRANCH,), "this is {branch} alone: what comes back another way in the reference is lost",
          "`detach`, `torch.no_grad`, a second derivative without `create_graph`, a collective without a backward",
          has(how="alone")),
    Cause("loss_term", (BRANCH,), "{branch} and {times} times the rest of the reference's gradient: one of two terms "
          "that come back here has another weight", "the weights of the loss's terms and which of them is detached",
          has(how="scaled")),
    Cause("gradient_of_another_path", (BRANCH,), "the reference's is {branch} alone, and here more is added, {share} "
          "times as large as the reference's: a gradient comes back another way, which is cut off in the reference",
          "`detach` or `torch.no_grad` of what the loss uses besides (targets, a stop-gradient)", has(how="more")),
)
