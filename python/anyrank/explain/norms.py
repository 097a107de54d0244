# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients, computed again from dumped gradients; and initial values, which follow a distribution."""

from __future__ import annotations

import collections
import itertools
import math
import re
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.patterns import Parts, Pattern
from anyrank.explain.tensors import Array, Case, Name, Runs, Tensors
from anyrank.explain.words import some

INITIAL, SEEDED_ALIKE, RESCALED = "unrelated values", "shards alike", "unrelated values of another size"
REPLICA, BLOCKS = "replica of other values", "blocks of constants"
MOST_BLOCKS = 8
LIMITS = tuple(x * 10.0 ** e for e in range(-5, 2) for x in (1.0, 2.0, 5.0))  # usual ones of clip_grad_value_
NEAR = 2e-5  # relative: what sums of many squares in fp32 leave
MOST_KINDS = 24  # of modules that are combined
MOST, MOST_CUT, MOST_SOUGHT = 1 << 26, 1 << 22, 1 << 24  # elements that are added up, cut, and looked for

# --- norms of gradients -----------------------------------------------------------------------------------------------


class Gradients:
    """Squares of a step's gradients, by parameter. held: of the other run's, those of each rank's own part."""

    def __init__(self, runs: Runs, step: int) -> None:
        names = [name for name in runs.reference if (n := Name.of(name)).kind == "grad" and n.step == step]
        sizes = {name: np.abs(np.asarray(runs.reference[name], np.float64)) for name in names}
        count = sum(x.size for x in sizes.values())
        sizes = {} if count > MOST else sizes
        self.square = {name: float((x ** 2).sum()) for name, x in sizes.items()}
        self.ndim = {name: x.ndim for name, x in sizes.items()}
        self.sum = sum(float(x.sum()) for x in sizes.values())
        self.largest = max((float(x.max(initial=0.0)) for x in sizes.values()), default=0.0)
        self.clipped = {limit: sum(float((np.minimum(x, limit) ** 2).sum()) for x in sizes.values())
                        for limit in LIMITS if count <= MOST_CUT and limit < self.largest}
        self.other: dict[str, float] = {}
        self.held: dict[int, dict[str, float]] = collections.defaultdict(dict)
        for name in sizes if isinstance(runs.other, Tensors) else ():
            if name in runs.other and isinstance(runs.other, Tensors):
                self.other[name] = float((np.asarray(runs.other[name], np.float64) ** 2).sum())
                for copy in runs.other.parts(name):
                    if copy.rank is not None:
                        self.held[copy.rank][name] = sum(float((v.astype(np.float64) ** 2).sum()) for v in copy.values)

    def repeats(self, name: str) -> float:
        """How often ranks hold each element."""
        return sum(of.get(name, 0.0) for of in self.held.values()) / self.other[name] if self.other.get(name) else 1.0


def _norms(case: Case) -> typing.Iterator[Pattern]:
    gradients = Gradients(case.runs, case.name.step)
    total = sum(gradients.square.values())
    reference, norm, value = float(case.ref.ravel()[0]), math.sqrt(total), float(case.val.ravel()[0])
    if not gradients.square or case.reference.size != 1 or not abs(norm - reference) <= 1e-4 * norm:
        return  # the reference's is another norm, or of other gradients

    def pattern(cause: str, how: str, x: float, trials: int = 1) -> typing.Iterator[Pattern]:
        if abs(x - value) <= NEAR * abs(x):
            numbers = {"how": f"the norm is {how}: {value:.4g}, {norm:.4g} in the reference"}
            yield Pattern(f"norm: {cause}", np.full(case.shape, x), numbers, trials=trials)

    yield from _of_ranks(case, gradients, reference, norm)
    yield from _shared(case, gradients, total)
    for n in case.runs.group_sizes:
        yield from pattern("norm_of_own_shards", f"the reference's over the root of {n}", norm / math.sqrt(n), 8)
        yield from pattern("norm_counts_twice", f"the reference's times the root of {n}", norm * math.sqrt(n), 8)
    for how, x in (("not rooted", total), ("the sum of sizes", gradients.sum), ("the largest size", gradients.largest),
                   ("the sum of norms", sum(map(math.sqrt, gradients.square.values())))):
        yield from pattern("norm_other_order", how, x, 8)
    for limit, square in gradients.clipped.items():
        yield from pattern("clipped", f"that of gradients cut at {limit:g} each", math.sqrt(square), len(LIMITS))
    bits = [int(np.float32(x).view(np.uint32)) & 0xffff for x in (value, reference)]
    if bits[0] == 0 != bits[1] and abs(value / reference - 1.0) < 2.0 ** -5:
        yield from pattern("low_precision", "a number of bf16: its squares are added up in 16 bits, or it is cast",
                           value)
    if case.name.with_kind("clip").replace(":", ".call2:", 1) in case.runs.other:
        for name, square in gradients.square.items():
            yield from pattern("clipped_each", f"that of {Name.of(name).stem} alone, and there are others",
                               math.sqrt(square), len(gradients.square))
    yield from _of_sets(case, gradients, total, value)


