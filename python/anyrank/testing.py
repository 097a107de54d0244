# SPDX-License-Identifier: Apache-2.0
"""assert_same: an assertion in the words of torch.testing.assert_close, with the tensor, the rank and the cause."""

from __future__ import annotations

import math
import os
import pathlib
import struct
import textwrap
import typing

from anyrank import _arrays, _safetensors
from anyrank._dtensor import is_dtensor, same_part
from anyrank._safetensors import Entry
from anyrank._scratch import Scratch
from anyrank.dump import Dump, open_dump
from anyrank.report import Difference, VerifyReport
from anyrank.runs import verify

Side = typing.Any  # a path, a dict of tensors, a tensor, or a list of dicts, one for each rank
Sensitivity = typing.Union[None, float, str, "os.PathLike[str]", typing.Mapping[str, float]]

# rtol and atol of torch.testing.assert_close, by the reference's dtype; integers have to be equal.
CLOSE = {"F16": (1e-3, 1e-5), "BF16": (1.6e-2, 1e-5), "F32": (1.3e-6, 1e-5), "F64": (1e-7, 1e-7)}
SINGLE = "tensor"  # the name of a tensor that has none


class NotSame(AssertionError):
    """What assert_same raises; `report` is what `anyrank.verify` found, None where there was nothing to compare."""

    def __init__(self, message: str, report: VerifyReport | None = None) -> None:
        super().__init__(message)
        self.report = report


def assert_same(reference: Side, other: Side, *, sensitivity: Sensitivity = None, rtol: float | None = None,
                atol: float | None = None, ulp: int | None = None, close: bool = False, equal_nan: bool = False,
                map: typing.Any = None, reference_map: typing.Any = None,
                only: str | typing.Sequence[str] | None = None, ignore: str | typing.Sequence[str] | None = None,
                common: bool = False, name: str | None = None, msg: str | None = None) -> None:
    """Raises NotSame, an AssertionError, unless two dumps or sets of tensors are the same.

    reference, other: a dump's file or folder; a dict of tensors, as a state_dict; a tensor, array, number or nested
    list; or a list of those, one for each rank. None in a dict is no tensor. Shards of ranks are put together by `map`
    (pytorch.md); without it each rank is taken to hold a copy, and copies are compared with each other first. Of a
    DTensor this rank's part is compared with that part of the reference, without communication.

    The same is what has the same bits, unless one of these says otherwise:
        rtol, atol     |other - reference| <= atol + rtol |reference|; one that is not given is 0
        close=True     the rtol and atol of torch.testing.assert_close for the reference's dtype
        sensitivity    what each tensor may differ: a file of `anyrank grads --sensitivity`, a dict of numbers, a number
        ulp            so many steps of the reference's dtype
    NaN differs from NaN unless equal_nan. Another dtype is a difference by bits and by ulp; else values are compared.
    only, ignore: globs of names. common: leave out tensors that one side lacks. name: of single tensors, for the hints,
    as "model.norm.weight:grad". msg: printed first. Errors: AnyrankError for what cannot be read; TypeError.
    """
    __tracebackhide__ = True
    if reference is None or other is None:
        which = "reference" if reference is None else "other"
        raise NotSame(_with(msg, f"The {which} is None: it has no values. A parameter without a gradient?"))
    if close and any(rule is not None for rule in (rtol, atol, ulp, sensitivity)):
        raise TypeError("close=True says what counts as the same: give no other rule")
    rank_line = _this_rank(reference, other)
    reference, other = _parts(reference, other)
    name = name or SINGLE
    sides = [_side(value, name) for value in (reference, other)]
    for side, which in zip(sides, ("reference", "other")):
        if isinstance(side, list) and not any(side):
            raise NotSame(_with(msg, f"The {which} has no tensors: there is nothing to compare."))
    plain = all(option is None for option in (rtol, atol, ulp, sensitivity, only, ignore, map, reference_map))
    if plain and _equal_bytes(sides, equal_nan):
        return  # the command, which checks what the options say, has nothing to do
    scratch = Scratch()
    paths = [_written(side, scratch.path / which) for side, which in zip(sides, ("reference", "other"))]
    options: dict[str, typing.Any] = {
        "rtol": rtol, "atol": atol, "ulp": ulp, "no_equal_nan": not equal_nan, "map": map,
        "reference_map": reference_map, "only": only, "ignore": ignore, "common": common,
        "sensitivity": _allowances(sensitivity, sides[0], name, scratch.path / "allowed.safetensors")}
    report = verify(*paths, **options)
    if close and not report.ok:
        options["rtol"], options["atol"] = _close(report)
        report = verify(*paths, **options)
    if not report.ok:
        object.__setattr__(report, "keeps", (report.keeps, scratch))  # its page is made of these files
        is_torch = any(_arrays.is_torch(value) for value in (reference, other))
        raise NotSame(_with(msg, explain(report, torch=is_torch) + rank_line), report)


