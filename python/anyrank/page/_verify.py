# SPDX-License-Identifier: Apache-2.0
"""What the page of a comparison shows: its report, with the heat maps as letters.

A cell is a letter: "0" the same, "z" not finite, else one of LEVELS, as many to each power of ten. Maps of the first
tensors are as fine as they were made, those of the others so coarse that a page of hundreds stays below a megabyte.
"""

from __future__ import annotations

import math
import typing

from anyrank._input import Json, Mismatch, anything, integer, list_of, nullable, number, record, string

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LEVELS = len(LETTERS) - 2
FINE_MAPS, CELLS_OF_OTHERS = 32, 300000
SMALLEST = 1e-6  # of the largest: what is smaller looks like nothing beside it

_COUNT, _FIGURE = integer(0), number(-math.inf, math.inf, words=True)
_INDEX, _PAIR = list_of(_COUNT), list_of(_COUNT, 2)
_ROW = record({"tensor": string}, {
    **dict.fromkeys(("state", "dtype", "other_dtype", "pattern", "hint", "cause", "copies_of", "pass"), string),
    **dict.fromkeys(("shape", "other_shape", "index", "first_index", "ranks", "bins"), _INDEX),
    **dict.fromkeys(("elements", "elements_different", "bits_different"), _COUNT),
    **dict.fromkeys(("ratio", "max_abs", "max_rel", "rms", "rms_reference", "cosine", "scale", "allowed"), _FIGURE),
    "nan": _PAIR, "inf": _PAIR, "matrix": _PAIR, "map_shape": list_of(integer(1), 2), "map": list_of(_FIGURE)})
_NAMED = nullable(record({"tensor": string}))


def _dimension(value: typing.Any) -> list[typing.Any]:
    """Checks a dimension of the mesh: its name and size."""
    pair = list_of(anything, 2)(value)
    return [string(pair[0]), integer(1)(pair[1])]


_REPORT = record({"rows": list_of(_ROW)}, {
    "first": _NAMED, "worst": list_of(_NAMED), "rule": record({"name": string}), "mesh": list_of(_dimension),
    "explanation": record({}, {"ranks": list_of(_COUNT)}),
    **dict.fromkeys(("result", "reference", "other"), string),
    **dict.fromkeys(("tensors", "tensors_different", "elements", "elements_different", "ranks"), _COUNT),
    **dict.fromkeys(("missing", "unexpected"), list_of(string))})


def checked(value: typing.Any) -> Json:
    """Checks a report whose maps have as many cells as their shapes, and whose first and worst tensors have rows."""
    report = _REPORT(value)
    names = {row["tensor"] for row in report["rows"]}
    for i, row in enumerate(report["rows"]):
        if row.get("map") and math.prod(row.get("map_shape", ())) != len(row["map"]):
            raise Mismatch(f'rows[{i}]: "map" has {len(row["map"])} cells, expected those of "map_shape", '
                           f'{row.get("map_shape")}')
    for key, named in (("first", report.get("first")), ("worst", next(iter(report.get("worst", ())), None))):
        if named is not None and named["tensor"] not in names:
            raise Mismatch(f'{key}: has a "tensor" that no row has')
    return dict(value)


def _coarse(cells: list[float], rows: int, cols: int, factor: int) -> tuple[list[float], int, int]:
    """Coarsens a map: each new cell is the largest of factor by factor cells, or not finite if one is not."""
    down, across = -(-rows // factor), -(-cols // factor)
    maxima = [0.0] * (down * across)
    for i, cell in enumerate(cells):
        block_index = i // cols // factor * across + i % cols // factor
        maxima[block_index] = (
            cell
            if not math.isfinite(cell)
            else max(maxima[block_index], cell) if math.isfinite(maxima[block_index]) else maxima[block_index]
        )
    return maxima, down, across


def _letter(cell: float, low: float, high: float) -> str:
    if cell == 0.0 or not math.isfinite(cell):
        return "0" if cell == 0.0 else "z"
    part = math.log(max(cell, low) / low) / math.log(high / low) if high > low else 1.0
    return LETTERS[1 + round(part * (LEVELS - 1))]


def _with_letters(row: Json, factor: int) -> Json:
    if not row.get("map"):
        return {key: value for key, value in row.items() if key not in ("map", "map_shape", "matrix")}
    down, across = row["map_shape"]
    cells, rows, cols = _coarse([float(cell) for cell in row["map"]], down, across, factor)
    finite = [cell for cell in cells if cell > 0.0 and math.isfinite(cell)]
    high = max(finite, default=0.0)
    low = min(max(min(finite, default=0.0), high * SMALLEST), high)
    return {**row, "map": "".join(_letter(cell, low, high) for cell in cells), "map_range": [low, high],
            "map_shape": [rows, cols]}


def data_of(report: Json) -> Json:
    """Returns the report of `anyrank verify` with all its rows; the first and the worst are given by index."""
    rows = report["rows"]
    places = {row["tensor"]: i for i, row in enumerate(rows)}
    mapped = [row for row in rows if row.get("map")]
    cells = sum(len(row["map"]) for row in mapped[FINE_MAPS:])
    coarse = math.ceil(math.sqrt(cells / CELLS_OF_OTHERS)) or 1
    fine = {row["tensor"] for row in mapped[:FINE_MAPS]}
    lettered = [_with_letters(row, 1 if row["tensor"] in fine else coarse) for row in rows]
    first_row, worst = report.get("first"), report.get("worst") or [None]
    if first_row is not None:
        lettered[places[first_row["tensor"]]] |= {
            key: first_row[key] for key in ("pattern", "hint") if first_row.get(key)
        }
    return {**report, "rows": lettered, "first": None if first_row is None else places[first_row["tensor"]],
            "worst": None if worst[0] is None else places[worst[0]["tensor"]]}
