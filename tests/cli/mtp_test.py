#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of --mtp from outside: a model has the same bits as one whose config.json has the blocks, keeps them in its
checkpoints, and what cannot have any is refused; and their order in a file of activations."""

import json
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import GOLDEN, ROOT, Case  # noqa: E402

SMALL = ("--batch", 2, "--seq", 8)


class MtpTest(Case):
    def model(self, **keys):
        to = self.folder / "config.json"
        config = json.loads((ROOT / "ref/data/deepseek-demo/config.json").read_text())
        to.write_text(json.dumps({**config, **keys}))
        return to

    def weights(self, *options):
        return [line for line in self.done("train", *options).stdout.splitlines() if line.startswith("weights after")]

    def test_it_is_the_model_whose_file_says_so_and_is_resumed(self):
        named = self.model(num_nextn_predict_layers=2, mtp_loss_scaling_factor=0.3)
        whole = self.weights(named, *SMALL, "--steps", 3)
        mtp = ("deepseek-demo", "--mtp", 2, "--mtp-weight", 0.3, *SMALL, "--steps", 3)
        self.assertEqual(self.weights(*mtp, "--pp", 2, "--recompute", "full"), whole)
        self.done("train", *mtp, "--stop-after", 1, "--save", self.folder / "run")
        self.assertEqual(self.weights("--resume", self.folder / "run", "--tp", 2), whole)
        self.refused("train", "--resume", self.folder / "run", "--mtp", 1, says="without scale and mtp")

    def test_memory_is_as_predicted_where_blocks_are_recomputed(self):
        for layout in (("--recompute", "full", "--pp", 2, "--zero", 2, "--dp", 2),
                       ("--recompute", "selective", "--tp", 2, "--sp", "--dp", 2, "--zero", 3),
                       ("--recompute", "full", "--recompute-every", 2, "--tp", 2)):
            with self.subTest(layout):
                done = self.done("check", "deepseek-demo", "--mtp", 2, *layout, "--batch", 4, "--seq", 8, "--steps", 1,
                                 "--skip-f64", "--memory", "--strict-predictions")
                self.assertIn("note: mtp: 2 further tokens, their losses times 0.1", done.stderr)

    def test_what_has_no_such_blocks_is_refused(self):
        self.refused("check", "gpt2-demo", "--mtp", 1, says="have no names for them")
        self.refused("check", "deepseek-demo", "--mtp-weight", 1, says="give mtp too")
        self.refused("check", "deepseek-demo", "--mtp", 9, says="--mtp")

    def test_blocks_that_the_file_alone_does_not_train_are_told(self):
        for depth, blocks in (1, "1 block of"), (2, "2 blocks of"):
            model = self.model(num_nextn_predict_layers=depth)
            note = f"config.json: without 'mtp_loss_scaling_factor', the {blocks} 'num_nextn_predict_layers'"
            for options, told in ((), 1), (("--mtp", 1), 0):
                with self.subTest(depth=depth, options=options):
                    notes = self.done("plan", model, "--tp", 2, *SMALL, *options).stderr
                    self.assertEqual((notes.count(note), notes.count("not known")), (told, 0), notes)

    def test_a_file_of_activations_has_their_order(self):
        model = GOLDEN / "llama-mtp-packed-tiny"
        self.done("grads", model, "--input", model / "batch.safetensors", "--out", self.folder / "out", "--activations")
        data = (self.folder / "out/activations.safetensors").read_bytes()
        header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
        order = json.loads(header["__metadata__"]["ANYRANK_PLACEMENT"])["order"]
        names = ["model.norm:fwd", "model.layers.2.hnorm:fwd", "model.layers.3.hnorm:fwd",
                 "model.layers.3.shared_head.norm:bwd", "model.layers.2.eh_proj:bwd", "lm_head.logits:bwd",
                 "model.layers.1:bwd"]
        self.assertEqual([name for name in order if name in names], names)


if __name__ == "__main__":
    unittest.main()
