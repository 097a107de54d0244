# SPDX-License-Identifier: Apache-2.0
"""The explanation of a difference: how patterns are held against it, and what is said."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import typing
import unittest
import unittest.mock

from anyrank import _safetensors
from anyrank._safetensors import Entry
from anyrank.explain.__main__ import main as command
from anyrank.tests import FolderCase, needs

try:
    import numpy as np

    from anyrank.explain import explain, patterns, tensors, text
except ImportError:
    np = typing.cast(typing.Any, None)  # tests of arrays are skipped


def case(reference: typing.Any, *copies: typing.Any, name: str = "layers.0.fc:fwd", **runs: typing.Any) -> tensors.Case:
    """A tensor of a run whose ranks each have a whole copy, or of one without ranks."""
    reference = np.asarray(reference, np.float32)
    whole = tuple(slice(0, n) for n in reference.shape)
    held = [tensors.Copy(rank if len(copies) > 1 else None, (whole,), (np.asarray(copy, np.float32),))
            for rank, copy in enumerate(copies)]
    return tensors.Case(tensors.Name.of(name), reference, held[-1].values[0], tuple(held), tensors.Runs(**runs))


def drawn(*shape: int, seed: int = 0) -> typing.Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Options(unittest.TestCase):
    def test_facts_take_no_other_option(self) -> None:
        for more in (["--common"], ["--rtol", "1e-4"], ["--module", "m.py:build"]):
            with contextlib.redirect_stderr(io.StringIO()) as errors, self.assertRaises(SystemExit):
                command(["a", "b", "--facts", *more])
            self.assertIn("takes no other option", errors.getvalue())


class WithoutNumpy(unittest.TestCase):
    def test_the_command_says_what_is_missing(self) -> None:
        with unittest.mock.patch("importlib.util.find_spec", return_value=None):
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                self.assertEqual(command(["a", "b"]), 2)
        self.assertIn("explaining needs numpy", errors.getvalue())


@needs("numpy")
class Names(unittest.TestCase):
    def test_a_name_has_a_stem_a_kind_and_a_step(self) -> None:
        for name, parts in (("h.0.attn:fwd@2", ("h.0.attn", "fwd", 2)), ("h.0.w:grad", ("h.0.w", "grad", 1)),
                            ("lm_head.weight", ("lm_head.weight", "weight", 1)), ("a:b:new", ("a:b", "new", 1))):
            found = tensors.Name.of(name)
            self.assertEqual((found.stem, found.kind, found.step), parts)
            self.assertEqual(str(found), name)
        self.assertEqual(tensors.Name.of("h.0.w:new@3").with_kind("grad", 2), "h.0.w:grad@2")
        self.assertEqual(tensors.Name.of("h.0.fc.weight:grad").module, "h.0.fc")
        self.assertEqual(tensors.Name.of("h.0.fc:bwd").module, "h.0.fc")


@needs("numpy")
class Fits(unittest.TestCase):
    def test_a_pattern_fits_only_if_every_element_of_every_copy_is_as_expected(self) -> None:
        x = drawn(4, 8)
        right = patterns.Pattern("twice", 2 * x.astype(np.float64))
        self.assertTrue(patterns.fit(case(x, 2 * x), right).exact)
        self.assertTrue(patterns.fit(case(x, 2 * x, 2 * x), right).exact)
        self.assertFalse(patterns.fit(case(x, 2 * x, x), right).exact)  # one copy is the reference
        spoiled = 2 * x
        spoiled[3, 7] += 0.5
        found = patterns.fit(case(x, spoiled), right)
        self.assertFalse(found.exact)
        self.assertAlmostEqual(found.wrong, 1 / 32)
        half = np.where(np.arange(8) < 4, 2 * x, x)
        self.assertEqual(patterns.fit(case(x, half), right).harmed, 16)

    def test_rounding_is_allowed_and_what_is_large_beside_the_difference_explains_nothing(self) -> None:
        x = drawn(64, 64)
        noise = np.float32(1e-7) * drawn(64, 64, seed=1)
        self.assertTrue(patterns.fit(case(x, 2 * x + noise), patterns.Pattern("twice", 2.0 * x)).exact)
        self.assertFalse(patterns.fit(case(x, x + noise), patterns.Pattern("zero", x + 0.0)).exact)

    def test_a_thinned_case_keeps_blocks_and_every_rank_s_part(self) -> None:
        x = drawn(8, 6)
        parts = [tensors.Copy(r, ((slice(4 * r, 4 * r + 4), slice(0, 6)),), (x[4 * r:4 * r + 4] + r,)) for r in (0, 1)]
        whole = dataclasses.replace(case(x, x), copies=tuple(parts), other=x)
        most = tensors.MOST
        try:
            tensors.MOST = 16
            small = tensors.thinned(whole)
        finally:
            tensors.MOST = most
        self.assertLessEqual(small.reference.size, 16)
        self.assertEqual({copy.rank for copy in small.copies}, {0, 1})
        for copy in small.copies:
            for box, values in zip(copy.boxes, copy.values):
                np.testing.assert_array_equal(values, small.reference[box] + copy.rank)

    def test_small_ratios_are_recognised(self) -> None:
        for x, ratio in ((0.5, (1, 2)), (-3.0, (-3, 1)), (2 / 3, (2, 3)), (0.123456, None), (0.0, None)):
            self.assertEqual(patterns.ratio_of(x), ratio)


@needs("numpy")
class Answers(FolderCase):
    def test_what_nothing_explains_is_unknown(self) -> None:
        found = explain.explain(case(drawn(8, 8), drawn(8, 8, seed=1)))
        self.assertEqual((found.cause, found.sentence), ("unknown", ""))

    def test_every_cause_says_a_sentence_and_has_a_name_of_its_own(self) -> None:
        for cause in explain.causes():
            self.assertRegex(cause.name, r"^[a-z][a-z0-9_]*$")
            self.assertTrue(cause.kinds and cause.sentence, cause.name)
            self.assertFalse(cause.sentence.endswith("."), cause.name)

    def test_the_first_line_has_the_tensor_the_ranks_the_size_and_the_cause(self) -> None:
        x = drawn(4, 8)
        one = case(x, x, -x)
        first, *rest = text.lines(one, explain.explain(one))
        self.assertRegex(first, r"^layers\.0\.fc:fwd on rank 1: off by .* of its size")
        self.assertLessEqual(len(rest), 5)

    def test_the_command_explains_two_dumps(self) -> None:
        for name, factor in (("a", 1.0), ("b", -1.0)):
            data = (factor * drawn(4, 8)).astype("<f4").tobytes()
            _safetensors.write(self.path / f"{name}.safetensors", {"fc:fwd": Entry("F32", (4, 8), memoryview(data))})
        a, b = (str(self.path / f"{name}.safetensors") for name in "ab")
        for paths, status, says in (((a, b), 1, "fc:fwd: off by 200 % of its size: the sign is flipped"),
                                    ((a, a), 0, "there is nothing to explain")):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(command(paths), status)
            self.assertIn(says, out.getvalue())
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            self.assertEqual(command((a, str(self.path / "none"))), 2)
        self.assertIn("none", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
