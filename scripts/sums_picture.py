#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws sums.svg: eight numbers added by one, two and four ranks, in fp32 and as integers of one exponent.

    scripts/sums_picture.py > docs/pictures/sums.svg
"""
import math
import struct

TERMS = (812.31, 0.0713, -97.06, 3.0951, -641.7, 0.2189, 55.9, -0.4377)
BITS, LEFT, CELL, ROW = 25, 92, 78, 58
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}.quiet{fill:#777}"
         ".middle{text-anchor:middle}.on{fill:#fff;text-anchor:middle}.paper{fill:#fff}.cell{stroke:#fff}"
         ".r0{fill:#3f78b8}.r1{fill:#cf6f22}.r2{fill:#4f8f4b}.r3{fill:#8a62b3}.sum{font-weight:600}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.on{fill:#fff}.paper{fill:#16181c}"
         ".cell{stroke:#16181c}}")


def fl32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def in_order(terms, add):
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


def row(out, y, ranks, terms, add, shown, result):
    """One layout: terms in the colours of their ranks, partial sums under them, and the total."""
    each = len(terms) // ranks
    out.append(f'<text x="20" y="{y + 17}">{ranks} rank{"s" * (ranks > 1)}</text>')
    partial = []
    for i, term in enumerate(terms):
        x = LEFT + i * CELL
        out.append(f'<rect class="cell r{i // each}" x="{x}" y="{y}" width="{CELL}" height="25"/>')
        exactly = term if isinstance(term, int) else f"{term:.6g}"
        out.append(f'<text class="on" x="{x + CELL / 2}" y="{y + 17}">{exactly}</text>')
    for rank in range(ranks):
        partial.append(in_order(terms[rank * each:(rank + 1) * each], add))
        x = LEFT + (rank + 0.5) * each * CELL
        out.append(f'<text class="middle quiet" x="{x}" y="{y + 40}">{shown(partial[-1])}</text>')
    total = in_order(partial, add)
    out.append(f'<text class="sum" x="{LEFT + 8 * CELL + 20}" y="{y + 17}">{result(total)}</text>')
    return total


def main():
    terms = [fl32(x) for x in TERMS]
    exponent = max(math.frexp(x)[1] for x in terms)
    integers = [round(x * 2.0 ** (BITS - exponent)) for x in terms]
    unit = 2.0 ** (exponent - BITS)
    out = ['<text class="title" x="20" y="26">fp32: every addition rounds, so each grouping has its own sum</text>']
    sums = {row(out, 42 + i * ROW, n, terms, lambda a, b: fl32(a + b), lambda x: f"{x:.9g}", lambda x: f"{x:.9g}")
            for i, n in enumerate((1, 2, 4))}
    top = 42 + 3 * ROW + 22
    out.append(f'<text class="title" x="20" y="{top}">exact: the terms as integers q = rint(x·2^({BITS}-e)) of one '
               f'exponent e = {exponent}; the sum is rounded once</text>')
    same = {row(out, top + 16 + i * ROW, n, integers, lambda a, b: a + b, str,
                lambda s: f"{s} → {fl32(s * unit):.9g}") for i, n in enumerate((1, 2, 4))}
    if len(sums) != 3 or len(same) != 1:
        raise SystemExit(f"the example shows nothing: {sums}, {same}")
    height = top + 16 + 3 * ROW
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 {height}" role="img" '
          'aria-label="Eight numbers added by one, two and four ranks: three sums in fp32, one as integers">')
    print(f"<style>{STYLE}</style>")
    print(f'<rect class="paper" width="920" height="{height}"/>')
    print("\n".join(out))
    print("</svg>")


if __name__ == "__main__":
    main()
