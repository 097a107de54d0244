# SPDX-License-Identifier: Apache-2.0
"""The gain of a norm: one added to it or not, applied twice, or left out."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Name

GAIN = "gain"
LEAST = 1e-2  # of a gain that is divided by


def _parameter(case: Case, leaf: str) -> Array | None:
    """A vector of the module before the step, one number for each feature."""
    step = case.name.step
    own = Name(f"{case.name.stem}.{leaf}", "new" if step > 1 else "init", max(step - 1, 1))
    array = case.runs.reference.get(str(own))
    return array.astype(np.float64) if array is not None and array.shape == case.shape[-1:] else None


def _ways(w: Array) -> typing.Iterator[tuple[str, str, Array, Array]]:
    """What happened, in words and kind, and what the output is divided by and multiplied with."""
    one = np.ones(w.shape)
    for text, right, other in (("1 + weight in place of weight", w, 1.0 + w),
                               ("weight in place of 1 + weight", 1.0 + w, w),
                               ("2 + weight in place of 1 + weight", 1.0 + w, 2.0 + w),
                               ("1 + weight in place of 2 + weight", 2.0 + w, 1.0 + w)):
        yield "offset", text, right, other
    for text, right, other in (("weight is applied once more", one, w), ("weight is applied once less", w, one),
                               ("1 + weight is applied once more", one, 1.0 + w),
                               ("1 + weight is applied once less", 1.0 + w, one)):
        yield "times", text, right, other


def patterns(case: Case) -> typing.Iterator[Pattern]:
    weight = _parameter(case, "weight") if case.name.kind == "fwd" and len(case.shape) > 1 else None
    if weight is None or not np.isfinite(weight).all() or np.ptp(weight) <= 1e-3 * np.abs(weight).max():
        return  # of equal gains any other factor may be the cause
    bias = _parameter(case, "bias")
    shift = bias if bias is not None else np.zeros(weight.shape)
    for how, text, right, other in _ways(weight):
        known = np.abs(right) > LEAST * np.abs(right).max()
        if 2 * known.sum() < known.size:
            continue
        ratio = np.divide(other, right, out=np.ones(weight.shape), where=known)
        expected = np.where(known, shift + (case.ref - shift) * ratio, case.val)
        yield Pattern(GAIN, expected, {"how": how, "text": text}, trials=8)


CAUSES = (
    Cause("gain_offset", (GAIN,), "each feature is scaled by {text}: the norm's gain has another offset",
          "the norm's weight as 1 + weight (Gemma, zero-centred gains), at loading and in the forward pass",
          has(how="offset")),
    Cause("gain_twice_or_missing", (GAIN,), "{text}: the norm's gain is left out, or counts twice",
          "the product with the norm's weight, of fused kernels too", has(how="times")),
)
