# SPDX-License-Identifier: Apache-2.0
"""What two shapes of one tensor have to do with each other: a transposition, a part, copies, padding, a reshape. What
the shapes suggest is tested on the values."""

from __future__ import annotations

import math
import re
import typing

import numpy as np

from anyrank.explain.explain import UNKNOWN, Answer
from anyrank.explain.tensors import ACTIVATIONS, Array, Name, Runs
from anyrank.explain.words import counted

if typing.TYPE_CHECKING:
    from anyrank.explain.run import Run

MOST_PARTS, MOST_TOLD = 1024, 64
LACKING = "; or ranks without a part of it: a module that they did not call, or to which no gradient came"
KV_HEADS = ("k_proj", "v_proj", ".k", ".v", "key", "value")
VOCABULARY = ("embed", "wte", "lm_head", "logits", "head")
NOT_GATHERED = ("looks like: one rank's shard over {} ranks, not gathered; give the folder with all ranks' files, or "
                "say how they fit, in a map or the shard of capture's spec")
WHOLE_BATCH = ("{} has {} rows on {} and {} on {}: each rank got the whole batch; under {} each rank takes its part, "
               "`batch.chunk(world)[rank]`")
ONE_MICRO_BATCH = "each step is of one micro-batch"
# What to look at, by cause.
LOOK = {"same_samples": "`DistributedSampler`, or the slice of the batch that a rank takes; if the whole batch is "
                        "meant, \"dp\": null in the shard of capture's spec says so",
        "one_micro_batch": "gradients are clipped, or a step is taken, within the loop over micro-batches, and not "
                           "once after it"}
COPIES = ("looks like: {}: neighbouring ranks hold copies, which were put together as parts; a rule {{\"shard\": "
          "{{\"tp\": {}}}, \"blocks\": [{}], \"unit\": {}}} in a map, or \"copies\": {} in the shard of capture's "
          "spec, says so")
REPEATED = "looks like: parts that are there {} times, one after the other"
# Dimensions of a mesh that share out samples, stages, tokens or experts, and no tensor of a layer.
DATA = re.compile(r"dp(_.*)?|ddp|fsdp|data|replicate")
OTHERS = ("pp", "cp", "ep")


def agree(x: Array, y: Array) -> bool:
    """Whether nearly all values are the same up to rounding."""
    if x.shape != y.shape or x.size == 0:
        return False
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.subtract(y, x, dtype=np.float64)) > 1e-3 * np.abs(x.astype(np.float64))
    return 16 * int(apart.sum()) <= x.size


class Told(typing.NamedTuple):
    """pattern: how the shapes and values are related. hint: what that looks like, or the cause's sentence, which says
    how they are."""

    pattern: str
    hint: str
    cause: str = UNKNOWN


def _transposed(a: Array, b: Array) -> Told | None:
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-2:] != b.shape[-2:][::-1]:
        return None
    same = agree(a.swapaxes(-1, -2), b)
    values = f"the values are {'' if same else 'not '}the reference's, transposed"
    return Told(f"the reference's shape with its last two dimensions exchanged; {values}",
                "looks like: a weight stored [in, out] against [out, in], as GPT-2's Conv1D and a Linear are; a rule "
                '{"match": ..., "transpose": true} in a map transposes it')


def _part_of(a: Array, b: Array, axis: int) -> int | None:
    """Which of the equal parts along the axis it is."""
    n = a.shape[axis] // b.shape[axis]
    parts = np.split(a, n, axis) if n <= MOST_PARTS else []
    return next((i for i, part in enumerate(parts) if agree(part, b)), None)


def _divided(a: Array, b: Array, axis: int, later: Array | None, ranks: bool) -> Told | None:
    whole, has = a.shape[axis], b.shape[axis]
    if has == 0 or whole % has or whole == has:
        return None
    n, part = whole // has, _part_of(a, b, axis)
    if axis == 0 and part == 0 and later is not None and later.shape == b.shape and _part_of(a, later, axis) == 1:
        pattern = f"the first of {n} parts of the reference's samples; the next step has the second"
        return Told(pattern, f"{pattern}: {ONE_MICRO_BATCH}", "one_micro_batch")
    which = f"1/{n} of the reference along dimension {axis}: shard {part} of {n} (from 0)" if part is not None else (
        f"1/{n} of the reference's dimension {axis}, but no such part has these values")
    return Told(which, NOT_GATHERED.format(n) + LACKING * ranks)


