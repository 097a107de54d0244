# SPDX-License-Identifier: Apache-2.0
"""What the page of a comparison shows: its report, with the heat maps as letters.

A cell is a letter: "0" the same, "z" not finite, else one of LEVELS, as many to each power of ten. Maps of the first
tensors are as fine as they were made, those of the others so coarse that a page of hundreds stays below a megabyte.
"""

from __future__ import annotations

import math

from anyrank.page._parts import Json

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LEVELS = len(LETTERS) - 2
FINE_MAPS, CELLS_OF_OTHERS = 32, 300000
SMALLEST = 1e-6  # of the largest: what is smaller looks like nothing beside it


def _coarse(cells: list[float], rows: int, cols: int, by: int) -> tuple[list[float], int, int]:
    """The largest of by times by cells; not finite if one is not."""
    down, across = -(-rows // by), -(-cols // by)
    most = [0.0] * (down * across)
    for i, cell in enumerate(cells):
        at = i // cols // by * across + i % cols // by
        most[at] = cell if not math.isfinite(cell) else max(most[at], cell) if math.isfinite(most[at]) else most[at]
    return most, down, across


def _letter(cell: float, low: float, high: float) -> str:
    if cell == 0.0 or not math.isfinite(cell):
        return "0" if cell == 0.0 else "z"
    part = math.log(max(cell, low) / low) / math.log(high / low) if high > low else 1.0
    return LETTERS[1 + round(part * (LEVELS - 1))]


def _with_letters(row: Json, by: int) -> Json:
    if not row.get("map"):
        return {key: value for key, value in row.items() if key not in ("map", "map_shape", "matrix")}
    down, across = row["map_shape"]
    cells, rows, cols = _coarse([float(cell) for cell in row["map"]], down, across, by)
    finite = [cell for cell in cells if cell > 0.0 and math.isfinite(cell)]
    high = max(finite, default=0.0)
    low = min(max(min(finite, default=0.0), high * SMALLEST), high)
    return {**row, "map": "".join(_letter(cell, low, high) for cell in cells), "map_range": [low, high],
            "map_shape": [rows, cols]}


def data_of(report: Json) -> Json:
    """The report of `anyrank verify` with all its rows; the first and the worst are told by their places."""
    rows = report["rows"]
    places = {row["tensor"]: i for i, row in enumerate(rows)}
    mapped = [row for row in rows if row.get("map")]
    cells = sum(len(row["map"]) for row in mapped[FINE_MAPS:])
    coarse = math.ceil(math.sqrt(cells / CELLS_OF_OTHERS)) or 1
    fine = {row["tensor"] for row in mapped[:FINE_MAPS]}
    lettered = [_with_letters(row, 1 if row["tensor"] in fine else coarse) for row in rows]
    first, worst = report.get("first"), report.get("worst") or [None]
    if first is not None:
        lettered[places[first["tensor"]]] |= {key: first[key] for key in ("pattern", "hint") if first.get(key)}
    return {**report, "rows": lettered, "first": None if first is None else places[first["tensor"]],
            "worst": None if worst[0] is None else places[worst[0]["tensor"]]}
