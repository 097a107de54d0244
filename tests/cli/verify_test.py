#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of verify from outside: verdicts, tables, JSON, exit codes, and bad input.
"""

import json
import math
import pathlib
import random
import re
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import GOLDEN, Case, run  # noqa: E402

CODES = {"F32": "f", "F64": "d", "I64": "q", "U8": "B", "BOOL": "?", "C64": "f", "BF16": "H"}


def write(path, given, metadata=None):
    """given: name -> (dtype, shape, values)."""
    return tensor_files.write(path, {name: (dtype, shape, struct.pack(f"<{len(values)}{CODES[dtype]}", *values))
                                     for name, (dtype, shape, values) in given.items()}, metadata)


def weight(name, values, shape=None):
    return {name: ("F32", shape or [len(values)], values)}


class Verify(Case):
    subcommand = ("verify",)

    def pair(self, reference, other):
        return (write(self.folder / "reference.safetensors", reference),
                write(self.folder / "other.safetensors", other))

    def result(self, *arguments):
        done = self.ran(*arguments, "--json", "-")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout), done.returncode



class Verdict(Verify):
    def test_the_same_is_one_line(self):
        a, b = self.pair(weight("x", [1.0, 2.0]), weight("x", [1.0, 2.0]))
        done = self.ran(a, b)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, "verify: the same bits: 1 tensor, 2 elements\n")
        self.assertEqual(self.ran(a, a).returncode, 0)

    def test_a_difference_is_told_first_tensor_first_and_key_fact_last(self):
        tensors = {**weight("model.layers.0.w", [1.0] * 6, [2, 3]), **weight("model.layers.1.w", [1.0, 2.0])}
        changed = {**weight("model.layers.0.w", [1.0] * 5 + [1.5], [2, 3]), **weight("model.layers.1.w", [1.0, 8.0])}
        done = self.ran(*self.pair(tensors, changed))
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0][:34], "model.layers.0.w: off by 20.4 % of")
        self.assertIn("different: 2 of 2 tensors", lines)
        row = next(line for line in lines if line.startswith("  model.layers.0.w"))
        for cell in ("F32 [2,3]", "1 of 6", "5.00e-01", "4,194,304", "[1,2]"):
            self.assertIn(cell, row)
        self.assertIn("first in execution order: model.layers.0.w", lines)
        self.assertTrue(lines[-1].startswith("verify: DIFFERENT: 2 of 2 tensors not the same in every bit; first "
                                             "model.layers.0.w: max|d| 5.00e-01 at [1,2]"), lines[-1])
        self.assertNotIn("\033", done.stdout)

    def test_dumps_of_different_things_are_told_in_a_few_lines(self):
        names = [{k: v for i in range(40) for k, v in weight(f"{side}.{i}", [1.0]).items()} for side in "ab"]
        text = self.ran(*self.pair(*names)).stdout
        self.assertIn("note: no name stands in both; a file for --map says which", text.split("MISSING")[0])
        self.assertEqual((text.count("MISSING"), text.count("UNEXPECTED")), (5, 5))
        text = self.ran(*self.pair(*names), "--max-report", 40).stdout
        self.assertEqual((text.count("MISSING"), text.count("UNEXPECTED")), (40, 40))

    def test_lost_gradients_are_in_the_first_line_and_the_last(self):
        both = {**weight("v:init", [1.0, 2.0]), **weight("w:init", [3.0, 4.0]), **weight("v:grad", [0.5, 0.1])}
        sides = self.pair({**both, **weight("w:grad", [0.5, 0.25]), **weight("w:new", [3.0, 4.0])}, both)
        report, code = self.result(*sides, "--common")
        self.assertEqual((code, report["result"], report["missing"], report["lost_gradients"]),
                         (1, "different", ["w:grad"], ["w:grad"]))
        self.assertEqual((report["first"]["tensor"], report["left_out"]), ("w:grad", [1, 0]))
        lines = self.ran(*sides, "--common").stdout.splitlines()
        told = next(line for line in lines if line.startswith("different: "))
        for line in (told, lines[-1]):
            self.assertIn("1 gradient in one dump only, of parameters that both have, such as w:grad", line)
        self.assertEqual(self.result(*sides, "--common", "--ignore", "w:grad")[1], 0)

    def test_what_an_allowance_cannot_judge_is_no_green_answer(self):
        sides = self.pair(weight("x:fwd", [1.0, 2.0]), weight("x:fwd", [1.0, 2.1]))
        for allowed, code in ((0.5, 1), (0.2, 0)):
            path = write(self.folder / "allowed.safetensors", {"x:fwd": ("F64", [], [allowed])},
                         {"anyrank.allows": "f32"})
            report, status = self.result(*sides, "--sensitivity", path)
            self.assertEqual((status, report["unjudged"], report["result"]),
                             (1, ["x:fwd"], "unjudged") if code else (0, [], "same"))
        write(path, {"x:fwd": ("F64", [], [0.5])}, {"anyrank.allows": "f32"})
        lines = self.ran(*sides, "--sensitivity", path).stdout.splitlines()
        self.assertTrue(lines[0].startswith("verify: cannot judge: 1 of 1 tensors, the first x:fwd, may differ"), lines)
        self.assertTrue(lines[-1].startswith("verify: CANNOT JUDGE all; the same within"), lines)

    def test_two_dead_models_prove_nothing(self):
        zeros = {**weight("v.weight:grad", [0.0] * 300), **weight("w.weight:grad", [0.0, -0.0])}
        self.assertIn("proves nothing: all 2 gradients are zero in both", self.done(*self.pair(zeros, zeros), code=2).stderr)
        frozen = {**zeros, **weight("x.weight:grad", [0.0, 1.0])}
        self.assertEqual(self.result(*self.pair(frozen, frozen))[1], 0)
        self.assertEqual(self.result(*self.pair(zeros, zeros), "--only", "v.*")[1], 0)

    def test_gradients_without_a_number_prove_nothing(self):
        none = weight("v.weight:grad", [math.nan] * 300)
        for name, dead in (("all NaN", [math.nan, math.nan]), ("infinite", [math.inf, -math.inf]),
                           ("rows that no token reached", [0.0, math.nan]), ("zero beside NaN", [0.0, 0.0])):
            with self.subTest(name):
                sides = self.pair({**none, **weight("w.weight:grad", dead)}, {**none, **weight("w.weight:grad", dead)})
                for chosen in ((), ("--only", "v.*"), ("--rtol", "1e-3")):
                    self.assertIn("proves nothing: NaN, infinities and zeros are all that",
                                  self.done(*sides, *chosen, code=2).stderr)
        alive = {**none, **weight("w.weight:grad", [0.0] * 299 + [1e-30])}
        self.assertEqual(self.result(*self.pair(alive, alive))[1], 0)
        new = weight("v.weight:new", [math.nan])
        self.assertEqual(self.result(*self.pair(new, new))[1], 0)
        self.assertEqual(self.ran(*self.pair(none, alive)).returncode, 1)

    def test_gradients_that_are_no_fp32_are_not_refused(self):
        path = tensor_files.write(self.folder / "complex.safetensors",
                                  {name: ("C64", [2], bytes(16)) for name in ("v.weight:grad", "w.weight:grad")})
        self.assertEqual(self.result(path, path)[1], 0)

    def test_a_complex_weight_beside_others_is_compared(self):
        def tensors(moved):
            z = {f"z:{kind}": ("C64", [2], [1.0, 2.0, 3.0, 4.0]) for kind in ("init", "grad", "new")}
            return {**z, **weight("w:init", [1.0, 2.0]), **weight("w:grad", [0.5, 0.1]), **weight("w:new", [0.5, moved])}
        report, code = self.result(*self.pair(tensors(1.5), tensors(1.6)), "--rtol", "1e-6")
        self.assertEqual((code, report["tensors_different"]), (1, 1))

    def test_steps_of_bf16_that_a_rule_does_not_allow_are_rounding(self):
        (self.folder / "two").mkdir()
        values = [0x3F80 + 37 * i for i in range(8)]
        one = write(self.folder / "one.safetensors", {"w:grad": ("BF16", [8], values)})
        for rank in range(2):
            write(self.folder / f"two/rank-0000{rank}.safetensors",
                  {"w:grad": ("BF16", [8], [x + (i % 2) for i, x in enumerate(values)])})
        self.assertEqual(self.result(one, self.folder / "two", "--rtol", "1e-4")[0]["first"]["cause"], "rounding")

    def test_a_loss_that_is_no_number_proves_nothing(self):
        lost = {**weight("loss:fwd", [math.inf], []), **weight("loss:fwd@2", [math.nan], [])}
        self.assertIn("NaN or infinite in every step", self.done(*self.pair(lost, lost), code=2).stderr)
        later = {**lost, **weight("loss:fwd", [2.0], [])}
        self.assertEqual(self.result(*self.pair(later, later))[1], 0)

    def test_a_loss_of_equal_logits_proves_nothing(self):
        loss = {**weight("loss:fwd", [math.log(8)], []), **weight("loss:fwd@2", [math.log(8)], []),
                **weight("lm_head:fwd", [0.5] * 16, [2, 8])}
        self.assertIn("ln 8 in each of 2 steps", self.done(*self.pair(loss, loss), code=2).stderr)
        for other in (weight("loss:fwd@2", [2.0], []), weight("lm_head:fwd", [0.5] * 18, [2, 9])):
            alive = {**loss, **other}
            self.assertEqual(self.result(*self.pair(alive, alive))[1], 0)

    def test_steps_that_repeat_the_first_prove_nothing(self):
        first = {**weight("a:fwd", [1.0, 2.0]), **weight("b:fwd", [3.0, 4.0]), **weight("w.weight:grad", [5.0, 6.0])}
        again = {**first, **weight("a:fwd@2", [1.0, 2.0]), **weight("b:fwd@2", [3.0, 4.0])}
        self.assertIn("all 2 activations of later steps", self.done(*self.pair(again, again), code=2).stderr)
        moved = {**again, **weight("b:fwd@2", [3.0, 4.5])}
        forward = {name: tensor for name, tensor in again.items() if not name.endswith(":grad")}
        for alive in (first, moved, forward):
            self.assertEqual(self.result(*self.pair(alive, alive))[1], 0)

    def test_rounding_names_the_option_that_allows_it(self):
        values = [math.sin(i) for i in range(64)]
        a, b = self.pair(weight("x", values), weight("x", [v * (1 + 1.5e-7) for v in values]))
        done = self.done(a, b, code=1)
        option = done.stdout.splitlines()[-1].split("leaves: ")[1].split(" allows")[0].split()
        self.assertEqual(self.ran(a, b, *option).returncode, 0, option)
        large, other = self.pair(weight("x", values), weight("x", [v * 1.5 for v in values]))
        self.assertNotIn("rounding in another order", self.ran(large, other).stdout.splitlines()[-1])

    def test_rounding_of_many_ulps_is_allowed_by_its_atol(self):
        values = [1000.0] + [i * 1e-4 for i in range(64)]
        a, b = self.pair(weight("x", values), weight("x", [v + 1e-5 for v in values]))
        done = self.ran(a, b)
        option = done.stdout.splitlines()[-1].split("leaves: ")[1].split(" allows")[0].split()
        self.assertEqual(option[0], "--atol")
        self.assertEqual(self.ran(a, b, *option).returncode, 0, option)

    def test_what_only_later_steps_differ_in_after_adam_is_noted(self):
        step = {**weight("w:grad", [1.0]), **weight("w:new", [0.5]), **weight("y:fwd@2", [0.05])}
        moments = weight("w:v", [1e-3])
        for one, changed, noted in (({**step, **moments}, "y:fwd@2", True), (step, "y:fwd@2", False),
                                    ({**step, **moments}, "w:new", False)):
            a, b = self.pair(one, {**one, **weight(changed, [one[changed][2][0] + 1e-3])})
            for rule in (("--rtol", "1e-4", "--atol", "1e-5"), ()):
                with self.subTest(changed=changed, rule=rule):
                    found = "later ones begin with weights that Adam moved" in self.ran(a, b, *rule).stdout
                    self.assertEqual(found, noted and bool(rule))

    def test_a_step_in_doubt_is_of_no_certain_optimizer(self):
        """SGD at a rate that makes more of gradients that are right within the tolerance."""
        sides = [{**weight("w:init", [0.0, 0.0]), **weight("w:grad", [1.0, small]),
                  **weight("w:new", [-100.0, -100.0 * small])} for small in (1e-3, -1e-3)]
        text = self.done(*self.pair(*sides), "--rtol", "0", "--atol", "1e-2").stdout
        self.assertIn("note: 1 element of new weights or moments, or of outputs that these made, differs by no more than the "
                      "optimizer's step makes of the gradients' differences", text)

    def test_samples_padded_to_each_rank_s_own_length_are_left_out(self):
        """What is no sample's is compared: gradients, updates, the loss."""
        one = write(self.folder / "one.safetensors", {**weight("x:fwd", [1.0] * 8, [4, 2]), **weight("w:grad", [1.0])})
        for grad, code in ((1.0, 0), (2.0, 1)):
            for rank in range(2):
                box = {"global": [2 * rank, 0], "local": [0, 0], "extent": [2, 2 - rank]}
                placement = {"version": 1, "rank": rank, "world": 2,
                             "tensors": {"x:fwd": {"shape": [4, 2 - rank], "boxes": [box]}, "w:grad": {"replicas": 2, "replica": rank}}}
                (self.folder / "ranks").mkdir(exist_ok=True)
                write(self.folder / f"ranks/rank-{rank}.safetensors",
                      {**weight("x:fwd", [1.0] * (4 - 2 * rank), [2, 2 - rank]), **weight("w:grad", [grad])},
                      {"ANYRANK_PLACEMENT": json.dumps(placement)})
            text = self.done(one, self.folder / "ranks", code=code).stdout
            self.assertIn("note: not compared: 1 ", self.done(self.folder / "ranks", self.folder / "ranks").stdout)
            self.assertIn("note: not compared: 1 output and gradient that have no place in a full tensor, such as x:fwd, [4,2] "
                          "on rank 0, [4,1] on rank 1", text)

    def test_names_of_one_side_are_listed(self):
        a, b = self.pair({**weight("x", [1.0]), **weight("y", [1.0])}, {**weight("x", [1.0]), **weight("z", [1.0])})
        done = self.done(a, b, code=1)
        self.assertIn("  MISSING y F32 [1]\n", done.stdout)
        self.assertIn("  UNEXPECTED z F32 [1]\n", done.stdout)
        self.assertIn("1 missing, 1 unexpected", done.stdout.splitlines()[-1])

    def test_wrappers_in_names_are_seen_and_told(self):
        plain = {**weight("model.a.x", [1.0]), **weight("model.b.x:grad", [2.0]), **weight("loss", [3.0])}
        cases = (
            ({"module.model.a.x": 1, "module.model.b.x:grad": 2, "loss": 3}, 2, ["module."]),
            ({"a.x": 1, "b.x:grad": 2, "loss": 3}, 2, ["model."]),
            ({"model.module.model.a.x": 1, "model.module.model.b.x:grad": 2, "loss": 3}, 2, ["model.module."]),
            ({"model.a._checkpoint_wrapped_module.x": 1, "_orig_mod.model.b.x:grad": 2, "loss": 3}, 2,
             ["_checkpoint_wrapped_module.", "_orig_mod."]),
            ({"module._fsdp_wrapped_module.model.a.x": 1, "module.model.b.x:grad": 2, "loss": 3}, 2,
             ["_fsdp_wrapped_module.", "module."]))
        for names, count, wrappers in cases:
            a, b = self.pair(plain, {key: t for n, x in names.items() for key, t in weight(n, [float(x)]).items()})
            for one, two in ((a, b), (b, a)):
                result, code = self.result(one, two)
                self.assertEqual((code, result["tensors"], result["tensors_renamed"]), (0, 3, count), names)
                for wrapper in wrappers:
                    self.assertTrue(any(wrapper in side for side in result["wrappers"]), (names, result["wrappers"]))
                    self.assertIn(wrapper, self.ran(one, two).stdout)
        self.assertIn("note: 2 names are the same but for what wraps the model: ", self.ran(a, b).stdout)

    def test_adapters_of_other_names_are_one(self):
        sides = [{key: t for name in (f"q.lora_A.{adapter}.weight:grad", f"q.lora_B.{adapter}:fwd", "q.base_layer.weight")
                  for key, t in weight(name, [1.0]).items()} for adapter in ("default", "policy")]
        result, code = self.result(*self.pair(*sides))
        self.assertEqual((code, result["tensors"], result["tensors_renamed"]), (0, 3, 2))
        two = {**sides[0], **sides[1]}  # which of the two is which?
        result, code = self.result(*self.pair(two, two))
        self.assertEqual((code, result["tensors"], result["tensors_renamed"]), (0, 5, 0))

    def test_a_difference_behind_a_wrapper_has_the_reference_s_name(self):
        a, b = self.pair({**weight("a.x", [1.0]), **weight("a.y", [2.0]), **weight("a.z", [2.0])},
                         {**weight("module.a.x", [1.0]), **weight("module.a.y", [2.5]), **weight("module.a.u", [2.0])})
        result, code = self.result(a, b)
        self.assertEqual((code, result["first"]["tensor"], result["missing"]), (1, "a.y", ["a.z"]))
        self.assertEqual(result["unexpected"], ["module.a.u"])

    def test_no_two_names_become_one_and_modules_are_no_wrappers(self):
        for reference, other in (({"x": 1}, {"encoder.x": 1, "decoder.x": 1}),   # which of the two?
                                 ({"x": 1, "y": 2}, {"_a.x": 1, "_b.x": 1}),
                                 ({"head.x": 1, "y": 2}, {"head.x": 1, "head.y": 2})):  # head is there on both sides
            a, b = self.pair(*({k: t for n, x in side.items() for k, t in weight(n, [float(x)]).items()}
                               for side in (reference, other)))
            result, code = self.result(a, b)
            self.assertEqual((code, result["tensors_renamed"]), (1, 0), other)

    def test_a_flat_parameter_is_named_as_such(self):
        a, b = self.pair(weight("layers.0.w", [1.0, 2.0]), weight("layers.0._fsdp_wrapped_module._flat_param", [1.0, 2.0]))
        done = self.done(a, b, code=1)
        self.assertIn("layers.0._fsdp_wrapped_module._flat_param: FSDP1's flat parameter", " ".join(done.stdout.split()))
        for word in ("fully_shard", "summon_full_params"):
            self.assertIn(word, done.stdout)
        a, b = self.pair(weight("w", [1.0]), weight("my_flat_parameter", [1.0]))
        self.assertNotIn("FSDP1", self.ran(a, b).stdout)

    def test_copied_kv_heads_are_no_padded_vocabulary(self):
        head = [[float(16 * h + i + 1) for i in range(16)] for h in range(2)]
        each = [x for h in head for _ in range(2) for x in h]
        name = "model.layers.0.self_attn.k_proj.weight"
        a, b = self.pair(weight(name, head[0] + head[1], [8, 4]), weight(name, each, [16, 4]))
        told = self.result(a, b)[0]["explanation"]
        self.assertIn("every 4 of the reference's dimension 0 stand 2 times one after the other", told["hint"])
        self.assertIn("KV heads copied", told["hint"])
        for part in ('"blocks": [2], "unit": 4', '"copies": 2'):
            self.assertIn(part, told["hint"])
        a, b = self.pair(weight(name, head[0] + head[1], [8, 4]), weight(name, [7.5] * 64, [16, 4]))
        told = self.result(a, b)[0]["first"]
        self.assertNotIn("vocabulary", told["hint"])
        self.assertIn("2 times as many", told["hint"])
        rows = [float(i + 1) for i in range(20)]
        a, b = self.pair(weight("lm_head.weight", rows, [5, 4]), weight("lm_head.weight", rows + [0.0] * 12, [8, 4]))
        self.assertIn("a vocabulary of 5 padded to 8", self.result(a, b)[0]["first"]["hint"])

    def test_a_branch_without_a_backward_pass_is_named_where_its_gradients_lack(self):
        rest = weight("model.layers.0.self_attn.o_proj:bwd", [math.sin(i * i) for i in range(96)], [2, 4, 12])
        half = weight("model.layers.0.self_attn.o_proj:bwd", [math.cos(i * i * i) for i in range(96)], [2, 4, 12])
        lost = {**weight("model.layers.0.mlp:bwd", [1.0, 2.0]), **weight("model.layers.0.mlp.up_proj.weight:grad", [3.0])}
        first = self.result(*self.pair({**lost, **rest}, half))[0]["first"]
        self.assertEqual(first["cause"], "no_backward")
        self.assertIn("and modules no backward pass: model.layers.0.mlp", first["hint"])
        renamed = {**weight("mlp:bwd", [1.0, 2.0]), **half}  # another name, another program
        self.assertEqual(self.result(*self.pair({**lost, **rest}, renamed))[0]["first"]["cause"], "unknown")

    def test_a_missing_gradient_comes_before_what_follows_from_it(self):
        rest, lost = weight("b.weight:grad", [3.0, 4.0]), weight("a.weight:grad", [12.0])
        norm = lambda value: weight("grad_norm:clip", [value], [])
        a, b = self.pair({**rest, **lost, **norm(13.0)}, {**rest, **norm(5.0)})
        first = self.result(a, b)[0]["first"]
        self.assertEqual((first["tensor"], first["cause"]), ("a.weight:grad", "no_gradient"))
        self.assertEqual(self.ran(a, b).stdout[:14], "a.weight:grad:")
        other = write(self.folder / "renamed.safetensors", {**rest, **weight("c.weight:grad", [12.0]), **norm(5.0)})
        self.assertEqual(self.result(a, other)[0]["first"]["tensor"], "grad_norm:clip")

    def test_the_first_is_more_than_rounding_where_any_is(self):
        values = [math.sin(i) + 2.0 for i in range(256)]
        off = [x * (1.0 + 3e-7 * math.cos(i)) for i, x in enumerate(values)]
        first, last = "model.layers.0.mlp.down_proj:fwd", "model.layers.1.mlp.down_proj:fwd"
        given = {**weight(first, values, [2, 8, 16]), **weight(last, values, [2, 8, 16])}
        a, b = self.pair(given, {**weight(first, off, [2, 8, 16]), **weight(last, values[::-1], [2, 8, 16])})
        result = self.result(a, b)[0]
        self.assertEqual(result["first"]["tensor"], last)
        self.assertEqual(self.ran(a, b).stdout[:len(last)], last)
        c = write(self.folder / "rounding.safetensors", {**given, **weight(first, off, [2, 8, 16])})
        result = self.result(a, c)[0]
        self.assertEqual((result["first"]["tensor"], result["first"]["cause"]), (first, "rounding"))

    def test_positions_of_one_sample_stand_for_those_of_all(self):
        table, one = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], lambda values, n: weight("wpe:fwd", values * n, [n, 3, 2])
        a, b = self.pair(one(table, 1), one(table, 4))
        for pair in ((a, b), (b, a)):
            self.assertEqual(self.result(*pair)[0]["result"], "same")
        wrong = write(self.folder / "wrong.safetensors", one([1.0, 2.0, 3.0, 4.0, 5.0, 9.0], 4))
        first = self.result(a, wrong)[0]["first"]
        self.assertEqual((first["index"], first["elements_different"]), ([0, 2, 1], 4))
        # Samples that are not all alike have another shape, and so have weights.
        for other in (weight("wpe:fwd", table * 3 + table[::-1], [4, 3, 2]), weight("w", table * 4, [4, 3, 2])):
            pair = self.pair(weight(*other, table, [1, 3, 2]), other)
            self.assertIn("dimension 0 is 3 longer in the other", self.result(*pair)[0]["first"]["hint"])

    def test_copies_of_ranks_come_first(self):
        write(self.folder / "reference.safetensors", weight("w", [1.0, 2.0]))
        for rank, value in enumerate((2.0, 2.5)):
            write(self.folder / f"ranks/rank-0000{rank}.safetensors", weight("w", [1.0, value]))
        done = self.done("reference.safetensors", "ranks", code=1)
        self.assertIn("  COPIES w (other): rank 0 and rank 1 in 1 element, first at [1]: 2 and 2.5\n", done.stdout)
        result, _ = self.result("reference.safetensors", "ranks")
        self.assertEqual(result["worst"][0]["state"], "replicas")
        self.assertEqual(result["worst"][0]["ranks"], [0, 1])

    def test_the_rank_that_holds_the_first_difference_is_named(self):
        write(self.folder / "reference.safetensors", weight("w", [1.0, 2.0, 3.0, 4.0]))
        for rank, values in enumerate(([1.0, 2.0], [3.0, 5.0])):
            write(self.folder / f"ranks/rank-0000{rank}.safetensors", weight("w", values),
                  {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2 * rank]}}), "DCP_VERSION": "1.0"})
        done = self.ran("reference.safetensors", "ranks")
        self.assertIn("first element [3], of rank 1 of 2", done.stdout)

    def test_nan_on_both_sides_is_noted_and_can_be_a_difference(self):
        a, b = self.pair(weight("x", [math.nan, 1.0]), weight("x", [math.nan, 1.0]))
        done = self.done(a, b)
        self.assertIn("note: NaN in both, 1 element of 1 tensor that is the same, the first x", done.stdout)
        self.assertEqual(self.ran(a, b, "--no-equal-nan").returncode, 1)

    def test_max_report_bounds_tables_and_says_so(self):
        a, b = self.pair({f"t.{i}": ("F32", [1], [1.0]) for i in range(30)},
                         {f"t.{i}": ("F32", [1], [2.0]) for i in range(30)})
        done = self.ran(a, b)
        self.assertIn(".. and 10 more (--max-report 30 prints all)", done.stdout)
        self.assertNotIn(".. and", self.ran(a, b, "--max-report", "30").stdout)
        self.assertEqual(sum(line.startswith("  t.") for line in self.ran(a, b).stdout.splitlines()), 20)

    def test_quiet_is_quiet(self):
        a, b = self.pair(weight("x", [1.0]), weight("x", [2.0]))
        done = self.ran(a, b, "--quiet")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (1, "", ""))

    def test_names_cannot_command_the_terminal(self):
        a, b = self.pair(weight("x\033[31m", [1.0]), weight("x\033[31m", [2.0]))
        done = self.ran(a, b)
        self.assertNotIn("\033", done.stdout)


