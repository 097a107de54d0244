# SPDX-License-Identifier: Apache-2.0
"""What a linear module or a convolution reads, as tensors that are joined along the features: in which order."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import earlier, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import near
from anyrank.explain.tensors import Array, Case, Name

JOINED, PADDED = "joined", "padded"
PADS = {"wrap": "values of the other end", "edge": "values at the end itself", "reflect": "mirrored values"}
MOST_TENSORS, MOST_PARTS, MOST_STEPS = 24, 16, 600
MOST_WORK = 1 << 33
SAMPLED = 96  # places of the output by which an order is found
BRANCHES = 3


def parameter(case: Case, leaf: str) -> Array | None:
    """A parameter of the module that gave the case's tensor, as it is in the step."""
    step = case.name.step
    names = (str(Name(f"{case.name.stem}.{leaf}", kind, max(step - 1, 1)))
             for kind in (("init", "weight") if step == 1 else ("new",)))
    return next((case.runs.reference[name].astype(np.float64) for name in names if name in case.runs.reference), None)


@dataclasses.dataclass(frozen=True)
class Reader:
    """output = weight * input + bias. weight: [out, in, kernel ..]; without a kernel features are the last dimension of
    what it reads and gives. shape: of the output, [samples, out, places ..]."""

    weight: Array
    bias: Array
    shape: tuple[int, ...]

    @classmethod
    def of(cls, case: Case) -> Reader | None:
        weight, bias, shape = parameter(case, "weight"), parameter(case, "bias"), case.shape
        if weight is None or weight.ndim < 2 or len(shape) < 2:
            return None
        if weight.ndim == 2:
            shape = (math.prod(shape[:-1]), shape[-1])
            weight = weight if len(weight) == shape[-1] else weight.T
        bias = np.zeros(len(weight)) if bias is None else bias
        fits = len(weight) == shape[1] and weight.ndim == len(shape) and bias.shape == (len(weight),)
        return cls(weight, bias, shape) if fits else None

    def reads(self, array: Array) -> Array | None:
        """A tensor as this may read it, [samples, features, places ..], repeated to as many places; None: it has
        others."""
        if self.weight.ndim == 2:
            return array.reshape(-1, array.shape[-1]) if math.prod(array.shape[:-1]) == self.shape[0] else None
        if array.ndim != len(self.shape) or len(array) != self.shape[0]:
            return None
        for axis in range(2, array.ndim):
            array = np.repeat(array, max(self.shape[axis] // array.shape[axis], 1), axis)
            if array.shape[axis] % self.shape[axis]:
                return None
        return array

    def patches(self, x: Array, at: tuple[Array, ...]) -> Array:
        """[places, features, kernel]: what the module reads for some of its output."""
        kernel = self.weight.shape[2:]
        steps = [n // own for n, own in zip(x.shape[2:], self.shape[2:])]
        padded = np.pad(x, ((0, 0), (0, 0), *((k // 2, k // 2) for k in kernel)))
        offsets = itertools.product(*map(range, kernel))
        index = ((at[0], slice(None), *(a * s + o for a, s, o in zip(at[1:], steps, offset))) for offset in offsets)
        result: Array = np.stack([padded[i] for i in index], axis=2).astype(np.float64)
        return result

    def gives(self, x: Array, at: tuple[Array, ...], first: int = 0) -> Array:
        """[places, out] of features that stand from `first` on, without the bias."""
        columns = self.weight[:, first:first + x.shape[1]].reshape(len(self.weight), -1)
        result: Array = self.patches(x, at).reshape(len(at[0]), -1) @ columns.T
        return result


def _order(reader: Reader, parts: typing.Sequence[Array], output: Array, at: tuple[Array, ...], limit: float
           ) -> list[int] | None:
    """Numbers of parts whose products with the weight's columns, one after the other, add up to an output."""
    steps, width = itertools.count(), reader.weight.shape[1]

    def following(rest: Array, first: int, used: list[int]) -> list[int] | None:
        if first == width:
            return used if float(np.abs(rest).max()) <= limit else None
        if len(used) == MOST_PARTS or next(steps) > MOST_STEPS:
            return None
        left = [(rest - reader.gives(x, at, first), i) for i, x in enumerate(parts) if first + x.shape[1] <= width]
        left.sort(key=lambda of: float((of[0] ** 2).sum()))
        tries = (following(less, first + parts[i].shape[1], [*used, i]) for less, i in left[:BRANCHES])
        return next((found for found in tries if found is not None), None)

    index = (at[0], slice(None), *at[1:])
    return following(output.reshape(reader.shape)[index] - reader.bias, 0, [])


def _parts(case: Case, reader: Reader) -> typing.Iterator[tuple[str, Array]]:
    """Tensors that were computed before, and the model's inputs, as the module may read them."""
    known = case.runs.reference
    for name in earlier(case):
        own, shape = Name.of(name), shape_of(known, name)
        if own.kind == "fwd" and own.step == case.name.step and len(shape) > 1 and known[name].dtype.kind == "f" and (
                shape[-1 if reader.weight.ndim == 2 else 1] <= reader.weight.shape[1]):
            x = reader.reads(known[name])
            if x is not None:
                yield name, x


def _padded(case: Case, reader: Reader, x: Array) -> typing.Iterator[Pattern]:
    """A convolution with other values than zeros around what it reads, of which only its ends know."""
    reach = (0, 0, *(k // 2 for k in reader.weight.shape[2:]))
    axes = tuple(a for a, k in enumerate(reach) if 0 < k < x.shape[a])
    edge: Array = np.zeros((reader.shape[0], *reader.shape[2:]), bool)
    for a in axes:
        np.moveaxis(edge, a - 1, 0)[[*range(reach[a]), *range(-reach[a], 0)]] = True
    if not axes or (case.seen.any(axis=1) & ~edge).any():
        return
    zeros = reader.gives(x, at := np.nonzero(edge))
    for mode, some in itertools.product(PADS, {axes, *((a,) for a in axes)}):
        more = [k * (a in some) for a, k in enumerate(reach)]
        wider = np.pad(x, [(k, k) for k in more], mode)  # type: ignore[call-overload]  # a key of PADS
        expected = np.array(case.ref)
        np.moveaxis(expected, 1, -1)[at] += reader.gives(wider, (at[0], *map(np.add, at[1:], more[2:]))) - zeros
        yield Pattern(PADDED, expected, {"how": PADS[mode], "axes": " and ".join(map(str, some))})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "fwd" or case.every or case.reference.dtype.kind != "f" or not case.seen.any() or not (
            np.isfinite(case.val).all()):
        return
    reader = Reader.of(case)
    if reader is None or case.reference.size * reader.weight[0].size > MOST_WORK:
        return
    rest = (reader.shape[0], *reader.shape[2:])
    flat = np.unique(np.linspace(0, math.prod(rest) - 1, min(SAMPLED, math.prod(rest))).astype(int))
    at, limit = tuple(map(np.asarray, np.unravel_index(flat, rest))), 4.0 * near(case)
    known = list(itertools.islice(_parts(case, reader), MOST_TENSORS))
    order = _order(reader, [x for _, x in known], case.ref, at, limit)
    if order is None:
        return
    wanted, sizes = [known[i] for i in order], case.runs.group_sizes
    yield from _padded(case, reader, np.concatenate([x for _, x in wanted], axis=1))
    counts = {2, 3, 4, case.runs.heads, case.runs.kv_heads, *sizes, *(2 * n for n in sizes)}
    name, x = wanted[0]
    ways = [wanted] if len(wanted) > 1 else [
        [(f"block {i} of {n} of {name}", block) for i, block in enumerate(np.split(x, n, axis=1))]
        for n in sorted(counts) if 1 < n <= MOST_PARTS and x.shape[1] % n == 0 and x.shape[1] > n]
    for pieces in ways:
        found = _order(reader, [x for _, x in pieces], case.val, at, limit)
        if found is not None and found != list(range(len(pieces))):
            every = np.indices(rest).reshape(len(rest), -1)
            y = reader.gives(np.concatenate([pieces[i][1] for i in found], axis=1), tuple(every)) + reader.bias
            expected = np.moveaxis(y.reshape(*rest, -1), -1, 1).reshape(case.shape)
            yield Pattern(JOINED, expected, {
                "has": ", ".join(pieces[i][0] for i in found), "wanted": ", ".join(name for name, _ in pieces),
                "once": sorted(found) == list(range(len(pieces)))}, fitted=0 if len(pieces) < 5 else 1)
            return


# --- causes -----------------------------------------------------------------------------------------------------------

_OTHER = "{has}, where the reference has {wanted}"
CAUSES = (
    Cause("slices_reordered", (JOINED,), "what this module reads is joined in another order: " + _OTHER, "the order of "
          "`torch.cat`, of gathered parts and of packed features in front of this module", has(once=True)),
    Cause("slices_repeated", (JOINED,), "what this module reads has a part twice and another not at all: " + _OTHER,
          "what is joined in front of this module"),
    Cause("padding", (PADDED,), "the convolution, computed again, gives these values if {how} stand beyond the ends of "
          "dimension {axes}, and not zeros", "the first and the last rank in an exchange of edges, which have no "
          "neighbour there; `padding_mode`, and what pads in front of this convolution"),
)
