# SPDX-License-Identifier: Apache-2.0
"""anyrank compare: options, templates, working folders; and whole runs of small scripts where torch is there, with the
commands of compare.md and README.md."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import typing
import unittest
import unittest.mock

from anyrank._command import Finished
from anyrank._errors import AnyrankError
from anyrank.compare import answer, main
from anyrank.compare.options import arguments_for, parse
from anyrank.compare.runs import Result, mirror

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/guide/compare.md"
HAS_TORCH = importlib.util.find_spec("torch") is not None
TRAIN = """
import argparse, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true")
parser.add_argument("--seed-by-world", action="store_true")
parser.add_argument("--whole", action="store_true")
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(world if options.seed_by_world else 0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in range(6):
    if options.fail and rank == world - 1 and step == 1:
        raise ValueError("no more samples")
    batch = data[step * 8:][:8]
    x = batch if options.whole else batch.chunk(world)[rank][:options.batch]
    loss = model(x).square().mean()
    if options.mistake:
        loss = loss / world
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""


TENSOR_PARALLEL = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(1)
for step in range(4):
    model(torch.randn(8, 8, generator=data)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


class TestOptions(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.script = pathlib.Path(folder.name, "train.py")
        self.script.write_text("", encoding="utf-8")

    def refused(self, *words: str) -> str:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as ended:
            parse(words)
        self.assertEqual(ended.exception.code, 2)
        return err.getvalue()

    def test_ranks_in_arguments_are_replaced(self) -> None:
        options = parse(["--ranks", "1,4", "--args-for", "1 --accumulate 4", "--", str(self.script), "--batch",
                         "{8//ranks}", '{"json": 1}'])
        self.assertEqual([arguments_for(options, run) for run in options.runs],
                         [["--batch", "8", '{"json": 1}', "--accumulate", "4"], ["--batch", "2", '{"json": 1}']])

    def test_only_arithmetic_is_calculated(self) -> None:
        for text in ("{ranks.real}", "{ranks()}", "{ranks ** 9}", "{8 // (ranks - 1)}"):
            options = parse(["--", str(self.script), text])
            with self.subTest(text), self.assertRaisesRegex(AnyrankError, "expected whole numbers"):
                arguments_for(options, options.runs[0])

    def test_a_launcher_is_replaced(self) -> None:
        for launcher in (["torchrun", "--nproc-per-node", "2"], ["python"], ["torchrun", "--standalone"],
                         ["accelerate", "launch", "--num_processes", "2"]):
            with self.subTest(launcher):
                options = parse(["--", *launcher, str(self.script), "--lr", "1"])
                self.assertEqual((options.target, options.arguments), ((str(self.script),), ("--lr", "1")))
        self.assertEqual(parse(["--", "torchrun", "-m", "a.b", "c"]).target, ("-m", "a.b"))

    def test_a_wrong_usage_says_what_is_expected(self) -> None:
        for words, message in ((["--"], "there is no script"), (["--", "absent.py"], "there is no such script"),
                               (["--ranks", "2", "--", str(self.script)], "would compare a run with itself"),
                               (["--ranks", "0,x", "--", str(self.script)], "numbers from 1"),
                               (["--commit", "a", "--reference", "b", "--", str(self.script)], "give one of them"),
                               (["--python", "absent-python", "--", str(self.script)], "no such program")):
            with self.subTest(words):
                self.assertIn(message, self.refused(*words))

    def test_a_tensor_that_rounding_changes_whole_is_judged_by_fixed_tolerances(self) -> None:
        for fixed_status, expected in ((0, 0), (1, 1)):
            calls: list[list[str]] = []

            def verify(_command: str, words: typing.Sequence[str], *, fixed_status: int = fixed_status,
                       calls: list[list[str]] = calls) -> Finished:
                calls.append(list(words))
                if "--rounding" in words:
                    return Finished((), 1, {"result": "unjudged", "unjudged": ["w:grad"]}, "verify: CANNOT JUDGE all")
                return Finished((), fixed_status, {"result": ("same", "different")[fixed_status]}, "verify: fixed")

            options = parse(["--operations", "-q", "--", str(self.script)])
            results = [Result(run, self.script.parent, 1.0, [], [], self.script) for run in options.runs]
            (self.script.parent / "allowed.safetensors").touch()
            out = io.StringIO()
            with unittest.mock.patch.object(answer, "run_words", verify), contextlib.redirect_stdout(out):
                status = answer._compare_all(options, results, self.script.parent, answer.Progress(True))
            self.assertEqual((status, len(calls)), (expected, 2))
            self.assertEqual("it may change w:grad by all of it" in out.getvalue(), expected == 0)

    def test_a_mirror_keeps_new_files_apart(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            source, work = pathlib.Path(name, "source"), pathlib.Path(name, "work")
            (source / "data").mkdir(parents=True)
            work.mkdir()
            (source / "data" / "x.txt").write_text("x", encoding="utf-8")
            mirror(source, work, [])
            (work / "data" / "new.txt").write_text("y", encoding="utf-8")
            self.assertEqual((work / "data" / "x.txt").read_text(encoding="utf-8"), "x")
            self.assertEqual(os.listdir(source / "data"), ["x.txt"])


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class TestRuns(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.script = self.folder / "train.py"
        self.script.write_text(TRAIN, encoding="utf-8")
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)

    def compare(self, *words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["--quiet", *words])
        return status, out.getvalue(), err.getvalue()

    def test_a_correct_script_is_the_same_on_two_ranks(self) -> None:
        if PAGE.exists():
            commands = re.findall(r"```sh\nanyrank compare (.*)\n```", PAGE.read_text(encoding="utf-8"))
            self.assertEqual(commands, ["-- train.py --batch 8", "-- train.py --batch {8//ranks}"])
        status, out, err = self.compare("--", "train.py", "--batch", "8")
        self.assertEqual(status, 0, out + err)
        status, out, err = self.compare("--json", "result.json", "--", "train.py", "--batch", "{8//ranks}")
        self.assertEqual(status, 0, out + err)
        result = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        self.assertEqual((result["result"], result["runs"][1]["models"]), ("same", ["Sequential"]))
        self.assertGreater(result["comparisons"][0]["verify"]["tensors"], 30)
        self.assertEqual(sorted(os.listdir(self.folder)), ["result.json", "train.py"])

    def test_tensor_parallelism_with_a_mesh_of_one_rank_is_a_reference(self) -> None:
        self.script.write_text(TENSOR_PARALLEL, encoding="utf-8")
        status, out, err = self.compare("--", "train.py")
        self.assertEqual(status, 0, out + err)
        self.assertIn("what rounding of the run's own formats explains", out)

    def test_a_mistake_is_named(self) -> None:
        status, out, err = self.compare("--out", "kept", "--", "train.py", "--mistake")
        self.assertEqual(status, 1, out + err)
        self.assertIn("loss:fwd", out)
        self.assertTrue((self.folder / "kept/ranks-2/dump/operations").is_dir())
        self.assertEqual(sorted(os.listdir(self.folder / "kept/ranks-2")), ["dump", "output.txt"])

    def test_what_makes_a_comparison_pointless_comes_first(self) -> None:
        for words, sentence in ((["--whole"], "every rank got the whole batch of 8 samples"),
                                (["--batch", "2"], "batch size counts per rank"),
                                (["--seed-by-world"], "The runs start from different weights")):
            with self.subTest(words):
                status, out, err = self.compare("--", "train.py", *words)
                self.assertEqual(status, 1, out + err)
                self.assertIn(sentence, out.split("\n")[1])
        status, out, err = self.compare("--same-weights", "--", "train.py", "--seed-by-world")
        self.assertEqual(status, 0, out + err)

    def test_another_commit_is_a_reference(self) -> None:
        git: list[typing.Any] = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "one"]):
            subprocess.run([*git, *words], check=True)
        self.script.write_text(TRAIN.replace("Tanh", "ReLU"), encoding="utf-8")
        status, out, err = self.compare("--commit", "HEAD", "--", "train.py")
        self.assertEqual(status, 1, out + err)
        self.assertIn("1 rank, working tree against 1 rank, commit HEAD", out)
        worktrees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(len(worktrees.splitlines()), 1)

    def test_a_script_that_fails_shows_its_traceback_once(self) -> None:
        status, out, err = self.compare("--steps", "3", "--", "train.py", "--fail")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("1 rank: the script failed on rank 0", err)
        self.assertEqual(err.count("ValueError: no more samples"), 1)

    def test_a_rank_that_is_killed_is_named_and_not_the_one_that_lost_it(self) -> None:
        killed = "    if rank == 1 and step == 1:\n        os.kill(os.getpid(), 9)\n    if options.fail and"
        self.script.write_text(TRAIN.replace("    if options.fail and", killed), encoding="utf-8")
        status, out, err = self.compare("--steps", "3", "--", "train.py")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("2 ranks: rank 1 was ended by SIGKILL", err)

    def test_a_script_that_does_not_train_is_refused(self) -> None:
        for text, message in (("print(1)", "without importing torch"), ("import torch", "no training step was found"),
                              ("import torch\nraise SystemExit(3)", "exit status 3"),
                              ("raise ModuleNotFoundError(\"No module named 'torch'\")", "has no torch"),
                              ("import os, torch\nos.kill(os.getpid(), 9)", "SIGKILL")):
            with self.subTest(text):
                self.script.write_text(text, encoding="utf-8")
                status, out, err = self.compare("--", "train.py")
                self.assertEqual((status, out), (2, ""))
                self.assertIn(message, err)

    def test_ctrl_c_ends_all_processes(self) -> None:
        self.script.write_text("import torch, time\ntime.sleep(77)\n", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "anyrank.compare", "--", "train.py"], stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
        for line in typing.cast(typing.IO[str], process.stderr):
            if "starting" in line:
                break
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertIn("interrupted", err)
        listing = subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
        self.assertNotIn(str(self.script), listing)

    def test_a_run_that_takes_too_long_is_ended(self) -> None:
        self.script.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time;"
                               "time.sleep(99)'])\n", encoding="utf-8")
        status, _, err = self.compare("--timeout", "3", "--", "train.py")
        self.assertEqual(status, 2)
        self.assertIn("no 2 training steps within 3 s", err)
        self.assertNotIn("time.sleep(99)", subprocess.run(["ps", "ax"], capture_output=True, text=True,
                                                         check=True).stdout)


if __name__ == "__main__":
    unittest.main()
