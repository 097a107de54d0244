# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed: a folder with *_model_states.pt and, under ZeRO, *_optim_states.pt.

The layout is that of deepspeed/utils/zero_to_fp32.py (versions 0.9 to 0.19). Stages 1 and 2 (and bf16 with fp32 sums)
flatten each parameter group and give every rank an equal stretch of it; stage 3 gives every rank an equal share of each
parameter, ceil(n / ranks) elements, one after the other in its flat groups. universal.py has what ds_to_universal.py
makes of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
import re
import typing

from anyrank._errors import AnyrankError
from anyrank.convert import universal
from anyrank.convert._parallel import Cuts
from anyrank.convert._pickles import Placeholder, attribute, load, nested
from anyrank.convert._pieces import Checkpoint, Piece, scalar, state_name, full_piece
from anyrank.convert._tensors import View, flat_boxes

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
STAGES = ("pipeline stages of DeepSpeed are read only from a universal checkpoint: convert the folder with "
          "ds_to_universal.py first")
EXPERTS = ("experts of DeepSpeed are read only from a universal checkpoint: convert the folder with ds_to_universal.py "
           "first, which takes AutoEP's, and others where each rank has all experts (ep_size 1)")
Shapes = typing.Dict[str, typing.Tuple[int, ...]]


class _Rank:
    """What one (dp, mp) pair's optimizer file holds, by kind ("fp32", "exp_avg", ..): flat tensors of each group, and
    numbers, as a step; None where a group has none."""

    def __init__(self, path: str, placeholders: typing.Collection[str]) -> None:
        self.path = path
        state = nested(load(path, placeholders), "optimizer_state_dict")
        if not isinstance(state, dict):
            raise AnyrankError(f"{path}: has no optimizer_state_dict: no file of a ZeRO optimizer")
        stage = state.get("zero_stage", 1)
        self.stage = stage._args[0] if isinstance(stage, Placeholder) and stage._args else stage
        if self.stage not in (1, 2, 3):
            raise AnyrankError(f"{path}: ZeRO stage {self.stage}; stages 1 to 3 are read here")
        count = state.get("partition_count")
        counts = count if isinstance(count, (list, tuple)) else [count]
        self.count = max((n for n in counts if isinstance(n, int)), default=0)
        if len(set(counts)) > 1:
            raise AnyrankError(f"{path}: groups of {counts} ranks, as for experts: {EXPERTS}")
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self.masters = self._views(state.get(key), key)
        self.flat: dict[str, list[View | None]] = {"fp32": [*self.masters]}
        self.numbers: dict[str, list[View | None]] = {}
        self.left_out: list[str] = []
        self.slices = state.get("param_slice_mappings")
        self.paddings = state.get("param_alignment_paddings")
        base = nested(state, "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        groups = base if isinstance(base, list) else [
            nested(base, "state", i) for i in range(len(self.masters))]
        for kind in dict.fromkeys(str(kind) for group in groups if isinstance(group, dict) for kind in group):
            found = [nested(group, kind) for group in groups]
            present = [entry for entry in found if entry is not None]
            flat = all(entry is None or isinstance(entry, View) and entry.shape == master.shape
                       for entry, master in zip(found, self.masters))
            if not flat and all(scalar(entry) for entry in present):
                self.numbers[kind] = [scalar(entry) for entry in found]
            elif flat or all(isinstance(entry, View) and len(entry.shape) == 1 for entry in present):
                self.flat[kind] = found
            else:
                self.left_out.append(kind)

    def _views(self, found: typing.Any, key: str) -> list[View]:
        if not isinstance(found, (list, tuple)) or not all(
            isinstance(entry, View) and len(entry.shape) == 1 for entry in found):
            raise AnyrankError(f"{self.path}: {key} is no list of flat tensors: of another version of DeepSpeed, or "
                               f"the optimizer was on NVMe")
        return list(found)


def _dicts(value: typing.Any) -> list[Shapes]:
    """param_shapes: a dictionary for each group; in old versions one for all."""
    groups = value if isinstance(value, list) else [value]
    if not all(isinstance(group, dict) for group in groups):
        return []
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in groups]


