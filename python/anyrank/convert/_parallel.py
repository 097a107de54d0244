# SPDX-License-Identifier: Apache-2.0
"""How tensor-parallel ranks cut parameters whose files do not say it: by the names that Megatron, DeepSpeed and Hugging
Face give them, or as the caller says."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing

from anyrank._errors import AnyrankError

Box = typing.Tuple[typing.Tuple[int, ...], typing.Tuple[int, ...]]  # offset, extent

_COLUMN = (r"linear_qkv|query_key_value|linear_q|linear_kv|linear_q_up_proj|linear_kv_up_proj|linear_fc1|dense_h_to_4h|"
           r"q_proj|k_proj|v_proj|gate_proj|up_proj|query|key_value|key")
_ROW = r"linear_proj|linear_fc2|dense_4h_to_h|dense|o_proj|down_proj"
# The first pattern that is found in a name decides: its dimension, None for a copy.
_CUTS: tuple[tuple[str, int | None], ...] = (
    (r"norm|layer_norm_(weight|bias)$|router|position_embeddings|\.gate\.weight$|rotary", None),
    (rf"\.({_COLUMN})\.(weight|bias)$", 0),
    (rf"\.({_ROW})\.weight$", 1),
    (rf"\.({_ROW})\.bias$", None),
    (r"word_embeddings\.weight$|output_layer\.(weight|bias)$", 0),
)
_GATED = re.compile(r"\.(linear_fc1|dense_h_to_4h)\.(weight|bias)$")


@dataclasses.dataclass
class Cuts:
    """Who decides along which dimension a name is cut; the caller's globs come first."""

    shard: typing.Mapping[str, int | None]
    gated: bool = False  # fc1 is gate and up, of each of which a rank has a piece
    patterns: tuple[tuple[str, int | None], ...] = ()  # regular expressions that the checkpoint has itself
    rest: int | None = None  # with patterns: the dimension of what none of them matches
    unknown: tuple[str, ...] = ()  # the checkpoint's patterns of what is cut in another way than along a dimension

    def knows(self, name: str, dims: int) -> bool:
        try:
            self.dimension(name, dims)
        except AnyrankError:
            return False
        return True

    def dimension(self, name: str, dims: int) -> int | None:
        for glob, dim in self.shard.items():
            if fnmatch.fnmatchcase(name, glob):
                return dim
        if any(re.match(pattern, name) for pattern in self.unknown):
            raise AnyrankError(f"{name!r} is cut over tensor-parallel ranks in a way that is not supported: not evenly "
                               f"along one dimension")
        if self.patterns:
            return next((dim for pattern, dim in self.patterns if re.match(pattern, name)), self.rest)
        for pattern, dim in _CUTS:
            if re.search(pattern, name):
                return dim
        raise AnyrankError(f"how tensor-parallel ranks cut {name!r} is not known by its name: say it with "
                           f"--shard '{name}=0' (a dimension) or --shard '{name}=copy'" + (
                               "" if dims > 1 else "; of one dimension"))

    def place(self, name: str, shapes: list[tuple[int, ...]], rank: int, box: Box) -> tuple[tuple[int, ...], list[tuple[
            Box, tuple[int, ...]]]]:
        """Of tensor-parallel rank `rank` and a box of its tensor, where shapes are those of all ranks: the full shape,
        and the boxes of the full tensor with the offset of each in `box`."""
        offset, extent = box
        dim = self.dimension(name, len(offset)) if len(shapes) > 1 and offset else None
        if dim is None:
            if any(shape != shapes[0] for shape in shapes):
                raise AnyrankError(f"{name!r} should be a copy on each tensor-parallel rank, and has the shapes "
                                   f"{', '.join(str(list(shape)) for shape in shapes)}")
            return shapes[0], [((offset, extent), (0,) * len(offset))]
        if dim >= len(offset) or any(shape[:dim] + shape[dim + 1:] != shapes[0][:dim] + shapes[0][dim + 1:]
                                     for shape in shapes):
            raise AnyrankError(f"{name!r}: tensor-parallel ranks hold "
                               f"{', '.join(str(list(shape)) for shape in shapes)}, "
                               f"which do not fit along dimension {dim}")
        blocks = 2 if self.gated and _GATED.search(name) else 1
        if any(shape[dim] % blocks for shape in shapes):
            raise AnyrankError(f"{name!r}: {shapes[rank][dim]} rows are not a gate and an up projection of one size")
        sizes = [shape[dim] // blocks for shape in shapes]
        full = (*shapes[0][:dim], blocks * sum(sizes), *shapes[0][dim + 1:])
        out = []
        for block in range(blocks):
            local = block * sizes[rank]
            begin, end = max(offset[dim], local), min(offset[dim] + extent[dim], local + sizes[rank])
            if begin < end or extent[dim] == 0:
                full_offset = block * sum(sizes) + sum(sizes[:rank]) + begin - local
                inside = tuple(begin - offset[dim] if d == dim else 0 for d in range(len(offset)))
                out.append((((*offset[:dim], full_offset, *offset[dim + 1:]), (*extent[:dim], max(0, end - begin),
                                                                       *extent[dim + 1:])), inside))
        return full, out
