# SPDX-License-Identifier: Apache-2.0
"""The loss: the cross entropy that the reference's is, with one thing changed."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause, has
from anyrank.explain.entropy import (NEAR, NONE, Loss, Recipe, log_sum, mean, recipe_of, shifted,
                                     with_logits)
from anyrank.explain.known import loss_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.tensors import Array, Case, Tensors

CHANGED = "cross entropy changed"
GENERAL = 1000
OF_ONE = {"ranks": "rank", "micro-batches": "micro-batch", "ranks and micro-batches": "rank's micro-batch"}
SMOOTHINGS, WEIGHTS = (0.1, 0.2, 0.05, 0.3, 0.01, 0.15), (1e-4, 1e-3, 1e-5, 1e-2, 0.1)
MULTIPLES = (8, 16, 32, 64, 128, 256, 512, 1024)  # to which a vocabulary is padded
MOST_COUNTED = 2000  # a divisor above is no evidence: some integer is near any number


# --- what may be changed ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Changed:
    """The cross entropy with one thing changed. after: GENERAL where the other run's gradients say so and a change that
    is told without them comes first."""

    how: str
    value: float
    numbers: typing.Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)
    after: int = 0


Found = typing.Iterator[Changed]


def _groups(case: Case, recipe: Recipe) -> typing.Iterator[tuple[str, list[Array]]]:
    """Rows of each rank and micro-batch, by what the ranks hold of the logits, and of each sample."""
    samples, tokens = recipe.loss.shape
    sample: Array = np.arange(samples * tokens) // tokens
    parts = case.runs.other.parts(recipe.logits) if isinstance(case.runs.other, Tensors) and (
        recipe.logits in case.runs.other) else ()
    by_part: dict[bytes, Array] = {}
    by_rank: dict[int | None, Array] = {}
    for copy in parts:
        held: Array = np.zeros(case.runs.reference[recipe.logits].shape[:-1], bool)
        for box in copy.boxes:
            held[box[:-1]] = True
        by_part[held.tobytes()] = held.ravel()
        by_rank[copy.rank] = by_rank.get(copy.rank, np.zeros(held.size, bool)) | held.ravel()
    of_ranks = {rows.tobytes(): rows for rows in by_rank.values()}
    for what, of in (("ranks", of_ranks), ("ranks and micro-batches", by_part)):
        groups = list(of.values())
        if len(groups) > 1 and (np.sum(groups, 0) == 1).all() and (
                what == "ranks" or len(groups) != len(of_ranks)):
            yield what, groups
    micro, ranks = case.runs.micro_batches, max(len(of_ranks), 1)
    if micro > 1 and samples % (micro * ranks) == 0:
        size = samples // micro // ranks
        yield "micro-batches", [sample // (samples // micro) == i for i in range(micro)]
        if ranks > 1:
            yield "micro-batches", [sample // size % micro == i for i in range(micro)]
            yield "ranks and micro-batches", [sample // size == i for i in range(micro * ranks)]
    yield "samples", [sample == i for i in range(samples)]


def _means(case: Case, recipe: Recipe, each: Array) -> Found:
    counted = recipe.loss.counted
    for what, groups in _groups(case, recipe):
        own = [(float(each[rows & counted].sum()), int((rows & counted).sum())) for rows in groups]
        counts = [n for _, n in own]
        means = [total / n if n else math.nan for total, n in own]
        numbers = {"what": what, "parts": len(own), "counts": " : ".join(map(str, counts[:8]))}
        if len(set(counts)) > 1 and all(counts):
            yield Changed("mean of means", sum(means) / len(means), numbers)
        if what != "samples":
            for x, (total, _) in zip(means, own):
                for value in (x, total / max(sum(counts), 1)):
                    yield Changed("own part", value, {**numbers, "of": OF_ONE[what]})
            yield Changed("sum of means", sum(means), numbers)


def _cut(case: Case, recipe: Recipe, each: Array) -> Found:
    """Labels are shifted in each of equal parts of the tokens, whose last ones have no label then."""
    tokens, counted = recipe.loss.shape[1], recipe.loss.counted
    place: Array = np.arange(counted.size) % tokens
    for n in sorted({*case.runs.group_sizes, case.runs.micro_batches}) if recipe.by > 0 else ():
        size = tokens // n
        kept = counted & (place % size < size - recipe.by)
        lost = int(counted.sum() - kept.sum())
        if n > 1 and tokens % n == 0 and size > recipe.by and lost and kept.any():
            total, means = float(each[kept].sum()), [mean(each, rows) for i in range(n) if (
                rows := kept & (place // size == i)).any()]
            for value in (total / kept.sum(), total / counted.sum(), sum(means) / n):
                yield Changed("cut", value, {"fewer": lost})


def _targets(case: Case, recipe: Recipe, each: Array) -> Found:
    """Labels of other tokens; rows that are no targets count, in the sum or in the divisor alone; one does not."""
    loss, (samples, tokens), (total, targets) = recipe.loss, recipe.loss.shape, _sum(recipe, each)
    for by in (by for by in (-1, 0, 1, 2, 3) if by != recipe.by and abs(by) < tokens):
        other = loss.of(shifted(recipe.all_labels, by, loss.logits.shape[1]))
        if recipe.by > 0:
            other = loss.of(np.where(loss.labels == NONE, NONE, other.labels))
        if other.counted.any():
            for value in (other.mean(), float(other.each()[other.counted].sum()) / targets):
                yield Changed("shifted", value, {"by": by, "right": recipe.by})
    for n in (2 * n for n in case.runs.group_sizes if n > 1 and tokens % (2 * n) == 0):
        order = np.stack([np.arange(n // 2), n - 1 - np.arange(n // 2)], axis=1).reshape(-1)
        for places in (order, np.argsort(order)):
            blocks = loss.labels.reshape(samples, n, -1)[:, places].reshape(-1)
            yield Changed("blocks", loss.of(blocks).mean())
    there = loss.labels != NONE
    for n in {int(there.sum()), samples * tokens, samples, targets + 1, targets - 1} - {targets, 0}:
        yield Changed("divisor", total / n, {"says": f"divided by {n} instead of {targets} targets"})
    rows = np.flatnonzero(loss.counted)
    for row, what in ((rows[0], "first"), (rows[-1], "last")):
        yield Changed("divisor", (total - float(each[row])) / targets, {
            "says": f"without the {what} target, which the divisor counts"})
    if more := int(there.sum()) - targets:
        filled = loss.of(np.where(there & ~loss.counted, 0, loss.labels))
        beside = float(log_sum(loss.logits)[there & ~loss.counted].sum())  # the logit of no label taken as 0
        whole = float(filled.each()[there].sum())
        for ignored in (there & ~loss.counted, ~loss.counted) if loss.z else ():
            squares = float((log_sum(loss.logits)[ignored] ** 2).sum())
            yield Changed("z", (total + loss.z * squares) / targets, {
                "says": f"with {loss.z:g} times the square of log Z of rows that are no targets too"})
        for value in (whole / (targets + more), whole / targets, (total + beside) / targets, (total + beside) / (
                targets + more)):
            yield Changed("targets", value, _other_targets(more))


def _other_targets(more: int) -> dict[str, typing.Any]:
    return {"says": f"with {more} rows more as targets, which labels leave out" if more > 0 else
            f"without {-more} of the targets, as gradients show"}


def _sum(recipe: Recipe, each: Array) -> tuple[float, int]:
    """What all targets add, and their number."""
    return float(each[recipe.loss.counted].sum()), int(recipe.loss.counted.sum())


def _at_ends(case: Case, recipe: Recipe, there: Loss) -> bool:
    """Whether the rows that are no targets any more are the last of ranks' own tokens, all that were targets."""
    own, at = recipe.loss.counted, np.full(recipe.loss.labels.shape, -1)
    for what, groups in _groups(case, recipe):
        for i, rows in enumerate(groups if what == "ranks" else ()):
            at[rows] = i
    following: Array = np.append(at[1:], -2)
    following[there.shape[1] - 1::there.shape[1]] = -2  # of another sample
    ends = np.flatnonzero(own & (at >= 0) & (at != following))
    lost = np.flatnonzero(own & ~there.counted)
    return len({*at.tolist()} - {-1}) > 1 and lost.size > 0 and np.array_equal(lost, ends)


