# SPDX-License-Identifier: Apache-2.0
"""The bias of routers of sigmoids: moved after each step by counts of tokens, equal under every layout, kept in
checkpoints, and refused where there is none."""
import json
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import Case  # noqa: E402

MODEL, UPDATE = "glm4-moe-demo", ("--router-bias-update", "0.05")
SMALL = ("--batch", "4", "--seq", "16", "--steps", "3")


class RouterBiasTest(Case):
    def trained(self, *options):
        return self.result("train", MODEL, *SMALL, *options)

    def test_every_layout_has_the_bits_of_one_rank_and_the_predicted_bytes(self):
        for layout in (("--dp", "2", "--ep", "2", "--zero", "3"), ("--cp", "2", "--tp", "2", "--sp", "--etp", "1"),
                       ("--pp", "3", "--micro-batches", "2", "--dp", "2", "--recompute", "full"),
                       ("--tp", "4", "--micro-batches", "4", "--recompute", "selective")):
            with self.subTest(layout=layout):
                model = self.result("check", MODEL, *SMALL, *UPDATE, *layout, "--strict-predictions")["models"][0]
                self.assertEqual((model["runs"][0]["result"], model["router_bias_update"]), ("same", 0.05))

    def test_it_changes_the_weights_and_a_resumed_run_keeps_it(self):
        moved, still = self.trained(*UPDATE), self.trained()
        self.assertNotEqual(moved["weights_hash"], still["weights_hash"])
        self.trained(*UPDATE, "--tp", "2", "--stop-after", "1", "--save", self.folder / "run")
        resumed = self.result("train", "--resume", self.folder / "run", "--dp", "2", "--ep", "2")
        self.assertEqual((resumed["note"], resumed["weights_hash"]), (None, moved["weights_hash"]))
        other = self.result("train", "--resume", self.folder / "run", "--router-bias-update", "0")
        self.assertIn("another router-bias-update: from step 2 on", other["note"])

    def test_a_bias_of_minus_zero_becomes_zero_where_it_does_not_move(self):
        """As by PyTorch's `bias += u * sign(error)`, in the baseline too. Of few tokens some experts have the mean."""
        folder = self.checkpoint_with(MODEL, "e_score_correction_bias", -0.0)
        model = self.result("check", folder, "--batch", "2", "--seq", "8", *UPDATE, "--dp", "2")["models"][0]
        self.assertEqual(model["runs"][0]["result"], "same")

    def test_a_loss_of_routers_that_is_not_finite_is_the_run_s(self):
        folder = self.checkpoint_with("mixtral-demo", "gate.weight", 1e25)
        options = ("--batch", "2", "--seq", "8", "--steps", "1", "--clip", "0", "--router-z-loss", "0.1", "--dp", "2")
        model = json.loads(self.done("check", folder, *options, "--json", "-", code=1).stdout)["models"][0]
        self.assertEqual((model["runs"][0]["result"], model["runs"][0]["loss"]), ("vacuous", ["NaN"]))
        self.assertEqual(model["baseline"]["loss"], ["NaN"])

    def test_what_makes_no_sense_is_refused(self):
        self.refused("check", "mixtral-demo", *UPDATE, says="no bias by which they choose")
        self.refused("train", "llama-demo", *UPDATE, says="no bias by which they choose")
        for command, loss, value in (("check", "--balance", "batch"), ("train", "--router-z-loss", "0.1")):
            self.refused(command, MODEL, loss, value, says=f"{MODEL}: has routers of DeepSeek's form (sigmoids, ")
        for value in ("-1", "nan", "inf", "x"):
            self.refused("check", MODEL, "--router-bias-update", value, says="--router-bias-update")

    def test_a_fault_that_no_layout_of_the_model_has_is_refused(self):
        for model, fault, says in ((MODEL, "router_bias_own_counts", "give a model of sigmoids and router-bias-update"),
                                   ("mixtral-demo", "balance_detached", "give balance"),
                                   ("llama-demo", "router_weights_detached", "mistake of experts, which this model has not")):
            self.refused("check", model, "--tp", "2", "--inject", fault, says=[f"fault {fault} ", says])
        for fault in ("experts_not_reduced", "experts_dx_not_reduced", "router_grad_local"):
            self.refused("check", MODEL, "--tp", "2", "--sp", "--etp", "1", "--inject", fault, says="not etp 1")
        for model, fault, more in ((MODEL, "dp_broadcast_over_world", ("--dp", "2", "--ep", "2")),
                                   ("mixtral-demo", "router_z_loss_of_micro_batch", ("--tp", "2", "--router-z-loss", "0.1"))):
            self.refused("check", model, *more, "--inject", fault, says=f"fault {fault} acts ")
        all_chosen = self.put("config.json", {"model_type": "mixtral", "vocab_size": 64, "hidden_size": 16,
                              "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
                              "num_key_value_heads": 4, "num_local_experts": 2, "max_position_embeddings": 64,
                              "sliding_window": None})
        self.refused("check", all_chosen, "--balance", "batch", "--inject", "balance_detached",
                     says="this model's go to all")


if __name__ == "__main__":
    unittest.main()
