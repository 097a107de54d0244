# SPDX-License-Identifier: Apache-2.0
"""The tensors of two runs by name, and one difference between them as arrays."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import itertools
import math
import re
import typing

import numpy as np

from anyrank.dump import Dump
from anyrank.explain.facts import Facts

Array = np.ndarray[typing.Any, typing.Any]
KINDS = ("init", "fwd", "bwd", "grad", "clip", "new", "m", "v", "state", "buffer", "count")
_NAME = re.compile(rf"(.*?)(?::({'|'.join(KINDS)}))?(?:@([0-9]{{1,9}}))?", re.DOTALL)
READ = re.compile(r"\.in(\..*)?$")  # of the name of what a module reads
EXPERTS = re.compile(r"(?i)expert|moe|router|mixture|(^|\.)gate(\.|:|$)")  # in names and classes of layers with experts
ACTIVATIONS, PARAMETERS = ("fwd", "bwd"), ("init", "grad", "new", "m", "v", "weight")
# Unit roundoffs of formats, by the names of safetensors.
UNITS = {"F64": 2.0 ** -53, "F32": 2.0 ** -24, "F16": 2.0 ** -11, "BF16": 2.0 ** -8, "F8_E4M3": 2.0 ** -4,
         "F8_E5M2": 2.0 ** -3}
MOST = 1 << 22  # elements that are looked at of one tensor; of a larger one, every n-th index of each dimension


def sums_of(unit: float) -> float:
    """Roundings of the largest element in a sum: in fp32, sums of thousands of terms in another order differ by up to
    64 units in the last place of it; in 16 bits the sum is kept in more, and its result is rounded."""
    return 64.0 if unit <= 2.0 ** -20 else 2.0


@dataclasses.dataclass(frozen=True)
class Name:
    """A tensor's name in its parts: "h.0.attn:fwd@2" is the module or parameter "h.0.attn", kind "fwd", step 2. A name
    without a kind is a "weight"."""

    stem: str
    kind: str
    step: int

    @classmethod
    def of(cls, text: str) -> Name:
        match = _NAME.fullmatch(text)
        assert match is not None  # the pattern matches every text
        return cls(match[1], match[2] or "weight", int(match[3] or 1))

    def __str__(self) -> str:
        kind = "" if self.kind == "weight" else f":{self.kind}"
        return f"{self.stem}{kind}{f'@{self.step}' if self.step > 1 else ''}"

    def with_kind(self, kind: str, step: int | None = None) -> str:
        return str(Name(self.stem, kind, self.step if step is None else step))

    @property
    def module(self) -> str:
        """The module that has the parameter, or that gave the activation."""
        return self.stem if self.kind in ACTIVATIONS else self.stem.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Copy:
    """What one rank holds of a tensor: `values[i]` are the elements of box i, an index of the full tensor. rank None:
    the run's whole tensor."""

    rank: int | None
    boxes: tuple[tuple[slice, ...], ...]
    values: tuple[Array, ...]


def parts_of(dump: Dump, name: str) -> tuple[Copy, ...]:
    """Each rank's part, also where parts are summands of the tensor."""
    found = []
    for i, part in enumerate(dump.tensor(name).parts):
        boxes = tuple(tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent)) for box in part.boxes)
        found.append(Copy(part.rank, boxes, tuple(dump.part(name, i))))
    return tuple(found)


