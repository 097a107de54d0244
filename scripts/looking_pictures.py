#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of by-looking.md, of the model of two layers whose config.json is on that page, from what
`anyrank plan` and the trace of `anyrank check` say of it.

    scripts/looking_pictures.py [build/anyrank [DIR]]          writes look-*.svg into docs/pictures, or DIR

Nothing is timed by a clock of this machine, so every machine draws the same figures.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import pipeline_picture as pipeline
import ring_picture as ring

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PICTURES = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else DOCS / "pictures"
FLOWS = (("look-one", "one rank", ""), ("look-tp", "tp=2", "--tp 2"),
         ("look-sp", "tp=2 with sequence parallelism", "--tp 2 --sp"), ("look-cp", "cp=2, zigzag", "--cp 2 --zigzag"))
FLOW = "--flow --batch 1 --seq 64 --numerics native"
LEFT_OUT = ("residual", "rope", "gate product")
WORDS = {"product": "matmul", "redistribute": "gather", "keys and values round": "keys, values"}
SCHEDULES = (("gpipe", "gpipe: all forward, then all back"), ("1f1b", "1f1b: back as soon as possible"),
             ("zero-bubble", "zero-bubble: weights' gradients (W) where ranks would wait"))
PIPELINE = "--pipeline --pp 2 --micro-batches 4"
TRACE = ("--dp 2 --batch 8 --seq 64 --steps 1 --numerics native --skip-f64 --cluster inside=1us:5GB/s,flops=1T "
         "--bucket-bytes 2MiB")
MEMORY = "--batch 4 --seq 64 --numerics native --cluster inside=1us:5GB/s,flops=1T"  # no GPU, which has a reserve
ZEROS = tuple((f"zero={stage}" if stage else "dp=4", f"--dp 4 --zero {stage}") for stage in range(4))
LAYOUTS = (("one rank", "--tp 1"), ("tp=4", "--tp 4"), ("tp=4 sp", "--tp 4 --sp"), ("cp=4 zigzag", "--cp 4 --zigzag"),
           ("pp=2 dp=2", "--pp 2 --dp 2"), ("dp=4", "--dp 4"), ("dp=4 zero=3", "--dp 4 --zero 3"))
KEPT = (("weights", "weights"), ("gradients", "gradients"), ("master weights", "master"), ("optimizer", "optimizer"))
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.quiet{fill:#777}"
         ".paper{fill:#fff}.whole{fill:none;stroke:#aaa}.weights{fill:#5b9a57}.value{fill:#4a83c4}.comm{fill:#d2772a}"
         ".commtext{fill:#b35c10;font-weight:600}.gradients{fill:#d2772a}.master{fill:#8fc08b}.optimizer{fill:#8a6bb5}"
         ".rest{fill:#4a83c4}.work{fill:#4a83c4}.back{fill:#1c4f91}.bucket{fill:#d2772a}"
         ".number{font-size:10px;fill:#fff;text-anchor:middle}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}.whole{stroke:#666}"
         ".commtext{fill:#f0a050}.number{fill:#fff}}")
ROW, MODULE, WEIGHT, OUTPUT, CALL, WIDTH = 44, 14, 185, 425, 700, 900  # pixels
FEATURES, POSITIONS = 140 / 1024, 30 / 64  # pixels for each


def run(anyrank, folder, words):
    process = subprocess.run([anyrank, *words.split()], cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        sys.exit(f"{anyrank} {words}: exit status {process.returncode}: {process.stdout}{process.stderr}")
    return process.stdout


def text(x, y, content, style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" class={chr(34)}{style}{chr(34)}" if style else ""}>{content}</text>'


def rect(x, y, width, height, style):
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def amount(count):
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count:.0f} B"


def picture(name, height, title, body, style=STYLE):
    (PICTURES / f"{name}.svg").write_text("\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
         f'role="img" aria-label="{title}">', f"<style>{style}</style>", rect(0, 0, WIDTH, height, "paper"), *body,
         "</svg>", ""]), encoding="utf-8")


