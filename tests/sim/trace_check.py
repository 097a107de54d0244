#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks traces against the rules of Chrome's JSON as Perfetto reads it, and against what the ranks did.

    tests/sim/trace_check.py FOLDER

FOLDER holds what trace_main wrote: NAME.json, and a `list` with a line of JSON for each. The page that anyrank.page makes
of each is checked too. Prints every problem; exit status 1 if there is one. tests/sim/trace_check_test.py shows that each
rule refuses what breaks it.
"""

import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "python")]
import page_check  # noqa: E402
from anyrank.page import text_of  # noqa: E402

ODD = "\"q\" \\ \t\x01\x7f </script><!-- \u00e9\u4e16\U0001f600 \ufffd\ufffd\ufffd"
ELEMENT = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1}
FIELDS = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "cat"},
    "s": {"pid", "tid", "ts", "id", "name", "cat"},
    "f": {"pid", "tid", "ts", "id", "name", "cat", "bp"},
    "C": {"pid", "ts", "name", "args"},
    "i": {"pid", "tid", "ts", "name", "s"},
}
COLLECTIVE = {"op", "tag", "dtype", "count", "bytes read", "bytes written", "group", "sequence", "ranks", "group size",
              "came last", "waiting_us", "moving_us"}
COUNTER = "bytes in flight"


def ns(us):
    """Nanoseconds, as Perfetto's reader makes them: (int64_t)(us * 1000.0)."""
    return int(us * 1000.0)


def ranks_of(text):
    """The ranks in "0-2, 5"."""
    ranks = []
    for part in text.split(", "):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


