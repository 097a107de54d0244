# SPDX-License-Identifier: Apache-2.0
"""The data of timeline.html: what a trace in Chrome's format has, in lanes (rank, track) and rendezvous."""

from __future__ import annotations

import collections
import typing

from anyrank.page._parts import Json

_Lane = typing.Tuple[int, int]  # rank, track: 0 is the main thread, whose collectives are on a track of their own
_CATEGORIES = {"span", "work", "collective", "transfer", "queue"}


def _ns(us: float) -> int:
    """Nanoseconds, as Perfetto's reader makes them."""
    return int(us * 1000.0)


def _lanes_of(events: list[Json]) -> tuple[dict[tuple[int, int], _Lane], dict[_Lane, str]]:
    """The lane of each track (pid, tid), and the names of queues."""
    lanes: dict[tuple[int, int], _Lane] = {}
    names: dict[_Lane, str] = {}
    for event in events:
        if event["name"] == "thread_sort_index":
            lanes[event["pid"], event["tid"]] = (event["pid"], event["args"]["sort_index"] // 2)
    for event in events:
        if event["name"] == "thread_name":
            lane = lanes[event["pid"], event["tid"]]
            names[lane] = event["args"]["name"] if lane[1] > 0 else ""
    return lanes, names


def _rendezvous(calls: list[Json]) -> tuple[list[list[typing.Any]], dict[tuple[int, int], int]]:
    """What the members of each collective share, and the index of each (group, sequence number)."""
    members: dict[tuple[int, int], list[Json]] = collections.defaultdict(list)
    for event in calls:
        members[event["args"]["group"], event["args"]["sequence"]].append(event)
    rows, index = [], {}
    for number, (key, events) in enumerate(sorted(members.items())):
        first, last = min(events, key=lambda e: int(e["pid"]))["args"], events[0]["args"]["came last"]
        came = max((_ns(e["ts"]) for e in events if e["pid"] == last), default=0)
        rows.append([*key, first["ranks"], first["group size"], *_call(first)[:3], last, came, _call(first)[3]])
        index[key] = number
    return rows, index


def _call(args: Json) -> list[typing.Any]:
    return [args["dtype"], args.get("reduction", "sum"), args["count"], args.get("root", 0)]


def _record(event: Json, depth: int, index: dict[tuple[int, int], int]) -> list[typing.Any]:
    """In the order in which the page reads it: kind, begin, length, depth, and what the kind has."""
    kind, args = event["cat"], event.get("args", {})
    record = ["t" if kind == "transfer" else kind[0], _ns(event["ts"]), _ns(event["dur"]), depth]
    if kind == "span":
        return [*record, event["name"]]
    if kind == "work":
        return [*record, args["flops"]]
    if kind == "transfer":
        return [*record, args["from"], args["bytes"]]
    if kind == "queue":
        return [*record, args["queue"]]
    broken = _call(args) if args.get("broken off") else []  # maybe because members called different things
    return [*record, _ns(args["waiting_us"]), index[args["group"], args["sequence"]], args["op"], args["tag"],
            args["bytes read"], args["bytes written"], *broken]


def _records(events: list[Json], index: dict[tuple[int, int], int]) -> list[list[typing.Any]]:
    """Of one lane by their beginning, each as deep as there are spans around it."""
    records: list[list[typing.Any]] = []
    open_until: list[int] = []
    for event in sorted(events, key=lambda e: _ns(e["ts"])):
        while open_until and open_until[-1] <= _ns(event["ts"]):
            open_until.pop()
        records.append(_record(event, len(open_until), index))
        if event["cat"] == "span":
            open_until.append(_ns(event["ts"]) + _ns(event["dur"]))
    return records


def data_of(trace: Json) -> Json:
    """What the page shows of a trace. The critical path is the trace's own."""
    lanes, names = _lanes_of([e for e in trace["traceEvents"] if e["ph"] == "M"])
    of_lane: dict[_Lane, list[Json]] = {lane: [] for lane in sorted(names)}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in _CATEGORIES:
            of_lane[lanes[event["pid"], event["tid"]]].append(event)
    slices = [event for events in of_lane.values() for event in events]
    rendezvous, index = _rendezvous([event for event in slices if event["cat"] == "collective"])
    other = trace["otherData"]
    return {"title": other.get("title", ""), "clock": other["clock"], "cut": other["cut"],
            "ranks": 1 + max((rank for rank, _ in of_lane), default=-1),
            "end": max((_ns(e["ts"]) + _ns(e["dur"]) for e in slices), default=0), "summary": other.get("summary"),
            "rendezvous": rendezvous,
            "lanes": [{"rank": rank, "track": track, "name": names[rank, track], "records": _records(events, index)}
                      for (rank, track), events in of_lane.items()]}