class Tensors(collections.abc.Mapping[str, Array]):
    """Full tensors of a dump, as arrays, read when they are asked for. Those without elements are left out. more: what
    modules read, each of which is listed before what its module gives."""

    def __init__(self, source: Dump | typing.Mapping[str, Array], more: Dump | None = None) -> None:
        self._sources = (source,) if more is None else (source, more)
        self._read: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._read:
            self._read[name] = np.asarray(self.source_of(name)[name])
        return self._read[name]

    def source_of(self, name: str) -> Dump | typing.Mapping[str, Array]:
        return next((source for source in self._sources if name in source), self._sources[0])

    @functools.cached_property
    def _names(self) -> dict[str, None]:
        places = dict[str, float](zip(self._sources[0], itertools.count()))
        for name in itertools.chain(*self._sources[1:]):
            module = str(dataclasses.replace(Name.of(name), stem=READ.sub("", Name.of(name).stem)))
            places.setdefault(name, places.get(module, len(places)) - 0.5)
        return {name: None for name in sorted(places, key=places.__getitem__) if 0 not in self.shape(name)}

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, of a dump's tensor without reading it."""
        source = self.source_of(name)
        return source.tensor(name).shape if isinstance(source, Dump) else tuple(np.shape(source[name]))

    def parts(self, name: str) -> tuple[Copy, ...]:
        """What each rank holds; the whole tensor where that is not known."""
        source = self.source_of(name)
        held = parts_of(source, name) if isinstance(source, Dump) else ()
        return held or (Copy(None, (tuple(slice(0, n) for n in self[name].shape),), (self[name],)),)


NOTHING: typing.Mapping[str, Array] = {}


@dataclasses.dataclass
class Runs:
    """What is known of the two runs besides one tensor. mesh: sizes of the other run's dimensions, outermost first, as
    {"dp": 2, "tp": 2}. batch, seq: of a step; 0: not known. ids: [batch, seq] by step."""

    reference: typing.Mapping[str, Array] = dataclasses.field(default_factory=lambda: NOTHING)
    other: typing.Mapping[str, Array] = dataclasses.field(default_factory=lambda: NOTHING)
    facts: tuple[Facts, Facts] = (Facts(), Facts())
    mesh: typing.Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: int = 0
    seq: int = 0
    heads: int = 0
    kv_heads: int = 0
    micro_batches: int = 1
    targets: int = 0  # tokens of the first step that have one; 0: not known
    exact: bool = False  # both runs have exact numerics: nothing is rounding
    report: typing.Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)  # of `anyrank verify --json`
    same: typing.Collection[str] = ()  # names that are the same in both runs

    @property
    def world(self) -> int:
        return math.prod(self.mesh.values())

    @functools.cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes above 1 of groups of ranks: of each dimension of the mesh, and of products of them."""
        sizes = {1}
        for n in self.mesh.values():
            sizes |= {n * size for size in sizes}
        return tuple(sorted(sizes - {1}))

    @functools.cached_property
    def has_experts(self) -> bool:
        """Whether what is recorded of the reference, or a tensor of it, names experts or a router."""
        facts = self.facts[0]
        counts = [key for key, n in facts.config.items() if type(n) is int and n > 1]
        kinds = [module.kind for module in facts.modules.values()]
        return any(EXPERTS.search(text) for text in itertools.chain(self.reference, facts.modules, kinds, counts))

    def row(self, name: str) -> typing.Mapping[str, typing.Any]:
        """The report's row of a tensor that differs; {}."""
        return self._rows.get(name, {})

    @functools.cached_property
    def _rows(self) -> dict[str, typing.Mapping[str, typing.Any]]:
        return {row["tensor"]: row for row in self.report.get("worst", ())}