class Checker:
    """The problems of one trace."""

    def __init__(self, trace):
        self.problems = []
        self.events = trace.get("traceEvents", [])
        self.trace = trace
        self.slices = collections.defaultdict(list)  # (pid, tid) -> [event], in the order of the file
        for event in self.events:
            if event.get("ph") == "X":
                self.slices[event.get("pid"), event.get("tid")].append(event)

    def say(self, text):
        if len(self.problems) < 20:
            self.problems.append(text)

    def expect(self, right, text):
        if not right:
            self.say(text)
        return right

    def run(self):
        if not self.fields():
            return self.problems  # nothing else can be read
        self.names()
        self.nesting()
        self.flows()
        self.meetings()
        self.counters()
        return self.problems

    # --- the format -----------------------------------------------------------------------------------------------

    def fields(self):
        self.expect(self.trace.get("displayTimeUnit") == "ns", "displayTimeUnit is not ns")
        self.expect(self.trace.get("otherData", {}).get("clock") in ("real", "virtual"), "no clock is named")
        self.expect(isinstance(self.events, list) and self.events, "no events")
        for event in self.events:
            kind = event.get("ph")
            if not self.expect(kind in FIELDS, f"an event of kind {kind}"):
                continue
            missing = FIELDS[kind] - event.keys()
            self.expect(not missing, f"{kind} without {sorted(missing)}: {event}")
            for key in ("ts", "dur"):
                value = event.get(key, 0)
                self.expect(isinstance(value, (int, float)) and value >= 0, f"{key} {value} of {event}")
            for key in ("pid", "tid"):
                self.expect(isinstance(event.get(key, 0), int), f"{key} of {event}")
        return not self.problems

    def names(self):
        named, indexed = collections.Counter(), collections.Counter()
        for event in self.events:
            if event["ph"] == "M":
                key = (event["pid"], event.get("tid"))
                named[key] += event["name"] in ("process_name", "thread_name")
                indexed[key] += event["name"] in ("process_sort_index", "thread_sort_index")
                if event["name"] == "process_name" and re.fullmatch(r"rank \d+", event["args"]["name"]):
                    self.expect(event["args"]["name"] == f"rank {event['pid']}", f"process {event['pid']} is called "
                                f"{event['args']['name']}")
        tids = [tid for _, tid in named if tid is not None]
        self.expect(len(tids) == len(set(tids)) and 0 not in tids, "track numbers are 0 or come twice")
        for key in set(named) | set(self.slices) | {(e["pid"], None) for e in self.events}:
            self.expect(named[key] == 1 and indexed[key] == 1, f"process and track {key}: {named[key]} names")

    def nesting(self):
        first = None
        for track, slices in self.slices.items():
            open_until, last = [], 0
            for event in slices:
                begin = ns(event["ts"])
                end = begin + ns(event["dur"])
                first = begin if first is None else min(first, begin)
                self.expect(begin >= last, f"{track}: {event['name']} begins at {begin} ns, after one at {last}")
                last = max(last, begin)
                while open_until and open_until[-1] <= begin:
                    open_until.pop()
                if self.expect(not open_until or end <= open_until[-1],
                               f"{track}: {event['name']} ({begin} to {end} ns) does not nest"):
                    open_until.append(end)
        self.expect(first in (None, 0), f"the first slice begins at {first} ns")

    def enclosing(self, event):
        """The innermost slice that an end of an arrow binds to."""
        at, found = ns(event["ts"]), None
        for candidate in self.slices[event["pid"], event["tid"]]:
            if ns(candidate["ts"]) <= at < ns(candidate["ts"]) + ns(candidate["dur"]):
                found = candidate
        return found

    def flows(self):
        ends = collections.defaultdict(list)
        for event in self.events:
            if event["ph"] in "sf":
                ends[event["id"]].append(event)
        for number, pair in ends.items():
            if not self.expect([e["ph"] for e in pair] == ["s", "f"], f"arrow {number} has ends {[e['ph'] for e in pair]}"):
                continue
            start, finish = pair
            self.expect((start["name"], start["cat"]) == (finish["name"], finish["cat"]), f"arrow {number} has two names")
            self.expect(finish["bp"] == "e", f"arrow {number} binds to the next slice")
            self.expect(start["ts"] <= finish["ts"], f"arrow {number} ends before it begins")
            self.expect((start["pid"], start["tid"]) != (finish["pid"], finish["tid"]), f"arrow {number} stays on its track")
            source, target = self.enclosing(start), self.enclosing(finish)
            if self.expect(source and target, f"arrow {number} is bound to no slice: {pair}"):
                self.arrow(start, source, finish, target)

    def arrow(self, start, source, finish, target):
        """What an arrow says is so."""
        if start["cat"] != "last":
            return
        a, b = source.get("args", {}), target.get("args", {})
        if source["cat"] == "transfer":  # the first step of the one that came last begins at once
            return
        self.expect(all(a.get(k) == b.get(k) and k in a for k in ("group", "sequence")), f"an arrow between {a} and {b}")
        self.expect(a.get("came last") == start["pid"] and b.get("waiting_us", 0) > 0, f"nobody waited: {start} {finish}")

    # --- the collectives ------------------------------------------------------------------------------------------

    def meetings(self):
        self.members = collections.defaultdict(list)
        for track, slices in self.slices.items():
            for i, event in enumerate(slices):
                if event["cat"] != "collective":
                    continue
                a = event.get("args", {})
                missing = COLLECTIVE - a.keys()
                if not self.expect(not missing, f"a collective without {sorted(missing)}"):
                    continue
                self.members[a["group"], a["sequence"]].append(event)
                waiting, moving = ns(a["waiting_us"]), ns(a["moving_us"])
                self.expect(waiting + moving == ns(event["dur"]), f"{waiting} + {moving} ns of {event}")
                child = slices[i + 1] if i + 1 < len(slices) and slices[i + 1]["cat"] == "waiting" else None
                shown = (ns(child["ts"]), ns(child["dur"])) if child else (ns(event["ts"]), 0)
                self.expect(shown == (ns(event["ts"]), waiting), f"{track}: {shown} ns of waiting shown of {event}")
        for key, members in self.members.items():
            self.meeting(key, members)

    def meeting(self, key, members):
        a = members[0]["args"]
        broken = any(event["args"].get("broken off") for event in members)
        for event in members:
            b = event["args"]
            self.expect(event["name"] == b["op"], f"{event['name']} is called {b['op']}")
            for field in () if broken else ("dtype", "count", "ranks", "group size", "came last", "reduction", "root"):
                self.expect(a.get(field) == b.get(field), f"{field} of {key} differs: {a.get(field)}, {b.get(field)}")
        ops = sorted({event["args"]["op"] for event in members})
        self.expect(len(ops) == 1 or ops == ["recv", "send"], f"{key} is {ops}")
        pids = [event["pid"] for event in members]
        self.expect(pids == sorted(set(pids)) and pids == ranks_of(a["ranks"]), f"{key} on {pids}, not on {a['ranks']}")
        self.expect(a["came last"] in pids, f"{key}: {a['came last']} came last")
        if broken:
            return
        self.expect(len(pids) == a["group size"], f"{key} of {a['group size']} ranks is on {pids}")
        came = max(ns(event["ts"]) for event in members)
        for event in members:
            begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            self.expect(ns(event["args"]["waiting_us"]) == max(0, min(came, end) - begin), f"waiting of {event}")
            self.expect(event["pid"] != a["came last"] or begin == came, f"{key}: rank {event['pid']} did not come last")
        self.bytes(key, a, len(members), sum(e["args"]["bytes read"] + e["args"]["bytes written"] for e in members))

    def bytes(self, key, a, n, moved):
        data = a["count"] * ELEMENT.get(a["dtype"], 1)
        closed = {"all_reduce": 2 * (n - 1) * data, "reduce_scatter": (n - 1) * data, "all_gather": (n - 1) * data,
                  "broadcast": (n - 1) * data, "send": data, "recv": data, "barrier": 0}
        if a["op"] in closed:
            self.expect(moved == closed[a["op"]], f"{key}: {a['op']} of {data} bytes on {n} ranks moved {moved} bytes, "
                        f"{closed[a['op']]} expected")

    # --- bytes in flight ------------------------------------------------------------------------------------------

    def counters(self):
        """Each counter is the sum of what its collectives move, at every moment."""
        shown = collections.defaultdict(list)
        for event in self.events:
            if event["ph"] == "C" and self.expect(event["name"] == COUNTER, f"a counter {event['name']}"):
                shown[event["pid"]].append((ns(event["ts"]), event["args"]["bytes"]))
        changes = collections.defaultdict(list)
        cluster = next((e["pid"] for e in self.events if e["ph"] == "M" and e["name"] == "process_name" and
                        e["args"]["name"] == "cluster"), None)
        for members in self.members.values():
            for event in members:
                a = event["args"]
                moved, begin = a["bytes read"] + a["bytes written"], ns(event["ts"]) + ns(a["waiting_us"])
                end = ns(event["ts"]) + ns(event["dur"])
                if moved and end > begin:
                    for pid in (event["pid"], cluster):
                        changes[pid] += [(begin, moved), (end, -moved)]
        for pid in set(shown) | set(changes):
            values = shown[pid]
            self.expect(all(a[0] <= b[0] for a, b in zip(values, values[1:])), f"counter of {pid} goes back in time")
            self.expect(all(v >= 0 for _, v in values), f"counter of {pid} is negative")
            self.expect(not values or values[-1][1] == 0, f"counter of {pid} ends at {values[-1:]}")
            self.expect(self.steps(changes[pid]) == self.plain(values), f"counter of {pid} is not what its collectives move")

    @staticmethod
    def steps(changes):
        now, steps = 0, {}
        for at, change in sorted(changes):
            now += change
            steps[at] = now
        return Checker.plain(sorted(steps.items()))

    @staticmethod
    def plain(values):
        """The last value of each moment, where it differs from the one before."""
        kept, before = [], 0
        for at, value in sorted(dict(values).items()):
            if value != before:
                kept.append((at, value))
            before = value
        return kept


