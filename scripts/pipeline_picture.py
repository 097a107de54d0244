#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws pipeline.svg: the four schedules of a pipeline of four ranks and eight micro-batches, from the lists that
`anyrank plan --pipeline` prints.

    scripts/pipeline_picture.py [build/anyrank] > docs/pictures/pipeline.svg
"""
import json
import subprocess
import sys

PLAN = "plan llama-3-8b --pipeline --pp 4 --micro-batches 8 --json -".split()
PANELS = (("gpipe", "gpipe: all forward, then all back"),
          ("1f1b", "1f1b: back as soon as possible, so that less is kept"),
          ("interleaved", "interleaved: each rank has two stages (the second is darker), whose passes take half as long"),
          ("zero-bubble", "zero-bubble: gradients of the weights (W) where ranks would wait"))
LEFT, RIGHT, ROW, BAR, PANEL = 80, 990, 22, 18, 46  # pixels
CLASSES = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}.quiet{fill:#777}"
         ".paper{fill:#fff}rect{stroke:#fff;stroke-width:.8}.micro{font-size:10px;fill:#fff;text-anchor:middle}"
         ".wait{fill:#ececec}.forward{fill:#4a83c4}.forward.later{fill:#1c4f91}.backward{fill:#d2772a}"
         ".backward.later{fill:#9a4d0e}.input{fill:#d2772a}.weight{fill:#5b9a57}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}rect{stroke:#16181c}"
         ".wait{fill:#2a2d33}.micro{fill:#fff}}")


def plan(anyrank, schedule):
    process = subprocess.run([anyrank, *PLAN, "--schedule-pp", schedule], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        sys.exit(f"{anyrank} exits {process.returncode}: {process.stderr}")
    return json.loads(process.stdout)["pipeline"]


def parts(operation):
    """Stage, kind and micro-batch of "5F3"."""
    kind_index = next(i for i, char in enumerate(operation) if not char.isdigit())
    return int(operation[:kind_index]), operation[kind_index], int(operation[kind_index + 1:])


def panel(out, top, title, pipeline, scale):
    in_flight = [rank["in_flight"] for rank in pipeline["ranks"]]
    out.append(f'<text class="title" x="12" y="{top}">{title}</text>')
    out.append(f'<text class="quiet" x="12" y="{top + 16}">ranks wait {100 * pipeline["bubble"]:.1f} % of the time '
               f'that they compute; most in flight: {", ".join(map(str, in_flight))}</text>')
    for number, rank in enumerate(pipeline["ranks"]):
        y = top + 24 + number * ROW
        out.append(f'<text x="12" y="{y + 13}">rank {number}</text>')
        out.append(f'<rect class="wait" x="{LEFT}" y="{y}" width="{pipeline["makespan"] * scale:.1f}" height="{BAR}"/>')
        for computation in rank["computations"]:
            stage, kind, micro = parts(computation["operation"])
            x, width = LEFT + computation["begin"] * scale, (computation["end"] - computation["begin"]) * scale
            later = " later" if stage != rank["stages"][0] else ""
            out.append(f'<rect class="{CLASSES[kind]}{later}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}">'
                       f'<title>{computation["operation"]}</title></rect>')
            out.append(f'<text class="micro" x="{x + width / 2:.1f}" y="{y + 13}">{micro}</text>')
    return top + PANEL + len(pipeline["ranks"]) * ROW


def main():
    anyrank = sys.argv[1] if len(sys.argv) > 1 else "build/anyrank"
    plans = [plan(anyrank, schedule) for schedule, _ in PANELS]
    layer = (RIGHT - LEFT) / max(pipeline["makespan"] * pipeline["unit_layers"] for pipeline in plans)
    out, top = [], 54
    legend = 12
    for word, style in (("forward (F)", "forward"), ("backward (B), or of its input alone (I)", "backward"),
                        ("gradients of the weights (W)", "weight"), ("waiting", "wait")):
        out.append(f'<rect class="{style}" x="{legend}" y="10" width="14" height="14"/>')
        out.append(f'<text x="{legend + 20}" y="22">{word}</text>')
        legend += 40 + 7 * len(word)
    for (_, title), pipeline in zip(PANELS, plans):
        top = panel(out, top, title, pipeline, layer * pipeline["unit_layers"])
    height = top - 24
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height}" role="img" '
          f'aria-label="Four schedules of a pipeline of four ranks and eight micro-batches">')
    print(f"<style>{STYLE}</style>")
    print(f'<rect class="paper" width="1000" height="{height}"/>')
    print("\n".join(out))
    print("</svg>")


if __name__ == "__main__":
    main()
