#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the small pictures of parallelism.md: how ranks are numbered and grouped, what each kind of parallel layer
holds and sends, and what ZeRO's stages keep, whose bytes `anyrank check --memory` counts.

    scripts/parallelism_pictures.py [build/anyrank [FOLDER]]    # FOLDER: docs/pictures
"""
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECK = ("check llama-demo --dp 4 --batch 8 --seq 32 --steps 1 --numerics native --memory --json -").split()
KINDS = (("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer state"), ("buckets", "buckets"),
         ("activations_peak", "largest of a step"))
MB = 1e6

# The colours of ranks 0 to 3; "all" is what every rank has, "part" marks a term of a sum.
STYLE = ("text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}.quiet{fill:#777}"
         ".middle{text-anchor:middle}.end{text-anchor:end}.on{fill:#fff;text-anchor:middle}.big{font-size:18px}"
         ".paper{fill:#fff}rect{stroke:#fff;stroke-width:1}.r0{fill:#3f78b8}.r1{fill:#cf6f22}.r2{fill:#4f8f4b}"
         ".r3{fill:#8a62b3}.all{fill:#9aa3ad}.part{fill:url(#terms);stroke:none}.none{fill:none;stroke:#999;"
         "stroke-dasharray:3 3}.box{fill:none;stroke:#999}.ring{fill:none;stroke:#c2185b;stroke-width:2.5}"
         ".send{fill:#c2185b}.sent{fill:#c2185b;font-weight:600;text-anchor:middle}.arrow{stroke:#777;fill:none}"
         ".terms{stroke:#fff;stroke-width:2}"
         "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.on{fill:#fff}.paper{fill:#16181c}"
         "rect{stroke:#16181c}.none,.box{stroke:#888}.ring{stroke:#ff6f9c}.send,.sent{fill:#ff6f9c}.all{fill:#6a737d}"
         ".terms{stroke:#16181c}}")
TERMS = ('<defs><pattern id="terms" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
         '<line class="terms" x1="0" y1="0" x2="0" y2="7"/></pattern></defs>')


class Picture:
    """Shapes of an SVG in the order in which they are drawn."""

    def __init__(self, width, height, label):
        self.out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
                    f'aria-label="{label}">', f"<style>{STYLE}</style>", TERMS,
                    f'<rect class="paper" width="{width}" height="{height}"/>']

    def text(self, x, y, content, style=""):
        self.out.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{content}</text>')

    def rect(self, x, y, width, height, style, title=""):
        inside = f"<title>{title}</title>" if title else ""
        self.out.append(f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}">{inside}'
                        "</rect>")

    def arrow(self, x1, y1, x2, y2):
        """Horizontal or vertical."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.out.append(f'<path class="arrow" d="M{x1:g} {y1:g}L{x2:g} {y2:g}m{-5 * dx - 4 * dy:g} {-5 * dy - 4 * dx:g}'
                        f'l{5 * dx + 4 * dy:g} {5 * dy + 4 * dx:g}l{-5 * dx + 4 * dy:g} {-5 * dy + 4 * dx:g}"/>')

    def matrix(self, x, middle, size, name, cut="all", under="", parts=2):
        """A matrix [height, width] around the line `middle`; cut: all, rows, columns, or term N of a sum."""
        height, width = size
        y = middle - height / 2
        if cut == "rows":
            for r in range(parts):
                self.rect(x, y + r * height / parts, width, height / parts, f"r{r}")
        elif cut == "columns":
            for r in range(parts):
                self.rect(x + r * width / parts, y, width / parts, height, f"r{r}")
        elif cut == "all":
            self.rect(x, y, width, height, "all")
        else:
            self.rect(x, y, width, height, cut)
            self.rect(x, y, width, height, "part")
        self.text(x + width / 2, middle - 52, name, "middle")
        self.text(x + width / 2, middle + 62, under, "middle quiet")
        return x + width

    def sign(self, x, middle, sign):
        self.text(x + 12, middle + 6, sign, "middle big")
        return x + 24

    def collective(self, x, middle, name, width=96):
        self.arrow(x + 8, middle, x + width - 8, middle)
        self.text(x + width / 2, middle - 8, name, "sent")
        return x + width

    def legend(self, x, y, entries):
        for style, word in entries:
            self.rect(x, y - 11, 14, 14, style.split()[0])
            if " " in style:
                self.rect(x, y - 11, 14, 14, style.split()[1])
            self.text(x + 20, y, word)
            x += 40 + 6.6 * len(word)

    def save(self, path):
        path.write_text("\n".join([*self.out, "</svg>"]) + "\n", encoding="utf-8")


