# SPDX-License-Identifier: Apache-2.0
"""Hooks on a model's modules: what each gives out, and the gradient of what it is given.

Nothing here changes a number, or the order in which numbers are added: the graph of the backward pass stays as it is.
The gradient of an input through one module alone is what those nodes hand on that the module made of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import sys
import typing
import weakref

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from anyrank.capture._model import DTensor, Replicate, Shard, divided, gathered_over, modules_of
from anyrank.capture._pipelines import Chunk
from anyrank.capture._places import ROUTED, Whole


def untraced(hook: typing.Callable[..., None]) -> typing.Callable[..., None]:
    """Marks a hook that a compiled model calls as it is: torch.compile would compile the capture too, for minutes. If
    nothing was compiled, the compiler need not be loaded."""
    compiler = sys.modules.get("torch._dynamo")
    return typing.cast("typing.Callable[..., None]", compiler.disable(hook)) if compiler is not None else hook


def whole_of(t: torch.Tensor) -> Whole | None:
    """Returns shape, mesh and placements of a DTensor, or of the local part that to_local() or a parallel module
    returned."""
    if isinstance(t, DTensor):
        return Whole(tuple(t.shape), t.device_mesh, tuple(t.placements))
    marked: Whole | None = getattr(t, "_anyrank_whole", None)
    before = _whole_before_local(t)
    # A program that takes a part of a sum for the sum has to be seen, so such a part counts as what it is taken for.
    is_part = before is not None and any(p.is_partial() for p in before.placements)
    return marked or (None if is_part else before)


def _whole_before_local(t: torch.Tensor) -> Whole | None:
    """Returns the same for the DTensor whose to_local() returned this tensor, as autograd knows it; None if there is
    none that can be written."""
    spec = getattr(t.grad_fn, "dtensor_spec", None)
    if spec is None or any(p.is_partial() and getattr(p, "reduce_op", "sum") not in ("sum", "avg")
                           for p in spec.placements):
        return None
    return Whole(tuple(spec.shape), spec.mesh, tuple(spec.placements))


def _whole_of_gradient(t: torch.Tensor) -> Whole | None:
    """Returns the placement of a tensor's gradient. For a result of to_local() the program states it, or each rank has
    all of it if the tensor is a sum's part."""
    before = _whole_before_local(t)
    if before is None:
        return whole_of(t)
    gradient_placements = t.grad_fn.grad_placements if t.grad_fn is not None else None
    return before._replace(
        placements=tuple(gradient_placements or (Replicate() if p.is_partial() else p for p in before.placements))
    )


