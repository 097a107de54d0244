#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `anyrank train` from outside: one hash under every layout, interrupted or not; JSON, plot, every bad input.
"""

import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, LIMIT_S, ROOT, Case, convert, run, start  # noqa: E402

# Where the tests run in the background, Ctrl-C is ignored, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Small, and with heads for two tensor-parallel ranks.
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": True}
SIZE = ["--batch", "4", "--seq", "8"]
# All that a trajectory depends on besides the data, so that nothing of it may be lost on the way.
STEP = [*SIZE, "--steps", "12", "--dropout", "0.1", "--warmup", "3", "--lr-schedule", "cosine", "--clip", "0.5",
        "--decay", "matrices", "--seed", "5"]
LAYOUTS = [[], ["--tp", "2", "--sp"], ["--dp", "2", "--zero", "1", "--bucket-bytes", "4096"],
           ["--dp", "3", "--micro-batches", "2"], ["--dp", "2", "--tp", "2", "--bucket-mode", "eager"],
           ["--cp", "4", "--cp-inner", "2", "--zigzag", "--zero", "1"]]


class TrainTest(Case):
    subcommand = ("train",)

    def setUp(self):
        super().setUp()
        self.model = self.config()

    def config(self, name="model", **changes):
        return self.put(f"{name}/config.json", {**LLAMA, **changes}).parent

    def trained(self, *arguments, **options):
        """The JSON of a run."""
        return json.loads(self.done(*arguments, "--json", "-", **options).stdout)



class Trajectories(TrainTest):

    def test_copies_stay_equal_in_native_numerics_beside_parts_of_unlike_sizes(self):
        # 97 rows over 4 ranks: 25 on the first, 24 on the others; each KV head is on two ranks, each norm on all.
        model = self.config("odd", vocab_size=97, num_attention_heads=4, tie_word_embeddings=False)
        data = self.folder / "tokens"
        data.write_bytes(bytes(i * i * 7 % 97 for i in range(400)))
        for layout in (["--dp", 3], ["--dp", 5, "--sp"], ["--dp", 3, "--zero", 1], ["--dp", 3, "--bucket-bytes", 6000]):
            run = self.trained(model, "--data", data, "--data-format", "bytes", "--tp", 4, *layout, "--batch", 5, "--seq",
                               8, "--steps", 2, "--numerics", "native", "--verify-every", 1)
            self.assertEqual(run["bytes"]["counted"], run["bytes"]["predicted"])

    def test_the_data_the_seed_and_the_step_decide_the_weights(self):
        other = self.folder / "other.txt"
        other.write_bytes(bytes(range(256)) * 4)
        hashes = [self.trained(self.model, *SIZE, "--steps", 2, *more)["weights_hash"]
                  for more in ([], ["--seed", 1], ["--data", other], ["--in-order"], ["--lr", "0.01"],
                               ["--weight-decay", "0.5"], ["--optimizer", "sgd"], ["--clip", "0.01"])]
        self.assertEqual(len(set(hashes)), len(hashes))

    def test_packed_documents_end_in_one_hash(self):
        packed = [*SIZE, "--steps", 2, "--pack", "--separator", 10]
        run = self.trained(self.model, *packed)
        self.assertEqual((run["data"]["packed"], run["data"]["separator"]), (True, 10))
        self.assertEqual(self.trained(self.model, *packed, *LAYOUTS[1])["weights_hash"], run["weights_hash"])
        self.assertNotEqual(self.trained(self.model, *SIZE, "--steps", 2)["weights_hash"], run["weights_hash"])
        save = self.folder / "run"
        self.trained(self.model, *packed, "--stop-after", 1, "--save", save)
        self.assertEqual(self.trained("--resume", save)["weights_hash"], run["weights_hash"])
        self.refused("--resume", save, "--separator", 9, says="separator 9, the run has it packed, with separator 10")
        self.refused(self.model, "--pack", says="which token ends a document")
        self.refused(self.model, "--separator", 10, says="--pack")
        self.refused(self.model, "--pack", "--separator", 100000, says="token 100000")
        self.refused(self.model, "--pack", "--separator", 10 ** 19, says="expected an integer from 0 to 9e+18")

    def test_a_run_that_is_stopped_goes_on_under_another_layout(self):
        whole = self.trained(self.model, *STEP)
        save = self.folder / "run"
        part = self.trained(self.model, *STEP, *LAYOUTS[1], "--stop-after", 5, "--save", save)
        self.assertEqual((part["result"], part["steps"], part["steps_in_all"]), ("stopped", 5, 12))
        middle = self.trained("--resume", save, *LAYOUTS[5], "--stop-after", 7, "--save", save)
        self.assertEqual((middle["first_step"], middle["steps"]), (6, 7))
        last = self.trained("--resume", save, *LAYOUTS[4])
        self.assertEqual((last["result"], last["first_step"], last["steps"]), ("done", 8, 12))
        self.assertEqual(last["weights_hash"], whole["weights_hash"])
        self.assertEqual(last["loss"], whole["loss"])
        self.assertEqual(last["bytes"]["counted"], last["bytes"]["predicted"])
        self.assertEqual(last["lr"], whole["lr"][7:])

    def test_experts_go_on_under_another_layout(self):
        model = self.config("experts", model_type="qwen2_moe", num_hidden_layers=2, num_experts=3, num_experts_per_tok=2,
                            moe_intermediate_size=8, shared_expert_intermediate_size=12, norm_topk_prob=True,
                            mlp_only_layers=[1])
        save, step = self.folder / "run", [*SIZE, "--steps", "6", "--clip", "0.5", "--seed", "5"]
        whole = self.trained(model, *step)
        parts = (["--tp", "2", "--sp", "--dp", "2", "--zero", "3", "--stop-after", "2"],
                 ["--cp", "2", "--tp", "2", "--zero", "1", "--stop-after", "4"], ["--pp", "2", "--micro-batches", "2"])
        for i, layout in enumerate(parts):
            last = self.trained(*([model, *step] if i == 0 else ["--resume", save]), *layout, "--save", save)
            self.assertEqual(last["bytes"]["counted"], last["bytes"]["predicted"])
        self.assertEqual((last["result"], last["weights_hash"], last["loss"]), ("done", whole["weights_hash"], whole["loss"]))

    def test_a_pipeline_goes_on_as_ranks_that_have_all_layers_and_back(self):
        model = self.config("deep", num_hidden_layers=8)
        save, step = self.folder / "run", [*STEP[:4], "--steps", "6", *STEP[6:]]
        whole = self.trained(model, *step)
        parts = (["--pp", "4", "--schedule-pp", "interleaved", "--micro-batches", "4", "--stop-after", "2"],
                 ["--dp", "3", "--tp", "2", "--zero", "1", "--stop-after", "4"],
                 ["--pp", "3", "--schedule-pp", "zero-bubble", "--stages", "2,5,1", "--dp", "2", "--zero", "1",
                  "--micro-batches", "2"])
        for i, layout in enumerate(parts):
            last = self.trained(*([model, *step] if i == 0 else ["--resume", save]), *layout, "--save", save)
            self.assertEqual(last["bytes"]["counted"], last["bytes"]["predicted"])
        self.assertEqual((last["result"], last["steps"], last["weights_hash"]), ("done", 6, whole["weights_hash"]))
        self.assertEqual(last["loss"], whole["loss"])

    def test_a_checkpoint_with_a_tensor_of_no_stage_is_refused(self):
        untied = self.config("untied", num_hidden_layers=2, tie_word_embeddings=False)
        tied = self.config("tied", num_hidden_layers=2)
        self.done(untied, *SIZE, "--steps", 1, "--pp", 2, "--save", self.folder / "run")
        for layout in ([], ["--pp", "2"]):
            self.refused(tied, "--resume", self.folder / "run", "--steps", 2, *layout, says="'lm_head.weight'")

    def test_an_interrupt_ends_the_run_after_its_step_and_saves_it(self):
        for number, layout in zip((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), (LAYOUTS[1], LAYOUTS[0], [])):
            save, path = self.folder / number.name, self.folder / "run.json"
            child = subprocess.Popen([COMMAND, "train", self.model, *SIZE, "--steps", "100000", "--log-every", "1",
                                      *layout, "--save", save, "--json", path], stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, text=True,
                                     preexec_fn=lambda n=number: signal.signal(n, signal.SIG_DFL))  # not so under nohup
            lines = [child.stdout.readline() for _ in range(10)]  # the head, and some steps
            child.send_signal(number)
            out, err = child.communicate(timeout=LIMIT_S)
            self.assertEqual(child.returncode, 128 + number, err)
            self.assertRegex(lines[-1], r"^ +\d+ +\d")
            stopped = int(re.search(r"^stopped after step (\d+) of 100000; .*--resume", out, re.MULTILINE)[1])
            self.assertEqual(os.readlink(save / "latest"), f"step-{stopped:08}")
            self.assertEqual(len(json.loads(path.read_text(encoding="utf-8"))["loss"]), stopped)
            hashes = [out.splitlines()[-1].split()[4],
                      self.trained("--resume", save, "--steps", stopped)["weights_hash"] + ",",
                      self.trained(self.model, *SIZE, "--steps", stopped)["weights_hash"] + ","]
            self.assertEqual(len(set(hashes)), 1, hashes)

    def interrupted_twice(self):
        child = subprocess.Popen([COMMAND, "train", "llama-demo", "--batch", "512", "--micro-batches", "512"],
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(child.stdout.close)
        next(line for line in child.stdout if "tokens/s" in line)  # the head, after which the first step begins
        # A step takes longer than this test. Two signals at once are one, so they are sent until they were two.
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.05)
        return child.returncode

    def test_a_second_interrupt_ends_the_process_at_once(self):
        # Where the first signal comes before the step has begun there is nothing to wait for, and no second one.
        self.assertIn(-signal.SIGINT, [self.interrupted_twice() for _ in range(3)])

    def test_a_run_goes_on_from_another_folder(self):
        (self.folder / "book.txt").write_bytes(bytes(range(256)) * 4)
        whole = self.trained("model", *SIZE, "--steps", 3, "--data", "book.txt")
        self.trained("model", *SIZE, "--steps", 3, "--data", "book.txt", "--stop-after", 1, "--save", "run")
        again = self.trained("--resume", self.folder / "run", cwd=ROOT)
        self.assertEqual(again["weights_hash"], whole["weights_hash"])

    def test_a_checkpoint_is_a_model(self):
        save = self.folder / "run"
        first = self.trained(self.model, *STEP, "--save", save, "--save-every", 5, "--keep", 2)
        self.assertEqual(sorted(os.listdir(save))[:3], ["latest", "step-00000010", "step-00000012"])
        self.assertEqual(first["checkpoint"], str(save / "step-00000012"))
        again = self.trained(save / "latest", *SIZE, "--steps", 1)
        self.assertEqual(again["weights"], "folder")
        self.assertLess(again["loss"][0], first["loss"][0])

    def test_what_changes_the_weights_after_a_checkpoint_is_told(self):
        save = self.folder / "run"
        self.trained(self.model, *STEP, "--stop-after", 5, "--save", save)
        for change, name in ((["--lr", "0.01"], "lr"), (["--clip", "1"], "clip"), (["--dropout", "0"], "dropout"),
                             (["--steps", "20"], "steps"), (["--numerics", "native"], "numerics")):
            with self.subTest(change=change):
                note = self.trained("--resume", save, *change)["note"]
                self.assertIn(f"another {name}", note)
                self.assertIn("from step 6 on", note)
        self.assertIsNone(self.trained("--resume", save, "--batch", 4, "--lr-schedule", "cosine")["note"])

    def test_another_optimizer_needs_the_state_that_the_checkpoint_has(self):
        adam, plain = self.folder / "adam", self.folder / "plain"
        start = [self.model, *SIZE, "--steps", 4, "--stop-after", 1, "--save"]
        self.trained(*start, adam)
        self.trained(*start, plain, "--optimizer", "sgd")
        for arguments, says in (([adam, "--optimizer", "sgd", "--momentum", "0.9"], "'momentum_buffer'"),
                                ([plain, "--momentum", "0.9"], "'momentum_buffer'"),
                                ([plain, "--optimizer", "adam"], "'exp_avg'"),
                                ([adam, "--numerics", "native", "--storage", "bf16"], "'master'")):
            self.refused("--resume", *arguments, says=says)
        self.assertIn("optimizer", self.trained("--resume", adam, "--optimizer", "sgd")["note"])
        self.assertIn("optimizer", self.trained("--resume", adam, "--optimizer", "adam")["note"])

    def test_a_run_in_16_bits_goes_on_in_exact_numerics(self):
        save = self.folder / "run"
        self.trained(self.model, *SIZE, "--steps", 4, "--stop-after", 2, "--save", save, "--numerics", "native",
                     "--precision", "bf16", "--loss-scale", "dynamic")
        exact = ["--resume", save, "--numerics", "exact"]
        # Each line says which option is left of the run's own, and what to give.
        self.refused(*exact, says="or --loss-scale none")
        exact += ["--loss-scale", "none"]
        narrow = self.trained(*exact)
        self.assertEqual(self.trained(*exact, "--dp", 2, "--zero", 1)["weights_hash"], narrow["weights_hash"])
        exact += ["--precision", "f32"]
        whole = self.trained(*exact)
        for changed in ("numerics", "precision", "storage", "loss-scale"):
            self.assertIn(changed, whole["note"])
        self.assertEqual(self.trained(*exact, "--tp", 2, "--sp", "--overlap", 3)["weights_hash"], whole["weights_hash"])

    def test_other_data_sizes_and_seeds_do_not_go_on(self):
        save, other = self.folder / "run", self.folder / "other.txt"
        other.write_bytes(bytes(range(256)) * 4)
        self.trained(self.model, *STEP, "--stop-after", 5, "--save", save)
        for change, says in ((["--batch", "8"], "batch of 8"), (["--seq", "16"], "16 tokens"), (["--seed", "6"], "seed 6"),
                             (["--data", other], "other data"), (["--in-order"], "in order"),
                             (["--pack", "--separator", "10"], "packed, with separator 10, the run has it not packed"),
                             (["--steps", "4"], "has 5 behind it")):
            with self.subTest(change=change):
                self.refused("--resume", save, *change, says=says)


class Output(TrainTest):
    def test_the_last_line_is_the_hash_of_the_weights(self):
        done = self.done(self.model, *SIZE, "--steps", 3)
        losses = re.findall(r"^ +(\d+) +([\d.]+) ", done.stdout, re.MULTILINE)
        self.assertEqual([int(step) for step, _ in losses], [1, 2, 3])
        self.assertRegex(done.stdout.splitlines()[-1],
                         r"^weights after step 3: [0-9a-f]{64}, the same for every layout$")
        self.assertEqual(done.stderr, "")
        native = self.done(self.model, *SIZE, "--steps", 3, "--numerics", "native", "--storage", "bf16")
        self.assertTrue(native.stdout.endswith(", for this layout only (native numerics)\n"))

    def test_many_steps_have_few_lines(self):
        for steps, more, lines in ((20, [], 20), (100, [], 21), (100, ["--log-every", "50"], 3)):
            done = self.done(self.model, *SIZE, "--steps", steps, *more)
            self.assertEqual(len(re.findall(r"^ +\d+ +\d", done.stdout, re.MULTILINE)), lines)

    def test_quiet_prints_nothing_and_json_everything(self):
        path = self.folder / "result.json"
        done = self.done(self.model, *SIZE, "--steps", 2, "--quiet", "--json", path)
        self.assertEqual((done.stdout, done.stderr), ("", ""))
        result = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual((result["tool"], result["command"], result["result"]), ("anyrank", "train", "done"))
        self.assertEqual((len(result["loss"]), len(result["lr"]), len(result["gradient_norms"])), (2, 2, 2))
        self.assertEqual((result["parameters"], result["data"]["tokens"]), (6320, 31432))
        self.assertEqual(result["data"]["windows"], 31432 // 8)
        self.assertGreater(result["tokens_per_second"], 0)
        for key in ("checkpoint", "note", "message"):
            self.assertIsNone(result[key])

    def test_a_mistake_that_parts_the_copies_is_exit_status_1(self):
        done = self.done(self.model, *SIZE, "--steps", 2, "--dp", 2, "--inject", "dp_group_missing", "--json",
                         self.folder / "x.json", code=1)
        self.assertIn("differ", done.stderr)
        self.assertEqual(json.loads((self.folder / "x.json").read_text(encoding="utf-8"))["result"], "different")

    def test_the_copies_of_a_tied_table_on_two_stages_are_compared(self):
        model = self.config("two", num_hidden_layers=2)
        done = self.done(model, *SIZE, "--steps", 2, "--pp", 2, "--inject", "pp_tied_not_summed", code=1)
        self.assertIn("model.embed_tokens.weight: the copies of ranks 0 and 1 differ", done.stderr)
        self.assertIn("\n  rank 1 (pp 1, dp 0, tp 0; stage 1, layers 1)\n", done.stderr)

    def test_bytes_that_are_not_the_predicted_ones_are_exit_status_1(self):
        done = self.done(self.model, *SIZE, "--steps", 2, "--tp", 2, "--sp", "--inject", "loss_parallel_no_max", "--json",
                         self.folder / "x.json", code=1)
        self.assertRegex(done.stderr, r"\d+ bytes were moved between ranks, the layout predicts \d+: a collective is miss")
        self.assertIn("NOT what the layout predicts", done.stdout)
        self.assertEqual(json.loads((self.folder / "x.json").read_text(encoding="utf-8"))["result"], "different")

    def test_ranks_that_call_different_collectives_are_exit_status_1(self):
        done = self.done(self.model, *SIZE, "--steps", 2, "--dp", 2, "--tp", 2, "--sp", "--inject",
                         "collective_order_swapped", code=1)
        self.assertIn("disagree in collective", done.stderr)

    def test_a_resumed_run_bears_the_name_of_its_model(self):
        save, path = self.folder / "run", self.folder / "run.json"
        self.done(self.model, *SIZE, "--steps", 3, "--stop-after", 2, "--save", save)
        done = self.done("--resume", save, "--save", save, "--json", path)
        self.assertTrue(done.stdout.startswith("model: "), done.stdout)
        result = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual((result["model"], result["first_step"], len(result["loss"])), ("model", 3, 3))
        again = self.done("--resume", save)
        self.assertTrue(again.stdout.startswith("model: "), again.stdout)
        self.assertIn("no step was taken: the checkpoint has all of them behind it", again.stdout)

    def test_many_steps_need_no_memory_before_they_are_taken(self):
        with open(os.devnull, "wb") as nowhere:
            child = subprocess.Popen([COMMAND, "train", self.model, *SIZE, "--steps", "1000000000", "--stop-after", "1"],
                                     stdout=nowhere, stderr=nowhere, stdin=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(child.returncode, 0)
        self.assertLess(used.ru_maxrss, 2_000_000, "kB")


class BadInput(TrainTest):
    def test_what_is_verified_ends_the_run_before_a_weight_changes(self):
        step = [self.model, *SIZE, "--steps", 5, "--dp", 2, "--tp", 2, "--sp"]
        fine = self.trained(*step, "--verify-every", 2)
        self.assertEqual((fine["result"], fine["verified_steps"], fine["warning"]), ("done", 2, None))
        self.assertEqual(fine["bytes"]["counted"], fine["bytes"]["predicted"])
        self.assertEqual(fine["weights_hash"], self.trained(*step)["weights_hash"])
        done = self.done(*step, "--json", "-", "--verify-every", 2, "--inject", "adam_step_not_synced", code=1)
        self.assertRegex(done.stderr, r"step \d: [\w.]+: .* differs from that of rank 0 .*; no weight was changed")
        wrong = json.loads(done.stdout)
        self.assertEqual((wrong["result"], wrong["weights_hash"]), ("wrong", None))
        # Without clipping nothing else looks at a gradient's norm.
        self.done(self.model, *SIZE, "--steps", 3, "--verify-every", 1, "--clip", 0, "--zero", 1, "--dp", 3)

    def test_options_that_make_no_sense(self):
        for arguments, says in (
                ([], "give a MODEL"), ([self.model, "--keep", 2], "give --save DIR too"),
                ([self.model, "--save-every", 2], "give --save DIR too"),
                ([self.model, "--data-format", "u16"], "give --data FILE too"),
                ([self.model, "--dropout", 1], "drops everything"), ([self.model, "--steps", 0], "--steps"),
                ([self.model, "--storage", "bf16"], "--numerics native"),
                ([self.model, "--loss-scale", "0"], "--loss-scale"), ([self.model, "--trace", "-"], "--trace -"),
                ([self.model, "--trace", "x", "--json", "x"], "one would replace the other"),
                ([self.model, "--seed", "9223372036854775808"], "--seed"),
                ([self.model, "--tp", 3], "3"), ([self.model, "--seq", 65], "64 positions"),
                ([self.model, "--zero", 1], "--dp N"), ([self.model, "--inject", "no_such"], "no_such"),
                ([self.model, "--batch", 1000000000, "--seq", 64], "GB of memory"),
                (["no-such-model"], "no-such-model")):
            with self.subTest(arguments=arguments):
                self.refused(*arguments, says=says)

    def test_data_that_cannot_be_trained_on(self):
        narrow = self.config("narrow", vocab_size=128)
        empty, short, ids = self.folder / "empty", self.folder / "short", self.folder / "ids.u16"
        empty.write_bytes(b"")
        short.write_bytes(b"seven..")
        ids.write_bytes(struct.pack("<64H", *[1] * 40, 256, *[1] * 23))
        for model, data, says in ((self.model, empty, "empty"), (self.model, short, "has 7 tokens"),
                                  (narrow, ROOT / "ref/data/text.txt", "vocabulary"), (self.model, ids, "256"),
                                  (self.model, self.folder / "none", "none"), (self.model, self.folder, str(self.folder))):
            with self.subTest(data=data):
                self.refused(model, "--data", data, *SIZE, says=says)

    def test_folders_that_cannot_be_written(self):
        file = self.folder / "file"
        file.write_text("mine", encoding="utf-8")
        for option in ("--save", "--trace", "--json"):
            for path in (file / "below", "/proc/nothing"):
                with self.subTest(option=option, path=path):
                    self.refused(self.model, *SIZE, "--steps", 1, option, path, says=str(path))
        self.assertEqual(file.read_text(encoding="utf-8"), "mine")

    def test_a_run_that_goes_on_in_another_folder_is_there_too(self):
        save, other = self.folder / "run", self.folder / "other"
        first = self.trained(self.model, *STEP, "--stop-after", 2, "--save", save)
        again = self.trained("--resume", save, "--stop-after", 2, "--save", other)
        self.assertEqual(again["weights_hash"], first["weights_hash"])
        self.assertEqual(os.readlink(other / "latest"), "step-00000002")
        self.assertIsNone(self.trained("--resume", save, "--stop-after", 2, "--save", save)["checkpoint"])
        self.assertEqual(convert(save, "--tp", 2, "--out", self.folder / "split").returncode, 0)
        self.refused("--resume", self.folder / "split", says="split: is split among ranks; python3 -m anyrank.convert merges it")

    def test_what_is_in_the_way_of_checkpoints_is_told_before_the_first_step(self):
        for name, make in (("latest", lambda path: path.symlink_to("/etc/hosts")),
                           ("latest", lambda path: path.symlink_to("latest")),
                           ("latest", lambda path: path.mkdir()),
                           (".anyrank-new", lambda path: (path / "mine").mkdir(parents=True)),
                           (".anyrank-new", lambda path: path.symlink_to("elsewhere"))):
            save = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
            make(save / name)
            with self.subTest(name=name, path=save):
                self.refused(self.model, *SIZE, "--steps", 1, "--save", save, says=f"{save / name}: is ")

    def test_a_group_without_parameters_is_refused(self):
        for glob in ("[", "no_such_layer", "norm"):
            self.refused(self.model, *SIZE, "--steps", 1, "--group", f"{glob}:lr=2",
                         says=f"parameter group '{glob}' matches no parameter of model")

    def test_training_that_diverges_says_so_and_keeps_what_was_saved(self):
        save, path = self.folder / "run", self.folder / "x.json"
        done = self.done(self.model, *SIZE, "--steps", 50, "--lr", "1e5", "--clip", 0, "--optimizer", "sgd", "--save",
                         save, "--save-every", 1, "--json", path, code=2)
        self.assertIn("diverged", done.stderr)
        result = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual((result["result"], result["weights_hash"]), ("diverged", None))
        self.assertEqual(os.readlink(save / "latest"), f"step-{result['steps']:08}")
        self.assertEqual(len(result["loss"]), result["steps"])

    def test_a_full_disk_leaves_the_last_whole_checkpoint(self):
        """A file size limit stands for the full disk: the write fails in the middle."""
        save = self.folder / "run"
        line = 'ulimit -f 8; exec "$0" "$@"'
        done = start(["sh", "-c", line, COMMAND, "train", self.model, *SIZE, "--steps", "2", "--save", save])
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("step 2 was not saved", done.stderr)
        self.assertIn("weights after step 2", done.stdout)
        self.assertEqual([name for name in os.listdir(save) if name.startswith("step")], [])

    def test_a_trace_that_cannot_be_written_hides_nothing_else(self):
        path = self.folder / "x.json"
        done = self.done(self.model, *SIZE, "--steps", 1, "--trace", "/dev/full", "--json", path, code=2)
        self.assertIn("/dev/full: cannot write: No space left on device", done.stderr)
        self.assertIn("weights after step 1", done.stdout)
        self.assertEqual(json.loads(path.read_text(encoding="utf-8"))["result"], "done")


if __name__ == "__main__":
    unittest.main()