class Json(Verify):
    def test_fields(self):
        a, b = self.pair({**weight("x", [1.0, 4.0]), **weight("y", [1.0]), **weight("m", [1.0])},
                         {**weight("x", [1.0, 5.0]), **weight("y", [1.0]), **weight("u", [1.0])})
        result, code = self.result(a, b, "--rtol", "0.125")
        self.assertEqual(code, 1)
        self.assertEqual((result["tool"], result["command"], result["result"]), ("anyrank", "verify", "different"))
        self.assertEqual((result["tensors"], result["tensors_different"]), (2, 1))
        self.assertEqual((result["missing"], result["unexpected"]), (["m"], ["u"]))
        self.assertEqual(result["rule"], {"name": "tolerance", "rtol": 0.125, "atol": 0.0})
        worst = result["worst"][0]
        expected = {"tensor": "x", "state": "different", "max_abs": 1.0, "max_rel": 0.25, "max_ulp": 1 << 21,
                    "elements_different": 1, "index": [1], "reference": 4.0, "actual": 5.0, "allowed": 0.5,
                    "ratio": 2.0, "shape": [2], "dtype": "F32"}
        self.assertEqual({key: worst[key] for key in expected}, expected)
        self.assertEqual({key: result["first"][key] for key in worst}, worst)
        self.assertEqual(result["first"]["hint"], result["explanation"]["hint"])

    def test_the_same_has_no_first_and_no_worst(self):
        a, b = self.pair(weight("x", [1.0]), weight("x", [1.0]))
        result, code = self.result(a, b)
        self.assertEqual((code, result["result"], result["first"], result["worst"]), (0, "same", None, []))

    def test_what_is_no_number_is_a_string(self):
        a, b = self.pair(weight("x", [1.0]), weight("x", [math.nan]))
        result, _ = self.result(a, b)
        self.assertEqual((result["worst"][0]["actual"], result["worst"][0]["ratio"]), ("NaN", "Infinity"))
        self.assertEqual(result["worst"][0]["nan"], [0, 1])

    def test_page_and_json_are_files(self):
        a, b = self.pair(weight("x", [1.0]), weight("x", [2.0]))
        done = self.done(a, b, "--html", "report.html", "--json", "report.json", code=1)
        self.assertIn("report.html: the report as a page\n", done.stdout)
        self.assertEqual(json.loads((self.folder / "report.json").read_text())["result"], "different")
        self.assertIn("<html", (self.folder / "report.html").read_text())

    def test_a_name_turns_no_text_behind_it(self):
        name = "model.\u202ereyal\u2069\u061c.w"
        done = self.done(*self.pair(weight(name, [1.0]), weight(name, [2.0])), "--html", "report.html", code=1)
        for text in done.stdout, (self.folder / "report.html").read_text():
            self.assertIn("model.?reyal??.w", text)
            self.assertNotIn("\u202e", text)
        self.assertEqual(self.result(*self.pair(weight(name, [1.0]), weight(name, [2.0])))[0]["worst"][0]["tensor"], name)


