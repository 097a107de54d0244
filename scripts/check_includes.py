#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the direction of the includes, that a name has one definition, and sizes:

    scripts/check_includes.py [--write] ROOT

Dependencies point one way: ref <- sim | gpu <- verify <- cli, where sim and gpu never include each other, and inside ref
core <- numerics <- cpu <- arith <- layers <- models <- train. bench, programs, stands on the library. Inside ref, io
stands on core, under models; pipeline, the schedules of one, on core and io; comm, what moves data between ranks, on
core; context, what a rank holds, on both, under placement and arith; dry, a rank on nothing, on core, comm and cpu; the
baseline on the elementary functions and the parsed config and nothing else, and it calls of others what
docs/design/baseline.md says. verify/run stands on ref and sim; verify/read, which reads other people's tensors and
per-rank files, on ref's io and models; verify/lint, which says what a plan does, on models and record; python/abi, what
other languages load, on core, io and verify/read. In gpu/cluster, process, how processes connect and agree, stands on
core, comm and io; mpi and nccl on process, nccl also on what gpu tells of a device; process/transport, which chooses
among these, on them. What predicts or checks collectives (verify/bytes, the baseline, tests/sim/plain*.h) may not reach
comm. Calls point the same way, whatever header declares the function. A type, function, enumerator or macro ar_* or
ari_* is defined in one file. A fault that code asks for by name is in the table. How many functions and types of
another folder a folder uses, scripts/edges.txt says, which --write writes. A file has at most 900 lines, a function 60.
Every folder of sources has a rule, and every rule a folder.
Prints "file:line: what is wrong" for each violation; exit status 1 if there is one.
"""

import pathlib
import re
import shutil
import subprocess
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
SUFFIXES = {".c", ".cc", ".h", ".cu", ".cuh", ".inc"}

PUBLIC = "include/anyrank"

VERIFY = ["ref/core", "ref/context", "ref/numerics", "ref/arith", "ref/layers", "ref/io", "ref/models", "ref/train",
          "ref/baseline", "verify/bytes", "verify/plan", "verify/run", "verify/read"]
ROOMS = ["verify/" + room for room in
         ("reference", "writer", "explain", "sketches", "gradcheck", "check", "compare", "grads", "faults")]
COMMAND = ["ref/core", "ref/numerics", "ref/arith", "ref/layers", "ref/io", "ref/models", "ref/train", "ref/baseline",
           "verify/bytes", "verify/lint", "verify/plan", "verify/run", "verify/read", "verify", *ROOMS]
SUBCOMMANDS = ["cli/" + room for room in ("bugs", "check", "plan", "train", "verify")]

# Folder -> the folders it may include, besides itself and the public headers. A file belongs to the longest folder here
# that its path begins with.
ALLOWED = {
    PUBLIC: [],
    "ref/core": [],
    "ref/comm": ["ref/core"],
    "ref/context": ["ref/core"],
    "ref/placement": ["ref/core", "ref/context"],
    "ref/numerics": ["ref/core"],
    "ref/cpu": ["ref/core", "ref/numerics"],
    "ref/record": ["ref/core", "ref/comm", "ref/context", "ref/placement", "ref/cpu"],
    "ref/arith": ["ref/core", "ref/context", "ref/placement", "ref/numerics", "ref/record"],
    "ref/io": ["ref/core"],
    "ref/sketch": ["ref/core", "ref/io"],
    "ref/layers": ["ref/core", "ref/context", "ref/placement", "ref/numerics", "ref/arith", "ref/record"],
    "ref/pipeline": ["ref/core", "ref/io"],
    "ref/models": ["ref/core", "ref/context", "ref/numerics", "ref/arith", "ref/layers", "ref/io"],
    "ref/train": ["ref/core", "ref/context", "ref/numerics", "ref/arith", "ref/layers", "ref/io", "ref/models", "ref/record"],
    "ref/baseline": [],
    "sim": ["ref/core", "ref/comm"],
    "gpu/cluster/process": ["ref/core", "ref/comm", "ref/io"],
    "gpu/cluster/process/transport": ["ref/core", "gpu/cluster/process", "gpu/cluster/mpi", "gpu/cluster/nccl"],
    "gpu/cluster/mpi": ["ref/core", "ref/comm", "gpu/cluster/process"],
    "gpu": ["ref/core", "ref/numerics"],
    "gpu/cluster/nccl": ["ref/core", "ref/comm", "gpu/cluster/process", "gpu"],
    "verify/bytes": ["ref/core"],  # and not what moves the data: it predicts what the layers and collectives make
    "verify/run": ["ref/core", "ref/context", "ref/comm", "gpu/cluster/process", "gpu/cluster/process/transport", "ref/numerics", "ref/record", "ref/placement", "ref/layers", "ref/io",
            "ref/models", "ref/train", "verify/bytes"],
    "verify/lint": ["ref/core", "ref/comm", "ref/context", "ref/io", "ref/models", "ref/record", "verify/run"],
    "verify/plan": ["ref/core", "ref/io", "ref/models", "ref/pipeline", "verify/bytes", "verify/run"],
    "verify/read": ["ref/core", "ref/numerics", "ref/io", "ref/models"],
    # Its rooms: VERIFY and, of one another, what follows.
    "verify": VERIFY,
    "verify/reference": VERIFY,
    "verify/writer": VERIFY + ["verify/reference"],
    "verify/explain": ["ref/core", "ref/io"],
    "verify/sketches": ["ref/core", "ref/io", "ref/sketch", "ref/models", "verify/read", "verify/compare",
                        "verify/reference"],
    "verify/gradcheck": VERIFY + ["verify/reference"],
    "verify/check": VERIFY + ["ref/comm", "ref/placement", "ref/record", "verify/lint", "verify/reference", "verify/writer",
                              "verify/gradcheck", "verify/compare", "verify/explain"],
    "verify/compare": VERIFY + ["verify/reference"],
    "verify/grads": VERIFY + ["verify/reference", "verify/writer", "verify/faults"],
    "verify/faults": VERIFY + ["verify/reference", "verify/writer", "verify/check"],
    "python/abi": ["ref/core", "ref/io", "ref/sketch", "verify/read", "verify/compare"],
    "cli/shared": COMMAND,
    "cli/options": COMMAND + ["cli/shared"],
    **{room: COMMAND + ["cli/shared", "cli/options"] for room in SUBCOMMANDS},
    "cli/plan": COMMAND + ["cli/shared", "cli/options", "ref/comm", "ref/record"],
    "cli": COMMAND + ["cli/shared", "cli/options", *SUBCOMMANDS],
    "bench": ["ref/core", "gpu", "gpu/cluster/nccl", "ref/arith", "ref/layers", "ref/io", "verify/run"],
    "examples": [],
    "tests/sim": [],  # of the tests, PLAIN alone
}

# What a folder may call besides: what public headers declare, and the *_private.h of these folders.
CALLS = {
    "ref/context": ["ref/comm"],
    "ref/placement": ["ref/comm"],
    "ref/arith": ["ref/comm"],
    "ref/layers": ["ref/comm"],
    "ref/models": ["ref/comm", "ref/placement", "ref/pipeline"],
    "ref/train": ["ref/comm", "ref/placement", "ref/pipeline"],
    "ref/baseline": ["ref/core", "ref/numerics"],  # those of BASELINE_HEADERS
    "verify/bytes": ["ref/placement", "ref/models"],
    "gpu": ["ref/cpu"],
    "verify/run": ["ref/arith", "sim", "gpu"],
    "verify/lint": ["ref/placement", "verify/run"],
    "verify/plan": ["ref/placement"],
    "verify/read": ["ref/placement"],
    "verify/check": ["ref/placement", "gpu/cluster/process", "gpu"],
    "verify/grads": ["ref/comm"],
    "verify/faults": ["ref/comm"],
    **{room: ["ref/comm", "ref/cpu", "ref/pipeline", "ref/placement", "sim", "gpu", "gpu/cluster/process", "gpu/cluster/process/transport"]
       for room in ("cli", "cli/shared", "cli/options", *SUBCOMMANDS)},
    "bench": ["ref/comm", "ref/context", "ref/cpu", "ref/models", "ref/train", "sim", "gpu/cluster/process",
              "gpu/cluster/process/transport"],
}
# Whose files are users of the library: they call all that is public.
CALLS_ALL = {PUBLIC, "examples", "tests/sim"}

# The tests' own definition of the collectives.
PLAIN = "tests/sim/plain*.h"

# What the baseline may include besides its own files.
BASELINE_HEADERS = {
    "ref/numerics/bits.h", "ref/numerics/elementary.h", "ref/numerics/activation.h", "ref/numerics/philox.h",
    "ref/numerics/digest.h", "ref/core/size.h",
    "include/anyrank/activation.h", "include/anyrank/arch.h", "include/anyrank/baseline.h", "include/anyrank/batch.h",
    "include/anyrank/block.h", "include/anyrank/config.h", "include/anyrank/optimizer.h", "include/anyrank/rope.h",
    "include/anyrank/status.h",
}

# What it may reach through them. Formulas of layers, of rotations and of the optimizer are not among them: the baseline
# would stand on what it is there to check.
BASELINE_REACHES = BASELINE_HEADERS | {"ref/core/float_bits.h"}

# The page that names, in this section, each function that the baseline calls and does not define.
SHARED_PAGE, SHARED_SECTION = "docs/design/baseline.md", "## What it shares"
CALL, NAMED = re.compile(r"\b(ari?_(?!bl_)\w+)\("), re.compile(r"`(ari?_\w+)`")

# Public headers that only some folders may include: what is below the simulator or the baseline does not know of them.
PUBLIC_FOR = {
    "include/anyrank/sim.h": {PUBLIC, "sim", "verify/lint", "verify/plan", "verify/run", "verify", "cli", "bench", "examples",
                              "tests/sim", "cli/shared", "cli/options"} | set(ROOMS + SUBCOMMANDS),
    "include/anyrank/baseline.h": {PUBLIC, "ref/baseline", "verify", "cli", "bench", "examples"} | set(ROOMS + SUBCOMMANDS),
}

STANDARD_C = {name + ".h" for name in (
    "assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign stdarg stdatomic "
    "stdbool stddef stdint stdio stdlib stdnoreturn string tgmath time uchar wchar wctype").split()}
BASELINE_SYSTEM = STANDARD_C | {"fnmatch.h"}  # the globs of parameter groups

# What a folder may not reach, be it through other headers. Threads, CUDA, MPI and BLIS are the business of the folders
# that are not named here.
THREADS = r"pthread\.h|threads\.h|semaphore\.h|sched\.h|linux/futex\.h|omp\.h"
CUDA = r"cuda.*|cublas.*|nccl.*|nvtx.*"
LIBRARIES = r"blis\.h|blis/.*|cblas\.h"
FORBIDDEN_SYSTEM = {
    PUBLIC: re.compile(rf"(?:{THREADS}|{CUDA}|{LIBRARIES}|mpi\.h|jansson\.h)$"),
    "ref/core": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "ref/placement": re.compile(rf"(?:{THREADS}|{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "ref/comm": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "ref/context": re.compile(rf"(?:{THREADS}|{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "ref/record": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "ref/cpu": re.compile(rf"(?:{CUDA}|mpi\.h)$"),
    "sim": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "gpu/cluster/process": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "gpu/cluster/mpi": re.compile(rf"(?:{CUDA}|{LIBRARIES})$"),
    "verify/lint": re.compile(rf"(?:{THREADS}|{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "verify/run": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "verify/read": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "verify": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "python/abi": re.compile(rf"(?:{THREADS}|{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "cli": re.compile(rf"(?:{CUDA}|{LIBRARIES}|mpi\.h)$"),
    "gpu": re.compile(r"mpi\.h$"),
}
for room in ROOMS:
    FORBIDDEN_SYSTEM[room] = FORBIDDEN_SYSTEM["verify"]
for room in ("cli/shared", "cli/options", *SUBCOMMANDS):
    FORBIDDEN_SYSTEM[room] = FORBIDDEN_SYSTEM["cli"]
FORBIDDEN_SYSTEM["gpu/cluster/process/transport"] = FORBIDDEN_SYSTEM["gpu/cluster/process"]
for folder in ("ref/numerics", "ref/arith", "ref/layers", "ref/pipeline", "ref/models", "ref/train", "ref/io"):
    FORBIDDEN_SYSTEM[folder] = re.compile(rf"(?:{THREADS}|{CUDA}|{LIBRARIES}|mpi\.h)$")

# Where names of other files are defined a second time: the build, or a table of functions, chooses one of the two.
ALTERNATIVES = ("gpu/absent.c", "gpu/cluster/mpi/absent.c", "ref/arith/native.", "ref/cpu/blas/", "gpu/emulated/kernel.h")
# Macros that each file sets for a header that it includes.
PARAMETERS = {"ARI_VALUES", "ARI_CAUSE_ROWS"}

MOST_LINES, MOST_FUNCTION_LINES = 900, 60
# How many names of another folder each folder uses: "folder, other: number" in each line. The types of the public
# headers belong to no folder.
EDGES = "scripts/edges.txt"
EDGE = re.compile(r"^(\S+), (\S+): (\d+)$")
# clang-format puts the braces of a function's body into the first column, each alone on its line.
FUNCTION = re.compile(r"^\{\n((?:(?:[^{}\n].*)?\n)*)\}$", re.MULTILINE)

# What defines a type, with a body or as another name of a type, and what defines a function that is not static.
# clang-format puts their beginnings, and the brace that ends a type, into the first column.
DEFINITION = re.compile(
    r"^(?:typedef\s+)?(?:struct|enum|union)\s+(ari?_\w+)\s*\{|^\}\s*(ari?_\w+);"
    r"|^typedef\s+(?!struct\b|enum\b|union\b)[^;{}()]*?\(?\*?\b(ari?_\w+)\)?(?:\([^;{}]*\))?;"
    r"|^(?!static\b|typedef\b)(?:\w[\w *]*[ *])?(ari?_\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
WORD = re.compile(r"\bari?_\w+")
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
MACRO = re.compile(r"^[ \t]*#[ \t]*(define|undef)[ \t]+(ARI?_\w+)", re.MULTILINE)
ENUM = re.compile(r"\benum\b(?:\s+\w+)?\s*\{([^{}]*)\}")
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
# A fault that code asks for, and one of the table of faults.
FAULT_ASKED = re.compile(r'\bari_fault(?:y|_is)\([^;"]*"(\w+)"')
FAULTS, FAULT_ROW = "ref/core/fault.c", re.compile(r"^ +X\((\w+),", re.MULTILINE)
ENUMERATOR = re.compile(r"\b(\w+)\s*(?:=[^,]*)?(?:,|\Z)")


def name_of(root, path):
    """A file's name as an include has it."""
    return path.relative_to(root).as_posix()


