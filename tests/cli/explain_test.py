#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the command asks the Python package for causes: a Python that crashes, hangs, fails or is missing leaves verdict,
figures and exit status as they are, and no module beside the dumps is imported."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import COMMAND, LIMIT_S, Case, start  # noqa: E402

ENDS = {"kill -SEGV $$": "explaining ended by signal 11", "kill -ABRT $$": "explaining ended by signal 6",
        "echo half an answer; exit 23": "explaining ended with status 23",
        "echo no memory >&2; exit 1": "explaining ended with status 1: no memory",
        "echo 7": "the explanation is no JSON object", "exit 3": "has no numpy"}
HOSTILE = "raise SystemExit('a module of the folder was imported')\n"


def has_numpy():
    return any(subprocess.run([pathlib.Path(folder, "python3"), "-I", "-c", "import numpy"], capture_output=True,
                              check=False).returncode == 0
               for folder in os.environ["PATH"].split(":") if pathlib.Path(folder, "python3").exists())


class Explain(Case):
    def setUp(self):
        super().setUp()
        a, b = (tensor_files.write(self.folder / f"{side}.safetensors",
                                   {"layers.0.mlp:fwd": ("F32", [2, 4, 8], bytes([0, 0, x, 63 + x // 64] * 64)),
                                    "layers.1.mlp:fwd": ("F32", [2, 4, 8], bytes([0, 0, 0, 63] * 64))})
                for side, x in (("a", 0), ("b", 64)))
        self.words = [COMMAND, "verify", a, b]
        self.python = self.folder / "python"

    def run_with(self, *options, **environment):
        return start([*self.words, *options], cwd=self.folder, env={**os.environ, **environment})

    def broken(self, how, *options):
        self.python.write_text(f"#!/bin/sh\n{how}\n")
        self.python.chmod(0o755)
        return self.run_with(*options, ANYRANK_PYTHON=str(self.python))

    def test_verdict_and_figures_stand(self):
        alone = self.run_with("--no-explain")
        self.assertEqual((alone.returncode, alone.stderr), (1, ""))
        self.assertEqual(alone.stdout.splitlines()[0][:36], "layers.0.mlp:fwd: off by 500 % of it")
        for how, end in ENDS.items():
            done = self.broken(how)
            self.assertEqual((done.returncode, done.stderr), (1, ""), how)
            lines = done.stdout.splitlines()
            self.assertRegex(lines[1], f"^note: no cause: .*{re.escape(end)}")
            self.assertEqual([lines[0], *lines[2:]], alone.stdout.splitlines(), how)

    def test_json_stands_and_a_page_is_refused(self):
        whole = json.loads(self.run_with("--no-explain", "--json", "-").stdout)
        self.assertEqual((whole["explanation"], whole["unexplained"]), (None, None))
        for how, end in ENDS.items():
            report = json.loads(self.broken(how, "--json", "-").stdout)
            self.assertIn(end, report["unexplained"])
            of_explaining = ("unexplained", "explained", "seconds")
            self.assertEqual({key: report[key] for key in report if key not in of_explaining},
                             {key: whole[key] for key in whole if key not in of_explaining})
        done = self.broken("exit 3", "--html", self.folder / "page.html")
        self.assertEqual((done.returncode, (self.folder / "page.html").exists()), (2, False))
        self.assertIn("--html: ", done.stderr)

    def test_a_page_needs_no_numpy(self):
        page = self.folder / "page.html"
        done = self.broken(f'exec {sys.executable} -S "$@"', "--html", page)  # without site-packages
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertRegex(done.stdout.splitlines()[1], "^note: no cause: .* has no numpy")
        self.assertIn("layers.0.mlp:fwd", page.read_text())

    def test_an_interrupt_ends_the_explanation_alone(self):
        """Tests that a shell runs in the background ignore interrupts; the command here does not."""
        ready = self.folder / "ready"
        self.python.write_text(f"#!/bin/sh\n: > {ready}\nexec sleep {LIMIT_S}\n")
        self.python.chmod(0o755)
        with subprocess.Popen(self.words, cwd=self.folder, env={**os.environ, "ANYRANK_PYTHON": str(self.python)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as child:
            while not ready.exists():
                pass
            os.killpg(child.pid, signal.SIGINT)
            out, _ = child.communicate(timeout=LIMIT_S)
        self.assertEqual(child.returncode, 1)
        self.assertIn("note: no cause: explaining ended by signal 2", out)
        self.assertTrue(out.splitlines()[-1].startswith("verify: DIFFERENT: 1 of 2 tensors"), out)

    def test_no_python_is_told(self):
        done = self.run_with(PATH="/nonexistent")
        self.assertIn("note: no cause: there is no python3 on the PATH", done.stdout)
        for chosen, says in (("python3", "expected an absolute path"), ("/no/python", "/no/python could not be started")):
            self.assertIn(f"note: no cause: ", (text := self.run_with(ANYRANK_PYTHON=chosen).stdout))
            self.assertIn(says, text)

    def test_a_python_of_the_working_folder_is_never_started(self):
        (self.folder / "python3").write_text("#!/bin/sh\n: > started\necho '{}'\n")
        (self.folder / "python3").chmod(0o755)
        self.run_with(PATH=f".:{self.folder.name}::/nonexistent")
        self.assertFalse((self.folder / "started").exists())

    @unittest.skipUnless(has_numpy(), "no python3 on the PATH has numpy")
    def test_no_module_of_the_folders_is_imported(self):
        dump = self.folder / "dump"
        dump.mkdir()
        (self.folder / "b.safetensors").rename(dump / "b.safetensors")
        self.words[-1] = dump / "b.safetensors"
        expected = self.run_with(PYTHONPATH="")
        self.assertRegex(expected.stdout, "(?m)^layers.0.mlp:fwd: off by 500 % of its size: .*\n(.*\n)*  cause  ")
        for folder in (self.folder, dump):
            for module in ("numpy", "json", "anyrank", "sitecustomize", "usercustomize"):
                (folder / f"{module}.py").write_text(HOSTILE)
        done = self.run_with(PYTHONPATH=str(self.folder), PYTHONSTARTUP=str(self.folder / "numpy.py"))
        self.assertEqual((done.returncode, done.stdout, done.stderr), (1, expected.stdout, ""))


if __name__ == "__main__":
    unittest.main()