class Normal(Verify):
    def judged(self, other, *arguments):
        a, b = self.pair(weight("x:fwd", [1.0, 2.0]), weight("x:fwd", other))
        sizes = [x for i in range(9) for x in (1e-3 + i * 1e-5, 2e-3 + i * 1e-5, 1.0)]
        write(self.folder / "draws.safetensors", {"x:fwd": ("F64", [], [1.0]), "anyrank.draws/x:fwd": ("F64", [9, 3], sizes)})
        return self.ran(a, b, "--normal", *arguments)

    def test_the_first_line_answers(self):
        for other, arguments, code, says in (
                ([1.0, 2.0], (), 0, "normal: there is none"),
                ([1.0005, 2.0], ("--sensitivity", "draws.safetensors"), 0, "normal: 9 of 9 runs"),
                ([1.05, 2.0], ("--sensitivity", "draws.safetensors"), 1, "not normal: x:fwd differs by 34 times"),
                ([1.0, 2.0000002], (), 0, "normal as far as a bound says"), ([1.05, 2.0], (), 1, "by a bound")):
            done = self.judged(other, *arguments)
            self.assertEqual((done.returncode, done.stderr), (code, ""))
            self.assertIn(says, done.stdout.splitlines()[0])

    def test_json(self):
        done = self.judged([1.05, 2.0], "--sensitivity", "draws.safetensors", "--json", "-")
        normal = json.loads(done.stdout)["normal"]
        self.assertEqual((normal["is_normal"], normal["draws"], normal["tensors"][0]["percentile"]), (False, 9, 90.0))

    def test_a_file_without_draws_leaves_the_bound(self):
        a, b = self.pair(weight("x:fwd", [1.0, 2.0]), weight("x:fwd", [1.0, 2.0000002]))
        write(self.folder / "allowed.safetensors", {"x:fwd": ("F64", [], [1.0])})
        self.assertIn("as far as a bound says", self.done(a, b, "--normal").stdout)

    def test_infinities_and_nan_elsewhere_are_no_rounding(self):
        for strange in (math.inf, math.nan):
            a, b = self.pair(weight("x", [strange, 1.0, -math.inf]), weight("x", [1.0, strange, -math.inf]))
            self.assertIn("not normal", self.done(a, b, "--normal", code=1).stdout)
        a, b = self.pair(weight("x", [1.0, math.inf]), weight("x", [1.0, -math.inf]))
        self.assertIn("not normal", self.done(a, b, "--normal", code=1).stdout)
        for values in ([math.inf] * 40, [*range(1, 40), math.inf]):
            a, b = self.pair(weight("x", values), weight("x", [-x if x == math.inf else x for x in values]))
            self.assertNotIn("rounding:", self.done(a, b, code=1).stdout)
        a, b = self.pair(weight("x", [0.0] * 40), weight("x", [-0.0] * 40))
        self.assertIn("only their bits differ: signs of zeros", self.done(a, b, code=1).stdout)

    def test_another_rule_is_refused(self):
        a, b = self.pair(weight("x", [1.0]), weight("x", [1.0]))
        self.assertIn("--normal judges", self.done(a, b, "--normal", "--ulp", "1", code=2).stderr)


