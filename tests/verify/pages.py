# SPDX-License-Identifier: Apache-2.0
"""The examples of documentation pages: fenced blocks, and the commands in them with what the page says they print."""

import re
import shlex
import shutil
import subprocess
import sys

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, ROOT, Case, start  # noqa: E402

GOLDEN = ROOT / "tests/golden/llama-gqa-tiny"


def text(page):
    (found,) = [ROOT / page] if page == "README.md" else (ROOT / "docs").rglob(page)
    return found.read_text(encoding="utf-8")


def blocks(page):
    """The fenced blocks of a page, in order."""
    return re.findall(r"^```\w*\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def block(page, start):
    """The one block that begins so."""
    (found,) = [b for b in blocks(page) if b.startswith(start)]
    return found


def session(found):
    """(command, output) of every line that begins with "$ "."""
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in re.split(r"^\$ ", found, flags=re.MULTILINE)[1:]]


def without_remarks(line):
    """A line up to what two spaces or more set apart from it."""
    return re.sub(r"(?<=\S)\s{2,}.*", "", line)


def flat(output):
    """The page wraps long lines."""
    return " ".join(output.split())


class PageTest(Case):
    """A scratch folder to run commands in, in which `torch` is a folder of tensors made by PyTorch."""

    def setUp(self):
        super().setUp()
        shutil.copytree(GOLDEN, self.folder / "torch")
        (self.folder / "tests").symlink_to(ROOT / "tests")

    def run_words(self, words, **options):
        return start(words, cwd=self.folder, **options)

    def run_line(self, line, codes=(0, 1)):
        """Runs a command line of the page and returns what it printed on standard output."""
        words = shlex.split(line)
        self.assertEqual(words[0], "anyrank", line)
        done = self.run_words([COMMAND, *words[1:]])
        self.assertIn(done.returncode, codes, f"{line}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def run_refused(self, line):
        done = self.run_words([COMMAND, *shlex.split(line)[1:]])
        self.assertEqual((done.returncode, done.stdout), (2, ""), line)
        return done.stderr

    def run_session(self, found, normal=flat):
        """Runs all commands of a block; those with an output have to print it. Returns how many have."""
        compared = 0
        for line, expected in session(found):
            printed = self.run_line(line)
            if expected.strip():
                self.assertEqual(normal(printed), normal(expected), line)
                compared += 1
        return compared