def _with(msg: str | None, text: str) -> str:
    return f"{msg}\n\n{text}" if msg else text


# --- what is compared -------------------------------------------------------------------------------------------------

Entries = typing.Dict[str, Entry]


def _parts(reference: Side, actual: Side) -> tuple[Side, Side]:
    """Plain tensors of DTensors: this rank's part, and of what it is compared with the same part."""
    if is_dtensor(reference) or is_dtensor(actual):
        return same_part(reference, actual)
    if isinstance(reference, (str, os.PathLike, Dump)) or isinstance(actual, (str, os.PathLike, Dump)):
        read = _of_dump(reference, actual), _of_dump(actual, reference)
        return _parts(*read) if all(isinstance(side, dict) for side in read) else read
    if isinstance(reference, typing.Mapping) and isinstance(actual, typing.Mapping):
        shared_parts = {key: _parts(reference[key], actual[key]) for key in reference if key in actual}
        return ({key: shared_parts[key][0] if key in shared_parts else value for key, value in reference.items()},
                {key: shared_parts[key][1] if key in shared_parts else value for key, value in actual.items()})
    return reference, actual


def _of_dump(side: Side, counterpart: Side) -> Side:
    """Returns the tensors of a dump that is compared with DTensors, of which this process has only a part; everything
    else unchanged."""
    values = (
        counterpart.values() if isinstance(counterpart, typing.Mapping) and not isinstance(counterpart, Dump) else []
    )
    if not any(map(is_dtensor, values)):
        return side
    dump = side if isinstance(side, Dump) else open_dump(side)
    return {key: dump.torch(key) for key in dump}


def _this_rank(*sides: Side) -> str:
    """Returns a line with the rank whose part of a DTensor is compared."""
    values = [tensor for side in sides if not isinstance(side, Dump)
              for tensor in (side.values() if isinstance(side, typing.Mapping) else [side])]
    if not any(map(is_dtensor, values)):
        return ""
    import torch

    return f"\n    DTensor   the part of rank {torch.distributed.get_rank()}"


def _side(value: Side, name: str) -> pathlib.Path | list[Entries]:
    """Returns a path, or the tensors of each rank."""
    if isinstance(value, (str, os.PathLike)):
        return pathlib.Path(value)
    if isinstance(value, (list, tuple)) and value and not isinstance(value, Entry) and not _are_numbers(value):
        return [_entries(rank_tensors, name) for rank_tensors in value]
    return [_entries(value, name)]


def _are_numbers(value: object) -> bool:
    """Returns whether a list contains nested numbers, which make one tensor; a list of tensors has one for each
    rank."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (bool, int, float, list, tuple))


def _entries(value: Side, name: str) -> Entries:
    if hasattr(value, "named_parameters") and hasattr(value, "state_dict"):
        raise TypeError("a module has weights and gradients: give module.state_dict(), or {name: p.grad for name, p in "
                        "module.named_parameters()}")
    if isinstance(value, Dump):
        return {key: value.entry(key) for key in value}
    entries = {}
    for key, tensor in _leaves("", value) if isinstance(value, typing.Mapping) else [(name, value)]:
        if key in entries:
            raise TypeError(f"two tensors have the name {key!r}: a nested dictionary's keys are joined by dots")
        try:
            entries[key] = _arrays.entry_of(tensor)
        except TypeError as error:
            raise TypeError(str(error) if tensor is value else f"{key!r}: {error}") from None
    return entries


def _leaves(path: str, value: Side) -> typing.Iterator[tuple[str, typing.Any]]:
    """Yields the tensors of nested dicts, such as an optimizer's state_dict: "state.0.exp_avg". None is no tensor."""
    if isinstance(value, typing.Mapping):
        for key, child in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), child)
    elif isinstance(value, (list, tuple)) and not isinstance(value, Entry) and not _are_numbers(value):
        for i, child in enumerate(value):
            yield from _leaves(f"{path}.{i}", child)
    elif value is not None:
        yield path, value


