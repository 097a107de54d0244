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
import json
import math
import pathlib
import typing

import numpy as np

from anyrank._arrays import numpy_of
from anyrank._safetensors import read as read_values
from anyrank.explain.tensors import Array, Case, Copy, Name, Runs, Tensors
from anyrank.explain.words import RUNS, ranks_of

FOLDER = "operations"
NEAR = 2.0 ** -14  # of a result's largest element: what is less is rounding, of its inputs too
MOST_TOLD, MOST_CODE = 3, 90  # operations of one run alone that are told; characters of one
# How ranks have a value that is right, if not as parts of it.
SUM, MEAN = (f"of which each rank has its own, and the {kind} over ranks is the reference's"
             for kind in ("sum", "mean"))
ROWS = "which has the reference's rows in another order"
Box = typing.Tuple[slice, ...]
# Operations whose results are their inputs, in another shape or memory: no mistake is in them alone.
VIEWS = {f"aten.{name}" for name in (
    "view", "_unsafe_view", "t", "transpose", "permute", "detach", "alias", "expand", "clone", "unsqueeze", "squeeze",
    "_to_copy", "reshape", "contiguous", "copy_", "empty", "empty_like", "new_empty_strided", "lift_fresh")}


@dataclasses.dataclass(frozen=True)
class Operation:
    """inputs: numbers of results, or parameters' names. of: the operation that this one is the backward pass of."""

    number: int
    name: str
    module: str
    file: str
    line: int
    code: str
    inputs: tuple[int | str, ...]
    results: tuple[int, ...]
    numbers: dict[str, typing.Any]
    backward: bool

    @property
    def text(self) -> str:
        code = " ".join("".join(c if c.isprintable() else " " for c in self.code).split())
        short = code if len(code) <= MOST_CODE else f"{code[:MOST_CODE]} .."
        return f"`{short}` ({pathlib.Path(self.file).name}:{self.line})"

    def key(self, exact: bool) -> tuple[typing.Any, ...]:
        """What operations of both runs have in common that are the same one."""
        return (self.backward, self.module, self.name, *((self.code,) if exact else ()))


class Stream:
    """The operations of one rank, in order."""

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        stem = folder / FOLDER / f"rank-{rank:05d}"
        rows = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))["operations"]
        self.operations = [Operation(i, row["name"], row["module"], row["file"], row["line"], row["code"],
                                     tuple(row["inputs"]), tuple(row["results"]), row["numbers"], row["backward"])
                           for i, row in enumerate(rows)]
        self.entries = read_values(stem.with_suffix(".safetensors"))[0]
        self.makers = {result: one.number for one in self.operations for result in one.results}

    def value(self, result: int) -> Array | None:
        entry = self.entries.get(str(result))
        array: Array | None = None if entry is None else numpy_of(entry)
        return array

    def maker_of(self, values: Array, backward: bool, sizes: typing.Iterable[int]) -> int | None:
        """The first operation of a pass that gives these values, or these times one of the sizes: a mean over ranks is
        recorded as summands."""
        results = [(one.number, array) for one in self.operations if one.backward or not backward
                   for result in one.results if (array := self.value(result)) is not None
                   and array.size == values.size and array.dtype.kind == values.dtype.kind]
        for size in (1, *sizes) if values.dtype.kind == "f" else (1,):
            wanted: Array = values.ravel() * size
            allowed = 2.0 ** -20 * float(np.abs(wanted).max(initial=0.0))
            for number, array in results:
                if np.allclose(array.ravel(), wanted, 0.0, allowed, equal_nan=True):
                    return number
        return None

    def before(self, number: int, ends: typing.Callable[[int], bool]) -> list[int]:
        """The operations that one follows from, up to those at which the way back ends."""
        found, todo = set(), [number]
        while todo:
            for result in self.operations[todo.pop()].inputs:
                maker = self.makers.get(result) if isinstance(result, int) else None
                if maker is not None and maker not in found and not ends(maker):
                    found.add(maker)
                    todo.append(maker)
        return sorted(found)


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


