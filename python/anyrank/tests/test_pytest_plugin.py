# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin under pytest, in projects made here: turns, options, failures' text, what comes back after them."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import unittest

from anyrank.tests import FolderCase, fork, needs

LAYER = '''
import os, pytest, torch
import torch.distributed as dist
from torch import nn
BUG = os.environ.get("BUG", "")

class Sum(torch.autograd.Function):
    """The sum over ranks of a row-parallel layer's output."""
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad

class Row(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        full = nn.Linear(24, 5)
        n, r = (mesh.size(), mesh.get_rank()) if mesh else (1, 0)
        self.weight, self.bias = nn.Parameter(full.weight.detach().chunk(n, 1)[r].clone()), full.bias
        self.mesh, self.n, self.r = mesh, n, r
    def forward(self, x):
        x = x.chunk(self.n, -1)[self.r]
        y = x @ self.weight.T
        if self.mesh:
            y = Sum.apply(y)
        return y + self.bias

SPEC = {"shard": {"weight:*": {"tp": 1}}}

def step(model, mesh):
    model(torch.randn(6, 24)).square().mean().backward()
'''


def words_of(text: str) -> str:
    """The failure's text as pytest prints it, in one line."""
    return " ".join(" ".join(line[1:] for line in text.split("\n") if line.startswith("E ")).split())