def local_of(t: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local part without waiting for a sum; another tensor itself; a sparse one with its zeros."""
    t = t.detach()
    local = t.to_local() if isinstance(t, DTensor) else t
    local = local.wait() if hasattr(local, "wait") else local
    return local if local.layout is torch.strided else local.to_dense()


def _whole_of_local(t: torch.Tensor, full_layout: Whole) -> Whole | None:
    """Returns the placement of a plain tensor that was cut out of, or summed up from, a DTensor."""
    if len(full_layout.shape) != t.dim():
        return None
    cut = [d for d in range(t.dim()) if t.shape[d] != full_layout.shape[d]]
    if full_layout.mesh.ndim > 1 or len(cut) > 1:
        return None
    return Whole(full_layout.shape, full_layout.mesh, (Shard(cut[0]) if cut else Replicate(),))


def _whole_by_weight(module: nn.Module, shape: tuple[int, ...], dim: int) -> Whole | None:
    """Returns the placement of a plain activation whose last dimension has as many elements as this rank's part of the
    weight has in dimension `dim`: 0 for a linear layer's output, 1 for its input."""
    weight = getattr(module, "weight", None)
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if not linear or not isinstance(weight, DTensor) or weight.dim() != 2 or not shape:
        return None
    dim = 1 - dim if type(module).__name__ == "Conv1D" else dim
    if shape[-1] == weight.shape[dim] or shape[-1] != weight.to_local().shape[dim]:
        return None
    cut = [Shard(len(shape) - 1) if getattr(p, "dim", None) == dim else Replicate() for p in weight.placements]
    return Whole((*shape[:-1], weight.shape[dim]), weight.device_mesh, tuple(cut))


def _places_by_parts(t: torch.Tensor, given_out: typing.Iterable[Given]) -> list[Whole | None]:
    """The places that a plain tensor of a module may have by what linear layers in it gave out, [samples, tokens, heads
    x d], where it is q, k or v of it: [samples, tokens, heads, d] or [samples, heads, tokens, d]. None: one of them has
    no known place itself."""
    found = {place for module_output in given_out for place in _forms(t, module_output)}
    return [None if place is None else Whole(*place) for place in found]


def _forms(t: torch.Tensor, module_output: Given) -> typing.Iterator[tuple[typing.Any, ...] | None]:
    """Yields forms in which a tensor of this shape may be a module's output, with its last dimension split or not:
    shape, mesh and placements of the full tensor."""
    shape, (*outer, width) = tuple(t.shape), module_output.shape
    if shape == module_output.shape:
        yield None if module_output.full_layout is None else tuple(module_output.full_layout)
    if len(outer) != 2 or len(shape) != 4 or shape[0] != outer[0]:
        return
    is_view = t._is_view() and t.untyped_storage().data_ptr() == module_output.storage
    for heads, tokens in ((2, 1), (1, 2)):
        if shape[tokens] == outer[1] and shape[heads] * shape[3] == width and not (
                is_view and t.stride(heads) > t.stride(tokens)):
            yield (None if module_output.full_layout is None else
                   _in_heads(shape, heads, tokens, module_output.full_layout))


def _in_heads(shape: tuple[int, ...], heads: int, tokens: int, full_layout: Whole) -> tuple[typing.Any, ...] | None:
    """Returns the placement of [samples, tokens, heads x d] whose last dimension was split in two; None if a placement
    has no counterpart, for example if a head is cut."""
    dim_map, cuts = {0: 0, 1: tokens, 2: heads}, []
    if len(full_layout.shape) != 3 or full_layout.shape[2] % shape[3]:
        return None
    for placement in full_layout.placements:
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or (dim is not None and type(placement) is not Shard):
            return None
        cuts.append(Replicate() if dim is None else Shard(dim_map[dim % 3]))
    full = list(shape)
    full[0], full[tokens], full[heads] = full_layout.shape[0], full_layout.shape[1], full_layout.shape[2] // shape[3]
    return tuple(full), full_layout.mesh, tuple(cuts)


def _is_of_own_tokens(full_layout: Whole | None) -> bool:
    """Returns whether ranks have different tokens and all features of each, as between the regions of tensor
    parallelism."""
    cut = [d % len(full_layout.shape) for d in (getattr(x, "dim", None) for x in full_layout.placements)
           if d is not None] if full_layout is not None else []
    return bool(cut) and full_layout is not None and all(d < len(full_layout.shape) - 1 for d in cut)


def _mark_heads(module: nn.Module, t: torch.Tensor) -> bool:
    """Gives attention probabilities [b, heads, s, s] of a rank's own heads their place, where the module's settings
    say how many heads there are and its weights by how many ranks they are divided."""
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if t.dim() != 4 or not isinstance(heads, int) or isinstance(t, DTensor):
        return False
    for p in module.parameters():
        cut = [getattr(x, "dim", None) is not None for x in p.placements] if isinstance(p, DTensor) else []
        if sum(cut) == 1 and t.shape[1] * int(p.device_mesh.mesh.shape[cut.index(True)]) == heads:
            places = tuple(Shard(1) if c else Replicate() for c in cut)
            t._anyrank_whole = Whole((t.shape[0], heads, *t.shape[2:]), p.device_mesh, places)
            return True
    return False


def parts_of(output: typing.Any) -> list[typing.Any]:
    """Returns a module's output, or the members of a tuple, dictionary or dataclass. A member None keeps its place, so
    that tensors have the same positions on all ranks."""
    if isinstance(output, dict):
        return list(output.values())
    if isinstance(output, (tuple, list)):
        return list(output)
    if dataclasses.is_dataclass(output):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [output]


def tensors_of(output: typing.Any) -> list[torch.Tensor]:
    """Returns the tensors of a module's output: itself, or the members of a tuple, dictionary or dataclass."""
    return [x for x in parts_of(output) if isinstance(x, torch.Tensor)]


def named_loss_of(output: typing.Any) -> torch.Tensor | None:
    """Returns what a model's outputs contain under the name of a loss."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def loss_of(output: typing.Any) -> torch.Tensor | None:
    """Returns the loss among a model's outputs: the member with that name, or the only scalar of a tuple."""
    loss = named_loss_of(output)
    if loss is not None:
        return loss
    several = isinstance(output, (tuple, list)) and len(output) > 1
    scalars = scalars_of(output) if several else []
    return scalars[0] if len(scalars) == 1 else None


def scalars_of(output: typing.Any) -> list[torch.Tensor]:
    """Returns the scalars among a module's outputs, each of which may be the loss."""
    return [x for x in tensors_of(output) if x.dim() == 0 and x.is_floating_point()]


# What a loss goes through on its way to backward(): a scale, a divisor, another dtype, DDP.
_SCALED = re.compile(r"(Mul|Div|Neg|ToCopy|Clone|View|Alias|Squeeze|Unsqueeze)Backward\d*|_DDPSinkBackward")


def is_scaled(root: torch.Tensor, scalar: torch.Tensor) -> bool:
    """Returns whether backward() is called on this scalar, or on a multiple of it, and on nothing else that has a
    gradient."""
    node, output_index, target_node = root.grad_fn, root.output_nr, scalar.grad_fn
    if root is scalar or target_node is None:
        return root is scalar
    while node is not None and (node is not target_node or output_index != scalar.output_nr):
        inputs = [(f, i) for f, i in node.next_functions if f is not None]
        of_ddp = node.name() == "_DDPSinkBackward"
        if not _SCALED.fullmatch(node.name()) or not (
            output_index < len(node.next_functions) if of_ddp else len(inputs) == 1
        ):
            return False
        node, output_index = node.next_functions[output_index] if of_ddp else inputs[0]
    return node is not None


def is_loss_scale(loss: torch.Tensor, scalar: torch.Tensor) -> bool:
    """Returns whether a loss is the model's loss times a power of two from 256 on, which the program divides out of
    gradients again: no number of ranks or micro-batches is such a factor."""
    value = float(scalar.detach())
    factor = float(loss.detach()) / value if value else 1.0
    return factor >= 256.0 and math.frexp(factor)[0] == 0.5


def in_backward() -> bool:
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def inputs_of(args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any], depth: int = 2) -> dict[str, torch.Tensor]:
    """Returns the tensors that a model is given, by the names of its arguments or by their positions."""
    found: dict[str, torch.Tensor] = {}
    for key, x in [*enumerate(args), *kwargs.items()]:
        if isinstance(x, torch.Tensor):
            found[str(key)] = x
        elif depth and isinstance(x, dict):
            found.update({f"{key}.{inner}" if args[1:] else inner: t
                          for inner, t in inputs_of((), {str(k): v for k, v in x.items()}, depth - 1).items()})
        elif depth and isinstance(x, (tuple, list)):
            found.update({f"{key}.{inner}": t for inner, t in inputs_of(tuple(x), {}, depth - 1).items()})
    return found


