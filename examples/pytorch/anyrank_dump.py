# SPDX-License-Identifier: Apache-2.0
"""Writes what a PyTorch module computes on each rank, for `anyrank verify`: activations, gradients, weights.

    from anyrank_dump import Dumper

    dump = Dumper(model, "dump", mesh={"dp": 2, "tp": 4})   # before the forward pass
    loss = model(ids, labels=ids).loss
    loss.backward()
    dump.write()                                            # after it, on every rank

One file of each rank, dump/rank-00000.safetensors and so on, with the place of every tensor in the full one. Copy this
file; it needs torch and safetensors and nothing else.

Names. A module's output is "PATH:fwd", the gradient of its first tensor input through this module alone "PATH:bwd", a
parameter's gradient "NAME:grad", its value "NAME:init" (as it was when the Dumper was made). A module with several
output tensors has "PATH.1:fwd" beside it; one that is called again in the same forward pass "PATH.call2:fwd". The output object
of a Hugging Face model gives "loss:fwd" and "lm_head:fwd". What has as many rows as the model's input has samples (or tokens) is one row a sample. Several forward passes in one step are micro-batches: their
samples follow one another (not under {"dp": None}: the first pass counts), scalars that `partial` names are added, and other scalars are left out, since the factor that is to average them is outside of the model.

Placements. A DTensor says itself where it stands. For plain tensors of hand-written parallel layers say it with `shard`,
a dictionary from glob to {mesh dimension: tensor dimension}; the first glob that matches a tensor's name counts:

    shard={"*.q_proj.weight:*": {"tp": 0}, "*.q_proj:fwd": {"tp": -1}, "*.o_proj.weight:*": {"tp": 1}}

Uneven shards are fine: the ranks tell each other their sizes. A rank's part of several tensors packed in one (q|k|v,
gate|up) is a piece of each: {"tp": 0, "blocks": [8, 2, 2]} with their relative sizes, or "blocks": None where one cut
goes straight through all of it, as in Megatron's linear_qkv, whose heads alternate. Where there are fewer KV heads than
ranks, {"tp": 0, "copies": 2} says that each two neighbours hold the same part. What nothing is said of is whole, a copy on each rank;
activations and their gradients are shared out along dimension 0 over the mesh dimension named "dp", if there is one,
also where a glob says nothing of "dp" ({"dp": None} says that they are not). {"dp": 1} says that the samples are in
dimension 1, as in [s, b, h], on one rank as well; what is written has them in front. A scalar is taken as the mean over "dp".

DDP and FSDP average: each rank's loss is that of its own samples, and so are the gradients of its activations, `dp`
times those of one rank. Where the module is wrapped in DDP or FSDP2, or with mean_over="dp", the gradients of
activations are divided by the ranks of that dimension, so that they compare. Prefixes of wrappers ("module.") are left
out of the names.

A whole training step, between backward() and the next forward pass:

    loss.backward()
    dump.keep_gradients()                                # before they are clipped
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dump.keep_update(optimizer, norm)                    # NAME:new, NAME:m and NAME:v of the optimizer, grad_norm:clip
    dump.next_step()                                     # what follows is NAME:fwd@2, ..
"""

import fnmatch
import json
import os
import pathlib

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # before PyTorch 2.5
    DTensor = ()
try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # before PyTorch 2.6
    FSDPModule = ()

PLACEMENT, DCP = "ANYRANK_PLACEMENT", "DCP_SHARDING_INFO"
VALUES = ("init", "fwd", "bwd", "grad", "new", "m", "v", "clip")
STATE = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}
PACKED = {"c_attn", "qkv_proj", "Wqkv", "query_key_value", "qkv", "in_proj_weight", "in_proj_bias", "gate_up_proj"}
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class _Listen(torch.autograd.Function):
    """The identity; hands on what flows back through it."""

    @staticmethod
    def forward(ctx, x, listener):
        ctx.listener = listener
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.listener(grad)
        return grad, None


def _local(t):
    return t.to_local() if DTensor and isinstance(t, DTensor) else t


