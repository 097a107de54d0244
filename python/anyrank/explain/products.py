# SPDX-License-Identifier: Apache-2.0
"""The gradient of a weight as the product of an output's gradient and an input, whichever of the dump's tensors these
are: which samples and parts of the sequence each rank's copy has, and one use of a weight whose other use is not known.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.known import shape_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.slices import near
from anyrank.explain.summands import logits_gradient
from anyrank.explain.tensors import MOST, Array, Case, Name
from anyrank.explain.words import ranks_of

SUBSET, CROSSED, USES = "part_of_product", "crossed_product", "uses_of_weight"
ROWS = 24  # of the gradient, by which a pair of tensors is found
MOST_PAIRS, MOST_WORK = 96, 1 << 28
MOST_CELLS = 64  # parts of the samples and of the sequence that are told apart
LOGITS = "the logits' gradient"
MOST_CROSSED = 6  # parts of which each may have each one's input
NEAR = 1e-3  # of a part's coefficient


@dataclasses.dataclass(frozen=True)
class Product:
    """weight's gradient = gradient^T @ input, of [samples, tokens of each, features]."""

    gradient: str
    input: str
    of_gradient: Array
    of_input: Array

    def over(self, rows: typing.Any, chunks: int) -> Array:
        """[samples * chunks, rows, in]: what each part of each sample contributes to some rows of the gradient."""
        n, tokens, width = self.of_input.shape
        a = self.of_gradient[..., rows].reshape(n * chunks, tokens // chunks, -1)
        b = self.of_input.reshape(n * chunks, tokens // chunks, width)
        result: Array = np.matmul(a.transpose(0, 2, 1), b)
        return result

    def whole(self, weights: Array | None = None) -> Array:
        """The gradient, or that of parts of samples by their weights [samples, chunks]."""
        n, tokens, width = self.of_input.shape
        a = self.of_gradient
        if weights is not None:
            a = a * np.repeat(weights, tokens // weights.shape[1], axis=1)[..., None]
        result: Array = a.reshape(n * tokens, -1).T @ self.of_input.reshape(n * tokens, width)
        return result


def _names(case: Case, kind: str, width: int) -> list[str]:
    own = case.name.module
    names = [name for name in case.runs.reference if (n := Name.of(name)).kind == kind and n.step == case.name.step
             and shape_of(case.runs.reference, name)[-1:] == (width,) and len(shape_of(case.runs.reference, name)) > 1
             and math.prod(shape_of(case.runs.reference, name)) <= MOST]
    return sorted(names, key=lambda name: not Name.of(name).stem.startswith(own))


def _read(case: Case, name: str) -> Array:
    array: Array = case.runs.reference[name].astype(np.float64)
    return array.reshape(len(array), -1, array.shape[-1])


def _found(case: Case) -> tuple[Product, bool] | None:
    """The product that the gradient is or, of a weight of two uses, that a part of its rows is; and whether all are."""
    out, width = case.shape
    rows = np.unique(np.linspace(0, out - 1, min(ROWS, out)).astype(int))
    ref = case.ref[rows]
    limit = 4.0 * near(case)
    sizes = np.abs(ref).max(axis=1)
    work, best = 0, None
    of_logits = logits_gradient(case, out)
    gradients = [*_names(case, "bwd", out), *([LOGITS] if of_logits is not None else [])]
    for gradient, given in itertools.islice(itertools.product(gradients, _names(case, "fwd", width)), MOST_PAIRS):
        shape = shape_of(case.runs.reference, gradient) if gradient != LOGITS else np.shape(of_logits)
        work += math.prod(shape[:-1]) * width * len(rows)
        if shape[:-1] != shape_of(case.runs.reference, given)[:-1] or work > MOST_WORK:
            continue
        made_of = of_logits if gradient == LOGITS and of_logits is not None else _read(case, gradient)
        product = Product(gradient, given, made_of, _read(case, given))
        made = product.over(rows, 1).sum(axis=0)
        is_it = (np.abs(made - ref) <= limit).all(axis=1) & (sizes > 100.0 * limit)
        if is_it.sum() == (sizes > 100.0 * limit).sum() > 0:
            return product, True
        if best is None and is_it.sum() >= max(3, len(rows) // 4):
            best = product, False
    return best


# --- parts of the samples ---------------------------------------------------------------------------------------------


def _weights(product: Product, rows: Array, values: Array, chunks: int) -> Array | None:
    """Of each part of each sample the number by which it is in these values; None: they are no such sum."""
    parts = product.over(rows, chunks).reshape(-1, values.size).T
    count = parts.shape[1]
    if count > MOST_CELLS or 2 * count > values.size:
        return None
    used = np.abs(parts).max(axis=0) > 0.0
    x, _, rank, singular = np.linalg.lstsq(parts[:, used], values.ravel(), rcond=None)
    left = np.abs(parts[:, used] @ x - values.ravel()).max()
    if rank < used.sum() or singular[-1] < 1e-3 * singular[0] or left > 1e-4 * np.abs(values).max():
        return None
    weights = np.ones(count)
    weights[used] = x
    whole = np.rint(weights)
    result: Array = np.where(np.abs(weights - whole) < NEAR, whole, weights).reshape(-1, chunks)
    return result


def _micro_batch(case: Case, kept: Array) -> int:
    """The number of the micro-batch whose samples, of each rank, are these; -1: they are none's."""
    micro = case.runs.micro_batches
    for n in (1, *case.runs.group_sizes) if micro > 1 else ():
        if len(kept) % (n * micro) == 0:
            by = kept.reshape(n, micro, -1)
            for m in range(micro):
                if by[:, m].all() and not np.delete(by, m, axis=1).any():
                    return m
    return -1


def _group_part(case: Case, kept: Array) -> bool:
    """Whether these are the samples, or the tokens, of one rank of a group."""
    for axis in range(2):
        flat: Array = np.asarray(kept.any(axis=1 - axis))
        at = np.flatnonzero(flat)
        whole = (kept == flat[:, None] if axis == 0 else kept == flat).all()
        if at.size and whole and at[-1] - at[0] + 1 == len(at) and at[0] % len(at) == 0 and (
                flat.size % len(at) == 0 and flat.size // len(at) in case.runs.group_sizes):
            return True
    return False


def _one_of_each(kept: Array, sizes: tuple[int, ...]) -> bool:
    """Whether of each equal part of the samples the first alone is kept."""
    for n in (1, *sizes):
        if len(kept) % n == 0 and len(kept) // n > 1:
            by = kept.reshape(n, -1)
            if by[:, 0].all() and not by[:, 1:].any():
                return True
    return False


def _subsets(case: Case, product: Product) -> typing.Iterator[Pattern]:
    rows = np.unique(np.linspace(0, case.shape[0] - 1, min(ROWS, case.shape[0])).astype(int))
    tokens = product.of_input.shape[1]
    same = all(copy.boxes == case.copies[0].boxes for copy in case.copies)
    for chunks in (1, *(n for n in case.runs.group_sizes if tokens % n == 0)):
        found = []
        for values in ([copy.values[0] for copy in case.copies] if same and len(case.copies[0].boxes) == 1 and (
                case.copies[0].values[0].shape == case.shape) else [case.val]):
            weights = _weights(product, rows, values[rows].astype(np.float64), chunks)
            if weights is None:
                break
            found.append(weights)
        else:
            if all((weights == 1.0).all() for weights in found):
                return
            yield _subset(case, product, found, chunks)
            return


def _subset(case: Case, product: Product, found: list[Array], chunks: int) -> Pattern:
    kept = found[-1] != 0.0 if not np.array_equal(found[-1], np.ones_like(found[-1])) else found[0] != 0.0
    by_copy = len(found) > 1
    parts = [[product.whole(w)[box] for box in copy.boxes]
             for w, copy in zip(found if by_copy else found * len(case.copies), case.copies)]
    numbers = {"gradient": product.gradient, "input": product.input, "kept": int(kept.sum()), "all": kept.size,
               "what": "samples" if chunks == 1 else f"parts of samples ({chunks} of each sequence)",
               "which": ", ".join(map(str, np.flatnonzero(kept.ravel())[:8])), "micro": -1, "one_sample": False,
               "ranks": "", "whole": {*np.unique(np.stack(found))} <= {0.0, 1.0}, "left_out": bool(kept.any())}
    full = [bool((w == 1.0).all()) for w in found]
    numbers["right"] = ranks_of(copy.rank or 0 for copy, fine in zip(case.copies, full) if fine) if any(full) else ""
    parts_of_ranks = by_copy and all(fine or _group_part(case, w != 0.0) for fine, w in zip(full, found))
    alike = all(np.array_equal(w, found[0]) for w in found)
    if chunks == 1 and alike:
        numbers["micro"] = _micro_batch(case, kept[:, 0])
        numbers["one_sample"] = _one_of_each(kept[:, 0], tuple(n * case.runs.micro_batches for n in (
            1, *case.runs.group_sizes)))
    numbers["of_ranks"] = parts_of_ranks and not alike
    factors = {float(x) for fine, w in zip(full, found) if not fine for x in w[w != 0.0]}
    numbers["is_sum"], numbers["is_mean"] = factors == {1.0}, factors == {kept.size / max(1, int(kept.sum()))}
    numbers["ranks"] = ranks_of(copy.rank or 0 for copy, fine in zip(case.copies, full) if not fine)
    ruled = numbers["of_ranks"] or numbers["micro"] >= 0 or numbers["one_sample"]
    return Pattern(SUBSET, parts, numbers, 0 if ruled else min(kept.size, 4),
                   trials=2 if numbers["of_ranks"] else 1)  # a sum or mean of the copies says it more simply


def _crossed(case: Case, product: Product) -> typing.Iterator[Pattern]:
    """Each part's gradient multiplied by another part's input: parts in another order, or an input written over."""
    n = len(product.of_input)
    rows = np.unique(np.linspace(0, case.shape[0] - 1, min(ROWS, case.shape[0])).astype(int))
    values = case.val[rows].ravel()
    for parts in (m for m in range(2, MOST_CROSSED + 1) if n % m == 0):
        a = product.of_gradient[..., rows].reshape(parts, -1, len(rows))
        b = product.of_input.reshape(parts, -1, product.of_input.shape[-1])
        each = np.einsum("ptr,qti->riqp", a, b).reshape(values.size, parts, parts)
        table = each.reshape(values.size, -1)
        if values.size < 2 * parts * parts:
            continue
        x, _, rank, _ = np.linalg.lstsq(table, values, rcond=1e-6)
        if rank < parts * parts or np.abs(table @ x - values).max() > 1e-4 * np.abs(values).max():
            continue
        taken = x.reshape(parts, parts)  # [input, gradient]
        source = taken.argmax(axis=0)
        if np.abs(taken - (np.arange(parts)[:, None] == source)).max() > NEAR or (source == np.arange(parts)).all():
            continue
        size = n // parts
        index = (source[:, None] * size + np.arange(size)).ravel()
        crossed = dataclasses.replace(product, of_input=product.of_input[index])
        yield Pattern(CROSSED, crossed.whole(), {
            "gradient": product.gradient, "input": product.input, "parts": parts,
            "order": ", ".join(f"{i} that of {j}" for i, j in enumerate(source) if i != j)}, trials=4)
        return


def _other_inputs(case: Case, product: Product) -> typing.Iterator[Pattern]:
    """The product with another tensor of the dump as the input."""
    rows = np.unique(np.linspace(0, case.shape[0] - 1, min(ROWS, case.shape[0])).astype(int))
    for name in _names(case, "fwd", case.shape[1])[:MOST_PAIRS]:
        if name != product.input and math.prod(shape_of(case.runs.reference, name)) == product.of_input.size:
            other = dataclasses.replace(product, of_input=_read(case, name).reshape(product.of_input.shape))
            if np.abs(other.over(rows, 1).sum(axis=0) - case.val[rows]).max() <= 4.0 * near(case):
                yield Pattern(CROSSED, other.whole(), {"gradient": product.gradient, "input": product.input,
                                                       "other": name, "parts": 0}, trials=8)
                return


def _uses(case: Case, product: Product) -> typing.Iterator[Pattern]:
    """A weight that is used twice: one use's gradient alone, or twice."""
    own = product.whole()
    rest = case.ref - own
    numbers = {"gradient": product.gradient, "input": product.input}
    for text, expected in (("it is that of the one use alone, and the other use is missing", own),
                           ("the use as such a product is missing, and that of the other use is there", rest),
                           ("the use as such a product is counted twice", case.ref + own),
                           ("the other use is counted twice", case.ref + rest)):
        yield Pattern(USES, expected, {**numbers, "what": text})


def patterns(case: Case) -> typing.Iterator[Pattern]:
    if case.name.kind != "grad" or len(case.shape) != 2 or case.every or not case.seen.any() or (
            not np.isfinite(case.val).all()):
        return
    found = _found(case)
    if found is None:
        return
    product, is_all = found
    if is_all:
        yield from _subsets(case, product)
        yield from _crossed(case, product)
        yield from _other_inputs(case, product)
    else:
        yield from _uses(case, product)


# --- causes -----------------------------------------------------------------------------------------------------------

_MADE = "made again of {gradient} and {input}: "
CAUSES = (
    Cause("tied_weight", (USES,), "a weight that is used twice, whose gradient is a sum of both uses: " + _MADE +
          "{what}", "the sum of both uses' gradients: `tie_weights()` after wrapping, the all-reduce over the stages "
          "or ranks that share the weight"),
    Cause("missing_all_reduce", (SUBSET,), _MADE + "{ranks} has what the samples or tokens of one rank give alone "
          "({kept} of {all} {what}), not the sum over all", "the all-reduce of gradients: hooks of DDP, `no_sync`, a "
          "reduction into another buffer", has(of_ranks=True, is_sum=True)),
    Cause("missing_average", (SUBSET,), _MADE + "{ranks} has the mean over one rank's own samples or tokens ({kept} of "
          "{all} {what}), not that over all", "the average did not run: `no_sync`, the module inside called, a "
          "parameter that DDP does not know", has(of_ranks=True, is_mean=True)),
    Cause("one_micro_batch", (SUBSET,), _MADE + "what micro-batch {micro} gives is in this gradient, and no other's",
          "gradients of micro-batches are added up; `zero_grad()` between them, a reduction that writes over the sum",
          has(micro=lambda m: m >= 0, whole=True)),
    Cause("one_sample", (SUBSET,), _MADE + "of each rank's samples the first alone is in this gradient",
          "leading dimensions that are not flattened; a loop that ends early", has(one_sample=True, whole=True)),
    Cause("part_of_tokens", (SUBSET,), _MADE + "{kept} of {all} {what} are in this gradient ({which}), and the others "
          "are not", "which samples or tokens go backward through this module", has(whole=True, left_out=True)),
    Cause("input_overwritten", (CROSSED,), _MADE + "the other run has {other} in place of this input",
          "a saved input that is written over before the backward pass: operations in place, one buffer for several",
          has(parts=0)),
    Cause("input_of_other_micro_batch", (CROSSED,), _MADE + "of {parts} parts of the batch some have the input of "
          "another: {order}", "the order of micro-batches' inputs and of their gradients; one buffer for several"),
)
