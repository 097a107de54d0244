# SPDX-License-Identifier: Apache-2.0
"""What is made of a sample's tokens, or of an image's places, as one row: which of them, and how."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.known import earlier, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import near
from anyrank.explain.tensors import MOST, Array, Case, Name

POOLED = "pooled"
MOST_TENSORS = 8  # that are tried as what is pooled, the nearest first
LEAST = 4  # features by which a way to pool is told

WAYS: dict[str, typing.Callable[[Array], Array]] = {
    "the mean over all places": lambda x: x.mean(axis=1), "the first place": lambda x: x[:, 0],
    "the last place": lambda x: x[:, -1], "the largest over all places": lambda x: x.max(axis=1),
    "the sum over all places": lambda x: x.sum(axis=1), "the mean over all places but the first": (
        lambda x: x[:, 1:].mean(axis=1))}


def _firsts(x: Array, rows: Array, limit: float) -> dict[str, Array]:
    """Ways with a number for each sample: the mean over its first places, or one of its places."""
    found = {}
    means = np.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1)[:, None]
    for text, of in (("the mean over each sample's first places", means), ("one place of each sample", x)):
        apart = np.abs(of - rows[:, None]).max(axis=2)
        at = apart.argmin(axis=1)
        if (apart[np.arange(len(at)), at] <= limit).all():
            few = ", ".join(str(int(k) + (of is means)) for k in at[:6]) + (", .." if len(at) > 6 else "")
            found[f"{text} ({few})"] = of[np.arange(len(at)), at]
    return found


def _ways(x: Array, rows: Array, limit: float) -> dict[str, Array]:
    """The ways to pool that give these rows."""
    made = {text: way(x) for text, way in WAYS.items()}
    return {text: y for text, y in made.items() if (np.abs(y - rows) <= limit).all()} or _firsts(x, rows, limit)


def _linear(case: Case) -> tuple[Array, Array] | None:
    """The weight and bias of the module, where it is linear."""
    name, known = case.name, case.runs.reference
    of = ("init", 1) if name.step == 1 else ("new", name.step - 1)
    weight, bias = (str(Name(f"{name.stem}.{leaf}", *of)) for leaf in ("weight", "bias"))
    if weight not in known or known[weight].ndim != 2 or len(known[weight]) != case.shape[1]:
        return None
    return known[weight].astype(np.float64), np.asarray(known.get(bias, np.zeros(1)), np.float64)


def _tensors(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """Earlier tensors of the samples, [samples, places, features]. What a linear module makes of a mean is the mean of
    what it makes of each place."""
    linear = _linear(case)
    width = linear[0].shape[1] if linear else case.shape[1]
    count = 0
    for name in earlier(case):
        own, shape = Name.of(name), shape_of(case.runs.reference, name)
        if own.kind != "fwd" or own.step != case.name.step or len(shape) < 3 or shape[0] != len(case.ref) or (
                width not in (shape[-1], shape[1]) or case.runs.reference[name].size > MOST):
            continue
        x: Array = case.runs.reference[name].astype(np.float64)
        if shape[-1] == width:
            x = x.reshape(len(x), -1, width)
        else:
            x = x.reshape(len(x), width, -1).transpose(0, 2, 1)
        yield name, x @ linear[0].T + linear[1] if linear else x
        count += 1
        if count == MOST_TENSORS:
            return


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or len(case.shape) != 2 or case.shape[1] < LEAST or case.every or (
            not case.seen.any() or not np.isfinite(case.val).all()):
        return
    limit = 2.0 * near(case)
    for name, x in _tensors(case):
        wanted = _ways(x, case.ref, limit)
        found = _ways(x, case.val, limit) if wanted else {}
        if found:
            way, expected = next(iter(found.items()))
            yield Pattern(POOLED, expected, {"name": name, "way": way, "wanted": next(iter(wanted))},
                          fitted=0 if way in WAYS else 2)
            return


# --- causes -----------------------------------------------------------------------------------------------------------

CAUSES = (
    Cause("tokens_pooled", (POOLED,), "pooled of others of {name}: {way}, where the reference has {wanted}",
          "the mask of padding in a mean, the place that is taken for the whole sample, padding on the left"),
)
