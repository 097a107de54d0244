#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures of the sources' structure, with where each is largest: scripts/measures.py [--at COMMIT] [--long]

Product is C and CUDA outside tests/. Text is read, nothing is compiled: a token is a word, a string or another
character; a function is one that a header declares or defines and whose name begins with ar_ or ari_; a circle is of
files that call each other, by names that one file defines. --long lists files, edges and circles too.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import sys
import tempfile

import check_includes as rules

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\w+|\S')
DECLARED = re.compile(r"^(?!typedef\b|#)\w[\w *]*[ *](ari?_\w+)\([^;{}]*\)[^;{}]*[;{]", re.MULTILINE)
DEFINED = re.compile(r"^(?!static\b|typedef\b)(?:\w[\w *]*[ *])?(ari?_\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
STRUCT = re.compile(r"\bstruct\s*(\w*)\s*\{")
STATIC = re.compile(r"^static\b[^;{}()=]*[ *](\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
COMMENT = re.compile(r"/\*+!?<?\s*((?:[^*]|\*(?!/))*)\*/|//[/!]?<?[ \t]*([^\n]*)")
CLAUSE = re.compile(r"(?:What|Whether|Of|Where|How)\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
LIBRARY = ("cli/", "bench/", "tests/", "examples/", "python/")  # elsewhere a message knows no options
WIDTH, BARE = 120, 3  # columns; files from which on a name of one word says too little
OPERATIONS = 5  # lines with ARI_OPERATION_* from which on a file knows the order of a step


def end_of(text, at):
    """After the bracket that closes the one before `at`."""
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def fields(body):
    """How many values a struct's body declares: those of a struct in it in place of its name, and no functions."""
    count, at, plain = 0, 0, ""
    for match in STRUCT.finditer(re.sub(r"\bunion\b", "struct", body)):
        if match.start() >= at:
            plain += body[at:match.start()]
            at = end_of(body, match.end())
            count += fields(body[match.end():at - 1])
            at = body.index(";", at) + 1
    plain = re.sub(r"[^;]*\(\*[^;]*;", "", plain + body[at:])
    plain = re.sub(r"\[[^\]]*\]", "", plain)
    return count + sum(part.count(",") + 1 for part in plain.split(";") if part.strip())


def structs(texts):
    """{name: fields} of the C structs that have one."""
    found = {}
    for text in texts.values():
        text = rules.DIRECTIVE.sub("", text)
        for match in STRUCT.finditer(text):
            body = text[match.end():end_of(text, match.end()) - 1]
            if match.group(1) and not re.search(r"\)[\w\s]*\{", body):
                found[match.group(1)] = fields(body)
    return found


def calls(texts):
    """{file: {file that it calls: names}}, by functions that one file defines."""
    places = collections.defaultdict(set)
    for path, text in texts.items():
        for name in DEFINED.findall(text):
            places[name].add(path)
    one = {name: min(paths) for name, paths in places.items() if len(paths) == 1}
    edges = {path: collections.defaultdict(set) for path in texts if not path.endswith((".h", ".cuh"))}
    for path, to in edges.items():
        for word in set(rules.WORD.findall(rules.STRING.sub("", texts[path]))):
            if one.get(word, path) != path:
                to[one[word]].add(word)
    return edges


def circles(edges):
    """The files that reach each other: Tarjan's strongly connected components of two or more."""
    order, low, stack, found = {}, {}, [], []

    def visit(path):
        order[path] = low[path] = len(order)
        stack.append(path)
        for other in edges.get(path, ()):
            if other not in order:
                visit(other)
            if other in stack:
                low[path] = min(low[path], low[other])
        if low[path] == order[path]:
            at = stack.index(path)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10000)
    for path in edges:
        if path not in order:
            visit(path)
    return sorted(found, key=len, reverse=True)


def room_of(path):
    return rules.folder_of(path) or path.split("/")[0]


def top(counts, n=4):
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda row: -row[1])[:n])


def naming(word, texts):
    return [path for path, text in texts.items() if re.search(rf"\b{word}\b", text)]


