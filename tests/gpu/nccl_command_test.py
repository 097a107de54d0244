#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of --transport nccl without a GPU: processes started as torchrun, srun and mpirun would start them are ranks
on the emulated device, over the library that stands for NCCL (fake_nccl.c). They give the bits that threads of one
process give, and end with one report when one of them is missing, dies or disagrees. The library is expected beside
it, in tests/."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, GOLDEN, run  # noqa: E402

SMALL = ("--batch", "4", "--seq", "8", "--steps", "2", "--skip-f64", "--strict-predictions")
NCCL = ("--transport", "nccl", "--device", "emulated")
MPIRUN = shutil.which("mpirun")
LAUNCHERS = re.compile(r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|SLURM_|TORCHELASTIC_|OMPI_|PMI|ANYRANK_|NCCL_|FAKE_")


def stand_in():
    return pathlib.Path(COMMAND).resolve().parent / "tests/fake_nccl.so"


def clean_environment():
    kept = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    return {**kept, "ANYRANK_NCCL": str(stand_in())}


def torchrun(rank, ranks):
    return {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}


def slurm(rank, ranks):
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": ranks, "SLURM_LOCALID": rank}


def start(arguments, ranks, launcher=torchrun, extra=None, only=None, program=COMMAND):
    """Processes, one for each rank; extra(rank): more of its environment. First calls wait for what is under way."""
    started = []
    meeting = tempfile.mktemp(prefix="anyrank-nccl-id-")  # process 0 makes the file, and removes it
    lazy = os.memfd_create("lazy")  # stays open until this process ends
    for rank in range(ranks) if only is None else only:
        of_rank = {**launcher(rank, ranks), "ANYRANK_NCCL_ID_FILE": meeting, "FAKE_NCCL_LAZY": f"/proc/{os.getpid()}/fd/{lazy}",
                   **(extra(rank) if extra else {})}
        environment = {**clean_environment(), **{name: str(value) for name, value in of_rank.items()}}
        started.append(subprocess.Popen([program, *map(str, arguments)], stdin=subprocess.DEVNULL, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment))
    return started


def finish(started):
    """[(exit status, output, errors)]"""
    ended = []
    try:
        for process in started:
            out, err = process.communicate(timeout=1800)
            ended.append((process.returncode, out, err))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended


def why_not():
    """Why there is nothing to test; "" if there is."""
    if not stand_in().exists():
        return "the library that stands for NCCL was not built"
    said = run("check", "stack-demo", "--tp", "2", *SMALL, "--device", "emulated").stderr
    return "this build has no emulated device" if "no emulated device" in said else ""


class NcclTest(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        reason = why_not()
        if reason:
            raise unittest.SkipTest(reason)

    def threads(self, *arguments):
        done = run(*arguments, "--json", "-", env=clean_environment())
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return json.loads(done.stdout)

    def check(self, *arguments, ranks, launcher=torchrun):
        ended = finish(start((*arguments, *NCCL, "--json", "-"), ranks, launcher))
        self.assertEqual([(status, err) for status, _, err in ended], [(0, "")] * ranks, ended[0][1])
        self.assertEqual([out for _, out, _ in ended[1:]], [""] * (ranks - 1))
        return json.loads(ended[0][1])

    def hold_to_threads(self, *arguments, ranks, launcher=torchrun):
        ours, theirs = self.check(*arguments, ranks=ranks, launcher=launcher), self.threads(*arguments)
        self.assertEqual(ours["result"], "same")
        run, other = (result["models"][0]["runs"][0] for result in (ours, theirs))
        for key in ("result", "tensors", "elements_different", "gradients_hash", "weights_hash", "collectives", "loss"):
            self.assertEqual(run[key], other[key], key)
        for key in ("counted", "predicted"):
            self.assertEqual(run["bytes"][key], other["bytes"]["counted"], key)

    def test_two_processes_have_the_bits_of_threads(self):
        self.hold_to_threads("check", GOLDEN / "llama-gqa-tiny", "--tp", 2, *SMALL, ranks=2)

    def test_four_processes_of_slurm_have_the_bits_of_threads(self):
        self.hold_to_threads("check", GOLDEN / "gpt2-tiny", "--tp", 2, "--dp", 2, "--zero", 1, *SMALL, ranks=4,
                             launcher=slurm)

    def test_processes_that_share_out_weights_have_the_bits_of_threads(self):
        self.hold_to_threads("check", GOLDEN / "gpt2-tiny", "--dp", 2, "--zero", 3, *SMALL, ranks=2)

    def test_processes_with_stages_have_the_bits_of_threads(self):
        self.hold_to_threads("check", GOLDEN / "gpt2-tiny", "--pp", 2, "--micro-batches", 2, *SMALL, ranks=2)

    @unittest.skipUnless(MPIRUN, "no mpirun on this machine")
    def test_mpirun_starts_them_too(self):
        environment = {**clean_environment(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                       "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
                       "OMPI_MCA_hwloc_base_binding_policy": "none"}
        done = subprocess.run([MPIRUN, "-n", "2", COMMAND, "check", str(GOLDEN / "gpt2-tiny"), "--dp", "2", *SMALL,
                               *NCCL, "--json", "-"], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              timeout=1800, check=False, env=environment)
        if "no launcher started this process" in done.stderr + done.stdout:
            self.skipTest("this build has no MPI")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["result"], "same")

    def ranks_as_threads(self, *arguments, **extra):
        done = run(*map(str, arguments), *NCCL, "--json", "-", env={**clean_environment(), **extra})
        return done, json.loads(done.stdout) if done.stdout.startswith("{") else {}

    def test_without_a_launcher_ranks_are_threads_with_a_device_each(self):
        for layout in (("--tp", 2), ("--dp", 2, "--tp", 2, "--zero", 1), ("--pp", 2, "--micro-batches", 2)):
            with self.subTest(layout=layout):
                arguments = ("check", GOLDEN / "gpt2-tiny", *map(str, layout), *SMALL)
                done, ours = self.ranks_as_threads(*arguments)
                self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
                theirs = self.threads(*arguments)
                self.assertEqual((ours["transport"], theirs["transport"]), ("nccl", "sim"))
                run, other = (result["models"][0]["runs"][0] for result in (ours, theirs))
                for key in ("result", "tensors", "gradients_hash", "weights_hash", "collectives", "loss"):
                    self.assertEqual(run[key], other[key], key)
                self.assertEqual(run["bytes"]["counted"], other["bytes"]["predicted"])

    def test_a_thread_that_fails_ends_all_with_one_message(self):
        swapped, told = self.ranks_as_threads("check", GOLDEN / "gpt2-tiny", "--dp", "2", *SMALL, "--inject",
                                              "collective_order_swapped")
        self.assertEqual(swapped.returncode, 1)
        self.assertIn("ranks 0 and 1 disagree in collective #1 of ranks 0-1: rank 0 calls all_to_all(",
                      json.dumps(told))
        broken, _ = self.ranks_as_threads("check", GOLDEN / "gpt2-tiny", "--dp", "3", "--batch", "3", "--seq", "8",
                                          FAKE_NCCL_ERROR="init")
        self.assertEqual(broken.returncode, 3)
        self.assertEqual((broken.stdout + broken.stderr).count("NCCL cannot make a communicator"), 1)
        refused = run("check", str(GOLDEN / "gpt2-tiny"), "--dp", "2", *SMALL, "--transport", "nccl",
                      env=clean_environment())
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--transport nccl with --device cpu: NCCL moves what lies on GPUs", refused.stderr)

    def test_a_run_of_threads_is_saved_and_resumed(self):
        train = ("train", "stack-demo", "--dp", "2", "--batch", "2", "--seq", "8", "--seed", "5")
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder, "text.txt")
            text.write_text("the quick brown fox jumps over the lazy dog; " * 200, encoding="utf-8")
            data, saved = ("--data", str(text)), ("--save", f"{folder}/saved")
            whole = run(*train, *data, "--steps", "4", "--json", "-")
            first, _ = self.ranks_as_threads(*train, *data, *saved, "--steps", "4", "--stop-after", "2")
            rest, told = self.ranks_as_threads("train", "--resume", f"{folder}/saved", *data, "--dp", "2")
        self.assertEqual([done.returncode for done in (whole, first, rest)], [0, 0, 0], first.stderr + rest.stderr)
        self.assertEqual(told["weights_hash"], json.loads(whole.stdout)["weights_hash"])

    def test_a_trained_trajectory_is_that_of_threads(self):
        hashes = []
        train = ("train", "stack-demo", "--dp", 2, "--steps", 2, "--batch", 2, "--seq", 8, "--seed", 5)
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder, "text.txt")
            text.write_text("the quick brown fox jumps over the lazy dog; " * 200, encoding="utf-8")
            done = run(*train, "--data", text, "--json", "-")
            ended = finish(start((*train, "--data", text, *NCCL, "--json", "-"), 2))
        self.assertEqual([status for status, _, _ in ended] + [done.returncode], [0, 0, 0], (ended, done.stderr))
        for out in (done.stdout, ended[0][1]):
            hashes.append(re.findall(r'"[a-z_]*hash[a-z_]*": *"([0-9a-f]+)"', out))
        self.assertTrue(hashes[0])
        self.assertEqual(hashes[0], hashes[1])

    def test_another_order_of_calls_is_told_before_data_move(self):
        ended = finish(start(("check", GOLDEN / "gpt2-tiny", "--dp", 2, *SMALL, "--inject",
                               "collective_order_swapped", *NCCL), 2))
        self.assertEqual([status for status, _, _ in ended], [1, 1])
        self.assertIn("ranks 0 and 1 disagree in collective #1 of ranks 0-1: rank 0 calls all_to_all(", ended[0][1])

    def test_two_processes_on_one_gpu_are_refused_unless_meant(self):
        arguments = ("check", GOLDEN / "gpt2-tiny", "--tp", 2, *SMALL, *NCCL)
        one_gpu = lambda rank: {"FAKE_NCCL_GPU": "0000:3b:00.0"}
        ended = finish(start(arguments, 2, extra=one_gpu))
        self.assertEqual([status for status, _, _ in ended], [1, 1])
        self.assertIn("ranks 0 and 1 are both on the GPU 0000:3b:00.0 of ", ended[0][1])
        ended = finish(start((*arguments, "--share-gpus"), 2, extra=one_gpu))
        self.assertEqual([status for status, _, _ in ended], [0, 0], ended[0][2])

    def test_one_that_never_comes_is_named(self):
        for seconds in (1, 4, 16, 64, 256):  # in which the other one has to come, on a machine however busy
            arguments = ("check", GOLDEN / "gpt2-tiny", "--tp", 3, *SMALL, *NCCL, "--timeout", seconds)
            ended = finish(start(arguments, 3, only=[0, 2]))
            self.assertTrue(all(status not in (0, -signal.SIGKILL) for status, _, _ in ended), ended)
            said = ended[0][1] + ended[0][2]
            if "for rank 1" in said:
                break
        self.assertIn(f"rank 0 waited {seconds}.000 s in a gather of the processes for rank 1", said)

    def test_one_that_is_killed_ends_all(self):
        arguments = ("train", "stack-demo", "--dp", 3, "--batch", 3, "--seq", 8, "--steps", 10**9, "--lr",
                     "1e-12", *NCCL)
        for killed in (0, 1):
            with self.subTest(killed=killed):
                started = start(arguments, 3)
                next(line for line in started[0].stdout if re.match(r" *1 ", line))  # the first step: they are at work
                started[killed].kill()
                ended = finish(started)
                self.assertNotIn(0, [status for status, _, _ in ended])
                self.assertEqual(sum(err.count("is gone: its process has ended") for _, _, err in ended), 1, ended)

    def test_one_that_has_too_little_memory_says_so(self):
        def small(rank):
            return {"ANYRANK_EMULATED_MEMORY": 3} if rank == 1 else {}

        ended = finish(start(("check", "llama-demo", "--dp", 2, "--zero", 1, *SMALL, *NCCL), 2, extra=small))
        self.assertNotIn(0, [status for status, _, _ in ended])
        self.assertRegex(ended[0][1] + ended[0][2], "rank 1 aborted: the emulated device's memory: [0-9]+ bytes asked")

    def test_one_that_is_killed_is_named_with_its_stage(self):
        arguments = ("train", "stack-demo", "--pp", 2, "--batch", 2, "--seq", 8, "--steps", 10**9, "--lr", "1e-12", *NCCL)
        started = start(arguments, 2)
        next(line for line in started[0].stdout if re.match(r" *1 ", line))
        started[1].kill()
        status, _, said = finish(started)[0]
        self.assertNotEqual(status, 0)
        self.assertRegex(said, r"\n  rank ([01]) \(pp \1, dp 0, tp 0; stage \1, layers \1\)\n")

    def test_processes_without_a_file_or_mpi_are_told_how_to_start(self):
        without = lambda rank: {"ANYRANK_NCCL_ID_FILE": ""}
        for transport, words in ((NCCL, "2 processes were started, and not by MPI: name a file by ANYRANK_NCCL_ID_FILE"),
                                 (("--device", "emulated"), "WORLD_SIZE is 2, so this is one of several processes")):
            ended = finish(start(("check", GOLDEN / "gpt2-tiny", "--tp", 2, *SMALL, *transport), 2, extra=without))
            self.assertEqual([status for status, _, _ in ended], [2, 2])
            self.assertIn(words, ended[0][2])

    def test_other_options_are_told_before_anything_is_made(self):
        arguments = ("check", GOLDEN / "gpt2-tiny", "--tp", 2, *SMALL, *NCCL)
        with tempfile.TemporaryDirectory() as folder:
            extra = lambda rank: {"ANYRANK_NCCL_ID_FILE": pathlib.Path(folder, "id")}
            started = [start((*arguments, "--seed", rank), 2, extra=extra, only=[rank])[0] for rank in (0, 1)]
            ended = finish(started)
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual([status for status, _, _ in ended], [2, 2])
        self.assertIn("process 1 was started with '--seed 1', process 0 with '--seed 0'", ended[0][2])

    def test_the_benchmark_of_a_call_beside_ncclallreduce(self):
        program = pathlib.Path(COMMAND).resolve().parent / "bench/nccl"
        ended = finish(start(("--repetitions", 1, "--share", "--json", "-"), 2, program=program))
        self.assertEqual([(status, err) for status, _, err in ended], [(0, "")] * 2)
        self.assertEqual(ended[1][1], "")
        rows = json.loads(ended[0][1])["rows"]
        self.assertEqual([(row["ranks"], row["bytes"]) for row in rows], [(2, 8 << i) for i in (0, 3, 6, 9, 12, 13)])
        for row in rows:
            self.assertAlmostEqual(row["over_nccl"] * row["nccl_seconds"] / row["seconds"], 1, places=6)

    def test_without_nccl_it_says_what_to_install(self):
        extra = lambda rank: {"ANYRANK_NCCL": "/nonexistent/libnccl.so.2"}
        (status, out, err), = finish(start(("check", "gpt2-demo", "--tp", 1, *SMALL, *NCCL), 1, extra=extra))
        self.assertEqual(status, 1)
        self.assertIn("NCCL cannot be loaded: /nonexistent/libnccl.so.2", out + err)


if __name__ == "__main__":
    unittest.main()