# --- values of a step -------------------------------------------------------------------------------------------------


def pieces(extent, local, zigzag):
    """Where rank 0's part of an extent begins and ends, as shares of it."""
    if extent == local:
        return [(0.0, 1.0)]
    share = local / extent
    return [(0.0, share / 2), (1.0 - share / 2, 1.0)] if zigzag else [(0.0, share)]


def value(x, y, tensor, zigzag):
    """A tensor of positions by features; what rank 0 has of it is filled."""
    shape, local = (tensor[key][1:] if len(tensor[key]) > 1 else tensor[key] for key in ("shape", "local"))
    shape, local = (shape, local) if len(shape) > 1 else ([*shape, 24], [*local, 24])
    width, height = shape[1] * FEATURES, shape[0] * POSITIONS
    out = [rect(x + left * width, y + top * height, (right - left) * width, (bottom - top) * height, "value")
           for left, right in pieces(shape[1], local[1], False) for top, bottom in pieces(shape[0], local[0], zigzag)]
    return [*out, rect(x, y, width, height, "whole")], width


def weight(x, y, tensor):
    """A matrix [out, in] with its outputs from left to right, as those of the value that it makes."""
    shape, local = tensor["shape"], tensor["local"]
    across, down = (shape[0], shape[1]) if len(shape) > 1 else (shape[0], 24)
    width, height = across * FEATURES, max(30 * down / 768, 4)
    column_share = pieces(shape[0], local[0], False)[0][1]
    row_share = pieces(shape[1], local[1], False)[0][1] if len(shape) > 1 else 1.0
    return [rect(x, y, column_share * width, row_share * height, "weights"), rect(x, y, width, height, "whole")], width


def flow(anyrank, folder, name, title, options):
    result = json.loads(run(anyrank, folder, f"plan two {FLOW} {options} --json - -q"))
    zigzag = "zigzag" in options
    out = [text(MODULE, 26, f"{title}: the forward pass on rank 0", "title"),
           text(WEIGHT, 48, "weight: outputs by inputs", "quiet"),
           text(OUTPUT, 48, "value: features by positions", "quiet"), text(CALL, 48, "communication", "quiet")]
    y = 58
    for operation in result["flow"]:
        if operation["operation"] in LEFT_OUT or operation["pass"] != "forward":
            continue
        module = re.sub(r"^model\.(layers\.\*\.)?", "", operation["module"]).replace(
            "self_attn.", "").replace("mlp.", "")
        word = WORDS.get(operation["operation"], operation["operation"])
        out += [text(MODULE, y + 14, module), text(MODULE, y + 29, word, "quiet")]
        for column, tensors, draw in ((WEIGHT, operation["weights"], weight),
                                      (OUTPUT, operation["outputs"], lambda *arguments: value(*arguments, zigzag))):
            x = column
            for tensor in tensors:
                shapes, width = draw(x, y + 2, tensor)
                out += shapes
                x += width + 6
        for call in operation["communication"]:
            name_of = call["collective"].replace("_", "-")
            times = f"{call['calls']} x " if call["calls"] > 1 else ""
            out.append(text(CALL, y + 20, f"{times}{name_of}, {amount(call['bytes_per_rank'])}", "commtext"))
            y += 15 * (call is not operation["communication"][-1])
        y += ROW
    forward = result["totals"]["forward"]
    out.append(text(MODULE, y + 16, "One of the two layers; filled: what rank 0 has. In both, with head and loss, it "
                    f"computes {forward['multiply_adds'] / 1e6:.1f} M multiply-adds and sends "
                    f"{amount(forward['bytes_per_rank'])}.", "quiet"))
    picture(name, y + 30, f"The forward pass of a layer, {title}", out)


# --- time -------------------------------------------------------------------------------------------------------------


