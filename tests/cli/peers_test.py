#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of bench/allreduce_peers.py: what it asks of a case, and one small comparison with the MPIs that this machine
has. Installs nothing; exit status 77 (skipped) where there is no MPI.

    tests/cli/peers_test.py [BINARY] [unittest options]
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True  # the checkout stays as it was
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMMAND = os.environ.get("ANYRANK", str(ROOT / "build/anyrank"))
SCRIPT = ROOT / "bench/allreduce_peers.py"


def load_script():
    spec = importlib.util.spec_from_file_location("allreduce_peers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEERS = load_script()


def runs(name):
    """Whether this MPI is here and starts a program at all: whether it can is not anyrank's business."""
    if PEERS.missing(name):
        return False
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        return subprocess.run([PEERS.PACKAGES[name][1], "-n", "1", "true"], env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=1800, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


HERE = [name for name in PEERS.PACKAGES if runs(name)]


def row(ranks, size, over, ring_over, over_copy):
    seconds = {"anyrank": 1.0, "anyrank ring": 1.0}
    return {"ranks": ranks, "bytes": size, "seconds": seconds, "over": {"Open MPI": over},
            "ring_over": {"Open MPI": ring_over}, "over_copy": over_copy}


class Targets(unittest.TestCase):
    def judged(self, *case):
        return [(t["what"], t["at_most"], t["met"]) for t in PEERS.targets(row(*case))]

    def test_short_messages_have_one_that_depends_on_the_ranks(self):
        self.assertEqual(self.judged(2, 1024, 0.65, 9.0, 99.0), [("of Open MPI", 0.7, True)])
        self.assertEqual(self.judged(4, 1024, 0.65, 9.0, 99.0), [("of Open MPI", 0.6, False)])
        self.assertEqual(self.judged(8, 4096, 9.0, 9.0, 99.0), [])

    def test_longer_ones_are_also_held_to_the_ring_and_the_copy(self):
        self.assertEqual(self.judged(2, 65536, 0.2, 1.01, 99.0),
                         [("of Open MPI", 0.2, True), ("ring of Open MPI", 1.0, False)])
        self.assertEqual(self.judged(2, 1048576, 0.26, 1.0, 1.4),
                         [("of Open MPI", 0.25, False), ("ring of Open MPI", 1.0, True), ("times a copy", 1.4, True)])
        self.assertEqual(self.judged(8, 104857600, 0.3, 0.5, 1.16),
                         [("of Open MPI", 0.3, True), ("ring of Open MPI", 1.0, True), ("times a copy", 1.15, False)])

    def test_without_open_mpi_nothing_is_said_about_it(self):
        alone = {**row(2, 1024, 0.0, 0.0, 1.0), "over": {}, "ring_over": {}}
        self.assertEqual([t["met"] for t in PEERS.targets(alone)], [None])


class Comparison(unittest.TestCase):
    def test_one_round_of_a_small_case(self):
        done = subprocess.run([sys.executable, str(SCRIPT), "--anyrank", COMMAND, "--no-install", "--ranks", "2",
                               "--bytes", "1024", "--dtype", "i64", "--rounds", "1", "--trials", "1", "--json", "-"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800, check=False)
        self.assertIn(done.returncode, (0, 1), done.stderr)  # how fast it is, is not tested
        result = json.loads(done.stdout)
        self.assertEqual(len(result["rows"]), 1)
        only = result["rows"][0]
        self.assertEqual((only["ranks"], only["bytes"], only["numerics"], only["rounds"]), (2, 1024, "i64", 1))
        self.assertLessEqual({"anyrank", "anyrank ring", *HERE}, set(only["seconds"]))
        for seconds in only["seconds"].values():
            self.assertGreater(seconds, 0)
        for name in HERE:
            self.assertAlmostEqual(only["over"][name] * only["seconds"][name] / only["seconds"]["anyrank"], 1)

    def test_a_dry_run_measures_nothing(self):
        done = subprocess.run([sys.executable, str(SCRIPT), "--anyrank", COMMAND, "--no-install", "--dry-run",
                               "--json", "-"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertEqual((result["rows"], len(result["cases"])), ([], 42))


if __name__ == "__main__":
    if not HERE:
        print("neither Open MPI nor MPICH is here")
        sys.exit(77)
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.access(sys.argv[1], os.X_OK):
        COMMAND = sys.argv.pop(1)
    unittest.main()