class _Reader:
    def __init__(self, folder: str,
                 placeholders: typing.Collection[str], shard: typing.Mapping[str, int | None]) -> None:
        self.folder, self.placeholders = folder, placeholders
        names = sorted(os.listdir(folder))
        self.universal = universal.is_universal(folder)
        for name in names if not self.universal else ():
            if re.search(r"expert_\d+_mp_rank|expp_rank_", name) or re.match(r"layer_\d+-model_", name):
                reason = EXPERTS if "exp" in name else STAGES
                raise AnyrankError(f"{folder}: {name}: {reason}")
        self.models = self._listed(MODEL, names)
        self.optims = self._listed(OPTIM, names)
        if self.universal and self.optims:
            raise AnyrankError(f"{folder}: holds files of ranks (*_optim_states.pt) and a universal checkpoint "
                               f"(zero/), which may differ: move one of them to another folder")
        self.tp = len({mp for _, mp in self.models})
        if not self.models or sorted({mp for _, mp in self.models}) != list(range(self.tp)):
            raise AnyrankError(f"MissingShard: {folder}: *mp_rank_XX_model_states.pt of ranks "
                               f"{sorted({mp for _, mp in self.models})}; they count from 0 without gaps")
        self.states = {key: load(path, placeholders) for key, path in self.models.items()}
        self.lead = [self.states[min(key for key in self.states if key[1] == mp)] for mp in range(self.tp)]
        self.staged = self.universal and all(nested(state, "module") is None for state in self.lead)
        if not self.staged and not all(isinstance(nested(state, "module"), dict) for state in self.lead):
            raise AnyrankError(
                f"{folder}: model_states.pt without 'module': no checkpoint of DeepSpeed, or of a pipeline")
        self.cuts = self._read_cuts(shard)
        self.checkpoint = Checkpoint("DeepSpeed universal" if self.universal else "DeepSpeed")
        self.shapes = [self._shapes(mp) for mp in range(self.tp)]

    def _groups(self, state: typing.Any) -> list[Shapes]:
        """The optimizer's parameters."""
        groups = _dicts(state.get("param_shapes"))
        if not groups:
            raise AnyrankError(f"{self.folder}: model_states.pt without param_shapes, which say where parameters are "
                               f"in the optimizer's tensors")
        return groups

    def _listed(self, pattern: re.Pattern[str], names: list[str]) -> dict[tuple[int, int], str]:
        found = {}
        for name in names:
            match = pattern.fullmatch(name)
            if match:
                found[int(match.group(1) or 0), int(match.group(2))] = os.path.join(self.folder, name)
        return found

    def _read_cuts(self, shard: typing.Mapping[str, int | None]) -> Cuts:
        """DeepSpeed's own patterns, where the checkpoint has them (universal_checkpoint_info), say how ranks cut."""
        info = self.lead[0].get("universal_checkpoint_info")
        if not isinstance(info, dict) or self.tp == 1:
            return Cuts(shard)
        unknown = [*(info.get("autotp_unsupported_parameter_patterns") or ()),
                   *(info.get("parameter_with_2_sub_params_cat_dim_0") or ()),
                   *(pattern for sub_param in info.get("parameter_with_sub_params") or ()
                     for pattern in attribute(sub_param, "patterns") or ())]
        patterns: list[tuple[str, int | None]] = []
        for key, dim in (("tp_replicated_parameter_patterns", None), ("parameter_to_average_patterns", None),
                         ("parameter_with_row_parallelism_patterns", 1), ("vocabulary_parameter_patterns", 0)):
            patterns += [(str(pattern), dim) for pattern in info.get(key) or []]
        return Cuts(shard, patterns=tuple(patterns), rest=0, unknown=tuple(map(str, unknown)))

    def _shapes(self, mp: int) -> Shapes:
        """Of all tensors of a tensor-parallel rank, as the rank has them."""
        state = self.lead[mp]
        shapes = {str(name): view.shape for name, view in (state["module"] or {}).items() if isinstance(view, View)}
        for group in [*_dicts(state.get("param_shapes")), *_dicts(state.get("frozen_param_shapes") or {})]:
            shapes.update(group)
        shapes.update({alias: shapes[name] for alias, name in (state.get("shared_params") or {}).items()
                       if name in shapes})
        return shapes

    def numbers(self, dp_rank: int, mp: int, rank: _Rank, groups: list[Shapes]) -> None:
        """What the optimizer has once for a group, each of its parameters has."""
        for kind, found in rank.numbers.items():
            for group, view in zip(groups, found):
                self.checkpoint.pieces += [full_piece(dp_rank * self.tp + mp, *state_name(name, kind), view, rank.path)
                                           for name in group if view is not None]

    def add(self, dp_rank: int, mp: int, name: str, kind: str, view: View, start: int, origin: str) -> None:
        """Elements of a parameter or of its state, from `start` on, of one rank: their boxes become pieces."""
        shape, pos = self.shapes[mp][name], 0
        for box in flat_boxes(shape, start, view.count):
            part = view.flat(pos, box[1])
            pos += part.count
            self._add_box(dp_rank, mp, name, kind, part, box, origin)

    def _add_box(self, dp_rank: int, mp: int, name: str, kind: str, part: View, box: typing.Any, origin: str) -> None:
        shapes = [rank_shapes.get(name) for rank_shapes in self.shapes]
        if None in shapes:
            raise AnyrankError(f"{self.folder}: {name!r} is not on every tensor-parallel rank")
        full, placed = self.cuts.place(name, typing.cast("list[tuple[int, ...]]", shapes), mp, box)
        for (offset, extent), inside in placed:
            view = part
            for dim, (begin, count) in enumerate(zip(inside, extent)):
                view = view.narrow(dim, begin, count)
            read = functools.partial(_same, view)
            piece_name, role = state_name(name, kind) if kind else (name, "weight")
            self.checkpoint.pieces.append(
                Piece(dp_rank * self.tp + mp, piece_name, role, part.dtype, full, offset, extent, read, origin)
            )

    def module(self, mp: int, without: typing.Collection[str] = ()) -> None:
        """What the model computes with; under stage 3 the file has none of it, only buffers."""
        dp_rank = min(key[0] for key in self.models if key[1] == mp)
        for name, view in self.lead[mp]["module"].items():
            if isinstance(view, View) and view.shape == self.shapes[mp][name] and name not in without:
                box = (0,) * len(view.shape), view.shape
                self._add_box(dp_rank, mp, name, "", view, box, self.models[dp_rank, mp])

    def frozen(self, mp: int, ranks: int) -> None:
        """Parameters without gradients: whole, or under stage 3 a share on each rank."""
        for (dp_rank, mp_rank), state in sorted(self.states.items()):
            fragments = state.get("frozen_param_fragments")
            existing = {piece.name for piece in self.checkpoint.pieces
                        if piece.role == "weight"} if dp_rank == 0 else set()
            if mp_rank != mp or not isinstance(fragments, dict):
                continue
            for name, view in fragments.items():
                count = math.prod(self.shapes[mp][name])
                share = -(-count // ranks)
                if name in existing or not isinstance(view, View):
                    continue
                if view.count == count and ranks == 1 or len(view.shape) != 1:
                    self._add_box(
                        dp_rank, mp, name, "", view, ((0,) * len(view.shape), view.shape), self.models[dp_rank, mp_rank]
                    )
                else:
                    unpadded = max(0, min(share, count - dp_rank * share))
                    self.add(dp_rank, mp, name, "", view.narrow(0, 0, unpadded), dp_rank * share,
                             self.models[dp_rank, mp_rank])

    def optimizer(self, mp: int) -> None:
        """The optimizer's copies and moments of one tensor-parallel rank."""
        ranks = [_Rank(path, self.placeholders) for (_, mp_rank), path in sorted(self.optims.items()) if mp_rank == mp]
        found = [dp_rank for dp_rank, mp_rank in sorted(self.optims) if mp_rank == mp]
        lead = ranks[0]
        if found != list(range(len(found))) or lead.count != len(ranks):
            missing = (dp_rank for dp_rank in range(max(lead.count, max(found) + 1)) if dp_rank not in found)
            lost = [*itertools.islice(missing, 8)]
            raise AnyrankError(f"MissingShard: {self.folder}: *_optim_states.pt of {len(ranks)} ranks, {lead.count} "
                               f"wrote it; none of zero_pp_rank_{', '.join(map(str, lost)) or '?'} with "
                               f"mp_rank_{mp:02d}")
        groups = self._groups(self.lead[mp])
        for kind, flat in lead.flat.items():
            if any(kind not in rank.flat or len(rank.flat[kind]) != len(flat) for rank in ranks):
                raise AnyrankError(f"{self.folder}: ranks whose optimizers hold different tensors: {kind}")
            if lead.stage == 3 and None in flat:
                raise AnyrankError(f"{lead.path}: {kind} is a state of only some of the optimizer's groups, which is "
                                   f"not supported under ZeRO 3")
        if lead.left_out:
            self.checkpoint.notes.append(f"left out of the optimizer's state, as neither a number nor as flat as the "
                                         f"weights: {', '.join(lead.left_out)}")
        for dp_rank, rank in enumerate(ranks):
            self.numbers(dp_rank, mp, rank, groups)
        if lead.stage == 3:
            self._shares(mp, ranks, groups)
        else:
            self._stretches(mp, ranks, groups)

    def _stretches(self, mp: int, ranks: list[_Rank], groups: list[Shapes]) -> None:
        for group_index, group in enumerate(groups):
            if group_index >= len(ranks[0].masters):
                raise AnyrankError(f"{self.folder}: {len(groups)} parameter groups, the optimizer has "
                                   f"{len(ranks[0].masters)}")
            paddings = nested(ranks[0].paddings, group_index) or [0] * len(group)
            offset, places = 0, []
            for (name, shape), padding in zip(group.items(), paddings):
                places.append((name, offset, math.prod(shape)))
                offset += math.prod(shape) + padding
            begin = 0
            for dp_rank, rank in enumerate(ranks):
                count = rank.masters[group_index].count
                for name, start, n in places:
                    slice_begin, end = max(start, begin), min(start + n, begin + count)
                    if slice_begin < end:
                        self._check_slice(rank, group_index, name, slice_begin - begin, end - slice_begin)
                        for kind, flats in rank.flat.items():
                            flat = flats[group_index]
                            if flat is not None:
                                part = self._stretch(rank, flat, slice_begin - begin, end - slice_begin, name)
                                self.add(dp_rank, mp, name, kind, part, slice_begin - start, rank.path)
                begin += count

    def _stretch(self, rank: _Rank, flat: View, start: int, count: int, name: str) -> View:
        if start + count > flat.count:
            raise AnyrankError(f"{rank.path}: a flat tensor of {flat.count} elements ends within {name!r}: cut "
                               f"short, or of another model")
        return flat.narrow(0, start, count)

    def _check_slice(self, rank: _Rank, group_index: int, name: str, start: int, count: int) -> None:
        """Versions since 0.8 say where each parameter is."""
        stored = nested(rank.slices, group_index, name)
        if stored is not None and (attribute(stored, "start"), attribute(stored, "numel")) != (start, count):
            raise AnyrankError(f"{rank.path}: {name!r} should be {count} elements from {start} on, the file says "
                               f"{attribute(stored, 'numel')} from {attribute(stored, 'start')}: a layout of another "
                               f"version")

    def _shares(self, mp: int, ranks: list[_Rank], groups: list[Shapes]) -> None:
        params = {name: shape for group in groups for name, shape in group.items()}
        for dp_rank, rank in enumerate(ranks):
            for kind, flats in rank.flat.items():
                parts = collections.deque(flat for flat in flats if flat is not None)
                pos = 0
                for name, shape in params.items():
                    count = math.prod(shape)
                    share, consumed = -(-count // len(ranks)), 0
                    unpadded = max(0, min(share, count - dp_rank * share))  # the rest is padding
                    while consumed < share:
                        while parts and pos == parts[0].count:
                            parts.popleft()
                            pos = 0
                        if not parts:
                            raise AnyrankError(f"{rank.path}: its flat tensors end before {name!r}: cut short, or of "
                                               f"another model")
                        n = min(share - consumed, parts[0].count - pos)
                        if consumed < unpadded:
                            part = parts[0].narrow(0, pos, min(n, unpadded - consumed))
                            self.add(dp_rank, mp, name, kind, part, dp_rank * share + consumed, rank.path)
                        consumed, pos = consumed + n, pos + n
                if sum(view.count for view in parts) - pos > 0:
                    raise AnyrankError(f"{rank.path}: its flat tensors have {sum(view.count for view in parts) - pos} "
                                       f"elements more than the parameters: of another model")

    def aliases(self) -> None:
        """Tied parameters have one copy in the files and two names in the model."""
        for alias, name in (self.lead[0].get("shared_params") or {}).items():
            master_names = {piece.name for piece in self.checkpoint.pieces if piece.role == "master"}
            if alias not in master_names:
                self.checkpoint.pieces += [dataclasses.replace(piece, name=alias) for piece in self.checkpoint.pieces
                                           if piece.name == name and piece.role in ("weight", "master")]

    def read_universal(self) -> None:
        """What a universal checkpoint has of the optimizer, and the model's tensors next to it."""
        groups: list[Shapes] = []
        for state in self.lead:
            for group_index, group in enumerate(self._groups(state)):
                groups[group_index:group_index + 1] = (
                    [{**groups[group_index], **group}] if group_index < len(groups) else [group])
        dimensions = nested(self.lead[0], "checkpoint_parallel_dimensions", "pp_degree")
        width = self.tp // (dimensions or 1) if self.staged else self.tp
        parts = [{name: shape for mp in range(t, self.tp, width) for name, shape in self.shapes[mp].items()}
                 for t in range(width)]
        model = {str(name): view for state in self.lead[::-1] for name, view in (state["module"] or {}).items()
                 if isinstance(view, View)}
        found = universal.Universal(self.folder, self.placeholders, parts, groups, model,
                                    self.lead[0].get("universal_checkpoint_info"))
        self.checkpoint.pieces += found.pieces()
        self.checkpoint.notes += found.notes

    def read(self) -> Checkpoint:
        ranks = 1 + max((dp_rank for dp_rank, _ in (self.optims or self.models)), default=0)
        if not self.staged and (self.tp > 1 or ranks > 1):
            self.checkpoint.mesh = [("dp", ranks), ("tp", self.tp)]
        for mp in range(self.tp if not self.staged else 0):
            self.module(mp, self.unplaced())
            self.frozen(mp, ranks)
            if any(mp_rank == mp for _, mp_rank in self.optims):
                self.optimizer(mp)
        if self.universal:
            self.read_universal()
            if self.unplaced():
                self.checkpoint.notes.append(f"how ranks cut {len(self.unplaced())} parameters, the first "
                                             f"{self.unplaced()[0]}, is not known: of these the fp32 copies in zero/ "
                                             f"are read, and the parts in model_states.pt are left out")
        self.aliases()
        if not self.optims and not self.universal:
            self.without_optimizer()
        return self.checkpoint

    def unplaced(self) -> list[str]:
        """Parameters that are whole in zero/, and whose parts in model_states.pt cannot be put together."""
        if not self.universal or self.staged or self.tp == 1:
            return []
        return [name for group in self._groups(self.lead[0]) for name, shape in group.items()
                if not self.cuts.knows(name, len(shape))]

    def without_optimizer(self) -> None:
        """ZeRO writes param_shapes, and its optimizer's state into files of its own."""
        if any(state.get("param_shapes") and state.get("optimizer") is None for state in self.lead):
            raise AnyrankError(f"MissingShard: {self.folder}: model_states.pt are of ZeRO (param_shapes), and its "
                               f"optimizer's files are missing: *_optim_states.pt, or of a universal checkpoint zero/")
        self.checkpoint.notes.append(
            "no ZeRO: the optimizer's state is by number, not by parameter, and is left out")


def _same(view: View) -> View:
    return view


def read(folder: str, placeholders: typing.Collection[str], shard: typing.Mapping[str, int | None]) -> Checkpoint:
    """A checkpoint of DeepSpeed, stages 0 to 3, or a universal one."""
    return _Reader(folder, placeholders, shard).read()
