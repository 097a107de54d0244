#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of verify on what optimizers make of gradients that differ by rounding: moments, the next weights, and updates
that are orthogonalised in 16 bits.
"""

import json
import math
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import Case  # noqa: E402

RATES = {"m": 0.1, "v": 0.001}  # of Adam: the parts of a gradient, or of its square, in a moment


def f32(values, shape=None):
    return ("F32", shape or [len(values)], struct.pack(f"<{len(values)}f", *values))


class Updates(Case):
    subcommand = ("verify",)

    def verdict(self, reference, other, *arguments, metadata=None):
        """The name of the first tensor that differs; None: all are the same."""
        sides = [tensor_files.write(self.folder / f"{name}.safetensors", {k: f32(*t) for k, t in tensors.items()},
                                    metadata) for name, tensors in (("reference", reference), ("other", other))]
        done = self.ran(*sides, *arguments, "--no-explain", "--json", "-")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        first = json.loads(done.stdout)["first"]
        self.assertEqual(done.returncode, int(first is not None))
        return first and first["tensor"]


def moments(gradients):
    """Both moments after the last of these gradients."""
    out = {}
    for kind, rate in RATES.items():
        past = [0.0] * len(gradients[0])
        for gradient in gradients:
            past = [(1.0 - rate) * p + rate * (g if kind == "m" else g * g) for p, g in zip(past, gradient)]
        out[kind] = past
    return out


class Moments(Updates):
    """Two steps of Adam, of which the second one's gradient is off by a thousandth, as is allowed of it."""

    first = [math.sin(i) + 2.0 for i in range(32)]
    second = [math.cos(i) + 2.0 for i in range(32)]

    def dump(self, gradients, after):
        before = moments(gradients[:1])
        steps = {"w:grad": gradients[0], "w:m": before["m"], "w:v": before["v"],
                 "w:grad@2": gradients[1], "w:m@2": after["m"], "w:v@2": after["v"]}
        return {name: (values,) for name, values in steps.items()}

    def judged(self, after, off=1e-3, more=(), allowed=1e-2, early=0.0):
        first, second = ([g * (1.0 + part * (-1) ** i) for i, g in enumerate(gradient)]
                         for gradient, part in ((self.first, early), (self.second, off)))
        names = self.dump([first, second], after(second) if not early else moments([first, second]))
        allowances = {name: ([allowed if "w:grad" in name else 1e-6], []) for name in names}
        path = tensor_files.write(self.folder / "allowed.safetensors", {k: f32(*t) for k, t in allowances.items()},
                                  {"anyrank.allows": "bf16"})
        reference = self.dump([self.first, self.second], moments([self.first, self.second]))
        return self.verdict(reference, names, "--sensitivity", path, *more)

    def right(self, gradient):
        return moments([self.first, gradient])

    def test_of_a_gradient_that_is_off_are_off_by_it(self):
        self.assertIsNone(self.judged(self.right))
        self.assertIsNone(self.judged(self.right, off=1e-7, early=1e-3))

    def test_of_a_gradient_that_is_not_compared_are_not(self):
        self.assertEqual(self.judged(self.right, more=("--ignore", "w:grad@2")), "w:m@2")

    def test_of_a_gradient_that_is_wrong_are_wrong(self):
        self.assertEqual(self.judged(self.right, allowed=1e-6), "w:grad@2")
        for kind in RATES:
            ignored = ("--ignore", f"w:{'v' if kind == 'm' else 'm'}@2", "--ignore", "w:grad@2")
            self.assertEqual(self.judged(self.right, allowed=1e-6, more=ignored), f"w:{kind}@2")

    def test_with_other_rates_or_without_their_history_are_wrong(self):
        for kind in RATES:
            for factor, kept in ((1.1, 1.0), (0.9, 1.0), (1.0, 0.0), (1.0, 0.9)):
                with self.subTest(kind=kind, factor=factor, kept=kept):
                    def after(gradient):
                        rate, past = factor * RATES[kind], moments([self.first])[kind]
                        wrong = [(1.0 - rate) * kept * p + rate * (g if kind == "m" else g * g)
                                 for p, g in zip(past, gradient)]
                        return {**self.right(gradient), kind: wrong}
                    self.assertEqual(self.judged(after), f"w:{kind}@2")

    def test_of_gradients_that_are_the_same_are_judged_alone(self):
        right = moments([self.first, self.second])
        off = {kind: [x * (1.0 + 1e-3 * (-1) ** i) for i, x in enumerate(values)] for kind, values in right.items()}
        for kind, other in (("m", off), ("v", {**off, "m": right["m"]})):
            self.assertEqual(self.judged(lambda gradient: other, off=0.0), f"w:{kind}@2")


class NextWeights(Updates):
    """A weight whose first gradient is rounding, so that Adam moves it either way; the output of the second step shows
    that, its gradient shares it, and so do moment and weight after it."""

    def run_of(self, tiny, moved=0.0, momentum=0.0):
        second = [1.002 if tiny < 0 else 1.0, 0.5]
        after = [-0.01, -0.01 if tiny > 0 else 0.01]
        m = [0.09 * g + 0.1 * h for g, h in zip((1.0, tiny), second)]
        return {"lin.weight:init": ([0.0, 0.0], [1, 2]), "lin.weight:grad": ([1.0, tiny], [1, 2]),
                "lin.weight:new": (after, [1, 2]), "lin:fwd@2": ([after[0] + 0.5 * after[1]], [1, 1]),
                "lin.weight:grad@2": (second, [1, 2]), "lin.weight:m@2": ([m[0] + momentum, m[1]], [1, 2]),
                "lin.weight:new@2": ([after[0] - 0.01 + moved, after[1] - 0.005], [1, 2])}

    def test_are_off_by_what_their_gradient_is_and_not_by_more(self):
        rule = ("--rtol", "1e-4", "--atol", "1e-5")
        for moved, momentum, first in ((3e-5, 0.0, None), (3e-4, 0.0, "lin.weight:new@2"),
                                       (0.0, 3e-3, "lin.weight:m@2")):
            with self.subTest(moved=moved, momentum=momentum):
                reference, other = self.run_of(1e-9), self.run_of(-1e-9, moved, momentum)
                self.assertEqual(self.verdict(reference, other, *rule), first)