def _of_ranks(case: Case, gradients: Gradients, reference: float, norm: float) -> typing.Iterator[Pattern]:
    """One number of the ranks' own norms."""
    own = {rank: reference / norm * math.sqrt(sum(squares.values())) for rank, squares in gradients.held.items()}
    if len(own) < 2:
        return
    low, high = min(own.values()), max(own.values())
    for how, cause, x in (("the mean of the ranks' own norms", "norm_of_own_shards", sum(own.values()) / len(own)),
                          ("the sum of the ranks' own norms", "norm_of_own_shards", sum(own.values())),
                          ("the first rank's own norm, which leaves out what others hold", "norm_leaves_out",
                           own[min(own)]),
                          ("the largest of the ranks' own norms", "norm_of_own_shards", high),
                          ("that of all ranks' gradients, copies once per rank", "norm_counts_twice",
                           math.sqrt(sum(x ** 2 for x in own.values())))):
        yield Pattern(f"norm: {cause}", np.full(case.shape, x), {
            "how": f"the norm is {how}, from {low:.4g} to {high:.4g}"}, trials=5)


def _sets(gradients: Gradients) -> list[list[str]]:
    """Parameters that a mistake affects together: one, those of a kind, of a module, of as many dimensions, and those
    that ranks hold as often."""
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name in gradients.square:
        stem = Name.of(name).stem
        parts, kind = stem.split("."), re.sub(r"\d+", "*", stem)
        keys = [("one", stem), ("kind", kind), ("last", ".".join(kind.split(".")[-2:])), ("leaf", parts[-1]),
                ("dimensions", str(min(gradients.ndim[name], 2))), ("repeats", str(round(gradients.repeats(name)))),
                ("ends", ".".join(parts[-2:])[-11:]),
                *(("module of", part[-4:]) for part in parts[-2:-1]),
                *(("module", ".".join(parts[:n])) for n in range(1, len(parts)))]
        for key in keys:
            groups[key].append(name)
    return list(groups.values())


def _shared(case: Case, gradients: Gradients, total: float) -> typing.Iterator[Pattern]:
    """Ranks' norms that differ and whose squares add up to the reference's and, once for each rank more, those of
    parameters that all of them count."""
    values = [float(copy.values[0].ravel()[0]) for copy in case.copies]
    n, square = len({*values}), sum(x ** 2 for x in {*values})
    if n not in case.runs.group_sizes or not math.isfinite(square):
        return
    sums = {sum(gradients.square[name] for name in members): members for members in _sets(gradients)}
    counted = [(0.0, ""), *((x, f", {some(Name.of(name).stem for name in members)} in each") for x, members in
                            sums.items()),
               *((total - x, f", all but {some(Name.of(name).stem for name in members)} in each")
                 for x, members in sums.items())]
    for i, (more, what) in enumerate(counted):
        rest = total + (n - 1) * more - square
        if abs(rest) <= NEAR * total:
            yield Pattern("norm: norm_of_own_shards", [[np.full(case.shape, math.sqrt(max(x ** 2 + rest, 0.0)))]
                                                       for x in values], {
                "how": f"the {n} ranks' norms differ (from {min(values):.4g} to {max(values):.4g}), and their squares "
                f"add up to the reference's, {math.sqrt(total):.4g}{what}: each has the norm of its own part"},
                trials=1 + i)
            return


def _of_sets(case: Case, gradients: Gradients, total: float, value: float) -> typing.Iterator[Pattern]:
    """Parameters that a mistake affects together left out, or counted more than once: the smallest set that fits."""
    apart, within = value ** 2 - total, NEAR * max(total, value ** 2)
    found: list[tuple[float, int, float, list[str]]] = []
    for near, members in [*((1.0, members) for members in _sets(gradients)), *_of_kinds(gradients, apart < 0.0)]:
        square = sum(gradients.square[name] for name in members)
        repeats = {round(gradients.repeats(name)) for name in members}
        for times in [-1.0, 1.0, *(n - 1.0 for n in (*case.runs.group_sizes, *repeats) if n > 2)]:
            if len(members) < len(gradients.square) and square > 16.0 * within and (
                    abs(times * square - apart) <= near * within):
                found.append((-near, len(members), times, members))
    if found:
        _, _, times, members = min(found, key=lambda row: row[:2])
        which = some(Name.of(name).stem for name in members)
        x = math.sqrt(max(total + times * sum(gradients.square[name] for name in members), 0.0))
        yield Pattern("norm: norm_leaves_out" if times < 0.0 else "norm: norm_counts_twice", np.full(case.shape, x), {
            "how": f"the norm {f'leaves out {which}' if times < 0.0 else f'counts {which} {times + 1.0:.0f} times'}"},
            trials=4 * len(gradients.square))


