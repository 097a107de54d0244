#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each rule of trace_check.py refuses a trace that breaks it, and takes one that does not."""

import copy
import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import trace_check  # noqa: E402


def names(pid, process, *tracks):
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid in tracks:
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": "track"}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def span(pid, tid, begin, length, name="span"):
    return {"ph": "X", "pid": pid, "tid": tid, "cat": "span", "ts": begin, "dur": length, "name": name}


def collective(pid, tid, begin, length, waiting):
    args = {"op": "all_reduce", "tag": "t", "reduction": "sum", "dtype": "F32", "count": 8, "bytes read": 16,
            "bytes written": 16, "group": 1, "sequence": 1, "ranks": "0-1", "group size": 2, "came last": 1,
            "waiting_us": waiting, "moving_us": length - waiting}
    yield {"ph": "X", "pid": pid, "tid": tid, "cat": "collective", "ts": begin, "dur": length, "name": "all_reduce",
           "args": args}
    if waiting:
        yield {"ph": "X", "pid": pid, "tid": tid, "cat": "waiting", "ts": begin, "dur": waiting, "name": "waiting",
               "args": {}}


def end_of_arrow(kind, pid, tid, at):
    event = {"ph": kind, "pid": pid, "tid": tid, "ts": at, "id": 1, "name": "the last to come", "cat": "last"}
    return {**event, "bp": "e"} if kind == "f" else event


def counter(pid, *values):
    for at, value in values:
        yield {"ph": "C", "pid": pid, "name": "bytes in flight", "ts": at, "args": {"bytes": value}}


def valid():
    """Two ranks and one all_reduce of 32 bytes, for which rank 0 waits 4 microseconds."""
    events = [*names(2, "cluster"), *names(0, "rank 0", 1, 2), *names(1, "rank 1", 3, 4),
              span(0, 1, 0.0, 20.5, "step"), span(0, 1, 0.25, 3.75, "a"), span(0, 1, 4.0, 16.0, "b"),
              *collective(0, 2, 6.0, 9.0, 4.0), span(1, 3, 0.0, 18.0, "step"), *collective(1, 4, 10.0, 6.0, 0.0),
              end_of_arrow("s", 1, 4, 10.0), end_of_arrow("f", 0, 2, 10.0),
              *counter(0, (0.0, 0), (10.0, 32), (15.0, 0)), *counter(1, (0.0, 0), (10.0, 32), (16.0, 0)),
              *counter(2, (0.0, 0), (10.0, 64), (15.0, 32), (16.0, 0))]
    return {"displayTimeUnit": "ns", "otherData": {"clock": "real", "cut": False}, "traceEvents": events}


def find(events, **wanted):
    return next(e for e in events if all(e.get(k) == v for k, v in wanted.items()))


def remove(**wanted):
    return lambda events: events.remove(find(events, **wanted))


def change(wanted, **values):
    return lambda events: find(events, **wanted).update(values)


def change_args(wanted, **values):
    return lambda events: find(events, **wanted)["args"].update(values)


def swap_ends(events):
    """A slice from its end to its beginning."""
    event = find(events, name="a")
    event["ts"], event["dur"] = event["ts"] + event["dur"], -event["dur"]


def move_member(events):
    """One member of the collective shows another one's sequence number."""
    find(events, cat="collective", pid=1)["args"]["sequence"] = 2


