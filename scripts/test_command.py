#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the built command from outside: exit codes, streams, and what stands where. ANYRANK names another binary."""

import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = os.environ.get("ANYRANK", str(ROOT / "build/anyrank"))


def run(*arguments, **options):
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


class Command(unittest.TestCase):
    def refused(self, *arguments, says):
        """Exit 2, the words on stderr, nothing on stdout."""
        process = run(*arguments)
        self.assertEqual((process.returncode, process.stdout), (2, ""), process.stderr)
        self.assertIn(says, process.stderr)

    def test_help_is_data_and_no_arguments_are_an_error(self):
        process = run("--help")
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        self.assertIn("example:\n  anyrank check", process.stdout)
        self.refused(says="usage: anyrank SUBCOMMAND")

    def test_every_listed_subcommand_has_help_with_an_example(self):
        listed = [line for line in run("--help").stdout.split("subcommands:\n")[1].split("\n\n")[0].splitlines()]
        self.assertGreaterEqual(len(listed), 8)
        for line in listed:
            name = line.split()[0]
            with self.subTest(subcommand=name):
                for arguments in ((name, "--help"), (name, "-h"), ("help", name)):
                    process = run(*arguments)
                    self.assertEqual((process.returncode, process.stderr), (0, ""))
                    self.assertTrue(process.stdout.startswith(f"usage: anyrank {name}"))
                    self.assertIn(f"  anyrank {name}", process.stdout.split("example")[-1])
                self.assertLessEqual(len(process.stdout.splitlines()), 40)
                explained = run(name, "--help-all").stdout
                self.assertEqual(*(set(re.findall(r"(?<= )--[a-z][a-z-]*(?=[ \n])", text.split("example")[0]))
                                   - {"--help-all"} for text in (process.stdout, self.labels(explained))))

    @staticmethod
    def labels(text):
        """What begins the lines of a help that explains."""
        return "\n".join(line for line in text.splitlines() if line.startswith(("  -", "example"))) + "\n"

    def test_version_names_what_bits_may_depend_on(self):
        process = run("--version")
        self.assertEqual(process.returncode, 0)
        self.assertRegex(process.stdout, r"\Aanyrank \d+\.\d+\.\d+ \(.+\)\n\S+ \S+.*, kernels: \S+\nCUDA: .+\n\Z")
        self.assertEqual(run("info", "--version").stdout, process.stdout)

    def test_mistyped_names_get_the_nearest(self):
        self.refused("chekc", says="unknown subcommand 'chekc'; did you mean check?")
        self.refused("inof", says="did you mean info?")
        self.refused("zzzzzzzz", says="anyrank --help lists them")
        self.refused("--tp", "2", says="options stand after the subcommand")
        self.refused("info", "--jsn", "-", says="unknown option --jsn; did you mean --json?")

    def test_info_tells_the_machine_as_text_and_as_json(self):
        process = run("info")
        self.assertEqual((process.returncode, process.stderr), (0, ""))
        for word in ("CPU", "BLAS kernels", "exact path", "CUDA", "NCCL", "MPI", "data"):
            self.assertIn(word, process.stdout)
        result = json.loads(run("info", "--json", "-").stdout)
        self.assertEqual((result["tool"], result["command"]), ("anyrank", "info"))
        self.assertGreaterEqual(result["cpu"]["cores"], 1)
        for name in ("cuda", "nccl", "mpi"):
            found = result[name]
            self.assertTrue(found["version" if found["available"] else "reason"])
        self.assertEqual(result["cuda"]["available"], len(result["cuda"]["gpus"]) > 0)
        self.assertEqual(run("info", "--quiet").stdout, "")

    def test_json_appears_by_rename_beside_the_text(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "info.json")
            process = run("info", "--json", str(path))
            self.assertIn("BLAS", process.stdout)
            self.assertEqual(json.loads(path.read_text(encoding="utf-8"))["command"], "info")
            self.assertEqual(os.listdir(folder), ["info.json"])
            self.assertEqual(run("info", "--json", str(pathlib.Path(folder, "no", "x"))).returncode, 2)

    def test_a_full_disk_is_a_failure_of_the_machine(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        with open("/dev/full", "w", encoding="utf-8") as full:
            process = subprocess.run([COMMAND, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(process.returncode, 3)
        self.assertIn("standard output", process.stderr)

    def test_a_reader_that_closes_early_ends_it_quietly(self):
        # Python hands on an ignored SIGPIPE only if asked to keep it.
        process = subprocess.Popen([COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
                                   restore_signals=False)
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        self.assertIn(process.wait(), (0, -signal.SIGPIPE))
        self.assertEqual(errors, b"")

    def test_short_jobs_show_no_progress_on_a_terminal(self):
        try:
            leader, follower = pty.openpty()
        except OSError as error:
            self.skipTest(f"no terminal: {error}")
        process = subprocess.run([COMMAND, "info"], stdout=subprocess.PIPE, stderr=follower, check=False)
        os.close(follower)
        self.assertEqual(process.returncode, 0)
        os.set_blocking(leader, False)
        try:
            shown = os.read(leader, 100)
        except OSError:
            shown = b""
        os.close(leader)
        self.assertEqual(shown, b"")


if __name__ == "__main__":
    unittest.main()
