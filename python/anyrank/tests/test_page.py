# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures of the command's JSON: what they show, that no name leaves its place, that nothing is loaded."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import typing
import unittest
import xml.etree.ElementTree
from unittest import mock

import anyrank
from anyrank import AnyrankError, page
from anyrank.page import _losses
from anyrank.page.__main__ import main
from anyrank.tests import FolderCase

HOSTILE = "</script><script>alert(1)</script> \x01 &amp; \u00e9"
SVG = "{http://www.w3.org/2000/svg}"
Json = typing.Dict[str, typing.Any]


def data_of(text: str) -> Json:
    """The data of a page, whose two scripts are its own, and which loads nothing."""
    assert not re.search(r"https?:|\bsrc\s*=|\bhref\s*=|url\(|@import|\bfetch\b|innerHTML|@\w+\.(css|js)@", text)
    assert text.count("<script") == 2 and text.count("</script") == 2 and "default-src 'none'" in text
    found: Json = json.loads(text.split('id="data">')[1].split("</script>")[0])
    return found


def drawn(text: str) -> tuple[list[str], dict[str, str]]:
    """The texts of a picture, and the paths of its lines by class."""
    root = xml.etree.ElementTree.fromstring(text)
    assert not re.search(r"http|url\(|<script|@import", text.replace("http://www.w3.org/2000/svg", ""))
    paths = [(path.get("class") or "", path.get("d") or "") for path in root.iter(SVG + "path")]
    lines = {kind: path for kind, path in paths if "h" not in path}
    return [label.text or "" for label in root.iter(SVG + "text")], lines


def trace_of(name: str) -> Json:
    """Two ranks and one all-reduce, for which rank 0 waits 4 microseconds; rank 0 has a queue that sends."""
    events: list[Json] = []
    for pid, tid, index, track in ((0, 1, 0, "compute"), (0, 2, 1, "communication"), (0, 3, 2, name),
                                   (1, 5, 0, "compute"), (1, 6, 1, "communication")):
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": index}})

    def add(track: tuple[int, int], cat: str, ts: float, dur: float, title: str, args: Json) -> None:
        events.append({"ph": "X", "pid": track[0], "tid": track[1], "cat": cat, "ts": ts, "dur": dur, "name": title,
                       "args": args})

    call: Json = {"op": "all_reduce", "tag": name, "reduction": "sum", "dtype": "F32", "count": 8, "bytes read": 16,
            "bytes written": 16, "group": 1, "sequence": 5, "ranks": "0-1", "group size": 2, "came last": 1}
    add((0, 1), "span", 0.0, 20.5, "step", {})
    add((0, 1), "span", 0.25, 3.75, name, {})
    add((0, 1), "work", 1.0, 2.0, "work", {"flops": 3e6})
    add((0, 1), "span", 4.0, 2.0, "b", {})
    add((0, 1), "queue", 16.0, 1.0, "waits for a queue", {"queue": name})
    add((0, 2), "collective", 6.0, 9.0, "all_reduce", {**call, "waiting_us": 4.0, "moving_us": 5.0})
    add((0, 2), "waiting", 6.0, 4.0, "waiting", {"for rank": 1})
    add((0, 3), "transfer", 15.0, 1.0041, "from rank 1", {"from": 1, "bytes": 7})  # as the command writes 1004 ns
    add((1, 6), "collective", 10.0, 6.0, "all_reduce", {**call, "waiting_us": 0.0, "moving_us": 6.0})
    events.append({"ph": "C", "pid": 0, "name": "bytes in flight", "ts": 10.0, "args": {"bytes": 32}})
    return {"otherData": {"title": name, "clock": "virtual", "cut": False, "summary": None}, "traceEvents": events}


