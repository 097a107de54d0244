# SPDX-License-Identifier: Apache-2.0
"""Tables of cosines and sines: the angles of RoPE, position times frequency, with other frequencies or positions."""

from __future__ import annotations

import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.replay.attention import BASES
from anyrank.explain.replay.sources import thinned, where_wrong
from anyrank.explain.tensors import Array, Case, Name

MOST_POSITIONS = 1024


def _partner(case: Case) -> tuple[str, bool] | None:
    """The table of sines for one of cosines, or the other way round, and whether the case's is that of cosines."""
    known = [(text, Name.of(text)) for text in case.runs.reference]
    names = [text for text, name in known if name.kind == "fwd" and name.step == case.name.step]
    at = names.index(str(case.name)) if str(case.name) in names else -1
    for other in (at - 1, at + 1) if at >= 0 else ():
        if not 0 <= other < len(names) or names[other] not in case.runs.other:
            continue
        y = case.runs.reference[names[other]]
        if y.shape == case.runs.reference[str(case.name)].shape and y.dtype.kind == "f":
            square = case.ref ** 2 + y.astype(np.float64) ** 2
            if square.max() > 0.0 and np.ptp(square) <= 0.02 * square.max():
                return names[other], other > at
    return None


def _angles(cosines: Array, sines: Array) -> tuple[float, Array]:
    """The tables' length, and the angles [.., positions, features]."""
    return float(np.median(np.hypot(cosines, sines))), np.arctan2(sines, cosines)


def positions_of(angles: Array, frequencies: Array) -> Array | None:
    """The whole number of each row of angles that the frequencies show; None: one has none."""
    tried = np.arange(-MOST_POSITIONS // 8, MOST_POSITIONS)
    rows = np.unique(np.round(angles, 5), axis=0, return_inverse=True)
    apart = np.abs(np.exp(1j * rows[0][:, None, :]) - np.exp(1j * tried[None, :, None] * frequencies)).max(-1)
    best = apart.argmin(-1)
    if apart[np.arange(len(best)), best].max() > 1e-2:
        return None
    result: Array = tried[best][rows[1].reshape(-1)]
    return result


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) < 2 or thinned(case):
        return
    found = _partner(case) if 1 < case.shape[-2] <= MOST_POSITIONS else None
    if found is None:
        return
    tables = [np.broadcast_to(run[found[0]].astype(np.float64), case.shape)
              for run in (case.runs.reference, case.runs.other)]
    both = [(own, table) if found[1] else (table, own) for own, table in zip((case.ref, case.val), tables)]
    (length, angles), (other_length, other_angles) = (_angles(*pair) for pair in both)
    rows, other_rows = (x.reshape(-1, case.shape[-1]) for x in (angles, other_angles))
    frequencies = np.mod(rows[1] - rows[0], 2.0 * np.pi)
    right = positions_of(rows, frequencies)
    if right is None:
        return

    def held(kind: str, size: float, at: Array, by: Array, fitted: int = 0, **numbers: typing.Any) -> Pattern:
        turned = at[:, None] * by
        values = size * (np.cos(turned) if found[1] else np.sin(turned))
        return Pattern(kind, where_wrong(case, values.reshape(case.shape)), numbers, fitted)

    if abs(other_length / length - 1.0) > 1e-4:
        yield held("angles_length", other_length, right, frequencies, 1, factor=other_length / length)
    here = positions_of(other_rows, frequencies)
    if here is not None and (here != right).any():
        moved = np.unique(here - right)
        if len(moved) == 1:
            yield held("angles_offset", length, here, frequencies, shift=int(moved[0]))
        else:
            again = np.diff(here.reshape(-1, case.shape[-2]), axis=1)
            yield held("angles_restart" if (again < 0).any() else "angles_positions", length, here, frequencies, 1)
    yield from _other_frequencies(held, other_rows, right, frequencies, other_length)


def _other_frequencies(held: typing.Callable[..., Pattern], rows: Array, right: Array, frequencies: Array,
                       length: float) -> typing.Iterator[Pattern]:
    """One factor for all, another base, or others of each feature."""
    own = np.mod(rows[1] - rows[0], 2.0 * np.pi)
    factor = float(np.median(own / frequencies))
    ratio = ratio_of(factor)
    exact = ratio[0] / ratio[1] if ratio else factor
    if np.allclose(own, frequencies, rtol=1e-5, atol=0.0):
        return
    yield held("angles_stretch", length, right, exact * frequencies, 0 if ratio else 1, factor=exact)
    half = len(own) // 2 if np.allclose(own[:len(own) // 2], own[len(own) // 2:]) else 0
    pairs = own[:half] if half else own[::2]
    n = 2 * len(pairs)
    for base in BASES:
        for by in (n, 2 * n, 4 * n):
            usual = base ** (-np.arange(0, n, 2) / by)
            if np.allclose(usual, pairs, rtol=1e-3):
                yield held("angles_theta", length, right, np.tile(usual, 2) if half else np.repeat(usual, 2), base=base)
    # Late rows say a frequency to more digits than the first two, whose whole turns the first two say.
    far, at = rows[right.argmax()], float(right.max() - right[0])
    turns = np.round((own * at - np.mod(far - rows[0], 2.0 * np.pi)) / (2.0 * np.pi))
    by_far = (np.mod(far - rows[0], 2.0 * np.pi) + 2.0 * np.pi * turns) / at if at > 0.0 else own
    slow = by_far / frequencies
    yield held("angles_each", length, right, by_far, 2, low=float(slow.min()), high=float(slow.max()))


LOOK = "rope_theta, rope_scaling, rotary_emb_base"
CAUSES = (
    Cause("rope_attention_factor", ("angles_length",), "cosines and sines times {factor}", "attention_factor of YaRN"),
    Cause("rope_offset", ("angles_offset",), "the angles of positions {shift} further on", "position_ids: padding, a "
          "cache's length, a start at 1"),
    Cause("rope_restarts", ("angles_restart",), "the angles of positions that start again within a sample",
          "position_ids of a chunk, a rank's part or a document"),
    Cause("rope_positions", ("angles_positions",), "the angles of other positions", "position_ids"),
    Cause("rope_theta", ("angles_stretch",), "RoPE's angles times {factor}", LOOK),
    Cause("rope_theta", ("angles_theta",), "RoPE's angles of the base {base}", LOOK),
    Cause("rope_theta", ("angles_each",), "RoPE's angles with other frequencies: times {low} to {high}", LOOK),
)