T, H, F = 64, 44, 84  # pixels: tokens, width, width of the MLP


# --- ranks ------------------------------------------------------------------------------------------------------------

def rank_grid(p, left, top, title, groups):
    """pp 2, dp 2, cp 2, tp 2: the ranks in boxes of boxes; groups: whether those of rank 5 are marked."""
    cell, extent = 44, 2
    p.text(left, top - 34, title, "title")
    of_five = {4: "tp", 7: "cp", 1: "dp", 13: "pp"}
    for pp in range(extent):
        y0 = top + pp * 128
        p.rect(left, y0 - 14, 430, 118, "box")
        p.text(left + 8, y0 + 50, f"pp {pp}", "quiet")
        for dp in range(extent):
            x0 = left + 56 + dp * 186
            p.rect(x0, y0 - 6, 176, 102, "box")
            p.text(x0 + 8, y0 + 10, f"dp {dp}", "quiet")
            for cp in range(extent):
                p.text(x0 + 12, y0 + 32 + cp * 42, f"cp {cp}", "quiet")
                for tp in range(extent):
                    rank = ((pp * extent + dp) * extent + cp) * extent + tp
                    x, y = x0 + 56 + tp * (cell + 8), y0 + 10 + cp * 42
                    shown = "all" if groups and rank != 5 and rank not in of_five else f"r{tp}"
                    p.rect(x, y, cell, 36, shown)
                    p.text(x + cell / 2, y + 16 if groups and rank in of_five else y + 23, rank, "on")
                    if groups and rank in of_five:
                        p.text(x + cell / 2, y + 31, of_five[rank], "on")
                    if groups and rank == 5:
                        p.rect(x - 3, y - 3, cell + 6, 42, "ring")


def ranks():
    p = Picture(1000, 320, "Sixteen ranks of a mesh pp 2, dp 2, cp 2, tp 2, their numbers, and the groups of rank 5")
    rank_grid(p, 20, 58, "rank = ((pp·2 + dp)·2 + cp)·2 + tp", False)
    rank_grid(p, 540, 58, "rank 5 and its peer in each of its four groups", True)
    return p


# --- tensor parallelism -----------------------------------------------------------------------------------------------

def pair(p, middle, title, names):
    """Two products whose second one leaves terms of a sum."""
    p.text(20, middle - 76, title, "title")
    x, first, between, second, left, right, result = 40, *names
    x = p.sign(p.matrix(x, middle, (T, H), first[0], "all", first[1]), middle, "×")
    x = p.sign(p.matrix(x, middle, (H, F), between[0], "columns", between[1]), middle, "=")
    x = p.sign(p.matrix(x, middle, (T, F), second[0], "columns", second[1]), middle, "×")
    x = p.sign(p.matrix(x, middle, (F, H), left[0], "rows", left[1]), middle, "=")
    x = p.sign(p.matrix(x, middle, (T, H), right, "r0", "rank 0"), middle, "+")
    x = p.matrix(x, middle, (T, H), right, "r1", "rank 1")
    x = p.collective(x, middle, "all-reduce")
    p.matrix(x, middle, (T, H), result[0], "all", result[1])


def tensor_parallel():
    p = Picture(700, 380, "A column-parallel and a row-parallel layer on two ranks, forward and backward")
    pair(p, 108, "forward: column-parallel, then row-parallel",
         (("X", "[T, h]"), ("W₁ᵀ by output", "[h, F]"), ("act(X·W₁ᵀ)", "[T, F]"),
          ("W₂ᵀ by input", "[F, h]"), "terms", ("Y", "[T, h]")))
    pair(p, 274, "backward: the same in reverse",
         (("dY", "[T, h]"), ("W₂", "[h, F]"), ("dY·W₂·act'", "[T, F]"), ("W₁", "[F, h]"), "terms",
          ("dX", "[T, h]")))
    p.legend(40, 364, (("r0", "rank 0"), ("r1", "rank 1"), ("all", "the same on every rank"),
                       ("r0 part", "a term of a sum")))
    return p