class Timeline(unittest.TestCase):
    def test_lanes_have_their_records_with_depths_and_times(self) -> None:
        found = data_of(page.text_of(trace_of("a")))
        self.assertEqual((found["ranks"], found["end"], found["clock"]), (2, 20500, "virtual"))
        self.assertEqual([(lane["rank"], lane["track"], lane["name"]) for lane in found["lanes"]],
                         [(0, 0, ""), (0, 1, "a"), (1, 0, "")])
        self.assertEqual(found["lanes"][0]["records"], [
            ["s", 0, 20500, 0, "step"], ["s", 250, 3750, 1, "a"], ["w", 1000, 2000, 2, 3e6], ["s", 4000, 2000, 1, "b"],
            ["c", 6000, 9000, 1, 4000, 0, "all_reduce", "a", 16, 16], ["q", 16000, 1000, 1, "a"]])
        self.assertEqual(found["lanes"][1]["records"], [["t", 15000, 1004, 0, 1, 7]])
        self.assertEqual(found["rendezvous"], [[1, 5, "0-1", 2, "F32", "sum", 8, 1, 10000, 0]])

    def test_a_collective_that_broke_off_has_each_member_s_own_call(self) -> None:
        trace = trace_of("a")
        for event in trace["traceEvents"]:
            if event.get("cat") == "collective" and event["pid"] == 1:
                event["args"].update({"broken off": True, "count": 9})
        found = data_of(page.text_of(trace))
        self.assertEqual(found["lanes"][2]["records"][0][10:], ["F32", "sum", 9, 0])
        self.assertEqual(len(found["lanes"][0]["records"][4]), 10)

    def test_a_name_of_others_cannot_leave_the_data(self) -> None:
        found = data_of(page.text_of(trace_of(HOSTILE)))
        self.assertEqual((found["title"], found["lanes"][0]["records"][1][4]), (HOSTILE, HOSTILE))

    def test_a_run_of_the_command_has_its_title_and_critical_path(self) -> None:
        with contextlib.ExitStack() as stack:
            folder = FolderCase()
            stack.callback(folder.doCleanups)
            folder.setUp()
            out = folder.path / "run.json"
            anyrank.check("llama-demo", tp=2, steps=1, skip_f64=True, cluster="h100", trace=out)
            found = data_of(page.write(json.loads(out.read_text()), folder.path / "run.html").read_text())
        self.assertEqual((found["title"], found["ranks"]), ("llama-demo, tp=2", 2))
        path = found["summary"]["path"]
        self.assertAlmostEqual(sum(path.values()), found["end"] * 1e-9, delta=1e-9)
        self.assertTrue(found["summary"]["longest"] and found["rendezvous"])


def run_of(losses: list[typing.Any], **more: typing.Any) -> Json:
    return {"command": "train", "model": "m", "layout": {"dp": 2}, "result": "done", "batch": 4, "seq": 8,
            "steps": len(losses), "first_step": 1, "loss": losses, "lr": [0.001] * len(losses),
            "weights_hash": "0123456789abcdef", **more}


