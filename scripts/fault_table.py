#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of faults.md and the figures in docs/evidence/faults.tsv, from the command:

    build/anyrank bugs --run --curves --json - | scripts/fault_table.py --write

`bugs FAULT --run ..` writes that fault's row alone. Without --write it prints the figures. The page's text before its table is written by hand and stays.
"""

import csv
import json
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGE, FIGURES = DOCS / "reference/faults.md", DOCS / "evidence/faults.tsv"
COLUMNS = ["fault", "case", "first", "rank", "bytes", "losses_10", "losses_20", "gradients", "tolerance"]
ENDED, BYTES_ALONE = "an error ends the run", "the bytes alone"
UNSEEN, SMALL = 0.2, 1.0  # percent of the loss


def percent(value):
    return "NaN" if isinstance(value, str) else f"{100 * value:.2g}"


def figures_of(fault):
    """What is measured of a fault, by column; "" where there is nothing to measure."""
    row = dict.fromkeys(COLUMNS, "") | {"fault": fault["name"], "case": fault["case"].replace("-demo", "")}
    difference, curve, moved = fault["first_difference"], fault["curve"], fault["bytes"]
    if fault["error"]:
        return row | {"first": ENDED}
    row |= {"first": difference["tensor"], "rank": str(difference["rank"])} if difference else {"first": BYTES_ALONE}
    if moved["predicted"] is not None:
        excess = moved["counted"] - moved["predicted"]
        row["bytes"] = "too many" if excess > 0 else "too few" if excess else "as predicted"
    if curve:
        row |= {"losses_10": percent(curve["first_ten"]), "losses_20": percent(curve["loss_deviation"]),
                "gradients": percent(curve["gradient_deviation"]),
                "tolerance": "passes" if curve["tolerance_passes"] else "fails"}
    return row


def table_of(rows):
    return "".join("\t".join(row[name] for name in COLUMNS) + "\n" for row in [dict(zip(COLUMNS, COLUMNS)), *rows])


def figures():
    with FIGURES.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def below(rows, column, limit):
    return sum(row[column] not in ("", "NaN") and float(row[column]) < limit for row in rows)


def summary(rows):
    ended = [row for row in rows if row["first"] == ENDED]
    modules = [row for row in rows if row["first"] != ENDED and not row["bytes"]]
    compared = [row for row in rows if row["bytes"]]
    curves = [row for row in rows if row["losses_10"]]
    return (f"{len(ended)} of the {len(rows)} faults end the run with an error, because ranks disagree about a collective or "
            f"one of them left it out. {len(modules)} needs a module with an unused parameter, whose bytes are not predicted. "
            f"Of the other {len(compared)}, {sum(row['bytes'] == 'as predicted' for row in compared)} move the "
            f"predicted bytes, and {sum(row['first'] == BYTES_ALONE for row in rows)} shows in the bytes alone. "
            f"Of {len(curves)} whose losses were compared, {below(curves, 'losses_20', SMALL)} move the loss by less than "
            f"{SMALL:g} % in 20 steps, and {below(curves, 'losses_10', UNSEEN)} by less than {UNSEEN:g} % in each of the first "
            f"ten; {sum(row['tolerance'] == 'passes' for row in curves)} pass a comparison of gradients.")


def wrapped(text, width=120):
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def line(text, row):
    tensor = row["first"] if row["first"] in (ENDED, BYTES_ALONE) else f"`{row['first']}`"
    text = re.sub(r"([*_<>|])", r"\\\1", text)
    return f"|`{row['fault']}`|{text}|{row['case']}|{tensor}|{row['losses_10']}|"


def page(texts, rows, old):
    """The page, after the part of the old one that is written by hand. texts: of faults by name, in their order."""
    by_name = {row["fault"]: row for row in rows}
    lines = [line(text, by_name[name]) for name, text in texts.items()]
    return "\n".join([old[:old.index("\n|fault|")], "|fault|what goes wrong|case|first difference|10 losses, %|",
                      "|---|---|---|---|---|", *lines, "", wrapped(summary(rows))]) + "\n"


def main():
    faults = json.load(sys.stdin)["faults"]
    rows = [figures_of(fault) for fault in faults]
    if sys.argv[1:] != ["--write"]:
        sys.stdout.write(table_of(rows))
        return
    known = {row["fault"]: row for row in figures()} | {row["fault"]: row for row in rows}
    texts = {fault["name"]: fault["text"] for fault in json.loads(subprocess.run(
        ["build/anyrank", "bugs", "--json", "-", "--quiet"], check=True, stdout=subprocess.PIPE).stdout)["faults"]}
    FIGURES.write_text(table_of([known[name] for name in texts]), encoding="utf-8")
    PAGE.write_text(page(texts, figures(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