def _tensor_parallel(runs: Runs) -> bool:
    """Whether ranks of the other run share out tensors of a layer, or nothing says what they do."""
    if not runs.mesh and not runs.facts[1].recorded:
        return True
    return any(not DATA.fullmatch(name) and name not in OTHERS for name in runs.mesh)


def _repeated(a: Array, b: Array, axis: int) -> tuple[int, int]:
    """(n, unit): blocks of so many along the axis, each n times one after the other; unit 0: there are none."""
    whole, has = a.shape[axis], b.shape[axis]
    if whole == 0 or has % whole or has == whole:
        return 1, 0
    n = has // whole
    blocks = [count for count in range(1, min(whole, MOST_PARTS)) if whole % count == 0]
    return n, next((whole // count for count in blocks if agree(
        np.concatenate([block for block in np.split(a, count, axis) for _ in range(n)], axis), b)), 0)


def _whole_batch(a: Array, b: Array, name: Name, runs: Runs) -> Told | None:
    """Every rank, or every group of ranks with samples of its own, had all samples: of each micro-batch, or of all."""
    if name.kind not in ACTIVATIONS or a.shape[1:] != b.shape[1:]:
        return None
    n, unit = _repeated(a, b, 0)
    sharing = math.prod(size for dimension, size in runs.mesh.items() if DATA.fullmatch(dimension))
    if unit == 0 or (runs.mesh and n != sharing) or (not runs.mesh and unit != a.shape[0]):
        return None
    own, world = (facts.world if facts.recorded else 0 for facts in runs.facts)
    ranks = counted(world or (runs.world if runs.mesh else n), "rank")
    how = "DDP" if runs.facts[1].wrapper == "DistributedDataParallel" else "data parallelism"
    return Told(f"the reference's samples {n} times, in blocks of {unit}" if unit < a.shape[0] else
                f"the reference's samples {n} times, one after the other",
                WHOLE_BATCH.format(name.stem, b.shape[0], ranks, a.shape[0],
                                   "one" if own < 2 else f"the reference's {own}", how), "same_samples")