def top_folders(root):
    """(the tree's folders, whether git knows them): in a source archive those that have a rule."""
    listed = ""
    if (root / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False).stdout
    names = listed.split("\0") if listed else [folder + "/" for folder in ALLOWED]
    return sorted({name.split("/")[0] for name in names if "/" in name}), bool(listed)


def constants(text):
    """(name, position) of the macros and enumerators that a file defines, but for macros that it takes back."""
    undone = {match.group(2) for match in MACRO.finditer(text) if match.group(1) == "undef"} | PARAMETERS
    for match in MACRO.finditer(text):
        if match.group(2) not in undone:
            yield match.group(2), match.start()
    for enum in ENUM.finditer(text):
        body = DIRECTIVE.sub(lambda match: " " * len(match.group(0)), enum.group(1))
        for match in ENUMERATOR.finditer(body):
            if match.group(1).startswith(("ARI_", "AR_")):
                yield match.group(1), enum.start(1) + match.start()


def without_comments(text):
    """The text with comments blanked, line numbers kept: an include inside one is none."""
    def blank(match):
        token = match.group(0)
        return token if token[0] in "\"'" else re.sub(r"[^\n]", " ", token)
    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', blank, text, flags=re.DOTALL)


class Tree:
    """The project's files and what each includes."""

    def __init__(self, root):
        self.root = root
        self.includes = {}  # path -> [(line, resolved project path or None, text, is system)]
        self.definitions = {}  # name of a type, function, enumerator or macro -> {path: line}
        self.functions_at = {}  # name of a function that is not static -> path
        self.words = {}  # path -> {ar_* or ari_* that stands there: line}
        self.lines = {}  # path -> how many
        self.calls = {}  # path -> {ar_* or ari_* that is called: line}
        self.faults = {}  # path -> {fault that the file asks for: line}
        self.functions = {}  # path -> [(line, lines of the body)]
        tops, self.complete = top_folders(root)
        for top in tops:
            for path in sorted((root / top).rglob("*")) if top != "tests" else ():
                if path.suffix in SUFFIXES and path.is_file():
                    self.includes[name_of(root, path)] = self.read(path)
        for path in sorted(root.glob(PLAIN)):
            self.includes[name_of(root, path)] = self.read(path)

    def read(self, path):
        text = without_comments(path.read_text(encoding="utf-8", errors="replace"))
        name = name_of(self.root, path)
        code = STRING.sub('""', text)
        self.words[name] = {word: line for line, text_of in reversed(list(enumerate(code.splitlines(), 1)))
                            for word in WORD.findall(text_of)}
        self.calls[name] = {match.group(1): code.count("\n", 0, match.start()) + 1
                            for match in reversed(list(CALL.finditer(code)))}
        self.faults[name] = {match.group(1): text.count("\n", 0, match.start(1)) + 1 for match in FAULT_ASKED.finditer(text)}
        defined = [(match.group(match.lastindex), match.start()) for match in DEFINITION.finditer(text)]
        for match in DEFINITION.finditer(text):
            self.words[name].pop(match.group(4), None)  # what a file defines itself it may use
            if match.group(4) and not name.startswith(ALTERNATIVES):
                self.functions_at[match.group(4)] = name
        for word, offset in [*defined, *constants(text)] if not name.startswith(ALTERNATIVES) else ():
            self.definitions.setdefault(word, {}).setdefault(name, text.count("\n", 0, offset) + 1)
        self.lines[name] = text.count("\n")
        self.functions[name] = [(text.count("\n", 0, match.start()) + 1, match.group(1).count("\n"))
                                for match in FUNCTION.finditer(text)]
        found = []
        for match in INCLUDE.finditer(text):
            # The match may begin on earlier, blank lines.
            line = text.count("\n", 0, match.start(1) if match.group(1) else match.start(2)) + 1
            included = match.group(1) or match.group(2)
            target = self.resolve(path, included)
            found.append((line, target, included, match.group(1) is None and target is None))
        return found

    def resolve(self, path, name):
        """The project's file that an include names, as the compiler finds it; None for another's header."""
        for base in (path.parent, self.root / "include", self.root):
            candidate = base / name
            if candidate.is_file():
                return name_of(self.root, candidate.resolve())
        return None

    def reached(self, name):
        """(chain of files, text, target, is system) of everything that a file includes, directly or not."""
        seen, stack = {name}, [[name]]
        while stack:
            chain = stack.pop()
            for _, target, text, system in self.includes.get(chain[-1], []):
                yield chain, text, target, system
                if target and target not in seen:
                    seen.add(target)
                    stack.append(chain + [target])


