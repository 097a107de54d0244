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
output tensors has "PATH.1:fwd" beside it; one that is called again in the same step "PATH.call2:fwd". The output object
of a Hugging Face model gives "loss:fwd" and "lm_head:fwd".

Placements. A DTensor says itself where it stands. For plain tensors of hand-written parallel layers say it with `shard`,
a dictionary from glob to {mesh dimension: tensor dimension}; the first glob that matches a tensor's name counts:

    shard={"*.q_proj.weight:*": {"tp": 0}, "*.q_proj:fwd": {"tp": -1}, "*.o_proj.weight:*": {"tp": 1}}

Uneven shards are fine: the ranks tell each other their sizes. What nothing is said of is whole, a copy on each rank;
activations and their gradients are shared out along dimension 0 over the mesh dimension named "dp", if there is one.
"""

import fnmatch
import json
import os
import pathlib

import torch
import torch.distributed as dist
from safetensors.torch import save_file

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # before PyTorch 2.5
    DTensor = ()

PLACEMENT, DCP = "ANYRANK_PLACEMENT", "DCP_SHARDING_INFO"


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


class _Value:
    """A tensor that was recorded: its bytes, and where a DTensor says it stands."""

    def __init__(self, tensor):
        self.data = _copy(tensor)
        self.spec = None
        if DTensor and isinstance(tensor, DTensor):
            self.spec = (tuple(tensor.shape), tensor.device_mesh, tensor.placements)


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
    values   which kinds: any of "init", "fwd", "bwd", "grad"
    """

    def __init__(self, module, folder, mesh=None, shard=None, partial=None, only=None,
                 values=("init", "fwd", "bwd", "grad")):
        self.module, self.folder = module, pathlib.Path(folder)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.mesh = dict(mesh) if mesh else {"tp": self.world}
        size = 1
        for n in self.mesh.values():
            size *= n
        if size != self.world:
            raise ValueError(f"the mesh {self.mesh} has {size} ranks, the run has {self.world}")
        self.shard, self.partial, self.only, self.values = shard or {}, partial or {}, only, set(values)
        self.kept, self.calls, self.handles = {}, {}, []
        self._listen()

    # --- listening ------------------------------------------------------------------------------------------------

    def _wants(self, name):
        return self.only is None or any(fnmatch.fnmatchcase(name, glob) for glob in self.only)

    def _keep(self, name, tensor):
        if not self._wants(name):
            return
        path, suffix = name.rsplit(":", 1)
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] > 1:
            name = f"{path}.call{self.calls[name]}:{suffix}"
        self.kept[name] = _Value(tensor)

    def _listen(self):
        if "init" in self.values:
            for name, p in self.module.named_parameters():
                self._keep(f"{name}:init", p)
        for path, m in self.module.named_modules():
            if path and "fwd" in self.values:
                self.handles.append(m.register_forward_hook(self._output_hook(path)))
            elif not path:
                self.handles.append(m.register_forward_hook(self._model_hook))
            # What changes its input in place cannot have it replaced by a view.
            if path and "bwd" in self.values and not getattr(m, "inplace", False):
                self.handles.append(m.register_forward_pre_hook(self._input_hook(path), with_kwargs=True))
        if "grad" in self.values:
            for name, p in self.module.named_parameters():
                if p.requires_grad:
                    self.handles.append(p.register_post_accumulate_grad_hook(self._grad_hook(name)))

    def _output_hook(self, path):
        def hook(_module, _args, output):
            found = [output] if isinstance(output, torch.Tensor) else (
                [x for x in output if isinstance(x, torch.Tensor)] if isinstance(output, (tuple, list)) else [])
            for i, t in enumerate(found):
                if t.is_floating_point():
                    self._keep(f"{path}.{i}:fwd" if i else f"{path}:fwd", t)
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
            def listener(grad):
                self._keep(f"{path}:bwd", grad)
            if at[0] == "args":
                args = list(args)
                args[at[1]] = _Listen.apply(args[at[1]], listener)
                return tuple(args), kwargs
            kwargs = dict(kwargs)
            kwargs[at[1]] = _Listen.apply(kwargs[at[1]], listener)
            return args, kwargs
        return hook

    def _grad_hook(self, name):
        def hook(_p):
            # The value is read in write(), when all micro-batches and reductions are done; here only the place in the
            # order is taken.
            if self._wants(f"{name}:grad"):
                self.kept.setdefault(f"{name}:grad", None)
        return hook

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

    def _rule(self, name, data, is_distributed):
        for glob, dims in self.shard.items():
            if not is_distributed and fnmatch.fnmatchcase(name, glob):
                return {mesh: dim % data.dim() for mesh, dim in dims.items()}
        activation = name.endswith((":fwd", ":bwd")) and data.dim() > 0
        return {"dp": 0} if activation and self.mesh.get("dp", 1) > 1 else {}

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

    def _spread(self, name, told, rule, offset, shape):
        """Adds to a part's place that dimensions of the mesh share out dimensions of the tensor."""
        if len(set(rule.values())) < len(rule):
            raise ValueError(f"{name}: two mesh dimensions shard one tensor dimension: use DTensor for that")
        for mesh_dim, dim in rule.items():
            line, at = self._line(told, mesh_dim)
            if any(s is None or len(s) != len(shape) for s in line):
                raise ValueError(f"{name}: a rank along {mesh_dim} does not have this tensor")
            extents = [s[dim] for s in line]
            offset[dim] += sum(extents[:at])
            shape[dim] = sum(extents)
        return offset, shape

    def _partial_over(self, name):
        for glob, dim in self.partial.items():
            if fnmatch.fnmatchcase(name, glob):
                return dim
        return None

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
        if "grad" in self.values:
            for name, p in self.module.named_parameters():
                key = f"{name}:grad"
                if p.grad is not None and self._wants(key):
                    self.kept[key] = _Value(p.grad)
        return {name: v for name, v in self.kept.items() if v is not None}

    def write(self):
        """Writes this rank's file and forgets what was recorded. Every rank must call it. Returns the path."""
        values, at = self._collect(), self._at()
        told = self._tell({name: v.spec[0] if v.spec else tuple(v.data.shape) for name, v in values.items()})
        dcp, tensors, parts = {}, {}, {}
        for name, v in values.items():
            offset, shape, partial, known = [0] * v.data.dim(), list(v.data.shape), self._partial_over(name), []
            if v.spec:
                offset, shape, partial, known = self._distributed(v.spec)
            rule = {dim: n for dim, n in self._rule(name, v.data, bool(v.spec)).items() if dim not in known}
            offset, shape = self._spread(name, [other.get(name) for other in told], rule, offset, shape)
            dcp[name] = {"saved_offsets": offset}
            tensors[name] = {"shape": shape, "boxes": [{"global": offset, "local": [0] * len(shape),
                                                        "extent": list(v.data.shape)}]}
            if partial:
                tensors[name]["partial"] = partial
            # Ranks that hold the same part of the same sum hold copies of it.
            parts[name] = (tuple(offset), tuple(v.data.shape), at[partial] if partial else None)
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
                  {"format": "pt", "DCP_VERSION": "1.0", DCP: json.dumps(dcp), PLACEMENT: json.dumps(placement)})
        os.replace(half, path)
        self.kept, self.calls = {}, {}
        return path
