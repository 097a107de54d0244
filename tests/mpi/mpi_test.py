#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of ranks that are MPI processes: every collective against the simulator's bits, and how all processes end when
one of them fails. Skipped where there is no MPI.

    tests/mpi/mpi_test.py [BUILD] [unittest options]

BUILD (or the environment variable ANYRANK_BUILD) is another build directory; default build.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ.get("ANYRANK_BUILD", ROOT / "build"))
EXTENDED = bool(os.environ.get("ANYRANK_TEST_EXTENDED"))
# Open MPI's launcher refuses root, and more processes than cores, unless it is told that they are meant.
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_btl_base_warn_component_unused": "0"}


def cache(name):
    """What CMake found."""
    try:
        text = (BUILD / "CMakeCache.txt").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^{name}:[A-Z]+=(.*)$", text, re.MULTILINE)
    return found.group(1) if found else ""


LAUNCHER = cache("MPIEXEC_EXECUTABLE") or shutil.which("mpirun") or ""


def reason_to_skip():
    if not (BUILD / "tests/mpi_collectives").exists():
        return "this build has no MPI (scripts/install_deps.sh --tests installs Open MPI)"
    if not shutil.which(LAUNCHER):
        return "there is no mpirun here"
    return ""


def launch(count, program, *arguments, limit=1800):
    done = subprocess.run([LAUNCHER, "-n", str(count), str(BUILD / "tests" / program), *arguments], env=ENVIRONMENT,
                          capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=limit,
                          check=False)
    return done.returncode, done.stdout, done.stderr


class MpiTest(unittest.TestCase):
    maxDiff = None

    def passes(self, count, program, *arguments):
        code, out, err = launch(count, program, *arguments)
        self.assertEqual(code, 0, out + err)
        return out

    def test_collectives_are_as_they_are_defined(self):
        for count in (3, 4):
            with self.subTest(processes=count):
                self.assertIn("230 collectives and more at once on the host: as they are defined",
                              self.passes(count, "mpi_collectives"))

    def test_failures_end_all_processes_with_one_text(self):
        self.assertIn("15 scenarios of 4 processes, 0 complaints", self.passes(4, "mpi_failures"))

    def test_a_killed_process_ends_the_job(self):
        code, _, err = launch(4, "mpi_failures", "killed")
        self.assertNotEqual(code, 0)
        self.assertRegex(err + str(code), "[Kk]illed|137|signal 9")

    def test_processes_of_another_launcher_are_told_so(self):
        other = {"mpirun.openmpi", "mpiexec.mpich"} - {pathlib.Path(LAUNCHER).resolve().name.replace("orterun",
                                                                                              "mpirun.openmpi")}
        names = [name for name in sorted(other) if shutil.which(name)]
        if len(names) != 1:
            self.skipTest("there is one MPI here")
        done = subprocess.run([names[0], "-n", "2", str(BUILD / "tests/mpi_collectives")], env=ENVIRONMENT,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1800, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("they do not find each other", done.stdout + done.stderr)

    @unittest.skipUnless(EXTENDED, "extended")
    def test_one_thread_at_a_time(self):
        self.assertIn(" 0 complaints", self.passes(4, "mpi_failures", "serialized"))

    @unittest.skipUnless(EXTENDED, "extended")
    def test_a_process_that_never_comes_is_aborted(self):
        code, _, err = launch(4, "mpi_failures", "stuck")
        self.assertNotEqual(code, 0)
        self.assertIn("for rank 1", err)

    @unittest.skipUnless(EXTENDED, "extended")
    def test_messages_of_more_than_two_gibibytes(self):
        self.passes(2, "mpi_collectives", "large")

    @unittest.skipUnless(EXTENDED, "extended")
    def test_two_hosts(self):
        done = subprocess.run([ROOT / "tests/mpi/two_hosts.sh", BUILD / "tests/mpi_collectives"], env=ENVIRONMENT,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1800, check=False)
        if done.returncode == 77:
            self.skipTest(done.stdout.strip())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("4 processes on 2 machines", done.stdout)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
        LAUNCHER = cache("MPIEXEC_EXECUTABLE") or LAUNCHER
    why = reason_to_skip()
    if why:
        print(why)
        sys.exit(77)
    unittest.main()
