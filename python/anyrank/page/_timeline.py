# SPDX-License-Identifier: Apache-2.0
"""The data of timeline.html: what a trace in Chrome's format has, in lanes (rank, track) and rendezvous."""

from __future__ import annotations

import collections
import typing

from anyrank._input import (Check, Json, Mismatch, anything, flag, integer, list_of, map_of, mismatch, number, record,
                            string)

_Lane = typing.Tuple[int, int]  # rank, track: 0 is the main thread, whose collectives are on a track of their own
_LATEST = 1e15  # microseconds: 30 years
_COUNT, _TIME = integer(0), number(0.0, _LATEST)
_CALL = record({"op": string, "tag": string, "dtype": string, "count": _COUNT, "bytes read": _COUNT,
                "bytes written": _COUNT, "group": integer(), "sequence": integer(), "ranks": string,
                "group size": _COUNT, "came last": integer(), "waiting_us": _TIME},
               {"reduction": string, "root": integer(), "broken off": flag})
# The arguments of each category that the page shows.
_ARGUMENTS: dict[str, Check[Json]] = {
    "span": map_of(anything), "work": record({"flops": number(0.0)}), "collective": _CALL,
    "transfer": record({"from": integer(), "bytes": _COUNT}), "queue": record({"queue": string})}
_TRACK = {"pid": integer(0), "tid": integer(0)}
_NAMES: dict[str, Check[Json]] = {  # of what names a track, its arguments
    "thread_sort_index": record({"sort_index": _COUNT}), "thread_name": record({"name": string})}


def _event(value: typing.Any) -> Json:
    """Returns an event of the page; an empty object for an event that the page leaves out."""
    event = record({"ph": string}, {"name": string, "cat": string})(value)
    name, category = event.get("name", ""), event.get("cat", "")
    if event["ph"] == "M" and name in _NAMES:
        return record({**_TRACK, "name": string, "args": _NAMES[name]})(event)
    if event["ph"] != "X" or category not in _ARGUMENTS:
        return {}
    arguments = {"args": _ARGUMENTS[category]}
    return record({**_TRACK, "name": string, "ts": _TIME, "dur": _TIME, **(arguments if category != "span" else {})},
                  arguments)(event)


def _events(value: typing.Any) -> list[Json]:
    """Returns the events, each on a track that has a name and a place."""
    events = list_of(_event)(value)
    named = {name: {(event["pid"], event["tid"]) for event in events if event and event["name"] == name
                    and event["ph"] == "M"} for name in _NAMES}
    for i, event in enumerate(events):
        track = (event["pid"], event["tid"]) if event else None
        missing = next((name for name in _NAMES if track and track not in named[name]), None)
        if missing and (event["ph"] == "X" or missing == "thread_sort_index"):
            problem = Mismatch(f"is on a track without a {missing}")
            problem.keys.append(i)
            raise problem
    return [event for event in events if event]


TRACE = record({"traceEvents": _events, "otherData": record({"clock": string, "cut": flag}, {
    "title": string, "summary": map_of(anything)})})


def _ns(us: float) -> int:
    """Nanoseconds, as Perfetto's reader makes them."""
    return int(us * 1000.0)


def _lanes_of(events: list[Json]) -> tuple[dict[tuple[int, int], _Lane], dict[_Lane, str]]:
    """Returns the lane of each track (pid, tid), and the names of queues."""
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
    """Returns what the members of each collective share, and the index of each (group, sequence number)."""
    members: dict[tuple[int, int], list[Json]] = collections.defaultdict(list)
    for event in calls:
        members[event["args"]["group"], event["args"]["sequence"]].append(event)
    rows, index = [], {}
    for number, (key, events) in enumerate(sorted(members.items())):
        call_args, last_rank = min(events, key=lambda e: int(e["pid"]))["args"], events[0]["args"]["came last"]
        came = max((_ns(e["ts"]) for e in events if e["pid"] == last_rank), default=0)
        rows.append(
            [
                *key,
                call_args["ranks"],
                call_args["group size"],
                *_call(call_args)[:3],
                last_rank,
                came,
                _call(call_args)[3],
            ]
        )
        index[key] = number
    return rows, index


def _call(args: Json) -> list[typing.Any]:
    return [args["dtype"], args.get("reduction", "sum"), args["count"], args.get("root", 0)]


def _record(event: Json, depth: int, index: dict[tuple[int, int], int]) -> list[typing.Any]:
    """Returns an event in the order in which the page reads it: kind, begin, length, depth, and the kind's fields."""
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
    """Returns the records of one lane by their beginning; each depth is the number of enclosing spans."""
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
    """Returns what the page shows of a trace. The critical path is the trace's."""
    lanes, names = _lanes_of([e for e in trace["traceEvents"] if e["ph"] == "M"])
    of_lane: dict[_Lane, list[Json]] = {lane: [] for lane in sorted(names)}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            of_lane[lanes[event["pid"], event["tid"]]].append(event)
    slices = [event for events in of_lane.values() for event in events]
    rendezvous, index = _rendezvous([event for event in slices if event["cat"] == "collective"])
    other_data = trace["otherData"]
    return {"title": other_data.get("title", ""), "clock": other_data["clock"], "cut": other_data["cut"],
            "ranks": 1 + max((rank for rank, _ in of_lane), default=-1),
            "end": max((_ns(e["ts"]) + _ns(e["dur"]) for e in slices), default=0), "summary": other_data.get("summary"),
            "rendezvous": rendezvous,
            "lanes": [{"rank": rank, "track": track, "name": names[rank, track], "records": _records(events, index)}
                      for (rank, track), events in of_lane.items()]}