class PytestCase(FolderCase):
    def write(self, text: str, name: str = "test_it.py") -> None:
        (self.path / name).write_text(LAYER + text)

    def pytest(self, *arguments: str, status: int = 0, patience: str = "--anyrank-timeout=3600", fresh: bool = False,
               **environment: str) -> str:
        """What pytest prints, in a copy of this process or in a fresh one. patience: however slow the machine is."""
        # The entry point, as the installed package has it: pytest loads it by itself.
        installed = self.path / "installed" / "sources_of_anyrank-0.dist-info"
        installed.mkdir(parents=True, exist_ok=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: sources-of-anyrank\nVersion: 0\n")
        (installed / "entry_points.txt").write_text("[pytest11]\nanyrank = anyrank.pytest_plugin\n")
        places = [str(pathlib.Path(__file__).resolve().parents[2]), str(installed.parent)]
        words = ["-q", *filter(None, [patience]), f"--rootdir={self.path}", f"--basetemp={self.path / 'tmp'}",
                 *arguments]
        environment = {"PYTHONPATH": os.pathsep.join(places), "COLUMNS": "200", **environment}
        out = self.path / "out"

        def main() -> object:
            import pytest
            os.chdir(self.path)
            sys.path[:0] = places
            return pytest.main(words)
        if fresh:
            with open(out, "wb") as file:
                ended = subprocess.run([sys.executable, "-m", "pytest", *words], stdout=file, stderr=file, check=False,
                                       cwd=self.path, stdin=subprocess.DEVNULL, env={**os.environ, **environment})
            returned = ended.returncode
        else:
            importlib.import_module("pytest")
            returned = os.WEXITSTATUS(os.waitpid(fork(main, out, **environment), 0)[1])
        text = out.read_text(errors="replace")
        self.assertEqual(returned, status, text)
        return text


@needs("pytest")
class Options(PytestCase):
    def test_loading_it_imports_neither_torch_nor_numpy(self) -> None:
        (self.path / "test_it.py").write_text("import sys\ndef test_one():\n"
                                              "    assert not {'torch', 'numpy'} & set(sys.modules)\n")
        self.assertIn("1 passed", self.pytest(fresh=True))

    def test_what_cannot_be_read_is_said_before_any_test(self) -> None:
        (self.path / "test_it.py").write_text("def test_one():\n    pass\n")
        for option, value in (("ranks", "2,x"), ("ranks", "0"), ("seeds", "-1"), ("timeout", "soon"),
                              ("timeout", "nan")):
            text = self.pytest(f"--anyrank-{option}={value}", status=4)
            self.assertRegex(text, rf"anyrank: {option}: '{re.escape(value)}' is not a")
        (self.path / "pytest.ini").write_text("[pytest]\nanyrank_ranks = two\n")
        self.assertIn("anyrank: ranks: 'two'", self.pytest(status=4))

    def test_markers_say_what_they_take(self) -> None:
        self.assertIn("@pytest.mark.anyrank(ranks=[2, 4]", self.pytest("--markers"))
        for mark, words in (("rank=[2]", "by name; not rank"), ("[2]", "by name"), ("ranks=[0]", "from 1"),
                            ("layouts=[{'tp': 0}]", "'tp' has the size 0")):
            (self.path / "test_it.py").write_text(f"import pytest\n@pytest.mark.anyrank({mark})\n"
                                                  "def test_one(anyrank_spawn):\n    pass\n")
            self.assertIn(words, self.pytest(status=2))

    def test_turns(self) -> None:
        """A test for each layout and seed, and what the command line changes."""
        (self.path / "test_it.py").write_text(
            "import pytest\n"
            "@pytest.mark.anyrank(ranks=[1, 2], seeds=range(2))\ndef test_a(anyrank_compare):\n    pass\n"
            "@pytest.mark.anyrank(layouts=[{'dp': 2, 'tp': 2}, {'tp': 2}])\ndef test_b(anyrank_spawn):\n    pass\n"
            "def test_c(anyrank_compare):\n    pass\n")

        def ids(*arguments: str) -> list[str]:
            lines = self.pytest("--collect-only", *arguments).split("\n")
            return [line.partition("::")[2][5:] for line in lines if "::" in line]
        self.assertEqual(ids(), ["a[tp1-seed0]", "a[tp1-seed1]", "a[tp2-seed0]", "a[tp2-seed1]", "b[dp2-tp2]", "b[tp2]",
                                 "c"])
        self.assertEqual(ids("--anyrank-ranks=4", "--anyrank-seeds=7"),
                         ["a[tp4-seed7]", "b[dp2-tp2-seed7]", "c[tp4-seed7]"])
        self.assertEqual(ids("--anyrank-ranks=3")[1:], ["a[tp3-seed1]", "b[none]", "c[tp3]"])
        (self.path / "pytest.ini").write_text("[pytest]\nanyrank_ranks = 2\n")
        self.assertEqual(ids("-k", "test_c"), ["c[tp2]"])


@needs("pytest", "torch")
class Fixtures(PytestCase):
    @classmethod
    def setUpClass(cls) -> None:
        for name in ("anyrank.capture", "anyrank._compare", "torch._dynamo"):  # which every comparison imports
            importlib.import_module(name)

    def test_right_layers_pass_and_say_how_near_they_were(self) -> None:
        self.write('''
@pytest.mark.anyrank(ranks=[2, 3], seeds=[0, 5])
def test_row(anyrank_compare):
    compared = anyrank_compare(Row, step, spec=SPEC)
    assert compared.report.ok and 0 <= compared.worst < 0.5 and not compared.weak

def test_spawn(anyrank_spawn):
    assert anyrank_spawn(lambda rank, base: rank + base, 5, ranks=3) == [5, 6, 7]

def test_skip(anyrank_spawn):
    anyrank_spawn(lambda rank: pytest.skip("not on this machine"))

def test_said_twice(anyrank_compare):
    with pytest.raises(ValueError, match="give one of the two"):
        anyrank_compare(Row, step, ranks=2, layout={"tp": 2})
    with pytest.raises(ValueError, match="at most one rule"):
        anyrank_compare(Row, step, bits=True, rtol=1e-3)

def test_one_rank_alone(anyrank_compare):
    with pytest.raises(ValueError, match="compared with itself"):
        anyrank_compare(Row, step, ranks=1)

def test_without_backward(anyrank_compare):
    with pytest.raises(Exception, match="step called no backward"):
        anyrank_compare(Row, lambda model, mesh: model(torch.randn(6, 24)), spec=SPEC)

def test_spec_in_vain(anyrank_compare):
    with pytest.warns(UserWarning, match="no tensor of this run has a name that matches 'wieght:.'"):
        anyrank_compare(Row, step, spec={"shard": {**SPEC["shard"], "wieght:*": {"tp": 1}}})
    with pytest.warns(UserWarning, match="the layout {'tp': 2} has no dimension 'cp'"):
        anyrank_compare(Row, step, spec={"shard": {"weight:*": {"tp": 1, "cp": 1}}})

@pytest.mark.anyrank(layouts=[{"tp": 2}, {"cp": 2}])
def test_one_spec_for_two_layouts(anyrank_compare, recwarn):
    anyrank_compare(Row, step, spec={"shard": {"weight:*": {"tp": 1, "cp": 1}}})
    assert not [one for one in recwarn if "no effect" in str(one.message)]

def test_random(anyrank_compare):
    """What does not come from the seed would make everything allowed."""
    def build(mesh):
        model = Row(mesh)
        model.bias.data.copy_(torch.tensor([float(b) for b in os.urandom(5)]))
        return model
    with pytest.raises(Exception, match="one rank has other values when it runs again.*bias:init"):
        anyrank_compare(build, step, spec=SPEC)

def test_no_module(anyrank_compare):
    with pytest.raises(Exception, match="build returned a function"):
        anyrank_compare(lambda mesh: step, step)

def test_update(anyrank_compare):
    kept = []
    def build(mesh):
        model = Row(mesh)
        kept[:] = [torch.optim.AdamW(model.parameters())]
        return model, kept[0]
    def update(model, mesh):
        step(model, mesh)
        kept[0].step()
    compared = anyrank_compare(build, update, ranks=2, spec=SPEC)
    assert compared.report.compared > 10
''')
        text = self.pytest("-rs", "--anyrank-dump=kept", "--junit-xml=junit.xml")
        self.assertIn("14 passed, 1 skipped", text)
        self.assertIn("not on this machine", text)
        self.assertRegex(text, r"anyrank: \d comparisons with one rank, all the same within what is allowed; nearest "
                               r"to it: 0\.\d+ of what is allowed, in \S+ of test_it.py::test_\w+")
        kept = self.path / "kept" / "test_it.py-test_row-tp3-seed5"
        self.assertEqual({path.name for path in kept.iterdir()}, {"one", "ranks", "allowed.safetensors"})
        self.assertEqual(len(list((kept / "ranks").glob("*.safetensors"))), 3)

    def test_a_small_bug_fails_and_comes_back_by_its_name(self) -> None:
        self.write('''
@pytest.mark.anyrank(seeds=[0, 1])
def test_row(anyrank_compare):
    def late(model, mesh):
        step(model, mesh)
        if mesh and BUG == "late" and "seed1" in os.environ["PYTEST_CURRENT_TEST"]:
            model.bias.grad *= 1 + 1e-3
    anyrank_compare(Row, late, spec=SPEC)
''')
        text = self.pytest(status=1, BUG="late")
        self.assertIn("1 failed, 1 passed", text)
        message = words_of(text)
        self.assertRegex(message, r"^anyrank.RanksDiffer: bias:grad differs between one rank and 2 ranks \(tp=2\): "
                                  r"`model.bias.grad \*= 1 \+ 1e-3` \(test_it.py:\d+\), which the reference "
                                  r"does not do, gives other values cause .*; every element is the reference "
                                  r"times 1.001 tensor ")
        for words in ("tensor bias:grad (a parameter's gradient), the only one", "times what rounding explains",
                      "pattern all 5 elements", "seed 1", "repeat pytest 'test_it.py::test_row[seed1]'",
                      "look anyrank verify "):
            self.assertIn(words, message)
        for plumbing in ("_compare.py", "pytest_plugin.py", "_rank_process.py"):
            self.assertNotIn(plumbing, text)
        self.assertIn("1 failed", self.pytest("--lf", status=1, BUG="late").split("\n")[-2])
        again = self.pytest("--lf")
        self.assertIn("1 passed", again.split("\n")[-2])

    def test_a_rule_of_ones_own_is_not_called_rounding(self) -> None:
        self.write("""
@pytest.mark.parametrize("rule", [{"bits": True}, {"rtol": 1e-4}])
def test_row(anyrank_compare, rule):
    def late(model, mesh):
        step(model, mesh)
        if mesh:
            model.bias.grad *= 1 + 1e-3
    anyrank_compare(Row, late, spec=SPEC, only="bias:grad", **rule)
""")
        text = words_of(self.pytest(status=1))
        self.assertEqual(text.count("times what the rule allows"), 1, text)
        self.assertNotIn("rounding explains", text)
        self.assertNotIn("infinitely more", text)

    def test_sharded_tensors_without_a_spec_are_explained(self) -> None:
        self.write("\ndef test_row(anyrank_compare):\n    anyrank_compare(Row, step, ranks=4)\n")
        text = words_of(self.pytest(status=1))
        self.assertIn("weight:init has another shape on one rank than on 4 ranks (tp=4)", text)
        self.assertIn('say so: spec={"shard": {"weight:init": {"tp": 1}}}', text)

    def test_first_failure_ends_the_session_and_leaves_no_process(self) -> None:
        self.write('''
def test_row(anyrank_spawn):
    def run(rank):
        open(f"{rank}.pid", "w").write(str(os.getpid()))
        dist.barrier()
        if rank == 1:
            raise RuntimeError("here")
        dist.barrier()
    anyrank_spawn(run, ranks=3)

def test_never(anyrank_spawn):
    assert False
''')
        text = self.pytest("-x", status=1)
        self.assertIn("rank 1 of 3 raised RuntimeError: here", text)
        self.assertIn("1 failed", text)
        self.assertNotIn("test_never", text)
        pids = [int(path.read_text()) for path in self.path.glob("*.pid")]
        self.assertEqual(len(pids), 3)
        for pid in pids:
            with self.assertRaises(ProcessLookupError):
                os.kill(pid, 0)

    def test_without_the_plugin_there_are_no_fixtures(self) -> None:
        self.write("\ndef test_row(anyrank_compare):\n    pass\n")
        self.assertIn("fixture 'anyrank_compare' not found", self.pytest("-p", "no:anyrank", status=1, patience=""))

    @unittest.skipIf(importlib.util.find_spec("xdist") is None, "no pytest-xdist here")
    def test_under_xdist(self) -> None:
        self.write('''
@pytest.mark.anyrank(ranks=[2], seeds=range(2))
def test_row(anyrank_compare):
    anyrank_compare(Row, step, spec=SPEC)
''')
        text = self.pytest("-n", "2", "--anyrank-dump=kept", fresh=True)  # whose workers begin anew
        self.assertIn("2 passed", text)
        self.assertIn("anyrank: 2 comparisons with one rank", text)
        self.assertEqual(len(list((self.path / "kept").iterdir())), 2)


if __name__ == "__main__":
    unittest.main()
