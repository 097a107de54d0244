#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the options that say what updates the weights: schedules, decay rules, parameter groups.
"""

import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import ROOT, Case, run  # noqa: E402

SMALL = ["check", str(ROOT / "tests/golden/llama-gqa-tiny"), "--tp", "2", "--batch", "1", "--seq", "4",
                      "--skip-f64", "--strict-predictions"]


class OptimizerTest(Case):
    subcommand = SMALL

    def checked(self, *options):
        return self.result(*options)["models"][0]

    def test_all_of_them_reach_the_run_and_its_json(self):
        model = self.checked("--steps", "4", "--lr-schedule", "cosine", "--warmup", "2", "--min-lr", "0.0001",
                             "--decay", "matrices", "--group", "*.mlp.*:lr=0.5", "--group", "*norm*:lr=2,decay=0.25")
        optimizer = model["optimizer"]
        keys = ("schedule", "warmup_steps", "total_steps", "min_lr", "decay")
        self.assertEqual({key: optimizer[key] for key in keys},
                         {"schedule": "cosine", "warmup_steps": 2, "total_steps": 4, "min_lr": 0.0001,
                          "decay": "matrices"})
        self.assertEqual(optimizer["groups"], [{"glob": "*.mlp.*", "lr_scale": 0.5, "weight_decay": None},
                                               {"glob": "*norm*", "lr_scale": 2.0, "weight_decay": 0.25}])
        self.assertNotEqual(model["baseline"]["weights_hash"], self.checked("--steps", "4")["baseline"]["weights_hash"])

    def test_the_headline_tells_of_them(self):
        done = run(*SMALL, "--steps", "2", "--lr-schedule", "cosine", "--warmup", "1", "--decay", "matrices", "--group",
                   "*:lr=1")
        self.assertIn("AdamW (lr 0.001, cosine to 0 after 1 step of warm-up, weight decay 0.01 of matrices, 1 group)",
                      done.stdout)
        self.assertIn("SGD (lr 0.001, 3 steps of warm-up)",
                      run(*SMALL, "--steps", "1", "--optimizer", "sgd", "--warmup", "3").stdout)

    def test_a_group_that_makes_no_sense_is_refused(self):
        for text in ("x", ":lr=1", "a:", "a:lr", "a:lr=", "a:lr=1,", "a:lr=-1", "a:decay=nan", "a:lr=1;decay=2",
                     "a:rate=1", "a:lr=1x", "a:lr=1,lr=1", "a:decay=0,lr=1,decay=0"):
            with self.subTest(group=text):
                self.refused("--group", text, says=f"--group: got '{text}', expected GLOB:lr=X,decay=Y")
        self.refused("--group", "x" * 64 + ":lr=1", says="has 64 bytes, expected at most 63")
        self.refused(*["--group", "a:lr=1"] * 9, says="--group: given more than 8 times")
        self.refused("--group", "", says="--group: got ''")

    def test_a_group_of_nothing_is_refused(self):
        self.refused("--group", "*:lr=1", "--group", "*.bais:decay=0",
                     says="parameter group '*.bais' matches no parameter of llama-gqa-tiny")

    def test_a_colon_in_a_glob_is_part_of_it(self):
        (group,) = self.checked("--steps", "1", "--group", "[!:]*:decay=1,lr=0")["optimizer"]["groups"]
        self.assertEqual(group, {"glob": "[!:]*", "lr_scale": 0.0, "weight_decay": 1.0})

    def test_a_schedule_that_makes_no_sense_is_refused(self):
        self.refused("--lr-schedule", "cosine", "--warmup", "4", "--steps", "3",
                     says="warmup_steps is 4, expected at most total_steps, 3")
        self.refused("--min-lr", "0.1", says="--min-lr 0.1 is where --lr-schedule cosine ends: give both")
        self.refused("--lr-schedule", "cosine", "--min-lr", "0.1",
                     says="min_lr is 0.1, expected at least 0 and at most lr")
        self.refused("--lr-schedule", "linear", says="expected constant or cosine")
        self.refused("--decay", "norms", says="expected all or matrices")
        self.refused("--warmup", "-1", says="--warmup")


if __name__ == "__main__":
    unittest.main()
