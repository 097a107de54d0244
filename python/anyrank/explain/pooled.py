# SPDX-License-Identifier: Apache-2.0
"""What is made of a sample's tokens, or of an image's places, as one row: which of them, and how."""

from __future__ import annotations

import itertools
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.known import earlier, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay.sources import parameter
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


def _way(x: Array, rows: Array, limit: float) -> tuple[str, Array] | None:
    """The way to pool that gives these rows: one for all samples, or one of its places or the mean over its first
    places for each."""
    for text, way in WAYS.items():
        if (np.abs(way(x) - rows) <= limit).all():
            return text, way(x)
    means = np.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1)[:, None]
    for text, of in (("the mean over each sample's first places", means), ("one place of each sample", x)):
        apart = np.abs(of - rows[:, None]).max(axis=2)
        at = apart.argmin(axis=1)
        if (apart.min(axis=1) <= limit).all():
            few = ", ".join(str(int(k) + (of is means)) for k in at[:6]) + (", .." if len(at) > 6 else "")
            return f"{text} ({few})", of[np.arange(len(at)), at]
    return None


def _tensors(case: Case) -> typing.Iterator[tuple[str, Array]]:
    """Earlier tensors of the samples, [samples, places, features]. What a linear module makes of a mean is the mean of
    what it makes of each place."""
    weight, bias = (parameter(case, f"{case.name.stem}.{leaf}") for leaf in ("weight", "bias"))
    linear = weight is not None and weight.ndim == 2 and len(weight) == case.shape[1]
    width = weight.shape[1] if weight is not None and linear else case.shape[1]
    for name in earlier(case):
        own, shape = Name.of(name), shape_of(case.runs.reference, name)
        if own.kind == "fwd" and own.step == case.name.step and len(shape) > 2 and shape[0] == len(case.ref) and (
                width in (shape[-1], shape[1]) and case.runs.reference[name].size <= MOST):
            x: Array = case.runs.reference[name].astype(np.float64)
            x = x.reshape(len(x), -1, width) if shape[-1] == width else x.reshape(len(x), width, -1).swapaxes(1, 2)
            yield name, x @ weight.T + (0.0 if bias is None else bias) if weight is not None and linear else x


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or len(case.shape) != 2 or case.shape[1] < LEAST or case.every or (
            not case.seen.any() or not np.isfinite(case.val).all()):
        return
    limit = 2.0 * near(case)
    for name, x in itertools.islice(_tensors(case), MOST_TENSORS):
        wanted, found = _way(x, case.ref, limit), _way(x, case.val, limit)
        if wanted and found:
            yield Pattern(POOLED, found[1], {"name": name, "way": found[0], "wanted": wanted[0]},
                          fitted=0 if found[0] in WAYS else 2)
            return


CAUSES = (
    Cause("tokens_pooled", (POOLED,), "pooled of others of {name}: {way}, where the reference has {wanted}",
          "the mask of padding in a mean, the place that is taken for the whole sample, padding on the left"),
)