class Rules(Verify):

    def test_the_same_within_a_rule_tells_the_worst_ratio(self):
        a, b = self.pair({**weight("x", [1.0]), **weight("y", [1.0])}, {**weight("x", [1.25]), **weight("y", [1.0])})
        done = self.ran(a, b, "--atol", "0.5")
        self.assertEqual(done.stdout, "verify: the same within rtol 0 and atol 0.5: 2 tensors, 2 elements, 1 tensor bit "
                                      "for bit; the worst difference is 0.5 of what is allowed, in x\n")

    def test_only_and_ignore_take_lists(self):
        a, b = self.pair({**weight("a.x", [1.0]), **weight("b.x", [1.0]), **weight("c", [1.0])},
                         {**weight("a.x", [1.0]), **weight("b.x", [1.0]), **weight("c", [2.0])})
        self.assertEqual(self.result(a, b, "--only", "a.*,b.*")[0]["tensors"], 2)
        self.assertEqual(self.result(a, b, "--only", "a.*", "--only", "b.*")[0]["tensors"], 2)
        self.assertEqual(self.result(a, b, "--ignore", "c")[1], 0)

    def test_common_leaves_out_what_one_side_lacks_and_counts_it(self):
        a, b = self.pair({**weight("x", [1.0]), **weight("y", [1.0]), **weight("z", [1.0])},
                         {**weight("x", [1.0]), **weight("u", [1.0])})
        self.assertEqual(self.ran(a, b).returncode, 1)
        self.assertIn("--common leaves the others out", self.ran(a, b).stdout)
        done = self.ran(a, b, "--common")
        self.assertEqual(done.stdout, "note: left out, as only one dump has them: 2 tensors of the reference, 1 of the "
                                      "other\nverify: the same bits: 1 tensor, 1 element\n")
        result, code = self.result(a, b, "--common")
        self.assertEqual((code, result["left_out"], result["missing"]), (0, [2, 1], []))
        done = self.done(a, b, "--common", "--ignore", "x", code=2)
        self.assertIn("no tensor stands in both dumps: 2 only in the reference, 1 only in the other", done.stderr)
        self.assertTrue(done.stderr.endswith("which is which (--map)\n"), done.stderr)

    def test_all_matched_refuses_what_only_one_has(self):
        a, b = self.pair({**weight("x", [1.0]), **weight("y", [1.0])}, {**weight("x", [2.0]), **weight("z", [1.0])})
        self.refused(a, b, "--all-matched", says=["not all matched", "1 tensors are only in the reference", "has y"])
        self.refused(a, b, "--all-matched", "--ignore", "y", says=["the other alone has z"])
        self.refused(a, b, "--all-matched", "--common", says=["give one of them"])
        self.assertEqual(self.ran(a, b, "--all-matched", "--only", "x").returncode, 1)
        self.assertEqual(self.ran(a, a, "--all-matched").returncode, 0)
        rules = [{"match": "z", "rename": "y"}, {"match": "u.*", "rename": "*"}]
        for n, code in ((1, 1), (2, 2)):
            (self.folder / "map.json").write_text(json.dumps({"version": 1, "tensors": rules[:n]}))
            self.assertEqual(self.ran(a, b, "--map", "map.json", "--all-matched").returncode, code)
        self.refused(a, b, "--map", "map.json", "--all-matched", says=["map.json: rule 2 ('u.*'): matches none", str(b)])

    def test_copies_are_held_to_the_rule(self):
        write(self.folder / "reference.safetensors", weight("w", [1.0, 2.0]))
        for rank, value in enumerate((2.0, 2.0 + 2**-22)):
            write(self.folder / f"ranks/rank-0000{rank}.safetensors", weight("w", [1.0, value]))
        write(self.folder / "allowed.safetensors", {"w": ("F64", [], [1e-6])})
        for rule in (["--ulp", "1"], ["--atol", "1e-6"], ["--sensitivity", "allowed.safetensors"]):
            result, code = self.result("reference.safetensors", "ranks", *rule)
            self.assertEqual((code, result["tensors_drifting"]), (0, 1), rule)
            self.assertIn("note: copies of 1 tensor differ in bits, within ",
                          self.ran("reference.safetensors", "ranks", *rule).stdout)
        for rule in ([], ["--ulp", "0"], ["--atol", "1e-7"]):
            result, code = self.result("reference.safetensors", "ranks", *rule)
            self.assertEqual((code, result["worst"][0]["state"]), (1, "replicas"), rule)

    def test_a_folder_with_allowances_is_its_tensors(self):
        for where, value in (("a", 1.0), ("b", 1.25)):
            write(self.folder / where / "grads.safetensors", weight("x", [value]))
            write(self.folder / where / "allowed.safetensors", {"x": ("F64", [], [0.5])}, {"anyrank.allows": "f32"})
        result, code = self.result("a", "b", "--sensitivity", "a/allowed.safetensors")
        self.assertEqual((code, result["tensors"], result["rule"]["allows"]), (0, 1, "f32"))

    def test_dtypes_are_named_and_values_compared_by_tolerance(self):
        a, b = self.pair({"x": ("F32", [2], [1.0, 2.0])}, {"x": ("F64", [2], [1.0, 2.0])})
        done = self.done(a, b, code=1)
        self.assertIn("DTYPE  x  F32 [2] in the reference, F64 [2] in the other", done.stdout)
        self.assertEqual(self.ran(a, b, "--rtol", "0").returncode, 0)