def _copy(t):
    return _local(t.detach()).detach().to("cpu", copy=True).contiguous()


def _rows_are_equal(t):
    return not (DTensor and isinstance(t, DTensor)) and t.dim() > 2 and bool((t == t[:1]).all())


def _plain(name):
    """A parameter's or module's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _in_backward():
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _spec(t):
    """Where a DTensor, or the local part of one that a parallel module gave out, stands: shape, mesh, placements."""
    if DTensor and isinstance(t, DTensor):
        return tuple(t.shape), t.device_mesh, t.placements
    return getattr(t, "_anyrank_spec", None)


def _local_spec(t, whole):
    """The same of a plain tensor that was cut out of, or summed up from, a DTensor with the place `whole`."""
    shape, mesh, _ = whole
    if len(shape) != t.dim():
        return None
    cut = [d for d in range(t.dim()) if t.shape[d] != shape[d]]
    if mesh.ndim > 1 or len(cut) > 1:
        return None
    return shape, mesh, (Shard(cut[0]) if cut else Replicate(),)


class _Value:
    """A tensor that was recorded: its bytes, and where it stands if a DTensor says so."""

    def __init__(self, tensor, spec=None, per_sample=False):
        self.data = _copy(tensor)
        self.spec = spec or _spec(tensor)
        self.per_sample = per_sample
        self.samples = 0  # the dimension that they had in the run

    def dimension(self, dim):
        """Where dimension `dim` of the run's tensor is in data, in which samples come first."""
        dim %= self.data.dim()
        return 0 if dim == self.samples else dim + (dim < self.samples)


def _first_tensor(args, kwargs):
    """Where the first floating point tensor that a gradient can flow to stands: ('args', 0), ('kwargs', 'x')."""
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad:
            return "args", i
    for key, x in kwargs.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad:
            return "kwargs", key
    return None