def folder_of(name):
    """The longest folder with a rule that holds a file; None if there is none."""
    parts = name.split("/")[:-1]
    while parts:
        if "/".join(parts) in ALLOWED:
            return "/".join(parts)
        parts.pop()
    return None


def first_line(tree, name, target_or_text):
    """The line on which `name` includes something, by path or by text."""
    for line, target, text, _ in tree.includes[name]:
        if target_or_text in (target, text):
            return line
    return 1


def check_direct(tree, name, folder):
    """Violations among a file's own includes."""
    for line, target, text, system in tree.includes[name]:
        if target is None:
            if not system:
                yield line, f'"{text}" is no file of the project; headers of others go in <>'
            continue
        target_folder = folder_of(target)
        if folder == "ref/baseline":
            if target_folder != folder and target not in BASELINE_HEADERS:
                yield line, f"the baseline may not include {target}"
        elif folder not in PUBLIC_FOR.get(target, {folder}):
            yield line, f"{folder} may not include {target}"
        elif target_folder is None:
            yield line, f"{target} is in a folder without a rule in scripts/check_includes.py"
        elif target.endswith("_private.h") and (folder in CALLS_ALL or target_folder in CALLS.get(folder, ())):
            pass  # functions that it may call
        elif target_folder not in (folder, PUBLIC) and target_folder not in ALLOWED[folder]:
            may = ", ".join(ALLOWED[folder]) or "public headers only"
            yield line, f"{folder} may not include {target} (it may: {may})"


