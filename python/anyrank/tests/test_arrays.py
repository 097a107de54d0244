# SPDX-License-Identifier: Apache-2.0
"""Tensors, arrays and buffers as bytes, and back."""

from __future__ import annotations

import array
import math
import struct
import typing
import unittest

from anyrank import _arrays
from anyrank._safetensors import SIZES, Entry
from anyrank.tests import needs


class Buffers(unittest.TestCase):
    def test_numbers_and_buffers(self) -> None:
        cases: list[tuple[typing.Any, str, tuple[int, ...]]] = [
            (1.5, "F64", ()), (3, "I64", ()), (True, "BOOL", ()), ([[1, 2], [3, 4]], "I64", (2, 2)),
            ([1.0, 2], "F64", (2,)), ([], "I64", (0,)), (array.array("f", [1, 2]), "F32", (2,)),
            (memoryview(b"abcd").cast("B", [2, 2]), "U8", (2, 2))]
        for value, dtype, shape in cases:
            entry = _arrays.entry_of(value)
            self.assertEqual((entry.dtype, entry.shape), (dtype, shape), value)
            self.assertEqual(entry.data.nbytes, SIZES[dtype] * math.prod(shape))

    def test_what_is_no_tensor_is_refused(self) -> None:
        wrong: list[typing.Any] = ["text", {}, object(), [[1], [1, 2]], ["a"], memoryview(b"abcd")[::2]]
        for value in wrong:
            with self.assertRaises(TypeError, msg=repr(value)):
                _arrays.entry_of(value)

    def test_every_byte_counts(self) -> None:
        for size in (0, 1, 8, 13, 16):
            one = Entry("U8", (size,), memoryview(bytes(size)))
            self.assertTrue(_arrays.same_bytes(one, Entry("U8", (size,), memoryview(bytes(size)))))
            self.assertFalse(_arrays.same_bytes(one, Entry("I8", (size,), one.data)))
            for at in range(size):
                other = bytearray(size)
                other[at] = 1
                self.assertFalse(_arrays.same_bytes(one, Entry("U8", (size,), memoryview(other))))

    def test_nan_is_seen_in_the_bits_of_every_type(self) -> None:
        for dtype, bits, nan in [("F64", "<d", math.nan), ("F32", "<f", math.nan), ("F16", "<e", math.nan),
                                 ("BF16", "<H", 0xFFC0), ("F8_E4M3", "B", 0xFF), ("F8_E5M2", "B", 0x7D),
                                 ("F8_E8M0", "B", 0xFF)]:
            for value, has in [(nan, True), (0, False)]:
                data = struct.pack(bits, 0) + struct.pack(bits, value)
                self.assertEqual(_arrays.has_nan(Entry(dtype, (2,), memoryview(data))), has, dtype)
        infinite = Entry("F32", (2,), memoryview(struct.pack("<ff", math.inf, -math.inf)))
        self.assertFalse(_arrays.has_nan(infinite))
        self.assertFalse(_arrays.has_nan(Entry("BF16", (1,), memoryview(b"\x80\xff"))))
        self.assertFalse(_arrays.has_nan(Entry("F8_E5M2", (1,), memoryview(b"\xfc"))))


@needs("numpy")
class Numpy(unittest.TestCase):
    def test_there_and_back(self) -> None:
        import numpy

        for name, dtype in _arrays.NAMES.items():
            if not hasattr(numpy, name) and name != "bool":
                continue
            value: typing.Any = numpy.arange(6).reshape(2, 3).astype(name)
            entry = _arrays.entry_of(value)
            self.assertEqual((entry.dtype, entry.shape), (dtype, (2, 3)))
            back = _arrays.numpy_of(entry)
            self.assertEqual(back.dtype, value.dtype)
            self.assertTrue((back == value).all())

    def test_memory_is_shared_where_it_is_contiguous(self) -> None:
        import numpy

        value: typing.Any = numpy.zeros(4, dtype="f4")
        entry = _arrays.entry_of(value)
        value[1] = 2
        self.assertEqual(_arrays.numpy_of(entry)[1], 2)

    def test_views_byte_orders_and_scalars(self) -> None:
        import numpy

        value = numpy.arange(6.0).reshape(2, 3).T
        self.assertTrue((_arrays.numpy_of(_arrays.entry_of(value)) == value).all())
        swapped: typing.Any = numpy.arange(3).astype(">i4")
        self.assertTrue((_arrays.numpy_of(_arrays.entry_of(swapped)) == swapped).all())
        self.assertEqual(_arrays.entry_of(numpy.float32(2)).shape, ())
        self.assertEqual(_arrays.entry_of(numpy.zeros(2, dtype=complex)).shape, (2, 2))
        with self.assertRaises(TypeError):
            _arrays.entry_of(numpy.array(["a"]))

    def test_bfloat16_is_read_as_float32(self) -> None:
        entry = Entry("BF16", (2,), memoryview(struct.pack("<HH", 0x3F80, 0xC000)))
        self.assertEqual(list(_arrays.numpy_of(entry)), [1.0, -2.0])


@needs("torch")
class Torch(unittest.TestCase):
    def test_there_and_back(self) -> None:
        import torch

        for name, dtype in _arrays.NAMES.items():
            if not hasattr(torch, name):
                continue
            value = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
            entry = _arrays.entry_of(value)
            self.assertEqual((entry.dtype, entry.shape), (dtype, (2, 3)))
            back = _arrays.torch_of(entry)
            self.assertEqual((back.dtype, back.shape), (value.dtype, value.shape))
            self.assertTrue(torch.equal(back.view(torch.uint8), value.view(torch.uint8)))

    def test_memory_is_shared_and_kept(self) -> None:
        import torch

        value = torch.zeros(4)
        entry = _arrays.entry_of(value)
        value[1] = 2
        self.assertEqual(struct.unpack("<4f", entry.data)[1], 2)
        entry = _arrays.entry_of(torch.full((1000,), 7.0))  # nobody else holds it
        torch.zeros(1000)
        self.assertEqual(set(struct.unpack("<1000f", entry.data)), {7.0})

    def test_views_empty_ones_and_those_of_autograd(self) -> None:
        import torch

        value = torch.arange(6.0).reshape(2, 3).t()
        self.assertTrue(torch.equal(_arrays.torch_of(_arrays.entry_of(value)), value))
        self.assertEqual(_arrays.torch_of(_arrays.entry_of(torch.empty(0, 3))).shape, (0, 3))
        self.assertEqual(_arrays.entry_of(torch.nn.Parameter(torch.tensor(1.0))).shape, ())
        self.assertEqual(_arrays.entry_of(torch.zeros(2, dtype=torch.complex128)).shape, (2, 2))
        conjugate = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
        self.assertEqual(struct.unpack("<2f", _arrays.entry_of(conjugate).data), (1, -2))
        for wrong in (torch.zeros(2, 2).to_sparse(), torch.empty(2, device="meta")):
            with self.assertRaises(TypeError):
                _arrays.entry_of(wrong)


if __name__ == "__main__":
    unittest.main()