def _copied(a: Array, b: Array, axis: int, name: Name, runs: Runs) -> Told | None:
    """Blocks along the axis, each several times one after the other."""
    n, unit = _repeated(a, b, axis)
    if unit == 0:
        return None
    pattern = f"every {unit} of the reference's dimension {axis} stand {n} times one after the other"
    if not _tensor_parallel(runs):
        return Told(pattern, REPEATED.format(n))
    is_kv = any(word in name.stem for word in KV_HEADS)
    heads = "KV heads copied, fewer than tensor-parallel ranks" if is_kv else "parts copied"
    return Told(pattern, COPIES.format(heads, axis, a.shape[axis] // unit, unit, n))


def _padded(a: Array, b: Array, axis: int, name: Name, runs: Runs) -> Told | None:
    whole, has = a.shape[axis], b.shape[axis]
    least, most = sorted((whole, has))
    if least == 0:
        return None
    first = (slice(None),) * axis + (slice(least),)
    same = agree(a[first], b[first])
    pattern = (f"dimension {axis} is {most - least} longer in the {'other' if has > whole else 'reference'}; the first "
               f"{least} {'are the same' if same else 'have other values'}")
    if has > whole and most % 8 == 0 and any(word in name.stem for word in VOCABULARY):
        return Told(pattern, f"looks like: a vocabulary of {least} padded to {most}; a rule with \"shape\" in a map "
                    "drops the padding")
    if has > whole and same:
        return Told(pattern, f"looks like: a dimension padded from {least} to {most}")
    if has > whole and has % whole == 0:
        heads = ", such as KV heads of which ranks hold copies" if _tensor_parallel(runs) else ""
        own = f": each rank's whole tensor taken for its own part{heads}; or another model" if runs.world > 1 else ""
        return Told(pattern, f"looks like: {has // whole} times as many{own or ', as of another model'}")
    said = "a dimension cut short" if same else "another model"
    return Told(pattern, f"looks like: {said}{LACKING if has < whole and runs.world > 1 else ''}")


def _aside(a: Array, b: Array) -> Told | None:
    """Parts along one dimension that stand side by side along another, as where a spec names the wrong one."""
    axes = [d for d in range(a.ndim) if a.shape[d] != b.shape[d]]
    if len(axes) != 2 or a.size != b.size:
        return None
    cut, side = sorted(axes, key=lambda d: a.shape[d] < b.shape[d])
    n, odd = divmod(b.shape[side], a.shape[side]) if a.shape[side] else (0, 1)
    if odd or n < 2 or a.shape[cut] % n or not agree(np.concatenate(np.split(a, n, cut), side), b):
        return None
    return Told(f"the reference's {n} parts along dimension {cut}, side by side along dimension {side}",
                "looks like: another dimension is divided than the files say: in the shard of capture's spec (the "
                f"first glob that matches counts), or in a map, it is dimension {cut} of this tensor, not {side}")


def _reshaped(a: Array, b: Array) -> Told | None:
    if a.size != b.size or a.size == 0:
        return None
    same = agree(a.reshape(-1), b.reshape(-1))
    said = ("a reshape: dimensions folded together or apart, no value moved" if same else
            "dimensions in another order, or another tensor")
    order = "they are the same" if same else "they are others"
    return Told(f"as many elements in another shape; in row-major order {order}", f"looks like: {said}")


def compare(a: Array, b: Array, name: Name, runs: Runs, later: Array | None = None) -> Told | None:
    """reference, other; later: the other of the next step."""
    axes = [d for d in range(a.ndim) if a.shape[d] != b.shape[d]] if a.ndim == b.ndim else []
    found = _transposed(a, b)
    if found is None and len(axes) == 1:
        found = (_divided(a, b, axes[0], later, runs.world > 1) or (axes[0] == 0 and _whole_batch(a, b, name, runs))
                 or _copied(a, b, axes[0], name, runs) or _padded(a, b, axes[0], name, runs))
    return found or (_aside(a, b) if a.ndim == b.ndim else None) or _reshaped(a, b)


def of_tensor(run: Run, name: str) -> Told | None:
    """A tensor of numbers that both runs have, in other shapes."""
    if name not in run.reference or name not in run.other:
        return None
    a, b, own = run.runs.reference[name], run.runs.other[name], Name.of(name)
    if a.shape == b.shape or 0 in (a.size, b.size) or a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        return None
    if a.ndim == b.ndim and all(n in (m, 1) for n, m in zip(a.shape, b.shape)) and own.kind == "fwd" and all(
            n == m or np.ptp(b, axis=d).max() == 0.0 for d, (n, m) in enumerate(zip(a.shape, b.shape))):
        return None  # once for all samples, and once for each
    if run.runs.row(name).get("state") == "different":
        return None  # compared element by element: dimensions in one that the other run has apart
    output = str(own.with_kind("fwd"))
    times, rest = divmod(b.shape[0], a.shape[0]) if a.ndim == b.ndim > 0 else (0, 0)
    if own.kind == "bwd" and times > 1 and not rest and b.shape[1:] == a.shape[1:] and (
            output in run.reference and output in run.other and run.reference.tensor(output).shape == run.other.tensor(
                output).shape):
        return Told(f"{times} gradients of the module's output, where the reference has one, and the "
                    "output has one shape", "looks like: the backward pass goes through the module more often: through "
                    "calls of it that the reference detaches or makes under no_grad")
    following = str(Name(own.stem, own.kind, own.step + 1))
    later = run.runs.other[following] if own.kind == "fwd" and following in run.other else None
    return compare(a, b, own, run.runs, later)


def answer(run: Run, name: str) -> Answer | None:
    told = of_tensor(run, name)
    if told is None:
        return None
    if told.cause == UNKNOWN:
        return Answer(UNKNOWN, f"{told.hint}; {told.pattern}")
    return Answer(told.cause, told.hint, LOOK[told.cause], "sure")


def of_report(run: Run) -> dict[str, str]:
    """The pattern of each tensor that the report has with another shape."""
    rows = [row["tensor"] for row in run.report.get("worst", ()) if row.get("state") == "shape"]
    told = {name: of_tensor(run, name) for name in rows[:MOST_TOLD]}
    return {name: one.pattern for name, one in told.items() if one is not None}