class Losses(unittest.TestCase):
    def test_every_point_is_drawn_and_a_gap_breaks_the_line(self) -> None:
        texts, lines = drawn(page.text_of(run_of([1, 2, "NaN", 4, 5, "Infinity"])))
        # 1 and 5 are the lowest and the highest tick: pixels 390 and 66.
        self.assertEqual(lines["faint"], "M70.00 390.00L250.00 309.00M610.00 147.00L790.00 66.00")
        self.assertIn("m, dp=2", texts)
        self.assertIn("4 sequences of 8 tokens a step; weights after step 6: 0123456789ab", texts)
        self.assertEqual([name for name in texts if name in ("loss", "learning rate", "smoothed", "resumed")],
                         ["loss", "learning rate", "loss"])  # of the axis, and the legend from the right

    def test_a_run_of_the_command_has_a_point_for_each_step(self) -> None:
        report = anyrank.train("llama-demo", steps=25, batch=2, seq=8)
        texts, lines = drawn(page.text_of(report.data))
        points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", lines["faint"])]
        self.assertEqual((len(points), points), (25, sorted(points)))
        lowest = min(range(25), key=lambda i: report.loss[i])
        self.assertEqual(points[lowest][1], max(y for _, y in points))  # down is a greater y
        self.assertIn("smoothed", texts)
        self.assertTrue(any((report.weights_hash or "?")[:12] in text for text in texts))

    def test_a_resumed_run_has_the_whole_curve_and_a_mark(self) -> None:
        texts, lines = drawn(page.text_of(run_of([4, 3, 2, 1], first_step=3, lr=[0.1, 0.2])))
        self.assertEqual(lines["faint"].count("L"), 3)
        self.assertEqual(lines["mark"].split()[0], "M430.0")  # half way from 1 to 4
        self.assertIn("resumed", texts)

    def test_a_run_that_diverged_is_smoothed_where_it_is_known(self) -> None:
        texts, lines = drawn(page.text_of(run_of([3.0] * 30 + [None], weights_hash=None, result="diverged")))
        self.assertEqual(lines["bold"].count("L"), 29)
        self.assertTrue(any(text.endswith("diverged after step 31") for text in texts))

    def test_a_name_of_others_stays_text(self) -> None:
        texts, _ = drawn(page.text_of(run_of([1, 2], model=HOSTILE + "\x7f")))
        self.assertIn(f"{HOSTILE.replace(chr(1), '?')}?, dp=2", texts)

    def test_one_point_and_a_constant_have_axes(self) -> None:
        text = page.text_of(run_of([0.0]))
        self.assertNotRegex(text, "nan|inf\\b")
        self.assertGreaterEqual(text.count('class="grid"'), 3)

    def test_ticks_are_round_and_there_are_4_to_10(self) -> None:
        for extent in (1e-9, 0.07, 0.5, 1, 3, 7, 10, 99, 100, 123456, 1e12):
            tick = _losses.tick(extent)
            digit = tick / 10 ** math.floor(math.log10(tick * 1.0001))
            self.assertAlmostEqual(min(abs(digit - x) for x in (1, 2, 5)), 0)
            self.assertTrue(4 - 1e-9 <= extent / tick <= 10 + 1e-9, extent)

    def test_smoothing_weighs_by_distance_and_does_not_lag(self) -> None:
        for values, window, means in (([3.0] * 4, 2.0, [3.0] * 4),
                                      ([0.0, 1.0, 1.0], 3.0, [0.75 / 1.75, 1.5 / 2, 1.5 / 1.75])):  # 1, 1/2, 1/4
            for value, expected in zip(_losses.smoothed(values, window), means):
                self.assertAlmostEqual(value, expected, delta=1e-15)
        self.assertAlmostEqual(_losses.smoothed([10 - 0.1 * i for i in range(101)], 6)[50], 5, delta=1e-6)

    def test_a_long_line_has_its_first_and_last_point(self) -> None:
        _, lines = drawn(page.text_of(run_of(list(range(50001)))))
        self.assertTrue(lines["faint"].startswith("M70.00 "))
        self.assertIn("L790.00 ", lines["faint"])
        self.assertTrue(10000 <= lines["faint"].count("L") <= 20001)


