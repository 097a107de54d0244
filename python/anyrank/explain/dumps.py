# SPDX-License-Identifier: Apache-2.0
"""Cases of two dumps: what `anyrank verify` reports of them, and the arrays of the tensors that differ."""

from __future__ import annotations

import collections
import math
import pathlib
import typing

import numpy as np

from anyrank._names import MOST_DIGITS
from anyrank.dump import Dump
from anyrank.explain import facts
from anyrank.explain.known import is_of_bf16
from anyrank.explain.tensors import ACTIVATIONS, UNITS, Array, Case, Copy, Name, Runs, Tensors, parts_of, thinned

Report = typing.Mapping[str, typing.Any]
PASSES = {"g": "grad", "i": "init", "n": "new", "f": "fwd", "b": "bwd"}
INPUTS = "inputs"  # a folder of a capture, with what modules read
IDS = ("input_ids", "ids", "tokens")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead", "heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups", "kv_heads")


def samples_of(dump: Dump) -> tuple[int, int]:
    """Samples and tokens of a step: those of the ids, else what most activations begin with; 0: not known."""
    leading: collections.Counter[tuple[int, int]] = collections.Counter()
    for name in dump:
        about = dump.tensor(name)
        shape, own = about.shape, Name.of(name)
        if len(shape) == 2 and about.dtype in ("I64", "I32") and (own.kind == "fwd" or own.stem in IDS):
            return shape[0], shape[1]
        if own.kind == "fwd" and len(shape) >= 2:
            leading[(shape[0], shape[1] if len(shape) == 3 else 0)] += 1
    return leading.most_common(1)[0][0] if leading else (0, 0)


def heads_of(run: facts.Facts) -> tuple[int, int]:
    """Attention's query and key-value heads, as the configuration or the modules say; 0: not known."""
    numbers = {key.rpartition(".")[2]: n for key, n in run.config.items() if isinstance(n, int)}
    for module in run.modules.values():
        numbers |= {key: n for key, n in module.attributes.items() if isinstance(n, int) and "head" in key}
    heads = next((numbers[key] for key in HEADS if numbers.get(key)), 0)
    return heads, next((numbers[key] for key in KV_HEADS if numbers.get(key)), heads)


def runs_of(reference: Dump, other: Dump, report: Report) -> Runs:
    """What the dumps and the report say of both runs. What the report says under "known" holds where they do not."""
    known = report.get("known") or {}
    both = tuple(facts.read(dump.path) for dump in (reference, other))
    mesh = {name: n for name, n in other.mesh.items() if n > 1} or dict(both[1].mesh) or dict(known.get("mesh", {}))
    differ = {row["tensor"] for row in report.get("worst", ())}
    batch, seq = samples_of(reference)
    heads, kv_heads = heads_of(both[0])
    told = other.metadata("micro_batches")
    inputs = [inputs_of(dump) for dump in (reference, other)]
    if inputs[0] is not None and inputs[1] is not None:
        inputs[1].align(inputs[0])
    return Runs(Tensors(reference, inputs[0]), Tensors(other, inputs[1]), (both[0], both[1]), mesh, batch, seq,
                heads or known.get("heads", 0), kv_heads or known.get("kv_heads", 0) or known.get("heads", 0),
                _one(both[1].micro_batches) or _number(told) or 1, _number(reference.metadata("targets")),
                all(dump.metadata("numerics") == "exact" for dump in (reference, other)), report,
                {name for name in reference if name not in differ and name in other})


def inputs_of(dump: Dump) -> Dump | None:
    """What modules read, as a capture has written it in a folder of its own."""
    folder = pathlib.Path(dump.path, INPUTS)
    return Dump(folder) if folder.is_dir() and any(folder.glob("*.safetensors")) else None


def _number(text: str | None) -> int:
    """Of a dump's metadata; 0: none, or no number that is counted to."""
    return int(text) if text and text.isdecimal() and len(text) <= MOST_DIGITS else 0


def _one(numbers: typing.Sequence[int | None]) -> int | None:
    return numbers[0] if numbers and all(n == numbers[0] for n in numbers) else None


def _allowed(report: Report, row: Report, reference: Array) -> Array | float:
    rule = report.get("rule") or {}
    if reference.dtype.kind in "iub":  # exact under every tolerance
        return 0.0
    if rule.get("name") == "tolerance":
        result: Array = float(rule.get("atol", 0.0)) + float(rule.get("rtol", 0.0)) * np.abs(
            reference.astype(np.float64))
        return result
    return float(row.get("allowed") or 0.0)


