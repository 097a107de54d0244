# SPDX-License-Identifier: Apache-2.0
"""Attention's gradients of keys and values, computed again from the reference: of which queries they are."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import order, shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.replay import attention as a, changes
from anyrank.explain.replay.sources import left, parameter, valid, where_wrong
from anyrank.explain.tensors import Array, Case, Name

OWN_QUERIES, PROBABILITIES = "own queries alone", "the probabilities"
MOST_OUTPUTS = 3  # of attention that are tried
NEAR = 2e-3  # how far a gradient that is made again may be from the reference

Forward = typing.Tuple[a.Recipe, a.Heads, Array]


def _forward(case: Case) -> Forward | None:
    """The recipe of the attention that reads the case's module, its q, k and v, and the gradient of what it gives."""
    known, at = case.runs.reference, order(case)
    parent = case.name.module.rpartition(".")[0]
    here = at.get(str(Name(case.name.module, "fwd", case.name.step)), -1)
    names = [name for name in at if (n := Name.of(name)).kind == "fwd" and n.step == case.name.step and here < at[name]
             and n.stem.startswith(parent) and Name.of(name).with_kind("bwd") in known
             and shape_of(known, Name.of(name).with_kind("bwd"))[:2] == shape_of(known, name)[:2]]
    ways = []
    for name in names[:MOST_OUTPUTS]:
        output = dataclasses.replace(case, name=Name.of(name), reference=known[name], other=known[name], copies=())
        ways += [(changes.starts_of(target, heads), target, heads) for target in a.targets(output)
                 for heads in (a.readings(target) if target.matrix is not None else ())]
    for first, target, heads in sorted(ways, key=lambda way: way[0][0][0])[:changes.READINGS]:
        far, base = changes.base_of(target, heads, first)
        if far <= valid(case) and not base.cap and base.softmax == "seen" and not base.order:
            return base, heads, known[target.case.name.with_kind("bwd")].astype(np.float64)
    return None


def _made(forward: Forward, part: Array | None = None, place: Array | None = None) -> dict[str, Array]:
    """The gradients of k, as it is before and after it is turned, and of v: [samples, keys, KV heads, features], of the
    queries of each key's own part alone; and those of probabilities, of values of the query's own part alone."""
    base, heads, given = forward
    found: dict[str, list[Array]] = {"k": [], "turned k": [], "v": [], PROBABILITIES: []}
    rows = np.arange(heads.q.shape[1])
    for b in range(heads.q.shape[0]):
        q, k, v = heads.q[b], heads.k[b], heads.v[b]
        groups, shared = k.shape[1], q.shape[1] // k.shape[1]
        seen = base.seen[b if len(base.seen) > 1 else 0]
        p = a.weights(a.scores(heads, base, b, rows), base, seen)
        d = given[b].reshape(len(rows), groups, shared, -1).transpose(1, 2, 0, 3)
        by_p = d @ v.transpose(1, 2, 0)[:, None]
        by_s = p * (by_p - (p * by_p).sum(-1, keepdims=True)) * base.scale
        if part is not None and place is not None:
            own = part[:, None] == part[None, :]
            p, by_s = p * own, by_s * own
            at = np.lexsort((place, part)).reshape(part.max() + 1, -1)[part][:, place]
            by_p = np.take_along_axis(by_p, np.broadcast_to(at, by_p.shape), -1)
        found[PROBABILITIES].append((by_p * seen).reshape(-1, *seen.shape))
        q = q if base.turn is None else a.turned(q, base.turn, 0, b, rows)
        q = q.reshape(len(rows), groups, shared, -1).transpose(1, 2, 0, 3)
        of_k = (by_s.swapaxes(-1, -2) @ q).sum(1).swapaxes(0, 1)
        found["v"].append((p.swapaxes(-1, -2) @ d).sum(1).swapaxes(0, 1))
        found["turned k"].append(of_k)
        found["k"].append(of_k if base.turn is None else a.turned(
            of_k, dataclasses.replace(base.turn, sides=(1, -1, 0)), 1, b, np.arange(len(k))))
    return {name: np.stack(arrays) for name, arrays in found.items()}


def _carried(case: Case, gradient: Array) -> typing.Iterator[Array]:
    """What the case may have of a gradient of k or v: itself, its sum, that of a product's input, that of a gain."""
    whole = gradient.reshape(*gradient.shape[:2], -1)
    weight = parameter(case, f"{case.name.module}.weight")
    gain, output = parameter(case, case.name.stem), case.runs.reference.get(
        str(Name(case.name.module, "fwd", case.name.step)))
    if case.name.kind == "bwd":
        some = [gradient, gradient.swapaxes(1, 2), whole]
        some += [whole @ weight] if weight is not None and weight.shape[:1] == whole.shape[2:] else []
    else:
        some = [whole.sum((0, 1))]
        if gain is not None and output is not None and output.shape[-1:] == gain.shape == gradient.shape[-1:]:
            some.append((gradient * output.reshape(gradient.shape) / gain).reshape(-1, *gain.shape).sum(0))
    yield from (x for x in some if x.shape == case.shape)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    of_vector = case.name.kind == "grad" and len(case.shape) == 1
    parts = [n for name, n in case.runs.mesh.items() if name.startswith(("cp", "sp", "ring", "context"))]
    if not (case.name.kind == "bwd" or of_vector) or case.every or not parts or (forward := _forward(case)) is None:
        return
    for what, right in _made(forward).items():
        for i, x in enumerate(_carried(case, right)):
            if left(x, case.ref) > NEAR:
                continue
            for n in parts:
                for layout, *part in changes.parts_of(len(forward[0].seen[0]), n):
                    own = list(_carried(case, _made(forward, *part)[what]))[i]
                    yield Pattern(OWN_QUERIES, where_wrong(case, case.ref + own - x), {
                        "what": what, "n": n, "layout": layout})
            return


CAUSES = (Cause("ring_attention", (OWN_QUERIES,), "attention's gradient of {what}, computed again, is that of the "
                "values of each query's own rank at every hop ({layout} parts of {n} ranks)",
                "the keys and values that are sent round the ring in the backward pass", has(what=PROBABILITIES)),
          Cause("missing_reduce_scatter", (OWN_QUERIES,), "attention's gradient of {what}, computed again, is of the "
                "queries of each rank alone ({layout} parts of {n} ranks); the sum over the queries of all ranks is "
                "missing", "the backward pass of gathered or circulated keys and values: a reduce-scatter of their "
                "gradients, or their way back round the ring"),)