def check_reached(tree, name, folder):
    """Violations among what a file reaches, each told at the line of the file's own include that leads there."""
    forbidden = FORBIDDEN_SYSTEM.get(folder)
    reported = set()
    for chain, text, target, system in tree.reached(name):
        way = " through " + " -> ".join(chain[1:]) if len(chain) > 1 else ""
        problem = None
        if folder == "ref/baseline":
            if system and text not in BASELINE_SYSTEM:
                problem = f"the baseline may not include <{text}>{way}"
            elif way and target and folder_of(target) != folder and target not in BASELINE_REACHES:
                problem = f"the baseline may not reach {target}{way}"
        elif system and forbidden and forbidden.match(text):
            problem = f"{folder} may not include <{text}>{way}"
        if problem and (target or text) not in reported:
            reported.add(target or text)
            yield first_line(tree, name, chain[1] if len(chain) > 1 else text), problem


def check_calls(tree, name, folder):
    """Uses of functions that are defined where the folder may not reach, whatever header declares them."""
    for word, line in tree.words[name].items() if folder not in CALLS_ALL else ():
        callee_folder = folder_of(tree.functions_at.get(word, name))
        if callee_folder not in (folder, PUBLIC, *ALLOWED[folder], *CALLS.get(folder, ())):
            yield line, f"{folder} may not call {word} ({tree.functions_at[word]})"