class Command(FolderCase):
    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(list(arguments))
        return status, out.getvalue(), err.getvalue()

    def test_the_page_is_beside_its_json_or_where_it_is_asked_for(self) -> None:
        files = {"trace.json": trace_of("a"), "train.json": run_of([1, 2]),
                 "plan.json": anyrank.plan("llama-demo", gpus=4).data}
        for name, found in files.items():
            (self.path / name).write_text(json.dumps(found), encoding="utf-8")
            status, out, _ = self.run_main(str(self.path / name))
            end = ".svg" if name == "train.json" else ".html"
            self.assertEqual((status, out.strip()), (0, str((self.path / name).with_suffix(end))))
        self.assertEqual(data_of((self.path / "plan.html").read_text(encoding="utf-8")), files["plan.json"])
        asked = self.path / "other.svg"
        with mock.patch("sys.stdin", io.StringIO(json.dumps(files["plan.json"]))):
            self.assertEqual(self.run_main("-", "--out", str(asked))[0], 0)
        self.assertIn("llama-demo on 4 GPUs", drawn(asked.read_text(encoding="utf-8"))[0])

    def test_what_has_no_page_is_refused_with_what_has(self) -> None:
        given = self.path / "x.json"
        for text, out, says in (("{", "y.html", "x.json: "), ("[]", "y.html", "expected an object"),
                                ("{}", "y.html", "that of --trace"),
                                ('{"command": "lint"}', "y.html", "anyrank lint has no page"),
                                ('{"traceEvents": []}', "y.html", "that anyrank did not write"),
                                (json.dumps(run_of([1])), "y.html", "expected .svg of a training run"),
                                (json.dumps(trace_of("a")), "y.svg", "expected .html of a trace"),
                                (json.dumps(run_of([])), "y.svg", "nothing to draw")):
            given.write_text(text, encoding="utf-8")
            status, _, err = self.run_main(str(given), "--out", str(self.path / out))
            self.assertEqual(status, 2)
            self.assertIn(says, err)
            self.assertFalse((self.path / out).exists())
        self.assertIn("nowhere.json", self.run_main(str(self.path / "nowhere.json"))[2])
        with mock.patch("sys.stdin", io.StringIO("{}")):
            self.assertIn("--out", self.run_main("-")[2])

    def test_a_number_that_json_lacks_makes_no_page(self) -> None:
        trace = trace_of("a")
        trace["traceEvents"][12]["args"]["flops"] = math.nan
        with self.assertRaises((ValueError, AnyrankError)):
            page.text_of(trace)


def comparison() -> Json:
    """A report with all its rows: a difference, one that is the same, one of a name that would end the script."""
    head: Json = {"pass": "g", "step": 1, "dtype": "F32", "other_dtype": "F32", "shape": [2, 3], "other_shape": [2, 3]}
    off = {**head, "tensor": "a.weight:grad", "state": "different", "ratio": "Infinity", "bins": [0] * 33 + [3],
           "map": [0.0, 2.5, "Infinity", 0.0, 1.0, 0.0], "map_shape": [2, 3], "matrix": [2, 3]}
    rows = [off, {**head, "tensor": "b", "state": "same"}, {**head, "tensor": HOSTILE, "state": "missing"},
            {**head, "tensor": "model.\u202ereyal\u2069.w", "state": "unexpected"}]
    return {"command": "verify", "result": "different", "rule": {"name": "bits"}, "rows": rows, "worst": [off],
            "first": {**off, "pattern": "3 of 6 elements", "hint": "a missing all-reduce"},
            "explanation": {"ranks": [1]}, "ranks": 4, "mesh": [["tp", 4]]}


class Comparison(unittest.TestCase):
    def test_the_page_has_the_report(self) -> None:
        data = data_of(page.text_of(comparison()))
        first = data["rows"][0]
        self.assertEqual((data["first"], data["worst"], len(data["rows"])), (0, 0, 4))
        self.assertEqual((first["hint"], first["ratio"]), ("a missing all-reduce", "Infinity"))
        self.assertEqual((first["map"], first["map_range"]), ("0yz010", [1.0, 2.5]))  # highest, not finite, lowest
        self.assertEqual(data["explanation"]["ranks"], [1])

    def test_names_of_others_neither_leave_the_data_nor_turn_it(self) -> None:
        text = page.text_of(comparison())
        self.assertNotIn("<script>alert(1)", text)
        self.assertIn("model.?reyal?.w", text)
        self.assertEqual(data_of(text)["rows"][2]["tensor"], HOSTILE)

    def test_maps_of_many_tensors_are_coarse(self) -> None:
        report = comparison()
        cells, size = [1.0] * (48 * 96), [48, 96]
        report["rows"] += [{**report["rows"][0], "tensor": f"t.{i}", "map": cells, "map_shape": size}
                           for i in range(300)]
        rows = data_of(page.text_of(report))["rows"]
        self.assertEqual((len(rows[10]["map"]), rows[10]["map_shape"]), (48 * 96, size))
        self.assertLess(sum(len(row.get("map", "")) for row in rows[40:]), 400_000)