def heads(p, left, top):
    """8 query heads and 2 KV heads on 4 ranks."""
    p.text(left, top, "attention: 8 query heads, 2 KV heads, 4 ranks", "title")
    p.text(left, top + 45, "q")
    p.text(left, top + 105, "k, v")
    for rank in range(4):
        x = left + 50 + rank * 92
        for i in range(2):
            p.rect(x + i * 38, top + 26, 34, 28, f"r{rank}")
            p.text(x + i * 38 + 17, top + 45, 2 * rank + i, "on")
        p.rect(x, top + 86, 72, 28, f"r{rank}")
        p.text(x + 36, top + 105, f"{rank // 2}" + (", copy" if rank % 2 else ""), "on")
        p.arrow(x + 36, top + 84, x + 36, top + 58)
        p.text(x + 36, top + 134, f"rank {rank}", "quiet middle")
    for kv in range(2):
        x = left + 50 + kv * 184
        p.rect(x - 6, top + 80, 176, 40, "ring")
        p.text(x + 82, top + 156, "dK, dV: all-reduce", "sent")


def vocabulary(p, left, top):
    """Rows of the table on 4 ranks: the way in and the way out."""
    p.text(left, top, "vocabulary: embedding and loss on 4 ranks", "title")
    for r in range(4):
        p.rect(left, top + 22 + r * 26, 54, 26, f"r{r}")
        p.text(left + 27, top + 39 + r * 26, f"rank {r}", "on")
    p.text(left + 27, top + 148, "table [V, h]", "quiet middle")
    p.text(left + 27, top + 164, "cut by row", "quiet middle")
    for i, owner in enumerate((2, 0, 3, 0)):
        p.rect(left + 108, top + 22 + i * 26, 54, 24, f"r{owner}")
    p.text(left + 135, top + 148, "4 tokens' rows", "quiet middle")
    p.text(left + 135, top + 164, "all-reduce", "sent")
    p.arrow(left + 62, top + 74, left + 100, top + 74)
    for r in range(4):
        p.rect(left + 230 + r * 34, top + 22, 34, 104, f"r{r}")
    p.text(left + 298, top + 148, "logits [T, V]", "quiet middle")
    p.text(left + 298, top + 164, "stay cut", "quiet middle")
    for i, name in enumerate(("maximum", "denominator", "target's logit")):
        p.arrow(left + 372, top + 40 + i * 34, left + 392, top + 40 + i * 34)
        p.text(left + 398, top + 44 + i * 34, name)
    p.text(left + 436, top + 148, "[T] each: all-reduce", "sent")


def tensor_parallel_ends():
    p = Picture(1000, 205, "Heads of attention and rows of the vocabulary on four ranks")
    heads(p, 20, 28)
    vocabulary(p, 470, 28)
    return p


# --- sequence parallelism ---------------------------------------------------------------------------------------------

def region(p, middle, title, names):
    p.text(20, middle - 76, title, "title")
    x = p.matrix(40, middle, (T, H), names[0], "rows", names[1])
    x = p.collective(x, middle, "all-gather")
    x = p.matrix(x, middle, (T, H), names[2], "all", "all positions")
    x = p.sign(x, middle, "×")
    x = p.sign(p.matrix(x, middle, (H, F), names[3], "columns", ""), middle, "…")
    x = p.sign(p.matrix(x, middle, (F, H), names[4], "rows", ""), middle, "=")
    x = p.sign(p.matrix(x, middle, (T, H), "terms", "r0", "rank 0"), middle, "+")
    x = p.matrix(x, middle, (T, H), "terms", "r1", "rank 1")
    x = p.collective(x, middle, "reduce-scatter", 118)
    p.matrix(x, middle, (T, H), names[5], "rows", names[6])


def sequence_parallel():
    p = Picture(740, 380, "Sequence parallelism on two ranks: gather before a region, scatter after it")
    region(p, 108, "forward: gather before the two products, scatter after them",
           ("norm(X)", "own positions", "X", "W₁ᵀ", "W₂ᵀ", "Y", "own positions"))
    region(p, 274, "backward: the gradient is gathered and scattered; X is gathered again for dW",
           ("dY", "own positions", "dY", "W₂", "W₁", "dX", "own positions"))
    p.legend(40, 364, (("r0", "rank 0"), ("r1", "rank 1"), ("all", "the same on every rank"),
                       ("r0 part", "a term of a sum")))
    return p