def _of_kinds(gradients: Gradients, every: bool) -> typing.Iterator[tuple[float, list[str]]]:
    """Two or three kinds of modules; so many are tried that only what rounding leaves is near enough."""
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for name in gradients.square:
        if every or gradients.repeats(name) > 1.5 or not gradients.held:
            kinds[re.sub(r"\d+", "*", Name.of(name).module)].append(name)
    for n in (2, 3) if len(kinds) <= MOST_KINDS else ():
        yield from ((0.125, sum(of, [])) for of in itertools.combinations(kinds.values(), n))


# --- initial values ---------------------------------------------------------------------------------------------------


def _constants(case: Case) -> typing.Iterator[Pattern]:
    """A vector of a few blocks of constants: some blocks have another constant."""
    if len(case.shape) != 1 or case.by_rank and len({v.tobytes() for c in case.copies for v in c.values}) > 1:
        return
    cuts: list[Array] = [np.flatnonzero(np.diff(x)) + 1 for x in (case.ref, case.val)]
    if max(map(len, cuts)) >= MOST_BLOCKS or min(np.diff([0, *at, case.ref.size]).min() for at in cuts) < 2:
        return
    edges = [0, *np.unique(np.concatenate(cuts)).tolist(), case.ref.size]
    how = "; ".join(f"elements {a} to {b - 1} are {case.val[a]:.4g} instead of {case.ref[a]:.4g}"
                    for a, b in zip(edges, edges[1:]) if case.ref[a] != case.val[a])
    moved = np.array_equal(np.sort(case.ref), np.sort(case.val))
    yield Pattern(BLOCKS, case.val, {"how": how + ": the same constants at other blocks" * moved}, int(not moved))


def _initial(case: Case) -> typing.Iterator[Pattern]:
    """Values that are unrelated to the reference's. What they are is not known: it is their distribution that is."""
    yield from _constants(case)
    own: Parts = [list(copy.values) for copy in case.copies]
    if _shards_alike(case):
        yield Pattern(SEEDED_ALIKE, own, {}, fitted=2)
    if rank := _replica_apart(case):
        yield Pattern(REPLICA, own, {"rank": rank}, fitted=2)
        return
    ref, val = _first_copy(case)
    if ref.size < 32 or not (np.isfinite(ref).all() and np.isfinite(val).all()):
        return
    sizes = float(ref.std()), float(val.std())
    if min(sizes) <= 1e-6 * case.scale or _is_anywhere(case, ref, val) or (
            abs(float(np.corrcoef(ref, val)[0, 1])) > 5.0 / math.sqrt(ref.size)):
        return
    ratio, unsure = sizes[1] / sizes[0], 5.0 / math.sqrt(2.0 * ref.size)
    root = next((n for n in case.runs.group_sizes if min(
        abs(ratio / math.sqrt(n) - 1.0), abs(ratio * math.sqrt(n) - 1.0)) < unsure), 0)
    yield Pattern(INITIAL if abs(ratio - 1.0) <= unsure else RESCALED, own, {"ratio": ratio, "root": root}, fitted=9)


def _first_copy(case: Case) -> tuple[Array, Array]:
    """What differs in the first copy of which most does, in both runs: a few other rows are no other draw."""
    found: tuple[Array, Array] = (np.zeros(0), np.zeros(0))
    for copy in case.copies:
        off = [case.differs(values, box) for box, values in zip(copy.boxes, copy.values)]
        ref = np.concatenate([case.ref[box][is_off] for box, is_off in zip(copy.boxes, off)])
        if ref.size > 2 * found[0].size and 2 * ref.size > sum(values.size for values in copy.values):
            found = ref, np.concatenate([values[is_off] for values, is_off in zip(copy.values, off)]).astype(np.float64)
    return found


def _replica_apart(case: Case) -> str:
    """The rank whose copy differs where another rank's copy of the same elements is right; ""."""
    right = {str(copy.boxes) for copy in case.copies
             if not any(case.differs(values, box).any() for box, values in zip(copy.boxes, copy.values))}
    return ", ".join(str(copy.rank) for copy in case.copies if str(copy.boxes) in right and any(
        case.differs(values, box).any() for box, values in zip(copy.boxes, copy.values)))


