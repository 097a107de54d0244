#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of examples/launch: each launcher starts the ranks of 1, 2 and 16 machines with the options that it should,
and check and train run under them on this one, with the hash of ranks that are threads.

torchrun and srun are stood in for by scripts that start processes here, NCCL by fake_nccl.c, GPUs by the emulated
device; mpirun is the real one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../gpu")
import nccl_command_test as nccl  # noqa: E402
from command import COMMAND, EXTENDED, ROOT, Case, run  # noqa: E402

LAUNCH = ROOT / "examples/launch"
MODEL = [str(ROOT / "tests/golden/llama-gqa-tiny"), "--batch", "4", "--seq", "8"]

# Stands for torchrun and srun: starts the ranks of this machine (torchrun), or of all (srun), as they would.
STARTER = '''#!/usr/bin/env python3
import os, pathlib, re, subprocess, sys
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
command = next(i for i, word in enumerate(words) if os.path.basename(word) == "anyrank")
given, e = " ".join(words[:command]), os.environ
def number(option, otherwise):
    found = re.search(rf"--{option} (\\d+)", given)
    return int(found[1]) if found else otherwise
each = number("nproc-per-node", 0) or int(e["SLURM_NTASKS_PER_NODE"])
nodes = number("nnodes", 1) if name == "torchrun" else int(e["SLURM_JOB_NUM_NODES"])
first = int(e.get("NODE_RANK", 0)) * each if name == "torchrun" else 0
started = []
for rank in range(first, first + each if name == "torchrun" else nodes * each):
    of = ({"RANK": rank, "WORLD_SIZE": nodes * each, "LOCAL_RANK": rank % each} if name == "torchrun" else
          {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": nodes * each, "SLURM_LOCALID": rank % each})
    started.append(subprocess.Popen(words[command:], env={**e, **{k: str(v) for k, v in of.items()}}))
sys.exit(max(process.wait() for process in started))
'''

# Stands for a launcher, or for the command: writes down how it was called, and runs nothing.
RECORDER = '''#!/bin/sh
echo "${0##*/} $*" "id=$ANYRANK_NCCL_ID_FILE" >> "$RECORD"
'''


