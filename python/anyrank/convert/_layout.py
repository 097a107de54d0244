# SPDX-License-Identifier: Apache-2.0
"""Which part of each parameter a rank holds: by config.json and the names of Hugging Face, as anyrank's layers cut them
(parallelism.md)."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing

from anyrank._errors import AnyrankError

Box = typing.Tuple[typing.Tuple[int, ...], typing.Tuple[int, ...]]  # offset, extent

# Modules by their name, and parameters that are no module's.
_ROLES = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "query_key_value", "wq"), "query"),  # rows of whole heads
    **dict.fromkeys(("k_proj", "v_proj", "wk", "wv"), "key"),
    **dict.fromkeys(("qkv_proj", "c_attn"), "packed"),
    **dict.fromkeys(("o_proj", "dense", "wo"), "out"),
    **dict.fromkeys(("gate_proj", "up_proj", "c_fc", "dense_h_to_4h", "w1", "w3"), "up"),
    **dict.fromkeys(("down_proj", "dense_4h_to_h", "w2"), "down"),
    **dict.fromkeys(("embed_tokens", "wte", "embed_in", "embed"), "tokens"),
    **dict.fromkeys(("lm_head", "embed_out"), "head"),
    "gate_up_proj": "gate_up", "c_proj": "out", "wpe": "positions", "sinks": "sinks",
    "gate_up_proj_bias": "gate_up", "down_proj_bias": "down",
}
_COPIED = re.compile(r"norm$|^ln_?\w$|^gate$|^router$|^shared_expert_gate$|^q_a_proj$|^kv_a_proj_with_mqa$|^eh_proj$|"
                     r"^e_score_correction_bias$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_COLUMNS, _ROWS = ("query", "key", "packed", "up", "gate_up"), ("out", "down")
_OUTSIDE = ("tokens", "positions", "head")


@dataclasses.dataclass(frozen=True)
class Cut:
    """How tensor-parallel ranks divide a tensor. dim None: each has a copy. heads: stay whole; blocks: lie packed along
    dim, and are divided each by itself; copied: of more ranks than heads neighbours hold copies; uneven: parts of
    ceil(n / ranks)."""

    dim: int | None = None
    heads: int = 0
    blocks: tuple[int, ...] = ()
    copied: bool = False
    uneven: bool = False

    def boxes(self, name: str, shape: tuple[int, ...], tp: int, rank: int) -> tuple[list[Box], int, int]:
        """The rank's boxes of the full tensor, which copy they are, and of how many."""
        if self.dim is None or tp == 1:
            return [((0,) * len(shape), shape)], rank, tp
        dim = self.dim
        blocks = self.blocks or (shape[dim],)
        if self.heads and self.heads % tp and not (self.copied and tp % self.heads == 0):
            copied = (", nor copied evenly to,", " or is a multiple of it") if self.copied else ("", "")
            label = f"{blocks[self.blocks != ()]} is {self.heads} heads{' in each block' if self.blocks else ''}"
            raise AnyrankError(f"{name}: dimension {dim} of {label}, which cannot be split over{copied[0]} tp={tp} "
                               f"ranks; use a tp that divides {self.heads}{copied[1]}")
        copies = tp // self.heads if self.copied and tp > self.heads else 1
        parts, part_index, start, ranges = tp // copies, rank // copies, 0, []
        for block in blocks:
            if block % parts and not self.uneven:
                raise AnyrankError(f"{name}: dimension {dim} of {block} cannot be split over tp={parts} ranks; use a "
                                   "tp that divides it")
            part_size = -(-block // parts)
            begin = min(part_index * part_size, block)
            ranges.append((start + begin, min(part_size, block - begin)))
            start += block
        merged: list[tuple[int, int]] = []
        for begin, count in ranges:  # of one rank blocks that go on where another ends are one
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + count
            else:
                merged.append((begin, count))
        return [((*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)), (*shape[:dim], count, *shape[dim + 1:]))
                for begin, count in merged], rank % copies, copies


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a name says of a tensor. parameter: whose weight or state it is; known: whether the names of a layer's parts
    have it."""

    name: str
    parameter: str
    role: str
    layer: int | None
    expert: int | None  # one of a layer's; None with `stacked`: all of them, along dimension 0
    stacked: bool
    bias: bool

    @property
    def known(self) -> bool:
        return self.role != ""

    @property
    def state(self) -> bool:
        return self.name.startswith(self.parameter + ".")


def parameter_of(name: str) -> Parameter:
    """Reads a tensor's name: model.layers.0.self_attn.q_proj.weight, with .exp_avg or :grad behind it for a state."""
    parts = name.partition(":")[0].split(".")
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    for i in range(len(parts) - 1, -1, -1):
        role = _ROLES.get(parts[i], "copy" if _COPIED.search(parts[i]) else "")
        stacked = i > 0 and parts[i - 1] == "experts"
        kind = parts[i + 1] if i + 1 < len(parts) else ""
        alone = stacked or role == "sinks" or parts[i] == "e_score_correction_bias"
        if not role or not (alone or kind in ("weight", "bias")) or (role in _OUTSIDE and layer):
            continue
        if parts[i] == "c_proj" and "mlp" in parts:
            role = "down"
        return Parameter(name, ".".join(parts[:i + 1 if alone else i + 2]), role, int(layer[1]) if layer else None,
                         int(expert[1]) if expert else None, stacked,
                         parts[i].endswith("_bias") if alone else kind == "bias")
    return Parameter(name, name, "", int(layer[1]) if layer else None, None, False, False)