def in_transform() -> bool:
    """Returns whether torch.func is active: its tensors (of vmap, grad, jvp) have no values that can be written."""
    stack = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return stack is not None and stack() is not None


def is_index(t: torch.Tensor) -> bool:
    """Returns whether an input may count within its batch, such as the vector that gives each node its graph and
    differs between ranks. Labels of a few samples look so by chance."""
    if t.dim() != 1 or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        return False
    return t.numel() == 0 or (int(t[0]) == 0 and bool((t.diff() >= 0).all()))


def has_no_values(args: tuple[typing.Any, ...]) -> bool:
    """Returns whether a call only finds out shapes, as a pipeline's stage does."""
    return any(isinstance(x, torch.Tensor) and x.is_meta for x in args)


def version_of(t: torch.Tensor) -> int:
    """Returns how many times a tensor was written over."""
    return 0 if t.is_inference() else t._version


def _same_memory(lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    lhs, rhs = local_of(lhs), local_of(rhs)
    return (lhs.data_ptr(), lhs.shape, lhs.stride()) == (rhs.data_ptr(), rhs.shape, rhs.stride())


def _samples_of_states(module: nn.RNNBase, sequence: bool, ndim: int) -> int | None:
    """Returns the dimension of the samples in a recurrent layer's output: a sequence [b, s, h] or [s, b, h], or states
    [layers, b, h]. None: it belongs to one sample."""
    if ndim != 3:
        return None
    return 0 if sequence and module.batch_first else 1


def reached_of(loss: torch.Tensor, passes: typing.Sequence[Pass]) -> list[Pass]:
    """Returns those of the passes from which a loss is computed: nodes that they made lie behind it."""
    found: list[Pass] = []
    todo, visited = [loss.grad_fn], {loss.grad_fn}
    while todo and len(found) < len(passes):
        node = todo.pop()
        if node is None:
            continue
        number = node._sequence_nr()
        found += [
            forward_pass for forward_pass in passes if forward_pass.has_made(number) and forward_pass not in found
        ]
        for behind, _ in node.next_functions:
            if behind is not None and behind not in visited:
                visited.add(behind)
                todo.append(behind)
    return [forward_pass for forward_pass in passes if forward_pass in found]


def source_of(t: torch.Tensor, passes: typing.Sequence[Pass]) -> Pass | None:
    """Returns the pass whose module returned a tensor, or the source of the tensor on the shortest way."""
    found = next((forward_pass for forward_pass in passes if any(gave() is t for gave in forward_pass.gave)), None)
    todo, visited = [t.grad_fn], {t.grad_fn}
    while found is None and todo:
        node = todo.pop(0)
        if node is not None:
            number = node._sequence_nr()
            found = next((forward_pass for forward_pass in passes if forward_pass.has_made(number)), None)
            behind = [next_node for next_node, _ in node.next_functions if next_node not in visited]
            todo += behind
            visited.update(behind)
    return found


def rows_are_equal(t: torch.Tensor) -> bool:
    return not isinstance(t, DTensor) and t.dim() > 2 and bool((t == t[:1]).all())


def leaves_of(output: typing.Any, depth: int = 4) -> typing.Iterator[torch.Tensor]:
    """Yields all tensors of an output, however nested."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth and isinstance(output, (dict, tuple, list)):
        for x in output.values() if isinstance(output, dict) else output:
            yield from leaves_of(x, depth - 1)
    elif depth and dataclasses.is_dataclass(output):
        yield from leaves_of(list(vars(output).values()), depth - 1)


def _first_input(args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Any:
    """Finds the first floating point tensor that a gradient can flow to: an index of args or a key of kwargs.
    Parameters, such as weight_norm's, are left out: their gradients are written as such after the reduction."""
    for key, x in [*enumerate(args), *kwargs.items()]:
        if (isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) and x.is_floating_point() and
                x.requires_grad):
            return key
    return None


