# SPDX-License-Identifier: Apache-2.0
"""Ranks on this machine: what they get and give back, and what is said of those that fail; none is left behind."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import typing
import unittest
import unittest.mock
import warnings

from anyrank import _stacks, ranks
from anyrank._stacks import Frame
from anyrank.tests import FolderCase, fork, needs

Function = typing.Callable[..., typing.Any]
spawn = functools.partial(ranks.spawn, timeout=3600)  # however slow the machine is


def reduce_of(rank: int, start: float) -> typing.Any:
    """What a module's function can do under either method."""
    import torch
    import torch.distributed as dist
    x = torch.tensor([start + rank])
    dist.all_reduce(x)
    return x


def wait_for_ever() -> None:
    while True:
        time.sleep(1)


@needs("torch")
class Ranks(FolderCase):
    @classmethod
    def setUpClass(cls) -> None:
        importlib.import_module("anyrank.capture")  # once, and not in every rank

    def failure(self, world: int, function: Function, **options: typing.Any) -> ranks.RanksFailed:
        with self.assertRaises(ranks.RanksFailed) as caught:
            spawn(world, function, **options)
        return caught.exception

    def hang(self, world: int, function: Function, *words: str) -> ranks.RanksFailed:
        """The failure of a run that hangs, asked for until all ranks are where they stay and it has the words."""
        real = ranks._failure

        def failure(of: list[typing.Any], folder: str, timeout: float | None) -> ranks.RanksFailed:
            for _ in range(10_000):
                ranks._listen(of)
                failed = real(of, folder, timeout)
                if all(word in str(failed) for word in words):
                    break
                for path in pathlib.Path(folder).glob("*.stack"):
                    os.truncate(path, 0)
            return failed

        with unittest.mock.patch("anyrank.ranks._failure", failure):
            failed = self.failure(world, function, timeout=1e-9)
        self.assertEqual(failed.kind, "hangs")
        for word in words:
            self.assertIn(word, str(failed))
        return failed

    def test_results_come_in_the_order_of_ranks(self) -> None:
        def function(rank: int, base: int) -> tuple[int, list[float], str]:  # local, as in a test
            return base + rank, reduce_of(rank, 1.0).tolist(), os.environ["RANK"] + os.environ["WORLD_SIZE"]
        self.assertEqual(spawn(3, function, 10), [(10 + r, [6.0], f"{r}3") for r in range(3)])
        self.assertEqual(spawn(1, lambda rank: rank), [0])

    def test_warnings_of_ranks_are_given_once(self) -> None:
        def warn(rank: int) -> None:
            warnings.warn("the same on every rank")
            warnings.warn(f"of rank {rank}", FutureWarning)

        for expected in ["the same on every rank", "of rank 0", "of rank 1"], []:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                spawn(2, warn)
            self.assertEqual(sorted(str(w.message) for w in caught), sorted(expected))
            self.assertEqual({w.filename for w in caught}, {__file__} if expected else set())
            self.assertEqual(sum(w.category is FutureWarning for w in caught), 2 if expected else 0)

    def test_a_warning_hides_no_failure(self) -> None:
        def fail(rank: int) -> None:
            warnings.warn("before the failure")
            raise ValueError("the failure")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertIn("ValueError: the failure", str(self.failure(1, fail)))

    def test_seeds_threads_and_environment(self) -> None:
        def function(rank: int) -> tuple[typing.Any, ...]:
            import random

            import torch
            shared = torch.rand(2).tolist(), random.random()
            torch.manual_seed(ranks.own_seed(rank))
            return shared, torch.rand(2).tolist(), torch.get_num_threads(), os.environ["ONE"]
        runs = [spawn(2, function, seed=seed, env={"ONE": "1"}) for seed in (3, 3, 4)]
        self.assertEqual(runs[0], runs[1])
        self.assertEqual(runs[0][0][0], runs[0][1][0])  # the same on both ranks
        self.assertNotEqual(runs[0][0][1], runs[0][1][1])  # own_seed
        self.assertNotEqual(runs[0][0][0], runs[2][0][0])
        self.assertEqual(runs[0][0][2:], (1, "1"))
        self.assertNotIn("ONE", os.environ)

    def test_backward_after_backward_in_the_parent(self) -> None:
        import torch

        def function(rank: int) -> typing.Any:
            weight = torch.ones(64, 64, requires_grad=True)
            (torch.ones(512, 64) @ weight).square().mean().backward()
            return weight.grad.sum() if weight.grad is not None else None
        alone = function(0)  # has used the engine, and threads
        self.assertEqual(spawn(2, function), [alone, alone])

    def test_the_other_method(self) -> None:
        self.assertEqual([t.item() for t in spawn(2, reduce_of, 1.0, method="spawn")], [3.0, 3.0])
        try:
            import cloudpickle  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: F401
        except ImportError:
            with self.assertRaisesRegex(Exception, "top of its module, or install cloudpickle"):
                spawn(1, lambda rank: 0, method="spawn")

    def test_an_exception_ends_all_with_its_traceback(self) -> None:
        def function(rank: int) -> None:
            if rank == 2:
                raise KeyError("no such shard")
            reduce_of(rank, 0.0)
        failed = self.failure(4, function)
        self.assertEqual((failed.kind, failed.rank, type(failed.exception)), ("raised", 2, KeyError))
        text = str(failed)
        self.assertTrue(text.startswith("rank 2 of 4 raised KeyError: 'no such shard'\n\nTraceback"), text)
        self.assertIn('raise KeyError("no such shard")', text)
        self.assertNotIn("_rank_process", text)

    def test_all_ranks_raise_the_same(self) -> None:
        def function(rank: int) -> None:
            reduce_of(rank, 0.0)
            raise ValueError("wrong everywhere")
        text = str(self.failure(2, function))
        self.assertEqual(text.count("Traceback"), 1, text)

    def test_a_rank_that_dies(self) -> None:
        ends: list[tuple[typing.Callable[[], typing.Any], str]] = [
            (lambda: os.kill(os.getpid(), signal.SIGSEGV), "died of SIGSEGV"),
            (lambda: os.kill(os.getpid(), signal.SIGKILL), "died of SIGKILL (out of memory?)"),
            (lambda: os._exit(7), "left with exit status 7")]
        for end, words in ends:
            def function(rank: int) -> None:
                reduce_of(rank, 0.0)
                if rank == 1:
                    end()  # noqa: B023 (called in this turn)
                reduce_of(rank, 0.0)
            failed = self.failure(3, function)
            self.assertEqual((failed.kind, failed.rank), ("died", 1), str(failed))
            self.assertIn(f"rank 1 of 3 {words}", str(failed))

    def test_a_rank_that_is_in_no_collective_is_named(self) -> None:
        def function(rank: int) -> None:
            if rank == 1:
                wait_for_ever()
            reduce_of(rank, 0.0)
        failed = self.hang(3, function, "rank 1 of 3 hangs", "it is in wait_for_ever", "time.sleep(1)",
                           "ranks 0 and 2: waiting in all_reduce, called by reduce_of")
        self.assertEqual(failed.rank, 1)

    def test_a_rank_that_returned_is_named(self) -> None:
        def function(rank: int) -> None:
            if rank != 1:
                reduce_of(rank, 0.0)
        failed = self.hang(2, function, "rank 1 of 2 returned, and rank 0 still waits in all_reduce")
        self.assertEqual(failed.rank, 1)

    def test_a_rank_at_the_end_of_its_capture_has_returned(self) -> None:
        def function(rank: int) -> None:
            import torch

            import anyrank
            model = torch.nn.Linear(2, 2)
            with anyrank.capture(model, self.path / "dump"):
                model(torch.ones(1, 2))
                if rank == 1:
                    reduce_of(rank, 0.0)
        failed = self.hang(2, function, "rank 0 of 2 returned, and rank 1 still waits in all_reduce",
                           "rank 0: at the end of its capture, waiting for the others")
        self.assertEqual(failed.rank, 0)

    def test_a_step_without_a_pass_is_no_comparison(self) -> None:
        """And what fails before anything is compared leaves no folder behind."""
        import torch

        import anyrank

        def step(model: typing.Any, mesh: typing.Any) -> None:
            model.forward(torch.ones(1, 2)).sum().backward()
        with unittest.mock.patch("tempfile.tempdir", str(self.path)):
            with self.assertRaisesRegex(anyrank.AnyrankError, "step made no forward pass of the model"):
                anyrank.compare_ranks(lambda mesh: torch.nn.Linear(2, 2), step, ranks=2, timeout=3600)
        self.assertEqual(list(self.path.iterdir()), [])

    def test_other_collectives_are_named(self) -> None:
        def function(rank: int) -> None:
            import torch.distributed as dist
            if rank == 2:
                dist.barrier()
            reduce_of(rank, 0.0)
        failed = self.hang(3, function, "ranks call different collectives: ranks 0 and 1 all_reduce of float32 [1] and "
                           "rank 2 barrier", "rank 2: barrier, called by function (", "): dist.barrier()")
        self.assertEqual(failed.rank, 2)

    def test_ranks_that_do_not_agree_in_a_call_are_told_it_whatever_gloo_makes_of_it(self) -> None:
        """It aborts a process, or hangs: then the run is ended before its time is over."""
        def function(rank: int, kind: str) -> None:
            import torch
            from torch.distributed import all_reduce, barrier, broadcast, new_group
            pair = new_group([0, 1])
            for _ in range(3):
                all_reduce(torch.ones(4))
            if kind in ("group", "short") and rank < 2:
                broadcast(torch.ones(3 - rank if kind == "group" else 2 + rank), 0, group=pair)
            elif kind == "kind" and rank == 1:
                barrier()
            elif kind in ("size", "type"):
                all_reduce(torch.ones(4 + 3 * (rank == 2) * (kind == "size"),
                                      dtype=torch.float64 if kind == "type" and rank == 2 else torch.float32))
            all_reduce(torch.ones(4))

        other = "with other sizes or types of tensors"
        most = f"all_reduce {other}: ranks 0 and 1 all_reduce of float32 [4] and rank 2 all_reduce of"
        said = {"size": f"{most} float32 [7]", "type": f"{most} float64 [4]",
                "kind": "different collectives: ranks 0 and 2 all_reduce of float32 [4] and rank 1 barrier",
                "group": f"broadcast {other}: rank 0 broadcast of float32 [3] and rank 1 broadcast of float32 [2]"}
        with unittest.mock.patch("anyrank.ranks.LOOK", 0.2):
            for kind, words in said.items():
                failed = self.failure(3, functools.partial(function, kind=kind))
                self.assertIn(f"ranks call {words}\n", str(failed))
                odd = 1 if kind in ("kind", "group") else 2
                self.assertRegex(str(failed), rf"rank {odd}: .*, called by function \(")
                self.assertIn(failed.kind, ("died", "hangs", "raised"))
        with warnings.catch_warnings(record=True) as caught:  # which gloo carries out
            warnings.simplefilter("always")
            spawn(3, functools.partial(function, kind="short"))
        self.assertIn(f"no rank failed, but ranks call broadcast {other}: rank 0 broadcast of float32 [2] and rank 1 "
                      "broadcast of float32 [3];", " ".join(str(one.message) for one in caught))

    def test_results_and_arguments_that_cannot_be_used(self) -> None:
        self.assertIn("pickle", str(self.failure(2, lambda rank: lambda: 0)))
        for wrong in ({"world": 0}, {"timeout": 0}, {"timeout": float("nan")}, {"method": "thread"}):
            with self.assertRaisesRegex(ValueError, next(iter(wrong))):
                spawn(**{"world": 1, "function": reduce_of, **wrong})  # type: ignore[arg-type]

    def test_what_ranks_print_is_printed_by_rank(self) -> None:
        def program() -> None:
            spawn(2, lambda rank: (print("I am", rank), os.system("echo shell")))
        os.waitpid(fork(program, self.path / "out"), 0)
        expected = "".join(f"--- rank {r} printed ---\nI am {r}\nshell\n" for r in (0, 1))
        self.assertEqual((self.path / "out").read_text(), expected)

    @unittest.skipUnless(sys.platform == "linux", "looks into /proc")
    def test_nothing_is_left_running(self) -> None:
        """After Ctrl-C, and after the parent was killed; what ranks started goes with them where the parent can."""
        def never_ends(folder: pathlib.Path) -> None:
            def run(rank: int) -> None:
                child = subprocess.Popen(["sleep", "100000"])
                pathlib.Path(folder, f"{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
                os.rename(folder / f"{rank}.tmp", folder / f"{rank}.pids")
                wait_for_ever()
            ranks.spawn(2, run, timeout=None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            folder = pathlib.Path(self.path, number.name)
            folder.mkdir()
            parent = fork(functools.partial(never_ends, folder), folder / "out")
            while len(list(folder.glob("*.pids"))) < 2 and not os.waitpid(parent, os.WNOHANG)[0]:
                time.sleep(0.01)
            pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
            self.assertEqual(len(pids), 4, (folder / "out").read_text())
            os.kill(parent, number)
            os.waitpid(parent, 0)
            left = pids if number == signal.SIGINT else pids[::2]
            while any(map(running, left)):
                time.sleep(0.01)  # for ever, where one is left: the run of tests has a limit
            for pid in filter(running, pids):
                os.kill(pid, signal.SIGKILL)


class Stacks(unittest.TestCase):
    def test_the_users_frame_is_found_wherever_torch_and_the_program_are_installed(self) -> None:
        packages = "/venv/lib/python3.11/site-packages"
        for home in (packages, "/home/me/pytorch"):
            torch = importlib.machinery.ModuleSpec("torch", None, origin=f"{home}/torch/__init__.py")
            inner = [Frame(f"{home}/torch/distributed/{file}", 1, function)
                     for file, function in (("distributed_c10d.py", "all_reduce"), ("c10d_logger.py", "wrapper"))]
            inner.append(Frame(threading.__file__, 1, "run"))
            with unittest.mock.patch("importlib.util.find_spec", lambda name, torch=torch: torch):
                for program in ("/home/me/train.py", f"{packages}/mine/train.py", "<string>"):
                    frames = [*inner, Frame(program, 1, "step"), Frame(program, 9, "main")]
                    self.assertEqual((_stacks.users(frames), _stacks.collective(frames)), (3, "all_reduce"), frames)
                library = [*inner, Frame(f"{packages}/transformers/trainer.py", 1, "train"),
                           Frame("/home/me/train.py", 1, "main")]
                self.assertEqual(_stacks.users(library), 4)


def running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    unittest.main()