def check_run(checker, expected):
    """What the ranks of trace_main did is there, and the outermost span covers it."""
    pids = sorted({pid for pid, _ in checker.slices})
    if not checker.expect(pids == list(range(expected["ranks"])), f"ranks {pids}"):
        return
    checker.expect(checker.trace["otherData"]["clock"] == expected["clock"], "the other clock")
    checker.expect(checker.trace["otherData"]["cut"] == expected["cut"], "cut or not cut")
    marked = any(e["ph"] == "i" and "memory ran out" in e["name"] for e in checker.events)
    checker.expect(marked == expected["cut"], "a cut that is not marked, or no cut that is")
    if expected["cut"]:
        return
    for pid in range(expected["ranks"]):
        slices = [e for (p, _), track in checker.slices.items() if p == pid for e in track]
        calls = [e for e in slices if e["cat"] == "collective" and not e["args"].get("broken off")]
        spans = [e for e in slices if e["cat"] == "span"]
        checker.expect(len(calls) == expected["collectives"][pid], f"rank {pid}: {len(calls)} collectives in the trace, "
                       f"{expected['collectives'][pid]} were done")
        checker.expect(len(spans) == expected["spans"][pid], f"rank {pid}: {len(spans)} spans in the trace, "
                       f"{expected['spans'][pid]} were begun")
        outer = [e for e in spans if e["name"] == ODD]
        if checker.expect(len(outer) == 1, f"rank {pid}: the name of the outermost span is lost"):
            begin, end = ns(outer[0]["ts"]), ns(outer[0]["ts"]) + ns(outer[0]["dur"])
            covered = all(begin <= ns(e["ts"]) and ns(e["ts"]) + ns(e["dur"]) <= end for e in slices)
            checker.expect(covered, f"rank {pid}: the outermost span does not cover the rest")
        checker.expect(any(e["args"]["tag"] == ODD for e in calls), f"rank {pid}: the odd tag is lost")
        waits = [e for e in slices if e["cat"] == "queue"]
        must_wait = expected["clock"] == "virtual" and expected["ranks"] > 1 and not (expected["fails"] or expected["free"])
        checker.expect(waits or not must_wait, f"rank {pid} waited for no queue")
    broken = [e for members in checker.members.values() for e in members if e["args"].get("broken off")]
    least = {"": 0, "leaves": 0, "disagrees": expected["ranks"]}[expected["fails"]]
    checker.expect(len(broken) == least or expected["fails"] == "leaves", f"{len(broken)} collectives were broken off")
    arrows = collections.Counter(e["cat"] for e in checker.events if e["ph"] == "s")
    if expected["ranks"] > 1 and not expected["free"]:
        checker.expect(arrows["last"] > 0 and arrows["data"] > 0, f"arrows: {dict(arrows)}")
    check_work(checker, expected["clock"] == "virtual")