def _is_anywhere(case: Case, ref: Array, val: Array) -> bool:
    """Whether many of the values are among the reference's parameters: then they are at other places, not others."""
    sought = np.unique(val[:: max(1, val.size // 64)].astype(np.float32))
    if _share_in(sought, ref) > 0.1 or np.allclose(np.sort(val), np.sort(ref), rtol=16.0 * case.unit,
                                                   atol=16.0 * case.unit * case.scale):
        return True
    looked = 0
    for name in case.runs.reference:
        if Name.of(name).kind == case.name.kind and looked <= MOST_SOUGHT:
            array = np.asarray(case.runs.reference[name])
            looked += array.size
            if array.dtype.kind == "f" and (_share_in(sought, array) > 0.1 or _has_rows(case, array)):
                return True
    return False


def _share_in(sought: Array, array: Array) -> float:
    """How many of a few sorted values an array has."""
    values: Array = array.astype(np.float32).ravel()
    places = np.minimum(np.searchsorted(sought, values), sought.size - 1)
    return float(np.unique(values[sought[places] == values]).size) / sought.size


def _has_rows(case: Case, array: Array) -> bool:
    """Whether a row of the other run that differs is nearly one of an array's."""
    if array.ndim != 2 or case.val.ndim != 2 or array.shape[1] != case.shape[1] or case.shape[1] < 8:
        return False
    off: Array = case.val[case.seen.any(axis=1)]
    rows: Array = off[::max(1, len(off) // 8)]
    known: Array = array.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = rows @ known.T / (np.linalg.norm(known, axis=1)[None] * np.linalg.norm(rows, axis=1)[:, None])
    return bool(len(off) and (np.nan_to_num(cosines).max(1) > 0.95).mean() > 0.25)


def _shards_alike(case: Case) -> bool:
    """Whether ranks that hold different parts hold equal values, where the reference's parts are not equal."""
    different = {str(copy.boxes): copy for copy in case.copies if len(copy.boxes) == 1}
    held = [copy.values[0] for copy in different.values()]
    references = [case.reference[copy.boxes[0]] for copy in different.values()]
    return len(held) > 1 and bool(held[0].any() and np.ptp(held[0]) > 0.0) and all(
        np.array_equal(held[0], x) for x in held) and not any(
        np.array_equal(a, b) for a, b in itertools.combinations(references[:8], 2))


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "clip":
        yield from _norms(case)
    if case.name.kind in ("init", "weight"):
        yield from _initial(case)


# --- causes -----------------------------------------------------------------------------------------------------------


def _loaded(case: Case, pattern: Pattern) -> bool:
    """Whether other parameters are right, and no rank's part of this one: a checkpoint was loaded without it."""
    return bool(case.off.all()) and any(Name.of(name).kind == case.name.kind for name in case.runs.same)


LOOKS = {"norm_of_own_shards": "the all-reduce of the squares over all ranks that share parameters, before the root",
         "norm_counts_twice": "which ranks' parts the norm adds: copies and tied parameters once",
         "norm_leaves_out": "which parameters the clipping gets",
         "norm_other_order": "`norm_type`, the root of the sum",
         "clipped": "`clip_grad_value_` before the norm",
         "clipped_each": "one call of `clip_grad_norm_` with all parameters",
         "low_precision": "`.float()` before squares are added"}
CAUSES = (
    *(Cause(name, (f"norm: {name}",), "{how}", look) for name, look in LOOKS.items()),
    Cause("other_constants", (BLOCKS,), "{how}", "the constants by which this parameter is initialised, and which "
          "block of a packed vector (a gate's, a part's) gets which"),
    Cause("shards_seeded_alike", (SEEDED_ALIKE,), "the shards have equal values, where the reference's differ",
          "the seed of each rank that initialises a shard"),
    Cause("replicas_apart", (REPLICA,), "the copy of rank {rank} has other values than the others, which are right",
          "the broadcast of initial values, the seed of replicated parameters"),
    Cause("weight_not_loaded", (RESCALED,), "unrelated to the reference, and {ratio} times as large: this parameter "
          "has not the values that others of its run have", "whether the checkpoint has it, by this name", _loaded),
    Cause("init_scale_of_shard", (RESCALED,), "another random draw, {ratio} times as large: the root of {root}, as by "
          "a fan of the shard's shape", "fan_in and fan_out of a sharded weight",
          lambda case, pattern: pattern.numbers["root"] > 0 and case.sharded),
    Cause("other_initial_values", (INITIAL, RESCALED), "other initial values: unrelated to the reference's, and "
          "{ratio} times as large", "the seed, the order of random draws, or whether the checkpoint has this "
          "parameter"),
)
