#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of --transport: under mpirun each process is a rank, with the bits that threads of one process give; process 0
alone speaks and writes, a mistake is found alike, and what goes wrong on one process ends all with one message."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, EXTENDED, GOLDEN, start  # noqa: E402

SMALL = ("--batch", "4", "--seq", "8", "--steps", "2", "--skip-f64", "--strict-predictions")
MPIRUN = shutil.which("mpirun")
# Root in a container, more ranks than cores, waiting ranks that leave the cores to others.
SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none"}


def launch(*words):
    return start(words, env={**os.environ, **SETTINGS})


def run(*arguments, ranks=0):
    return launch(*([MPIRUN, "-n", ranks] if ranks else []), COMMAND, *arguments)


def run_two(*arguments, first=(), second=()):
    """Two processes that have not all options in common."""
    return launch(MPIRUN, "-n", 1, COMMAND, *arguments, *first, ":", "-n", 1, COMMAND, *arguments, *second)


def why_not():
    """Why there is nothing to test; "" if there is."""
    if not MPIRUN:
        return "no mpirun on this machine"
    said = run("check", "stack-demo", "--tp", "1", *SMALL, "--transport", "mpi", ranks=1).stderr
    return "this build has no MPI" if "no MPI" in said else ""


WHY_NOT = why_not()


@unittest.skipIf(WHY_NOT, WHY_NOT)
def place_of(first):
    """A difference without its cause, which only ranks that are threads are asked for."""
    return first and {key: value for key, value in first.items()
                      if key not in ("pattern", "hint", "cause", "look_at")}


