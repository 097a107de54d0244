#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws losses.svg: the loss of one model, one set of weights and one text under 18 layouts, native and exact.

    scripts/losses_picture.py --rows ANYRANK > docs/evidence/2026-11/losses.tsv    # trains each: minutes
    scripts/losses_picture.py --rows ANYRANK LAYOUT ...                            # of these, in exact arithmetic alone
    scripts/losses_picture.py docs/evidence/2026-11/losses.tsv > docs/pictures/losses.svg
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 20
TRAIN = ["train", "llama-demo", "--data", str(ROOT / "LICENSE"), "--batch", "8", "--seq", "64", "--steps",
         str(STEPS), "--lr", "1e-3", "--quiet"]
LAYOUTS = ["", "--tp 2", "--tp 4", "--tp 2 --sp", "--tp 4 --sp", "--cp 2", "--cp 4", "--cp 2 --zigzag", "--pp 2", "--pp 4",
           "--dp 2", "--dp 4", "--dp 8", "--dp 2 --zero 3", "--dp 2 --tp 2", "--cp 2 --tp 2 --sp",
           "--pp 2 --tp 2 --micro-batches 4", "--dp 2 --pp 2 --cp 2"]
RUNS = {"native bf16": ["--numerics", "native", "--precision", "bf16"], "native fp32": ["--numerics", "native"],
        "exact bf16": ["--precision", "bf16"], "exact fp32": []}
WIDTH, LEFT, SPAN, ROW = 760, 130, 600, 38
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}.quiet{fill:#777}.paper{fill:#fff}"
         ".axis{stroke:#888}.native{fill:#e07b1a;fill-opacity:.75}.exact{fill:#1c5fad}.one{fill:none;stroke:#333}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}.axis{stroke:#777}"
         ".native{fill:#f0a050}.one{stroke:#ddd}.exact{fill:#7db4f0}}")


def rows(anyrank, layouts):
    runs = {name: run for name, run in RUNS.items() if not layouts or name.startswith("exact")}
    print("layout", *runs, sep="\t")
    for layout in layouts or LAYOUTS:
        losses = []
        for run in runs.values():
            process = subprocess.run([anyrank, *TRAIN, *run, *layout.split(), "--json", "-"], check=True,
                                     stdout=subprocess.PIPE)
            losses.append(json.loads(process.stdout)["loss"][-1])
        print(layout or "one rank", *(f"{loss:.9g}" for loss in losses), sep="\t", flush=True)


def draw(file):
    lines = [line.split("\t") for line in pathlib.Path(file).read_text(encoding="utf-8").splitlines()]
    layouts = [line[0] for line in lines[1:]]
    height = 60 + ROW * len(RUNS)
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
          f"<title>The loss of step {STEPS} under {len(layouts)} layouts</title>\n<style>{STYLE}</style>\n"
          f'<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
          f'<text x="20" y="24" class="title">One model, one set of weights, {len(layouts)} layouts: the loss of step '
          f"{STEPS}</text>\n"
          f'<text x="20" y="42" class="quiet">each row from its lowest to its highest loss; the ring is one rank</text>')
    for i, name in enumerate(lines[0][1:]):
        losses = [float(line[i + 1]) for line in lines[1:]]
        low, high, y = min(losses), max(losses), 66 + ROW * i
        count = len(set(losses))
        print(f'<text x="20" y="{y + 4}">{name}</text>\n'
              f'<line class="axis" x1="{LEFT}" y1="{y}" x2="{LEFT + SPAN}" y2="{y}"/>')
        points = [LEFT + SPAN * ((loss - low) / (high - low) if high > low else 0.5) for loss in losses]
        for layout, loss, x in zip(layouts, losses, points):
            print(f'<circle cx="{x:.1f}" cy="{y}" r="5" class="{name.split()[0]}"><title>{layout}: {loss:.9g}</title></circle>')
        print(f'<circle class="one" cx="{points[0]:.1f}" cy="{y}" r="8"/>')
        said = f"{count} losses, {low:.7f} to {high:.7f}" if count > 1 else f"one loss, {low:.7f}"
        print(f'<text x="{LEFT}" y="{y + 20}" class="quiet">{said}</text>')
    print("</svg>")


if sys.argv[1:2] == ["--rows"]:
    rows(sys.argv[2], sys.argv[3:])
else:
    draw(sys.argv[1])