@dataclasses.dataclass
class Layout:
    """A model's ranks: rank (p, e, t) has the number (p * ep + e) * tp + t. shapes: of the source's tensors."""

    config: typing.Mapping[str, typing.Any]
    shapes: typing.Mapping[str, tuple[int, ...]]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    stages: tuple[int, ...] = ()
    embedding_hidden: bool = False
    shard: typing.Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.pp == 1 and (self.virtual_stages > 1 or self.stages):
            raise AnyrankError(f"{'layers of stages' if self.stages else 'virtual stages'} without a pipeline: give a "
                               "pp of at least 2")
        if self.embedding_hidden and self.tp == 1:
            raise AnyrankError("an embedding split along the hidden dimension without ranks that split it: give a tp "
                               "of at least 2")
        self.layers = self._stage_layers() if self.pp > 1 else ()
        if self.ep > 1 and self.experts % self.ep:
            raise AnyrankError(f"{self.experts} experts cannot be split over ep={self.ep} ranks; use an ep that "
                               f"divides {self.experts}")

    # --- config.json ---

    def size(self, *keys: str) -> int:
        """The first of these keys that the config has."""
        value = next((self.config[key] for key in keys if self.config.get(key) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AnyrankError(f"config.json: {keys[0]!r} is {value!r}, expected a whole number from 1")
        return value

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", "n_head")

    @property
    def experts(self) -> int:
        return self.size("num_experts", "num_local_experts", "n_routed_experts")

    @property
    def tied(self) -> bool:
        """Without the key: whether there is no head."""
        return bool(self.config.get("tie_word_embeddings", not any(parameter_of(name).role == "head"
                                                                   for name in self.shapes)))

    # --- stages of a pipeline ---

    def _stage_layers(self) -> tuple[int, ...]:
        """The number of each stage's layers: given, or even, and those in the middle have one more."""
        layers, n = self.size("num_hidden_layers", "n_layer"), self.pp * self.virtual_stages
        if self.stages:
            if len(self.stages) != n:
                raise AnyrankError(f"layers are given for {len(self.stages)} stages of {n}: give one number for each")
            if sum(self.stages) != layers:
                raise AnyrankError(f"the layers given for {n} stages are {sum(self.stages)}; the model has {layers}")
            empty = next((i for i in range(1, n - 1) if self.stages[i] == 0), None)
            if empty is not None:
                raise AnyrankError(f"stage {empty} has no layers; only the first, which has the embedding, and the "
                                   "last, which has the head, can do without")
            return self.stages
        if n > layers:
            raise AnyrankError(f"{layers} layers cannot be split over {n} stages (pp={self.pp}); use at most one stage "
                               "for each layer")
        min_layers, longer = divmod(layers, n)
        begin = (n - longer) // 2
        return tuple(min_layers + (begin <= i < begin + longer) for i in range(n))

    def pipeline_ranks(self, param: Parameter) -> tuple[int, ...]:
        """Those that hold it."""
        if self.pp == 1:
            return (0,)
        if param.layer is not None:
            end, stage = self.layers[0], 0
            while stage + 1 < len(self.layers) and param.layer >= end:  # those of later predictions are on the last one
                stage += 1
                end += self.layers[stage]
            return (stage % self.pp,)
        if not param.known:
            return tuple(range(self.pp))
        if param.role == "tokens" and (self.tied or self.config.get("num_nextn_predict_layers")):
            return 0, self.pp - 1
        return (0,) if param.role in ("tokens", "positions") else (self.pp - 1,)

    # --- tensor-parallel ranks ---

    def cut(self, param: Parameter, shape: tuple[int, ...]) -> Cut:
        """How tp divides it."""
        for glob, dim in self.shard.items():
            if fnmatch.fnmatchcase(param.name, glob):
                if dim is not None and dim >= len(shape):
                    raise AnyrankError(f"{param.name}: has {len(shape)} dimensions, none of them is {dim} (shard)")
                return Cut(dim)
        if self.tp == 1 or not shape or self.shapes.get(param.parameter, shape) != shape:
            return Cut()  # a state of another shape than its parameter's, as a step
        if param.role in ("tokens", "head"):
            hidden = param.role == "tokens" and self.embedding_hidden
            return Cut(1) if hidden else Cut(0, uneven=True)
        if param.role == "sinks":
            return Cut(0, self.heads)
        if param.stacked:
            return self._cut_experts(param, shape)
        if param.role not in _COLUMNS + _ROWS or (param.bias and param.role in _ROWS):
            return Cut()
        turned = self.config.get("model_type") == "gpt2" and not param.bias  # its weights are stored [in, out]
        dim = int((param.role in _ROWS) != turned)
        if dim >= len(shape):
            return Cut()
        return self._cut_linear(param, shape, dim)

    def _cut_linear(self, param: Parameter, shape: tuple[int, ...], dim: int) -> Cut:
        if param.role == "gate_up":
            return Cut(dim, blocks=(shape[dim] // 2, shape[dim] // 2))
        if param.role in ("up", "down"):
            return Cut(dim)
        heads = self.heads
        if param.role in ("query", "out"):
            return Cut(dim, heads)
        if param.role == "packed":
            keys = heads if self.config.get("num_key_value_heads") is None else self.size("num_key_value_heads")
            head_size, rest = divmod(shape[dim], heads + 2 * keys)
            if rest:
                raise AnyrankError(
                    f"{param.name}: dimension {dim} of {shape[dim]} is no {heads} + 2 * {keys} heads, as "
                    "config.json has them"
                )
            return Cut(dim, keys, (heads * head_size, keys * head_size, keys * head_size))
        queries = re.sub(r"\.w[kv]\.", ".wq.", re.sub(r"\.[kv]_proj\.", ".q_proj.", param.parameter))
        if queries in self.shapes:
            width = self.shapes[queries][0] // heads
        else:
            width = self.config.get("head_dim") or self.size("hidden_size") // heads
        if width < 1 or shape[dim] % width:
            raise AnyrankError(f"{param.name}: dimension {dim} of {shape[dim]} is no number of heads of {width}")
        return Cut(dim, shape[dim] // width, copied=True)

    def _cut_experts(self, param: Parameter, shape: tuple[int, ...]) -> Cut:
        """All experts of a layer: [E, 2F, h] and [E, h, F]; GPT-OSS's [E, h, 2F], gate and up column by column, and
        [E, F, h], with biases [E, 2F] and [E, h]."""
        columnwise = self.config.get("model_type") == "gpt_oss"
        if len(shape) < 2 or (param.bias and param.role == "down"):
            return Cut()
        if param.role == "down":
            return Cut(1 if columnwise else 2)
        if columnwise:
            return Cut(len(shape) - 1)
        return Cut(1, blocks=(shape[1] // 2, shape[1] // 2))

    # --- expert-parallel ranks ---

    def expert_ranks(self, param: Parameter, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Which of them hold it, and how many of its first dimension's experts each has; 0: all of it."""
        if self.ep == 1 or not (param.stacked or param.expert is not None):
            return tuple(range(self.ep)), 0
        local_experts = self.experts // self.ep
        if param.expert is not None:
            return (min(param.expert // local_experts, self.ep - 1),), 0
        return tuple(range(self.ep)), local_experts if shape and shape[0] == self.experts else 0

    def holders(self, param: Parameter, shape: tuple[int, ...]) -> typing.Iterator[tuple[int, list[Box], int, int]]:
        """Each rank that holds something of a full tensor: its number, boxes, which copy they are, and of how many."""
        pipeline, (expert_ranks, experts) = self.pipeline_ranks(param), self.expert_ranks(param, shape)
        cut = self.cut(param, shape)
        for place, p in enumerate(pipeline):
            for e in expert_ranks:
                for t in range(self.tp):
                    boxes, copy, copies = cut.boxes(param.name, shape, self.tp, t)
                    replica, replicas = place, len(pipeline)
                    if experts:
                        boxes = [((experts * e, *offset[1:]), (experts, *extent[1:])) for offset, extent in boxes]
                    else:
                        replica = place * len(expert_ranks) + expert_ranks.index(e)
                        replicas *= len(expert_ranks)
                    solid = [box for box in boxes if all(box[1])] if all(shape) else boxes[:1]
                    if solid:
                        yield (p * self.ep + e) * self.tp + t, solid, replica * copies + copy, copies * replicas
