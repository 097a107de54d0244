# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM: torch_dist folders of megatron-core, and mp_rank_XX[_YYY]/model_optim_rng.pt."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import typing

from anyrank._errors import AnyrankError
from anyrank.convert import dcp
from anyrank.convert._parallel import Cuts
from anyrank.convert._pickles import Placeholder, attribute, load, nested
from anyrank.convert._pieces import Checkpoint, Piece
from anyrank.convert._tensors import View, flat_boxes

_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..*)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq|momentum_buffer)\.(.+)")
_ROLES = {"param": "master", "fp32_param": "master", "exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}


# --- torch_dist ---------------------------------------------------------
def _unflatten(item: dcp.Item, full: tuple[int, ...]) -> list[dcp.Item]:
    """Optimizer states of megatron-core before 0.14: a tensor [X, Y] of which each rank has [x, y] is stored as
    [X/x, Y/y, x*y], and the last dimension is divided by stretches of elements."""
    grid, (start, count) = item.shape[:-1], (item.offset[-1], item.extent[-1])
    if len(grid) != len(full) or any(n == 0 or size % n for n, size in zip(grid, full)) or set(item.extent[:-1]) - {1}:
        raise AnyrankError(f"{item.origin}: {item.key!r} {list(item.shape)} is no flattened tensor {list(full)}")
    local = tuple(size // n for n, size in zip(grid, full))
    out, flat_offset = [], 0
    for offset, extent in flat_boxes(local, start, count):
        n = 1
        for size in extent:
            n *= size

        def read(flat_offset: int = flat_offset, extent: tuple[int, ...] = extent) -> View:
            return item.read().flat(flat_offset, extent)

        begin = tuple(cell * size + local_offset for cell, size, local_offset in zip(item.offset[:-1], local, offset))
        out.append(item._replace(shape=full, offset=begin, extent=extent, read=read))
        flat_offset += n
    return out


def _unstack(item: dcp.Item) -> list[tuple[str, dcp.Item]]:
    """decoder.layers.mlp.linear_fc1.weight of all layers in one, [layers, ..]: a tensor for each layer."""
    name = item.key
    stacked = re.search(r"(?:^|\.)layers\.(?!\d)", name)
    if not stacked or not item.shape:
        return [(name, item)]
    out = []
    for i in range(item.extent[0]):
        def read(i: int = i) -> View:
            return item.read().select(i)

        layer = f"{name[:stacked.end()]}{item.offset[0] + i}.{name[stacked.end():]}"
        out.append((layer,
    item._replace(shape=item.shape[1:],
    offset=item.offset[1:],
    extent=item.extent[1:],
     read=read)))
    return out


def read_dist(folder: str, placeholders: typing.Collection[str]) -> Checkpoint:
    """A torch_dist checkpoint of megatron-core."""
    metadata = dcp.read_metadata(folder, placeholders)
    items, skipped_count = dcp.read_items(folder, metadata, placeholders)
    if not items:
        raise AnyrankError(f"{folder}: its .metadata lists no tensor")
    reformed = attribute(metadata, "mcore_data")
    checkpoint = Checkpoint("Megatron torch_dist")
    buckets = 0
    for stored_item in items:
        full = nested(reformed, stored_item.key, "nd_reformulated_orig_global_shape")
        for flat in _unflatten(stored_item, tuple(full)) if full else [stored_item]:
            buckets += ".bucket_idx_" in flat.key
            for name, item in _unstack(flat):
                found = _STATE.fullmatch(name)
                role = _ROLES[found.group(1)] if found else "" if name.startswith(
                    ("optimizer.", "chained_")) else "weight"
                checkpoint.pieces.append(Piece(item.rank, found.group(2) if found else name, role, item.dtype,
                                               item.shape,
                                               item.offset, item.extent, item.read, item.origin))
    if buckets:
        checkpoint.notes.append("the optimizer's state lies in buckets of the data-parallel ranks, which name no "
                                "parameter: they keep their own names; save with --dist-ckpt-optim-fully-reshardable")
    if skipped_count:
        checkpoint.notes.append(f"{skipped_count} entries that are no tensors are left out")
    common = os.path.join(folder, "common.pt")
    arguments = attribute(load(common, placeholders), "args") if os.path.isfile(common) else None
    checkpoint.mapping = _mapping(arguments, {piece.name for piece in checkpoint.pieces})
    return checkpoint


# --- mp_rank_XX ---------------------------------------------------------
@dataclasses.dataclass
class _File:
    tp: int
    pp: int
    path: str
    tensors: dict[str, View]  # by the model's names, layers counted over all stages
    chunks: list[dict[str, View]]  # as the file has them: one for each virtual stage


def _flatten(value: typing.Any, prefix: str = "") -> typing.Iterator[tuple[str, View]]:
    for key, entry in value.items() if isinstance(value, dict) else ():
        if isinstance(entry, View):
            yield f"{prefix}{key}", entry
        elif isinstance(entry, dict):
            yield from _flatten(entry, f"{prefix}{key}.")


def _read_file(folder: str, name: str, placeholders: typing.Collection[str]) -> tuple[_File, typing.Any]:
    path = os.path.join(folder, name, "model_optim_rng.pt")
    if not os.path.isfile(path):
        raise AnyrankError(f"MissingShard: {path} is missing")
    state = load(path, placeholders)
    if not isinstance(state, dict) or not ("model" in state or "model0" in state):
        raise AnyrankError(f"{path}: has no 'model': no checkpoint of Megatron's format torch")
    keys = ["model"] if "model" in state else [f"model{i}" for i in range(len(state)) if f"model{i}" in state]
    digits = [int(part) for part in name.split("_")[2:]]
    arguments = state.get("args")
    if (attribute(arguments, "expert_model_parallel_size") or 1) > 1 or len(digits) > 2:
        raise AnyrankError(f"{path}: experts in parallel are not supported in this format: convert the checkpoint to "
                           f"torch_dist with Megatron (--ckpt-convert-format torch_dist)")
    chunks = [dict(_flatten(state[key])) for key in keys]
    return _File(digits[0], digits[1] if len(digits) > 1 else 0, path, {}, chunks), arguments


def _number_layers(files: list[_File]) -> None:
    """Each stage counts its layers from 0; the model's numbers follow chunk after chunk, in each stage after stage."""
    for t in sorted({file.tp for file in files}):
        stages = sorted((file for file in files if file.tp == t), key=lambda file: file.pp)
        base: dict[str, int] = {}  # of each stack of layers: encoder's and decoder's are counted apart
        for v, stage in itertools.product(range(len(stages[0].chunks)), stages):
            if v >= len(stage.chunks):
                raise AnyrankError(
                    f"{stage.path}: has {len(stage.chunks)} virtual stages, {stages[0].path} {v + 1} or more")
            ends: dict[str, int] = {}
            for name, view in stage.chunks[v].items():
                found = _LAYER.fullmatch(name)
                if found:
                    stack, number = found.group(1), int(found.group(2))
                    ends[stack] = max(ends.get(stack, 0), number + 1)
                    name = f"{stack}{base.get(stack, 0) + number}{found.group(3)}"
                if name in stage.tensors:
                    raise AnyrankError(f"{stage.path}: {name!r} is in two virtual stages")
                stage.tensors[name] = view
            for stack, end in ends.items():
                base[stack] = base.get(stack, 0) + end


def read(folder: str, placeholders: typing.Collection[str], shard: typing.Mapping[str, int | None]) -> Checkpoint:
    """A checkpoint of Megatron's format torch, a file for each tensor- and pipeline-parallel rank."""
    names = [name for name in sorted(os.listdir(folder)) if re.fullmatch(r"mp_rank_\d+(_\d+)*", name)]
    read_files = [_read_file(folder, name, placeholders) for name in names]
    files, arguments = [file for file, _ in read_files], read_files[0][1]
    tps, pps = sorted({file.tp for file in files}), sorted({file.pp for file in files})
    size = {key: attribute(arguments, f"{key}_model_parallel_size") for key in ("tensor", "pipeline")}
    tp_size, stages = size["tensor"] or len(tps), size["pipeline"] or len(pps)
    present_ranks = {(file.tp, file.pp) for file in files}
    lost = next(((t, p) for t in range(tp_size) for p in range(stages) if (t, p) not in present_ranks), None)
    if lost or len(files) != tp_size * stages:
        raise AnyrankError(
            f"MissingShard: {folder}: {len(files)} folders mp_rank_*, {tp_size * stages} ranks wrote it"
            + (f"; none of tensor-parallel rank {lost[0]}, stage {lost[1]}" if lost else "")
        )
    _number_layers(files)
    checkpoint = Checkpoint("Megatron", mesh=[("pp", len(pps)), ("tp", len(tps))] if len(files) > 1 else [])
    cuts = Cuts(shard, gated=bool(attribute(arguments, "swiglu")))
    for file in files:
        peers = sorted((candidate for candidate in files if candidate.pp == file.pp), key=lambda peer: peer.tp)
        for name, view in file.tensors.items():
            if any(name not in peer.tensors for peer in peers):
                raise AnyrankError(f"{folder}: {name!r} is not in the file of every tensor-parallel rank")
            box = (0,) * len(view.shape), view.shape
            full, placed = cuts.place(name, [peer.tensors[name].shape for peer in peers], file.tp, box)
            for (offset, extent), inside in placed:
                part = view
                for dim, (begin, count) in enumerate(zip(inside, extent)):
                    part = part.narrow(dim, begin, count)

                def get(part: View = part) -> View:
                    return part

                checkpoint.pieces.append(Piece(file.pp * len(tps) + file.tp, name, "weight", view.dtype, full, offset,
                                               extent, get, file.path))
    checkpoint.notes.append("the optimizer's state of this format is by number, not by parameter, and is left out")
    checkpoint.mapping = _mapping(arguments, {piece.name for piece in checkpoint.pieces})
    return checkpoint


# --- names of Hugging Face ----------------------------------------------
def _mapping(arguments: typing.Any, names: set[str]) -> dict[str, typing.Any] | None:
    """A mapping to Llama's names, for a decoder of that kind; None for another one, or without the arguments."""
    heads = attribute(arguments, "num_attention_heads")
    if not isinstance(arguments, Placeholder) or not heads or not attribute(arguments, "swiglu") or (
            attribute(arguments, "normalization") != "RMSNorm") or attribute(arguments, "num_experts"):
        return None
    groups = attribute(arguments, "num_query_groups") if attribute(arguments, "group_query_attention") else heads
    llama_prefix = "model.layers.*."
    rules: list[dict[str, typing.Any]] = [{"match": "*_extra_state*", "leave": True}]

    def rule(match: str, **keys: typing.Any) -> None:
        pattern = re.compile(re.escape(match).replace(r"\*", ".*"))
        if any(pattern.fullmatch(name) for name in names):
            rules.append({"match": match, **keys})

    decoder = "decoder.layers.*."
    for kind in ("weight", "bias"):
        attention, mlp = f"{llama_prefix}self_attn.", f"{llama_prefix}mlp."
        rule(f"{decoder}self_attention.linear_qkv.{kind}*", dim=0, groups=groups, blocks=[heads // groups, 1, 1],
             into=[f"{attention}{part}_proj.{kind}*" for part in "qkv"])
        rule(f"{decoder}mlp.linear_fc1.{kind}*", dim=0, blocks=[1, 1],
             into=[f"{mlp}gate_proj.{kind}*", f"{mlp}up_proj.{kind}*"])
        rule(f"{decoder}self_attention.linear_proj.{kind}*", rename=f"{attention}o_proj.{kind}*")
        rule(f"{decoder}mlp.linear_fc2.{kind}*", rename=f"{mlp}down_proj.{kind}*")
    for old in ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"):
        rule(f"{decoder}{old}*", rename=f"{llama_prefix}input_layernorm.weight*")
    for old in ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"):
        rule(f"{decoder}{old}*", rename=f"{llama_prefix}post_attention_layernorm.weight*")
    for part in "qk":
        rule(f"{decoder}self_attention.{part}_layernorm.weight*", rename=f"{llama_prefix}self_attn.{part}_norm.weight*")
    rule("decoder.final_layernorm.weight*", rename="model.norm.weight*")
    vocab = attribute(arguments, "vocab_size")
    rows = {"shape": [vocab, None]} if isinstance(vocab, int) and vocab > 0 else {}
    rule("embedding.word_embeddings.weight*", rename="model.embed_tokens.weight*", **rows)
    rule("output_layer.weight*", rename="lm_head.weight*", **rows)
    return {"version": 1, "tensors": rules}
