# SPDX-License-Identifier: Apache-2.0
"""The first operation that is wrong, where both runs have a record of theirs (capture's operations/): found by going
back from what a rank has of the tensor that differs to results that are right.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import itertools
import math
import pathlib
import typing

import numpy as np

from anyrank._arrays import numpy_of
from anyrank._input import anything, flag, integer, list_of, map_of, parsed, read_json, record, string
from anyrank._safetensors import read as read_values
from anyrank.explain.causes import Cause
from anyrank.explain.explain import UNKNOWN, Answer, explain
from anyrank.explain.tensors import Array, Case, Copy, Name, Runs, Tensors
from anyrank.explain.words import RUNS, ranks_of

FOLDER = "operations"
NEAR = 2.0 ** -14  # of a result's largest element: what is less is rounding, of its inputs too
MOST_TOLD, MOST_CODE = 3, 90  # operations of one run alone that are told; characters of one
MOST_RUNS = 6  # of rows
SUM, MEAN = "sum", "mean"  # of ranks' values, that is the reference's
Box = typing.Tuple[slice, ...]
# Operations whose results are their inputs, in another shape or memory: no mistake is in them alone.
VIEWS = {f"aten.{name}" for name in (
    "view", "_unsafe_view", "t", "transpose", "permute", "detach", "alias", "expand", "clone", "unsqueeze", "squeeze",
    "_to_copy", "reshape", "contiguous", "copy_", "empty", "empty_like", "new_empty_strided",
    "lift_fresh")} | {"memory.read"}
COLLECTIVES = "c10d.", "_c10d_functional."
GIVEN = "memory.given"  # what an operation takes from before the record
# Operations that make one value of several, over dimensions that they are told, or over all.
REDUCTIONS = {f"aten.{name}" for name in (
    "sum", "mean", "linalg_vector_norm", "norm", "var", "var_mean", "std", "std_mean", "amax", "amin", "max", "min",
    "prod", "logsumexp", "_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "argmax", "argmin", "argsort",
    "any", "all", "count_nonzero", "median")}


@dataclasses.dataclass(frozen=True)
class Operation:
    """inputs: numbers of results, or parameters' names. of: the operation that this one is the backward pass of."""

    number: int
    name: str
    module: str
    file: str
    line: int
    code: str
    calls: tuple[str, ...]
    inputs: tuple[int | str, ...]
    results: tuple[int, ...]
    numbers: dict[str, typing.Any]
    backward: bool

    @property
    def text(self) -> str:
        code = " ".join("".join(c if c.isprintable() else " " for c in self.code).split())
        short = code if len(code) <= MOST_CODE else f"{code[:MOST_CODE]} .."
        return f"`{short}` ({pathlib.Path(self.file).name}:{self.line})"

    @property
    def back(self) -> str:
        return "the backward pass of " if self.backward else ""

    def key(self, exact: bool) -> tuple[typing.Any, ...]:
        """What operations of both runs have in common that are the same one."""
        return (self.backward, self.module, self.name, *((self.code, *self.calls) if exact else ()))


def _input(value: typing.Any) -> int | str:
    return string(value) if isinstance(value, str) else integer(0)(value)


_DOCUMENT = record({"operations": list_of(record({
    **dict.fromkeys(("name", "module", "file", "code"), string), "line": integer(), "calls": list_of(string),
    "inputs": list_of(_input), "results": list_of(integer(0)), "numbers": map_of(anything), "backward": flag}))})