# --- experts ----------------------------------------------------------------------------------------------------------

def rows_of_experts(p, x, middle, rows, style):
    """Rows by expert, with its number beside them; gives where each expert's middle is."""
    y, middles = middle - sum(rows) / 2 - 12 * (len(rows) - 1) / 2, []
    for number, height in enumerate(rows):
        p.rect(x, y, H, height, style.split()[0])
        if " " in style:
            p.rect(x, y, H, height, style.split()[1])
        if "part" not in style:
            p.text(x - 6, y + height / 2 + 4, number, "end quiet")
        middles.append(y + height / 2)
        y += height + 12
    return middles


def experts():
    """Six tokens with two of three experts each, on two tensor-parallel ranks with sp."""
    p = Picture(1000, 240, "Tokens of two ranks are gathered and sorted by expert; each rank has half of every expert; "
                           "what they make is summed, weighted and put back")
    middle, rows, small = 112, (40, 32, 56), (22, 42)
    p.text(20, middle - 86, "experts on two tensor-parallel ranks with sp: two of three experts a token", "title")
    x = p.matrix(40, middle, (T, H), "X", "rows", "own positions")
    x = p.collective(x, middle, "all-gather")
    x = p.matrix(x, middle, (T, H), "X", "all", "all positions")
    x = p.collective(x, middle, "router", 76) + 14
    middles = rows_of_experts(p, x, middle, rows, "all")
    p.text(x + H / 2, middle + 96, "rows", "quiet middle")
    x += H
    for y in middles:
        at = x
        p.text(at + 12, y + 5, "×", "middle")
        at += 24
        for r in range(2):
            p.rect(at + r * small[1] / 2, y - small[0] / 2, small[1] / 2, small[0], f"r{r}")
        at += small[1]
        p.text(at + 12, y + 5, "…", "middle")
        at += 24
        for r in range(2):
            p.rect(at, y - small[1] / 2 + r * small[1] / 2, small[0], small[1] / 2, f"r{r}")
        p.text(at + small[0] + 14, y + 5, "=", "middle")
    p.text(x + 24 + small[1] / 2, middle + 96, "gate, up", "quiet middle")
    p.text(x + 48 + small[1] + small[0] / 2, middle + 96, "down", "quiet middle")
    x += 48 + small[1] + small[0] + 42
    rows_of_experts(p, x, middle, rows, "r0 part")
    p.text(x + H + 12, middle + 6, "+", "middle big")
    rows_of_experts(p, x + H + 38, middle, rows, "r1 part")
    x = p.collective(x + 2 * H + 38, middle, "all-reduce")
    rows_of_experts(p, x + 14, middle, rows, "all")
    x = p.collective(x + H + 14, middle, "Σ wⱼ", 76)
    p.matrix(x, middle, (T, H), "Y", "rows", "own positions")
    p.legend(40, 230, (("r0", "rank 0"), ("r1", "rank 1"), ("all", "the same on every rank"),
                       ("r0 part", "a term of a sum")))
    return p


# --- context parallelism ----------------------------------------------------------------------------------------------

def ring(p, left, top, title, chunks):
    """chunks[r]: those of the sequence at place r. Rows: queries of a place; columns: hops."""
    p.text(left, top, title, "title")
    size = 52
    p.text(left + 330, top + 22, "pairs", "quiet middle")
    for hop in range(4):
        p.text(left + 66 + hop * (size + 8) + size / 2, top + 22, f"hop {hop}" if hop else "own keys", "quiet middle")
    for place in range(4):
        p.text(left, top + 52 + place * 36, f"place {place}", "quiet")
        pairs = sum(query >= key for query in chunks[place] for keys in chunks for key in keys)
        p.text(left + 330, top + 52 + place * 36, pairs, "middle")
        for hop in range(4):
            source = (place - hop) % 4
            x, y = left + 66 + hop * (size + 8), top + 32 + place * 36
            width = size / len(chunks[source])
            for i, key in enumerate(chunks[source]):
                seen = any(query >= key for query in chunks[place])
                p.rect(x + i * width, y, width, 30, f"r{source}" if seen else "none")
                p.text(x + i * width + width / 2, y + 20, key, "on" if seen else "quiet middle")


