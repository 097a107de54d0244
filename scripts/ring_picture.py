#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws context-parallel.svg: the forward pass of two blocks on a ring of four ranks, without zig-zag and with it, from
the traces of two checks on a described cluster's clock.

    scripts/ring_picture.py [build/anyrank] > docs/pictures/context-parallel.svg

The virtual clock depends on program and cluster alone, so every machine draws the same picture.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

CHECK = ("check llama-demo --cp 4 --batch 1 --seq 512 --steps 0 --numerics native --skip-f64 "
         "--cluster inside=1us:5GB/s,flops=1T").split()
FIRST, LAST = "model.layers.1.self_attn:fwd", "model.layers.2.self_attn:fwd"  # the blocks between them are drawn
RANKS, SEQ, CELLS = 4, 512, 8
LEFT, RIGHT, ROW, BAR, PANEL = 150, 880, 30, 20, 52  # pixels
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.quiet{fill:#777}"
         ".paper{fill:#fff}.axis{stroke:#888;fill:none}.work{fill:#7aa7d9}.attention{fill:#1c5fad}.hop{fill:#e07b1a}"
         ".wait{fill:#c9c9c9}.cell{fill:none;stroke:#999}.own{fill:#1c5fad}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}.axis{stroke:#777}"
         ".work{fill:#47678c}.attention{fill:#7db4f0}.hop{fill:#f0a050}.wait{fill:#4a4e55}.own{fill:#7db4f0}}")


def events_of(anyrank, arguments):
    """The complete events of one run, each with its rank as "pid"; times in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        process = subprocess.run([anyrank, *arguments, "--trace", path], capture_output=True, text=True, check=False)
        if process.returncode != 0:
            sys.exit(f"{anyrank} exits {process.returncode}: {process.stdout}{process.stderr}")
        return [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]


def window(events):
    """From the first rank's begin of FIRST to the last rank's end of LAST."""
    begin = min(event["ts"] for event in events if event["name"] == FIRST)
    return begin, max(event["ts"] + event["dur"] for event in events if event["name"] == LAST)


def kind(event, spans):
    """The class of an event that is drawn, or None: computation inside attention and outside, hops, waiting."""
    if event["cat"] == "work":
        return "attention" if any(span["pid"] == event["pid"] and span["ts"] <= event["ts"] < span["ts"] + span["dur"]
                                  for span in spans) else "work"
    return {"collective": "hop", "waiting": "wait"}.get(event["cat"])


def text(x, y, content, attributes=""):
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{content}</text>'


def bar(x, y, width, style, title):
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}"><title>{title}</title></rect>'


def positions(zigzag, rank):
    """Which eighths of the sequence a rank has."""
    return (rank, CELLS - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)


def panel(out, top, events, zigzag, scale):
    begin, end = window(events)
    spans = [event for event in events if re.fullmatch(r"model\.layers\.\d+\.self_attn:fwd", event["name"])]
    name = "zigzag: rank r has chunks r and 7-r of eight" if zigzag else "ring: rank r has the r-th quarter"
    out.append(text(LEFT, top, f"{name}; {end - begin:,.0f} us", ' class="title"'))
    for rank in range(RANKS):
        y = top + 12 + rank * ROW
        out.append(text(20, y + 14, f"rank {rank}"))
        for cell in range(CELLS):
            style = "cell own" if cell in positions(zigzag, rank) else "cell"
            out.append(f'<rect class="{style}" x="{70 + cell * 8}" y="{y + 6}" width="8" height="8"/>')
    for order in ("work", "attention", "hop", "wait"):  # what is waited for lies inside a collective
        for event in events:
            if (kind(event, spans) != order or event["ts"] + event["dur"] <= begin or event["ts"] >= end
                    or event["dur"] == 0):
                continue
            bar_begin, bar_end = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
            label = event.get("args", {}).get("tag", event["name"])
            out.append(bar(LEFT + (bar_begin - begin) * scale, top + 12 + event["pid"] * ROW,
                           (bar_end - bar_begin) * scale, order, f"{label}: {event['dur']:.1f} us"))


def main():
    anyrank = sys.argv[1] if len(sys.argv) > 1 else "build/anyrank"
    runs = [(False, events_of(anyrank, CHECK)), (True, events_of(anyrank, [*CHECK, "--zigzag"]))]
    longest = max(end - begin for begin, end in (window(events) for _, events in runs))
    scale = (RIGHT - LEFT) / longest
    height = PANEL + 2 * (RANKS * ROW + 46) + 20
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" role="img">',
           "<title>Two blocks of llama-demo, forward, on four context-parallel ranks</title>", f"<style>{STYLE}</style>",
           '<rect class="paper" width="100%" height="100%"/>']
    for column, (style, name) in enumerate((("attention", "attention"), ("work", "other products"),
                                            ("hop", "keys and values travel"),
                                            ("wait", "waiting for another rank"))):
        out.append(bar(LEFT + column * 185, 14, 16, style, name))
        out.append(text(LEFT + column * 185 + 22, 28, name))
    for number, (zigzag, events) in enumerate(runs):
        panel(out, PANEL + 12 + number * (RANKS * ROW + 46), events, zigzag, scale)
    print("\n".join([*out, "</svg>"]))


if __name__ == "__main__":
    main()