class Stream:
    """The operations of one rank, in order."""

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        stem = folder / FOLDER / f"rank-{rank:05d}"
        path = stem.with_suffix(".json")
        rows = parsed(read_json(path, constants=True), _DOCUMENT, path)["operations"]
        self.operations = [Operation(i, row["name"], row["module"], row["file"], row["line"], row["code"],
                                     tuple(row["calls"]), tuple(row["inputs"]), tuple(row["results"]), row["numbers"],
                                     row["backward"])
                           for i, row in enumerate(rows)]
        self.entries = read_values(stem.with_suffix(".safetensors"))[0]
        self.makers = {result: one.number for one in self.operations for result in one.results}

    def value(self, result: int | str) -> Array | None:
        entry = self.entries.get(str(result))
        array: Array | None = None if entry is None else numpy_of(entry)
        return array

    def maker_of(self, values: Array, backward: bool, sizes: typing.Iterable[int]) -> int | None:
        """The first operation that gives these values, or these times one of the sizes, as a mean over ranks is
        recorded as summands; of a gradient's one of the backward pass, if any is."""
        results = [(one.number, array) for one in self.operations for result in one.results
                   if (array := self.value(result)) is not None and array.size == values.size
                   and array.dtype.kind == values.dtype.kind]
        results.sort(key=lambda one: backward and not self.operations[one[0]].backward)
        for size in (1, *sizes) if values.dtype.kind == "f" else (1,):
            wanted: Array = values.ravel() * size
            allowed = 2.0 ** -20 * float(np.abs(wanted).max(initial=0.0))
            for number, array in results:
                if np.allclose(array.ravel(), wanted, 0.0, allowed, equal_nan=True):
                    return number
        return None

    def before(self, number: int, ends: typing.Callable[[int], bool]) -> dict[int, set[int]]:
        """The operations that one follows from, in order, with the results that are on the way; up to results at which
        the way back ends."""
        found: dict[int, set[int]] = {}
        todo = [number]
        while todo:
            for result in self.operations[todo.pop()].inputs:
                maker = self.makers.get(result) if isinstance(result, int) else None
                if maker is None or not isinstance(result, int) or ends(result):
                    continue
                if maker not in found:
                    todo.append(maker)
                found.setdefault(maker, set()).add(result)
        return dict(sorted(found.items()))


def paired(reference: Stream, other: Stream) -> dict[int, int]:
    """Of each operation of the other run that the reference has too, the number there."""
    pairs: dict[int, int] = {}
    _pair(reference.operations, other.operations, True, pairs)
    return pairs


def _pair(a: list[Operation], b: list[Operation], exact: bool, pairs: dict[int, int]) -> None:
    """Pairs those whose keys stand in the same order; between them those that are alike but for their code."""
    x, y = ([one.key(exact) for one in of] for of in (a, b))
    at = 0, 0
    for block in difflib.SequenceMatcher(None, x, y, autojunk=False).get_matching_blocks():
        if exact:
            _pair(a[at[0]:block.a], b[at[1]:block.b], False, pairs)
        pairs.update((b[block.b + i].number, a[block.a + i].number) for i in range(block.size))
        at = block.a + block.size, block.b + block.size


# --- which results are right ------------------------------------------------------------------------------------------


def places(whole: tuple[int, ...], parts: typing.Sequence[tuple[int, ...]],
           mesh: typing.Mapping[str, int] | None) -> typing.Iterator[list[Box]]:
    """Each rank's box, for each way in which dimensions of the mesh may cut the whole into parts of these shapes, of
    which the last may be padded."""
    if mesh is None or any(len(part) != len(whole) for part in parts) or 0 in whole:
        return
    sizes = list(mesh.values())
    groups = [group for k in range(1, len(sizes) + 1) for group in itertools.combinations(range(len(sizes)), k)]
    cuts = [d for d in range(len(whole)) if any(part[d] != whole[d] for part in parts)]
    ranks = list(np.ndindex(*sizes))

    def lines(d: int, group: tuple[int, ...]) -> list[slice] | None:
        """Each rank's part of a dimension that this group cuts."""
        index = [functools.reduce(lambda i, axis: i * sizes[axis] + rank[axis], group, 0) for rank in ranks]
        lengths: dict[int, int] = {}
        if any(lengths.setdefault(i, part[d]) != part[d] for i, part in zip(index, parts)):
            return None
        ends = list(itertools.accumulate((lengths[i] for i in sorted(lengths)), initial=0))
        padded = len(set(lengths.values())) == 1 and ends[-2] < whole[d] <= ends[-1]
        return [slice(ends[i], min(ends[i + 1], whole[d])) for i in index] if padded or ends[-1] == whole[d] else None

    ways = [[(group, cut) for group in groups if (cut := lines(d, group)) is not None] for d in cuts]
    for chosen in itertools.product(*ways):
        if len(set().union(*(group for group, _ in chosen))) != sum(len(group) for group, _ in chosen):
            continue
        boxes = [[slice(0, n) for n in whole] for _ in ranks]
        for d, (_, cut) in zip(cuts, chosen):
            for box, line in zip(boxes, cut):
                box[d] = line
        yield [tuple(box) for box in boxes]


