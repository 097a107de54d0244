# SPDX-License-Identifier: Apache-2.0
"""The loss: the cross entropy that the reference's is, with one thing changed."""

from __future__ import annotations

import collections
import dataclasses
import math
import typing

import numpy as np

from anyrank.explain.causes import Cause
from anyrank.explain.entropy import (NEAR, Loss, Recipe, entropies, integers, log_sum, mean, recipe_of, shifted,
                                     with_logits)
from anyrank.explain.known import loss_of
from anyrank.explain.patterns import Pattern
from anyrank.explain.scaled import FACTOR
from anyrank.explain.tensors import Array, Case, Name, Tensors

CHANGED, TERM, OWN_LOSS, LOGARITHM = "cross entropy changed", "term", "loss of own part", "a logarithm more"
GENERAL = 1000
OF_ONE = {"ranks": "rank", "micro-batches": "micro-batch", "ranks and micro-batches": "rank's micro-batch"}
SMOOTHINGS, WEIGHTS = (0.1, 0.2, 0.05, 0.3, 0.01, 0.15), (1e-4, 1e-3, 1e-5, 1e-2, 0.1)
CAPS = (30.0, 50.0, 15.0, 20.0)
SCALES = tuple(sorted({x for k in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 12.5, 13, 14, 15, 16, 18, 20, 25, 30, 40, 80, 160)
                       for x in (k / 10.0, 10.0 / k)} - {1.0}))  # usual temperatures, and one over them
MOST_SCALED = 1 << 20  # elements of logits of which the softmax is taken for each scale
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