@dataclasses.dataclass
class Case:
    """One tensor that differs. reference, other: full arrays of the same shape (of the other run, where its copies
    differ, the copy that is furthest off). allowed: |difference| of an element that is none; 0: equal bits or
    different.
    unit: unit roundoff of the coarser of the two runs' formats. rtol: the part of a value that a user allows."""

    name: Name
    reference: Array
    other: Array
    copies: tuple[Copy, ...]
    runs: Runs
    allowed: Array | float = 0.0
    unit: float = UNITS["F32"]
    rtol: float = 0.0
    every: tuple[slice, ...] = ()  # which elements of the full tensor these are, where they are not all

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reference.shape)

    def beside(self, name: str, other: bool = False) -> Array | None:
        """The same elements of another tensor, of the reference or of the other run, in binary64; None: there is none
        of this shape."""
        array = (self.runs.other if other else self.runs.reference).get(name)
        if array is None or array.ndim != self.reference.ndim or array.dtype.kind not in "fiub":
            return None
        array = array[self.every] if self.every else array
        return array.astype(np.float64) if array.shape == self.shape else None

    @functools.cached_property
    def ref(self) -> Array:
        """The reference in binary64."""
        return self.reference.astype(np.float64)

    @functools.cached_property
    def val(self) -> Array:
        """The other run's in binary64."""
        return self.other.astype(np.float64)

    @functools.cached_property
    def off(self) -> Array:
        """Which elements of the full tensor differ on any rank."""
        found: Array = np.zeros(self.shape, bool)
        for copy in self.copies:
            for box, values in zip(copy.boxes, copy.values):
                found[box] |= self.differs(values, box)
        return found

    def differs(self, values: Array, box: tuple[slice, ...] = ()) -> Array:
        """Which of a box's values differ from the reference."""
        reference = self.reference[box]
        allowed = self.allowed[box] if isinstance(self.allowed, np.ndarray) else self.allowed
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(values.astype(np.float64) - reference.astype(np.float64)) <= allowed
        both_nan = np.isnan(values) & np.isnan(reference)
        if isinstance(allowed, float) and allowed == 0.0:  # bits: zeros of both signs differ
            near &= np.signbit(values) == np.signbit(reference)
        different: Array = ~(near | both_nan)
        return different

    def rounding(self, expected: Array) -> Array:
        """How far rounding takes a value from what is expected: its own rounding, and that of a sum as long as the
        largest element shows."""
        size = np.abs(expected)
        largest = max(self.scale, float(size.max(where=np.isfinite(size), initial=0.0)))
        result: Array = (8.0 * self.unit + self.rtol) * size + self.unit * sums_of(self.unit) * largest
        return result

    def stands_out(self, values: Array, box: tuple[slice, ...] = ()) -> Array:
        """Which of a box's values differ by more than rounding."""
        ref = self.ref[box]
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(values.astype(np.float64) - ref) <= self.rounding(ref)
        result: Array = self.differs(values, box) & ~near
        return result

    @functools.cached_property
    def seen(self) -> Array:
        """Which elements of the full tensor differ by more than rounding on any rank."""
        found: Array = np.zeros(self.shape, bool)
        for copy in self.copies:
            for box, values in zip(copy.boxes, copy.values):
                found[box] |= self.stands_out(values, box)
        return found

    @functools.cached_property
    def activation(self) -> bool:
        """Whether it is one: by its kind, or, of a tensor without one, by its shape."""
        return self.name.kind in ACTIVATIONS or self.name.kind == "weight" and self.axes[:1] == ("batch",)

    @functools.cached_property
    def scale(self) -> float:
        """The largest finite |reference|."""
        finite = self.ref[np.isfinite(self.ref)]
        return float(np.abs(finite).max()) if finite.size else 0.0

    @property
    def sharded(self) -> bool:
        """Whether no rank holds all of it."""
        return all(sum(math.prod(v.shape) for v in copy.values) < self.reference.size for copy in self.copies)

    @functools.cached_property
    def by_rank(self) -> bool:
        """Whether there is more than one copy or part to look at."""
        return len(self.copies) > 1

    @functools.cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """(axis, parts) along which ranks hold contiguous parts, each of one box."""
        found = set()
        for axis, extent in enumerate(self.shape):
            edges = {(b[axis].start, b[axis].stop) for copy in self.copies for b in copy.boxes}
            if (0, extent) not in edges and len(edges) > 1:
                found.add((axis, len(edges)))
        return tuple(sorted(found))

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """What each dimension counts: "batch", "token", "head", "feature"; of parameters "out", "in", "vocab",
        "expert"; "" where it is not known."""
        return axes_of(self)


