# SPDX-License-Identifier: Apache-2.0
"""assert_same: what it takes, what counts as the same, and the words of a failure."""

from __future__ import annotations

import array
import math
import pathlib
import re
import tempfile
import typing
import unittest

import anyrank
from anyrank import _safetensors
from anyrank._arrays import entry_of
from anyrank.testing import NotSame, assert_same
from anyrank.tests import FolderCase, needs


def floats(*values: float) -> typing.Any:
    return memoryview(array.array("f", values)).cast("B").cast("f", [len(values)])


class Case(FolderCase):
    def text(self, reference: typing.Any, other: typing.Any, **rules: typing.Any) -> str:
        """What a failure says; fails where there is none."""
        with self.assertRaises(NotSame) as caught:
            assert_same(reference, other, **rules)
        return str(caught.exception)


class Rules(Case):
    def test_bits_are_the_default(self) -> None:
        assert_same(floats(1, 2), floats(1, 2))
        assert_same({"a": floats(1), "b": [1, 2]}, {"b": [1, 2], "a": floats(1)})
        self.assertIn("index (1,)", self.text(floats(1, 2), floats(1, 2 + 2e-7)))
        self.assertIn("Scalars are not equal", self.text(0.0, -0.0))

    def test_tolerances(self) -> None:
        one, two = floats(1, 100), floats(1.001, 100.1)
        assert_same(one, two, rtol=2e-3)
        assert_same(one, two, atol=0.2)
        assert_same(one, two, ulp=20000)
        assert_same(one, two, sensitivity=0.2)
        assert_same({"a": one}, {"a": two}, sensitivity={"a": 0.2})
        self.assertIn("(up to 1e-05 allowed)", self.text(one, two, rtol=1e-5))
        self.assertIn("(up to 0.05 allowed)", self.text(one, two, sensitivity=0.05))
        self.assertIn("(up to 10 allowed)", self.text(one, two, ulp=10))

    def test_close_is_the_tolerance_of_the_dtype(self) -> None:
        assert_same(floats(1, 1), floats(1, 1 + 1.1e-5), close=True)
        self.assertIn("(up to 1.3e-06 allowed)", self.text(floats(1, 1), floats(1, 1.001), close=True))
        with self.assertRaisesRegex(TypeError, "F32 and of F64 differ"):
            assert_same({"a": floats(1), "b": [1.0]}, {"a": floats(2), "b": [2.0]}, close=True)
        with self.assertRaisesRegex(TypeError, "give no other rule"):
            assert_same(floats(1), floats(2), close=True, rtol=1)

    def test_nan_is_itself_only_if_told(self) -> None:
        nan = floats(math.nan, 1)
        self.assertIn("NaN       1 in the reference, 1 in the other", self.text(nan, nan))
        assert_same(nan, nan, equal_nan=True)
        self.text(nan, floats(1, 1), equal_nan=True, atol=9)
        self.assertIn("Absolute difference: nan", self.text(1.0, math.nan))
        self.assertIn("Absolute difference: inf", self.text(1.0, math.inf))

    def test_two_rules_are_refused(self) -> None:
        with self.assertRaisesRegex(anyrank.AnyrankError, "give one of them"):
            assert_same(floats(1), floats(2), rtol=1, ulp=1)

    def test_a_bad_rule_is_refused_where_all_is_equal_too(self) -> None:
        rules: list[dict[str, typing.Any]] = [{"rtol": -1}, {"ulp": 1.5}, {"atol": "x"}]
        for rule in rules:
            with self.assertRaises((anyrank.AnyrankError, TypeError)):
                assert_same(floats(1), floats(1), **rule)