def unpadded(part: Array, box: Box) -> Array:
    """The part that its box has."""
    return part[tuple(slice(0, line.stop - line.start) for line in box)]


def near(x: Array, y: Array) -> bool:
    """Whether y is x up to rounding."""
    if x.dtype.kind not in "fc":
        return bool(np.array_equal(x, y))
    finite = np.abs(x[np.isfinite(x)])
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.allclose(x, y, NEAR, NEAR * float(finite.max(initial=0.0)), equal_nan=True))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """right: None where the ranks' parts cannot be put together. boxes: of each rank's part, as far as it is known.
    made: SUM or MEAN, where each rank has its own value, and over which dimensions of the mesh. order: of each rank,
    which of the reference's rows along a dimension it has, where that is not one piece of them; cut: whether it has a
    part of these."""

    right: bool | None
    boxes: typing.Mapping[int, Box] = dataclasses.field(default_factory=dict)
    made: str = ""
    over: tuple[str, ...] = ()
    order: typing.Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    dim: int = 0
    cut: bool = False


def judge(reference: Array, parts: typing.Mapping[int, Array], mesh: typing.Mapping[str, int],
          factors: typing.Sequence[int] = (1,)) -> Judgement:
    """Whether the ranks together have the reference: parts of it, summands of it or of its parts, means, or its rows
    in another order. factors: how many times the reference ranks may all have."""
    ranks = sorted(parts)
    found = list(places(reference.shape, [parts[rank].shape for rank in ranks], part_of(mesh, ranks)))
    for boxes in found:
        own = [unpadded(parts[rank], box) for rank, box in zip(ranks, boxes)]
        groups: dict[str, list[int]] = {}
        for i, box in enumerate(boxes):
            groups.setdefault(str(box), []).append(i)
        wholes = [reference[boxes[group[0]]] for group in groups.values()]
        if any(all(near(whole * n if n > 1 else whole, own[i]) for whole, group in zip(wholes, groups.values())
                   for i in group) for n in factors):
            return Judgement(True, dict(zip(ranks, boxes)))
        for over in lines_of(part_of(mesh, ranks) or {}) if reference.dtype.kind == "f" else ():
            if made := summands(list(zip(wholes, groups.values())), own, over.ranks):
                return Judgement(True, dict(zip(ranks, boxes)), made, over.names)
    for dim in range(min(reference.ndim, 3)) if len(parts) > 1 else ():
        if order := _rows(reference, [parts[rank] for rank in ranks], dim):
            cut = any(part.shape != reference.shape for part in parts.values())
            return Judgement(True, {}, "", (), dict(zip(ranks, order)), dim, cut)
    return Judgement(False, dict(zip(ranks, found[0]))) if found else Judgement(None)


def part_of(mesh: typing.Mapping[str, int], ranks: typing.Sequence[int]) -> dict[str, int] | None:
    """The mesh that some of its ranks are, as those of one stage; None: they are none."""
    sizes = tuple(mesh.values())
    lines = [len(set(line)) for line in zip(*(np.unravel_index(rank, sizes) for rank in ranks))]
    return dict(zip(mesh, lines)) if math.prod(lines) == len(ranks) else None


class Lines(typing.NamedTuple):
    """Dimensions of a mesh, and its ranks by where they are in the others."""

    names: tuple[str, ...]
    ranks: list[list[int]]


def lines_of(mesh: typing.Mapping[str, int]) -> typing.Iterator[Lines]:
    """All choices of dimensions, the fewest first."""
    number = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    names = [name for name, n in mesh.items() if n > 1]
    for chosen in (one for k in range(1, len(names) + 1) for one in itertools.combinations(names, k)):
        axes = [list(mesh).index(name) for name in chosen]
        size = math.prod(mesh[name] for name in chosen)
        yield Lines(chosen, np.moveaxis(number, axes, range(-len(axes), 0)).reshape(-1, size).tolist())


def summands(wholes: list[tuple[Array, list[int]]], own: list[Array], lines: list[list[int]]) -> str:
    """SUM or MEAN, where that of the values along each line is the whole that its ranks have; "": it is not so."""
    for made in (SUM, MEAN):
        for whole, group in wholes:
            within = [line for line in lines if set(line) & set(group)]
            sums = (sum(own[i].astype(np.float64) for i in line) / (1 if made == SUM else len(line)) for line in within)
            if not all(set(line) <= set(group) for line in within) or not all(
                    near(whole.astype(np.float64), np.asarray(one)) for one in sums):
                break
        else:
            return made
    return ""


