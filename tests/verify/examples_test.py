#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the examples of modules of one's own: short enough to be read, and what they print.
They lie beside the command."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, ROOT, start  # noqa: E402


def run(name):
    done = start([pathlib.Path(COMMAND).parent / f"example_{name}"])
    return done.returncode, done.stdout


class ExamplesTest(unittest.TestCase):
    def test_a_page_or_two_each(self):
        for name in ("mlp_classifier", "own_layer", "planned_mlp", "dump_ranks"):
            lines = (ROOT / f"examples/{name}.c").read_text().count("\n")
            self.assertLess(lines, 120, name)
        for path in [*(ROOT / "examples").glob("own_[!l]*.c"), ROOT / "examples/own_lm.c", ROOT / "examples/own_launch.c"]:
            self.assertLessEqual(path.read_text().count("\n"), 100, path)
        for name in ("own_loop", "own_loss"):
            self.assertLess((ROOT / f"examples/{name}.c").read_text().count("\n"), 150, name)

    def test_a_loss_of_ones_own_has_the_same_bits_under_every_kind_of_layout(self):
        status, text = run("own_loss")
        self.assertEqual(status, 0, text)
        self.assertEqual(text.count("the same bits in all"), 8, text)
        self.assertIn("they agree", text)

    def test_a_loop_by_hand_does_not_grow(self):
        status, text = run("own_loop")
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"in step 1000; on three ranks the same bits in every step\n")
        self.assertIn("no step needs more than the first", text)

    def test_the_classifier_learns_and_is_checked(self):
        status, text = run("mlp_classifier")
        self.assertEqual(status, 0, text)
        loss = re.match(r"loss ([0-9.]+) at first, ([0-9.]+) after 300 steps; on four ranks the same bits", text)
        self.assertIsNotNone(loss, text)
        self.assertLess(float(loss[2]), 0.1 * float(loss[1]))
        for layout in ("dp=4", "tp=2", "dp=2 tp=2 micro-batches=3"):
            self.assertRegex(text, rf"\n  {layout} +the same bits in all \d+ tensors\n")
        self.assertIn("they agree", text)
        self.assertNotIn("WRONG", text)

    def test_the_layer_of_ones_own_is_right_and_its_mistake_is_found(self):
        status, text = run("own_layer")
        self.assertEqual(status, 0, text)
        right, wrong = text.split("\n\n")[:2]
        self.assertIn("they agree", right)
        self.assertNotIn("WRONG", right)
        self.assertIn("THEY DISAGREE", wrong)
        self.assertRegex(wrong, r"layer\.weight .* WRONG")
        self.assertNotRegex(wrong, r"layer\.scale .* WRONG")
        self.assertEqual(wrong.count("the same bits"), 2, "the mistake is the same on any number of ranks")

    def test_a_language_model_of_ones_own_has_the_same_bits_under_every_layout(self):
        status, text = run("own_lm")
        self.assertEqual(status, 0, text)
        first, last = re.search(r"20 training steps .loss ([0-9.]+) to ([0-9.]+).;", text).groups()
        self.assertLess(float(last), float(first))
        self.assertEqual(text.count("the same bits in all"), 6, text)
        self.assertIn("they agree", text)

    def test_products_by_hand_are_right_and_a_lint_names_the_forgotten_sum(self):
        status, text = run("own_regions")
        self.assertEqual(status, 0, text)
        self.assertEqual(text.count("the same bits in all"), 3, text)
        self.assertIn("they agree", text)
        self.assertIn("no f* under tp=2: 2 findings in 12 operations", text)
        self.assertRegex(text, r"forward +mlp.down +contract +S\(-1\) -> P\(sum\)")
        self.assertIn("mlp, report (forward): has P(sum), needs R, missing_reduction: all-reduce over tp", text)

    def test_blocks_of_ones_own_share_out_positions_and_gradients(self):
        for name in ("own_block", "own_launch", "own_ddp"):
            status, text = run(name)
            self.assertEqual(status, 0, text)
            self.assertEqual(text.count("the same bits in all"), 3, text)
            self.assertIn("they agree", text)
        weights = re.search(r"weights ([0-9a-f]{8}), of one rank ([0-9a-f]{8})\n", run("own_launch")[1])
        self.assertEqual(weights[1], weights[2])

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun on this machine")
    def test_ranks_that_mpirun_starts_have_the_weights_of_one(self):
        mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
        program = pathlib.Path(COMMAND).parent / "example_own_launch"

        def launch(ranks):
            return start(["mpirun", "-n", ranks, program, "mpi"], env={**os.environ, **mpi})
        four = launch(4)
        if "no MPI" in four.stdout:
            self.skipTest("this build has no MPI")
        self.assertEqual(four.returncode, 0, four.stdout + four.stderr)
        self.assertEqual(four.stdout, run("own_launch")[1].splitlines(keepends=True)[-1])
        self.assertEqual(launch(3).returncode, 1)

    def test_a_plan_prepares_a_module_of_ones_own_and_a_wrong_declaration_is_found(self):
        status, text = run("own_plan")
        self.assertEqual(status, 0, text)
        right, wrong = text.split("wrong: ", 1)
        self.assertEqual(right.count("the same bits in all"), 2, text)
        self.assertIn("they agree", right)
        self.assertEqual(wrong.count("DIFFERENT"), 2, text)
        self.assertIn("shift, redistribution (forward): has R, needs P(sum), redundant_reduction", wrong)

    def test_dumps_of_two_runs_tell_the_rank_that_read_another_input(self):
        status, text = run("dump_ranks")
        self.assertEqual(status, 0, text)
        self.assertEqual(text, "first: mlp.fc1:fwd, 8 of 32 elements\n")


if __name__ == "__main__":
    unittest.main()