class Dumper:
    """Listens to `module` until close() and writes one file a rank into `folder`.

    mesh     {"dp": 2, "tp": 4}, outermost first, ranks counted along the last; default: all ranks are "tp"
    shard    {glob: {mesh dimension: tensor dimension}} for tensors that are no DTensors
    partial  {glob: mesh dimension} for plain tensors that are still to be summed over it
    only     globs of names to keep; default: all
    values   which kinds: any of "init", "fwd", "bwd", "grad", "new", "m", "v", "clip"
    mean_over  the mesh dimension over which the run averages losses and gradients; default: "dp" for DDP and FSDP2
    """

    def __init__(self, module, folder, mesh=None, shard=None, partial=None, only=None, values=VALUES, mean_over=None):
        wrapped = isinstance(module, (DistributedDataParallel, FSDPModule))
        self.module = module.module if isinstance(module, DistributedDataParallel) else module
        if any(isinstance(m, FullyShardedDataParallel) for m in self.module.modules()):
            raise ValueError("FSDP1 (FullyShardedDataParallel) has flat parameters: all those of a wrapped module in one "
                             "vector, cut over the ranks, of which no rank knows a tensor's place; wrap with fully_shard "
                             "(FSDP2), or dump a copy of the model made in summon_full_params")
        self.folder = pathlib.Path(folder)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.mesh = dict(mesh) if mesh else {"tp": self.world}
        size = 1
        for n in self.mesh.values():
            size *= n
        if size != self.world:
            raise ValueError(f"the mesh {self.mesh} has {size} ranks, the run has {self.world}")
        unknown = set(values) - set(VALUES)
        if unknown:
            raise ValueError(f"values: {sorted(unknown)} are none of {list(VALUES)}")
        self.shard, self.partial, self.only, self.values = shard or {}, partial or {}, only, set(values)
        self.mean_over = mean_over or ("dp" if wrapped and "dp" in self.mesh else None)
        if self.mean_over and self.mean_over not in self.mesh:
            raise ValueError(f"mean_over: the mesh {self.mesh} has no dimension {self.mean_over!r}")
        self.kept, self.calls, self.handles, self.step, self.has_gradients = {}, {}, [], 1, False
        self.samples, self.given, self.passes, self.micro_batches = None, set(), 0, 1
        self._listen()

    # --- listening ------------------------------------------------------------------------------------------------

    def _wants(self, name):
        return self.only is None or any(fnmatch.fnmatchcase(name, glob) for glob in self.only)

    def _parameters(self):
        return [(_plain(name), p) for name, p in self.module.named_parameters()]

    def _at_step(self, name):
        return name if self.step == 1 else f"{name}@{self.step}"

    def _keep(self, name, tensor, spec=None, of_all=False):
        if not self._wants(name):
            return
        path, suffix = name.rsplit(":", 1)
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] > 1:
            name = f"{path}.call{self.calls[name]}:{suffix}"
        per_sample = self._per_sample(tensor, suffix) and not (of_all and tensor.shape[0] == 1)
        if per_sample and suffix == "fwd" and not tensor.requires_grad and _rows_are_equal(tensor):
            tensor, per_sample = tensor[:1], False  # angles of positions that were said for each sample: those of all
        self.kept.setdefault(self._at_step(name), []).append(_Value(tensor, spec, per_sample))

    def _begin_pass(self, _module, args, kwargs):
        if _in_backward():
            return
        self.passes += torch.is_grad_enabled()
        self.micro_batches = max(self.micro_batches, self.passes)
        self.calls = {name: n for name, n in self.calls.items() if not name.endswith((":fwd", ":bwd"))}
        given = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor) and x.dim() > 0]
        self.samples = {given[0].shape[0], given[0].shape[:2].numel()} if given else None
        self.given = {x.untyped_storage().data_ptr() for x in given}

    def _per_sample(self, t, suffix):
        """Whether an activation has the samples along dimension 0: as many as the model's input, or a row a token.

        What depends on no parameter and has one row, such as the angles of a rotary embedding, is that of all samples.
        """
        if suffix not in ("fwd", "bwd") or t.dim() == 0:
            return False
        return self.samples is None or t.shape[0] in self.samples and (t.shape[0] > 1 or t.requires_grad or suffix == "bwd")

    def _counts_positions(self, args):
        """Whether a module's input is consecutive numbers that the model itself made: in one row, they are all samples'."""
        x = _local(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        return (x is not None and not x.is_floating_point() and x.untyped_storage().data_ptr() not in self.given and
                bool((x.flatten().diff() == 1).all()))

    def _listen(self):
        self.handles.append(self.module.register_forward_pre_hook(self._begin_pass, with_kwargs=True))
        if "init" in self.values:
            for name, p in self._parameters():
                self._keep(f"{name}:init", p)
        paths = set()
        for path, m in self.module.named_modules():
            path = _plain(path)
            if path in paths:
                continue  # what a wrapper holds is the wrapper's
            paths.add(path)
            if path and "fwd" in self.values:
                whole = {}
                # What parallelize_module makes of the output, a plain tensor, is seen after what it makes it of.
                self.handles.append(m.register_forward_hook(self._whole_hook(whole), prepend=True))
                self.handles.append(m.register_forward_hook(self._output_hook(path, whole)))
            elif not path:
                self.handles.append(m.register_forward_hook(self._model_hook))
            # What changes its input in place cannot have it replaced by a view.
            if path and "bwd" in self.values and not getattr(m, "inplace", False):
                self.handles.append(m.register_forward_pre_hook(self._input_hook(path), with_kwargs=True))
        if "grad" in self.values:
            for name, p in self._parameters():
                if p.requires_grad:
                    self.handles.append(p.register_post_accumulate_grad_hook(self._grad_hook(name)))

    def _whole_hook(self, whole):
        def hook(_module, _args, output):
            whole["spec"] = _spec(output) if isinstance(output, torch.Tensor) else None
        return hook

    def _output_hook(self, path, whole):
        def hook(_module, args, output):
            sharded = DTensor and any(isinstance(p, DTensor) and any(x.is_shard() for x in p.placements)
                                      for p in _module.parameters())
            if _in_backward():
                return  # activation checkpointing computes it again
            found = [output] if isinstance(output, torch.Tensor) else (
                [x for x in output if isinstance(x, torch.Tensor)] if isinstance(output, (tuple, list)) else [])
            for i, t in enumerate(found):
                if not t.is_floating_point():
                    continue
                if i and sharded and not self._glob(f"{path}.{i}:fwd"):
                    continue  # attention weights of the rank's heads, or whole: nothing says which
                if _spec(t) is None:
                    given = args[0] if args and isinstance(args[0], torch.Tensor) else None
                    if whole["spec"]:
                        t._anyrank_spec = _local_spec(t, whole["spec"])
                    elif given is not None and _spec(given) and given.shape == t.shape and not list(_module.parameters()):
                        t._anyrank_spec = _spec(given)  # an activation of a part is a part
                self._keep(f"{path}.{i}:fwd" if i else f"{path}:fwd", t, of_all=self._counts_positions(args))
        return hook

    def _model_hook(self, _module, _args, output):
        if "fwd" not in self.values:
            return
        if isinstance(output, torch.Tensor):
            self._keep("output:fwd", output)
        elif isinstance(getattr(output, "loss", None), torch.Tensor):
            self._keep("loss:fwd", output.loss)

    def _input_hook(self, path):
        def hook(_module, args, kwargs):
            at = _first_tensor(args, kwargs)
            if at is None or not torch.is_grad_enabled():
                return None
            spec = _spec(args[at[1]] if at[0] == "args" else kwargs[at[1]])
            def listener(grad):
                grad = grad / self.mesh[self.mean_over] if self.mean_over else grad
                self._keep(f"{path}:bwd", grad, _spec(grad) or spec)
            def listen(x):
                heard = _Listen.apply(x, listener)
                if not (DTensor and isinstance(x, DTensor)):
                    heard._anyrank_spec = spec
                return heard
            if at[0] == "args":
                args = list(args)
                args[at[1]] = listen(args[at[1]])
                return tuple(args), kwargs
            kwargs = dict(kwargs)
            kwargs[at[1]] = listen(kwargs[at[1]])
            return args, kwargs
        return hook

    def _grad_hook(self, name):
        def hook(_p):
            # The value is read in keep_gradients(), when all micro-batches and reductions are done; here only the place
            # in the order is taken.
            if self._wants(f"{name}:grad"):
                self.kept.setdefault(self._at_step(f"{name}:grad"), [])
        return hook

    # --- a training step ------------------------------------------------------------------------------------------

    def keep_gradients(self):
        """Records the parameters' gradients as they are now; without this call write() does."""
        self.has_gradients = True
        for name, p in self._parameters() if "grad" in self.values else []:
            if p.grad is not None and self._wants(f"{name}:grad"):
                self.kept[self._at_step(f"{name}:grad")] = [_Value(p.grad)]

    def keep_update(self, optimizer=None, grad_norm=None):
        """Records the parameters after the update, the optimizer's state and the norm that the gradients were clipped by."""
        if grad_norm is not None and "clip" in self.values:
            norm = grad_norm.full_tensor() if DTensor and isinstance(grad_norm, DTensor) else grad_norm
            self._keep("grad_norm:clip", torch.as_tensor(norm))
        for name, p in self._parameters():
            if "new" in self.values:
                self._keep(f"{name}:new", p)
            for key, kind in STATE.items():
                value = optimizer.state[p].get(key) if optimizer is not None and p in optimizer.state else None
                if kind in self.values and value is not None:
                    self._keep(f"{name}:{kind}", value)

    def next_step(self):
        """What is recorded from here on belongs to the next training step."""
        if not self.has_gradients:
            self.keep_gradients()
        self.step, self.calls, self.has_gradients, self.passes = self.step + 1, {}, False, 0

    def close(self):
        """Removes all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    # --- placements -----------------------------------------------------------------------------------------------

    def _at(self):
        at, rest = {}, self.rank
        for name in reversed(self.mesh):
            at[name] = rest % self.mesh[name]
            rest //= self.mesh[name]
        return at

    def _glob(self, name):
        """What `shard` says of a tensor."""
        return next((dims for glob, dims in self.shard.items() if fnmatch.fnmatchcase(name.split("@")[0], glob)), {})

    def _rule(self, name, v):
        rule = {"dp": 0} if v.per_sample and self.mesh.get("dp", 1) > 1 else {}
        if not v.spec:
            rule.update(self._glob(name))
        packed = any(part in PACKED for part in name.split(":")[0].split(".")[-2:]) and not name.split("@")[0].endswith(":bwd")
        if packed and rule.get("tp") is not None and "blocks" not in rule:
            raise ValueError(f"{name} looks like several tensors packed in one; say their relative sizes, such as "
                             '"blocks": [1, 1, 1], or "blocks": None where one cut goes straight through all of it')
        return {mesh: v.dimension(dim) for mesh, dim in rule.items() if dim is not None and mesh in self.mesh}

    def _line(self, told, mesh_dim):
        """What the ranks that differ from this one along a mesh dimension alone said, and this one's place among them."""
        stride = 1
        for dim in reversed(self.mesh):
            if dim == mesh_dim:
                break
            stride *= self.mesh[dim]
        at = self.rank // stride % self.mesh[mesh_dim]
        first = self.rank - at * stride
        return [told[first + i * stride] for i in range(self.mesh[mesh_dim])], at

    def _spread(self, name, told, rule, offset, shape, local_shape, extra):
        """Where this rank's part stands when dimensions of the mesh share out dimensions of the tensor: its boxes, and
        the extents of the full tensor.
        """
        if len(set(rule.values())) < len(rule):
            raise ValueError(f"{name}: two mesh dimensions shard one tensor dimension: use DTensor for that")
        mine, blocks, copies = list(local_shape), extra.get("blocks"), extra.get("copies", 1)
        before = {}
        for mesh_dim, dim in rule.items():
            line, at = self._line(told, mesh_dim)
            if any(s is None or len(s) != len(shape) for s in line):
                raise ValueError(f"{name}: a rank along {mesh_dim} does not have this tensor")
            each = copies if mesh_dim != "dp" else 1
            extents = [s[dim] for s in line][::each]
            before[dim] = sum(extents[:at // each])
            offset[dim] += before[dim]
            shape[dim] = sum(extents)
        if not blocks:
            return [{"global": offset, "local": [0] * len(shape), "extent": mine}], shape
        (dim,) = [d for mesh_dim, d in rule.items() if mesh_dim != "dp"] or [0]
        if mine[dim] % sum(blocks) or before.get(dim, 0) % sum(blocks) or shape[dim] % sum(blocks):
            raise ValueError(f"{name}: blocks of {blocks} do not divide its {mine[dim]} rows")
        boxes, full, local = [], 0, 0
        for share in blocks:
            def part(n, share=share):
                return n // sum(blocks) * share
            box = {"global": list(offset), "local": [0] * len(shape), "extent": list(mine)}
            box["global"][dim], box["local"][dim] = full + part(before.get(dim, 0)), local
            box["extent"][dim] = part(mine[dim])
            boxes.append(box)
            full, local = full + part(shape[dim]), local + part(mine[dim])
        return boxes, shape

    def _partial_over(self, name):
        return next((dim for glob, dim in self.partial.items() if fnmatch.fnmatchcase(name.split("@")[0], glob)), None)

    def _distributed(self, spec):
        """Offset and full shape of a DTensor, the mesh dimension it is to be summed over, and those it knows of."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
        shape, mesh, placements = spec
        _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        known = list(mesh.mesh_dim_names or list(self.mesh)[-mesh.ndim:])
        strange = [dim for dim in known if dim not in self.mesh]
        if strange:
            raise ValueError(f"a DTensor's mesh has the dimension {strange[0]!r}, the Dumper's has {list(self.mesh)}: "
                             "name them alike")
        partial = [dim for dim, p in zip(known, placements) if p.is_partial()]
        if len(partial) > 1:
            raise ValueError(f"a DTensor that is partial over {' and '.join(partial)} cannot be written down")
        return list(offset), list(shape), partial[0] if partial else None, known

    def _tell(self, mine):
        """What every rank says, in the order of ranks."""
        if self.world == 1:
            return [mine]
        everyone = [None] * self.world
        dist.all_gather_object(everyone, mine)
        return everyone

    # --- writing --------------------------------------------------------------------------------------------------

    def _collect(self):
        if not self.has_gradients:
            self.keep_gradients()
        values = {name: self._join(name, parts) for name, parts in self.kept.items()}
        for name, v in values.items():
            if v and self._is_mean(name, v):
                v.data = v.data / self.mesh["dp"]
            elif v and self._samples(name, v):
                v.samples = self._samples(name, v) % v.data.dim()
                v.data = v.data.movedim(v.samples, 0).contiguous()
        return {name: v for name, v in values.items() if v}

    def _join(self, name, parts):
        """What micro-batches gave, as one value; None: nothing to write down."""
        if len(parts) < 2:
            return parts[0] if parts else None
        first = parts[0]
        if first.data.dim() == 0:
            first.data = sum(v.data for v in parts)
            return first if self._partial_over(name) else None
        dim = self._samples(name, first)
        if dim is not None:
            first.data = torch.cat([v.data for v in parts], dim)
        return first

    def _samples(self, name, v):
        """The dimension of an activation's samples; None: it has none, or a DTensor knows."""
        if v.spec or name.split("@")[0].rsplit(":", 1)[1] not in ("fwd", "bwd") or v.data.dim() == 0:
            return None
        return self._glob(name).get("dp", 0 if v.per_sample else None)

    def _is_mean(self, name, v):
        """A scalar of the forward pass: each data-parallel rank has that of its own samples, or all have the same."""
        return (v.data.dim() == 0 and name.split("@")[0].endswith(":fwd") and self.mesh.get("dp", 1) > 1 and
                self._partial_over(name) is None)

    def write(self):
        """Writes this rank's file and forgets what was recorded. Every rank must call it. Returns the path."""
        values, at = self._collect(), self._at()
        told = self._tell({name: v.spec[0] if v.spec else tuple(v.data.shape) for name, v in values.items()})
        dcp, tensors, parts = {}, {}, {}
        for name, v in values.items():
            offset, shape, partial, known = [0] * v.data.dim(), list(v.data.shape), self._partial_over(name), []
            if v.spec:
                offset, shape, partial, known = self._distributed(v.spec)
            elif self._is_mean(name, v):
                partial = "dp"
            rule = {dim: n for dim, n in self._rule(name, v).items() if dim not in known}
            extra = {} if v.spec else self._glob(name)
            boxes, shape = self._spread(name, [other.get(name) for other in told], rule, offset, shape,
                                        v.data.shape, extra)
            if len(boxes) == 1:
                dcp[name] = {"saved_offsets": boxes[0]["global"]}
            tensors[name] = {"shape": shape, "boxes": boxes}
            if partial and self.mesh[partial] > 1:
                tensors[name]["partial"] = partial
            if not (v.spec or rule or partial or self._glob(name)):
                tensors[name]["assumed"] = True  # a mapping may say otherwise
            # Ranks that hold the same part of the same sum hold copies of it.
            parts[name] = (tuple(boxes[0]["global"]), tuple(v.data.shape), at[partial] if partial else None)
        everyone = self._tell(parts)
        for name, t in tensors.items():
            copies = [rank for rank, other in enumerate(everyone) if other.get(name) == parts[name]]
            t["replica"], t["replicas"] = copies.index(self.rank), len(copies)
        placement = {"version": 1, "rank": self.rank, "world": self.world, "mesh": list(self.mesh.items()),
                     "at": [at[name] for name in self.mesh], "tensors": tensors, "order": list(values)}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.rank:05d}.safetensors"
        half = path.with_name(path.name + ".part")
        save_file({name: v.data for name, v in values.items()}, half,
                  {"format": "pt", "DCP_VERSION": "1.0", DCP: json.dumps(dcp), PLACEMENT: json.dumps(placement),
                   "micro_batches": str(self.micro_batches)})
        os.replace(half, path)
        self.kept, self.calls, self.step, self.has_gradients = {}, {}, 1, False
        self.passes, self.micro_batches = 0, 1
        return path