def check_work(checker, virtual):
    """By the virtual clock every span named "inner" is filled with work of its own."""
    slices = [e for track in checker.slices.values() for e in track]
    work = {(e["pid"], ns(e["ts"]), ns(e["dur"])) for e in slices if e["cat"] == "work"}
    checker.expect(bool(work) == virtual, f"{len(work)} slices of work")
    for event in slices:
        if virtual and event["name"] == "inner":
            checker.expect((event["pid"], ns(event["ts"]), ns(event["dur"])) in work, f"work of {event}")


def check_page(page, trace):
    """[problem] of a page: that it reaches for nothing outside, and shows the same as the JSON."""
    problems = page_check.problems_of(page)
    if problems:
        return problems
    data = page_check.data_of(page)
    if data["title"] != ODD:
        problems.append(f"the title is {data['title']!r}")
    if data["cut"] != trace["otherData"]["cut"] or data["clock"] != trace["otherData"]["clock"]:
        problems.append("the page is of another clock, or cut")
    kinds = {"span": "s", "work": "w", "collective": "c", "queue": "q", "transfer": "t"}
    of_trace = collections.Counter((e["pid"], kinds[e["cat"]], ns(e["ts"]), ns(e["dur"]), e["name"] if e["cat"] == "span"
                                    else e["args"].get("tag", "")) for e in trace["traceEvents"]
                                   if e["ph"] == "X" and e["cat"] in kinds)
    of_page = collections.Counter()
    for lane in data["lanes"]:
        for record in lane["records"]:
            kind = record[0]
            name = record[4] if kind == "s" else record[7] if kind == "c" else ""
            of_page[lane["rank"], kind, record[1], record[2], name] += 1
    if of_page != of_trace:
        problems.append(f"the page and the JSON differ: {list((of_page - of_trace) + (of_trace - of_page))[:4]}")
    return problems


def check_files(path, expected):
    """[problem] of PATH.json and of its page."""
    try:
        trace = json.loads(path.with_name(path.name + ".json").read_text(encoding="utf-8"))
        checker = Checker(trace)
        checker.run()
        if not checker.problems:
            check_run(checker, expected)
        return checker.problems + check_page(text_of(trace), trace)
    except ValueError as error:  # no JSON, no UTF-8
        return [str(error)]


def main():
    if len(sys.argv) != 2:
        print("usage: trace_check.py FOLDER", file=sys.stderr)
        return 2
    folder = pathlib.Path(sys.argv[1])
    bad = 0
    cases = [json.loads(line) for line in (folder / "list").read_text(encoding="utf-8").splitlines()]
    for expected in cases:
        problems = check_files(folder / expected["name"], expected)
        for problem in problems:
            print(f"{expected['name']}: {problem}")
        bad += bool(problems)
    print(f"{len(cases)} traces, {bad} with problems")
    return 1 if bad or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