class BadInput(Verify):
    def test_paths(self):
        a = write(self.folder / "a.safetensors", weight("x", [1.0]))
        (self.folder / "empty").mkdir()
        self.refused(a, "nowhere", says=["nowhere"])
        self.refused("nowhere", a, says=["nowhere"])
        self.refused(a, "empty", says=["empty"])
        self.refused(a, says=["OTHER"])
        write(self.folder / "none.safetensors", {})
        self.refused(a, "none.safetensors", says=["none.safetensors", "no tensors"])

    def test_a_malformed_file_on_either_side_is_named(self):
        a = write(self.folder / "a.safetensors", weight("x", [1.0]))
        (self.folder / "short.safetensors").write_bytes(a.read_bytes()[:-1])
        self.refused(a, "short.safetensors", says=["short.safetensors"])
        self.refused("short.safetensors", a, says=["short.safetensors"])
        self.refused(a, a, "--map", "nowhere.json", says=["nowhere.json"])
        self.refused(a, a, "--sensitivity", "short.safetensors", says=["short.safetensors"])

    def test_globs_that_match_nothing(self):
        a = write(self.folder / "a.safetensors", weight("model.norm.weight", [1.0]))
        self.refused(a, a, "--only", "model.norms.weight", says=["only 'model.norms.weight'", "model.norm.weight"])
        self.refused(a, a, "--ignore", "lm_head*", says=["ignore 'lm_head*'"])
        self.refused(a, a, "--only", "model.*,", says=["empty glob"])
        self.refused(a, a, "--ignore", "*", says=["none"])

    def test_rules_that_make_no_sense(self):
        a = write(self.folder / "a.safetensors", weight("x", [1.0]))
        for rules in (["--bits", "--ulp", "1"], ["--ulp", "1", "--rtol", "1"], ["--bits", "--sensitivity", a],
                      ["--atol", "1", "--sensitivity", a]):
            self.refused(a, a, *rules, says=["give one of them"])
        for option, value in (("--rtol", "-1"), ("--atol", "nan"), ("--rtol", "inf"), ("--ulp", "-1"),
                              ("--ulp", "1.5"), ("--max-report", "x"), ("--tp", "0")):
            self.refused(a, a, option, value, says=[option])

    def test_files_that_would_replace_each_other_or_cannot_be_written(self):
        a = write(self.folder / "a.safetensors", weight("x", [1.0]))
        self.refused(a, a, "--html", "x.html", "--json", "x.html", says=["x.html"])
        self.refused(a, a, "--html", "no/such/folder.html", says=["no/such"])
        self.refused(a, a, "--html", "-", says=["--html"])

    def test_what_is_read_is_not_written_over(self):
        a, b = self.pair(weight("x", [1.0]), weight("x", [1.0]))
        before = b.read_bytes()
        (self.folder / "link.html").symlink_to(b)
        for option in ("--html", "--json"):
            self.refused(a, b, option, b, says=[option, "another file"])
            self.refused(a, b, option, "link.html", says=[option, "another file"])
        self.assertEqual(b.read_bytes(), before)
        for read in ("--map", "--reference-map"):
            (self.folder / "map.json").write_text("{}", encoding="utf-8")
            self.refused(a, b, read, "map.json", "--html", "map.json", says=["--html", "another file"])
            self.assertEqual((self.folder / "map.json").read_text(encoding="utf-8"), "{}")




