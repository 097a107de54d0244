#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws bf16.svg: the losses of a model that is trained in three arithmetics, three seeds each.

    scripts/curves_picture.py --rows RUN.json ... > docs/evidence/2026-11/bf16-losses.tsv    # of anyrank train --json
    scripts/curves_picture.py docs/evidence/2026-11/bf16-losses.tsv > docs/pictures/bf16.svg
"""

import json
import pathlib
import sys

WINDOW = 40  # steps, of which a point is the mean
COLOURS = {"fp32": "#777777", "native": "#e07b1a", "exact": "#1c5fad"}
NAMES = {"fp32": "exact fp32", "native": "native bf16", "exact": "exact bf16"}
LEFT, TOP, WIDTH, HEIGHT = 50, 34, 690, 230


def rows(files):
    print("run", *(pathlib.Path(file).stem for file in files), sep="\t")
    losses = [json.loads(pathlib.Path(file).read_text())["loss"] for file in files]
    for begin in range(0, len(losses[0]), WINDOW):
        print(begin + WINDOW, *(f"{sum(run[begin:begin + WINDOW]) / WINDOW:.4f}" for run in losses), sep="\t")


def draw(file):
    lines = [line.split("\t") for line in pathlib.Path(file).read_text().splitlines() if not line.startswith("#")]
    names, steps = lines[0][1:], [int(line[0]) for line in lines[1:]]
    curves = {name: [float(line[i + 1]) for line in lines[1:]] for i, name in enumerate(names)}
    low, high = min(map(min, curves.values())) - 0.1, 3.5

    def point(i, loss):
        y = TOP + HEIGHT * (high - min(loss, high)) / (high - low)
        return f"{LEFT + WIDTH * steps[i] / steps[-1]:.1f} {y:.1f}"

    print('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" role="img">\n'
          f"<title>Losses of {steps[-1]} steps in three arithmetics, three seeds each</title>\n"
          "<style>text{font:12px system-ui,sans-serif;fill:#777}path{fill:none;stroke-width:1.3}</style>")
    for value in (1.5, 2.0, 2.5, 3.0, 3.5):
        y = TOP + HEIGHT * (high - value) / (high - low)
        print(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#8884"/><text x="20" y="{y + 4:.1f}">{value}</text>')
    for name, losses in curves.items():
        path = "L".join(point(i, loss) for i, loss in enumerate(losses) if loss <= high)
        print(f'<path d="M{path}" stroke="{COLOURS[name.split("-")[0]]}"/>')
    for i, (kind, text) in enumerate(NAMES.items()):
        print(f'<path d="M{LEFT + 130 * i} 16h24" stroke="{COLOURS[kind]}"/>'
              f'<text x="{LEFT + 30 + 130 * i}" y="20">{text}</text>')
    print(f'<text x="{LEFT}" y="286">loss, mean of {WINDOW} steps; step 0 to {steps[-1]}</text>\n</svg>')


if sys.argv[1:2] == ["--rows"]:
    rows(sys.argv[2:])
else:
    draw(sys.argv[1])