def check_homonyms(tree):
    """Names with definitions in two files, each told in all files but the first."""
    for name, places in tree.definitions.items():
        first_file = min(places)
        for path in set(places) - {first_file}:
            yield path, places[path], f"{name} is also defined in {first_file}: give one of them another name"


def check_faults(tree):
    """Faults that are asked for and not in the table: they never act."""
    table = tree.root / FAULTS
    known = set(FAULT_ROW.findall(table.read_text(encoding="utf-8"))) if table.exists() else set()
    for name, asked in tree.faults.items():
        for fault in sorted(set(asked) - known):
            yield name, asked[fault], f"there is no fault '{fault}' in {FAULTS}"


def check_shared(tree):
    """Functions that the baseline shares with what it judges and does not say so, or no longer shares. Not in an archive
    without the page."""
    page = tree.root / SHARED_PAGE
    if not page.exists():
        return
    before, _, section = page.read_text(encoding="utf-8").partition(SHARED_SECTION)
    line, named = before.count("\n") + 1, set(NAMED.findall(section.partition("\n## ")[0]))
    inside = [path for path in tree.includes if folder_of(path) == "ref/baseline"]
    defined = {name for name, path in tree.functions_at.items() if path in inside}
    shared = {name: (path, call_line) for path in inside for name, call_line in tree.calls[path].items()
              if name not in defined}
    for name in sorted(set(shared) - named):
        yield *shared[name], f"the baseline shares {name}: write it anew in ref/baseline, or say so in {SHARED_PAGE}"
    for name in sorted(named - set(shared)):
        yield SHARED_PAGE, line, f"the baseline calls no {name}"


