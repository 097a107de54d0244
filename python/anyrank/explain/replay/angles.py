# SPDX-License-Identifier: Apache-2.0
"""Tables of cosines and sines: the angles of RoPE, position times frequency, with other frequencies or positions."""

from __future__ import annotations

import itertools
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Pattern, ratio_of
from anyrank.explain.replay.attention import BASES, MOST_FEATURES
from anyrank.explain.replay.changes import POSITIONS, SETTINGS
from anyrank.explain.replay.sources import where_wrong
from anyrank.explain.tensors import Array, Case, Name

MOST_POSITIONS = 1024
OTHER_POSITIONS, OTHER_ANGLES = "positions of angles", "other angles"


def _tables(case: Case) -> list[tuple[Array, Array, bool]]:
    """(length, angles [positions, features], whether the case's are the cosines) of both runs, where the tensor beside
    is that of the sines or the cosines; else nothing."""
    known = [(text, Name.of(text)) for text in case.runs.reference]
    names = [text for text, name in known if (name.kind, name.step) == ("fwd", case.name.step)]
    at = names.index(str(case.name)) if str(case.name) in names else -2
    for other in (at - 1, at + 1):
        if not 0 <= other < len(names) or names[other] not in case.runs.other or (
                case.runs.reference[names[other]].shape != case.shape):
            continue
        found = []
        for own, run in ((case.ref, case.runs.reference), (case.val, case.runs.other)):
            table = np.broadcast_to(run[names[other]].astype(np.float64), case.shape)
            cosines, sines = (own, table) if other > at else (table, own)
            found.append((np.hypot(cosines, sines), np.arctan2(sines, cosines).reshape(-1, case.shape[-1]), other > at))
        if found[0][0].max() > 0.0 and np.ptp(found[0][0] ** 2) <= 0.02 * found[0][0].max() ** 2:
            return found
    return []