def _rows(reference: Array, parts: list[Array], dim: int) -> tuple[tuple[int, ...], ...]:
    """Which of the reference's rows along a dimension each part has, where each is there as often as each other; (): it
    is not so, or most rows are alike and say nothing."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1:]) for part in (reference, *parts) if part.ndim == reference.ndim}
    if len(shapes) != 1 or any(part.ndim != reference.ndim for part in parts) or reference.shape[dim] < 2:
        return ()
    with np.errstate(all="ignore"):
        rows, *of_parts = (np.nan_to_num(np.moveaxis(one, dim, 0).reshape(one.shape[dim], -1).astype(np.float64),
                                         nan=7.0, posinf=3.0, neginf=-3.0) for one in (reference, *parts))
        weights = np.random.default_rng(0).standard_normal(rows.shape[1])
        keys, of_parts = rows @ weights, [one @ weights for one in of_parts]
    by_key = np.argsort(keys, kind="stable")
    allowed = NEAR * float(np.abs(rows).max(initial=0.0)) * math.sqrt(max(rows.shape[1], 1))
    if 2 * np.count_nonzero(np.diff(keys[by_key]) <= 2.0 * allowed) > len(keys):
        return ()
    order = []
    for one in of_parts:
        after = np.clip(np.searchsorted(keys[by_key], one), 1, len(keys) - 1)
        nearest = np.where(one - keys[by_key[after - 1]] < keys[by_key[after]] - one, after - 1, after)
        if (np.abs(keys[by_key[nearest]] - one) > allowed).any():
            return ()
        order.append(by_key[nearest])
    counts = np.bincount(np.concatenate(order), minlength=len(keys))
    return tuple(tuple(map(int, one)) for one in order) if counts.min() == counts.max() else ()


def rows_said(order: typing.Sequence[int]) -> str:
    """Row numbers, those in a row as first to last."""
    ends = [0, *(i for i in range(1, len(order)) if order[i] != order[i - 1] + 1), len(order)]
    runs = [f"{order[i]}" if j == i + 1 else f"{order[i]} to {order[j - 1]}" for i, j in zip(ends, ends[1:])]
    return ", ".join(runs[:MOST_RUNS]) + (" .." if len(runs) > MOST_RUNS else "")


# --- the search -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The first wrong operation: as the reference and as a rank has it; reference None: it has none in its place.
    alone: what each run alone does on the way to it from results that are right. after: where the other run alone
    communicates on the way from it, so that no cause is stated: it may be a rank's own on purpose. inputs: what it
    takes that is not simply the reference's, each in words. takes: how ranks have it. reduced: operations that reduce a
    dimension of which a rank has a part, and the dimension. sure: all that it takes is right. case: its result, None
    where the ranks' parts cannot be put together. cause: what a map may explain: the result or, where it is not right,
    what it takes."""

    reference: Operation | None
    other: Operation
    ranks: tuple[int, ...] = ()
    alone: tuple[tuple[Operation, ...], tuple[Operation, ...]] = ((), ())
    after: Operation | None = None
    inputs: tuple[str, ...] = ()
    takes: tuple[Judgement, ...] = ()
    reduced: tuple[tuple[Operation, int], ...] = ()
    sure: bool = False
    case: Case | None = None
    cause: Case | None = None

    @property
    def sentence(self) -> str:
        """What it does, on the ranks that have it wrong, and in the reference where that is something else."""
        one, two = self.reference, self.other
        where = f" in {two.module}" if two.module else ""
        if one is None:
            return f"{two.back}{two.text}{where}, which the reference does not do, gives other values"
        some = self.case is not None and 0 < len(self.ranks) < len(self.case.copies)
        on = f" on {ranks_of(self.ranks)}" if some else ""
        said = (f"what {two.text}{where} takes from before the step is another value{on}" if two.name == GIVEN else
                f"{two.back}{two.text}{where} is the first operation that gives other values{on}")
        if one.code != two.code:
            said += f", in the reference {one.text}"
        if self.is_perhaps_meant and self.after is not None:
            said += f", before {self.after.text}"
        return said + "".join(f"; its {'number' if key == 'other' else key} is {x}, in the reference {y}"
                              for key, (x, y) in self._numbers.items())

    @property
    def is_perhaps_meant(self) -> bool:
        """Whether nothing but its values is another, and what the other run communicates later may put them right."""
        return self.after is not None and not self.is_another and not self.inputs

    @property
    def is_another(self) -> bool:
        """Whether its code is other code in the reference, or it is told other numbers."""
        return self.reference is None or self.reference.code != self.other.code or bool(self._numbers)

    @functools.cached_property
    def _numbers(self) -> dict[str, tuple[typing.Any, typing.Any]]:
        """What the two runs tell it besides tensors, where that differs; not what follows from a part's size."""
        part = self.case is None or self.case.copies[0].values[0].shape != self.case.shape
        one = self.reference.numbers if self.reference is not None else {}
        return {key: (x, one[key]) for key, x in self.other.numbers.items() if key in one and one[key] != x
                and not (part and type(x) is int and key not in ("dim", "reduction"))}

    @property
    def gathered(self) -> bool:
        """Whether the other run alone communicates on the way to it."""
        return any(one.name.startswith(COLLECTIVES) for one in self.alone[1])

    @property
    def inputs_said(self) -> tuple[str, ...]:
        return (*(f"{one.text} goes over dimension {dim}, of which each rank has a part" for one, dim in self.reduced),
                *self.inputs)

    @property
    def alone_said(self) -> tuple[str, ...]:
        """What one run alone does just before."""
        codes = [list(dict.fromkeys(one.text for one in of)) for of in self.alone]
        return tuple(
            f"on the way to it {run} alone does {', '.join(texts[:MOST_TOLD])}{' ..' if len(texts) > MOST_TOLD else ''}"
            for run, texts in zip(RUNS, codes) if texts)


