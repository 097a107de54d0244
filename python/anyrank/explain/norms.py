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
from anyrank.explain.scaled import FACTOR
from anyrank.explain.tensors import Array, Case, Name, Runs, Tensors
from anyrank.explain.words import some

NORM, OWN_NORM, SETS = "norm", "norm of own parts", "norm of other parameters"
INITIAL, SEEDED_ALIKE, RESCALED = "unrelated values", "shards alike", "unrelated values of another size"
REPLICA, BLOCKS = "replica of other values", "blocks of constants"
MOST_BLOCKS = 8
LIMITS = tuple(x * 10.0 ** e for e in range(-5, 2) for x in (1.0, 2.0, 5.0))  # usual ones of clip_grad_value_
NEAR = 2e-5  # relative: what sums of many squares in fp32 leave
MOST, MOST_CUT, MOST_SOUGHT = 1 << 26, 1 << 22, 1 << 24  # elements that are added up, cut, and looked for
MOST_KINDS = 24  # of modules that are combined


class Gradients:
    """Squares of a step's gradients, by parameter. held: of the other run's, those of each rank's own part."""

    def __init__(self, runs: Runs, step: int) -> None:
        self.square: dict[str, float] = {}
        self.other: dict[str, float] = {}
        self.held: dict[int, dict[str, float]] = collections.defaultdict(dict)
        self.ndim: dict[str, int] = {}
        self.sum = self.largest = 0.0
        self.clipped = dict.fromkeys(LIMITS, 0.0)
        names = [name for name in runs.reference if (n := Name.of(name)).kind == "grad" and n.step == step]
        size = 0
        self.few = sum(runs.reference[name].size for name in names) <= MOST_CUT
        for name in names:
            array = np.asarray(runs.reference[name], np.float64)
            size += array.size
            if size > MOST:
                self.square.clear()
                return
            self._add(name, np.abs(array), runs)

    def _add(self, name: str, sizes: Array, runs: Runs) -> None:
        self.square[name] = float((sizes ** 2).sum())
        self.ndim[name] = sizes.ndim
        self.sum += float(sizes.sum())
        self.largest = max(self.largest, float(sizes.max(initial=0.0)))
        for limit in LIMITS if self.few else ():
            self.clipped[limit] += float((np.minimum(sizes, limit) ** 2).sum())
        if isinstance(runs.other, Tensors) and name in runs.other:
            self.other[name] = float((np.asarray(runs.other[name], np.float64) ** 2).sum())
            for copy in runs.other.parts(name):
                if copy.rank is not None:
                    self.held[copy.rank][name] = sum(float((v.astype(np.float64) ** 2).sum()) for v in copy.values)

    def own(self) -> dict[int, float]:
        """The norm of what each rank holds."""
        return {rank: math.sqrt(sum(squares.values())) for rank, squares in sorted(self.held.items())}

    def repeats(self, name: str) -> float:
        """How often ranks hold each element."""
        return sum(of.get(name, 0.0) for of in self.held.values()) / self.other[name] if self.other.get(name) else 1.0


def _sets(names: typing.Sequence[str], gradients: Gradients) -> dict[str, list[str]]:
    """Parameters that a mistake affects together: one, those of a kind, of a module, of as many dimensions, and those
    that ranks hold as often."""
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name in names:
        stem = Name.of(name).stem
        parts = stem.split(".")
        groups["one", stem].append(name)
        groups["kind", re.sub(r"\d+", "*", stem)].append(name)
        groups["leaf", parts[-1]].append(name)
        groups["dimensions", str(min(gradients.ndim[name], 2))].append(name)
        groups["repeats", str(round(gradients.repeats(name)))].append(name)
        groups["ends", ".".join(parts[-2:])[-11:]].append(name)
        if len(parts) > 1:
            groups["module of", parts[-2][-4:]].append(name)
        for n in range(1, len(parts)):
            groups["module", ".".join(parts[:n])].append(name)
        groups["last", re.sub(r"\d+", "*", ".".join(parts[-2:]))].append(name)
    return {f"{kind} {key}": members for (kind, key), members in groups.items() if len(members) < len(names)}