class Call:
    """A module's first input while it is called."""

    def __init__(self, x: torch.Tensor) -> None:
        edge = get_gradient_edge(x)
        self.x, self.version = x, version_of(x)
        self.node, self.number = edge.node, edge.output_nr
        self.first_node = torch._C._autograd._get_sequence_nr()  # nodes of the call count from here
        self.full_layout, self.shape = _whole_of_gradient(x), tuple(x.shape)

    def is_input(self, t: torch.Tensor) -> bool:
        """Returns whether an output is the input, not written over: the tensor itself, or another tensor of its memory,
        as an engine's hooks make it."""
        return self.version == version_of(t) and t.numel() > 0 and _same_memory(self.x, t)

    def users_of(self, output: typing.Any) -> dict[typing.Any, list[int]]:
        """Returns the nodes that the call made of the input, on the way to its outputs except the input itself; and
        which of their gradients is the input's."""
        users: dict[typing.Any, list[int]] = {}
        visited = {t.grad_fn for t in leaves_of(output) if t.grad_fn is not None and not self.is_input(t)}
        todo = list(visited)
        while todo:
            node = todo.pop()
            if node is self.node or node._sequence_nr() < self.first_node:
                continue
            for i, (behind, number) in enumerate(node.next_functions):
                if behind is self.node and number == self.number:
                    users.setdefault(node, []).append(i)
                elif behind is not None and behind not in visited:
                    visited.add(behind)
                    todo.append(behind)
        return users