class Search:
    """The streams of both runs."""

    def __init__(self, reference: pathlib.Path, other: pathlib.Path, mesh: typing.Mapping[str, int]) -> None:
        self.mesh = dict(mesh) or {"rank": 1}
        self.reference = Stream(reference, 0)
        self.others = [Stream(other, rank) for rank in range(math.prod(self.mesh.values()))]
        self.pairs = [paired(self.reference, one) for one in self.others]
        # A loss that is a mean of a rank's own samples has gradients as many times too large, until they are averaged.
        self.factors = sorted({math.prod(sizes) for k in range(len(self.mesh) + 1)
                               for sizes in itertools.combinations(self.mesh.values(), k)})
        self.back = [{a: b for b, a in pairs.items()} for pairs in self.pairs]

    @functools.cache
    def judgement(self, result: int) -> Judgement:
        """Of a result of the reference."""
        maker = self.reference.operations[self.reference.makers[result]]
        own: dict[int, int | str] = {}
        for rank, (stream, numbers) in enumerate(zip(self.others, self.back)):
            results = stream.operations[numbers[maker.number]].results if maker.number in numbers else ()
            if results and len(results) != len(maker.results):
                return Judgement(None)  # as many parts as there are ranks
            if results:
                own[rank] = results[maker.results.index(result)]
        return self._of_values(result, own, maker.backward)

    @functools.cache
    def of_input(self, number: int, k: int) -> Judgement:
        """Of what an operation of the reference takes, wherever the ranks have it from."""
        one = self.reference.operations[number]
        own = {rank: inputs[k] for rank, (stream, back) in enumerate(zip(self.others, self.back)) if number in back
               and len(inputs := stream.operations[back[number]].inputs) == len(one.inputs)}
        return self._of_values(one.inputs[k], own, one.backward)

    def _of_values(self, result: int | str, own: typing.Mapping[int, int | str], backward: bool) -> Judgement:
        whole = self.reference.value(result)
        values = {rank: self.others[rank].value(number) for rank, number in own.items()}
        parts = {rank: value for rank, value in values.items() if value is not None}
        if whole is None or not parts:
            return Judgement(None)
        return judge(whole, parts, self.mesh, self.factors if backward and whole.dtype.kind == "f" else (1,))

    def judged(self, rank: int, result: int | str) -> Judgement:
        """Of a result of a rank."""
        stream = self.others[rank]
        one = stream.operations[stream.makers[result]] if result in stream.makers else None
        pair = self.pairs[rank].get(one.number) if one is not None else None
        if one is None or pair is None or len(self.reference.operations[pair].results) != len(one.results):
            return Judgement(None)
        return self.judgement(self.reference.operations[pair].results[one.results.index(typing.cast(int, result))])

    @functools.cached_property
    def _alike(self) -> list[collections.Counter[tuple[typing.Any, ...]]]:
        return [collections.Counter(one.key(True) for one in stream.operations)
                for stream in (self.reference, *self.others)]

    def once(self, rank: int, number: int) -> bool:
        """Whether a rank does an operation as often as the reference: else each time is a part of what that does."""
        pair = self.pairs[rank].get(number)
        if pair is None:
            return False
        one, two = self.reference.operations[pair].key(True), self.others[rank].operations[number].key(True)
        return self._alike[0][one] == self._alike[1 + rank][two]

    def right(self, rank: int, result: int) -> bool:
        """Whether a rank's result is the reference's."""
        return self.judged(rank, result).right is True

    def wrong(self, case: Case) -> Wrong | None:
        """The first wrong operation on the way to what a rank has of a tensor."""
        others = case.runs.other
        parts = others.parts(str(case.name)) if isinstance(others, Tensors) else case.copies
        right = {copy.rank for copy in case.copies if copy.rank is not None and not any(
            case.differs(v, b).any() for b, v in zip(copy.boxes, copy.values))}
        for copy in parts:
            rank = copy.rank or 0
            if rank >= len(self.others) or rank in right:
                continue
            values = copy.values[0] if len(copy.values) == 1 else np.concatenate([v.ravel() for v in copy.values])
            for end in self._ends(case, rank, values):
                before = self.others[rank].before(end, functools.partial(self.right, rank))
                for number, results in {**before, end: set(self.others[rank].operations[end].results)}.items():
                    if self.is_wrong(rank, number, results):
                        after = [one for i in before if i > number and i not in self.pairs[rank]
                                 and (one := self.others[rank].operations[i]).name.startswith(COLLECTIVES)]
                        return self._of(case, rank, number, next(iter(after), None))
                one = self.others[rank].operations[end]
                makers = self.others[rank].makers
                if end not in self.pairs[rank] and one.name.startswith("aten.") and one.name not in VIEWS and all(
                        self.right(rank, r) for r in one.inputs if isinstance(r, int) and r in makers):
                    return Wrong(None, one)
        return None

    def _ends(self, case: Case, rank: int, values: Array) -> typing.Iterator[int]:
        """The operation that gives what a rank has of a tensor, and that which gives the tensor in the reference: of
        gradients that are reduced in C++ the way to them is not seen."""
        backward = case.name.kind in ("bwd", "grad")
        end = self.others[rank].maker_of(values, backward, case.runs.group_sizes)
        if end is not None:
            yield end
        of = self.reference.maker_of(case.reference, backward, ()) if not case.every else None
        if of is not None and of in self.back[rank]:
            yield self.back[rank][of]

    def is_wrong(self, rank: int, number: int, results: set[int]) -> bool:
        """Whether these results of an operation are others than in the reference, and it is no part of what that does
        at once."""
        return (number in self.pairs[rank] and self.others[rank].operations[number].name not in VIEWS
                and any(self.judged(rank, result).right is False for result in results) and self.once(rank, number))

    def _of(self, case: Case, rank: int, number: int, after: Operation | None) -> Wrong:
        stream, back, pair = self.others[rank], self.back[rank], self.pairs[rank][number]
        own = [i for i in (*stream.before(number, functools.partial(self.right, rank)), number)
               if i not in self.pairs[rank]]
        others = [i for i in self.reference.before(pair, lambda result: self.judgement(result).right is True)
                  if i not in back]
        alone = tuple(tuple(of.operations[i] for i in numbers if of.operations[i].name not in VIEWS)
                      for of, numbers in ((self.reference, others), (stream, own)))
        found = self._case(case, pair)
        ranks = tuple(copy.rank or 0 for copy in found.copies if found.differs(
            copy.values[0], copy.boxes[0]).any()) if found is not None else ()
        taken = [self._taken(rank, number, k) for k in range(len(stream.operations[number].inputs))]
        other = [k for k, (_, one) in enumerate(taken) if not one.right]
        reduced = [(stream.operations[i], dim) for i in (*own, number)
                   if (dim := self._reduced(rank, i, case.runs)) is not None]
        return Wrong(self.reference.operations[pair], stream.operations[number], ranks, (alone[0], alone[1]), after,
                     tuple(dict.fromkeys(filter(None, (self._told(rank, pair, k, one, taken)
                                                       for k, one in enumerate(taken))))),
                     tuple(one for _, one in taken if one.made), tuple(reduced),
                     not other, found, found if not other else self._case(case, pair, other[0]) if len(other) == 1 else
                     None)

    def _origin(self, stream: Stream, result: int | str) -> Operation | None:
        """The operation that made a value, whatever its shape is now."""
        one = None
        while isinstance(result, int) and result in stream.makers:
            one = stream.operations[stream.makers[result]]
            result = one.inputs[0] if one.name in VIEWS and len(one.inputs) == 1 else ""
        return one

    def _taken(self, rank: int, number: int, k: int) -> tuple[Operation | None, Judgement]:
        """What made an operation's input, and how the ranks have it; of a parameter nothing is known to be wrong."""
        stream = self.others[rank]
        result = stream.operations[number].inputs[k]
        if result not in stream.makers:
            return None, Judgement(True)
        pair = self.pairs[rank][number]
        known = len(self.reference.operations[pair].inputs) == len(stream.operations[number].inputs)
        origin, found = self._origin(stream, result), self.of_input(pair, k) if known else self.judged(rank, result)
        while not (found.made or found.order) and result in stream.makers:
            one = stream.operations[stream.makers[result]]
            result = one.inputs[0] if one.name in VIEWS and len(one.inputs) == 1 else ""
            judged = self.judged(rank, result)
            found = judged if found.right is None or judged.made or judged.order else found
        return origin, found

    def _told(self, rank: int, pair: int, k: int, one: tuple[Operation | None, Judgement],
              taken: list[tuple[Operation | None, Judgement]]) -> str:
        """What is to be said of an input: how ranks have it, the order of its rows where no other input has it, and
        what the reference takes in its place where it is not known to be right."""
        origin, judged = one
        if origin is None:
            return ""
        if judged.made:
            return (f"it takes {origin.text}, of which each rank has its own, and the {judged.made} over "
                    f"{', '.join(judged.over)} is the reference's")
        if judged.right and origin.name.startswith(COLLECTIVES) and any(other.made for _, other in taken):
            return f"it takes {origin.text}, which is the reference's already"
        orders = {tuple(other.order.items()) for _, other in taken if other.order}
        if judged.order and (not judged.cut or all(other.cut for _, other in taken if other.order) and len(orders) > 1):
            own = judged.order[rank]
            return (f"it takes {origin.text}, whose rows of dimension {judged.dim} are the reference's "
                    f"{rows_said(own)} on rank {rank}")
        inputs = self.reference.operations[pair].inputs
        of = self._origin(self.reference, inputs[k]) if k < len(inputs) else None
        said = f"it takes {origin.back}{origin.text}{self._shape(self.others[rank], origin)}, where the reference takes"
        if of is None and not judged.right and k < len(inputs) and isinstance(inputs[k], str) and inputs[k]:
            return f"{said} {inputs[k]}"
        if of is None or judged.right and self.pairs[rank].get(origin.number) in (of.number, None):
            return ""
        if of.code != origin.code:
            return f"{said} {of.back}{of.text}{self._shape(self.reference, of)}"
        if self.judged(rank, origin.results[0]).right:
            return f"it takes a result of {origin.back}{origin.text} that the reference takes elsewhere"
        again = origin.number not in self.pairs[rank] and not origin.backward and of.number in self.back[rank]
        if again and self.back[rank][of.number] < origin.number:
            return f"it takes a new result of {origin.text}, where the reference takes an earlier one again"
        return ""

    @staticmethod
    def _shape(stream: Stream, one: Operation) -> str:
        value = stream.value(one.results[0]) if one.results else None
        return f" {list(value.shape)}" if value is not None else ""

    def _reduced(self, rank: int, number: int, runs: Runs) -> int | None:
        """The dimension that an operation reduces and of which the ranks have parts."""
        one = self.others[rank].operations[number]
        boxes = self._boxes(rank, one.inputs[0], runs) if one.name in REDUCTIONS and one.inputs else ()
        if len({str(box) for box in boxes}) < 2:
            return None
        given = one.numbers.get("dim")
        ndim = len(boxes[0])
        dims = range(ndim) if given in (None, []) else given if isinstance(given, list) else [given]
        return next((dim % ndim for dim in dims if len({str(box[dim]) for box in boxes}) > 1), None)

    def _boxes(self, rank: int, result: int | str, runs: Runs) -> tuple[Box, ...]:
        """Of each rank's part of a value that is right, or of a parameter."""
        stream = self.others[rank]
        while isinstance(result, int) and not self.right(rank, result) and result in stream.makers:
            one, value = stream.operations[stream.makers[result]], stream.value(result)
            before = stream.value(one.inputs[0]) if one.inputs and isinstance(one.inputs[0], int) else None
            if one.name not in VIEWS or len(one.inputs) != 1 or (before is not None and value is not None
                                                                 and before.shape != value.shape):
                return ()
            result = one.inputs[0]
        if isinstance(result, int):
            return tuple(self.judged(rank, result).boxes.values())
        parts = runs.other.parts(f"{result}:init") if result and isinstance(runs.other, Tensors) else ()
        return tuple(part.boxes[0] for part in parts if len(part.boxes) == 1)

    def _case(self, of: Case, pair: int, k: int | None = None) -> Case | None:
        """The result of an operation, or what it takes, as a tensor of its own, with what it is made of beside it."""
        one = self.reference.operations[pair]
        result = one.results[0] if k is None else one.inputs[k]
        boxes = (self.judgement(one.results[0]) if k is None else self.of_input(pair, k)).boxes
        whole, copies = self.reference.value(result), []
        for rank, box in boxes.items() if whole is not None else ():
            own = self.others[rank].operations[self.back[rank][pair]]
            value = self.others[rank].value(own.results[0] if k is None else own.inputs[k])
            assert value is not None  # it has been judged
            copies.append(Copy(rank, (box,), (unpadded(value, box),)))
        if whole is None or not copies:
            return None
        inputs = {f"input {i} of it:fwd": value for i, other in enumerate(one.inputs if k is None else ())
                  if isinstance(other, int) and (value := self.reference.value(other)) is not None
                  and value.dtype.kind == "f"}
        runs = Runs(inputs, mesh=of.runs.mesh, same=tuple(inputs))
        from anyrank.explain.dumps import worst_of  # which reads dumps, too

        allowed = NEAR * float(np.abs(whole.astype(np.float64)).max(initial=0.0)) if whole.dtype.kind == "f" else 0.0
        name = Name("the operation", "bwd" if one.backward else "fwd", of.name.step)
        return Case(name, whole, worst_of(whole, copies), tuple(copies), runs, allowed)