class LaterGradients(Updates):
    """A weight that rounding moved by a five-hundredth of the matrix, an output that shows it, and the gradient of
    another parameter, which is a sum of products of such outputs."""

    def run_of(self, tiny, output=0.0, gradient=0.0):
        return {"lin.weight:init": ([10.0, 0.0], [1, 2]), "lin.weight:grad": ([1.0, tiny], [1, 2]),
                "lin.weight:new": ([9.99, -0.01 if tiny > 0 else 0.01], [1, 2]),
                "lin:fwd@2": ([1.0 + output, 0.1, 0.1, 0.1], [4, 1]),
                "u:grad@2": ([1.0, 0.1, 0.1, -0.1 + gradient], [4])}

    def test_are_off_by_what_the_outputs_are_in_parts_of_their_size_and_not_by_more(self):
        for output, gradient, first in ((0.002, 0.0, None), (0.002, 0.008, None), (0.002, 0.02, "u:grad@2"),
                                        (0.0, 0.0001, "u:grad@2"), (0.02, 0.0, "lin:fwd@2")):
            with self.subTest(output=output, gradient=gradient):
                reference, other = self.run_of(1e-9), self.run_of(-1e-9, output, gradient)
                self.assertEqual(self.verdict(reference, other, "--rtol", "1e-4", "--atol", "1e-5"), first)


SIZE = 64
HADAMARD = [[1 - 2 * (bin(i & j).count("1") % 2) for j in range(SIZE)] for i in range(SIZE)]


def product(*values):
    """The square matrix with these singular values, each for as many directions: columns of Hadamard's matrix on the
    left, and the next ones on the right."""
    each = SIZE // len(values)
    left = [[HADAMARD[i][k] * values[k // each] / SIZE for k in range(SIZE)] for i in range(SIZE)]
    right = [[HADAMARD[j][(k + 1) % SIZE] for k in range(SIZE)] for j in range(SIZE)]
    return [sum(a * b for a, b in zip(row, column)) for row in left for column in right]


class Orthogonal(Updates):
    """Half of a gradient's singular values are rounding: the update makes them 1, of either sign."""

    gradient = product(1.0, 0.8, 0.6, 0.5, *[1e-5] * 4)
    reference, turned = product(1.0), product(1.0, -1.0)
    rule = ("--rtol", "1e-4", "--atol", "1e-5")

    def run_of(self, update, gradient):
        square = [SIZE, SIZE]
        return {"w:init": ([0.0] * SIZE ** 2, square), "w:grad": (gradient, square),
                "w:m": ([0.05 * g for g in self.gradient], square), "w:new": ([-0.02 * u for u in update], square)}

    def judged(self, update, names=("w",)):
        gradient = [g * (1.0 + 1e-6 * (-1) ** i) for i, g in enumerate(self.gradient)]
        metadata = {"anyrank.formats": json.dumps({"orthogonal": list(names)})}
        return self.verdict(self.run_of(self.reference, self.gradient), self.run_of(update, gradient), *self.rule,
                            metadata=metadata)

    def test_updates_are_the_same_in_what_the_gradient_is(self):
        for other in ((1.0, -1.0), (1.0, 1.0, 0.7, -1.1), (1.01, 0.99, 1.0, 1.01, 0.0, 0.0, 0.0, 0.0)):
            self.assertIsNone(self.judged(product(*other)), other)

    def test_updates_that_nobody_said_are_orthogonal_are_judged_by_their_elements(self):
        self.assertEqual(self.judged(self.turned, ("v",)), "w:new")

    def test_a_wrong_update_is_seen(self):
        right, least = self.turned, min(range(SIZE ** 2), key=lambda i: abs(self.gradient[i]))
        norm = math.sqrt(sum(g * g for g in self.gradient))
        wrong = {"another rate": [1.04 * u for u in right],
                 "a lost row": [0.0 if i // SIZE == 3 else u for i, u in enumerate(right)],
                 "a lost column": [0.0 if i % SIZE == 5 else u for i, u in enumerate(right)],
                 "exchanged rows": right[SIZE:2 * SIZE] + right[:SIZE] + right[2 * SIZE:],
                 "directions turned round": product(*[1.0] * 7, -1.0, *[1.0] * 8),
                 "a gradient that is only divided by its norm": [g / norm * math.sqrt(SIZE) for g in self.gradient],
                 "nothing": [0.0] * SIZE ** 2,
                 "an element larger than any step": [u + 3.0 * (i == least) for i, u in enumerate(right)],
                 "no number": [math.nan if i == 9 else u for i, u in enumerate(right)]}
        for what, update in wrong.items():
            with self.subTest(what):
                self.assertEqual(self.judged(update), "w:new")


if __name__ == "__main__":
    unittest.main(verbosity=1)