def _norms(case: Case) -> typing.Iterator[Pattern]:
    gradients = Gradients(case.runs, case.name.step)
    total = sum(gradients.square.values())
    reference, norm = float(case.ref.ravel()[0]), math.sqrt(total)
    if not gradients.square or case.reference.size != 1 or not abs(norm - reference) <= 1e-4 * norm:
        return  # the reference's is another norm, or of other gradients
    scale = reference / norm  # by which the reference's arithmetic is off
    own = {rank: scale * of for rank, of in gradients.own().items()}
    yield from _of_ranks(case, own, norm)
    values: dict[str, float] = {"not rooted": total, "sum of sizes": gradients.sum, "largest": gradients.largest,
                                "sum of norms": sum(map(math.sqrt, gradients.square.values()))}
    for n in case.runs.group_sizes:
        values[f"over the root of {n}"], values[f"times the root of {n}"] = norm / math.sqrt(n), norm * math.sqrt(n)
    value = float(case.val.ravel()[0])
    for how, x in values.items():
        if abs(x - value) <= NEAR * abs(x):
            yield Pattern(NORM, np.full(case.shape, x), {"how": how, "norm": value, "reference": reference},
                          trials=len(values))
    for limit, square in gradients.clipped.items():
        if abs(math.sqrt(square) - value) <= NEAR * value and limit < gradients.largest:
            numbers = {"how": "clipped", "limit": limit, "norm": value, "reference": reference}
            yield Pattern(NORM, np.full(case.shape, math.sqrt(square)), numbers, trials=len(LIMITS))
    yield from _of_formats(case, gradients, value, reference)
    yield from _of_sets(case, gradients, total, value)


def _of_formats(case: Case, gradients: Gradients, value: float, reference: float) -> typing.Iterator[Pattern]:
    """A number of bf16 near the reference; or the norm of one parameter, of several that are clipped each alone."""
    numbers = {"norm": value, "reference": reference}
    bits = [int(np.float32(x).view(np.uint32)) & 0xffff for x in (value, reference)]
    if bits[0] == 0 != bits[1] and abs(value / reference - 1.0) < 2.0 ** -5:
        yield Pattern(NORM, case.val, {**numbers, "how": "bf16"})
    if case.name.with_kind("clip").replace(":", ".call2:", 1) in case.runs.other:
        for name, square in gradients.square.items():
            if abs(math.sqrt(square) - value) <= max(NEAR, 8.0 * case.unit) * value:
                yield Pattern(NORM, case.val, {**numbers, "how": "each", "which": Name.of(name).stem},
                              trials=len(gradients.square))


def _alike(case: Case, values: typing.Sequence[float]) -> Parts:
    return [[np.full(part.shape, value) for part in copy.values] for copy, value in zip(case.copies, values)]


