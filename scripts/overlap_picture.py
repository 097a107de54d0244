#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws overlap.svg: a block forward and backward on the first of four tensor-parallel ranks, collectives and
products one after the other and in four chunks beside each other, from the traces of two checks on a described cluster's
clock.

    scripts/overlap_picture.py [build/anyrank] > docs/pictures/overlap.svg

The virtual clock depends on program and cluster alone, so every machine draws the same picture.
"""
import sys

import ring_picture as ring

CHECK = ("check llama-demo --tp 4 --sp --batch 1 --seq 512 --steps 0 --numerics native --skip-f64 "
         "--cluster inside=1us:10GB/s,flops=1T").split()
CHUNKS = 4
PASSES = {"forward": "model.layers.1:fwd", "backward": "model.layers.1:bwd"}
LEFT, RIGHT, ROW, PANEL = 110, 880, 28, 104  # pixels
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.paper{fill:#fff}"
         ".work{fill:#1c5fad}.gather{fill:#e07b1a}.scatter{fill:#3f9142}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.paper{fill:#16181c}.work{fill:#7db4f0}"
         ".gather{fill:#f0a050}.scatter{fill:#6cc070}}")
LEGEND = (("work", "products"), ("gather", "all-gather"), ("scatter", "reduce-scatter"))


def kind(event):
    """The class of an event that is drawn, or None."""
    if event["cat"] == "collective":
        return {"all_gather": "gather", "reduce_scatter": "scatter"}.get(event["name"])
    return "work" if event["cat"] == "work" else None


def panel(out, top, events, name, span, scale):
    begin, end = span["ts"], span["ts"] + span["dur"]
    out.append(ring.text(LEFT, top, f"{name}; {span['dur']:,.0f} us", ' class="title"'))
    for row, heading in enumerate(("products", "collectives")):
        out.append(ring.text(20, top + 26 + row * ROW, heading))
    for event in events:
        style = kind(event)
        bar_begin, bar_end = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if style is None or event["dur"] == 0 or bar_end <= bar_begin:
            continue
        label = event.get("args", {}).get("tag", event["name"])
        out.append(ring.bar(LEFT + (bar_begin - begin) * scale, top + 12 + (style != "work") * ROW,
                            max((bar_end - bar_begin) * scale - 1, 1),
                            style, f"{label}: {event['dur']:.1f} us"))


def main():
    anyrank = sys.argv[1] if len(sys.argv) > 1 else "build/anyrank"
    runs = [("one after the other", ring.events_of(anyrank, CHECK)),
            (f"in {CHUNKS} chunks", ring.events_of(anyrank, [*CHECK, "--overlap", str(CHUNKS)]))]
    panels = []
    for name, span in PASSES.items():
        for mode, events in runs:
            mine = [event for event in events if event["pid"] == 0]
            panels.append((f"{name}, {mode}", mine, next(event for event in mine if event["name"] == span)))
    scale = (RIGHT - LEFT) / max(span["dur"] for _, _, span in panels)
    height = 60 + len(panels) * PANEL
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" role="img">',
           "<title>A block of llama-demo on the first of four tensor-parallel ranks, without overlap and with it</title>",
           f"<style>{STYLE}</style>", '<rect class="paper" width="100%" height="100%"/>']
    for column, (style, name) in enumerate(LEGEND):
        out.append(ring.bar(LEFT + column * 185, 14, 16, style, name))
        out.append(ring.text(LEFT + column * 185 + 22, 28, name))
    for number, (name, events, span) in enumerate(panels):
        panel(out, 70 + number * PANEL, events, name, span, scale)
    print("\n".join([*out, "</svg>"]))


if __name__ == "__main__":
    main()