class Sum:
    """A gradient of which several nodes each hand on a part."""

    def __init__(self, receive: typing.Callable[[torch.Tensor], None], users: dict[typing.Any, list[int]]) -> None:
        self.receive, self.remaining = receive, len(users)
        self.total: torch.Tensor | None = None
        for node, numbers in users.items():
            node.register_hook(self._hook(numbers))

    def _hook(self, numbers: list[int]) -> typing.Callable[..., None]:
        def hook(inputs: typing.Sequence[torch.Tensor | None], _outputs: typing.Any) -> None:
            if torch.is_grad_enabled():
                return  # create_graph: the gradient of something that the loss is made of, as a penalty or a force
            for number in numbers if self.remaining > 0 else []:
                part = inputs[number]
                if part is not None:
                    self.total = part.detach() if self.total is None else self.total + part.detach()
            self.remaining -= 1
            if self.remaining == 0:
                self.finish()
        return hook

    def finish(self) -> None:
        if self.total is not None:
            self.receive(self.total)
            self.total, self.remaining = None, -1


class Given(typing.NamedTuple):
    """What a module gave out: the local shape, its place (None: not known), and where its memory begins."""

    path: str
    shape: tuple[int, ...]
    full_layout: Whole | None
    storage: int


def given_of(path: str, t: torch.Tensor) -> Given:
    local = local_of(t)
    return Given(path, tuple(local.shape), whole_of(t), local.untyped_storage().data_ptr())


