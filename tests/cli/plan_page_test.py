#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the pages and pictures that anyrank.page makes of `anyrank plan --json`: that they show what the JSON has, with
nothing from outside."""

import json
import pathlib
import re
import sys
import unittest
import xml.etree.ElementTree

sys.path[:0] = [sys.path[0] + "/../support", sys.path[0] + "/../../python"]
import page_check  # noqa: E402
from anyrank import AnyrankError, page  # noqa: E402
from command import ROOT, Case  # noqa: E402

MODEL = str(ROOT / "tests/golden/llama-gqa-tiny")
SEARCH = ("--gpus", 8, "--batch", 16, "--seq", 8)
DEPTH = ("--tp", 2, "--pp", 2, "--sp", "--batch", 4, "--seq", 8)
SVG = "{http://www.w3.org/2000/svg}"
KINDS = (ROOT / "python/anyrank/page/plan_kinds.css").read_text(encoding="utf-8")


def kinds_of(plan):
    """{class} of everything that a layout has bytes or seconds of, also none."""
    return {f"{what}-{kind.replace(' ', '-')}" for layout in plan["layouts"] for what in ("memory", "time")
            for account in layout.get(what, {}).values() if account
            for kind, value in account.items() if isinstance(value, float) and kind not in ("sum", "hidden")}


class PlanTest(Case):
    subcommand = ("plan",)

    def written(self, *arguments, model=MODEL):
        """The JSON, the page and the picture of one run."""
        self.done(model, *arguments, "--json", "p.json")
        plan = json.loads((self.folder / "p.json").read_text(encoding="utf-8"))
        return plan, page.text_of(plan), page.text_of(plan, ".svg")


class Page(PlanTest):
    def test_pages_hold_what_json_holds_and_nothing_from_outside(self):
        for arguments in (SEARCH, (*SEARCH, "--all", "--top", 3), DEPTH):
            with self.subTest(arguments):
                plan, text, _ = self.written(*arguments)
                self.assertEqual(page_check.problems_of(text), [])
                self.assertEqual(page_check.data_of(text), plan)

    def test_the_script_reads_only_members_that_the_json_has(self):
        plan, text, _ = self.written(*SEARCH, "--all", "--top", 3)
        deep = next(f for f in plan["layouts"] if f["legal"] and "time" in f)
        script = page_check.scripts_of(text)[1]
        for name, members in (("report", plan), ("report.cluster", plan["cluster"]), ("searched", plan["searched"]),
                              ("f.layout", deep["layout"]), ("l", deep["layout"]),
                              ("m", deep["time"]["production"]["moved"][0])):
            used = set(re.findall(rf"(?<![\w.]){re.escape(name)}\.(\w+)(?!\w|\()", script))  # no methods
            self.assertTrue(used, name)
            self.assertEqual(used - set(members), set(), name)
        used = set(re.findall(r"(?<![\w.])f\.(\w+)", script))
        self.assertEqual(used - set(deep), {"at"})  # which the page adds

    def test_every_kind_has_a_colour_by_light_and_in_the_dark(self):
        plan, text, picture = self.written(*SEARCH, "--top", 0, model="mixtral-demo")
        light, dark = KINDS.split("@media (prefers-color-scheme: dark)")
        for kind in kinds_of(plan) | {"memory-sum", "time-sum", "bar-end"}:
            for scheme in (light, dark):
                self.assertEqual(len(re.findall(rf"\.{kind}\b(?!-)[^{{]*{{ fill: #", scheme)), 1, kind)
        self.assertIn(KINDS, text)
        self.assertIn(KINDS, picture)
        for scheme in (light, dark):  # kinds that can be next to each other differ
            for what in ("memory", "time"):
                colours = re.findall(rf"\.{what}-(?!sum)[\w-]+ {{ fill: (#\w+)", scheme)
                self.assertEqual(len(colours), len(set(colours)))

    def test_layouts_have_names_of_their_own(self):
        plan, _, _ = self.written(*SEARCH, "--all", "--top", 3)
        names = [f["name"] for f in plan["layouts"]]
        self.assertEqual(len(names), len(set(names)))

    def test_names_of_others_cannot_leave_the_data(self):
        odd = self.folder / "kept <script>alert(1)<!-- &"
        odd.mkdir()
        (odd / "config.json").write_bytes((pathlib.Path(MODEL) / "config.json").read_bytes())
        plan, text, picture = self.written(*DEPTH, model=odd)
        self.assertIn("<script>", plan["model"])
        self.assertEqual(page_check.problems_of(text), [])
        self.assertEqual(page_check.data_of(text)["model"], plan["model"])
        root = xml.etree.ElementTree.fromstring(picture)
        self.assertIn(plan["model"], root.find(SVG + "title").text)
        self.assertEqual(list(root.iter(SVG + "script")), [])


class Picture(PlanTest):
    def rows_of(self, picture):
        """{y: [(class, width)]} of the bars, which are 16 high."""
        rows = {}
        for rect in xml.etree.ElementTree.fromstring(picture).iter(SVG + "rect"):
            if rect.get("height") == "16":
                rows.setdefault(float(rect.get("y")), []).append((rect.get("class"), float(rect.get("width"))))
        return [rows[y] for y in sorted(rows)]

    def test_bars_are_as_long_as_the_numbers_are_large(self):
        for arguments in ((*SEARCH, "--top", 5), DEPTH):
            plan, _, picture = self.written(*arguments)
            deep = [f for f in plan["layouts"] if "time" in f]
            rows = self.rows_of(picture)
            self.assertEqual(len(rows), len(deep))
            for what in ("memory", "time"):
                most = max(f[what]["production"]["sum"] for f in deep)
                for f, row in zip(deep, rows):
                    expected = {f"{what}-{kind.replace(' ', '-')}": 190 * x / most for kind, x in f[what]["production"].items()
                                if isinstance(x, (int, float)) and x > 0 and kind not in ("sum", "hidden")}
                    drawn = dict(bar for bar in row if bar[0].startswith(what))
                    self.assertEqual(set(drawn), set(expected))
                    for kind, width in drawn.items():
                        self.assertAlmostEqual(width, expected[kind], delta=0.006)  # two decimals are written

    def test_pictures_say_what_they_show(self):
        plan, _, picture = self.written(*SEARCH, "--top", 2)
        root = xml.etree.ElementTree.fromstring(picture)
        texts = [text.text for text in root.iter(SVG + "text")]
        self.assertEqual(root.find(SVG + "title").text, f"{plan['model']} on 8 GPUs")
        for f in plan["layouts"][:2]:
            self.assertIn(f["name"], texts)
        legend = [e.get("class") for e in root.iter(SVG + "rect") if e.get("height") == "12"]
        order = [f"{what}-{kind.replace(' ', '-')}" for what in ("memory", "time") for kind in plan["layouts"][0][what]["production"]]
        self.assertEqual(legend, [kind for kind in order if kind in legend])
        self.assertEqual({e.tag for e in root.iter()}, {SVG + t for t in ("svg", "title", "style", "rect", "text")})

    def test_the_limit_is_drawn_where_layouts_are_near_it(self):
        _, _, picture = self.written(*DEPTH, "--cluster", "h100 flops=989T")  # without a reserve of it
        self.assertNotIn('class="limit"', picture)  # far away
        most = json.loads((self.folder / "p.json").read_text())["layouts"][0]["bytes"]
        plan, _, picture = self.written(*DEPTH, "--cluster", f"h100 flops=989T memory={most / 2e6:.6f}MB")
        self.assertFalse(plan["layouts"][0]["fits"])
        at = re.search(r'class="limit" d="M([\d.]+) ', picture)
        self.assertAlmostEqual(float(at.group(1)), 560 + 190 / 2, delta=0.06)
        _, _, picture = self.written(*DEPTH, "--cluster", f"h100 flops=989T memory={most * 1.5e-6:.6f}MB")
        self.assertIn('class="limit" d="M750.0 ', picture)
        self.assertAlmostEqual(sum(w for c, w in self.rows_of(picture)[0] if c.startswith("memory")), 190 / 1.5, delta=0.06)


class Refusals(PlanTest):
    def test_the_json_of_other_questions_has_no_page(self):
        for arguments in (("--flow", "--tp", 2), ("--gpus", 8, "--table", "decision"), ("--pipeline", "--pp", 2)):
            with self.subTest(arguments), self.assertRaisesRegex(AnyrankError, "anyrank plan has no page"):
                self.written(*arguments)

    def test_without_a_legal_layout_there_is_a_page_but_no_picture(self):
        self.done(MODEL, "--gpus", 3, "--tp", 3, "--batch", 3, "--seq", 9, "--all", "--json", "x.json")
        plan = json.loads((self.folder / "x.json").read_text(encoding="utf-8"))
        with self.assertRaisesRegex(AnyrankError, "legal"):
            page.text_of(plan, ".svg")
        self.assertEqual(page_check.problems_of(page.text_of(plan)), [])
        self.assertEqual([f["legal"] for f in plan["layouts"]], [False] * len(plan["layouts"]))
        self.assertTrue(all(f["reason"] for f in plan["layouts"]))


if __name__ == "__main__":
    unittest.main()
