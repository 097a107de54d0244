#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures of the sources' structure, with where each is largest:

    scripts/measures.py [--at COMMIT] [--long]    prints them
    scripts/measures.py --check                   fails if one is worse than docs/evidence/measures.tsv says
    scripts/measures.py --write                   writes that file

Product is C and CUDA outside tests/. Text is read, nothing is compiled: a token is a word, a string or another
character. A function of a header is public in include/, else private; the files that call it are C or CUDA of the
product, without the one that defines it. A function word says no noun (`of`, `own`, `gives`: WORDS). Names are counted
in C and in Python, in each outside the files of LEFT_OUT; those of include/ in all of its headers. A circle is of files
that call each other, by names that one file defines. --long lists files, edges and circles too.
"""

import argparse
import collections
import csv
import io
import keyword
import pathlib
import re
import subprocess
import sys
import tempfile
import tokenize

import check_includes as rules

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\w+|\S')
DEFINED = re.compile(r"^(?!static\b|typedef\b)(?:\w[\w *]*[ *])?(ari?_\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
DECLARATION = re.compile(r"^(?!static|typedef|return|[#\s])[A-Za-z_][\w *()]*?\b(ari?_\w+)\([^;{}]*\)[^;{}]*;", re.MULTILINE)
WIDTH = 120  # columns
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b")
WORDS = frozenset("""of at is by to own all one two most each held made left told has on in with whole apart what where whose
    who how when then next last first other others none some many more less least best so as from take takes taken give
    gives given make makes keep keeps kept put gone goes come comes here there again ahead beside both same alike likely
    within between over under around now was be been does did done""".split())
KEYWORDS = frozenset("""int char void const static return if else for while do switch case break struct typedef enum sizeof
    double float long short unsigned signed bool size_t inline extern default continue goto union volatile restrict NULL
    true false""".split())
GENERATED = "_options.py"  # by the build, in the package
LEFT_OUT = re.compile(r"bench/|cli/[^/]*/report\.c|cli/options/describe\.c|examples/|gpu/cluster/process/|"
                      r"python/anyrank/explain|python/anyrank/tests/|ref/io/config|tests/|verify/bytes/|verify/plan/cost\.c")
PYTHON = ("docs/", "python/", "ref/", "scripts/")
SLACK = 0.002  # a line or two of a mend
FIGURES = ROOT / "docs/evidence/measures.tsv"


def calls(texts):
    """{file: {file that it calls: names}}, by functions that one file defines."""
    places = collections.defaultdict(set)
    for path, text in texts.items():
        for name in DEFINED.findall(text):
            places[name].add(path)
    definer = {name: min(paths) for name, paths in places.items() if len(paths) == 1}
    edges = {path: collections.defaultdict(set) for path in texts if not path.endswith((".h", ".cuh"))}
    for path, targets in edges.items():
        for word in set(rules.WORD.findall(rules.STRING.sub("", texts[path]))):
            if definer.get(word, path) != path:
                targets[definer[word]].add(word)
    return edges


def circles(edges):
    """The files that reach each other: Tarjan's strongly connected components of two or more."""
    order, low, stack, found = {}, {}, [], []

    def visit(path):
        order[path] = low[path] = len(order)
        stack.append(path)
        for target in edges.get(path, ()):
            if target not in order:
                visit(target)
            if target in stack:
                low[path] = min(low[path], low[target])
        if low[path] == order[path]:
            start = stack.index(path)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    sys.setrecursionlimit(10000)
    for path in edges:
        if path not in order:
            visit(path)
    return sorted(found, key=len, reverse=True)


def room_of(path):
    return rules.folder_of(path) or path.split("/")[0]


def interfaces(code):
    """(public functions, private ones, the private ones with one calling file)."""
    headers = {name: text for name, text in code.items() if name.endswith((".h", ".cuh"))}
    declared = {function: name for name, text in headers.items() for function in DECLARATION.findall(text)}
    defined = {function: name for name, text in code.items() if name not in headers for function in DEFINED.findall(text)}
    callers = collections.defaultdict(set)
    for name, text in code.items():
        if name not in headers:
            for word in set(rules.WORD.findall(rules.STRING.sub("", text))) & declared.keys():
                callers[word].add(name)
    public = [function for function, name in declared.items() if name.startswith("include/")]
    private = [function for function, name in declared.items() if not name.startswith("include/")]
    return public, private, [function for function in private if len(callers[function] - {defined.get(function)}) == 1]


def c_names(code):
    """Identifiers of C files, one for each use."""
    return [word for text in code.values()
            for word in IDENTIFIER.findall(rules.STRING.sub("", text)) if word not in KEYWORDS]