class Pass:
    """One forward pass: how many times each module was called in it, and what the model was given."""

    def __init__(self, number: int, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any],
                 chunk: Chunk | None = None) -> None:
        self.number, self.calls, self.chunk = number, dict[str, int](), chunk
        self.is_nested = False  # it began inside of another pass of the same model
        self.divisor = chunk.divisor if chunk is not None else 1  # of its gradients, after the step's last pass
        self.open, self.reached = True, False  # no backward pass has begun on a loss of it; one is over
        self.output: typing.Any = None  # the model's, while it is not known which of its scalars is the loss
        self.scalars: list[tuple[str, torch.Tensor]] = []  # of modules, while the same is not known
        # Of modules that are called as what the model gives out, until it has given that out.
        self.outputs: dict[str, tuple[torch.Tensor, int]] = {}
        self.inputs = inputs_of(args, kwargs)
        batched_inputs = [x for x in self.inputs.values() if x.dim() > 0]
        self.batch = batched_inputs[0].shape[0] if batched_inputs else None
        self.samples = {batched_inputs[0].shape[0], batched_inputs[0].shape[:2].numel()} if batched_inputs else None
        self.input_storages = {local_of(x).untyped_storage().data_ptr() for x in batched_inputs}
        self.spans: list[tuple[int, int]] = []  # numbers of the nodes that each call makes: first, and end
        self.begun = torch._C._autograd._get_sequence_nr()
        # Of a model that is not called itself, whose modules the program calls:
        self.called: set[int] = set()  # the ids of those that were
        self.gave: list[weakref.ref[torch.Tensor]] = []  # what they gave out
        self.received: set[int] = set()  # the numbers of the transfers by which other ranks sent what it is given
        # What is to be written of it, by name, while it is not known whether it is a micro-batch of its own.
        self.pending: list[tuple[str, typing.Callable[[Pass, str], None]]] | None = None
        self.parent: Pass | None = None  # the pass that it is a part of, as that is known now
        self.names: dict[str, str] = {}  # the names of what is its own in that
        self.loss = ""  # the name under which its loss is written
        self.produced: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}  # what is written, by id: its name
        self.given_out: list[Given] = []  # by modules, in the order in which they ended

    def begin_nodes(self) -> None:
        self.begun = torch._C._autograd._get_sequence_nr()

    def end_nodes(self) -> None:
        self.spans.append((self.begun, torch._C._autograd._get_sequence_nr()))

    def has_made(self, number: int) -> bool:
        """Returns whether a node with this number belongs to the pass."""
        return any(begin <= number < end for begin, end in self.spans)

    def final(self, name: str) -> tuple[Pass, str]:
        """Returns the final pass, of which this one may be a part, and the name that a value has there."""
        return (self, name) if self.parent is None else self.parent.final(self.names.get(name, name))

    def emit(self, name: str, t: torch.Tensor, write: typing.Callable[[Pass, str, torch.Tensor], None]) -> None:
        """Writes a tensor of it, or a copy of it once it is known which pass this is."""
        final_pass, final = self.final(name)
        if final_pass.pending is None:
            write(final_pass, final, t)
        else:
            copy = t.detach().clone()
            final_pass.pending.append((final, lambda owner_pass, named: write(owner_pass, named, copy)))

    def release(self) -> None:
        """Runs what waited for the decision which pass this is, or is a part of."""
        pending, self.pending = self.pending or [], None
        for name, write in pending:
            write(*self.final(name))

    def is_apart(self, peer: Pass) -> bool:
        """Returns whether other ranks sent the inputs of both passes, each by a separate transfer."""
        return bool(self.received) and bool(peer.received) and self.received.isdisjoint(peer.received)

    def join(self, part: Pass) -> None:
        """Another one is a part of this pass: what it called is called again."""
        for name, n in part.calls.items():
            path, kind = name.rsplit(":", 1)
            for i in range(1, n + 1):
                before = name if i == 1 else f"{path}.call{i}:{kind}"
                part.names[before] = self.name(path, kind)
        part.parent = self
        self.spans += part.spans
        self.called |= part.called
        self.gave += part.gave
        self.scalars += [(part.names[name], t) for name, t in part.scalars]

    def name(self, path: str, kind: str) -> str:
        """PATH:KIND, or PATH.call2:KIND where it was called before."""
        name = f"{path}:{kind}"
        self.calls[name] = self.calls.get(name, 0) + 1
        return name if self.calls[name] == 1 else f"{path}.call{self.calls[name]}:{kind}"

    def written(self, t: torch.Tensor, name: str) -> None:
        """Records that a tensor of this pass is written under a name."""
        self.produced[id(t)] = weakref.ref(t), version_of(t), name

    def produced_as(self, t: torch.Tensor) -> str:
        """Returns the name under which this very tensor is written in its current version; "" if it is not."""
        tensor_ref, version, name = self.produced.get(id(t), (None, 0, ""))
        return name if tensor_ref is not None and tensor_ref() is t and version == version_of(t) else ""

    def given_out_within(self, path: str) -> list[Given]:
        """Returns the outputs of the modules inside the one that ends now: from the last one back to the first that is
        not inside of it."""
        return list(
            itertools.takewhile(
                lambda module_output: module_output.path.startswith(f"{path}."), reversed(self.given_out)
            )
        )

    def of_module(self, path: str, t: torch.Tensor) -> str:
        """Returns the name of a module's output."""
        if path.split(".")[0] in ("loss", "output"):
            self.outputs[path] = t.detach(), version_of(t)
        return self.name(path, "fwd")

    def output_name(self, path: str, t: torch.Tensor) -> str:
        """Returns the name of the model's output; "" if a module of that name has returned the same."""
        of_module, version = self.outputs.pop(path, (None, 0))
        is_duplicate = of_module is not None and version == version_of(t) and _same_memory(of_module, t)
        return "" if is_duplicate else self.name(path, "fwd")

    def samples_dim(self, t: torch.Tensor, kind: str, path: str = "") -> int | None:
        """The dimension of an activation's samples: 0, where it has as many rows as the model's input, or some for each
        of its samples; or, within one expert of a list, a row of each token that chose it. None: it has none.

        What depends on no parameter and has one row, such as the angles of a rotary embedding, is that of all samples.
        """
        if t.dim() == 0:
            return None
        if self.samples is None and self.batch is None:
            self.batch, self.samples = t.shape[0], {t.shape[0], t.shape[:2].numel()}
        if ROUTED.search(path) or self.samples is None or self.batch is None:
            return 0
        if "experts." in path:
            return None  # rows of all tokens, in the order of the experts that they were sent to
        alone = t.shape[0] > 1 or t.requires_grad or kind == "bwd"
        several = t.dim() > 2 and self.batch > 1 and t.shape[0] % self.batch == 0 and t.shape[0] > 0
        return 0 if (t.shape[0] in self.samples or several) and alone else None

    def counts_positions(self, args: tuple[typing.Any, ...]) -> bool:
        """Returns whether a module's input is consecutive numbers that the model itself made: one row for all
        samples."""
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        x = local_of(args[0])
        return (not x.is_floating_point() and x.untyped_storage().data_ptr() not in self.input_storages and
                bool((x.flatten().diff() == 1).all()))