def exchange(p, left, top):
    p.text(left, top, "all-to-all: positions for heads", "title")
    for grid in range(2):
        x0 = left + grid * 140
        for position in range(4):
            for head in range(4):
                p.rect(x0 + head * 24, top + 32 + position * 36, 24, 34, f"r{head if grid else position}")
        p.text(x0 + 48, top + 22, "4 heads", "quiet middle")
    p.text(left + 48, top + 192, "by position", "quiet middle")
    p.text(left + 188, top + 192, "by head", "quiet middle")
    p.arrow(left + 104, top + 102, left + 132, top + 102)


def context_parallel_forms():
    p = Picture(1000, 262, "Which keys pass each place of a ring, without zigzag and with it, and the all-to-all")
    ring(p, 20, 28, "ring: keys that pass by", [[0], [1], [2], [3]])
    ring(p, 382, 28, "zigzag: two chunks at each place", [[r, 7 - r] for r in range(4)])
    exchange(p, 754, 28)
    p.text(20, 250, "Numbers: chunks of the sequence, in order. Dashed: a causal mask hides them from all queries of "
           "the place. Pairs: chunks of queries times keys that remain.", "quiet")
    return p


# --- ZeRO -------------------------------------------------------------------------------------------------------------

def shares(p, left, top, stage):
    """What each of four ranks keeps: weights, gradients, optimizer state (2 and 2 and 4 of a height)."""
    p.text(left, top, f"--zero {stage}", "title")
    for rank in range(4):
        x, y = left + rank * 26, top + 14
        for height, from_stage in ((40, 3), (40, 2), (80, 1)):
            p.rect(x, y, 22, height, "none")
            if stage >= from_stage:
                p.rect(x, y + rank * height / 4, 22, height / 4, f"r{rank}")
            else:
                p.rect(x, y, 22, height, f"r{rank}")
            y += height + 6
        p.text(x + 11, y + 12, rank, "quiet middle")


def memory(anyrank, stage):
    done = subprocess.run([anyrank, *CHECK, "--zero", str(stage)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{anyrank} exits {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)["models"][0]["runs"][0]["peak_bytes_per_rank"]


def zero(anyrank):
    p = Picture(1000, 250, "What each stage of ZeRO keeps on four ranks, and the bytes of rank 0")
    for name, y in (("weights", 66), ("gradients", 112), ("optimizer", 178)):
        p.text(80, y, name, "end quiet")
    for stage in range(4):
        shares(p, 92 + stage * 122, 28, stage)
    p.text(80, 232, "rank", "end quiet")
    p.text(610, 28, "MB of rank 0: llama-demo, dp=4, AdamW, fp32", "title")
    styles = ("r0", "r1", "r2", "r3", "all")
    for stage in range(4):
        found, x = memory(anyrank, stage), 672
        y = 44 + stage * 38
        p.text(660, y + 19, f"--zero {stage}", "end")
        for (kind, word), style in zip(KINDS, styles):
            width = found[kind] / MB * 4.2
            p.rect(x, y, width, 28, style, f"{word}: {found[kind] / MB:.1f} MB")
            if width > 24:
                p.text(x + width / 2, y + 18, f"{found[kind] / MB:.0f}", "on")
            x += width
        p.text(x + 6, y + 18, f"{sum(found[kind] for kind, _ in KINDS) / MB:.0f}")
    p.legend(612, 214, [(style, word) for style, (_, word) in zip(styles[:3], KINDS)])
    p.legend(612, 238, [(style, word) for style, (_, word) in zip(styles[3:], KINDS[3:])])
    return p


def main():
    anyrank = sys.argv[1] if len(sys.argv) > 1 else "build/anyrank"
    folder = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/pictures"
    pictures = {"ranks": ranks(), "tensor-parallel": tensor_parallel(), "tensor-parallel-ends": tensor_parallel_ends(),
                "sequence-parallel": sequence_parallel(), "experts": experts(),
                "context-parallel-forms": context_parallel_forms(), "zero": zero(anyrank)}
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