def positions_of(angles: Array, frequencies: Array) -> Array | None:
    """The whole number of each row of angles that the frequencies show; None: one has none."""
    tried = np.arange(-MOST_POSITIONS // 8, MOST_POSITIONS)
    rows, which = np.unique(np.round(angles, 5), axis=0, return_inverse=True)
    apart = np.abs(np.exp(1j * rows[:, None, :]) - np.exp(1j * tried[None, :, None] * frequencies)).max(-1)
    best = apart.argmin(-1)
    result: Array = tried[best][which.reshape(-1)]
    return result if apart[np.arange(len(best)), best].max() <= 1e-2 else None


def _turned(case: Case) -> typing.Iterator[Pattern]:
    """The output of a module that turns features in pairs, turned by the angles of other positions."""
    axis = next((axis for axis in (1, 2) if case.runs.seq and case.shape[axis:axis + 1] == (case.runs.seq,)), 0)
    if not axis or len(case.shape) not in (3, 4) or not np.isfinite(case.val).all():
        return
    there, width = np.moveaxis(case.ref, axis, 1).shape, case.shape[-1]
    sizes = [width] if len(there) == 4 else [n for n in range(4, MOST_FEATURES + 1, 2) if width % n == 0]
    for size, halves in itertools.product(sizes, (True, False)):
        ref, val = (_pairs(np.moveaxis(x, axis, 1).reshape(*there[:2], -1, size), halves) for x in (case.ref, case.val))
        if np.abs(np.abs(ref) - np.abs(val)).max() > 64.0 * case.unit * case.scale:
            continue
        delta = np.angle((val * ref.conj()).sum(2)).reshape(-1, size // 2)
        for base in BASES:
            frequencies = base ** (-2.0 * np.arange(size // 2) / size)
            by = positions_of(delta, frequencies)
            if by is None or not by.any():
                continue
            turned = ref * np.exp(1j * by.reshape(*there[:2], 1, 1) * frequencies)
            parts = (turned.real, turned.imag)
            flat = np.concatenate(parts, -1) if halves else np.stack(parts, -1)
            expected = np.moveaxis(flat.reshape(there), 1, axis)
            how = f"turned as at positions {by.min()} to {by.max()} further on"
            yield Pattern(OTHER_POSITIONS, where_wrong(case, expected), {"how": how}, 1)
            return


def _pairs(x: Array, halves: bool) -> Array:
    """Pairs of features as complex numbers."""
    n = x.shape[-1] // 2
    result: Array = x[..., :n] + 1j * x[..., n:] if halves else x[..., ::2] + 1j * x[..., 1::2]
    return result


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or case.reference.dtype.kind != "f" or len(case.shape) < 2 or case.every:
        return
    yield from _turned(case)
    if not 1 < case.shape[-2] <= MOST_POSITIONS or not (tables := _tables(case)):
        return
    (lengths, angles, cosines), (others, other, _) = tables
    length, own_length = float(np.median(lengths)), float(np.median(others))
    frequencies = np.mod(angles[1] - angles[0], 2.0 * np.pi)
    right = positions_of(angles, frequencies)
    if right is None:
        return

    frequencies = _sharper(angles, right, frequencies)

    def held(how: str, at: Array, by: Array, fitted: int = 0, size: float = length) -> Pattern:
        values = size * (np.cos if cosines else np.sin)(at[:, None] * by)
        return Pattern(OTHER_ANGLES if at is right else OTHER_POSITIONS, where_wrong(case, values.reshape(case.shape)),
                       {"how": how}, fitted)

    if abs(own_length / length - 1.0) > 1e-4:
        yield held(f"cosines and sines times {own_length / length:.4g}", right, frequencies, 1, own_length)
    here = positions_of(other, frequencies)
    if here is not None and (here != right).any():
        moved, again = np.unique(here - right), np.diff(here.reshape(-1, case.shape[-2]), axis=1)
        how = f"the angles of positions {moved[0]} further on" if len(moved) == 1 else (
            "the angles of positions that start again within a sample" if (again < 0).any() else
            "the angles of other positions, as {} in place of {}".format(*next(
                row for row in zip(here, right) if row[0] != row[1])))
        yield held(how, here, frequencies, int(len(moved) > 1))
    for how, by, fitted in _other_frequencies(other, right, frequencies):
        yield held(how, right, by, fitted, own_length)


def _sharper(rows: Array, positions: Array, frequencies: Array) -> Array:
    """Frequencies by the last row, which says them to more digits than the first two, which say the whole turns."""
    at = max(float(positions.max() - positions[0]), 1.0)
    far = np.mod(rows[positions.argmax()] - rows[0], 2.0 * np.pi)
    result: Array = (far + 2.0 * np.pi * np.round((frequencies * at - far) / (2.0 * np.pi))) / at
    return result


def _other_frequencies(rows: Array, right: Array, frequencies: Array) -> typing.Iterator[tuple[str, Array, int]]:
    """One factor for all, another base, or others of each feature."""
    own = np.mod(rows[1] - rows[0], 2.0 * np.pi)
    if np.allclose(own, frequencies, rtol=1e-5, atol=0.0):
        return
    factor = float(np.median(own / frequencies))
    ratio = ratio_of(factor)
    exact = ratio[0] / ratio[1] if ratio else factor
    yield f"RoPE's angles times {exact:.4g}", exact * frequencies, int(not ratio)
    half = len(own) // 2 if np.allclose(own[:len(own) // 2], own[len(own) // 2:]) else 0
    pairs = own[:half] if half else own[::2]
    n = 2 * len(pairs)
    for base in BASES:
        for by in (n, 2 * n, 4 * n):
            usual = base ** (-np.arange(0, n, 2) / by)
            if np.allclose(usual, pairs, rtol=1e-3):
                yield f"RoPE's angles of the base {base:g}", np.tile(usual, 2) if half else np.repeat(usual, 2), 0
    by_far = _sharper(rows, right, own)
    slow = by_far / frequencies
    yield f"RoPE's angles with other frequencies: times {slow.min():.4g} to {slow.max():.4g}", by_far, 2


CAUSES = (Cause("positions", (OTHER_POSITIONS,), "{how}", POSITIONS),
          Cause("rope_settings", (OTHER_ANGLES,), "{how}", f"{SETTINGS}, attention_factor of YaRN"))
