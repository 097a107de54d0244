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
from anyrank.explain.replay.sources import inputs, left, parameter, valid, where_wrong
from anyrank.explain.tensors import Array, Case, Name

OWN_QUERIES, PROBABILITIES, PACKED, HOPS = "own queries alone", "the probabilities", "q, k and v", "hops"
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


def _made(forward: Forward, part: Array | None = None, place: Array | None = None, hop: Array | None = None
          ) -> dict[str, Array]:
    """The gradients of k, as it is before and after it is turned, and of v: [samples, keys, KV heads, features], of the
    queries of each key's own part alone; those of probabilities, of values of the query's own part alone; those of q, k
    and v in one. hop: the key whose gradients each key has."""
    base, heads, given = forward
    found: dict[str, list[Array]] = {"k": [], "turned k": [], "v": [], PROBABILITIES: [], PACKED: []}
    rows = np.arange(heads.q.shape[1])

    def turned(x: Array, side: int, b: int, sign: int = 1) -> Array:
        return x if base.turn is None else a.turned(
            x, dataclasses.replace(base.turn, sides=(sign, sign, 0)), side, b, np.arange(len(x)))

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
        of_q = (by_s @ turned(k, 1, b).swapaxes(0, 1)[:, None]).reshape(-1, *q.shape[::2]).swapaxes(0, 1)
        q = turned(q, 0, b).reshape(len(rows), groups, shared, -1).transpose(1, 2, 0, 3)
        of_k, of_v = ((x.swapaxes(-1, -2) @ y).sum(1).swapaxes(0, 1)[slice(None) if hop is None else hop]
                      for x, y in ((by_s, q), (p, d)))
        found["v"].append(of_v)
        found["turned k"].append(of_k)
        found["k"].append(turned(of_k, 1, b, -1))
        if heads.packed == "one after the other":
            found[PACKED].append(np.concatenate([turned(of_q, 0, b, -1), found["k"][-1], of_v], axis=1))
    return {name: np.stack(arrays) for name, arrays in found.items() if arrays}


def _carried(case: Case, gradient: Array) -> typing.Iterator[Array]:
    """What the case may have of such a gradient: itself, its sum, that of a product's input or weight, of a gain."""
    whole = gradient.reshape(*gradient.shape[:2], -1)
    weight = parameter(case, f"{case.name.module}.weight")
    gain, output = parameter(case, case.name.stem), case.runs.reference.get(
        str(Name(case.name.module, "fwd", case.name.step)))
    if case.name.kind == "bwd":
        some = [gradient, gradient.swapaxes(1, 2), whole]
        some += [whole @ weight] if weight is not None and weight.shape[:1] == whole.shape[2:] else []
    elif len(case.shape) == 2 and output is not None:
        module = dataclasses.replace(case, name=Name(case.name.module, "fwd", case.name.step), reference=output)
        some = [np.einsum("btw,bti->wi", whole, x.reshape(*whole.shape[:2], -1))
                for _, x in inputs(module, case.shape[1], MOST_OUTPUTS) if whole.shape[:2] == output.shape[:2]]
    else:
        some = [whole.sum((0, 1))]
        if gain is not None and output is not None and output.shape[-1:] == gain.shape == gradient.shape[-1:]:
            some.append((gradient * output.reshape(gradient.shape) / gain).reshape(-1, *gain.shape).sum(0))
    yield from (x for x in some if x.shape == case.shape)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    of_product = case.name.kind == "grad" and len(case.shape) < 3
    parts = [n for name, n in case.runs.mesh.items() if name.startswith(("cp", "sp", "ring", "context"))]
    if not (case.name.kind == "bwd" or of_product) or case.every or not parts or (forward := _forward(case)) is None:
        return
    for what, right in _made(forward).items():
        for i, x in enumerate(_carried(case, right)):
            if left(x, case.ref) > NEAR:
                continue
            for n in parts:
                for layout, part, place in changes.parts_of(len(forward[0].seen[0]), n):
                    at, back = np.lexsort((place, part)).reshape(n, -1), np.argsort(np.lexsort((place, part)))
                    for by in range(n):  # hops
                        made = _made(forward, hop=np.roll(at, -by, axis=0).ravel()[back]) if by else _made(
                            forward, part, place)
                        yield Pattern(HOPS if by else OWN_QUERIES, where_wrong(
                            case, case.ref + list(_carried(case, made[what]))[i] - x), {
                                "what": what, "n": n, "layout": layout, "by": by})
            return


CAUSES = (Cause("ring_attention", (OWN_QUERIES,), "attention's gradient of {what}, computed again, is that of the "
                "values of each query's own rank at every hop ({layout} parts of {n} ranks)",
                "the keys and values that are sent round the ring in the backward pass", has(what=PROBABILITIES)),
          Cause("ring_attention", (HOPS,), "attention's gradient of {what}, computed again, is on each rank that of "
                "the keys and values of the {by}. rank after it, of {n}", "the hops of the gradients of keys and "
                "values, one more than those of keys and values, so that they come back to their rank"),
          Cause("missing_reduce_scatter", (OWN_QUERIES,), "attention's gradient of {what}, computed again, is of the "
                "queries of each rank alone ({layout} parts of {n} ranks); the sum over the queries of all ranks is "
                "missing", "the backward pass of gathered or circulated keys and values: a reduce-scatter of their "
                "gradients, or their way back round the ring"),)