def places(whole: tuple[int, ...], part: tuple[int, ...], mesh: typing.Mapping[str, int]) -> typing.Iterator[list[Box]]:
    """Each rank's box, for each way in which dimensions of the mesh may cut the whole into such parts."""
    if len(whole) != len(part) or any(n == 0 or m % n for m, n in zip(whole, part)):
        return
    sizes = list(mesh.values())
    groups = [group for k in range(1, len(sizes) + 1) for group in itertools.combinations(range(len(sizes)), k)]
    cuts = [d for d, (m, n) in enumerate(zip(whole, part)) if m != n]
    ranks = list(np.ndindex(*sizes))
    for chosen in itertools.product(*([g for g in groups if math.prod(sizes[i] for i in g) == whole[d] // part[d]]
                                      for d in cuts)):
        if len(set().union(*chosen)) != sum(map(len, chosen)):
            continue
        boxes = []
        for rank in ranks:
            box = [slice(0, n) for n in whole]
            for d, group in zip(cuts, chosen):
                index = 0
                for i in group:
                    index = index * sizes[i] + rank[i]
                box[d] = slice(index * part[d], (index + 1) * part[d])
            boxes.append(tuple(box))
        yield boxes


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
    said: how ranks have it that do not have parts of it."""

    right: bool | None
    boxes: tuple[Box, ...] = ()
    said: str = ""


def judge(reference: Array, parts: typing.Mapping[int, Array], mesh: typing.Mapping[str, int],
          factors: typing.Sequence[int] = (1,)) -> Judgement:
    """Whether the ranks together have the reference: parts of it, summands of it or of its parts, means, or its rows
    in another order. factors: how many times the reference ranks may all have."""
    shapes = {part.shape for part in parts.values()}
    found: list[list[Box]] = []
    if len(shapes) == 1 and len(parts) == math.prod(mesh.values()):
        found = list(places(reference.shape, next(iter(shapes)), mesh))
    for boxes in found:
        groups: dict[str, list[int]] = {}
        for rank, box in enumerate(boxes):
            groups.setdefault(str(box), []).append(rank)
        wholes = [reference[boxes[group[0]]] for group in groups.values()]
        if any(all(near(whole * n if n > 1 else whole, parts[r]) for whole, group in zip(wholes, groups.values())
                   for r in group) for n in factors):
            return Judgement(True, tuple(boxes))
        if reference.dtype.kind == "f" and all(len(group) > 1 for group in groups.values()):
            sums = [np.asarray(sum(parts[r].astype(np.float64) for r in group)) for group in groups.values()]
            for said, n in ((SUM, 1), (MEAN, len(next(iter(groups.values()))))):
                if all(near(x.astype(np.float64), np.asarray(y / n)) for x, y in zip(wholes, sums)):
                    return Judgement(True, tuple(boxes), said)
    if _same_rows(reference, list(parts.values())):
        return Judgement(True, (), ROWS)
    return Judgement(False, tuple(found[0])) if found else Judgement(None)


def _same_rows(reference: Array, parts: list[Array]) -> bool:
    """Whether each row of the reference is one of a part, and each of a part one of the reference."""
    if reference.ndim < 2 or any(part.ndim < 2 or part.shape[-1] != reference.shape[-1] for part in parts):
        return False
    weights = np.random.default_rng(0).standard_normal(reference.shape[-1])
    with np.errstate(all="ignore"):
        one = np.sort(reference.reshape(-1, reference.shape[-1]).astype(np.float64) @ weights)
        all_of = np.sort(np.concatenate([part.reshape(-1, part.shape[-1]).astype(np.float64) @ weights
                                         for part in parts]))
    if not (np.isfinite(one).all() and np.isfinite(all_of).all() and one.size):
        return False
    allowed = NEAR * float(np.abs(reference).max())
    return all(_all_in(x, y, allowed) for x, y in ((one, all_of), (all_of, one)))


def _all_in(x: Array, y: Array, allowed: float) -> bool:
    after = np.clip(np.searchsorted(y, x), 0, len(y) - 1)
    apart = np.minimum(np.abs(y[after] - x), np.abs(y[np.maximum(after - 1, 0)] - x))
    return bool((apart <= allowed).all())


# --- the search -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The first wrong operation: as the reference and as a rank has it; reference None: it has none in its place.
    alone: what each run alone does on the way to it from results that are right. case: its result, None where the
    ranks' parts cannot be put together."""

    reference: Operation | None
    other: Operation
    ranks: tuple[int, ...] = ()
    alone: tuple[tuple[Operation, ...], tuple[Operation, ...]] = ((), ())
    inputs: tuple[tuple[str, str], ...] = ()
    case: Case | None = None

    @property
    def sentence(self) -> str:
        """What it does, on the ranks that have it wrong, and in the reference where that is something else."""
        one, two = self.reference, self.other
        where = f" in {two.module}" if two.module else ""
        back = "the backward pass of " if two.backward else ""
        if one is None:
            return f"{back}{two.text}{where}, which the reference does not do, gives other values"
        some = self.case is not None and 0 < len(self.ranks) < len(self.case.copies)
        on = f" on {ranks_of(self.ranks)}" if some else ""
        said = f"{back}{two.text}{where} is the first operation that gives other values{on}"
        if one.code != two.code:
            said += f", in the reference {one.text}"
        return said + "".join(f"; its {'number' if key == 'other' else key} is {x}, in the reference {y}"
                              for key, (x, y) in self._numbers.items())

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

    def takes(self, said: str) -> bool:
        """Whether it takes a value that the ranks have so."""
        return any(one == said for _, one in self.inputs)

    @property
    def inputs_said(self) -> tuple[str, ...]:
        """What it takes that is not simply the reference's."""
        return tuple(f"it takes {code}, {said}" for code, said in self.inputs)

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
    def judgement(self, number: int) -> Judgement:
        """Of the results of an operation of the reference."""
        found = Judgement(None)
        if any(len(stream.operations[back[number]].results) != len(self.reference.operations[number].results)
               for stream, back in zip(self.others, self.back) if number in back):
            return found  # as many parts as there are ranks
        for k, result in enumerate(self.reference.operations[number].results):
            whole = self.reference.value(result)
            parts = {}
            for rank, (stream, numbers) in enumerate(zip(self.others, self.back)):
                own = stream.operations[numbers[number]].results if number in numbers else ()
                value = stream.value(own[k]) if k < len(own) else None
                if value is not None:
                    parts[rank] = value
            if whole is None or not parts:
                continue
            back = self.reference.operations[number].backward and whole.dtype.kind == "f"
            found = judge(whole, parts, self.mesh, self.factors if back else (1,))
            if found.right is False:
                return found
        return found

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

    def right(self, rank: int, number: int) -> bool:
        """Whether the results of a rank's operation are the reference's."""
        pair = self.pairs[rank].get(number)
        return pair is not None and self.judgement(pair).right is True

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
                for number in sorted((*self.others[rank].before(end, functools.partial(self.right, rank)), end)):
                    if self.is_wrong(rank, number):
                        return self._of(case, rank, number, self.pairs[rank][number])
                one = self.others[rank].operations[end]
                if end not in self.pairs[rank] and one.name.startswith("aten.") and one.name not in VIEWS and all(
                        self.right(rank, maker) for r in one.inputs
                        if isinstance(r, int) and (maker := self.others[rank].makers.get(r)) is not None):
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

    def is_wrong(self, rank: int, number: int) -> bool:
        """Whether it gives other values than in the reference, and is no part of what that does at once."""
        pair = self.pairs[rank].get(number)
        return pair is not None and self.others[rank].operations[number].name not in VIEWS and (
            self.judgement(pair).right is False) and self.once(rank, number)

    def _of(self, case: Case, rank: int, number: int, pair: int) -> Wrong:
        stream, back = self.others[rank], self.back[rank]
        own = [i for i in (*stream.before(number, functools.partial(self.right, rank)), number)
               if i not in self.pairs[rank]]
        others = [i for i in self.reference.before(pair, lambda i: self.judgement(i).right is True)
                  if i not in back]
        alone = tuple(tuple(of.operations[i] for i in numbers if of.operations[i].name not in VIEWS)
                      for of, numbers in ((self.reference, others), (stream, own)))
        found, ranks = self._case(case, pair)
        inputs = dict.fromkeys(filter(None, (self._taken(rank, r) for r in stream.operations[number].inputs)))
        return Wrong(self.reference.operations[pair], stream.operations[number], ranks, (alone[0], alone[1]),
                     tuple(inputs), found)

    def _taken(self, rank: int, result: int | str) -> tuple[str, str] | None:
        """An operation's input, and how ranks have it where that is not simply as parts of the reference's."""
        stream = self.others[rank]
        while (maker := stream.makers.get(result) if isinstance(result, int) else None) is not None:
            one = stream.operations[maker]
            judged = self.judgement(self.pairs[rank][maker]) if maker in self.pairs[rank] else Judgement(None)
            if judged.said or one.name not in VIEWS or len(one.inputs) != 1:
                return (one.text, judged.said) if judged.said else None
            result = one.inputs[0]
        return None

    def _case(self, of: Case, number: int) -> tuple[Case | None, tuple[int, ...]]:
        """The result as a tensor of its own, with what it is made of beside it; and the ranks that have it wrong."""
        one, boxes = self.reference.operations[number], self.judgement(number).boxes
        if not boxes:
            return None, ()
        whole = self.reference.value(one.results[0])
        assert whole is not None  # it has been judged
        copies = []
        for rank, (stream, back) in enumerate(zip(self.others, self.back)):
            value = stream.value(stream.operations[back[number]].results[0])
            assert value is not None
            copies.append(Copy(rank, (boxes[rank],), (value,)))
        inputs = {f"input {i} of it:fwd": value for i, result in enumerate(one.inputs) if isinstance(result, int)
                  and (value := self.reference.value(result)) is not None and value.dtype.kind == "f"}
        runs = Runs(inputs, mesh=of.runs.mesh, same=tuple(inputs))
        kind = "bwd" if one.backward else "fwd"
        from anyrank.explain.dumps import worst_of  # which reads dumps, too

        allowed = NEAR * float(np.abs(whole.astype(np.float64)).max(initial=0.0)) if whole.dtype.kind == "f" else 0.0
        case = Case(Name("the operation", kind, of.name.step), whole, worst_of(whole, copies), tuple(copies), runs,
                    allowed)
        ranks = tuple(copy.rank or 0 for copy in copies if case.differs(copy.values[0], copy.boxes[0]).any())
        return case, ranks


def search_of(reference: str, other: str, mesh: typing.Mapping[str, int]) -> Search | None:
    """None: one of the runs has no record of its operations."""
    paths = pathlib.Path(reference), pathlib.Path(other)
    if not all((path / FOLDER / "rank-00000.json").is_file() for path in paths):
        return None
    return Search(paths[0], paths[1], mesh)