def check_sizes(tree, name, folder):
    """A file or a function that is too long to be one idea."""
    del folder
    if tree.lines[name] > MOST_LINES:
        yield 1, f"{tree.lines[name]} lines: at most {MOST_LINES}, split it by ideas"
    for line, lines in tree.functions[name]:
        if lines > MOST_FUNCTION_LINES:
            yield line, f"a function of {lines} lines: at most {MOST_FUNCTION_LINES}"


def edges(tree):
    """{(folder, other folder): {function or type of the other that the folder uses: files that do}}"""
    found = {}
    for path, words in tree.words.items():
        folder = folder_of(path)
        for word in words if folder and folder not in CALLS_ALL else ():
            used_folder = folder_of(tree.functions_at.get(word) or min(tree.definitions.get(word, [path])))
            if used_folder not in (folder, PUBLIC, None):
                found.setdefault((folder, used_folder), {}).setdefault(word, set()).add(path)
    return found


def slack(limit):
    """What a number in EDGES may be off by, so that not every call is a line of it."""
    return max(2, limit // 10)


def check_edges(tree):
    """Folders that use more of another than EDGES says, or so much less that it says nothing. Not in an archive without
    it."""
    if not (tree.root / EDGES).exists():
        return
    write = "`scripts/check_includes.py --write .`"
    limits = {}
    for line, text in enumerate((tree.root / EDGES).read_text(encoding="utf-8").splitlines(), 1):
        match = EDGE.match(text)
        if match:
            limits[match.group(1), match.group(2)] = line, int(match.group(3))
    found = edges(tree)
    for pair in sorted({*limits, *found}):
        line, limit = limits.get(pair, (1, 0))
        names = found.get(pair, {})
        folder, used = pair
        if len(names) > limit + (slack(limit) if limit else 0):
            once = sorted(name for name, files in names.items() if len(files) == 1)[:5]
            yield EDGES, line, (f"{folder} uses {len(names)} names of {used}, where {limit} did: ask {used} for the "
                                f"whole thing, or move what both need (in one file alone: {', '.join(once)}); "
                                f"if the edge should be that wide, {write}")
        elif len(names) < limit - slack(limit) or (limit and not names):
            yield EDGES, line, f"{folder} uses {len(names)} names of {used}, no longer {limit}: {write}"


def write_edges(root):
    lines = ["# Folder, other folder: of whose functions and types it uses so many. After a conflict write it anew:\n"
             "# scripts/check_includes.py --write .\n"]
    lines += [f"{folder}, {used}: {len(names)}\n" for (folder, used), names in sorted(edges(Tree(root)).items())]
    (root / EDGES).write_text("".join(lines), encoding="utf-8")


def check_rules(tree):
    """Rules of folders that have no sources: renamed, or never read. An archive may leave folders out."""
    for folder in ALLOWED if tree.complete else ():
        if not any(name.startswith(folder + "/") for name in tree.includes):
            yield "scripts/check_includes.py", 1, f"a rule for {folder}, which has no sources"


def violations(root):
    """Sorted ["file:line: message"] of a tree, and how many files it has."""
    tree = Tree(root)
    found = list(check_homonyms(tree)) + list(check_faults(tree)) + list(check_edges(tree)) + list(check_rules(tree))
    found += check_shared(tree)
    for name in tree.includes:
        folder = folder_of(name)
        if folder is None:
            found.append((name, 1, "this folder has no rule in scripts/check_includes.py"))
            continue
        for check in (check_direct, check_reached, check_calls, check_sizes):
            found += [(name, line, message) for line, message in check(tree, name, folder)]
    return [f"{name}:{line}: {message}"
            for name, line, message in sorted(set(found))], len(tree.includes)


def main():
    words = sys.argv[1:]
    write = words[:1] == ["--write"]
    if len(words) != 1 + write or not pathlib.Path(words[-1]).is_dir():
        print("usage: check_includes.py [--write] ROOT", file=sys.stderr)
        return 2
    root = pathlib.Path(words[-1]).resolve()
    if write:
        write_edges(root)
    found, files = violations(root)
    for line in found:
        print(line)
    if files == 0:
        print(f"check_includes.py: no sources under {root}", file=sys.stderr)
        return 2
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
