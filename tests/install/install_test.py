#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of what is installed: that others can build with it, that the command works from there, that manual pages and
completions tell what the command does, and that uninstalling leaves nothing. ANYRANK_BUILD names another build folder.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ.get("ANYRANK_BUILD", ROOT / "build")).resolve()
CONSUMER = ROOT / "tests/install/consumer"
RECORDS = ("install_manifest.txt", "install_folders.txt")

# Nothing may be found through the environment.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("ANYRANK", "PKG_CONFIG"))}

scratch = prefix = None


def run(command, **options):
    options.setdefault("env", ENVIRONMENT)
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=1800, check=False,
                          stdin=subprocess.DEVNULL, **options)


def must(command, **options):
    """Standard output of a command that has to work."""
    done = run(command, **options)
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(map(str, command))}: exit status {done.returncode}\n"
                             f"{done.stdout}{done.stderr}")
    return done.stdout


def compiler(*names):
    return next((name for name in names if name and shutil.which(name)), None)


CC = compiler(os.environ.get("CC"), "cc", "gcc", "clang")
CXX = compiler(os.environ.get("CXX"), "c++", "g++", "clang++")


def setUpModule():
    """Installs, and moves what was installed: nothing in it may know its place."""
    global scratch, prefix
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="anyrank-install-")).resolve()
    # The records of a real install stay what they are; renaming works even if root owns them.
    for name in RECORDS:
        if (BUILD / name).exists():
            (BUILD / name).rename(BUILD / (name + ".kept"))
    must(["cmake", "--install", BUILD, "--prefix", scratch / "first"])
    prefix = scratch / "moved"
    (scratch / "first").rename(prefix)


def tearDownModule():
    for name in RECORDS:
        (BUILD / name).unlink(missing_ok=True)
        if (BUILD / (name + ".kept")).exists():
            (BUILD / (name + ".kept")).rename(BUILD / name)
    shutil.rmtree(scratch)


def command(*arguments, **options):
    return run([prefix / "bin/anyrank", *arguments], **options)


def find(name):
    """The one installed file of this name."""
    found = list(prefix.rglob(name))
    if len(found) != 1:
        raise AssertionError(f"{name}: expected one file below {prefix}, found {found}")
    return found[0]


def subcommands():
    listed = command("--help").stdout.split("subcommands:\n")[1].split("\n\n")[0].splitlines()
    return [line.split()[0] for line in listed if not line.endswith("(later)")]


def options_of(subcommand):
    """{long option: its choices, or []} as --help prints them, of which the manual and completions have no part."""
    found = {}
    for name, value in re.findall(r"^  (?:-\w, )?--([a-z0-9-]+)(?: (\S+))?", command(subcommand, "--help-all").stdout,
                                  re.MULTILINE):
        found[name] = value.split("|") if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", value) else []
    return found


def version():
    return command("--version").stdout.split()[1]


def faults():
    return [fault["name"] for fault in json.loads(command("bugs", "--json", "-").stdout)["faults"]]


def models():
    return [path.parent.name for path in (prefix / "share/anyrank").glob("*/config.json")]