def _of_ranks(case: Case, own: dict[int, float], norm: float) -> typing.Iterator[Pattern]:
    """Each rank's own norm, or one number of them."""
    if len(own) < 2:
        return
    numbers = {"low": min(own.values()), "high": max(own.values()), "norm": float(case.val.ravel()[0]),
               "reference": norm}
    by_copy = [own.get(copy.rank if copy.rank is not None else -1, norm) for copy in case.copies]
    if any(abs(x - norm) > NEAR * norm for x in by_copy):
        yield Pattern(OWN_NORM, _alike(case, by_copy), {**numbers, "how": "own"})
    for how, x in (("mean", sum(own.values()) / len(own)), ("sum", sum(own.values())),
                   ("rank", next(iter(own.values()))), ("largest rank", max(own.values())),
                   ("all", math.sqrt(sum(x ** 2 for x in own.values())))):
        yield Pattern(OWN_NORM, np.full(case.shape, x), {**numbers, "how": how}, trials=5)
    # Of a mesh's dimension alone: ranks are counted outermost first.
    sizes, inner = list(case.runs.mesh.items()), 1
    for name, n in reversed(sizes):
        groups: dict[int, list[float]] = collections.defaultdict(list)
        for rank, x in own.items():
            groups[rank // (inner * n) * inner + rank % inner].append(x)
        if 1 < n < len(own):
            of = {rank: math.sqrt(sum(x ** 2 for x in groups[rank // (inner * n) * inner + rank % inner]))
                  for rank in own}
            values = [of.get(copy.rank if copy.rank is not None else -1, norm) for copy in case.copies]
            if any(abs(x - norm) > NEAR * norm for x in values):
                yield Pattern(OWN_NORM, _alike(case, values), {**numbers, "how": f"sum over {name} alone"}, trials=3)
        inner *= n


def _of_sets(case: Case, gradients: Gradients, total: float, value: float) -> typing.Iterator[Pattern]:
    """Sets of parameters left out, or counted more than once: the smallest that fits."""
    names = list(gradients.square)
    apart = value ** 2 - total
    within = NEAR * max(total, value ** 2)
    best: tuple[int, str, list[str], float] | None = None
    for what, members in _sets(names, gradients).items():
        square = sum(gradients.square[name] for name in members)
        repeats = {round(gradients.repeats(name)) for name in members}
        more = [-1.0, 1.0, *(n - 1.0 for n in (*case.runs.group_sizes, *repeats) if n > 2)]
        for times in more if square > 16.0 * within else ():
            if abs(times * square - apart) <= within and (best is None or len(members) < best[0]):
                best = (len(members), what, members, times)
    best = best or _of_kinds(case, gradients, apart)
    if best is not None:
        x = math.sqrt(max(total + best[3] * sum(gradients.square[name] for name in best[2]), 0.0))
        yield Pattern(SETS, np.full(case.shape, x), {"which": some(Name.of(name).stem for name in best[2]),
                                                    "more": best[3], "times": f"{best[3] + 1.0:.0f}"},
                      trials=4 * len(names))


def _of_kinds(case: Case, gradients: Gradients, apart: float) -> tuple[int, str, list[str], float] | None:
    """Two or three kinds of modules; so many are tried that only what rounding leaves is near enough."""
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for name in gradients.square:
        if apart < 0.0 or gradients.repeats(name) > 1.5 or not gradients.held:
            kinds[re.sub(r"\d+", "*", Name.of(name).module)].append(name)
    squares = {kind: sum(gradients.square[name] for name in names) for kind, names in kinds.items()}
    for n in (2, 3) if len(kinds) <= MOST_KINDS else ():
        for some_kinds in itertools.combinations(squares, n):
            square = sum(squares[kind] for kind in some_kinds)
            for times in (-1.0,) if apart < 0.0 else (1.0, *(size - 1.0 for size in case.runs.group_sizes if size > 2)):
                if abs(times * square - apart) <= NEAR / 8.0 * sum(gradients.square.values()):
                    names = [name for kind in some_kinds for name in kinds[kind]]
                    return len(names), ", ".join(some_kinds), names, times
    return None


# --- initial values ---------------------------------------------------------------------------------------------------


def _runs(values: Array) -> list[slice]:
    """Where consecutive elements are equal."""
    edges: Array = np.flatnonzero(np.diff(values)) + 1
    return [slice(a, b) for a, b in zip([0, *edges.tolist()], [*edges.tolist(), values.size])]


def _constants(case: Case) -> typing.Iterator[Pattern]:
    """A vector of a few blocks of constants: some blocks have another constant."""
    if len(case.shape) != 1 or case.by_rank and len({v.tobytes() for c in case.copies for v in c.values}) > 1:
        return
    blocks = [_runs(case.ref), _runs(case.val)]
    if max(map(len, blocks)) > MOST_BLOCKS or min(s.stop - s.start for of in blocks for s in of) < 2:
        return
    edges = sorted({s.start for of in blocks for s in of} | {case.ref.size})
    apart = [(a, b - 1) for a, b in zip(edges, edges[1:]) if case.ref[a] != case.val[a]]
    text = "; ".join(f"elements {a} to {b} are {case.val[a]:.4g} instead of {case.ref[a]:.4g}" for a, b in apart)
    moved = np.array_equal(np.sort(case.ref), np.sort(case.val))
    yield Pattern(BLOCKS, case.val, {"text": text, "moved": moved, "blocks": len(apart)}, fitted=0 if moved else 1)


def _initial(case: Case) -> typing.Iterator[Pattern]:
    """Values that are unrelated to the reference's. What they are is not known: it is their distribution that is."""
    yield from _constants(case)
    own: Parts = [list(copy.values) for copy in case.copies]
    if _shards_alike(case):
        yield Pattern(SEEDED_ALIKE, own, {"shards": len({str(copy.boxes) for copy in case.copies})}, fitted=2)
    if rank := _replica_apart(case):
        yield Pattern(REPLICA, own, {"rank": rank}, fitted=2)
        return
    ref, val = _first_copy(case)
    if ref.size < 32 or not (np.isfinite(ref).all() and np.isfinite(val).all()):
        return
    sizes = float(ref.std()), float(val.std())
    if not all(size > 1e-6 * case.scale for size in sizes) or _is_anywhere(case, ref, val):
        return
    cosine = float(np.corrcoef(ref, val)[0, 1])
    if abs(cosine) > 5.0 / math.sqrt(ref.size):
        return
    ratio = sizes[1] / sizes[0]
    unsure = 5.0 / math.sqrt(2.0 * ref.size)
    numbers = {"ratio": ratio, "cosine": cosine, "apart": len({v.tobytes() for c in case.copies for v in c.values}) > 1,
               "root": next((n for n in case.runs.group_sizes if abs(ratio / math.sqrt(n) - 1.0) < unsure
                             or abs(ratio * math.sqrt(n) - 1.0) < unsure), 0)}
    yield Pattern(INITIAL if abs(ratio - 1.0) <= unsure else RESCALED, own, numbers, fitted=9)


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
    wrong: dict[str, list[int]] = {}
    right = set()
    for copy in case.copies:
        if any(case.differs(values, box).any() for box, values in zip(copy.boxes, copy.values)):
            wrong.setdefault(str(copy.boxes), []).append(-1 if copy.rank is None else copy.rank)
        else:
            right.add(str(copy.boxes))
    return ", ".join(str(rank) for boxes, ranks in wrong.items() if boxes in right for rank in ranks)


def _is_anywhere(case: Case, ref: Array, val: Array) -> bool:
    """Whether many of the values are among the reference's parameters: then they are at other places, not others."""
    sought = np.unique(val[:: max(1, val.size // 64)].astype(np.float32))
    if _share_in(sought, ref) > 0.1 or np.allclose(np.sort(val), np.sort(ref), rtol=16.0 * case.unit,
                                                   atol=16.0 * case.unit * case.scale):
        return True
    looked = 0
    for name in case.runs.reference:
        if Name.of(name).kind != case.name.kind or looked > MOST_SOUGHT:
            continue
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
    off = case.val[case.seen.any(axis=1)]
    if not len(off):
        return False
    rows = off[::max(1, len(off) // 8)]
    lengths = np.linalg.norm(array.astype(np.float64), axis=1)[None] * np.linalg.norm(rows, axis=1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (rows @ array.T.astype(np.float64)) / lengths
    return bool((np.nan_to_num(cosines).max(1) > 0.95).mean() > 0.25)


def _shards_alike(case: Case) -> bool:
    """Whether ranks that hold different parts hold equal values, where the reference's parts are not equal."""
    different = {str(copy.boxes): copy for copy in case.copies if len(copy.boxes) == 1}
    if len(different) < 2 or len({copy.values[0].shape for copy in different.values()}) > 1:
        return False
    first, *rest = [copy.values[0] for copy in different.values()]
    references = [case.reference[copy.boxes[0]] for copy in different.values()]
    return bool(first.any() and np.ptp(first) > 0.0 and all(np.array_equal(first, values) for values in rest)
                and not any(np.array_equal(a, b) for a, b in itertools.combinations(references[:8], 2)))


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind == "clip":
        yield from _norms(case)
    if case.name.kind in ("init", "weight"):
        yield from _initial(case)


def _is(*hows: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: any(pattern.numbers["how"].startswith(how) for how in hows)


def _root_of_group(case: Case, pattern: Pattern) -> bool:
    square = pattern.numbers["factor"] ** 2
    fans = {float(n) for n in case.runs.group_sizes}
    if len(case.shape) == 2:  # of both fans, one of which is the shard's
        fans |= {sum(case.shape) / (sum(case.shape) - extent + extent / n) for n in case.runs.group_sizes
                 for extent in case.shape}
    return case.name.kind == "init" and any(abs(x - 1.0) < 1e-4 for n in fans for x in (square / n, square * n))


def _loaded(case: Case, pattern: Pattern) -> bool:
    """Whether other parameters are right, and no rank's part of this one: a checkpoint was loaded without it."""
    return bool(case.off.all()) and any(Name.of(name).kind == case.name.kind for name in case.runs.same)


CAUSES = (
    Cause("norm_mean_of_ranks", (OWN_NORM,), "the norm is the mean of the ranks' own norms, from {low} to {high}",
          "squares are added over ranks before the root", _is("mean")),
    Cause("norm_sum_of_ranks", (OWN_NORM,), "the norm is the sum of the ranks' own norms, from {low} to {high}",
          "squares are added over ranks before the root", _is("sum")),
    Cause("norm_counts_twice", (OWN_NORM,), "the norm counts what several ranks hold once per rank: {norm}, reference "
          "{reference}", "which ranks' parts the norm adds: copies once", _is("all")),
    Cause("norm_of_own_shards", (OWN_NORM,), "the norm is that of a rank's own gradients: {norm}, reference "
          "{reference} (own norms from {low} to {high})", "the all-reduce of the squares over all ranks that share "
          "parameters"),
    Cause("low_precision", (NORM,), "the norm is a number of bf16: {norm}, reference {reference}: its squares are "
          "added up in 16 bits, or it is cast", "`.float()` before squares are added", _is("bf16")),
    Cause("clipped_each", (NORM,), "the norm is that of {which} alone, and there are others: each parameter is clipped "
          "by its own norm", "one call of `clip_grad_norm_` with all parameters", _is("each")),
    Cause("norm_not_rooted", (NORM,), "the norm is its square: {norm}, reference {reference}", "the root of the sum",
          _is("not rooted")),
    Cause("norm_other_order", (NORM,), "the norm is of another order ({how}): {norm}, reference {reference}",
          "`norm_type`", _is("sum of", "largest")),
    Cause("clipped", (NORM,), "the norm of gradients cut at {limit} each: {norm}, reference {reference}",
          "`clip_grad_value_` before the norm", _is("clipped")),
    Cause("norm_of_own_shards", (NORM,), "the norm is the reference's {how}: {norm}, reference {reference}",
          "the all-reduce of the squares", _is("over")),
    Cause("norm_counts_twice", (NORM,), "the norm is the reference's {how}: all gradients are counted once per rank",
          "which ranks' parts the norm adds: copies once", _is("times")),
    Cause("norm_leaves_out", (SETS,), "the norm leaves out {which}", "which parameters the clipping gets",
          lambda case, pattern: pattern.numbers["more"] < 0.0),
    Cause("norm_counts_twice", (SETS,), "the norm counts {which} {times} times", "tied parameters; copies on several "
          "ranks"),
    Cause("constants_at_other_blocks", (BLOCKS,), "{text}: the same constants at other blocks", "which block of a "
          "packed vector (a gate's, a part's) gets which constant, and the order of the blocks",
          lambda case, pattern: pattern.numbers["moved"]),
    Cause("other_constants", (BLOCKS,), "{text}", "the constants by which this parameter is initialised",
          lambda case, pattern: not pattern.numbers["moved"]),
    Cause("shards_seeded_alike", (SEEDED_ALIKE,), "the shards have equal values, where the reference's differ",
          "the seed of each rank that initialises a shard"),
    Cause("replicas_apart", (REPLICA,), "the copy of rank {rank} has other values than the others, which are right",
          "the broadcast of initial values, the seed of replicated parameters"),
    Cause("weight_not_loaded", (RESCALED,), "unrelated to the reference, and {ratio} times as large: this parameter "
          "has not the values that others of its run have", "whether the checkpoint has it, by this name", _loaded),
    Cause("init_scale_of_shard", (RESCALED,), "another random draw, {ratio} times as large: the root of {root}, as by "
          "a fan of the shard's shape", "fan_in and fan_out of a sharded weight",
          lambda case, pattern: bool(pattern.numbers["root"]) and case.sharded),
    Cause("init_scale_of_shard", (FACTOR,), "the reference times {factor}, the root of a number of shards: the fan of "
          "the shard's shape", "fan_in and fan_out of a sharded weight", _root_of_group),
    Cause("other_initial_values", (INITIAL, RESCALED), "other initial values: unrelated to the reference's, and "
          "{ratio} times as large", "the seed, the order of random draws, or whether the checkpoint has this "
          "parameter"),
)
