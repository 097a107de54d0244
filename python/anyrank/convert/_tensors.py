# SPDX-License-Identifier: Apache-2.0
"""Tensors of other people's files: views of mapped bytes, without torch or numpy. Bits are copied, never computed."""

from __future__ import annotations

import dataclasses
import math
import mmap
import typing

from anyrank._safetensors import SIZES


def row_major(shape: typing.Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without gaps."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


@dataclasses.dataclass(frozen=True)
class View:
    """Elements of a storage: element (i, j, ..) is at offset + i*strides[0] + j*strides[1] + .., in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: memoryview
    offset: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def select(self, index: int) -> View:
        """Row `index` of the first dimension, which is then gone."""
        return View(self.dtype, self.shape[1:], self.strides[1:], self.storage, self.offset + index * self.strides[0])

    def narrow(self, dim: int, start: int, count: int) -> View:
        """[start, start + count) of a dimension."""
        shape = (*self.shape[:dim], count, *self.shape[dim + 1:])
        return View(self.dtype, shape, self.strides, self.storage, self.offset + start * self.strides[dim])

    def flat(self, start: int, shape: tuple[int, ...]) -> View:
        """Elements from `start` on of a tensor without gaps, as another shape."""
        assert self.strides == row_major(self.shape) or self.count == 0
        return View(self.dtype, shape, row_major(shape), self.storage, self.offset + start)

    def bytes(self) -> memoryview:
        """The elements, row-major: those of the file where they lie so, else a copy."""
        size = SIZES[self.dtype]
        solid = self.count <= 1 or all(n == 1 or stride == packed for n, stride, packed in
                                       zip(self.shape, self.strides, row_major(self.shape)))
        if solid:
            return self.storage[self.offset * size:(self.offset + self.count) * size]
        out = bytearray(self.count * size)
        self.copy_into(memoryview(out), row_major(self.shape), 0)
        return memoryview(out)

    def release(self) -> None:
        """Lets the mapped file's pages go, which would count as memory of this process."""
        file = self.storage.obj
        if isinstance(file, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and self.count * SIZES[self.dtype] >= 1 << 20:
            file.madvise(mmap.MADV_DONTNEED)

    def copy_into(self, out: memoryview, strides: typing.Sequence[int], offset: int) -> None:
        """Copies the elements to `out`, whose elements have these strides. The last dimension has no gaps there."""
        size = SIZES[self.dtype]
        if self.count == 0:
            return
        if not self.shape:
            out[offset * size:(offset + 1) * size] = self.storage[self.offset * size:(self.offset + 1) * size]
            return
        if len(self.shape) > 1:
            for i in range(self.shape[0]):
                self.select(i).copy_into(out, strides[1:], offset + i * strides[0])
            return
        n, step = self.shape[0], self.strides[0]
        target = out[offset * size:(offset + n) * size]
        if step == 1 or n == 1:
            target[:] = self.storage[self.offset * size:(self.offset + n) * size]
            return
        for k in range(size):  # byte k of every element: as many slices as an element has bytes
            if step == 0:
                target[k::size] = bytes([self.storage[self.offset * size + k]]) * n
            else:
                begin = self.offset * size + k
                target[k::size] = self.storage[begin:begin + (n - 1) * step * size + 1:step * size]


def flat_boxes(shape: tuple[int, ...], start: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes, (offset, extent), of elements [start, start + count) of a tensor, row-major, in that order: the end of
    a row, rows, the beginning of one."""
    if count == 0:
        return []
    if len(shape) <= 1:
        return [((start,) * len(shape), (count,) * len(shape))]
    row = math.prod(shape[1:])
    row_index, inside = divmod(start, row)
    boxes = []
    if inside or count < row:
        part = min(count, row - inside)
        boxes += [((row_index, *offset), (1, *extent)) for offset, extent in flat_boxes(shape[1:], inside, part)]
        row_index, count = row_index + 1, count - part
    if count >= row:
        boxes.append(((row_index, *(0,) * (len(shape) - 1)), (count // row, *shape[1:])))
        row_index, count = row_index + count // row, count % row
    if count:
        boxes += [((row_index, *offset), (1, *extent)) for offset, extent in flat_boxes(shape[1:], 0, count)]
    return boxes