class Sides(Case):
    def test_files_and_folders(self) -> None:
        path = self.path / "a.safetensors"
        _safetensors.write(path, {"w": entry_of(floats(1, 2))})
        assert_same(path, {"w": floats(1, 2)})
        assert_same(str(path), path)
        self.assertIn("item 'w'", self.text({"w": floats(1, 3)}, path))
        assert_same(anyrank.open_dump(path), {"w": floats(1, 2)})
        with self.assertRaisesRegex(anyrank.AnyrankError, "none: cannot open"):
            assert_same(path, self.path / "none")

    def test_ranks_hold_copies(self) -> None:
        right, wrong = {"w": floats(1, 2)}, {"w": floats(1, 2.5)}
        assert_same(right, [right, right, right])
        text = self.text(right, [right, right, wrong])
        self.assertIn("Copies of a tensor on several ranks are not equal!", text)
        self.assertRegex(text, r"ranks +0, 2")
        self.assertIn("rank 2", text)

    def test_shards_by_a_mapping(self) -> None:
        mapping = {"version": 1, "mesh": [["tp", 2]], "tensors": [{"match": "w", "shard": {"tp": 0}}]}
        assert_same({"w": floats(1, 2, 3, 4)}, [{"w": floats(1, 2)}, {"w": floats(3, 4)}], map=mapping)
        text = self.text({"w": floats(1, 2, 3, 4)}, [{"w": floats(1, 2)}, {"w": floats(3, 5)}], map=mapping)
        self.assertRegex(text, r"rank +1\n")

    def test_names(self) -> None:
        text = self.text({"a": floats(1), "b": floats(2)}, {"a": floats(1), "c": floats(3)})
        self.assertIn("The keys of the mappings do not match:\nMissing keys in the actual mapping: ['b']\n"
                      "Additional keys in the actual mapping: ['c']", text)
        assert_same({"a": floats(1), "b": floats(2)}, {"a": floats(1)}, common=True)
        assert_same({"a": floats(1), "b": floats(2)}, {"a": floats(1), "b": floats(3)}, only="a")
        assert_same({"a": floats(1), "b": floats(2)}, {"a": floats(1), "b": floats(3)}, ignore=["b"])
        self.assertIn("The failure occurred for item 'norm.weight:grad'",
                      self.text(floats(1), floats(2), name="norm.weight:grad"))

    def test_none_is_no_tensor(self) -> None:
        self.assertIn("The other is None", self.text(floats(1), None))
        assert_same({"a": floats(1), "b": None}, {"a": floats(1)})

    def test_nothing_is_not_the_same_as_nothing(self) -> None:
        self.assertIn("The reference has no tensors", self.text({}, {}))
        self.assertIn("The other has no tensors", self.text({"a": floats(1)}, {"a": None}))
        self.assertIn("The other has no tensors", self.text(floats(1), [{}, {}]))

    def test_nested_dicts(self) -> None:
        state = {"state": {0: {"step": 3.0, "exp_avg": floats(1, 2)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        assert_same(state, state)
        wrong = {**state, "state": {0: {"step": 3.0, "exp_avg": floats(1, 3)}}}
        self.assertIn("item 'state.0.exp_avg'", self.text(state, wrong))

    def test_what_is_no_tensor_is_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "'w': object is no tensor"):
            assert_same({"w": floats(1)}, {"w": object()})
        with self.assertRaisesRegex(TypeError, "64 bits"):
            assert_same([2**63], [2**63])
        with self.assertRaisesRegex(TypeError, "two tensors have the name 'a.b'"):
            assert_same({"a": {"b": floats(1)}, "a.b": floats(2)}, {"a": {"b": floats(3)}, "a.b": floats(2)})

    def test_shapes_and_types(self) -> None:
        self.assertTrue(self.text(floats(1, 2), floats(1)).startswith(
            "The values for attribute 'shape' do not match: (2,) != (1,)."))
        self.assertTrue(self.text([1.0], floats(1)).startswith(
            "The values for attribute 'dtype' do not match: float64 != float32."))
        assert_same([1.0], floats(1), atol=0)


class Texts(Case):
    def test_the_message_comes_first_and_the_report_is_there(self) -> None:
        with self.assertRaises(NotSame) as caught:
            assert_same({"v": floats(1, 2), "w": floats(1, 2)}, {"v": floats(2, 4), "w": floats(1, 2.5)}, msg="step 3")
        self.assertRegex(str(caught.exception), "^step 3\n\nTensor-likes are not equal!\n\nMismatched elements: ")
        self.assertIn(", the first of 2 in execution order (2 compared)", str(caught.exception))
        report = caught.exception.report
        assert report is not None
        self.assertEqual({row.tensor for row in report.tensors}, {"v", "w"})
        page = report.html(self.path / "page.html").read_text(encoding="utf-8")
        self.assertIn("<html", page)

    @needs("numpy")
    def test_the_cause_is_named(self) -> None:
        values = [math.sin(i) for i in range(64)]
        text = self.text(floats(*values), floats(*[2 * v for v in values]))
        self.assertRegex(text, r"cause +counted_twice\n +hint +every element is the reference times 2")


@needs("torch")
class Torch(Case):
    def test_the_words_are_those_of_assert_close(self) -> None:
        import torch

        reference = torch.arange(12.0).reshape(3, 4)
        wrong = reference.clone()
        wrong[1, 2] += 3
        wrong[2, 0] += 1
        cases: list[tuple[typing.Any, dict[str, typing.Any]]] = [
            (wrong, {"rtol": 0, "atol": 0}), (wrong, {"rtol": 0, "atol": 0.5}), (wrong, {"rtol": 0.01, "atol": 0.1}),
            (reference[:2], {"rtol": 0, "atol": 0}), (reference.double(), {"rtol": 0, "atol": 0})]
        for other, rule in cases:
            with self.assertRaises(AssertionError) as theirs:
                torch.testing.assert_close(other, reference, **rule)
            ours = self.text(reference, other, **(rule if any(rule.values()) else {}))
            expected = str(theirs.exception).split("\n")
            if "attribute" in expected[0]:  # ours has the reference first, as the arguments are
                lines = (expected[0], ours.split("\n")[0])
                both = [sorted(re.findall(r"\w[\w.]*\w(?:\(.*?\))?", line)) for line in lines]
                self.assertEqual(*both)
                continue
            self.assertEqual(ours.split("\n")[:3], expected[:3])
            for line in expected[3:5]:
                # Theirs has an index for each of the two differences, ours that of the worst element.
                head, allowed = line.split(" at index")[0], re.search(r"\(up to .*\)", line)
                self.assertIn(head, ours)
                self.assertIn(allowed.group(0) if allowed else "", ours)

    def test_types_of_torch(self) -> None:
        import torch

        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool):
            value = torch.tensor([1, 0, 1]).to(dtype)
            assert_same(value, value.clone())
            other = torch.tensor([1, 1, 1]).to(dtype)
            self.assertIn("Mismatched elements: 1 / 3 (33.3%)", self.text(value, other))

    def test_a_distributed_checkpoint_is_converted(self) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        weights = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
        dcp.save(dict(weights), checkpoint_id=self.path / "dcp")
        assert_same(weights, self.path / "dcp")
        self.assertIn("item 'b'", self.text({**weights, "b": torch.zeros(3)}, self.path / "dcp"))

    def test_parameters_views_and_modules(self) -> None:
        import torch

        layer = torch.nn.Linear(3, 2)
        assert_same(layer.state_dict(), dict(layer.named_parameters()))
        assert_same(layer.weight.t().contiguous(), layer.weight.t())
        with self.assertRaisesRegex(TypeError, "module.state_dict"):
            assert_same(layer.state_dict(), layer)


def dtensors(rank: int) -> list[str]:
    """What each of four ranks finds, in one process group."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from anyrank.tests.torch_names import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(35.0).reshape(5, 7)
    found = []
    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())):
        held = distribute_tensor(full, mesh, placements)
        assert_same(full, held)
        assert_same(held, full)
        assert_same({"w": full.numpy()}, {"w": held})
        if placements[0] != placements[1]:  # torch warns of the other way
            assert_same(held, distribute_tensor(full, mesh, (Replicate(), Replicate())))
    assert_same(full, DTensor.from_local(full / 2, mesh, (Replicate(), Partial()), run_check=False))
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder, "full.safetensors")
        _safetensors.write(dump, {"w": entry_of(full)})
        assert_same(dump, {"w": distribute_tensor(full, mesh, (Shard(0), Shard(1)))})
        assert_same({"w": distribute_tensor(full, mesh, (Shard(1), Replicate()))}, anyrank.open_dump(dump))
    wrong = distribute_tensor(full, mesh, (Shard(0), Shard(1)))
    if rank == 3:
        wrong.to_local()[0, 0] += 1
    for value in (full, {"w": full}):
        try:
            assert_same(value, {"w": wrong} if isinstance(value, dict) else wrong)
            found.append("")
        except AssertionError as error:
            found.append(str(error))
    return found


@needs("torch", "numpy")
class DTensors(unittest.TestCase):
    def test_a_rank_compares_its_own_part(self) -> None:
        import torch

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            self.skipTest("no gloo in this torch")
        found = anyrank.ranks.spawn(4, dtensors)
        self.assertEqual(found[:3], [["", ""]] * 3)
        self.assertIn("Mismatched elements: 1 / 6", found[3][0])
        self.assertTrue(all("DTensor   the part of rank 3" in text for text in found[3]))


if __name__ == "__main__":
    unittest.main()
