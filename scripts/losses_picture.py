#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws losses.svg: the loss of step 1 of one torchtitan model and seed under eighteen layouts, as reported in
pytorch/torchtitan#3029 (comment of 2026-08-04), above the layouts of anyrank's quickstart, which have one.

    scripts/losses_picture.py > docs/pictures/losses.svg
"""
REPORTED = {"one GPU": 12.05575, "fsdp2": 12.07003, "pp2": 12.04905, "cp2": 12.06936, "tp2": 12.05239,
            "fsdp2 tp2 pp2": 12.05729, "fsdp2 tp2 cp2": 12.04102, "tp2 pp2 cp2": 12.04419, "fsdp2 pp2 cp2": 12.07969,
            "ep2 fsdp2": 12.07003, "ep2 fsdp2 tp2 pp2": 12.03851, "ep2 fsdp2 tp2 cp2": 12.05770,
            "ep2 fsdp2 pp2 cp2": 12.06318, "ep8 fsdp8": 12.03346, "pp4": 12.06240, "pp8": 12.04408, "tp4": 12.03252,
            "cp4": 12.07386}
LAYOUTS, GRADIENTS = 28, "20987f00de6a"
WIDTH, HEIGHT, LEFT, SPAN, LOW, HIGH = 760, 190, 40, 680, 12.03, 12.082
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}.quiet{fill:#777}.paper{fill:#fff}"
         ".axis{stroke:#888}.theirs{fill:#e07b1a;fill-opacity:.75}.one{fill:none;stroke:#333}.ours{fill:#1c5fad}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}.axis{stroke:#777}"
         ".theirs{fill:#f0a050}.one{stroke:#ddd}.ours{fill:#7db4f0}}")


def at(loss):
    return LEFT + SPAN * (loss - LOW) / (HIGH - LOW)


def text(x, y, content, style=""):
    return f'<text x="{x:.0f}" y="{y}" class="{style}">{content}</text>'


def dot(x, y, style, title):
    return f'<circle cx="{x:.1f}" cy="{y}" r="5" class="{style}"><title>{title}</title></circle>'


def main():
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
           "<title>The loss of step 1 under eighteen layouts, and the gradients of 28 layouts</title>",
           f"<style>{STYLE}</style>", f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
           text(LEFT, 24, "fp32 and bf16: one model, one seed, 18 layouts, 17 losses in step 1", "title"),
           text(LEFT, 42, "pytorch/torchtitan#3029; the ring is one GPU. Which of the others are right?", "quiet"),
           f'<line class="axis" x1="{LEFT}" y1="84" x2="{LEFT + SPAN}" y2="84"/>']
    for layout, loss in REPORTED.items():
        out.append(dot(at(loss), 70, "theirs", f"{layout}: {loss:.5f}"))
        if layout == "one GPU":
            out.append(f'<circle class="one" cx="{at(loss):.1f}" cy="70" r="9"/>')
    for tick in (12.03, 12.04, 12.05, 12.06, 12.07, 12.08):
        out.append(text(at(tick) - 14, 100, f"{tick:.2f}", "quiet"))
    out += [text(LEFT, 136, f"exact: one model, one seed, {LAYOUTS} layouts, one result", "title"),
            text(LEFT, 154, f"anyrank check, all gradients of three steps: {GRADIENTS} in every row", "quiet")]
    out += [dot(at(REPORTED["one GPU"]), 170, "ours", f"{LAYOUTS} layouts: {GRADIENTS}"), "</svg>"]
    print("\n".join(out))


if __name__ == "__main__":
    main()
