#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The wheel and the source distribution: made by scripts/wheel.sh, installed where there is no compiler into a fresh
virtual environment of each Python from 3.9 to 3.13 that is found (on the path, or of pyenv), and tried there; the wheel
of 64-bit ARM by qemu, where scripts/install_deps.sh --aarch64 has put what builds it.

    tests/python/wheel_test.py [--wheel DIR] [unittest options]

--wheel: a folder that scripts/wheel.sh has filled; else it is run, which takes minutes. Exit status 77 (skipped) where
its tools cannot be installed.
"""

import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13"]
LEAST_NUMPY = re.search(r'"numpy>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")).group(1)
MOST_BYTES = 12 << 20  # of a wheel
ARM = "aarch64" if os.uname().machine != "aarch64" and (ROOT / "build/aarch64/sysroot").exists() else None
# A step of two ranks whose row-parallel layer's bias is added on both, captured; verify explains it.
CAPTURED = """
import sys, torch, torch.distributed as dist, anyrank
from torch import nn

def summed(module, inputs, y):
    total = y.detach().clone()
    dist.all_reduce(total)
    return y + (total - y).detach()

def run(rank, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x, (w, b) = torch.randn(6, 8), (model[2].weight, model[2].bias)
    split = dist.get_world_size() > 1
    if split:
        for p, dim in (model[0].weight, 0), (model[0].bias, 0), (w, 1):
            p.data = p.data.chunk(2, dim)[rank].contiguous()
        model[2].register_forward_hook(summed)
    spec = {"mesh": {"tp": 2}, "shard": {"0.*:*": {"tp": 0}, "2.weight:*": {"tp": 1}, "0:fwd": {"tp": -1},
                                         "1:*": {"tp": -1}, "2:bwd": {"tp": -1}}}
    with anyrank.capture(model, folder, spec=spec if split else None):
        model(x).square().mean().backward()

if __name__ == "__main__":
    anyrank.ranks.spawn(1, run, "one")
    anyrank.ranks.spawn(2, run, "many")
    report = anyrank.verify("one", "many", rtol=1e-4, atol=1e-6)
    print(report)
    sys.exit(report.ok)
"""
TOOLS = re.compile(r"(?:cc|c\+\+|gcc|g\+\+|clang|cpp|ld|as|ar|make|ninja|cmake|zig)\b|.*-(?:gcc|g\+\+|ld|as)\b")
VERSION = re.search(r"project\(anyrank VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")).group(1)


def run(command, **options):
    """Runs a command with an environment that knows nothing of this tree."""
    keep = {name: value for name, value in os.environ.items()
            if not name.startswith(("ANYRANK", "PYTHON", "VIRTUAL_ENV"))}
    environment = {**keep, **options.pop("environment", {})}
    return subprocess.run([str(word) for word in command], env=environment, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options)


@functools.lru_cache(maxsize=None)
def pythons():
    """{version: interpreter} of those that can make virtual environments."""
    found = {}
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for place in filter(None, places):
            asked = run([place, "-c", "import venv, ensurepip, sys; print('%d.%d' % sys.version_info[:2])"])
            if asked.returncode == 0 and asked.stdout.strip() == version:
                found.setdefault(version, str(place))
    return found


class Wheel(unittest.TestCase):
    made = None  # the folder with wheel and source distribution

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def passes(self, command, **options):
        done = run(command, **options)
        self.assertEqual(done.returncode, 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}")
        return done.stdout

    @staticmethod
    def file(pattern=f"*_{os.uname().machine}.whl"):
        return next(pathlib.Path(Wheel.made).glob(pattern))

    def bare_path(self):
        """A folder with links to every program of the path but compilers and what builds."""
        bare = self.folder / "bare"
        bare.mkdir()
        for place in os.environ["PATH"].split(os.pathsep):
            for program in pathlib.Path(place).glob("*") if os.path.isdir(place) else ():
                link = bare / program.name
                if program.is_file() and not TOOLS.match(program.name) and not os.path.lexists(link):
                    link.symlink_to(program)
        self.assertIsNone(shutil.which("cc", path=str(bare)))
        return str(bare)

    def environment(self, python, path):
        """A fresh virtual environment, its interpreter, and what runs in it see as their environment."""
        place = self.folder / f"venv-{pathlib.Path(python).parts[-3]}"
        self.passes([python, "-m", "venv", place])
        return place / "bin", {"PATH": f"{place / 'bin'}{os.pathsep}{path}"}

    def try_command(self, programs, environment):
        self.assertIn(f"anyrank {VERSION}", self.passes([programs / "anyrank", "--version"], environment=environment))
        for command in ([programs / "anyrank"], [programs / "python", "-m", "anyrank"]):
            said = self.passes([*command, "check", "gpt2-demo", "--tp", "2", "--steps", "1"], environment=environment,
                               cwd=self.folder)
            self.assertIn("the same bits", said.splitlines()[-1])
        done = run([programs / "anyrank", "check", "gpt2-demo", "--tp", "x"], environment=environment)
        self.assertEqual(done.returncode, 2, done.stdout)

    def test_it_installs_and_runs_on_every_python_without_a_compiler(self):
        self.assertTrue(pythons(), "no Python from 3.9 to 3.13 that can make virtual environments")
        path = self.bare_path()
        first, last = (end(pythons(), key=VERSIONS.index) for end in (min, max))
        for version, python in pythons().items():
            with self.subTest(version):
                programs, environment = self.environment(python, path)
                oldest = [f"numpy=={LEAST_NUMPY}"] if version == first == "3.9" else []
                self.passes([programs / "pip", "install", "--only-binary=:all:", self.file(), *oldest],
                            environment=environment)
                self.try_command(programs, environment)
                self.passes([programs / "python", "-W", "error", "-c", "import anyrank, anyrank.explain"],
                            environment=environment)
                if version not in (first, last):  # the same tests again
                    continue
                self.passes([programs / "pip", "install", "pytest"], environment=environment)
                said = self.passes([programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
                                    "anyrank"], environment=environment, cwd=self.folder)
                print(f"Python {version}: {re.search('.* passed.*', said).group(0)}", flush=True)

    def test_it_captures_explains_and_tests_beside_torch(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("no torch here (scripts/install_deps.sh --pytorch)")
        place = self.folder / "beside"
        self.passes([sys.executable, "-m", "venv", place])
        packages = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
        (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        self.passes([place / "bin/python", "-m", "pip", "install", "--no-index", self.file()])
        environment = {"OMP_NUM_THREADS": "1", "PATH": f"{place / 'bin'}{os.pathsep}{self.bare_path()}"}
        (self.folder / "captured.py").write_text(CAPTURED, encoding="utf-8")
        said = self.passes(["python", "captured.py"], environment=environment, cwd=self.folder)
        self.assertIn("the bias is added 2 times", said)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        program = re.search(r"```python\n(# test_mlp.py\n.*?)```", readme, re.DOTALL).group(1)
        (self.folder / "test_mlp.py").write_text(program, encoding="utf-8")
        found = run(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mlp.py"], environment=environment,
                    cwd=self.folder)
        self.assertEqual(found.returncode, 1, found.stdout)
        self.assertIn("anyrank.RanksDiffer: 2:fwd differs between one rank and 2 ranks", found.stdout)

    def unpacked(self, wheel, place):
        """The command of a wheel."""
        self.passes([sys.executable, "-m", "zipfile", "-e", wheel, place])
        command = place / "anyrank/bin/anyrank"
        command.chmod(0o755)
        return command

    @unittest.skipUnless(ARM, "no libraries of arm64 (scripts/install_deps.sh --aarch64)")
    def test_that_of_arm_runs_by_qemu(self):
        wheel = self.file(f"*_{ARM}.whl")
        self.assertLess(wheel.stat().st_size, MOST_BYTES)
        command = self.unpacked(wheel, self.folder / "arm")
        said = self.passes([ROOT / "scripts/run_aarch64.sh", command, "check", "gpt2-demo", "--tp", "2", "--steps", "1"],
                           cwd=self.folder)
        self.assertIn("the same bits", said.splitlines()[-1])

    def test_it_has_the_paths_and_bits_of_other_builds(self):
        place = self.folder / "packages"
        command = self.unpacked(self.file(), place)
        self.passes([sys.executable, ROOT / "tests/verify/bits_test.py",
                     "Bits.test_the_hashes_are_those_of_the_table_on_every_path"], environment={"ANYRANK": str(command)})
        if (ROOT / "build/anyrank").exists():
            ours, other = (json.loads(self.passes([program, "info", "--json", "-"], environment={"OMP_NUM_THREADS": "1"}))
                           for program in (command, ROOT / "build/anyrank"))
            self.assertEqual(ours["cpu"]["features"], other["cpu"]["features"])
            self.assertEqual(ours["blas"]["kernels"], other["blas"]["kernels"])
        self.assertLess(self.file().stat().st_size, MOST_BYTES)
        holds = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        self.assertIn("anyrank/share/anyrank/llama-demo/config.json", holds)
        self.assertTrue(any(name.endswith("THIRD_PARTY.txt") for name in holds))
        self.assertFalse([name for name in holds if ".libs/" in name or name.endswith((".c", ".a"))])

    def test_the_source_distribution_installs_with_a_compiler(self):
        programs, environment = self.environment(list(pythons().values())[-1], os.environ["PATH"])
        said = self.passes([programs / "pip", "install", "-v", self.file("*.tar.gz")], environment=environment)
        self.assertGreater(len(re.findall(r"\[ *\d+[/%].*\] *Building C object", said)), 100, "no progress is told")
        self.try_command(programs, environment)


def main():
    if "--wheel" in sys.argv:
        at = sys.argv.index("--wheel")
        Wheel.made = sys.argv[at + 1]
        del sys.argv[at:at + 2]
        return unittest.main()
    with tempfile.TemporaryDirectory() as folder:
        for options in ([], ["--aarch64"])[:1 + bool(ARM)]:
            done = run([ROOT / "scripts/wheel.sh", "--out", folder, *options])
            print(done.stdout, flush=True)
            if done.returncode:
                sys.exit(done.returncode)
        Wheel.made = folder
        return unittest.main()


if __name__ == "__main__":
    main()