class Reduced(Verify):
    """Gradients that a hook reduces in bf16, as the dumps record: those that need it are named."""

    names = ("a.weight:grad", "b.weight:grad", "grad_norm:clip")

    def judged(self, off, *arguments, reduced="bf16", recorded=True):
        values = [1.0 + 0.25 * i for i in range(32)]
        sides = [{**weight("a.weight:grad", values), **weight("b.weight:grad", values),
                  **weight("grad_norm:clip", [8.0], [])} for _ in range(2)]
        for name, amount in off.items():
            dtype, shape, held = sides[1][name]
            sides[1][name] = (dtype, shape, [x + amount * (-1) ** i for i, x in enumerate(held)])
        metadata = {"anyrank.formats": json.dumps({"reduced": reduced})} if recorded else None
        paths = [write(self.folder / f"{name}.safetensors", side, metadata) for name, side in zip("ab", sides)]
        report, code = self.result(*paths, "--rtol", "1e-4", "--atol", "1e-6", "--no-explain", *arguments)
        return report, code, self.ran(*paths, "--rtol", "1e-4", "--atol", "1e-6", "--no-explain", *arguments).stdout

    def test_tensors_that_are_the_same_by_that_alone_are_named(self):
        report, code, text = self.judged({"b.weight:grad": 0.03, "grad_norm:clip": 0.03})
        self.assertEqual((code, report["result"], report["reduced"]), (0, "same", "bf16"))
        self.assertEqual(report["excused_by_reduction"], ["b.weight:grad", "grad_norm:clip"])
        line = next(line for line in text.splitlines() if "reduced in bf16" in line)
        self.assertTrue(line.startswith("note: 2 tensors are the same only because of a recorded format"), line)
        self.assertTrue(line.endswith("besides: b.weight:grad, grad_norm:clip"), line)
        self.assertIn("b.weight:grad, and 1 more", self.judged(
            {"b.weight:grad": 0.03, "grad_norm:clip": 0.03}, "--max-report", "1")[2])

    def test_what_needs_no_excuse_or_gets_none_is_not_named(self):
        for off, recorded, code in (({}, True, 0), ({"a.weight:grad": 1e-5}, True, 0),
                                    ({"a.weight:grad": 0.5}, True, 1), ({"a.weight:grad": 0.03}, False, 1)):
            with self.subTest(off=off, recorded=recorded):
                report, status, text = self.judged(off, recorded=recorded)
                self.assertEqual((status, report["excused_by_reduction"]), (code, []))
                self.assertNotIn("only because", text)
        report, code, _ = self.judged({"a.weight:grad": 0.03}, reduced="f16")
        self.assertEqual((code, report["reduced"], report["excused_by_reduction"]), (1, "f16", []))

    def test_a_factor_within_that_rounding_is_named(self):
        values = [math.sin(i) * 1e-4 for i in range(4096)]
        sides = [weight("w:grad", values), weight("w:grad", [x * 1.001 for x in values])]
        for metadata, wanted in (({"anyrank.formats": '{"reduced": "bf16"}'}, (0, ["w:grad"])), (None, (1, []))):
            paths = [write(self.folder / f"{name}.safetensors", side, metadata) for name, side in zip("ab", sides)]
            report, code = self.result(*paths, "--atol", "1e-6", "--no-explain")
            self.assertEqual((code, report["excused_by_reduction"]), wanted)



