# SPDX-License-Identifier: Apache-2.0
"""Reports as HTML: a table for notebooks, in the notebook's own colours, light or dark, and pages. No network."""

from __future__ import annotations

import html
import math
import pathlib
import re
import tempfile
import typing

if typing.TYPE_CHECKING:
    from anyrank.report import Difference

MOST_ROWS = 50
_NUMBER = re.compile(r"(-?[\d.,]+(e[+-]\d+)?( (ms|s|GB|%|of [\d,]+))?|-?inf|nan)?")

# Colours are the surroundings' own with some transparency, so that they fit a light and a dark notebook.
_STYLE = """<style>
.anyrank{font:13px/1.45 system-ui,sans-serif;color:inherit;overflow-x:auto}
.anyrank table{border-collapse:collapse;margin:.5em 0;font-size:12px;color:inherit;background:transparent}
.anyrank th,.anyrank td{padding:3px 9px;text-align:left;vertical-align:top;
border-bottom:1px solid rgba(128,128,128,.35);
background:transparent;color:inherit;font-variant-numeric:tabular-nums;max-width:28em;overflow-wrap:anywhere}
.anyrank th{font-weight:600;border-bottom-width:2px}
.anyrank th.number,.anyrank td.number{text-align:right}
.anyrank .verdict{font-weight:600;padding:2px 9px;border-left:4px solid;border-radius:2px;display:inline-block}
.anyrank .same{border-color:#2e9e5b;background:rgba(46,158,91,.14)}
.anyrank .different{border-color:#d9534f;background:rgba(217,83,79,.14)}
.anyrank pre{font-size:12px;white-space:pre;overflow-x:auto;color:inherit;background:transparent}
</style>"""


def table(title: str, ok: bool, columns: list[str], rows: list[list[str]], text: str) -> str:
    """Returns an HTML fragment: the verdict, a table, and the command's text, which is folded if there is a table."""
    parts = [_STYLE, '<div class="anyrank">',
             f'<div class="verdict {"same" if ok else "different"}">{html.escape(title)}</div>']
    if rows:
        right = [all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(columns))]
        head = _row("th", columns, right)
        body = "".join(_row("td", row, right) for row in rows[:MOST_ROWS])
        parts.append(f"<table><thead>{head}</thead><tbody>{body}</tbody></table>")
        if len(rows) > MOST_ROWS:
            parts.append(f"<div>.. and {len(rows) - MOST_ROWS:,} more</div>")
    if "\n" in text:
        opened = "" if rows else " open"
        parts.append(f"<details{opened}><summary>what the command prints</summary><pre>{html.escape(text)}</pre>"
                     "</details>")
    return "".join([*parts, "</div>"])


def _row(tag: str, cells: list[str], right: list[bool]) -> str:
    """right: which columns are numbers."""
    ends = [' class="number"' if number else "" for number in right]
    return "<tr>" + "".join(f"<{tag}{end}>{html.escape(cell)}</{tag}>" for cell, end in zip(cells, ends)) + "</tr>"


def page(title: str, body: str) -> str:
    return ('<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark"><title>'
            f"{html.escape(title)}</title></head><body>{body}</body></html>\n")


def temporary_page(name: str) -> pathlib.Path:
    """Returns a path for a page that the browser reads after the caller has continued."""
    return pathlib.Path(tempfile.mkdtemp(prefix="anyrank-page-"), f"{name}.html")


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if math.isfinite(value) and (value == int(value) or abs(value) >= 1e3) else f"{value:.3g}"


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def bytes_of(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.2f} GB"


def layout_name(layout: typing.Mapping[str, typing.Any] | None) -> str:
    """ "dp=2 tp=4 sp": what differs from one rank."""
    settings = layout or {}
    numbers = [f"{key}={settings[key]}" for key in ("dp", "pp", "cp", "tp") if settings.get(key, 1) > 1]
    if settings.get("cp", 1) > 1 and settings.get("zigzag"):
        numbers.append("zigzag")
    numbers += ["sp"] if settings.get("sp") else []
    numbers += [f"zero={settings['zero']}"] if settings.get("zero") else []
    numbers += [f"micro-batches={settings['micro_batches']}"] if settings.get("micro_batches", 1) > 1 else []
    return " ".join(numbers) or "one rank"


def place(index: typing.Sequence[int]) -> str:
    return "[" + ",".join(str(i) for i in index) + "]"


def difference_cells(row: Difference) -> list[str]:
    shape = f"{row.dtype or ''} {place(row.shape)}"
    if row.state == "shape":
        shape += f", other {place(row.other_shape)}"
    if row.state == "dtype":
        shape += f", other {row.other_dtype}"
    largest = "" if row.max_abs is None else f"{row.max_abs:.3g}"
    return [row.tensor, shape, f"{row.elements_different:,} of {row.elements:,}", largest,
            number(row.max_ulp), place(row.index), _shown(row.reference), _shown(row.actual),
            row.cause or row.hint or ("" if row.state == "different" else row.state)]


def _shown(value: typing.Any) -> str:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)