def _unit_of_rule(report: Report, row: Report) -> float:
    """The unit roundoff of what a sensitivity file allows: values may be computed in 16 bits and kept in more."""
    rule = report.get("rule") or {}
    largest = float(row.get("max_reference") or 0.0)
    of_halves = rule.get("name") == "sensitivity" and float(row.get("allowed") or 0.0) > UNITS["F16"] * largest > 0.0
    return UNITS["BF16"] if of_halves else UNITS["F32"]


def copies_of(dump: Dump, name: str) -> tuple[Copy, ...]:
    """Each rank's part; the whole tensor where the dump is of no ranks, or its parts are summands."""
    about = dump.tensor(name)
    whole = tuple(slice(0, n) for n in about.shape)
    if about.partial or not about.parts or len(about.parts) == 1:
        return (Copy(about.parts[0].rank if about.parts else None, (whole,), (np.asarray(dump[name]),)),)
    return parts_of(dump, name)


def worst_of(reference: Array, copies: typing.Sequence[Copy]) -> Array:
    """A full array: of each element the copy that is furthest from the reference."""
    result: Array = np.array(reference, np.float64 if reference.dtype == np.float64 else np.float32)
    furthest = np.full(reference.shape, -1.0)
    for copy in copies:
        for box, values in zip(copy.boxes, copy.values):
            with np.errstate(invalid="ignore", over="ignore"):
                apart = np.abs(values.astype(np.float64) - reference[box])
            apart = np.where(np.isnan(apart), math.inf, apart)
            further = apart > furthest[box]
            result[box] = np.where(further, values, result[box])
            furthest[box] = np.where(further, apart, furthest[box])
    return result


def _is_folded(one: typing.Sequence[int], other: typing.Sequence[int]) -> bool:
    """Whether the shorter shape is the longer one with neighbouring dimensions in one."""
    long, short = sorted((list(one), list(other)), key=len, reverse=True)
    for extent in short:
        inner = long.pop(0) if long else 0
        while long and inner < extent:
            inner *= long.pop(0)
        if inner != extent:
            return False
    return not long and len(one) != len(other)


def reshaped(array: Array, shape: tuple[int, ...], other: typing.Callable[[], Array]) -> Array | None:
    """An activation in the shape that the other run has for it, as `anyrank verify` compares it: neighbouring
    dimensions in one or apart, also [b, s, h d] as [b, h, s, d]. None: it is in another shape for another reason."""
    a, b = array.shape, shape
    ways = [array.reshape(b)] if _is_folded(a, b) else []
    if len(a) == 3 and len(b) == 4 and _is_folded(a, (b[0], b[2], b[1], b[3])):
        ways.append(array.reshape(b[0], b[2], b[1], b[3]).swapaxes(1, 2))
    elif len(a) == 4 and len(b) == 3 and _is_folded((a[0], a[2], a[1], a[3]), b):
        ways.append(array.swapaxes(1, 2).reshape(b))
    if len(ways) > 1:  # as many heads as tokens: values tell
        held = other()
        ways.sort(key=lambda way: float(np.nansum(np.abs(way.astype(np.float64) - held))))
    return ways[0] if ways else None


def case_of(runs: Runs, name: str) -> Case | None:
    """The case of one tensor that both dumps have in the same shape, or the reference once for all samples; or None."""
    if name not in runs.reference or name not in runs.other or not isinstance(runs.other, Tensors):
        return None
    reference, other = runs.reference[name], typing.cast(Dump, runs.other.source_of(name))
    row = runs.row(name)
    shape = other.tensor(name).shape
    if reference.shape != shape and Name.of(name).kind in ACTIVATIONS and row.get("state") != "shape":
        in_shape = reshaped(reference, shape, lambda: np.asarray(runs.other[name]))
        reference = reference if in_shape is None else in_shape
    if reference.dtype.kind not in "fiub" or len(reference.shape) != len(shape) or any(
            n not in (1, extent) for n, extent in zip(reference.shape, shape)):
        return None
    reference = np.broadcast_to(reference, shape)
    copies = copies_of(other, name)
    unit = max(_unit_of_rule(runs.report, row),
               *(UNITS.get(str(row.get(key)), UNITS["F32"]) for key in ("dtype", "other_dtype")))
    if unit < UNITS["BF16"] and is_of_bf16(reference):
        unit = UNITS["BF16"]
    own = Name.of(name)
    if own.kind == "weight":  # of a file whose name says what its tensors are
        own = Name(own.stem, PASSES.get(str(row.get("pass")), own.kind), own.step)
    return thinned(Case(own, reference, worst_of(reference, copies), copies, runs,
                        _allowed(runs.report, row, reference), unit, 0.0 if reference.dtype.kind in "iub" else
                        float((runs.report.get("rule") or {}).get("rtol", 0.0))))