class Sink(typing.Protocol):
    """Who is told of tensors: of this pass, or None where nothing is to be captured now."""

    def current(self) -> Pass | None: ...

    def wants(self, kind: str) -> bool: ...

    def in_spec(self, name: str) -> bool: ...

    def receive(self, owner: Pass, name: str, tensor: torch.Tensor, full_layout: Whole | None,
                samples: int | None) -> None: ...

    def reserve(self, name: str) -> None: ...

    def unplaced(self, name: str) -> None: ...  # nothing says where the tensor of this name is in a full one


class Listener:
    """The hooks of one model, from install() to remove()."""

    def __init__(self, model: nn.Module, parameters: list[tuple[str, torch.Tensor]], sink: Sink) -> None:
        self.model, self.parameters, self.sink = model, parameters, sink
        self.gathered = gathered_over(model)
        self.handles: list[typing.Any] = []
        self.sums: list[Sum] = []

    def install(self) -> None:
        for path, m in modules_of(self.model):
            if not path:
                continue
            if self.sink.wants("fwd"):
                full_layouts: dict[int, Whole | None] = {}  # of each output
                # What parallelize_module makes of the output, a plain tensor, is seen after what it makes it of.
                self.handles.append(m.register_forward_hook(untraced(self._whole_hook(full_layouts)), prepend=True))
                self.handles.append(m.register_forward_hook(untraced(self._output_hook(path, full_layouts))))
            if self.sink.wants("bwd"):
                calls: list[Call | None] = []
                self.handles.append(m.register_forward_pre_hook(untraced(self._input_hook(calls)), with_kwargs=True))
                self.handles.append(m.register_forward_hook(untraced(self._gradient_hook(path, calls))))
        for name, p in self.parameters if self.sink.wants("grad") else []:
            if p.requires_grad:
                # The value is read when the step's gradients are complete; here only its place in the order is taken.
                self.handles.append(p.register_post_accumulate_grad_hook(self._order_hook(f"{name}:grad")))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.sums = [], []

    def _order_hook(self, name: str) -> typing.Callable[[torch.Tensor], None]:
        return lambda _p: self.sink.reserve(name)

    def _whole_hook(self, full_layouts: dict[int, Whole | None]) -> typing.Callable[..., None]:
        def hook(_module: nn.Module, _args: typing.Any, output: typing.Any) -> None:
            full_layouts.clear()
            full_layouts.update({i: whole_of(t) for i, t in enumerate(parts_of(output)) if isinstance(t, torch.Tensor)})
        return hook

    def _output_hook(self, path: str, full_layouts: dict[int, Whole | None]) -> typing.Callable[..., None]:
        def hook(module: nn.Module, args: tuple[typing.Any, ...], output: typing.Any) -> None:
            current_pass = self.sink.current()
            if current_pass is None or in_backward():
                return  # activation checkpointing computes it again
            tensors, inner_outputs = tensors_of(output), current_pass.given_out_within(path)
            for i, t in enumerate(parts_of(output)):
                name = f"{path}.{i}" if i else path
                if not isinstance(t, torch.Tensor) or not t.is_floating_point() or isinstance(t, nn.Parameter):
                    continue  # a bias beside an output is no activation
                placed = self._mark(module, args, t, full_layouts.get(i), t is tensors[0], inner_outputs)
                current_pass.given_out.append(given_of(path, t))
                called = current_pass.of_module(name, t)
                if not placed and not self.sink.in_spec(f"{name}:fwd"):
                    self.sink.unplaced(called)
                sequence = i == 0 and isinstance(output, tuple) and output[0] is t
                samples = _samples_of_states(module, sequence, t.dim()) if isinstance(module, nn.RNNBase) else None
                samples = current_pass.samples_dim(t, "fwd", path) if samples is None else samples
                if samples == 0 and t.shape[0] == 1 and current_pass.counts_positions(args):
                    samples = None
                if samples == 0 and not t.requires_grad and torch.is_grad_enabled() and rows_are_equal(t):
                    t, samples = t[:1], None  # angles of positions that were said for each sample: those of all
                self.sink.receive(current_pass, called, t, whole_of(t), samples)
        return hook

    def _mark(
        self,
        module: nn.Module,
        args: tuple[typing.Any, ...],
        t: torch.Tensor,
        full_layout: Whole | None,
        is_first: bool,
        inner_outputs: list[Given],
    ) -> bool:
        """Gives a plain output the place of the DTensor that it is a part of.

        full_layout: the layout before the module's own hooks. is_first: t is the module's first output. inner_outputs:
        outputs of the modules in this one. Returns True if the place is known, or if t is taken for a copy, as a first
        output without a known place is."""
        if whole_of(t) is not None:
            return True
        input_tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        by_weight = _whole_by_weight(module, tuple(t.shape), 0)
        if full_layout is None and by_weight is not None:
            t._anyrank_whole = by_weight
        elif full_layout is not None:
            t._anyrank_whole = _whole_of_local(t, full_layout)
        elif is_first and input_tensor is not None and input_tensor.shape == t.shape and (
                not list(module.parameters()) or _is_of_own_tokens(whole_of(input_tensor))):
            t._anyrank_whole = whole_of(
                input_tensor
            )  # an activation of a part is a part, and so is a block's of its tokens
        if whole_of(t) is None and divided(module, self.gathered) and not _mark_heads(module, t):
            places = _places_by_parts(t, inner_outputs)
            t._anyrank_whole = places[0] if len(places) == 1 else None
            several = t.dim() == 4 and len([place for place in places if place is not None]) > 1
            return whole_of(t) is not None or (
                is_first and not several
            )  # else of own heads, or whole: nothing says which
        return True

    def _input_hook(self, calls: list[Call | None]) -> typing.Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> None:
            current_pass = self.sink.current()
            key = _first_input(args, kwargs) if current_pass is not None and torch.is_grad_enabled() else None
            x = None if key is None else args[key] if isinstance(key, int) else kwargs[key]
            calls.append(None if x is None else Call(x))
        return hook

    def _gradient_hook(self, path: str, calls: list[Call | None]) -> typing.Callable[..., None]:
        def hook(module: nn.Module, _args: typing.Any, output: typing.Any) -> None:
            call, current_pass = calls.pop() if calls else None, self.sink.current()
            users = call.users_of(output) if call is not None and current_pass is not None else {}
            if call is None or current_pass is None or not users:
                return
            name, full_layout = (
                current_pass.name(path, "bwd"), call.full_layout or _whole_by_weight(module, call.shape, 1))

            samples = _samples_of_states(module, True, len(call.shape)) if isinstance(module, nn.RNNBase) else None

            def receive(grad: torch.Tensor) -> None:
                found = current_pass.samples_dim(grad, "bwd", path) if samples is None else samples
                self.sink.receive(current_pass, name, grad, whole_of(grad) or full_layout, found)

            self.sums.append(Sum(receive, users))
        return hook

    def flush(self) -> None:
        """Gradients of which no further part comes, as a backward pass is over; those of other forward passes may have
        theirs yet to come."""
        for gradient_sum in self.sums:
            gradient_sum.finish()
        self.sums = [gradient_sum for gradient_sum in self.sums if gradient_sum.remaining > 0]
