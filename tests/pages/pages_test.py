#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the pages of the documentation (engine.py): each page is one test. Those in table.LONG are only parsed and
compiled here; long_test.py runs their commands.

    tests/pages/pages_test.py [--long] [PAGE ..]

ANYRANK names another command than build/anyrank. The closing lines count why commands are not run.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import engine
import table


def the_comparison_sees_one_digit():
    shown, printed = "  tp=2   915  ..\ndone: 12 of 12", "tp=2 915 8 same\nmore\ndone: 12 of 12\n"
    same = [engine.missing(shown, printed, "") is None, engine.missing("1\n..\n", "1\n2\n", "") is None]
    wrong = [engine.missing(shown.replace(*change), printed, "") is None
             for change in (("915", "916"), ("2 of 12", "2 of 13"), ("  ..", ""), ("done", "gone"))]
    wrong.append(engine.missing("1", "1 2", "") is None)
    return [] if all(same) and not any(wrong) else [f"the comparison is wrong: {same}, {wrong}"]


def what_a_page_must_not_have_is_seen():
    wrong = ["```\nunknown\n```", "```\n$ echo 1\n2\n```", "```\nanyrank check --no-option\n```",
             "  ```\n  indented\n  ```", "```c\nint x = y;\n```", "```json\n{1}\n```", "```python\nassert False\n```",
             "```python\nprint(1)\n```\n```text\n2\n```"]
    right = "```\n$ echo 1\n1\n```\n```\nanyrank --version\n```\n```python\nprint(1)\n```\n```text\n1\n```"
    with tempfile.TemporaryDirectory(prefix="anyrank-page-") as folder:
        path = pathlib.Path(folder, "page.md")
        for text in [right, *wrong]:
            path.write_text(text + "\n", encoding="utf-8")
            if bool(engine.run_page(path).problems) != (text != right):
                return [f"the engine finds {engine.run_page(path).problems} in\n{text}"]
    return []


def every_row_of_the_table_is_of_a_block():
    found = [block for path in engine.pages() for block in engine.blocks(path)]
    rows = [row for rows in (table.PRINTED_BY, table.DECLARED, table.ELSEWHERE) for row in rows]
    stale = [row for row in rows if not any(row[0] == block.page and block.text.startswith(row[1]) for block in found)]
    named = {path.name for path in engine.pages()}
    stale += [page for rows in (table.LONG, table.SPACED, table.GIVEN, table.WRITTEN, table.DIFFERS) for page in rows
              if page and page not in named]
    for (page, _), where in table.ELSEWHERE.items():
        if where != table.PICTURE and page not in (engine.ROOT / where).read_text(encoding="utf-8"):
            stale.append(f"{where} does not name {page}")
    return [f"tests/pages/table.py: nothing fits {row}" for row in stale]


def commands_in_the_text():
    """(where, command) of what stands in backquotes, and of what ./quickstart says comes next."""
    for path in engine.pages():
        for code in re.findall(r"`([^`]+)`", engine.BLOCK.sub("", path.read_text(encoding="utf-8"))):
            yield path.name, " ".join(code.split())
    script = (engine.ROOT / "quickstart").read_text(encoding="utf-8")
    for line in re.findall(r"^  \$folder/(.*?)(?:  |$)", script, re.MULTILINE):
        yield "quickstart", line


def options_in_the_text_exist():
    helps, problems = {}, []
    for where, code in commands_in_the_text():
        command = re.match(r"anyrank ([a-z]\S*)(?: (.*))?", code)
        if not command or command[1] == "convert:":
            continue
        name, rest = command[1], re.sub(r"[|&].*", "", command[2] or "")
        if name not in helps:
            done = subprocess.run([engine.COMMAND, name, "--help-all"], capture_output=True, text=True, check=False)
            helps[name] = done.stdout
        known = set(re.findall(r"--[a-z][\w-]*", helps[name])) | {"--help"}
        problems += [f"{where}: `{code}`: no {option}" for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
                     if option not in known]
        problems += [] if helps[name] else [f"{where}: `{code}`: no such subcommand"]
    return problems if len(helps) > 8 else [*problems, "the commands in the text were not found"]


def value(text):
    """What an expression of whole numbers comes to; None for anything else."""
    text = text.strip().replace(",", "").replace("·", "*")
    return eval(text) if re.fullmatch(r"[\d(][\d +*()]*", text) else None


def sums_in_the_text_are_right():
    """Of lines "    NAME = EXPRESSION .. = NUMBER"; a number alone, behind "together", is their sum."""
    problems, seen, above = [], 0, []
    for path in engine.pages():
        for line in engine.BLOCK.sub("", path.read_text(encoding="utf-8")).splitlines():
            found = [value(part) for part in line.split("=")[1:]] if line.startswith("    ") else []
            numbers = [number for number in found if number is not None]
            if line.startswith("    together") and len(numbers) == 1:
                numbers.append(sum(above))
            above = [*above, numbers[-1]] if numbers else []
            seen += len(numbers) > 1
            problems += [f"{path.name}: {line.strip()}: {numbers}"] if len(set(numbers)) > 1 else []
    return problems if seen > 3 else [*problems, "the sums in the text were not found"]


def headings(text):
    """The names that the hosting site gives the headings of a page, by which links find them."""
    found = re.findall(r"^#+ (.*)$", engine.BLOCK.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in found)
    return {re.sub(r"[^\w -]", "", line.strip().lower()).replace(" ", "-") for line in plain}


def links_lead_somewhere():
    problems, seen = [], 0
    for path in [*engine.pages(), *engine.ROOT.glob("[CS]*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", engine.BLOCK.sub("", path.read_text(encoding="utf-8"))):
            name, _, heading = link.partition("#")
            target = path.parent / name if name else path
            if re.match(r"\w+:", link):
                continue
            seen += 1
            there = target.exists() and (not heading or heading in headings(target.read_text(encoding="utf-8")))
            problems += [] if there else [f"{path.name}: {link} leads nowhere"]
    return problems if seen > 100 else [*problems, "the links in the text were not found"]


def page_problems(path, run, reasons):
    page = engine.run_page(path, run)
    reasons += page.left_out
    return page.problems


def main(arguments):
    long = "--long" in arguments
    chosen = [path for path in engine.pages() if not long or path.name in table.LONG]
    names = [name for name in arguments if not name.startswith("-")]
    chosen = [path for path in chosen if not names or path.name in names]
    reasons = []
    info = subprocess.run([engine.COMMAND, "info", "--json", "-"], stdout=subprocess.PIPE, check=True)
    if not json.loads(info.stdout)["mpi"]["available"]:
        table.REASONS.append(("mpirun", "no MPI in this build"))
    tests = [] if long or names else [the_comparison_sees_one_digit, what_a_page_must_not_have_is_seen,
                                      every_row_of_the_table_is_of_a_block, options_in_the_text_exist,
                                      sums_in_the_text_are_right, links_lead_somewhere]
    tests += [lambda path=path: page_problems(path, bool(long or names or path.name not in table.LONG), reasons)
              for path in chosen]
    found = [test() for test in tests]
    for problem in sum(found, []):
        print(problem)
    if not long:
        print("".join(f"a command ... skipped {reason!r}\n" for reason in reasons), end="")
    failed = sum(map(bool, found))
    skipped = f", {len(reasons)} skipped" if reasons and not long else ""
    print(f"{len(found) - failed} passed, {failed} failed{skipped}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