class Folded(Verify):
    """Activations with dimensions in one that the other run has apart: samples 2, tokens S, heads H, 4 of each head."""

    def value(self, *at):
        return float(sum(x * 31 ** i for i, x in enumerate(at)) % 997)

    def held(self, order, seq, heads):
        """The same numbers in the order of these dimensions."""
        sizes = dict(zip("bshd", (2, seq, heads, 4)))
        found = [()]
        for name in order:
            found = [(*at, i) for at in found for i in range(sizes[name])]
        return [self.value(*(at[order.index(name)] for name in "bshd")) for at in found]

    def test_activations_are_compared_whatever_is_in_one_dimension(self):
        for seq, heads in ((3, 2), (3, 3), (2, 6)):
            one = self.held("bshd", seq, heads)
            for shape, values in (([2, seq, heads, 4], one), ([2, heads, seq, 4], self.held("bhsd", seq, heads)),
                                  ([2 * seq, heads * 4], one), ([2, seq, 1, heads * 4], one)):
                for name in ("q_norm:fwd", "q_norm:bwd", "q_norm:fwd@2"):
                    with self.subTest(seq=seq, heads=heads, shape=shape, name=name):
                        sides = [weight(name, one, [2, seq, heads * 4]), weight(name, values, shape)]
                        off = weight(name, [values[0] + 1.0, *values[1:]], shape)
                        for a, b in (sides, sides[::-1]):
                            report, code = self.result(*self.pair(a, b), "--rtol", "1e-6", "--no-explain")
                            self.assertEqual((code, report["tensors_reshaped"]), (0, 1))
                        report, code = self.result(*self.pair(sides[0], off), "--rtol", "1e-6", "--no-explain")
                        self.assertEqual((code, report["first"]["state"], report["first"]["elements_different"]),
                                         (1, "different", 1))
        explained = self.result(*self.pair(sides[0], off), "--rtol", "1e-6")[0]["explanation"]
        self.assertIn("1 of 96 elements", explained["pattern"])
        text = self.ran(*self.pair(*sides), "--rtol", "1e-6").stdout
        self.assertIn("such as q_norm:fwd@2, [2,2,24] and [2,2,1,24]", text)

    def test_what_ranks_hold_is_put_together_first(self):
        whole = self.held("bshd", 3, 4)
        one = write(self.folder / "one.safetensors", weight("q_norm:fwd", whole, [2, 3, 16]))
        for order, shape, cut in (("bshd", [2, 3, 4, 4], 2), ("bhsd", [2, 4, 3, 4], 1)):
            values, folder = self.held(order, 3, 4), self.folder / order
            folder.mkdir()
            outer, inner = math.prod(shape[:cut]), math.prod(shape[cut + 1:])
            for rank in range(2):
                part = [values[(o * 4 + 2 * rank + h) * inner + i]
                        for o in range(outer) for h in range(2) for i in range(inner)]
                extent, offset = [*shape], [0] * 4
                extent[cut], offset[cut] = 2, 2 * rank
                place = {"version": 1, "rank": rank, "world": 2, "mesh": [["tp", 2]], "at": [rank], "tensors": {
                    "q_norm:fwd": {"shape": shape, "boxes": [{"global": offset, "local": [0] * 4, "extent": extent}]}}}
                write(folder / f"rank-0000{rank}.safetensors", weight("q_norm:fwd", part, extent),
                      {"ANYRANK_PLACEMENT": json.dumps(place)})
            for sides in ((one, folder), (folder, one)):
                self.assertEqual(self.result(*sides)[1], 0, order)

    def test_another_shape_of_anything_else_stays_one(self):
        values = [float(i) for i in range(24)]
        for name, a, b in (("q.weight:init", [24], [4, 6]), ("q.weight:grad", [4, 6], [24]), ("x:fwd", [4, 6], [6, 4]),
                           ("x:fwd", [2, 3, 4], [3, 8]), ("x:fwd", [2, 12], [4, 3, 2]), ("w", [2, 12], [2, 3, 4])):
            report, code = self.result(*self.pair(weight(name, values, a), weight(name, values, b)),
                                       "--rtol", "1e-6", "--no-explain")
            found = code, report["first"]["state"], report["tensors_reshaped"]
            self.assertEqual(found, (1, "shape", 0), (name, a, b))



class Inputs(Verify):
    def test_a_glob_of_outputs_does_not_mean_what_the_model_is_given(self):
        one = {**weight("input.0:fwd", [1.0]), **weight("input.0:fwd@2", [1.0]), **weight("a.inputs:fwd", [1.0]),
               **weight("w:grad", [1.0])}
        off = {**weight("input.0:fwd", [2.0]), **weight("input.0:fwd@2", [3.0]), **weight("a.inputs:fwd", [1.0]),
               **weight("w:grad", [1.0])}
        sides = self.pair(one, off)
        for arguments, tensors, differ in ((("--only", "*:fwd"), 1, 0), (("--only", "*:fwd*"), 1, 0),
                                           (("--ignore", "*:fwd*"), 3, 2), (("--only", "*"), 4, 2),
                                           (("--only", "input.*:fwd"), 1, 1), (("--only", "input.0:fwd*"), 2, 2),
                                           (("--ignore", "*@*"), 3, 1), (("--ignore", "input*"), 2, 0)):
            report, code = self.result(*sides, *arguments, "--no-explain")
            self.assertEqual((report["tensors"], report["tensors_different"], code), (tensors, differ, int(differ > 0)),
                             arguments)