def schedules(anyrank, folder):
    plans = [json.loads(run(anyrank, folder, f"plan two {PIPELINE} --schedule-pp {name} --json - -q"))["pipeline"]
             for name, _ in SCHEDULES]
    layer = (WIDTH - 20 - pipeline.LEFT) / max(plan["makespan"] * plan["unit_layers"] for plan in plans)
    out, top = [], 30
    for (_, title), plan in zip(SCHEDULES, plans):
        top = pipeline.panel(out, top, title, plan, layer * plan["unit_layers"])
    title = "Three schedules of a pipeline of two ranks and four micro-batches"
    picture("look-pp", top - 14, title, out, pipeline.STYLE)


def buckets(anyrank, folder):
    out, panels = [], []
    for mode in ("eager", "overlap"):
        run(anyrank, folder, f"check two {TRACE} --bucket-mode {mode} --trace {mode}.json")
        events = [event for event in json.loads((folder / f"{mode}.json").read_text(encoding="utf-8"))["traceEvents"]
                  if event["ph"] == "X" and event["pid"] == 0]
        step = next(event for event in events if event["name"] == "step 1")
        panels.append((mode, events, step))
    scale = (WIDTH - 20 - ring.LEFT) / max(step["dur"] for _, _, step in panels)
    for number, (mode, events, step) in enumerate(panels):
        top = 30 + number * 96
        out += [text(MODULE, top, f"{mode}: a step of {step['dur']:,.0f} us on rank 0", "title"),
                text(MODULE, top + 30, "computes"), text(MODULE, top + 60, "sums gradients")]
        back = min(event["ts"] for event in events if event["name"].endswith(":bwd"))
        for event in events:
            found = re.match(r"bucket (\d+)$", event["name"])
            if not found and event["cat"] != "work" or not step["ts"] <= event["ts"] < step["ts"] + step["dur"]:
                continue
            x, y, width = (ring.LEFT + (event["ts"] - step["ts"]) * scale, top + (46 if found else 16),
                           event["dur"] * scale)
            out.append(rect(x, y, max(width - 1, 1), 20,
                            "bucket" if found else "work" if event["ts"] < back else "back"))
            out += [text(x + width / 2, y + 14, found[1], "number")] if found else []
    picture("look-dp", 30 + 2 * 96, "Buckets of gradients after the backward pass, and beside it", out)


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(anyrank, folder, name, title, layouts):
    rows = []
    for label, options in layouts:
        plan = json.loads(run(anyrank, folder, f"plan two {MEMORY} {options} --json - -q"))["layouts"][0]
        stored, moved = plan["memory"]["production"], plan["time"]["production"]["moved"]
        rows.append((label, stored, sum(transfer["bytes"] for transfer in moved)))
    scale = 540 / max(stored["sum"] for _, stored, _ in rows)
    out, x = [text(MODULE, 26, title, "title")], MODULE
    for word, style in (*KEPT, ("activations, workspace", "rest")):
        out += [rect(x, 38, 12, 12, style), text(x + 18, 49, word)]
        x += 44 + 7 * len(word)
    for number, (label, stored, sent) in enumerate(rows):
        y, x = 66 + number * 34, 110
        out.append(text(MODULE, y + 16, label))
        rest = stored["sum"] - sum(stored[key] for key, _ in KEPT)
        for count, style in (*((stored[key], style) for key, style in KEPT), (rest, "rest")):
            out.append(rect(x, y, count * scale, 22, style))
            x += count * scale
        out.append(text(x + 6, y + 16, amount(stored["sum"]) + (f"; sends {amount(sent)}" if sent else "")))
    picture(name, 74 + len(rows) * 34, title, out)


def main():
    anyrank = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/anyrank").resolve())
    page = (DOCS / "start/by-looking.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "two").mkdir()
        (folder / "two/config.json").write_text(re.search(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
        for name, title, options in FLOWS:
            flow(anyrank, folder, name, title, options)
        schedules(anyrank, folder)
        buckets(anyrank, folder)
        memory(anyrank, folder, "look-zero", "What one of four data-parallel ranks holds, and sends in a step", ZEROS)
        memory(anyrank, folder, "look-all", "What one rank of each layout holds, and sends in a step", LAYOUTS)


if __name__ == "__main__":
    main()