def python_names(raw):
    """Identifiers of the Python files in PYTHON, one for each use."""
    texts = [text for name, text in raw.items() if name.startswith(PYTHON) and name.endswith(".py")]
    return [token.string for text in texts for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string)]


def named(texts):
    """The files whose names are counted."""
    return {name: text for name, text in texts.items() if not LEFT_OUT.match(name)}


def per_thousand(names, counts):
    return round(1000 * sum(map(counts, names)) / max(1, len(names)), 1)


def is_function_word(name):
    return name in WORDS


def is_short(name):
    return len(name) <= 2


def measures(root):
    """Rows of (measure, number, details). The smaller the better."""
    paths = {rules.name_of(root, path): path for path in sorted(root.rglob("*"))
             if path.suffix in rules.SUFFIXES | {".py"} and path.is_file() and "build" not in path.parts
             and path.name != GENERATED}
    raw = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in paths.items()}
    product = {name: text for name, text in raw.items() if not name.endswith(".py") and not name.startswith("tests/")}
    code = {name: rules.without_comments(text) for name, text in product.items()}
    lines = collections.Counter()
    for name, text in product.items():
        lines[room_of(name)] += text.count("\n")
    yield "lines of C and CUDA outside tests", sum(lines.values()), [f"{n:7,}  {room}" for room, n in sorted(lines.items())]
    yield "tokens of them without comments", sum(len(TOKEN.findall(text)) for text in code.values()), []
    public, private, of_one = interfaces(code)
    yield "public functions", len(public), public
    yield "private functions in headers", len(private), []
    yield "private functions with one calling file, of 100", round(100 * len(of_one) / max(1, len(private)), 1), of_one
    headers = {name: text for name, text in code.items() if name.startswith("include/")}
    yield "function words in include/, of 1,000 identifiers", per_thousand(c_names(headers), is_function_word), []
    for language, names in (("C", c_names(named(code))), ("Python", python_names(named(raw)))):
        place = f"in {language} outside LEFT_OUT, of 1,000 identifiers"
        yield f"function words {place}", per_thousand(names, is_function_word), []
        yield f"names of one or two letters {place}", per_thousand(names, is_short), []
    edges = calls(code)
    found = circles(edges)
    across = [files for files in found if len({room_of(path) for path in files}) > 1]
    for title, chosen in (("circles of calls across folders", across),
                          ("circles of calls inside folders", [files for files in found if files not in across])):
        yield title, len(chosen), [" ".join(files) for files in chosen]
    wide = [f"{name}:{line}" for name, text in product.items() for line, row in enumerate(text.split("\n"), 1)
            if len(row) > WIDTH]
    yield f"lines over {WIDTH} columns", len(wide), wide
    package = {name: text.count("\n") for name, text in raw.items() if name.startswith("python/anyrank/")}
    of_package = {name: n for name, n in package.items() if "/tests/" in name}
    tests = {name: text.count("\n") for name, text in raw.items() if name.startswith("tests/")} | of_package
    yield "lines of the Python package", sum(package.values()) - sum(of_package.values()), []
    yield "lines of tests/ and python/anyrank/tests", sum(tests.values()), []


def check():
    """A measure may rise with a feature: then --write it in the same commit, where a reader sees it."""
    with open(FIGURES, encoding="utf-8", newline="") as file:
        known = {row["measure"]: float(row["figure"]) for row in csv.DictReader(file, delimiter="\t")}
    worse = [(name, value, known.get(name)) for name, value, _ in measures(ROOT) if value > known.get(name, -1) * (1 + SLACK)]
    for name, value, figure in worse:
        print(f"{name}: {value:,}, {'no figure' if figure is None else f'was {figure:,g}'}")
    if worse:
        print(f"take something away, or write down why more is needed: scripts/measures.py --write ({FIGURES.name})")
    return 1 if worse else 0


def write():
    with open(FIGURES, "w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n")
        out.writerow(("measure", "figure"))
        out.writerows((name, value) for name, value, _ in measures(ROOT))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--at", metavar="COMMIT", help="of that commit in place of the working tree")
    parser.add_argument("--long", action="store_true", help="also where")
    parser.add_argument("--check", action="store_true", help="against docs/evidence/measures.tsv")
    parser.add_argument("--write", action="store_true", help="that file")
    options = parser.parse_args()
    if options.check or options.write:
        return check() if options.check else write()
    with tempfile.TemporaryDirectory(prefix="measures-") as folder:
        root = ROOT
        if options.at:
            root = pathlib.Path(folder)
            archive = subprocess.run(["git", "archive", options.at], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        for name, value, details in measures(root):
            print(f"{name + '  ':.<80}  {value:,}")
            for line in details if options.long else ():
                print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