def measures(root):
    """Rows of (measure, number or text, details)."""
    paths = {rules.name_of(root, path): path for path in sorted(root.rglob("*"))
             if path.suffix in rules.SUFFIXES | {".py"} and path.is_file() and "build" not in path.parts}
    raw = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in paths.items()}
    product = {name: text for name, text in raw.items() if not name.endswith(".py") and not name.startswith("tests/")}
    package = {name: text for name, text in raw.items() if name.startswith("python/") and name.endswith(".py")}
    code = {name: rules.without_comments(text) for name, text in product.items()}
    lines = collections.Counter()
    for name, text in product.items():
        lines[room_of(name)] += text.count("\n")
    yield "lines of C and CUDA outside tests", sum(lines.values()), [f"{n:7,}  {room}" for room, n in sorted(lines.items())]
    yield "tokens of them without comments", sum(len(TOKEN.findall(text)) for text in code.values()), []
    headers = {name: len(DECLARED.findall(text)) for name, text in code.items() if name.endswith((".h", ".cuh"))}
    yield "functions declared in headers", sum(headers.values()), []
    for word in ("cp", "pp"):
        with_python = naming(word, product) + naming(word, package)
        yield (f"files that name {word} as a word: C and Python; C; C without comments",
               f"{len(with_python)}; {len(naming(word, product))}; {len(naming(word, code))}", with_python)
    sizes = structs(code)
    yield "fields of a struct, the most", top(sizes), [f"{n:7,}  {name}" for name, n in
                                                       sorted(sizes.items(), key=lambda row: -row[1])[:20]]
    yield "fields of lint's state", next((n for name, n in sizes.items() if "lint_state" in name), 0), []
    steps = [name for name, text in product.items() if not name.startswith(("sim/plan/", "tests/")) and
             sum("ARI_OPERATION_" in line for line in text.split("\n")) >= OPERATIONS]
    yield f"files outside sim/plan with ARI_OPERATION_* on {OPERATIONS} lines or more", len(steps), steps
    yield from of_rules(root)
    edges = calls(code)
    found = circles(edges)
    across = [files for files in found if len({room_of(path) for path in files}) > 1]
    for title, chosen in (("circles of calls across rooms", across),
                          ("circles of calls inside rooms", [files for files in found if files not in across])):
        yield title, len(chosen), [" ".join(files) for files in chosen]
    yield from of_words(product, code)
    tests = {name: text.count("\n") for name, text in raw.items() if name.startswith("tests/")}
    yield "lines of tests/, C and Python", sum(tests.values()), []


def at(name, text, match):
    return f"{name}:{text.count(chr(10), 0, match.start()) + 1}"


def of_words(product, code):
    """What a reader stumbles over: clauses in place of sentences, names that say too little, wide lines."""
    comments = [(at(name, text, match), (match.group(1) or match.group(2) or "").strip())
                for name, text in product.items() for match in COMMENT.finditer(text)]
    clauses = [f"{place}: {comment.split(chr(10))[0]}" for place, comment in comments if CLAUSE.match(comment)]
    yield f"comments that open with What, Whether, Of, Where or How, of {len(comments):,}", len(clauses), clauses
    statics = collections.defaultdict(list)
    for name, text in code.items():
        for match in STATIC.finditer(text):
            if "_" not in match.group(1):
                statics[match.group(1)].append(at(name, text, match))
    bare = {word: places for word, places in statics.items() if len(places) >= BARE}
    yield (f"static functions whose name is one word that {BARE} files define", sum(map(len, bare.values())),
           [f"{word}: {' '.join(places)}" for word, places in sorted(bare.items())])
    options = [f"{at(name, text, match)}: {match.group(0)}" for name, text in code.items() if not name.startswith(LIBRARY)
               for match in rules.STRING.finditer(text) if OPTION.search(match.group(0))]
    yield "strings of the library that name an option of the command", len(options), options
    wide = [f"{name}:{line}" for name, text in product.items() for line, row in enumerate(text.split("\n"), 1)
            if len(row) > WIDTH]
    yield f"lines over {WIDTH} columns", len(wide), wide


def of_rules(root):
    """What scripts/check_includes.py refuses, or would have."""
    tree = rules.Tree(root)
    twice = {message.split(" ")[0] for _, _, message in rules.check_homonyms(tree)}
    yield "names defined twice", len(twice), sorted(twice)
    against = {f"{message.split(' call ')[1]} from {rules.folder_of(name)}" for name in tree.includes
               if rules.folder_of(name) for _, message in rules.check_calls(tree, name, rules.folder_of(name))}
    yield "names called against the direction", len(against), sorted(against)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at", metavar="COMMIT", help="of that commit in place of the working tree")
    parser.add_argument("--long", action="store_true", help="also where")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measures-") as folder:
        root = ROOT
        if given.at:
            root = pathlib.Path(folder)
            archive = subprocess.run(["git", "archive", given.at], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        for name, value, details in measures(root):
            print(f"{name + '  ':.<80}  {value if isinstance(value, str) else format(value, ',')}")
            for line in details if given.long else ():
                print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
