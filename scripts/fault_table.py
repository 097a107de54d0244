#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of faults.md: anyrank bugs --run --curves --json - | scripts/fault_table.py"""

import json
import sys

COLUMNS = ["fault", "model and layout", "first tensor that differs", "rank", "bytes", "10 losses", "20 losses",
           "1e-3 tolerance"]


def layout(fault):
    split = fault["layout"]
    words = [fault["model"].removesuffix("-demo")]
    if split.get("pp", 1) > 1:
        words += [f"pp={split['pp']}", split["schedule_pp"]]
    for name in ("dp", "cp", "tp"):
        if split.get(name, 1) > 1:
            words.append(f"{name}={split[name]}")
    if split["dp"] > 1 and fault["batch"] % split["dp"]:
        each, more = divmod(fault["batch"], split["dp"])
        words.append("(" + "+".join(str(each + (rank < more)) for rank in range(split["dp"])) + ")")
    if split.get("zigzag"):
        words.append("zigzag")
    if split["sp"]:
        words.append("sp")
    if split.get("overlap", 1) > 1:
        words.append(f"overlap={split['overlap']}")
    if split["zero"]:
        words.append(f"zero={split['zero']}")
    if split.get("dp_replicate", 1) > 1:
        words.append(f"replicate={split['dp_replicate']}")
    if split["micro_batches"] > 1:
        words.append(f"micro-batches={split['micro_batches']}")
    if split["forward_first"]:
        words.append("forward first")
    if split.get("recompute", "none") != "none":
        words.append(f"recompute={split['recompute']}")
    if split["mlp_order"] != "column-row":
        words.append(split["mlp_order"])
    if fault.get("documents", 0) > 1:
        words.append(f"documents {fault['documents']}")
    if fault["dropout"]:
        words.append(f"dropout {fault['dropout']:g}")
    return " ".join(words)


def percent(value):
    return "no number" if isinstance(value, str) else f"{100 * value:.2g} %"


def row(fault):
    first, curve = fault["first_difference"], fault["curve"]
    link = f"[{fault['name']}](#{fault['name']})"
    if fault["error"]:
        return [link, layout(fault), "none: the run ends in an error", "", "", "", "", ""]
    counted, predicted = fault["bytes"]["counted"], fault["bytes"]["predicted"]
    moved = "" if predicted is None else "as predicted" if counted == predicted else "too few" if counted < predicted else "too many"
    seen = ["", "", ""]
    if curve:
        seen = [percent(curve["first_ten"]), percent(curve["loss_deviation"]),
                "passes" if curve["tolerance_passes"] else "fails"]
    where = [f"`{first['tensor']}`", str(first["rank"])] if first else ["none: only the bytes", ""]
    return [link, layout(fault), *where, moved, *seen]


def main():
    faults = json.load(sys.stdin)["faults"]
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for fault in faults:
        print("| " + " | ".join(row(fault)) + " |")
    curves = [fault["curve"] for fault in faults if fault["curve"]]
    unseen = sum(curve["unseen"] for curve in curves)
    print(f"\n{len(faults)} faults, {len(curves)} with a curve, of which {unseen} are unseen in the first ten losses.")


if __name__ == "__main__":
    main()