def _equal_bytes(sides: list[pathlib.Path | list[Entries]], equal_nan: bool) -> bool:
    """Returns whether no rule could find a difference: the same names, types, shapes and bytes, and no NaN that
    counts."""
    a, b = sides
    if not (isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == 1 and a[0].keys() == b[0].keys()):
        return False
    return all(_arrays.same_bytes(entry, b[0][key]) and (equal_nan or not _arrays.has_nan(entry))
               for key, entry in a[0].items())


def _written(side: pathlib.Path | list[Entries], path: pathlib.Path) -> pathlib.Path:
    """Returns a dump's path: a file, or a folder with a file of each rank."""
    if isinstance(side, pathlib.Path):
        return side
    if len(side) == 1:
        path = path.with_suffix(".safetensors")
        _safetensors.write(path, side[0])
        return path
    path.mkdir()
    for rank, tensors in enumerate(side):
        _safetensors.write(path / f"rank-{rank:05}.safetensors", tensors)
    return path


def _allowances(sensitivity: Sensitivity, reference: pathlib.Path | list[Entries], name: str,
                path: pathlib.Path) -> typing.Any:
    """Writes the file of allowances for a dict, or for one number for all tensors."""
    if sensitivity is None or isinstance(sensitivity, (str, os.PathLike)):
        return sensitivity
    if not isinstance(sensitivity, typing.Mapping):
        if isinstance(reference, pathlib.Path):
            raise TypeError("sensitivity: one number for all tensors of a dump is atol")
        sensitivity = {key: float(sensitivity) for entries in reference for key in entries}
    _safetensors.write(
        path,
        {key: Entry("F64", (), memoryview(struct.pack("<d", allowance))) for key, allowance in sensitivity.items()},
    )
    return path


def _close(report: VerifyReport) -> tuple[float, float]:
    """Returns the tolerances for tensors that differ in bits."""
    dtypes = sorted({row.dtype for row in report.tensors if row.dtype in CLOSE})
    if len(dtypes) > 1:
        raise TypeError(f"close=True: tensors of {' and of '.join(map(str, dtypes))} differ, which have tolerances of "
                        "their own: give rtol and atol")
    return CLOSE[str(dtypes[0])] if dtypes else (0.0, 0.0)


# --- the failure's text -----------------------------------------------------------------------------------------------

MOST_NAMES = 5
WIDTH = 110


def explain(report: VerifyReport, torch: bool = False) -> str:
    """Describes a report that is not ok in the words of torch.testing.assert_close, followed by tensor, rank, element,
    pattern, cause and hint. torch: shapes and dtypes are written as torch does."""
    difference = report.first
    lines = _head(report, difference, torch)
    if difference is not None:
        difference_count, count = len(report.tensors), report.compared
        which = (
            f", the first of {difference_count:,} in execution order ({count:,} compared)"
            if difference_count > 1
            else ""
        )
        single = difference.tensor == SINGLE and not which
        lines += [] if single else ["", f"The failure occurred for item {difference.tensor!r}{which}"]
        lines += [_detail(label, text) for label, text in _details(difference) if text]
    different_names = [row.tensor for row in report.tensors if difference is None or row.tensor != difference.tensor]
    unpaired = {*report.missing, *report.unexpected}
    lines += _names("Also different", [tensor_name for tensor_name in different_names if tensor_name not in unpaired])
    lines += _names("Gradients of parameters that both have, in one alone", report.lost_gradients)
    if difference is None or difference.state not in ("missing", "unexpected"):
        lines += _names("Missing in the other", report.missing) + _names("Only in the other", report.unexpected)
    return "\n".join(lines)


def _detail(label: str, text: str) -> str:
    """Returns a wrapped line in which names and numbers stay whole."""
    return textwrap.fill(text, WIDTH, initial_indent=f"    {label:<9} ", subsequent_indent=" " * 14,
                         break_long_words=False, break_on_hyphens=False)