class LaunchTest(Case):
    def setUp(self):
        super().setUp()
        (self.folder / "bin").mkdir()

    def put(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def environment(self, **variables):
        return {**nccl.clean_environment(), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "LAUNCH": str(LAUNCH), "DEVICE": "emulated", "STEPS": "2", "RANKS_PER_NODE": "2",
                "HEAD": "localhost:29500", "OUT": str(self.folder / "out"), "RECORD": str(self.folder / "record"),
                "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
                **{name: str(value) for name, value in variables.items()}}

    def start(self, launcher, *arguments, **variables):
        return subprocess.Popen([LAUNCH / launcher, *map(str, arguments)], env=self.environment(**variables), text=True,
                                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    def run_launcher(self, launcher, *arguments, **variables):
        process = self.start(launcher, *arguments, **variables)
        out, err = process.communicate(timeout=1800)
        return process.returncode, out, err


class Lines(LaunchTest):
    """What the launchers call, for machines that are not here."""

    def setUp(self):
        super().setUp()
        for name in ("torchrun", "mpirun", "srun", "anyrank"):
            self.put(name, RECORDER)

    def recorded(self, launcher, *arguments, **variables):
        status, out, err = self.run_launcher(launcher, *arguments, RANKS_PER_NODE=8, DEVICE="cuda", **variables)
        self.assertEqual((status, err), (0, ""), out)
        return (self.folder / "record").read_text(encoding="utf-8").splitlines()

    def test_of_1_2_and_16_machines(self):
        arguments = ("llama-demo", "--tp", 8, "--sp")
        runs = "--transport nccl --device cuda"
        for nodes in (1, 2, 16):
            rendezvous = "--standalone --nproc-per-node 8" if nodes == 1 else \
                f"--nnodes {nodes} --nproc-per-node 8 --rdzv-backend c10d --rdzv-id anyrank-RUN --rdzv-endpoint node01:29500"
            starts = {"torchrun.sh": f"torchrun --no-python {rendezvous}",
                      "mpirun.sh": f"mpirun -n {8 * nodes} --map-by ppr:8:node --bind-to none",
                      "slurm.sbatch": "srun --kill-on-bad-exit=1"}
            for launcher, line in starts.items():
                with self.subTest(launcher=launcher, nodes=nodes):
                    (self.folder / "record").unlink(missing_ok=True)
                    plan, check, train = self.recorded(launcher, *arguments, "--dp", nodes, NODES=nodes,
                                                       HEAD="node01:29500", SLURM_JOB_NUM_NODES=nodes,
                                                       SLURM_NTASKS_PER_NODE=8)
                    same = f"llama-demo --tp 8 --sp --dp {nodes} "
                    self.assertTrue(plan.startswith(f"anyrank plan {same}--flow"), plan)
                    for run, called in (("check", check), ("train", train)):
                        self.assertTrue(called.startswith(f"{line.replace('RUN', run)} anyrank {run} {same}{runs} "),
                                        called)
                        self.assertTrue(called.endswith(f" id={self.folder}/out/nccl-id"), called)
                    self.assertIn(" --memory ", check)
                    self.assertIn(" --steps 2 ", train)

    def test_without_arguments_they_say_what_is_missing(self):
        for launcher in ("torchrun.sh", "mpirun.sh", "slurm.sbatch"):
            status, _, err = self.run_launcher(launcher, NODES=2, SLURM_JOB_NUM_NODES=2, SLURM_NTASKS_PER_NODE=2)
            self.assertEqual(status, 2)
            self.assertIn(f"{launcher}: give a MODEL and a layout of 4 ranks", err)

    def test_an_earlier_run_is_not_overwritten(self):
        (self.folder / "out/run").mkdir(parents=True)
        status, _, err = self.run_launcher("mpirun.sh", "llama-demo")
        self.assertEqual(status, 2)
        self.assertIn("out/run is there already: name another folder by OUT", err)
        self.assertFalse((self.folder / "record").exists())

    def test_a_status_that_is_not_0_is_the_launcher_s(self):
        self.put("mpirun", "#!/bin/sh\nexit 3\n")
        status, out, _ = self.run_launcher("mpirun.sh", "llama-demo", RANKS_PER_NODE=3)
        self.assertEqual(status, 3)
        self.assertNotIn("== train", out)


class Runs(LaunchTest):
    @classmethod
    def setUpClass(cls):
        reason = nccl.why_not()
        if reason:
            raise unittest.SkipTest(reason)

    def setUp(self):
        super().setUp()
        (self.folder / "bin/anyrank").symlink_to(COMMAND)

    def expected(self):
        """The hash that every layout has, from one rank."""
        done = run("train", *MODEL, "--steps", "2", "--json", "-", env=nccl.clean_environment())
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["weights_hash"]

    def hold(self, out, ranks, layout):
        """What a run of two machines' ranks has printed and written is right."""
        self.assertIn(f": rank 0 of {ranks}\n", out)
        self.assertIn("check: the same bits: every tensor equals the one-rank baseline", out)
        self.assertRegex(out, rf"{layout}: all [\d,]+ parts of tensors have the layout's shapes")
        self.assertRegex(out, r"outputs of the last step: one hash, \w{12}, on one rank and in this layout")
        self.assertIn("the weights have the hash that was expected", out)
        run = json.loads((self.folder / "out/check.json").read_text(encoding="utf-8"))["models"][0]["runs"][0]
        self.assertGreater(run["shapes"], 20 * ranks)
        self.assertIsNone(run["shape_difference"])
        self.assertIsNone(run["memory_difference"])
        self.assertTrue((self.folder / "out/run/step-00000002").is_dir())

    def test_torchrun_on_two_machines(self):
        self.put("torchrun", STARTER)
        layout = ("--tp", 2, "--dp", 2, "--sp")
        of = [self.start("torchrun.sh", *MODEL, *layout, NODES=2, NODE_RANK=node, EXPECT=self.expected())
              for node in (0, 1)]
        first, second = [(process.communicate(timeout=1800), process.returncode) for process in of]
        self.assertEqual((first[0][1], first[1]), ("", 0))
        self.assertEqual(second, (("", ""), 0))
        self.hold(first[0][0], 4, r"dp=2 tp=2 sp")

    def test_a_job_of_slurm(self):
        self.put("srun", STARTER)
        for nodes in (2, 16) if EXTENDED else (2,):
            shutil.rmtree(self.folder / "out", ignore_errors=True)
            status, out, err = self.run_launcher(
                "slurm.sbatch", *MODEL, "--tp", 1, "--dp", nodes, "--zero", 1, SLURM_JOB_NUM_NODES=nodes,
                SLURM_NTASKS_PER_NODE=1, SLURM_CPUS_PER_TASK=1, EXPECT=self.expected())
            self.assertEqual((status, err), (0, ""), out)
            self.hold(out, nodes, rf"dp={nodes} \S*\s*zero=1")

    @unittest.skipUnless(EXTENDED, "the same processes as the others'")
    def test_torchrun(self):
        self.put("torchrun", STARTER)
        status, out, err = self.run_launcher("torchrun.sh", *MODEL, "--tp", 2, EXPECT=self.expected())
        self.assertEqual((status, err), (0, ""), out)
        self.hold(out, 2, "tp=2")

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun on this machine")
    def test_mpirun(self):
        status, out, err = self.run_launcher("mpirun.sh", *MODEL, "--tp", 2, DEVICE="cpu", EXPECT=self.expected())
        if "MPI" in err and "not" in err and "built" in err:
            self.skipTest("this build has no MPI")
        self.assertEqual((status, err), (0, ""), out)
        self.hold(out, 2, "tp=2")

    def test_an_illegal_layout_starts_no_rank(self):
        self.put("mpirun", RECORDER)
        status, _, err = self.run_launcher("mpirun.sh", *MODEL, "--tp", 3, RANKS_PER_NODE=3)
        self.assertEqual(status, 2)
        self.assertIn("cannot be split over tp=3", err)
        self.assertFalse((self.folder / "record").exists())

    def test_another_hash_than_expected_is_a_difference(self):
        self.put("torchrun", STARTER)
        status, out, err = self.run_launcher("torchrun.sh", *MODEL, RANKS_PER_NODE=1, EXPECT="0" * 64)
        self.assertEqual(status, 1, out)
        self.assertRegex(err, r"the weights have the hash [0-9a-f]{64}, expected 0{64}\n")

    def test_ranks_that_the_layout_lacks_are_refused(self):
        self.put("torchrun", STARTER)
        status, out, err = self.run_launcher("torchrun.sh", *MODEL, "--tp", 2, RANKS_PER_NODE=1)
        self.assertEqual(status, 2, out)
        self.assertIn("start one process for each rank", out + err)


class Page(LaunchTest):
    def test_every_launcher_is_there_and_can_be_run(self):
        page = (ROOT / "docs/guide/clusters.md").read_text(encoding="utf-8")
        for path in LAUNCH.iterdir():
            self.assertIn(path.name, page)
            self.assertEqual(os.access(path, os.X_OK), path.name != "steps.sh", path)


if __name__ == "__main__":
    unittest.main()
