# SPDX-License-Identifier: Apache-2.0
"""Layouts of a plan as a picture: bars of memory and of time, in the colours of the page (plan_kinds.css)."""

from __future__ import annotations

import re
import typing

from anyrank._errors import AnyrankError
from anyrank._input import LARGEST, Json, Mismatch, integer, list_of, number, record, string
from anyrank.page._parts import label, part, svg

# Pixels. A row has a name, a bar of memory and one of time, each with its sum right of where the longest ends.
WIDTH, LEFT, LENGTH, TOP, ROW, BAR, GAP, MOST_ROWS = 1120, 20, 190, 92, 26, 16, 6, 32
BARS_AT = {"memory": 560, "time": 850}


_PARTS = record({"production": record({"sum": number(0.0)})})
_PLAN = record({
    "model": string, "gpus": integer(1), "batch": integer(1), "seq": integer(1),
    "cluster": record({"words": string, "memory_bytes": number(0.0)}),
    "layouts": list_of(record({"name": string}, {"memory": _PARTS, "time": _PARTS, "bytes": number(0.0),
                                                 "seconds": number(0.0)}))})


def checked(value: typing.Any) -> Json:
    """Checks that a plan has what the page and the picture need, and returns it unchanged."""
    for i, layout in enumerate(_PLAN(value)["layouts"]):
        lacking = [key for key in ("time", "bytes", "seconds") if "memory" in layout and key not in layout]
        if lacking:
            raise Mismatch(f'layouts[{i}]: has "memory" and no "{lacking[0]}"')
    return dict(value)


def bytes_text(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while count >= (1000 if units[0] == "B" else 999.95) and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def seconds_text(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1e6:.1f} us" if seconds < 0.99995e-3 else f"{seconds * 1e3:.1f} ms"
    rounded_seconds = round(seconds)
    return f"{seconds:.2f} s" if seconds < 99.995 else f"{rounded_seconds // 60} min {rounded_seconds % 60:02d} s"


class _Measure(typing.NamedTuple):
    """One of the two columns of bars: memory or time."""

    name: str
    longest: float  # of the longest bar
    kinds: list[str]  # in the order of the JSON

    def parts(self, layout: Json) -> Json:
        return {kind: value for kind, value in layout[self.name]["production"].items()
                if type(value) in (int, float) and 0 <= value <= LARGEST and kind not in ("sum", "hidden")}

    def style(self, kind: str) -> str:
        return f"{self.name}-{re.sub('[^a-z0-9]+', '-', kind)}"


def _measure(name: str, layouts: list[Json]) -> _Measure:
    max_sum = max(layout[name]["production"]["sum"] for layout in layouts) or 1.0  # of nothing, as of no time
    measure = _Measure(name, max_sum, [])
    for layout in layouts:
        measure.kinds.extend(kind for kind in measure.parts(layout) if kind not in measure.kinds)
    found = [kind for kind in measure.kinds if any(measure.parts(layout).get(kind, 0) > 0 for layout in layouts)]
    return measure._replace(kinds=found)


def _bar(measure: _Measure, layout: Json, y: float, total: str) -> list[str]:
    out, x, parts = [], float(BARS_AT[measure.name]), measure.parts(layout)
    for kind in measure.kinds:
        length = parts.get(kind, 0) / measure.longest * LENGTH
        if length > 0:
            out.append(f'<rect class="{measure.style(kind)}" x="{x:.1f}" y="{y:.1f}" width="{length:.2f}" '
                       f'height="{BAR}"/>')
        x += length
    return [*out, label(BARS_AT[measure.name] + LENGTH + GAP, y + BAR - 4, 'class="quiet"', total)]


def _legend(measure: _Measure, y: float) -> tuple[list[str], float]:
    """Draws the legend in as many lines as it needs. Returns where the next line begins."""
    out, x = [], float(LEFT)
    for kind in measure.kinds:
        entry_width = 7 * len(kind) + 34
        if x + entry_width > WIDTH - 10:
            x, y = LEFT, y + 20
        out += [f'<rect class="{measure.style(kind)}" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12"/>',
                label(x + 17, y, 'class="quiet"', kind)]
        x += entry_width
    return out, y + 24


def _heads(room: float, memory: _Measure, rows: int) -> list[str]:
    capacity_text = f", which has {room * 1e-9:.4g} GB" if room > 0 else ""
    out = [label(BARS_AT["memory"], TOP - 14, 'class="quiet"', f"memory of a GPU{capacity_text}"),
           label(BARS_AT["time"], TOP - 14, 'class="quiet"', "time of a step")]
    if 0 < room <= memory.longest:
        out.append(f'<path class="limit" d="M{BARS_AT["memory"] + room / memory.longest * LENGTH:.1f} {TOP - 6}'
                   f'V{TOP + rows * ROW - 4}"/>')
    return out


def picture(plan: Json) -> str:
    """Draws the first layouts whose parts are known. Errors: AnyrankError if there is none."""
    layouts = [layout for layout in plan["layouts"] if layout.get("memory")][:MOST_ROWS]
    if not layouts:
        raise AnyrankError("none of the layouts that are listed is legal, so there is nothing to draw")
    room = plan["cluster"]["memory_bytes"]
    memory, time = _measure("memory", layouts), _measure("time", layouts)
    if memory.longest < room <= 2 * memory.longest:  # near enough to be in the picture
        memory = memory._replace(longest=room)
    body = _heads(room, memory, len(layouts))
    for i, layout in enumerate(layouts):
        top = TOP + i * ROW
        body += [label(LEFT, top + BAR - 4, "", layout["name"]),
                 *_bar(memory, layout, top, bytes_text(layout["bytes"])),
                 *_bar(time, layout, top, seconds_text(layout["seconds"]))]
    legend, y = _legend(memory, TOP + len(layouts) * ROW + 18)
    further, y = _legend(time, y)
    title = f"{plan['model']} on {plan['gpus']} GPU{'s' if plan['gpus'] > 1 else ''}"
    return svg((WIDTH, y), LEFT, title, f"a step of {plan['batch']} x {plan['seq']} tokens; {plan['cluster']['words']}",
               [*body, *legend, *further], part("plan_kinds.css"))