def _groups(case: Case, recipe: Recipe) -> typing.Iterator[tuple[str, list[Array]]]:
    """Rows of each rank and micro-batch, by what the ranks hold of the logits, and of each sample."""
    samples, tokens = recipe.loss.shape
    sample: Array = recipe.loss.rows // tokens
    parts = case.runs.other.parts(recipe.logits) if isinstance(case.runs.other, Tensors) and (
        recipe.logits in case.runs.other) else ()
    by_part: dict[bytes, Array] = {}
    by_rank: dict[int | None, Array] = {}
    for copy in parts:
        held: Array = np.zeros(case.runs.reference[recipe.logits].shape[:-1], bool)
        for box in copy.boxes:
            held[box[:-1]] = True
        rows = held.ravel()[recipe.loss.rows]
        by_part[rows.tobytes()] = rows
        by_rank[copy.rank] = by_rank.get(copy.rank, np.zeros(rows.shape, bool)) | rows
    of_ranks = {rows.tobytes(): rows for rows in by_rank.values()}
    for what, of in (("ranks", of_ranks), ("ranks and micro-batches", by_part)):
        groups = list(of.values())
        if len(groups) > 1 and (np.sum(groups, 0) == 1).all() and (
                what == "ranks" or len(groups) != len(of_ranks)):
            yield what, groups
    micro, ranks = case.runs.micro_batches, max(len(of_ranks), 1)
    if micro > 1 and samples % (micro * ranks) == 0:
        yield "micro-batches", [sample // (samples // micro) == i for i in range(micro)]
        if ranks > 1:
            yield "micro-batches", [sample // (samples // micro // ranks) % micro == i for i in range(micro)]
            yield "ranks and micro-batches", [sample // (samples // micro // ranks) == i for i in range(micro * ranks)]
    yield "samples", [sample == i for i in range(samples)]


def _means(case: Case, recipe: Recipe, each: Array) -> typing.Iterator[Changed]:
    loss = recipe.loss
    for what, groups in _groups(case, recipe):
        own = [(float(each[rows & loss.counted].sum()), int((rows & loss.counted).sum())) for rows in groups]
        counts = [n for _, n in own]
        means = [total / n if n else math.nan for total, n in own]
        numbers = {"what": what, "parts": len(own), "counts": " : ".join(map(str, counts[:8]))}
        if len(set(counts)) > 1 and all(counts):
            yield Changed("mean of means", sum(means) / len(means), numbers)
        if what != "samples":
            for i, x in enumerate(means):
                for value in (x, own[i][0] / max(sum(counts), 1)):
                    yield Changed("own part", value, {**numbers, "part": i, "of": OF_ONE.get(what, what)})
            yield Changed("sum of means" if len(set(counts)) > 1 else "summed", sum(means), numbers)


def _cut(case: Case, recipe: Recipe, each: Array) -> typing.Iterator[Changed]:
    """Labels are shifted in each of equal parts of the tokens, whose last ones have no label then."""
    loss, (_, tokens) = recipe.loss, recipe.loss.shape
    place: Array = loss.rows % tokens
    for n in sorted({*case.runs.group_sizes, case.runs.micro_batches}) if recipe.by > 0 else ():
        size = tokens // n
        if n == 1 or tokens % n or size <= recipe.by:
            continue
        kept = loss.counted & (place % size < size - recipe.by)
        lost = int(loss.counted.sum() - kept.sum())
        if lost and kept.any():
            total, means = float(each[kept].sum()), [mean(each, rows) for i in range(n) if (
                rows := kept & (place // size == i)).any()]
            for value in (total / kept.sum(), total / loss.counted.sum(), sum(means) / n):
                yield Changed("cut", value, {"fewer": lost, "parts": n})


def _labels(recipe: Recipe) -> typing.Iterator[Changed]:
    logits = np.zeros((recipe.all_labels.size, recipe.loss.logits.shape[1]))
    logits[:] = np.nan
    logits[recipe.loss.rows] = recipe.loss.logits
    for by in (-1, 0, 1, 2, 3):
        if by == recipe.by or abs(by) >= recipe.all_labels.shape[1]:
            continue
        other = shifted(logits, recipe.all_labels, by)
        there = other.counted & np.isfinite(other.logits[:, 0])
        if there.any():
            each = entropies(dataclasses.replace(other, counted=there, logits=np.nan_to_num(other.logits)))
            numbers = {"by": by, "right": recipe.by}
            yield Changed("shifted", mean(each, there), numbers)
            yield Changed("shifted", float(each[there].sum()) / float(recipe.loss.counted.sum()), numbers)


def _ignored(recipe: Recipe, each: Array) -> typing.Iterator[Changed]:
    """Rows that are no targets count, in the sum or in the divisor alone; or rows of one label are left out."""
    loss = recipe.loss
    total = float(each[loss.counted].sum())
    everything = loss.labels.size
    for n, what in ((everything, "all rows"), (recipe.all_labels.size, "all tokens"), (recipe.all_labels.shape[0],
                    "samples"), (int(loss.counted.sum()) + 1, "one more"), (int(loss.counted.sum()) - 1, "one less")):
        if n > 0 and n != loss.counted.sum():
            yield Changed("divisor", total / n, {"counted": n, "what": what, "targets": int(loss.counted.sum())})
    rows = np.flatnonzero(loss.counted)
    for row, what in ((rows[0], "first"), (rows[-1], "last")):
        yield Changed("target lost", (total - float(each[row])) / loss.counted.sum(), {"what": what})
    values, counts = np.unique(loss.labels, return_counts=True)
    for label in values[np.argsort(counts)[::-1][:4]]:
        if 0 <= label < loss.logits.shape[1]:
            rest = loss.counted & (loss.labels != label)
            yield Changed("label left out", mean(each, rest), {"label": int(label)})
    if not loss.counted.all():
        labels = np.where(loss.counted, loss.labels, 0)
        filled = dataclasses.replace(loss, labels=labels, counted=np.ones_like(loss.counted))
        numbers = {"label": 0, "more": int((~loss.counted).sum())}
        yield Changed("ignored", mean(entropies(filled), filled.counted), numbers)
        yield Changed("ignored", float(entropies(filled).sum()) / loss.counted.sum(), numbers)
        more = float(log_sum(loss.logits)[~loss.counted].sum())  # the logit of no label taken as 0
        yield Changed("ignored", (total + more) / loss.counted.sum(), numbers)
        yield Changed("ignored", (total + more) / everything, numbers)


def _ids(case: Case, recipe: Recipe) -> typing.Iterator[Changed]:
    """Other integers of the step as labels, as the ids where labels leave some out."""
    for name, labels in integers(case):
        if name == recipe.labels or labels.size != recipe.all_labels.size:
            continue
        at = np.full(labels.size, -1)
        at[recipe.loss.rows] = np.arange(recipe.loss.rows.size)
        for by in (1, 0):
            moved = shifted(np.zeros((labels.size, 1)), labels, by)
            known = at[moved.rows] >= 0
            loss = Loss(recipe.loss.logits[at[moved.rows[known]]], moved.labels[known],
                        (moved.labels[known] >= 0) & (moved.labels[known] < recipe.loss.logits.shape[1]),
                        moved.rows[known], moved.shape)
            each = entropies(loss)
            same = loss.labels == recipe.loss.labels[at[moved.rows[known]]]
            agree = bool(same[recipe.loss.counted[at[moved.rows[known]]]].all())
            yield Changed("ignored" if agree else "other labels", mean(each, loss.counted),
                          {"name": name, "more": int(loss.counted.sum() - recipe.loss.counted.sum())})


def _at_ends(case: Case, recipe: Recipe, own: Array, there: Loss) -> bool:
    """Whether the rows that are no targets any more are the last of ranks' own tokens, all that were targets."""
    lost = np.flatnonzero((own >= 0) & (there.labels < 0))
    at = np.full(own.shape, -1)
    for what, groups in _groups(case, recipe):
        if what == "ranks":
            for i, group in enumerate(groups):
                at[recipe.loss.rows[group]] = i
    following: Array = np.append(at[1:], -2)
    following[there.shape[1] - 1::there.shape[1]] = -2  # of another sample
    ends = np.flatnonzero((own >= 0) & (at >= 0) & (at != following))
    return len(set(at[at >= 0].tolist())) > 1 and lost.size > 0 and np.array_equal(lost, ends)


def _blocks_moved(a: Array, b: Array, n: int) -> bool:
    """Whether each of n blocks of tokens has the labels of one of the reference's, but for what has none."""
    if a.shape[1] % n:
        return False
    x, y = (np.split(of, n, axis=1) for of in (a, b))

    def alike(p: Array, q: Array) -> bool:
        known = (p >= 0) & (q >= 0)
        return bool(known.any() and (p == q)[known].all())

    return all(any(alike(p, q) for p in x) for q in y if (q >= 0).any())


def _of_gradients(case: Case, recipe: Recipe) -> typing.Iterator[Changed]:
    """What the other run's gradients say: other labels, other rows that are counted, other weights of rows."""
    there, rows = recipe.other, recipe.loss.rows
    if there is None:
        return
    own, here = np.full(there.labels.shape, -1), recipe.loss
    own[rows] = np.where(here.counted, here.labels, -1)
    both = (own >= 0) & (there.labels >= 0)
    x = mean(entropies(there), there.counted)
    more = int(there.counted.sum() - here.counted.sum())
    numbers: dict[str, typing.Any] = {"more": more, "name": "the other run's gradients", "fewer": -more}
    if both.any() and (own != there.labels)[both].mean() > 0.05:
        a, b = own.reshape(there.shape), there.labels.reshape(there.shape)
        for by in (-1, 1, 2, -2):
            if abs(by) < there.shape[1]:
                p, q = (a[:, by:], b[:, :-by]) if by > 0 else (a[:, :by], b[:, -by:])
                known = (p >= 0) & (q >= 0)
                if known.any() and (p == q)[known].mean() > 0.8:
                    yield Changed("shifted", x, {"by": by + max(recipe.by, 1), "right": max(recipe.by, 1)})
        if any(_blocks_moved(a, b, 2 * n) for n in case.runs.group_sizes):
            yield Changed("blocks", x, numbers)
        differing = both & (own != there.labels)
        for n in case.runs.group_sizes:
            size = here.logits.shape[1] // n
            edges = own[differing] % size
            if here.logits.shape[1] % n == 0 and size > 2 and (np.isin(edges, (0, size - 1)).all()):
                yield Changed("edges", x, {**numbers, "shards": n, "rows": int(differing.sum())})
        yield Changed("other labels", x, numbers, GENERAL)
    elif more:
        how = "ignored" if more > 0 else "cut" if _at_ends(case, recipe, own, there) else "left out"
        same_divisor = float(entropies(there)[there.counted].sum()) / here.counted.sum()
        for value in (x, same_divisor):
            yield Changed(how, value, numbers)
    if there.weights is not None and here.weights is not None:
        share = there.weights / (here.weights[here.counted].mean() * here.counted.sum())
        numbers = {"low": float(share[there.counted].min() * here.counted.sum()),
                   "high": float(share[there.counted].max() * here.counted.sum())}
        if numbers["high"] > 1.001 * numbers["low"]:
            yield Changed("weighted", float((share * entropies(there)).sum()), numbers, GENERAL)


def _softmaxes(case: Case, recipe: Recipe, each: Array) -> typing.Iterator[Changed]:
    loss, x = recipe.loss, recipe.loss.logits
    numbers = {"smoothing": loss.smoothing, "weight": loss.z}
    if loss.smoothing:
        yield Changed("smoothed", mean(entropies(dataclasses.replace(loss, smoothing=0.0)), loss.counted), numbers)
    if loss.z:
        yield Changed("z", mean(entropies(dataclasses.replace(loss, z=0.0)), loss.counted), numbers)
    lse, plain = log_sum(x), mean(each, loss.counted)
    for eps in SMOOTHINGS:
        smooth = mean(lse - x.mean(-1), loss.counted)
        yield Changed("smoothed", (1.0 - eps) * plain + eps * smooth, {"smoothing": eps})
        yield Changed("smoothed", plain + eps * smooth, {"smoothing": eps})
    for weight in WEIGHTS:
        yield Changed("z", plain + weight * mean(lse ** 2, loss.counted), {"weight": weight})
    for scale in SCALES if x.size <= MOST_SCALED else ():
        yield Changed("scaled", mean(entropies(loss, x * scale), loss.counted), {"scale": scale})
    for cap in CAPS if x.size <= MOST_SCALED else ():
        yield Changed("capped", mean(entropies(loss, cap * np.tanh(x / cap)), loss.counted), {"cap": cap})
    for n in {*case.runs.group_sizes} - {1}:
        if x.shape[1] % n:
            continue
        parts = x.reshape(len(x), n, -1)
        own = [log_sum(parts[:, i]) for i in range(n)]
        inside: Array = loss.classes() // parts.shape[2]
        target = np.take_along_axis(x, loss.classes()[:, None], 1)[:, 0]
        for i in range(n):
            yield Changed("own vocabulary", mean(own[i] - target, loss.counted), {"shard": i, "shards": n})
            yield Changed("own vocabulary", mean(own[i] - np.where(inside == i, target, 0.0), loss.counted),
                          {"shard": i, "shards": n})
            top = parts[:, i].max(-1)
            sums = np.log(sum(np.exp(own[k] - parts[:, k].max(-1)) for k in range(n)))
            yield Changed("own maximum", mean(sums + top - target, loss.counted), {"shard": i, "shards": n})
            if i == 0:  # each row's target, and all classes' mean, less the maximum of their own shard
                tops = parts.max(-1)
                beside = np.take_along_axis(tops, inside[:, None], 1)[:, 0]
                even = (1.0 - loss.smoothing) * (target - beside) + loss.smoothing * (x.mean(-1) - tops.mean(-1))
                yield Changed("own maximum", mean(sums - even, loss.counted), {"shards": n})
            if loss.smoothing:
                apart = mean(x.mean(-1) - parts[:, i].mean(-1), loss.counted)
                yield Changed("own classes", plain + loss.smoothing * apart, {"shards": n})
        yield Changed("all vocabularies", plain + math.log(n), {"shards": n})
    multiples = (8, 16, 32, 64, 128, 256, 512, 1024, *case.runs.group_sizes)
    for rows in {-x.shape[1] % multiple for multiple in multiples} - {0}:
        yield Changed("padded", mean(np.logaddexp(lse, math.log(rows)) + each - lse, loss.counted), {"rows": rows})


def _all_changed(case: Case, recipe: Recipe, sought: float) -> typing.Iterator[Changed]:
    each = entropies(recipe.loss)
    total, targets = float(each[recipe.loss.counted].sum()), int(recipe.loss.counted.sum())
    n = round(total / x) if (x := (sought - recipe.rest) / recipe.factor) > 0.0 else 0
    if 0 < n <= MOST_COUNTED and targets % n and n % targets:
        yield Changed("divisor", total / n, {"counted": n, "what": "not the targets", "targets": targets})
    for k in (0.0, *(x for size in case.runs.group_sizes for x in (size, 1.0 / size))):
        if recipe.rest:
            yield Changed("rest", total / targets + (k - 1.0) * recipe.rest, {"times": k})
    if recipe.factor == 1.0:
        yield Changed("sum", float(each[recipe.loss.counted].sum()))
    yield from _means(case, recipe, each)
    yield from _cut(case, recipe, each)
    yield from _labels(recipe)
    yield from _ignored(recipe, each)
    yield from _ids(case, recipe)
    yield from _of_gradients(case, recipe)
    yield from _softmaxes(case, recipe, each)


# --- patterns ---------------------------------------------------------------------------------------------------------


def _terms(case: Case, value: float, reference: float) -> typing.Iterator[Pattern]:
    """Another scalar of the step is missing, or is there twice."""
    for name in case.runs.reference:
        parsed = Name.of(name)
        array = case.runs.reference[name]
        if parsed.kind != "fwd" or parsed.step != case.name.step or array.size != 1 or name == str(case.name):
            continue
        term = float(array.ravel()[0])
        for times in (-1.0, 1.0):
            if term and abs(value - reference - times * term) <= 1e-3 * abs(term):
                yield Pattern(TERM, np.asarray(case.ref + times * term), {"name": name, "times": times,
                                                             "what": "missing" if times < 0.0 else "counted twice"})


def _own(case: Case) -> typing.Iterator[Pattern]:
    """Each rank has the loss of its own part, the mean of which is the reference's."""
    values = [float(copy.values[0].ravel()[0]) for copy in case.copies if len(copy.values) == 1]
    reference = float(case.ref.ravel()[0])
    if len(set(values)) > 1 and abs(sum(values) / len(values) - reference) <= 4.0 * NEAR * abs(reference):
        yield Pattern(OWN_LOSS, [list(copy.values) for copy in case.copies],
                      {"low": min(values), "high": max(values), "ranks": len(values)}, fitted=1)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    pair = loss_of(case)
    if pair is None:
        return
    reference, value = pair
    yield from _own(case)
    for n in case.runs.group_sizes or (2, 4, 8, 16):
        if abs(abs(value - reference) - math.log(n)) <= 4.0 * NEAR * abs(reference):
            expected = np.asarray(case.ref + math.copysign(math.log(n), value - reference))
            yield Pattern(LOGARITHM, expected, {"shards": n}, trials=4)
    yield from _terms(case, value, reference)
    for here in (True, False):  # whether the other run has it, or the reference alone
        known, sought = (reference, value) if here else (value, reference)
        recipe = recipe_of(case, known)
        if recipe is None:
            continue
        if recipe.rest and not here:
            continue  # what the reference has besides is known of the reference alone
        recipe = with_logits(case, recipe) if here else recipe
        with np.errstate(invalid="ignore", over="ignore"):  # logits of minus infinity
            changed = list(_all_changed(case, recipe, sought))
        tried = collections.Counter(one.how for one in changed)
        if len({float(copy.values[0].ravel()[0]) for copy in case.copies}) > 1:
            yield from _by_rank(case, changed, recipe) if here else ()
            continue
        for one in changed:
            x = recipe.value(one.value)
            if abs(x - sought) <= 4.0 * NEAR * abs(sought) + 1e-7 and abs(x - known) > 1e-5 * abs(sought):
                yield Pattern(CHANGED, np.full(case.shape, x if here else value), {
                    **one.numbers, "how": one.how, "where": "here" if here else "in the reference", "value": value,
                    "reference": reference, "logits": recipe.logits}, trials=tried[one.how] + one.after)


def _by_rank(case: Case, changed: list[Changed], recipe: Recipe) -> typing.Iterator[Pattern]:
    """The ranks' losses differ, and each is one that the same change gives."""
    for how in dict.fromkeys(one.how for one in changed):
        alike = [one for one in changed if one.how == how]
        found = [next((one for one in alike if abs(recipe.value(one.value) - float(copy.values[0].ravel()[0]))
                       <= 4.0 * NEAR * abs(one.value)), None) for copy in case.copies]
        if all(one is not None for one in found):
            yield Pattern(CHANGED, [[np.full(part.shape, recipe.value(one.value)) for part in copy.values]
                                    for copy, one in zip(case.copies, found) if one is not None],
                          {**(found[0].numbers if found[0] else {}), "how": how, "where": "here",
                           "value": float(case.val.ravel()[0]), "reference": float(case.ref.ravel()[0]),
                           "logits": recipe.logits}, trials=len(alike))


def _is(*hows: str) -> typing.Callable[[Case, Pattern], bool]:
    return lambda case, pattern: pattern.numbers["how"] in hows


def _is_count(case: Case, pattern: Pattern) -> bool:
    """Whether a factor, or one over it, counts the batch's tokens or targets."""
    runs = case.runs
    told = (runs.report.get("facts") or {}).get("targets") or 0
    counts = {runs.batch * runs.seq, runs.batch * (runs.seq - 1), told} - {0, 1}
    factor = pattern.numbers["factor"]
    return any(abs(x - 1.0) < 1e-5 for n in counts if n > 8 for x in (factor / n, factor * n))


def _is_loss_scale(case: Case, pattern: Pattern) -> bool:
    mantissa, exponent = math.frexp(pattern.numbers["factor"])
    return abs(mantissa - 0.5) < 1e-5 and not -6 < exponent - 1 < 6 and case.name.kind in (
        "bwd", "grad", "clip", "m") and not _is_count(case, pattern)


_AGAIN = "the loss computed again from {logits}: {where} it is "
CAUSES = (
    Cause("loss_term", (TERM,), "{name} is {what} in the loss", "where the terms of the loss are added"),
    Cause("mean_of_means", (CHANGED,), _AGAIN + "the mean of the means of {parts} {what} (targets {counts})",
          "divide the sum by the count of the global batch's targets", _is("mean of means")),
    Cause("labels_shifted", (CHANGED,), _AGAIN + "that of labels {by} tokens on, right are {right}", "the shift of "
          "labels: in the data or in the model, not in both or in neither", _is("shifted")),
    Cause("zigzag_order", (CHANGED,), _AGAIN + "that of labels in another order of blocks of tokens than the logits'",
          "how labels are cut over context-parallel ranks: in the order of the ids", _is("blocks")),
    Cause("ignored_labels", (CHANGED,), _AGAIN + "with {more} rows more as targets, which labels leave out",
          "`ignore_index`, the padding's and the prompt's labels",
          lambda case, pattern: pattern.numbers["how"] == "ignored" and pattern.numbers["more"] > 0),
    Cause("ignored_labels", (CHANGED,), _AGAIN + "without the rows whose label is {label}", "`ignore_index`",
          _is("label left out")),
    Cause("labels_shifted", (CHANGED,), _AGAIN + "without the last target of each rank's tokens ({fewer} fewer): "
          "labels shifted after the sequence was cut", "shift labels first, then cut the sequence over ranks",
          _is("cut")),
    Cause("target_count", (CHANGED,), _AGAIN + "without the {what} target, which the divisor counts", "the slices of "
          "logits and labels", _is("target lost")),
    Cause("loss_term", (CHANGED,), "what the loss has besides the cross entropy is there {times} times",
          "the weight of the loss's other terms, and their sum or mean over ranks", _is("rest")),
    Cause("ignored_labels", (CHANGED,), _AGAIN + "without {fewer} of the targets, as gradients show", "`ignore_index`, "
          "the mask of targets", _is("left out")),
    Cause("samples_weighted", (CHANGED,), _AGAIN + "that of rows weighted from {low} to {high}, as gradients show",
          "the weights of samples or tokens, and the divisors of their means", _is("weighted")),
    Cause("target_logit", (CHANGED,), _AGAIN + "that of other labels in {rows} rows, whose labels are at the edges of "
          "one of {shards} shards of the vocabulary, as gradients show", "the range of ids of a shard: `<` or `<=`, "
          "offsets off by one", _is("edges")),
    Cause("other_labels", (CHANGED,), _AGAIN + "that of {name} as labels", "which tensor the loss takes",
          _is("other labels")),
    Cause("target_count", (CHANGED,), _AGAIN + "divided by {counted} ({what}) instead of {targets} targets",
          "the divisor of the loss", _is("divisor")),
    Cause("label_smoothing", (CHANGED,), _AGAIN + "smoothed by {smoothing}, in the other run not", "`label_smoothing`",
          _is("smoothed")),
    Cause("z_loss", (CHANGED,), _AGAIN + "with {weight} times the square of log Z, in the other run without",
          "the z-loss", _is("z")),
    Cause("logits_scale", (CHANGED,), _AGAIN + "that of logits times {scale}", "the temperature or scale of logits",
          _is("scaled")),
    Cause("softcap", (CHANGED,), _AGAIN + "that of logits capped at {cap}", "the soft cap of logits", _is("capped")),
    Cause("loss_without_common_maximum", (CHANGED,), _AGAIN + "that of denominators added without a common maximum",
          "the all-reduce(max) of logits over the vocabulary's shards", _is("own maximum")),
    Cause("label_smoothing", (CHANGED,), _AGAIN + "smoothed over a shard of the classes, one of {shards}",
          "the sum of logits over the vocabulary's shards", _is("own classes")),
    Cause("loss_local_denominator", (CHANGED,), _AGAIN + "that of shard {shard} of {shards} of the vocabulary",
          "the all-reduce of the denominator over the vocabulary's shards", _is("own vocabulary")),
    Cause("loss_of_all_vocabularies", (CHANGED,), "log {shards} more: the denominator counts the vocabulary {shards} "
          "times", "the all-reduce of the denominator: of whole vocabularies", _is("all vocabularies")),
    Cause("vocabulary_padding", (CHANGED,), _AGAIN + "that of {rows} more classes, whose logits are 0",
          "logits of padding: minus infinity", _is("padded")),
    Cause("one_micro_batch", (CHANGED,), _AGAIN + "that of one micro-batch alone", "the sum of the losses of all "
          "micro-batches before it is logged or goes back", lambda case, pattern: (
              pattern.numbers["how"] == "own part" and pattern.numbers["what"] == "micro-batches")),
    Cause("loss_of_own_part", (CHANGED,), _AGAIN + "that of one {of} alone", "the sum or mean over all of {what}",
          _is("own part")),
    Cause("sum_of_local_means", (CHANGED,), _AGAIN + "the sum of the means of {parts} {what}", "the mean over {what}",
          _is("sum of means")),
    Cause("reduced_again", (CHANGED,), _AGAIN + "the sum over {parts} {what} instead of the mean", "the division by "
          "their number", _is("summed")),
    Cause("sum_for_mean", (FACTOR,), "the reference times {factor}, the number of tokens: a sum in one run, the mean "
          "in the other", "`reduction=`, the divisor of the loss", _is_count),
    Cause("loss_scale", (FACTOR,), "the reference times {factor}, a power of two: a loss scale that was not divided "
          "out, or twice", "the gradient scaler's unscaling", _is_loss_scale),
    Cause("loss_of_all_vocabularies", (LOGARITHM,), "log {shards} more: the denominator counts the vocabulary {shards} "
          "times", "the all-reduce of the denominator: of whole vocabularies"),
    Cause("sum_for_mean", (CHANGED,), _AGAIN + "the sum over targets instead of the mean", "`reduction=`", _is("sum")),
    Cause("loss_of_own_part", (OWN_LOSS,), "each of {ranks} ranks has the loss of its own part, from {low} to {high}, "
          "the mean of which is the reference's", "the mean of the loss over ranks, before it is logged or dumped"),
)
