#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A measure that crashes, hangs or fails: the verdict, the figures and the exit status of `verify` stand, and it says
that nothing is explained."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import COMMAND, LIMIT_S, Case, start  # noqa: E402

BROKEN = pathlib.Path(COMMAND).parent / "tests/broken_verify"
ENDS = {"segfault": "SIGSEGV", "abort": "SIGABRT", "exit": "exit status 23", "error": "no memory for a measure"}


@unittest.skipUnless(BROKEN.exists(), "tests/broken_verify is not built here")
class ExplainedApart(Case):
    def setUp(self):
        super().setUp()
        a, b = (tensor_files.write(self.folder / f"{side}.safetensors",
                                   {"layers.0.mlp:fwd": ("F32", [2, 4, 8], bytes([0, 0, x, 63] * 64)),
                                    "layers.1.mlp:fwd": ("F32", [2, 4, 8], bytes([0, 0, 0, 63] * 64))})
                for side, x in (("a", 0), ("b", 64)))
        self.words = [BROKEN, "verify", a, b]
        self.limits = {"ASAN_OPTIONS": "handle_segv=0:handle_abort=0:detect_leaks=0"}

    def broken(self, how, *options):
        return start([*self.words, *options], cwd=self.folder, env={**os.environ, **self.limits, "BREAKS": how})

    def test_verdict_and_figures_stand(self):
        whole = start(self.words, cwd=self.folder, env={**os.environ, **self.limits})
        self.assertEqual((whole.returncode, whole.stderr), (1, ""))
        kept = [line for line in whole.stdout.splitlines()
                if not line.startswith(("  run  ", "  the same  ", "    pattern", "    hint", "    cause"))]
        for how, end in ENDS.items():
            done = self.broken(how)
            self.assertEqual(done.returncode, 1, (how, done.stderr))
            self.assertEqual([line for line in done.stdout.splitlines() if not line.startswith("note: bits")],
                             [line for line in kept if not line.startswith("note: bits")], how)
            self.assertEqual(done.stderr.splitlines()[0], "a measure breaks")
            self.assertIn("note: explaining ended (", done.stderr.splitlines()[-1])
            self.assertIn(f"{end}); the verdict stands", done.stderr.splitlines()[-1])

    def test_json_and_page_are_written(self):
        whole = json.loads(start([*self.words, "--json", "-"], cwd=self.folder,
                                 env={**os.environ, **self.limits}).stdout)
        self.assertEqual((whole["explained"], whole["unexplained"]), (True, None))
        self.assertTrue(whole["first"]["pattern"])
        for how, end in ENDS.items():
            page = self.folder / f"{how}.html"
            done = self.broken(how, "--json", "-", "--html", page)
            self.assertEqual(done.returncode, 1, (how, done.stderr))
            report = json.loads(done.stdout)
            self.assertFalse(report["explained"])
            self.assertTrue(report["unexplained"].endswith(end), report["unexplained"])
            self.assertEqual((report["facts"], report["first"]["pattern"], report["first"]["cause"]), (None, "", None))
            for key in ("result", "tensors_different", "elements_different"):
                self.assertEqual(report[key], whole[key])
            self.assertEqual(report["first"]["max_abs"], whole["first"]["max_abs"])
            self.assertIn("layers.0.mlp:fwd", page.read_text())

    def test_the_verdict_is_printed_first_and_an_interrupt_ends_the_explanation_alone(self):
        """Tests that a shell runs in the background ignore interrupts; the command here does not."""
        with subprocess.Popen([*self.words], cwd=self.folder, env={**os.environ, **self.limits, "BREAKS": "hang"},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as child:
            self.assertEqual(child.stdout.readline(),
                             "different: 1 of 2 tensors; first in execution order: layers.0.mlp:fwd\n")
            self.assertEqual(child.stderr.readline(), "a measure breaks\n")
            os.killpg(child.pid, signal.SIGINT)
            out, errors = child.communicate(timeout=LIMIT_S)
        self.assertEqual((child.returncode, errors), (1, "note: explaining ended (SIGINT); the verdict stands\n"))
        self.assertTrue(out.splitlines()[-1].startswith("verify: DIFFERENT: 1 of 2 tensors"), out)


if __name__ == "__main__":
    unittest.main()