def search_of(reference: str, other: str, mesh: typing.Mapping[str, int]) -> Search | None:
    """None: one of the runs has no record of its operations."""
    paths = pathlib.Path(reference), pathlib.Path(other)
    if not all((path / FOLDER / "rank-00000.json").is_file() for path in paths):
        return None
    return Search(paths[0], paths[1], mesh)


# What a value lacks of which each rank has its own.
LACKING = {SUM: "missing_all_reduce", MEAN: "missing_average"}
OWN_PART = Cause("own_part_reduced", (), "an operation goes over a dimension of which each rank has a part",
                 "an all-reduce of the sum, the maximum or the mean (of a softmax of its maximum and of its sum), or "
                 "the gathered tensor")


def answer(wrong: Wrong) -> Answer:
    """The cause that the operation itself says; its sentence is what is said of the result besides."""
    if wrong.is_perhaps_meant:
        return Answer(UNKNOWN)
    if wrong.reduced and not wrong.gathered:
        return Answer(OWN_PART.name, look=OWN_PART.look)
    for taken in wrong.takes if not wrong.gathered else ():
        return Answer(LACKING[taken.made], f"a missing {taken.made} over {', '.join(taken.over)}",
                      "the all-reduce that this value needs before it is used")
    case = wrong.cause
    if wrong.sure and wrong.is_another or case is None or not case.off.any():
        return Answer(UNKNOWN)
    said = explain(case)  # a map that has no number to fit
    simple = said.cause != UNKNOWN and said.confidence != "possible" and said.fits[0].pattern.fitted == 0
    return said if simple else Answer(UNKNOWN)