class Install(unittest.TestCase):
    def test_the_command_finds_its_data(self):
        info = json.loads(must([prefix / "bin/anyrank", "info", "--json", "-"], cwd="/"))
        self.assertEqual(info["data_dir"], str(prefix / "share/anyrank"))

    def test_the_command_checks_from_another_folder(self):
        done = command("check", "stack-demo", "--batch", "1", "--seq", "4", "--steps", "1",
                       "--skip-f64", "--strict-predictions",
                       cwd=scratch)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("check: the same bits in all", done.stdout)

    def test_the_build_tree_keeps_to_its_sources(self):
        info = json.loads(must([BUILD / "anyrank", "info", "--json", "-"], cwd="/"))
        self.assertEqual(info["data_dir"], str(ROOT / "ref/data"))

    def test_a_moved_build_tree_finds_what_came_with_it(self):
        place = scratch / "tree"
        (place / "build").mkdir(parents=True)
        (place / "ref/data").mkdir(parents=True)
        shutil.copy(BUILD / "anyrank", place / "build")
        alone = run([place / "build/anyrank", "check", "llama-demo"], cwd="/")
        self.assertEqual(alone.returncode, 2)
        for tried in (place / "build/../share/anyrank", place / "build/../ref/data", "/usr/local/share/anyrank"):
            self.assertIn(f"'{tried}'", alone.stderr)
        shutil.copy(ROOT / "ref/data/text.txt", place / "ref/data")
        info = json.loads(must([place / "build/anyrank", "info", "--json", "-"], cwd="/"))
        self.assertEqual(info["data_dir"], str(place / "ref/data"))

    @unittest.skipUnless(shutil.which("readelf"), "no readelf here")
    def test_nothing_needs_the_cxx_library(self):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", must(["readelf", "-d", prefix / "bin/anyrank"]))
        self.assertTrue(needed)
        self.assertEqual([name for name in needed if "stdc++" in name or "c++" in name], [])

    def test_causes_come_from_the_package_that_was_installed(self):
        done = run([prefix / "bin/anyrank", "causes", "missing_all_reduce"], cwd="/")
        if "numpy" in done.stderr:
            self.skipTest("no numpy here")
        self.assertEqual((done.returncode, done.stdout.splitlines()[0]), (0, "missing_all_reduce"), done.stderr)
        self.assertFalse((prefix / "share/anyrank/python/anyrank/tests").exists())

    def test_licence_and_documents_are_there(self):
        for name in ("LICENSE", "README.md", "docs/guide/check.md"):
            self.assertEqual((prefix / "share/doc/anyrank" / name).read_bytes(), (ROOT / name).read_bytes())

    def test_every_header_compiles_alone_and_all_of_them_together(self):
        headers = sorted(path.name for path in (prefix / "include/anyrank").iterdir())
        self.assertEqual(headers, sorted(path.name for path in (ROOT / "include/anyrank").glob("*.h")))
        strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I", prefix / "include"]
        languages = [(CC, "c", "c99"), (CC, "c", "c17"), (CXX, "c++", "c++11"), (CXX, "c++", "c++17")]
        for tool, language, standard in languages if CXX else languages[:2]:
            for included in [[header] for header in headers] + [headers]:
                with self.subTest(included=included, standard=standard):
                    stub = scratch / ("stub." + language)
                    stub.write_text("".join(f"#include <anyrank/{header}>\n" for header in included), encoding="utf-8")
                    done = run([tool, "-std=" + standard, *strict, "-x", language, stub])
                    self.assertEqual(done.returncode, 0, done.stderr)

    def test_every_example_compiles_as_c99_and_as_cxx11(self):
        # C++11 has no designated initializers: g++ accepts them in the struct's order, with a warning.
        examples = sorted((ROOT / "examples").glob("*.c"))
        self.assertTrue(examples)
        languages = [[CC, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-x", "c"]]
        if CXX:
            languages.append([CXX, "-std=c++11", "-x", "c++"])
        for language in languages:
            for example in examples:
                with self.subTest(example=example.name, standard=language[1]):
                    done = run([*language, "-fsyntax-only", "-I", prefix / "include", example])
                    self.assertEqual(done.returncode, 0, done.stderr)


class Consumer(unittest.TestCase):
    def runs(self, program):
        # Only a shared library needs the path.
        self.assertEqual(must([program], env={**ENVIRONMENT, "LD_LIBRARY_PATH": str(find("anyrank.pc").parent.parent)}),
                         "6 ranks\nAR_ERR_ARG\n")

    def through_find_package(self, language):
        build = scratch / ("consumer-" + language)
        must(["cmake", "-S", CONSUMER, "-B", build, f"-DLANGUAGE={language}", f"-DCMAKE_PREFIX_PATH={prefix}",
              f"-DWANTED_VERSION={version()}", "-DCMAKE_BUILD_TYPE=Release"])
        self.assertIn(f"anyrank_DIR:PATH={find('anyrankConfig.cmake').parent}\n",
                      (build / "CMakeCache.txt").read_text(encoding="utf-8"))
        must(["cmake", "--build", build])
        self.runs(build / "consumer")

    def test_find_package_in_c(self):
        self.through_find_package("C")

    @unittest.skipUnless(CXX, "no C++ compiler here")
    def test_find_package_in_cxx_alone(self):
        self.through_find_package("CXX")

    @unittest.skipUnless(shutil.which("pkg-config"), "no pkg-config here")
    def test_pkg_config(self):
        environment = {**ENVIRONMENT, "PKG_CONFIG_PATH": str(find("anyrank.pc").parent)}
        self.assertEqual(must(["pkg-config", "--modversion", "anyrank"], env=environment).strip(), version())
        flags = must(["pkg-config", "--static", "--cflags", "--libs", "anyrank"], env=environment)
        paths = [flag for flag in shlex.split(flags) if "/" in flag]
        self.assertEqual([flag for flag in paths if str(prefix) not in os.path.realpath(flag[2:])], [])
        must([CC, "-std=c17", CONSUMER / "main.c", "-o", scratch / "consumer", *shlex.split(flags)])
        self.runs(scratch / "consumer")
        folder = must(["pkg-config", "--variable=datadir", "anyrank"], env=environment).strip()
        self.assertTrue(os.path.exists(folder + "/text.txt"), folder)


class Manual(unittest.TestCase):
    """The build puts the options into pages written by hand: they are compared with what --help prints."""

    def page(self, name):
        return (prefix / "share/man/man1" / name).read_text(encoding="utf-8")

    @staticmethod
    def plain(page):
        """Without fonts, and with the arguments of .BR and its like run together."""
        text = re.sub(r"\\f.", "", page).replace("\\-", "-")
        return re.sub(r"^\.[BIR]{1,2} (.*)$", lambda m: m[1].replace('" "', "\0").replace(" ", "").replace("\0", " "),
                      text, flags=re.MULTILINE)

    def test_every_subcommand_has_a_page_and_no_other(self):
        pages = sorted(path.name for path in (prefix / "share/man/man1").iterdir())
        self.assertEqual(pages, sorted(["anyrank.1"] + [f"anyrank-{name}.1" for name in subcommands()]))
        for name in subcommands():
            self.assertIn(f"anyrank-{name}(1)", self.plain(self.page("anyrank.1")))

    def test_pages_have_the_options_of_the_help(self):
        for name in subcommands():
            page = self.plain(self.page(f"anyrank-{name}.1"))
            entries = "\n".join(re.findall(r"^\.TP\n(.*)$", page, re.MULTILINE))
            with self.subTest(subcommand=name):
                self.assertEqual(sorted(re.findall(r"--([a-z][a-z0-9-]*)", entries)), sorted(options_of(name)))
                for option, choices in options_of(name).items():
                    if choices:
                        self.assertIn(f"--{option} {'|'.join(choices)}\n", entries + "\n")

    def test_pages_have_the_version(self):
        for path in (prefix / "share/man/man1").iterdir():
            self.assertIn(f'"anyrank {version()}"', self.page(path.name).splitlines()[1])

    def test_pages_have_what_the_help_says(self):
        for name in subcommands():
            page = " ".join(self.plain(self.page(f"anyrank-{name}.1")).replace("\\(aq", "'").split())
            shown = command(name, "--help-all").stdout
            entries = re.findall(r"^  (?:-\w, )?--(.*(?:\n {3,}.*)*)", shown, re.MULTILINE)
            self.assertEqual(len(entries), len(options_of(name)))
            for entry in entries:
                with self.subTest(subcommand=name, entry=entry):
                    self.assertIn(" --" + " ".join(entry.split()), page)

    def test_a_page_that_lacks_an_option_is_an_error(self):
        template, out = scratch / "page.in", scratch / "page"
        for lines, wrong in [("manual info json", "the page lacks --quiet of info"),
                             ("manual info prob", "anyrank info has no option --prob"),
                             ("manual inf", "there is no subcommand 'inf' with options"),
                             ("manul", "there is nothing 'manul' to describe")]:
            template.write_text(f'.SH OPTIONS\n.\\" @describe {lines}\n', encoding="utf-8")
            done = command("describe", template, out)
            self.assertEqual((done.returncode, done.stderr), (2, f"anyrank describe: {wrong}\n"))
            self.assertFalse(out.exists())

    @unittest.skipUnless(shutil.which("groff"), "no groff here")
    def test_groff_has_no_complaint(self):
        for path in (prefix / "share/man/man1").iterdir():
            done = run(["groff", "-man", "-Tutf8", "-ww", "-z", path])
            self.assertEqual((done.returncode, done.stderr), (0, ""))


class Completions(unittest.TestCase):
    def installed(self, path):
        return prefix / "share" / path

    def same(self, got, want):
        self.assertEqual(sorted(got), sorted(want))

    @unittest.skipUnless(shutil.which("bash"), "no bash here")
    def test_bash(self):
        script = ('source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _anyrank; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        empty = scratch / "empty"
        empty.mkdir()

        def completed(*words):
            return must(["bash", "-c", script, "bash", self.installed("bash-completion/completions/anyrank"), "anyrank",
                         *words], cwd=empty).split()

        self.same(completed(""), [*subcommands(), "help", "--help", "--version"])
        self.same(completed("help", ""), subcommands())
        for name in subcommands():
            with self.subTest(subcommand=name):
                self.same(completed(name, "--"), ["--" + option for option in options_of(name)])
                for option, choices in options_of(name).items():
                    if choices:
                        self.same(completed(name, "--" + option, ""), choices)
                        self.same(completed(name, "--" + option, "="), choices)
        self.same(completed("check", "--inject", ""), faults())
        self.same(completed("check", "--tp", ""), [])
        self.same(completed("check", "--sweep", ""), models())
        self.same(completed("check", "--inject", "=", "loss"), [f for f in faults() if f.startswith("loss")])
        self.same(completed("check", ""), models())
        self.same(completed("grads", ""), models())

    def test_zsh(self):
        path = self.installed("zsh/site-functions/_anyrank")
        # Without the descriptions, which may name other options.
        text = re.sub(r"\[[^\]]*\]", "[]", path.read_text(encoding="utf-8"))
        self.assertTrue(text.startswith("#compdef anyrank\n"))

        def block(name):
            return re.search(rf"^    {name}=\((.*?)^    \)", text, re.DOTALL | re.MULTILINE)[1]

        self.same(re.findall(r"^        '(\w+):", block("subcommands"), re.MULTILINE), subcommands())
        for name in subcommands():
            branch = re.search(rf"^        {name}\)(.*?);;", text, re.DOTALL | re.MULTILINE)[1]
            with self.subTest(subcommand=name):
                self.same(set(re.findall(r"--([a-z][a-z0-9-]*)", branch)), options_of(name))
                for option, choices in options_of(name).items():
                    if choices:
                        self.assertIn(f"({' '.join(choices)})", re.search(rf"--{option}=\[\].*", branch)[0])
                for inject in re.findall(r"--inject=\[\].*\(([^)]*)\)'", branch):
                    self.same(inject.split(), faults())
                for folder in re.findall(r"':MODEL: _anyrank_word_or_folder ([^']*)'", branch):
                    self.same(folder.split(), models())
        injecting = [name for name in subcommands() if "inject" in options_of(name)]
        self.assertEqual(len(re.findall(r"--inject=\[\].*\(column", text)), len(injecting))
        taking = [name for name in subcommands() if re.search(r"^usage: .*\bMODEL\b", command(name, "--help").stdout)]
        self.assertEqual(len(re.findall("':MODEL: _anyrank_word_or_folder ", text)), len(taking))
        if shutil.which("zsh"):
            must(["zsh", "-n", path])

    def test_fish(self):
        path = self.installed("fish/vendor_completions.d/anyrank.fish")
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        sets = dict(re.findall(r'^set -l (\w+) "?(.*?)"?$', text, re.MULTILINE))
        self.same(sets["subcommands"].split(), subcommands())
        found = {name: {} for name in subcommands()}
        for line in text.splitlines():
            option = re.search(r" -l ([a-z0-9-]+)", line)
            if not line.startswith("complete ") or option is None:
                continue
            condition = re.search(r" -n \$(\w+)", line)
            where = sets[condition[1]] if condition else "$subcommands"
            choices = re.search(r' -a "([a-z0-9_ -]+)"', line)
            for name in where.replace("$subcommands", sets["subcommands"]).split():
                if name in found:
                    found[name][option[1]] = choices[1].split() if choices else []
        for name in subcommands():
            with self.subTest(subcommand=name):
                self.same(found[name], options_of(name))
                for option, choices in options_of(name).items():
                    if choices:
                        self.assertEqual(found[name][option], choices)
                if "inject" in found[name]:
                    self.same(found[name]["inject"], faults())
                models_of = re.search(rf'^complete -c anyrank -n \${name} -a "([^("]*) \(__fish', text, re.MULTILINE)
                if name in ("check", "grads", "train"):
                    self.same(models_of[1].split(), models())
        if shutil.which("fish"):
            must(["fish", "-n", path])


class Uninstall(unittest.TestCase):
    def uninstall(self):
        return run(["cmake", "--build", BUILD, "--target", "uninstall"])

    def test_nothing_is_left_and_nothing_else_goes(self):
        place = scratch / "other"
        (place / "bin").mkdir(parents=True)
        (place / "share/doc/theirs").mkdir(parents=True)
        before = sorted(place.rglob("*"))
        for _ in range(2):  # installing over an install changes nothing
            must(["cmake", "--install", BUILD, "--prefix", place])
        self.assertTrue((place / "bin/anyrank").exists())
        done = self.uninstall()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(sorted(place.rglob("*")), before)
        done = self.uninstall()
        self.assertNotEqual(done.returncode, 0)
        # CMake breaks the lines of a message where it likes.
        self.assertIn("nothing was installed from", " ".join((done.stdout + done.stderr).split()))

    def test_a_new_prefix_goes_too_but_not_with_a_file_in_it(self):
        for stays in (False, True):
            place = scratch / f"new-{stays}"
            must(["cmake", "--install", BUILD, "--prefix", place])
            mine = place / "share/anyrank/mine"
            if stays:
                mine.touch()
            self.assertEqual(self.uninstall().returncode, 0)
            left = [path for path in place.rglob("*") if path.is_file()]
            self.assertEqual((left, place.exists()), ([mine] if stays else [], stays))


if __name__ == "__main__":
    unittest.main()
