# SPDX-License-Identifier: Apache-2.0
"""What pages and pictures are made of: templates with their data, and elements of SVG."""

from __future__ import annotations

import html
import json
import pathlib
import re
import typing

from anyrank._terminal import printable

Json = typing.Dict[str, typing.Any]

STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.quiet{fill:#777}"
         ".paper{fill:#fff}.grid{stroke:#e3e3e3;fill:none}.axis{stroke:#888;fill:none}"
         ".faint{stroke:#8fb4de;stroke-width:1;fill:none}.bold{stroke:#1c5fad;stroke-width:2;fill:none}"
         ".aside{stroke:#b8860b;stroke-width:1;stroke-dasharray:4 3;fill:none}"
         ".mark{stroke:#999;stroke-dasharray:2 3;fill:none}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}.grid{stroke:#2c3036}"
         ".axis{stroke:#777}.faint{stroke:#47678c}.bold{stroke:#7db4f0}.aside{stroke:#d9b14a}.mark{stroke:#777}}")
_PART = re.compile(r"^@([\w.]+\.(?:css|js))@\n", re.MULTILINE)
# Characters that turn the direction of what a page shows behind them.
_TURNS = re.compile(r"\\u(?:061c|200[ef]|202[a-e]|206[6-9])")
_NO_XML = re.compile("[\ufffe\uffff]")


def part(name: str) -> str:
    """Reads the text of a file beside this one."""
    return pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")


def filled(template: str, data: Json) -> str:
    """Fills a page with the parts that it names and with its data, in which '<' is escaped, so that no text ends the
    element. Errors: ValueError for a number that JSON lacks."""
    page = _PART.sub(lambda found: part(found[1]), part(template))
    text = _TURNS.sub("?", json.dumps(data, separators=(",", ":"), allow_nan=False)).replace("<", "\\u003c")
    return page.replace("@DATA@", text, 1)


def escaped(text: str) -> str:
    """Text for XML, which has no control characters, and without those that turn its direction."""
    return html.escape(_NO_XML.sub("?", printable(text)), quote=False)


def label(x: float, y: float, attributes: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escaped(text)}</text>'


def svg(size: tuple[float, float], margin: float, title: str, subtitle: str, body: list[str], style: str = "") -> str:
    """Returns a picture of width x height pixels with its title in the upper 50, at `margin`; style: CSS of further
    classes."""
    width, height = size
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">', f"<title>{escaped(title)}</title>", f"<style>{STYLE}{style}</style>",
        '<rect class="paper" width="100%" height="100%"/>', label(margin, 22, 'class="title"', title),
        label(margin, 40, 'class="quiet"', subtitle), *body, "</svg>", ""])
