# SPDX-License-Identifier: Apache-2.0
"""Masks of dropout: zeros that are scattered where the reference has others, or none."""

from __future__ import annotations

import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, activation, every, has
from anyrank.explain.masked import Wrong, are_by_value
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name
from anyrank.explain.words import ranks_of

DROPPED, MASK = "dropped", "mask"
MOST_DROPPED = 0.6  # share of values that a dropout leaves out at most
LEAST = 16  # elements from which on scattered zeros are a mask


def _is_scattered(zero: Array) -> bool:
    """Whether no index along any axis has many more than its share, and rows have not all the same number."""
    rows = zero.reshape(-1, zero.shape[-1]).sum(axis=1)
    share = float(zero.mean())
    if len(rows) >= LEAST and rows.var() < 0.25 * zero.shape[-1] * share * (1.0 - share):
        return False
    for axis, n in enumerate(zero.shape):
        counts = zero.sum(axis=tuple(a for a in range(zero.ndim) if a != axis))
        expected = zero.sum() / n
        if counts.max() > expected + 6.0 * math.sqrt(expected) + 4.0:
            return False
    return True


def patterns(case: Case) -> typing.Iterator[Pattern]:
    """Zeros where the reference has none, and the other way round; what neither drops has one factor."""
    wrong = Wrong.of(case)
    if case.reference.dtype.kind != "f" or not wrong.parts or not case.reference.ndim:
        return
    ref, val, off = wrong.joined
    lost, gained = off & (val == 0.0) & (ref != 0.0), off & (ref == 0.0) & (val != 0.0)
    kept = (ref != 0.0) & (val != 0.0) & np.isfinite(val)
    if lost.sum() < LEAST or lost.sum() > MOST_DROPPED * (ref != 0.0).sum() or kept.sum() < LEAST or not all(
            _is_scattered((v == 0.0) & (r != 0.0)) for r, v, _ in wrong.values()) or are_by_value(ref, lost):
        return
    factor = float((ref[kept] * val[kept]).sum() / (ref[kept] ** 2).sum())
    if abs(factor - 1.0) < 1e-5 + case.rtol / 4.0:
        factor = 1.0
    shares = [float((x != 0.0).mean()) for x in (ref, val)]
    numbers = {"lost": int(lost.sum()), "gained": int(gained.sum()), "factor": factor, "kept": shares[1],
               "percent": 100.0 * lost.sum() / max(1, int((ref != 0.0).sum())), "p": 1.0 - shares[1],
               "p_reference": 1.0 - shares[0], "ranks": "" if wrong.of_all else f" on {ranks_of(wrong.ranks)}"}
    if not gained.any():
        scaled = abs(factor * shares[1] / shares[0] - 1.0) <= 5.0 / math.sqrt(kept.sum())
        yield Pattern(DROPPED, wrong.expect(lambda r, v, o: np.where(v == 0.0, 0.0, factor * r)),
                      {**numbers, "scaled": scaled, "p": 1.0 - 1.0 / factor if scaled else numbers["p"]},
                      fitted=int(factor != 1.0))
    elif min(lost.sum(), gained.sum()) * 20 >= off.sum() or factor != 1.0:
        yield Pattern(MASK, wrong.expect(lambda r, v, o: np.where((v == 0.0) | (r == 0.0), v, factor * r)),
                      {**numbers, **_whose_mask(case)}, fitted=3)


def _whose_mask(case: Case) -> dict[str, typing.Any]:
    """layer: another tensor of the reference with this mask. apart: copies of one part have other masks. shards: parts
    have one mask, where those of the reference differ."""
    masks: dict[tuple[tuple[int, int], ...], list[tuple[Array, Array]]] = {}
    for copy in case.copies:
        for box, values in zip(copy.boxes, copy.values):
            masks.setdefault(tuple((s.start, s.stop) for s in box), []).append((values == 0, case.reference[box] == 0))
    apart = any(not np.array_equal(mine, other[0][0]) for other in masks.values() for mine, _ in other)
    parts = [some[0] for some in masks.values()]
    shards = len(parts) > 1 and all(np.array_equal(x, parts[0][0]) for x, _ in parts) and not all(
        np.array_equal(y, parts[0][1]) for _, y in parts)
    layer = ""
    zero = case.other == 0
    for text in case.runs.reference if not apart and not shards else ():
        other = Name.of(text)
        if other.kind == case.name.kind and other.stem != case.name.stem:
            array = case.runs.reference[text]
            if array.shape == zero.shape and np.array_equal(array == 0, zero):
                layer = text
                break
    return {"apart": apart, "shards": shards, "layer": layer, "parts": len(parts), "copies": len(case.copies)}


# --- causes -----------------------------------------------------------------------------------------------------------


def _dropout_scaled(case: Case, pattern: Pattern) -> bool:
    return case.activation and bool(pattern.numbers["scaled"]) and pattern.numbers["factor"] > 1.0


def _other_rate(case: Case, pattern: Pattern) -> bool:
    """Whether the factor is that of two rates, as the shares of zeros show them."""
    numbers = pattern.numbers
    keep = [1.0 - numbers["p"], 1.0 - numbers["p_reference"]]
    return bool(numbers["factor"] != 1.0 and abs(numbers["factor"] * keep[0] / keep[1] - 1.0) < 0.05)


_MASK = ("another mask{ranks}: {lost} values are zero where the reference is not, {gained} the other way round, all "
         "others are right; ")
_DROP = "`model.eval()` against `model.train()`; p"

CAUSES = (
    Cause("dropout_without_scale", (DROPPED,), "{lost} elements ({percent} %), anywhere{ranks}, are zero, and all "
          "others are right: a mask of dropout without its scale 1/(1-p)", "the scale of the dropout",
          lambda case, pattern: case.activation and pattern.numbers["factor"] == 1.0),
    Cause("dropout", (DROPPED,), "{lost} elements ({percent} %), anywhere{ranks}, are zero, and all others are "
          "{factor} times the reference: dropout with p = {p}, which the reference does not have", _DROP,
          _dropout_scaled),
    Cause("dropout", (MASK,), "dropout with another rate{ranks}: {kept} of the values are kept, and what both keep "
          "is {factor} times the reference", _DROP, _other_rate),
    Cause("mask_differs_in_replica", (MASK,), _MASK + "the copies of one value have different masks",
          "one seed of dropout for replicated regions", every(activation, has(apart=True, factor=1.0))),
    Cause("mask_of_shard_index", (MASK,), _MASK +
          "all {parts} parts have the same mask: that of an element's index in its part",
          "a seed of dropout for each rank of a sharded region", every(activation, has(shards=True, factor=1.0))),
    Cause("mask_of_other_layer", (MASK,), _MASK + "it is the mask of {layer}",
          "layers counted from 0 in each stage; one stream of random numbers for several layers",
          lambda case, pattern: bool(pattern.numbers["layer"]) and pattern.numbers["factor"] == 1.0),
    Cause("mask_of_other_seed", (MASK,), _MASK + "a mask of another seed, step or layer",
          "seeds and streams of random numbers", every(activation, has(factor=1.0))),
)