class Processes(unittest.TestCase):
    maxDiff = None

    def checked(self, *arguments, ranks=0, code=0):
        transport = ("--transport", "mpi") if ranks else ()
        done = run("check", *arguments, *SMALL, *transport, "--json", "-", ranks=ranks)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        end = done.stdout.rindex("}") + 1  # mpirun may add words of its own
        (model,) = json.loads(done.stdout[:end])["models"]
        (one,) = model["runs"]
        return one

    def alike(self, *arguments, ranks, code=0):
        threads, processes = self.checked(*arguments, code=code), self.checked(*arguments, ranks=ranks, code=code)
        for key in ("result", "tensors", "tensors_different", "loss", "weights_hash", "gradients_hash"):
            self.assertEqual(processes.get(key), threads.get(key), key)
        self.assertEqual(*(place_of(one["first_difference"]) for one in (processes, threads)))
        self.assertEqual(processes["bytes"]["counted"], threads["bytes"]["counted"])
        return processes

    def test_processes_have_the_bits_of_one_rank(self):
        for model, layout, ranks in (("llama-gqa-tiny", "--tp 2 --cp 2 --zigzag --sp --zero 1", 4),
                                     ("gpt2-tiny", "--pp 2 --dp 2 --zero 1 --micro-batches 2", 4),
                                     ("gpt2-tiny", "--dp 2 --zero 2", 2),
                                     ("gpt2-tiny", "--dp 4 --dp-replicate 2 --zero 3", 4)):
            with self.subTest(layout=layout):
                one = self.alike(GOLDEN / model, *layout.split(), ranks=ranks)
                self.assertEqual((one["result"], one["tensors_different"]), ("same", 0))
                self.assertEqual(one["bytes"]["counted"], one["bytes"]["predicted"])

    def test_a_mistake_is_found_where_threads_have_it(self):
        words = GOLDEN / "gpt2-tiny", "--tp", "2", "--inject", "row_bias_every_rank"
        one = self.alike(*words, ranks=2, code=1)
        self.assertEqual(one["first_difference"]["cause"], None)
        done = run("check", *words, "--skip-f64", "--transport", "mpi", ranks=2)
        self.assertIn("no cause  ranks that are processes are not dumped", done.stdout)

    def test_training_saves_what_threads_go_on_with(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-process-") as folder:
            small = ("--batch", "4", "--seq", "8")
            model, saved = GOLDEN / "llama-gqa-tiny", pathlib.Path(folder) / "run"
            whole = run("train", model, "--steps", "4", *small)
            first = run("train", model, "--pp", "2", "--dp", "2", "--zero", "1", "--steps", "4", "--stop-after", "2",
                        *small, "--save", saved, "--transport", "mpi", ranks=4)
            self.assertEqual(first.returncode, 0, first.stderr)
            self.assertIn("ranks: 4 processes, connected by MPI", first.stdout)
            self.assertEqual(first.stdout.count("weights after step 2"), 1, first.stdout)
            rest = run("train", "--resume", saved, "--cp", "2")
            self.assertEqual(rest.returncode, 0, rest.stderr)
            hashes = [next(line.split()[4] for line in done.stdout.splitlines() if line.startswith("weights after"))
                      for done in (whole, rest)]
            self.assertEqual(hashes[0], hashes[1])

    def test_one_message_tells_what_is_wrong(self):
        for arguments, ranks, words in (
                (("check", GOLDEN / "gpt2-tiny", "--tp", "2", *SMALL), 3, "tp=2: a layout of 2 ranks on 3 processes: start one process for each rank"),
                (("check", GOLDEN / "gpt2-tiny", "--tp", "2", "--dump", "x", *SMALL), 2, "leave --transport mpi out"),
                (("check", GOLDEN / "gpt2-tiny", "--tp", "2", "--nope"), 4, "unknown option --nope"),
                (("train", GOLDEN / "gpt2-tiny", "--dp", "2", "--batch", "2", "--seq", "8", "--save", "/dev/null/x"), 2,
                 "/dev/null/x")):
            with self.subTest(arguments=arguments):
                done = run(*arguments, "--transport", "mpi", ranks=ranks)
                self.assertNotEqual(done.returncode, 0)
                self.assertEqual(done.stderr.count(words), 1, done.stderr)

    def send(self, number, *arguments):
        """Trains in two processes, of which the second gets a signal when steps have been made."""
        with tempfile.TemporaryDirectory(prefix="anyrank-process-") as folder:
            tell = ["sh", "-c", f'echo $$ >"{folder}/$OMPI_COMM_WORLD_RANK$PMI_RANK"; exec "$@"', "sh"]
            saved = pathlib.Path(folder, "run")
            with subprocess.Popen([MPIRUN, "-n", "2", *tell, COMMAND, "train", str(GOLDEN / "llama-gqa-tiny"), "--dp",
                                   "2", "--batch", "2", "--seq", "8", "--steps", "1000000", "--log-every", "5", "--save",
                                   str(saved), "--transport", "mpi", *arguments], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, **SETTINGS}) as running:
                for line in running.stdout:
                    if line.split()[:1] == ["5"]:
                        break
                os.kill(int(pathlib.Path(folder, "1").read_text(encoding="utf-8")), number)
                out, err = running.communicate(timeout=1800)
            return running.returncode, out, err, sorted(path.name for path in saved.rglob("*.safetensors"))

    def test_a_signal_to_any_process_ends_all_in_good_order(self):
        code, out, err, files = self.send(signal.SIGINT)
        self.assertEqual(code, 130, err)
        self.assertIn("stopped after step", out)
        self.assertEqual(files, ["model.safetensors", "optimizer.safetensors"])

    @unittest.skipUnless(EXTENDED, "extended")
    def test_a_process_that_goes_on_after_the_end_breaks_nothing(self):
        # The launcher wakes the second one to end it: it answers what the first has given up.
        for _ in range(4):
            code, out, err, files = self.send(signal.SIGSTOP, "--timeout", "1")
            self.assertNotEqual(code, 0)
            self.assertIn("rank 0 waited", err)
            self.assertNotIn("Segmentation", out + err)
            self.assertEqual(files, [])

    def test_what_one_process_does_otherwise_is_told(self):
        arguments = ("check", GOLDEN / "gpt2-tiny", *SMALL, "--tp", "2", "--transport", "mpi")
        cases = ((("--seed", "5"), "process 1 was started with '--seed 5', process 0 with '--seed 0'"),
                 (("--nope",), "unknown option --nope"),  # which it finds before it has joined
                 (("--sp",), "process 1 was started with '--sp', process 0 with 'no --sp'"))
        for second, words in cases if EXTENDED else cases[:2]:
            with self.subTest(second=second):
                done = run_two(*arguments, second=second)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(done.stderr.count(words), 1, done.stderr)

    def test_what_concerns_one_process_may_differ(self):
        done = run_two("check", GOLDEN / "gpt2-tiny", *SMALL, "--tp", "2", "--transport", "mpi", first=("--json", "-"),
                       second=("--json", "/nowhere/x.json", "--threads", "1", "-q"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('"same"', done.stdout)

    def test_what_fails_on_one_process_alone_ends_all(self):
        with tempfile.TemporaryDirectory(prefix="anyrank-process-") as folder:
            text = pathlib.Path(folder, "text")
            text.write_bytes(bytes(1000))
            # Not there any more for the second, as on a machine that does not share the folder.
            hide = ["sh", "-c", f'test "$OMPI_COMM_WORLD_RANK$PMI_RANK" = 0 || cd /; exec "$@"', "sh"]
            done = subprocess.run([MPIRUN, "-n", "2", *hide, os.path.abspath(COMMAND), "check", str(GOLDEN / "gpt2-tiny"),
                                   *SMALL, "--tp", "2", "--text", "text", "--transport", "mpi"], capture_output=True,
                                  text=True, stdin=subprocess.DEVNULL, timeout=1800, check=False, cwd=folder,
                                  env={**os.environ, **SETTINGS})
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("text: cannot open"), 1, done.stderr)

    def test_processes_that_are_no_ranks_are_told_of(self):
        done = run("check", GOLDEN / "gpt2-tiny", *SMALL, "--tp", "2", ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("2 processes were started, and each does all of this by itself"), 1)

    def test_a_collective_that_one_rank_leaves_out_ends_all(self):
        done = run("check", GOLDEN / "llama-gqa-tiny", "--dp", "2", "--pp", "2", *SMALL, "--inject",
                   "collective_order_swapped", "--timeout", "5", "--transport", "mpi", ranks=4)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stdout, r"\n +rank [0-3] \(pp [01], dp [01], tp 0; stage [01], layers [01]\)\n")
        self.assertIn("disagree", done.stdout)
        self.assertIn("     rank  last finished", done.stdout)

    def test_a_device_that_is_full_on_one_process_is_the_machines_failure(self):
        full = ["sh", "-c", 'test "$OMPI_COMM_WORLD_RANK$PMI_RANK" = 0 || export ANYRANK_EMULATED_MEMORY=1; exec "$@"', "sh"]
        done = launch(MPIRUN, "-n", 2, *full, COMMAND, "check", GOLDEN / "llama-gqa-tiny", "--tp", 2, *SMALL, "--device",
                      "emulated", "--transport", "mpi")
        if "no emulated device" in done.stderr:
            self.skipTest("this build has no emulated device")
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("tp=2: rank 1 aborted: the emulated device's memory: "), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