ON_0, ON_1 = {"cat": "collective", "pid": 0}, {"cat": "collective", "pid": 1}
MUTATIONS = {
    "begin and end swapped": swap_ends,
    "a field is missing": lambda events: find(events, name="a").pop("cat"),
    "a track without a name": remove(ph="M", tid=3, name="thread_name"),
    "a process without a name": remove(ph="M", pid=1, name="process_name"),
    "a rank under another number": lambda events: find(events, pid=1, name="process_name")["args"].update(name="rank 7"),
    "a track number twice": lambda events: [e.update(tid=2) for e in events if e.get("tid") == 4],
    "slices overlap": change({"name": "a"}, dur=5.0),
    "a child ends after its parent": change({"name": "b"}, dur=17.0),
    "a slice out of order": lambda events: events.append(events.pop(events.index(find(events, name="a")))),
    "nothing begins at 0": lambda events: [e.update(ts=e["ts"] + 1) for e in events if "ts" in e],
    "the end of an arrow dropped": remove(ph="f"),
    "the start of an arrow dropped": remove(ph="s"),
    "an arrow with two names": change({"ph": "f"}, name="other"),
    "an arrow that binds to the next slice": change({"ph": "f"}, bp="n"),
    "an arrow back in time": change({"ph": "s"}, ts=11.0),
    "an arrow outside every slice": change({"ph": "f"}, ts=15.0),
    "an arrow from one who was not last": lambda events: (find(events, ph="s").update(pid=0, tid=2),
                                                           find(events, ph="f").update(pid=1, tid=4)),
    "an arrow to its own track": change({"ph": "s"}, pid=0, tid=2),
    "a member of another collective": move_member,
    "a member is missing": lambda events: [events.remove(e) for e in list(events) if e.get("tid") in (3, 4)
                                           and e["ph"] in "Xs"] and events.remove(find(events, ph="f")),
    "members of two types": change_args(ON_1, dtype="I32"),
    "members of two counts": change_args(ON_1, count=9),
    "members of two operations": lambda events: (find(events, **ON_1)["args"].update(op="broadcast"),
                                                 find(events, **ON_1).update(name="broadcast")),
    "the wrong one came last": lambda events: [find(events, **on)["args"].update({"came last": 0}) for on in (ON_0, ON_1)],
    "waiting and moving do not add up": change_args(ON_0, waiting_us=3.0),
    "waiting is not to the last one's coming": lambda events: (
        find(events, **ON_0)["args"].update(waiting_us=3.0, moving_us=6.0), find(events, cat="waiting").update(dur=3.0)),
    "waiting is not shown": remove(cat="waiting"),
    "bytes that were not moved": lambda events: [find(events, **on)["args"].update({"bytes read": 0}) for on in (ON_0, ON_1)],
    "a negative counter": change_args({"ph": "C", "pid": 0, "ts": 10.0}, bytes=-1),
    "a counter that does not end": remove(ph="C", pid=0, ts=15.0),
    "a counter of other bytes": change_args({"ph": "C", "pid": 2, "ts": 10.0}, bytes=65),
    "a counter back in time": change({"ph": "C", "pid": 1, "ts": 16.0}, ts=9.0),
    "no event": lambda events: events.clear(),
    "an event of no kind": change({"name": "a"}, ph="Q"),
}


def page(data="{}", rest=""):
    return ("<meta content=\"default-src 'none'\"><script type=\"application/json\">" + data + "</script><script>" + rest +
            "</script>")


class TraceCheckTest(unittest.TestCase):
    def test_a_sound_trace_passes(self):
        self.assertEqual(trace_check.Checker(valid()).run(), [])

    def test_each_broken_rule_is_refused(self):
        for name, mutate in MUTATIONS.items():
            with self.subTest(name):
                trace = copy.deepcopy(valid())
                mutate(trace["traceEvents"])
                self.assertNotEqual(trace_check.Checker(trace).run(), [], f"passed with: {name}")

    def test_a_name_or_a_call_that_is_lost_is_refused(self):
        trace = valid()
        expected = {"ranks": 2, "clock": "real", "cut": False, "fails": "", "free": False, "collectives": [1, 1], "spans": [3, 1]}
        events = trace["traceEvents"]
        for event in events:
            if event.get("name") == "step":
                event["name"] = trace_check.ODD
            if event.get("cat") == "collective":
                event["args"]["tag"] = trace_check.ODD

        def problems(**changes):
            checker = trace_check.Checker(trace)
            checker.run()
            trace_check.check_run(checker, {**expected, **changes})
            return [p for p in checker.problems if not p.startswith("arrows")]  # of data: this trace has none

        self.assertEqual(problems(), [])
        for changes in ({"collectives": [1, 2]}, {"spans": [4, 1]}, {"ranks": 3}, {"clock": "virtual"}, {"cut": True},
                        {"fails": "disagrees"}):
            with self.subTest(changes):
                self.assertNotEqual(problems(**changes), [])
        find(events, **ON_0)["args"]["tag"] = "even"
        self.assertNotEqual(problems(), [])

    def test_a_page_that_reaches_out_or_shows_something_else_is_refused(self):
        trace = valid()
        kinds = {"span": "s", "collective": "c"}
        lanes = {pid: {"rank": pid, "records": []} for pid in (0, 1)}
        for event in trace["traceEvents"]:
            if event.get("cat") in kinds:
                record = [kinds[event["cat"]], trace_check.ns(event["ts"]), trace_check.ns(event["dur"]), 0]
                record += [event["name"]] if event["cat"] == "span" else [0, 0, "all_reduce", "t"]
                if event["ph"] == "X":
                    lanes[event["pid"]]["records"].append(record)
        data = {"title": trace_check.ODD, "cut": False, "clock": "real", "lanes": list(lanes.values())}

        def written(d):
            return json.dumps(d).replace("<", "\\u003c")

        self.assertEqual(trace_check.check_page(page(written(data)), trace), [])
        for rest in ("fetch('x')", "import('x')", "new Image().src = 'x'", "x = 'https://example.org'", "a.innerHTML = b"):
            with self.subTest(rest):
                self.assertNotEqual(trace_check.check_page(page(written(data), rest), trace), [])
        self.assertNotEqual(trace_check.check_page(page(json.dumps(data)), trace), [])  # a '</script>' in the data
        lanes[1]["records"].pop()
        self.assertNotEqual(trace_check.check_page(page(written(data)), trace), [])


if __name__ == "__main__":
    unittest.main()