def axes_of(case: Case) -> tuple[str, ...]:
    runs, shape, ndim = case.runs, case.shape, len(case.shape)
    of_samples = ndim >= 3 and runs.batch > 0 and shape[:2] == (runs.batch, runs.seq)
    if case.name.kind in ACTIVATIONS or case.name.kind == "weight" and of_samples:
        if ndim >= 3 and runs.batch and shape[:2] == (runs.batch, runs.seq):
            return ("batch", "token", *("head",) * (ndim - 3), "feature")
        if ndim == 4 and runs.batch and shape[0] == runs.batch and shape[2] == runs.seq:
            return ("batch", "head", "token", "token" if shape[3] == runs.seq else "feature")
        if ndim == 2 and runs.batch and shape == (runs.batch, runs.seq):
            return ("batch", "token")
        if ndim == 2 and runs.batch and shape[0] == runs.batch * runs.seq:
            return ("token", "feature")
        if ndim >= 1 and runs.batch and shape[0] == runs.batch:
            return ("batch", *("",) * (ndim - 2), "feature") if ndim > 1 else ("batch",)
        return ("",) * max(ndim - 1, 0) + ("feature",) * (ndim > 0)
    if case.name.kind in PARAMETERS:
        kinds = {facts.modules[case.name.module].kind for facts in runs.facts if case.name.module in facts.modules}
        if ndim == 2:
            vocabulary = any("Embedding" in kind for kind in kinds)
            return ("vocab", "feature") if vocabulary else ("out", "in")
        if ndim == 3:
            return ("expert", "out", "in")
        return ("out",) * ndim
    return ("",) * ndim


def positional(case: Case) -> bool:
    """Whether the tensor depends on positions alone: it is the same for all samples, or counts tokens."""
    ref, axes = case.ref, case.axes
    along = axes.index("token") if "token" in axes else next(
        (i for i, n in enumerate(case.shape) if n == case.runs.seq), -1)
    if case.name.kind != "fwd" or along < 0:
        return False
    if case.reference.dtype.kind in "iu":
        return bool((np.diff(case.reference, axis=along) == 1).mean() > 0.5)
    samples = [i for i, name in enumerate(axes) if name == "batch" and case.shape[i] > 1]
    return math.prod(case.shape[:along]) == 1 or bool(samples) and all(
        np.ptp(ref, axis=i).max() == 0.0 for i in samples)


def looked_up(case: Case) -> bool:
    """Whether an activation's rows are those of a table, the module's weight."""
    name, known = case.name, case.runs.reference
    names = (f"{name.stem}.weight:init", f"{name.stem}.weight:new")
    weight = next((known[text] for text in names if text in known), None)
    if name.kind != "fwd" or weight is None or weight.ndim != 2 or weight.shape[1:] != case.shape[-1:]:
        return False
    row = case.reference.reshape(-1, case.shape[-1])[0]
    return bool(np.isclose(weight, row, 1e-5, 0.0).all(axis=1).any())


def every(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of at most MOST elements of a tensor: of the largest dimensions every n-th index alone, n a power of
    two, so that blocks, heads and shards keep their order."""
    steps = [1] * len(shape)
    sizes = list(shape)
    while math.prod(sizes) > MOST:
        axis = max(range(len(sizes)), key=sizes.__getitem__)
        steps[axis] *= 2
        sizes[axis] = -(-shape[axis] // steps[axis])
    return tuple(slice(None, None, step) for step in steps)


def thinned(case: Case) -> Case:
    """The case with those elements alone that `every` takes."""
    index = every(case.shape)
    steps = [s.step for s in index]
    if all(step == 1 for step in steps):
        return case

    def thin(copy: Copy) -> Copy:
        boxes, values = [], []
        for box, array in zip(copy.boxes, copy.values):
            first = [-(-s.start // step) for s, step in zip(box, steps)]
            inner = tuple(slice(f * step - s.start, None, step) for f, s, step in zip(first, box, steps))
            part = array[inner]
            if part.size:
                boxes.append(tuple(slice(f, f + n) for f, n in zip(first, part.shape)))
                values.append(part)
        return Copy(copy.rank, tuple(boxes), tuple(values))

    allowed = case.allowed[index] if isinstance(case.allowed, np.ndarray) else case.allowed
    return dataclasses.replace(case, reference=case.reference[index], other=case.other[index],
                               copies=tuple(map(thin, case.copies)), allowed=allowed, every=index)