def _alike(p: Array, q: Array) -> float:
    """The share of labels that are the same, of those that both have."""
    known = (p >= 0) & (q >= 0)
    return float((p == q)[known].mean()) if known.any() else 0.0


def _of_gradients(case: Case, recipe: Recipe) -> Found:
    """What the other run's gradients say: other labels, or other rows that are counted."""
    there, here = recipe.other, recipe.loss
    if there is None or there.labels.shape != here.labels.shape:
        return
    x, tokens, classes = there.mean(), here.shape[1], here.logits.shape[1]
    differing = here.counted & there.counted & (here.labels != there.labels)
    more = int(there.counted.sum() - here.counted.sum())
    if (here.counted & there.counted).any() and _alike(here.labels, there.labels) < 0.95:
        a, b = here.labels.reshape(here.shape), there.labels.reshape(here.shape)
        for by in (by for by in (-1, 1, 2, -2) if abs(by) < tokens):
            if _alike(*(a[:, by:], b[:, :-by]) if by > 0 else (a[:, :by], b[:, -by:])) > 0.8:
                yield Changed("shifted", x, {"by": by + max(recipe.by, 1), "right": max(recipe.by, 1)})
        for n in case.runs.group_sizes:
            blocks = [np.split(of, 2 * n, axis=1) for of in (a, b)] if tokens % (2 * n) == 0 else [[], []]
            if blocks[0] and all(any(_alike(p, q) == 1.0 for p in blocks[0]) for q in blocks[1] if (q >= 0).any()):
                yield Changed("blocks", x)
            edges, size = here.labels[differing] % (classes // n), classes // n
            if classes % n == 0 and size > 2 and np.isin(edges, (0, size - 1)).all():
                yield Changed("vocabulary", x, {"says": f"that of other labels in {int(differing.sum())} rows, whose "
                                                f"labels are at the edges of one of {n} shards, as gradients show"})
        yield Changed("other labels", x, {"name": "what the other run's gradients show"}, GENERAL)
    elif more:
        how = "cut" if more < 0 and _at_ends(case, recipe, there) else "targets"
        for value in (x, float(there.each()[there.counted].sum()) / here.counted.sum()):
            yield Changed(how, value, {"fewer": -more, **_other_targets(more)})


def _softmaxes(case: Case, recipe: Recipe, each: Array) -> Found:
    loss = recipe.loss.of(recipe.loss.labels[recipe.loss.counted], logits=recipe.loss.logits[recipe.loss.counted])
    x, own, each = loss.logits, loss.labels, each[recipe.loss.counted]
    lse, plain, smooth = log_sum(x), float(each.mean()), 0.0
    if loss.smoothing:
        yield Changed("smoothed", dataclasses.replace(loss, smoothing=0.0).mean(), {"says": "not smoothed"})
    if loss.z:
        yield Changed("z", dataclasses.replace(loss, z=0.0).mean(), {"says": "without the square of log Z"})
    smooth = float((lse - x.mean(-1)).mean())
    for eps in SMOOTHINGS:
        for value in ((1.0 - eps) * plain + eps * smooth, plain + eps * smooth):
            yield Changed("smoothed", value, {"says": f"smoothed by {eps}"})
    for weight in WEIGHTS:
        yield Changed("z", plain + weight * float((lse ** 2).mean()), {
            "says": f"with {weight:g} times the square of log Z"})
    for n in {*case.runs.group_sizes} - {1}:
        yield from _over_shards(loss, n, lse, plain)
    for rows in {-x.shape[1] % multiple for multiple in (*MULTIPLES, *case.runs.group_sizes)} - {0}:
        yield Changed("vocabulary", float((np.logaddexp(lse, math.log(rows)) + each - lse).mean()), {
            "says": f"that of {rows} more classes, whose logits are 0: those of padding belong to minus infinity"})


def _over_shards(loss: Loss, n: int, lse: Array, plain: float) -> Found:
    """Over n shards of the vocabulary, of which the last may be smaller. lse, plain: of the whole one."""
    x, classes = loss.logits, loss.logits.shape[1]
    size = -(-classes // n)
    parts = np.pad(x, ((0, 0), (0, n * size - classes)), constant_values=-np.inf).reshape(len(x), n, size)
    sums, tops, low = log_sum(parts), parts.max(-1), size * np.arange(n)
    inside, target = loss.labels // size, np.take_along_axis(x, loss.labels[:, None], 1)[:, 0]
    apart = np.log(np.exp(sums - tops).sum(1))  # sums of which each has its own maximum
    beside = np.take_along_axis(tops, inside[:, None], 1)[:, 0]
    even = (1.0 - loss.smoothing) * (target - beside) + loss.smoothing * (x.mean(-1) - tops.mean(-1))
    maximum = "that of denominators added without a common maximum: the all-reduce(max) of logits"
    values = [(apart - even, maximum),
              (lse + math.log(n) - target, f"that of a denominator that counts the vocabulary {n} times, log {n} more")]
    for i in range(n):
        alone = f"that of the denominator of shard {i} of {n} of the vocabulary alone"
        values += [(sums[:, i] - target, alone), (apart + tops[:, i] - target, maximum),
                   (sums[:, i] - np.where(inside == i, target, 0.0), alone)]
        if loss.smoothing and classes % n == 0:
            own_mean = float((x.mean(-1) - parts[:, i].mean(-1)).mean())
            yield Changed("smoothed", plain + loss.smoothing * own_mean, {
                "says": f"smoothed over one of {n} shards of the classes"})
    place, last = loss.labels[:, None] - low, np.minimum(low + size, classes) - 1 - low
    logits = [(place, place == place, f"that of logits that each of {n} shards adds for each label, at its nearest id")]
    for by, first in itertools.product((1, -1), (0, 1)):
        at = place + by * (np.arange(n) >= first)
        logits.append((at, (at >= 0) & (at <= last), f"that of logits of labels that are off by {by} on shards of the "
                       f"vocabulary{' but the first' if first else ''}"))
    values += [(lse - np.where(has, np.take_along_axis(x, low + np.clip(at, 0, last), 1), 0.0).sum(1), says)
               for at, has, says in logits]
    yield from (Changed("vocabulary", float(each.mean()), {"says": says}) for each, says in values)


def _all_changed(case: Case, recipe: Recipe, sought: float) -> Found:
    each = recipe.loss.each()
    total, targets = _sum(recipe, each)
    n = round(total / x) if (x := (sought - recipe.rest) / recipe.factor) > 0.0 else 0
    if 0 < n <= MOST_COUNTED and targets % n and n % targets:
        yield Changed("divisor", total / n, {"says": f"divided by {n} instead of {targets} targets"})
    if recipe.factor == 1.0:
        yield Changed("sum", total)
    yield from _means(case, recipe, each)
    yield from _cut(case, recipe, each)
    yield from _targets(case, recipe, each)
    yield from _of_gradients(case, recipe)
    yield from _softmaxes(case, recipe, each)


# --- patterns ---------------------------------------------------------------------------------------------------------


def patterns(case: Case) -> typing.Iterator[Pattern]:
    pair = loss_of(case)
    if pair is None:
        return
    held = [float(copy.values[0].ravel()[0]) for copy in case.copies]
    for here in (True, False):  # whether the other run has it, or the reference alone
        known, sought = pair if here else pair[::-1]
        recipe = recipe_of(case, known)
        if recipe is None or not here and (recipe.rest or len({*held}) > 1):
            continue  # what the reference has besides is known of the reference alone
        recipe = with_logits(case, recipe) if here else recipe
        with np.errstate(invalid="ignore", over="ignore"):  # logits of minus infinity
            changed = list(_all_changed(case, recipe, sought))
        tried = collections.Counter(one.how for one in changed)
        numbers = {"where": "here" if here else "in the reference", "logits": recipe.logits}
        if len({*held}) > 1:  # each is one that the same change gives
            for how in tried:
                own = [next((one for one in changed if one.how == how and abs(recipe.value(one.value) - x)
                             <= 4.0 * NEAR * abs(x)), None) for x in held]
                if all(own):
                    expected = [[np.full(part.shape, recipe.value(one.value)) for part in copy.values]
                                for copy, one in zip(case.copies, own) if one]
                    yield Pattern(CHANGED, expected, {**(own[0].numbers if own[0] else {}), **numbers, "how": how},
                                  trials=tried[how])
            continue
        for one in changed:
            x = recipe.value(one.value)
            if abs(x - sought) <= 4.0 * NEAR * abs(sought) + 1e-7 and abs(x - known) > 1e-5 * abs(sought):
                yield Pattern(CHANGED, np.full(case.shape, x if here else pair[1]), {
                    **one.numbers, **numbers, "how": one.how}, trials=tried[one.how] + one.after)


# --- causes -----------------------------------------------------------------------------------------------------------


_AGAIN = "the loss computed again from {logits}: {where} it is "
CAUSES = (
    Cause("mean_of_means", (CHANGED,), _AGAIN + "the mean of the means of {parts} {what} (targets {counts})",
          "divide the sum by the count of the global batch's targets", has(how="mean of means")),
    Cause("labels_shifted", (CHANGED,), _AGAIN + "that of labels {by} tokens on, right are {right}", "the shift of "
          "labels: in the data or in the model, not in both or in neither", has(how="shifted")),
    Cause("zigzag_order", (CHANGED,), _AGAIN + "that of labels in another order of blocks of tokens than the logits'",
          "how labels are cut over context-parallel ranks: in the order of the ids", has(how="blocks")),
    Cause("labels_shifted", (CHANGED,), _AGAIN + "without the last target of each rank's tokens ({fewer} fewer): "
          "labels shifted after the sequence was cut", "shift labels first, then cut the sequence over ranks",
          has(how="cut")),
    Cause("target_count", (CHANGED,), _AGAIN + "{says}", "`ignore_index`, the mask of targets, the labels of padding "
          "and prompts", has(how="targets")),
    Cause("target_count", (CHANGED,), _AGAIN + "{says}", "the divisor of the loss, the slices of logits and labels",
          has(how="divisor")),
    Cause("other_labels", (CHANGED,), _AGAIN + "that of {name} as labels", "which tensor the loss takes",
          has(how="other labels")),
    Cause("label_smoothing", (CHANGED,), _AGAIN + "{says}", "`label_smoothing`, its sum of logits over shards",
          has(how="smoothed")),
    Cause("loss_term", (CHANGED,), _AGAIN + "{says}", "the z-loss", has(how="z")),
    Cause("vocabulary_parallel_loss", (CHANGED,), _AGAIN + "{says}", "a cross entropy over shards of the vocabulary: "
          "the all-reduces of the maximum, the denominator, the target's logit and the mean for smoothing, the range "
          "of ids of a shard, and the logits of padding", has(how="vocabulary")),
    Cause("one_micro_batch", (CHANGED,), _AGAIN + "that of one micro-batch alone", "the sum of the losses of all "
          "micro-batches before it is logged or goes back", has(how="own part", what="micro-batches")),
    Cause("missing_all_reduce", (CHANGED,), _AGAIN + "that of one {of} alone", "the sum or mean over all of {what}",
          has(how="own part")),
    Cause("reduced_again", (CHANGED,), _AGAIN + "the sum of the means of {parts} {what} (targets {counts}), not the "
          "mean over all targets", "the division by their number, or by the global batch's targets",
          has(how="sum of means")),
    Cause("sum_for_mean", (CHANGED,), _AGAIN + "the sum over targets instead of the mean", "`reduction=`",
          has(how="sum")),
)