def _head(report: VerifyReport, difference: Difference | None, torch: bool) -> list[str]:
    if report.unjudged:
        return [f"Cannot judge {len(report.unjudged)} of {report.compared} tensors:", str(report)]
    if difference is None or difference.state in ("missing", "unexpected"):
        return ["The keys of the mappings do not match:",
                f"Missing keys in the actual mapping: {sorted(report.missing)}",
                f"Additional keys in the actual mapping: {sorted(report.unexpected)}"]
    if difference.state == "shape":
        a, b = (f"torch.Size({list(s)})" if torch else str(s) for s in (difference.shape, difference.other_shape))
        return [f"The values for attribute 'shape' do not match: {a} != {b}."]
    if difference.state == "dtype":
        names = [_arrays.OF_DTYPE.get(str(dtype), str(dtype)) for dtype in (difference.dtype, difference.other_dtype)]
        a, b = (f"torch.{dtype_name}" if torch else dtype_name for dtype_name in names)
        return [f"The values for attribute 'dtype' do not match: {a} != {b}."]
    rule = str((report.rule or {}).get("name"))
    word = "equal" if rule == "bits" else "close"
    if difference.state == "replicas":
        rank_names = " and ".join(f"rank {rank}" for rank in difference.ranks)
        return [
            f"Copies of a tensor on several ranks are not {word}!",
            "",
            _mismatched(difference),
            f"Between {rank_names} at index {difference.index}: {difference.reference} and {difference.actual}",
        ]
    absolute, relative = _greatest(difference)
    if not difference.shape:
        return [f"Scalars are not {word}!", "", f"Expected {difference.reference} but got {difference.actual}.",
                f"Absolute difference: {absolute}{_up_to(report, difference, 'atol')}",
                f"Relative difference: {relative}{_up_to(report, difference, 'rtol')}"]
    index_text = "" if rule == "tolerance" and (report.rule or {}).get("rtol") else f" at index {difference.index}"
    lines = [f"Tensor-likes are not {word}!", "", _mismatched(difference),
             f"Greatest absolute difference: {absolute}{index_text}{_up_to(report, difference, 'atol')}",
             f"Greatest relative difference: {relative}{_up_to(report, difference, 'rtol')}"]
    if difference.max_ulp and rule in ("bits", "ulp"):
        allowed = f" (up to {report.rule['ulp']:,} allowed)" if rule == "ulp" else ""
        lines.append(f"Greatest distance: {difference.max_ulp:,.0f} ulp{allowed}")
    return lines


def _greatest(row: Difference) -> tuple[object, object]:
    """Returns the greatest differences: NaN or infinite if the worst element is, since the figures leave such elements
    out."""
    a, b = row.reference, row.actual
    if isinstance(a, float) and isinstance(b, float) and not math.isfinite(b - a):
        return abs(b - a), abs(b - a) / abs(a) if a else math.inf
    return row.max_abs, row.max_rel


def _mismatched(row: Difference) -> str:
    share = row.elements_different / row.elements if row.elements else 0.0
    return f"Mismatched elements: {row.elements_different} / {row.elements} ({share:.1%})"


def _up_to(report: VerifyReport, row: Difference, key: str) -> str:
    """Returns assert_close's phrase for the tolerance; a sensitivity is an absolute tolerance."""
    rule = report.rule or {}
    if rule.get("name") == "tolerance":
        return f" (up to {rule.get(key):.6g} allowed)"
    return f" (up to {row.allowed:.6g} allowed)" if rule.get("name") == "sensitivity" and key == "atol" else ""


def _details(row: Difference) -> typing.Iterator[tuple[str, str]]:
    yield "rank", "" if row.rank is None else str(row.rank)
    yield "ranks", ", ".join(str(rank) for rank in row.ranks)
    if row.state == "different":
        times = f", {row.ratio:.3g} times what is allowed" if row.ratio and math.isfinite(row.ratio) else ""
        yield "first", _values(row, row.first_index, row.first_reference, row.first_actual)
        yield "worst", _values(row, row.index, row.reference, row.actual) + times
    if any(row.nan):
        yield "NaN", f"{row.nan[0]:,} in the reference, {row.nan[1]:,} in the other"
    yield "pattern", row.pattern
    yield "cause", "" if row.cause in (None, "unknown") else str(row.cause)
    yield "hint", row.hint
    yield "look at", row.look


def _values(row: Difference, index: tuple[int, ...], reference: object, actual: object) -> str:
    a, b = (
        f"{element:.9g}" if isinstance(element, float) and row.dtype != "F64" else str(element)
        for element in (reference, actual)
    )
    return f"index {index}: {a} in the reference, {b} in the other"


def _names(title: str, names: typing.Sequence[str]) -> list[str]:
    if not names:
        return []
    remainder = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return [f"{title}: {', '.join(names[:MOST_NAMES])}{remainder}"]
