# SPDX-License-Identifier: Apache-2.0
"""A sketch's figures by torch operations, where the tensor is: on a GPU nothing but these few kilobytes are copied.

sketch.h defines the figures. Digests and counts are those of the C kernel, bit for bit; sums may differ in their last
bits, as a device adds up in an order of its own.
"""

from __future__ import annotations

import functools
import math
import struct
import typing

import torch

from anyrank.capture._places import Box

GROUP, BUCKETS, BLOCKS, LEAST, ROWS = 64, 32, 64, 4096, 1024  # as sketch.h has them
AT_ONCE = 1 << 22  # elements, so that what is computed of each fits beside the model
M32 = 0xffffffff
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _right(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Shifts 64 bits without a sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _random(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64 of each number."""
    x = x + _signed(0x9e3779b97f4a7c15)
    x = (x ^ _right(x, 30)) * _signed(0xbf58476d1ce4e5b9)
    x = (x ^ _right(x, 27)) * _signed(0x94d049bb133111eb)
    return x ^ _right(x, 31)


@functools.lru_cache(maxsize=8)
def _lanes(device: torch.device) -> torch.Tensor:
    """Returns the factor of each lane of a group in the digest."""
    lane = torch.arange(GROUP, dtype=torch.int64, device=device)
    return (_random((1 << 32) + lane) | 255) - 254 + 4 * lane


def _spread(word: torch.Tensor) -> torch.Tensor:
    """Maps 32 bits one-to-one so that a change of any bit reaches the lowest ones."""
    word = ((word ^ (word >> 16)) * 0x9e3779b1) & M32
    return word ^ (word >> 15)


class Figures:
    """Of a full tensor of this shape, of which boxes are added."""

    def __init__(self, shape: typing.Sequence[int], device: torch.device) -> None:
        self.shape, self.device = tuple(shape), device
        n, line_length = math.prod(self.shape), self.shape[-1] if self.shape else 1
        self.block = max(LEAST, -(-(-(-n // BLOCKS)) // GROUP) * GROUP)
        blocks = -(-n // self.block)
        lines = n // line_length if line_length else 0
        self.row = line_length * -(-lines // ROWS) if len(self.shape) > 1 and n else 0
        rows = -(-n // self.row) if self.row else 0
        self.numbers = torch.zeros(6, dtype=torch.int64, device=device)  # digest, count, zeros, nan, inf, places
        self.ends = torch.tensor([(1 << 63) - 1, -1], device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # sum, squares, largest
        self.bucket = torch.zeros(blocks * BUCKETS, dtype=torch.float64, device=device)
        self.rows = torch.zeros(rows, dtype=torch.int64, device=device)

    def add(self, tensor: torch.Tensor, box: Box) -> None:
        """Adds the elements of a rank's tensor at the place that a box says."""
        part = tensor.detach()[tuple(slice(offset, offset + n) for offset, n in zip(box.local, box.extent))].reshape(-1)
        for begin in range(0, part.numel(), AT_ONCE):
            chunk = part[begin:begin + AT_ONCE]
            remaining = torch.arange(begin, begin + chunk.numel(), dtype=torch.int64, device=self.device)
            index, weight = torch.zeros_like(remaining), 1
            for extent, start, full in reversed(list(zip(box.extent, box.full, self.shape))):
                index += (remaining % extent + start) * weight
                remaining, weight = remaining // extent, weight * full
            self._add(chunk, index)

    def _add(self, values: torch.Tensor, index: torch.Tensor) -> None:
        group, lane = index >> 6, index & (GROUP - 1)
        key = _random(group)
        signs = _random(key)
        rotation = _random(signs)
        word = values.view(_OF_BYTES[values.element_size()]).to(torch.int64)
        if values.element_size() == 2 and values.dtype != torch.int16:
            word = word & 0xffff
        mixed = _spread(word & M32) * _lanes(self.device)[lane] * (key | 1)
        if values.element_size() == 8:
            mixed += _spread(_right(word, 32)) * _lanes(self.device)[lane] * (_random(~group) | 1)
        wide = values.to(torch.float64)
        nan, inf, zero = wide.isnan(), wide.isinf(), wide == 0
        finite = torch.where(nan | inf, 0.0, wide)
        kind = torch.where(nan, 1, torch.where(wide > 0, 2, 3))
        places = torch.where(nan | inf, _random(4 * index + kind), 0)
        self.numbers += torch.stack([mixed.sum(), torch.tensor(values.numel(), device=self.device), zero.sum(),
                                     nan.sum(), inf.sum(), places.sum()])
        filled = index[~zero]
        if filled.numel():
            self.ends = torch.stack([torch.minimum(self.ends[0], filled.min()),
                                     torch.maximum(self.ends[1], filled.max())])
        self.sums = torch.stack([self.sums[0] + finite.sum(), self.sums[1] + finite.square().sum(),
                                 torch.maximum(self.sums[2], finite.abs().max())])
        sign = 1.0 - 2.0 * ((signs >> lane) & 1).to(torch.float64)
        turn = torch.where(lane < BUCKETS, rotation & M32, _right(rotation, 32))
        self.bucket.index_add_(0, index // self.block * BUCKETS + (lane + turn) % BUCKETS, sign * finite)
        if self.row:
            self.rows.index_add_(0, index // self.row, mixed & M32)

    def encoded(self) -> bytes:
        """Returns the sketch as ar_sketch_encode writes it."""
        digest, *counts = self.numbers.tolist()
        first_index, last_index = self.ends.tolist()
        empty = first_index > last_index
        *counts, places = counts
        ends = ((1 << 64) - 1, 0) if empty else (first_index, last_index)
        words = [digest & ((1 << 64) - 1), *counts, places & ((1 << 64) - 1), *ends]
        blocks = self.bucket.view(-1, BUCKETS)
        written = (blocks.view(torch.int64) != 0).any(1)
        nonzero_rows = (self.rows != 0).nonzero()
        start, end = (int(nonzero_rows[0]), int(nonzero_rows[-1]) + 1) if nonzero_rows.numel() else (0, 0)
        mask = sum(1 << i for i in written.nonzero().flatten().tolist())
        bucket: bytes = blocks[written].cpu().numpy().tobytes()
        rows: bytes = (self.rows[start:end] & M32).cpu().numpy().astype("<u4").tobytes()
        return struct.pack("<8Q3dQII", *words, *self.sums.tolist(), mask, start, end - start) + bucket + rows