class Report(Verify):
    """What docs/guide/verify.md promises of `--json`."""

    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/guide/verify.md").read_text()

    def documented(self):
        """The fields of a row, and those of the report."""
        block = self.page.partition("## JSON")[2].partition("```")[2].partition("```")[0]
        report, _, row = block.partition("ROW:")
        named = [re.sub(r"\s{2,}[^\s\"].*", "", line) for line in row.splitlines()]  # without what is said of a line
        fields = re.findall(r'"(\w+)"', re.sub(r'("evidence": ){.*?}|: "[a-z|]*"', r"\1", "\n".join(named)))
        lines = [re.sub(r"{.*}?|\[.*?\]", "", line) for line in report.splitlines() if re.match(r'( |{)"', line)]
        return fields, [name for line in lines for name in re.findall(r'"(\w+)"(?=[:,])', line)]

    def states(self):
        """A row of each state, by options."""
        two = weight("x", [1.0, 2.0])
        yield "different", self.pair(two, weight("x", [1.0, 3.0])), ()
        yield "different", self.pair(two, weight("x", [1.0, 3.0])), ("--no-explain",)
        yield "different", self.pair(two, weight("x", [1.0, math.nan])), ("--rtol", "1e-3")
        yield "shape", self.pair(two, weight("x", [1.0, 2.0, 3.0])), ()
        yield "dtype", self.pair(two, {"x": ("F64", [2], [1.0, 2.0])}), ()
        step = {**weight("w:init", [1.0]), **weight("v:init", [1.0]), **weight("v:grad", [2.0]),
                **weight("v:new", [0.5])}
        grad = weight("w:grad", [1.0])
        yield "missing", self.pair({**step, **grad}, step), ()
        yield "unexpected", self.pair(step, {**step, **grad}), ("--no-explain",)
        one, folder = write(self.folder / "one.safetensors", two), self.folder / "ranks"
        folder.mkdir(exist_ok=True)
        for rank in range(2):
            write(folder / f"rank-0000{rank}.safetensors", weight("x", [1.0, 2.0 + rank]))
        yield "replicas", (one, folder), ()

    def test_a_row_has_every_documented_field_in_every_state(self):
        fields, of_report = self.documented()
        self.assertLessEqual({"tensor", "state", "first_index", "copies_of", "look_at", "evidence", "nan"}, {*fields})
        self.assertGreaterEqual(len(fields), 36)
        self.assertEqual(sorted({*fields}), sorted(fields))
        seen = set()
        for state, sides, options in self.states():
            report, code = self.result(*sides, *options)
            self.assertEqual((code, report["schema"]), (1, 2))
            rows = [report["first"], *report["worst"]]
            seen |= {row["state"] for row in rows}
            self.assertEqual(report["first"]["state"], state)
            for row in rows:
                self.assertEqual([name for name in fields if name not in row], [], (state, options))
            known = [row for row in rows if row["tensor"] == report["first"]["tensor"]]
            explained = "--no-explain" not in options
            self.assertTrue(all((row["cause"] is not None) == explained for row in known), (state, known))
            if state == "different":
                self.assertEqual((report["first"]["index"], report["first"]["rank"]), ([1], None))
            self.assertEqual(report["explained"], True)
            lacking = {name for name in of_report if name not in report} - {"normal", "tool"}
            self.assertFalse(lacking & {"rounded_before_first", "explained", "worst", "reduced", "rule"})
        states = re.search(r'"state": "([a-z|]+)"', self.page)[1].split("|")
        self.assertEqual(seen, {*states})


class LaterSteps(Verify):
    """Modules whose outputs have features in dimension 1: the first step moved weights of the last one by rounding."""

    def judged(self, shape, weight_shape=None, groups=1, transposed=False, kind=None, wrong=None):
        """The exit status for outputs of 8 features, or their number in shape[1]; wrong: an element that is off."""
        draw = random.Random(3)
        samples, features, places = shape[0], shape[1], math.prod(shape[2:])
        x = [[[draw.gauss(0, 1) for _ in range(places)] for _ in range(64)] for _ in range(samples)]
        taps = math.prod(weight_shape[2:]) if weight_shape else 1
        runs = []
        for sign in (1.0, -1.0):
            if weight_shape:
                init = [random.Random(i).gauss(0, 0.5) for i in range(math.prod(weight_shape))]
                inner = weight_shape[1] * taps

                def of(i):  # feature, input and tap of an element of the weight
                    if not transposed:
                        group = i // inner // (weight_shape[0] // groups)
                        return i // inner, group * weight_shape[1] + i // taps % weight_shape[1], i % taps
                    group = i // inner // (weight_shape[0] // groups)
                    return group * weight_shape[1] + i // taps % weight_shape[1], i // inner, i % taps
            else:
                init, of = [0.5] * features, lambda i: (i, 0, 0)
            grad = [sign * 1e-9 if of(i)[0] == features - 1 else 0.1 for i in range(len(init))]
            new = [w - 1e-3 * math.copysign(1.0, g) for w, g in zip(init, grad)]
            y = [0.0] * (samples * features * places)
            for i, w in enumerate(new):
                feature, read, tap = of(i)
                for n in range(samples):
                    for place in range(places):
                        y[(n * features + feature) * places + place] += w * (
                            x[n][read][(place + tap) % places] if weight_shape else 1.0)
            if sign < 0.0 and wrong is not None:
                y[wrong] += 1e-4
            name = "body.3.c." + ("weight" if weight_shape else "bias")
            at = weight_shape or [features]
            runs.append({**weight(f"{name}:init", init, at), **weight(f"{name}:grad", grad, at),
                         **weight(f"{name}:new", new, at), **weight("body.3.c:fwd@2", y, shape)})
        modules = [{"paths": ["body.{0-2}.c"], "class": "Linear"}, {"paths": ["body.{3-9}.c"], "class": kind}]
        file = self.folder / "model.json"
        file.write_text(json.dumps({"format": "anyrank model", "version": 1, "modules": modules if kind else []}))
        return self.ran(*self.pair(*runs), "--rtol", "1e-5", "--atol", "1e-6", "--no-explain").returncode

    def test_features_are_where_a_convolution_and_a_norm_have_them(self):
        for given in ({"shape": [2, 8, 5]}, {"shape": [2, 8, 3, 4]}, {"shape": [2, 8, 2, 3, 2]}, {"shape": [2, 8]},
                      {"shape": [2, 8, 5], "weight_shape": [8, 6, 2]},
                      {"shape": [2, 8, 3, 4], "weight_shape": [8, 6, 2, 2]},
                      {"shape": [2, 8, 2, 3, 2], "weight_shape": [8, 6, 1, 2, 1]},
                      {"shape": [2, 8, 5], "weight_shape": [8, 3, 2], "groups": 2},
                      {"shape": [2, 8, 5], "weight_shape": [6, 8, 2], "transposed": True},
                      {"shape": [2, 8, 3, 4], "weight_shape": [6, 4, 2, 1], "groups": 2, "transposed": True}):
            with self.subTest(**given):
                self.assertEqual(self.judged(**given), 0)
                self.assertEqual(self.judged(**given, wrong=0), 1)  # of the first feature, whose weights did not move

    def test_the_recorded_class_tells_which_of_two_equal_dimensions_it_is(self):
        for kind in ("GroupNorm", "BatchNorm2d", "InstanceNorm2d", "Conv2d", "ConvTranspose2d"):
            with self.subTest(kind):
                self.assertEqual(self.judged([2, 8, 8, 8], kind=kind), 0)
                self.assertEqual(self.judged([2, 8, 8, 8], kind=kind, wrong=7), 1)  # the last place of the first
        self.assertEqual(self.judged([2, 8, 8, 8], kind="LayerNorm"), 1)
        self.assertEqual(self.judged([2, 8, 8], [8, 6, 8], kind="Conv1d"), 0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
