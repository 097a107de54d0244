# SPDX-License-Identifier: Apache-2.0
"""anyrank.capture: a run of a PyTorch model, step by step, as files that `anyrank verify` reads."""

from __future__ import annotations

import atexit
import fnmatch
import json
import os
import pathlib
import sys
import types
import typing
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as modules_home

from anyrank._errors import AnyrankError, path_name
from anyrank.capture import _inputs, _operations, _patches
from anyrank.capture._clips import Clips
from anyrank.capture._engines import Engine, engine_of, is_divided
from anyrank.capture._exchange import MOST_SAID, Alone, Store
from anyrank.capture._facts import Facts
from anyrank.capture._files import rank_file
from anyrank.capture._listen import (Listener, Pass, has_no_values, in_backward, in_transform, is_loss_scale, is_scaled,
                                     leaves_of, local_of, loss_of, named_loss_of, parts_of, reached_of,
                                     scalars_of, tensors_of, untraced, version_of, whole_of)
from anyrank.capture._megatron import spec_of
from anyrank.capture._model import (DTensor, averages_of, buffers_of, formats_of, groups_of, modules_of, parameters_of,
                                    plain, roots_of, router_biases_of, unwrapped, wrapped_in)
from anyrank.capture._parts import Transfers, join, pass_of_call
from anyrank.capture._pipelines import Chunk, chunk_now, group_of_stages
from anyrank.capture._places import Whole
from anyrank.capture._rank_state import RankState
from anyrank.capture._record import RanksEnded, Record
from anyrank.capture._rounding import Replay, Rounding
from anyrank.capture._sketches import SketchFiles
from anyrank.capture._spec import Spec
from anyrank.capture._states import states_of
from anyrank.capture._steps import Chosen, Steps

VALUES = ("init", "fwd", "bwd", "grad", "new", "m", "v", "state", "buffer", "clip", "count")
KEPT = ("tensors", "sketch")
SMALL = 1 << 18  # elements of an input or a buffer up to which it is written
_captured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _optimizers(optimizers: typing.Any) -> list[typing.Any]:
    """Optimizers without the wrappers of accelerate and the like; none of an engine's own, which the engine reads."""
    found = []
    for optimizer in (
        optimizers if isinstance(optimizers, (list, tuple)) else [optimizers] if optimizers is not None else []
    ):
        inner = optimizer
        while not isinstance(inner, torch.optim.Optimizer) or type(inner).__module__.startswith("accelerate"):
            if type(inner).__module__.startswith("deepspeed"):
                break
            inner = getattr(inner, "optimizer", None)
            if inner is None:
                raise AnyrankError(f"capture: optimizer: a {type(optimizer).__name__} is no torch.optim.Optimizer")
        if isinstance(inner, torch.optim.Optimizer):
            found.append(inner)
    return found


def _tensors_of(optimizer: typing.Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _share_of(optimizer: typing.Any) -> typing.Any:
    """Returns the optimizer inside of one that divides its parameters over ranks: ZeroRedundancyOptimizer, fairscale's
    OSS."""
    inner = getattr(optimizer, "optim", None)
    return inner if hasattr(inner, "state") and hasattr(inner, "param_groups") else None


class Capture:
    """Writes what `model` computes on this rank into `folder`, from start() to stop(), or in a with-block.

        with anyrank.capture(model, "dump", optimizer=optimizer):
            train(model, optimizer)

    model      a torch.nn.Module, wrapped or not in DDP, FSDP2 (fully_shard), torch.compile, tensor parallelism; what
               wraps it inside of the block is seen too. Or a DeepSpeed engine; or a schedule of
               torch.distributed.pipelining, or a list of the modules of this rank's stages
    folder     gets rank-00000.safetensors and so on, complete when the block is left; after an error, nothing
    optimizer  its optimizer, or several; default: those that update the model's parameters
    rank       where there is no process group: this process's rank in spec's mesh
    spec       what the model does not say of itself: {"mesh": .., "shard": .., "partial": .., "mean_over": ..}, or the
               name of a JSON file with it; "megatron": it is read from a model of Megatron-core
    steps      which training steps, from 1: {1, 100}, range(1, 4), a function; default: all
    first_step the number of the first step: 4 in a run that resumes after three, whose weights are NAME:new@3
    rounding   True: measures on one rank what rounding changes in each tensor, for `anyrank verify --rounding`, by
               repeating each captured pass with errors; ranks of a parallel run measure nothing
    ema        averaged weights: a module (AveragedModel), or tensors in the order of the model's parameters
    only       globs of the names to keep; default: all
    keep_inputs  globs of modules' paths: what these read in the first captured step is written to FOLDER/inputs,
               besides what leaf modules read; False: nothing is
    operations  each operation and what it gives is written to FOLDER/operations, so that the first wrong one can be
               named (verify.md); up to 256 MB of a rank
    values     which kinds: any of "init", "fwd", "bwd", "grad", "new", "m", "v", "state", "buffer", "clip",
               "count"
    keep       "sketch": a few kilobytes stand for each tensor, in FOLDER/rank-00000.sketch and so on, to which each
               captured step is appended
    every      captures the first step, and then every n-th
    timeout    seconds to wait at the end for ranks that are still running

    A step is its forward passes, until the next one after an optimizer's step. Programs whose steps cannot be seen so
    call gradients(), gradient_norm(), state() and step() themselves. Raises AnyrankError for what cannot be captured.
    """

    def __init__(self, model: typing.Any, folder: str | os.PathLike[str], optimizer: typing.Any = None, *,
                 rank: int | None = None, spec: typing.Any = None, steps: Steps = None, first_step: int = 1,
                 rounding: bool = False, ema: typing.Any = None, only: str | typing.Sequence[str] | None = None,
                 keep_inputs: str | typing.Sequence[str] | bool = (), operations: bool = False,
                 values: typing.Sequence[str] = VALUES, keep: str = "tensors", every: int | None = None,
                 timeout: float = 600) -> None:
        unknown = set(values) - set(VALUES)
        if unknown:
            raise AnyrankError(f"values: {sorted(unknown)} are none of {list(VALUES)}")
        if only is not None and not isinstance(only, (str, list, tuple, set, frozenset)):
            raise AnyrankError(f"only: {only!r} has to be a glob, or several")
        if not isinstance(first_step, int) or isinstance(first_step, bool) or first_step < 1:
            raise AnyrankError(f"first_step: {first_step!r} has to be the number of a step, which count from 1")
        if keep not in KEPT:
            raise AnyrankError(f"keep: {keep!r} is none of {list(KEPT)}")
        if every is not None and (steps is not None or not isinstance(every, int) or every < 1):
            raise AnyrankError(f"every: {every!r} has to be a number of steps, without steps=")
        if keep == "sketch" and (rounding or operations or keep_inputs):
            raise AnyrankError("keep=\"sketch\": rounding=, operations= and keep_inputs= need the tensors")
        if every is not None:
            steps = lambda step: (step - first_step) % every == 0  # noqa: E731
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise AnyrankError(f"timeout: {timeout!r} has to be more than 0 seconds")
        if not path_name(folder):
            raise AnyrankError("capture: the folder has no name, expected one (\".\": the working directory)")
        self._given, self._folder, self._spec = model, pathlib.Path(folder), Spec(spec)
        self._steps_given = steps
        self._model, _ = unwrapped(model)
        self._roots = roots_of(self._model)
        self._around: typing.Any = None  # what the program calls in place of the model: a DDP, an engine
        self._engine: Engine | None = None
        self._unhear: typing.Callable[[], None] | None = None
        self._optimizers, self._timeout, self._given_rank = _optimizers(optimizer), timeout, rank
        self._chosen, self._values = Chosen(steps), set(values)
        self._only = [only] if isinstance(only, str) else only
        self._inputs_of = _inputs.check(keep_inputs)
        self._inputs: _inputs.Inputs | None = None
        self._operations_wanted, self._sketched = operations, keep == "sketch"
        self._operations: _operations.Operations | None = None
        self._rounding_wanted = rounding
        self._rounding: Rounding | None = None
        self._replay: Replay | None = None  # a pass that is repeated now
        self._averages, self._first_step = averages_of(ema, self._model), first_step
        self._check_optimizers()
        if self._spec.mesh is not None:
            groups_of(self._model, None, *self._ranks(), self._spec.mesh, None)
            self._spec.check(self._spec.mesh)
        self._record: Record | None = None
        self._state = RankState()
        self._told_optimizers = bool(self._optimizers)
        self._ended = False  # another rank has ended its run before this one
        self._announced: list[Record] = []  # steps whose sketches are not written yet
        self._written = 0  # the last step whose sketches are
        self._listener: Listener | None = None
        self._facts = Facts(first_step)
        self._handles: list[typing.Any] = []
        self._exchange: Alone | Store | None = None
        self._running, self._step = False, first_step
        self._transfers, self._clips, self._odd_clips = Transfers(), Clips(), set[str]()  # those that were said
        self._pass: Pass | None = None  # that a module's output belongs to now
        self._deaf = self._again = False  # an evaluation; a closure's further calls within one optimizer.step
        self._heard = False  # the model was called, if only to evaluate
        self._whole = self._in_part = False  # the model itself has been called; a part of it is, and it is not
        self._parts: set[int] = set()  # the ids of its modules
        self._trained = self._started = self._differentiable = False
        self.passes = 0  # forward passes that were captured
        self.without_backward = False  # outputs asked for gradients, and none came
        self.notes: list[str] = []  # the text of each warning
        self._begin()

    def _begin(self) -> None:
        """Begins a step, of which nothing has been seen."""
        self._passes = 0
        self._of_step: list[Pass] = []  # those of them that are captured
        self._has_gradients: set[str] = set()
        self._over = False  # gradients were complete, or an update was seen: the next pass is another step's
        self._scales: dict[int, float] = {}  # of the scalars that a GradScaler gave out
        self._grads: dict[str, tuple[torch.Tensor, int]] = {}  # as the last backward pass left them
        self._heads: list[torch.Tensor] = []  # of the parameters, as the last forward pass left them
        self._calls: dict[str, int] = {}
        self._given_gradients = False  # by the program or an engine: no other is the gradient
        self._clips.odd = ""
        self._given_states: dict[str, dict[str, torch.Tensor]] = {}
        self._calls_of: dict[nn.Module | None, int] = {}  # passes of the model, or of each stage's part of it
        self._open_roots: list[nn.Module] = []  # models whose call has not returned
        self._transfers.begin_step()

    # --- from start to stop -------------------------------------------------------------------------------------------

    def __enter__(self) -> Capture:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 _trace: types.TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self._abandon(f"{kind.__name__}: {error}")

    def start(self) -> Capture:
        """Begins to listen. The capture itself."""
        if self._running:
            raise AnyrankError("this capture has started already")
        if any(root in _captured for root in self._roots):
            raise AnyrankError("this model is being captured already: one with-block captures all of its steps")
        if self._started:
            raise AnyrankError("this capture has ended: make another one, with another folder")
        if self._ranks()[0] == 0 and (self._folder / rank_file(0, 0)).exists():
            self._warn(f"{self._folder}: replaces the dump that an earlier run left here; another folder keeps both")
        self._running = self._started = True
        self._process = os.getpid()
        atexit.register(self._at_exit)
        _captured.update(self._roots)
        _patches.watch(self)
        self._parts = {id(m) for m in self._model.modules()}
        if self._operations_wanted:
            self._operations = _operations.Operations(self._model, self._folder, self._ranks()[0])
            self._operations.__enter__()
        # The first is called before any hook of the model's own, so that FSDP's parameters are the shards.
        self._handles = [modules_home.register_module_forward_pre_hook(untraced(self._first_pass))]
        for root in self._roots:
            self._handles += [root.register_forward_pre_hook(untraced(self._begin_pass), with_kwargs=True),
                              root.register_forward_hook(untraced(self._end_pass))]
        return self

    def stop(self) -> None:
        """Ends the last step and completes the files; with several ranks, every rank has to."""
        if not self._is_running():
            return
        try:
            if self._record is None:
                raise AnyrankError(f"{self._folder}: no forward pass of the model was seen, so nothing is written: is "
                                   "it the model that the program calls, or a copy of it? Calls under torch.func are "
                                   "not seen")
            self._end_step()
            if not self._running:
                return  # it could not be ended, as was said
            self._complete()
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        self._let_go()
        if self._operations is not None and (failed := self._operations.write()):
            self._warn(f"{self._folder}: operations=True: they could not be recorded: {failed}")
        if self.passes == 0:
            step_count = self._step - self._first_step
            count = f"{step_count} step{'s' if step_count > 1 else ''}"
            self._warn(f"{self._folder}: the run had {count}, and steps={self._steps_given!r} chooses none of them, so "
                       "there are no activations and no gradients")

    def _is_running(self) -> bool:
        """Returns whether there is something to end: false in a process that the captured one forked, which does not
        own the files."""
        return self._running and os.getpid() == self._process

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        warnings.warn(text, stacklevel=4)

    def _abandon(self, why: str) -> None:
        """Leaves nothing behind."""
        if not self._is_running():
            return
        self._let_go()
        if self._record is not None:
            self._record.files.discard()
        if self._inputs is not None:
            self._inputs.discard()
        if self._exchange is None and self._ranks()[1] > 1 and dist.is_initialized():
            self._exchange = Store(*self._ranks(), self._timeout, str(self._folder))
        if self._exchange is not None:
            self._exchange.failed(why)

    def _at_exit(self) -> None:
        """Completes the files of a program that ends without stop(), unless an exception ended it."""
        kind = getattr(sys, "last_type", None)
        if kind is None:
            self.stop()
        else:
            self._abandon(f"{kind.__name__}: {sys.last_value}")

    def _let_go(self) -> None:
        atexit.unregister(self._at_exit)
        self._running, self._pass = False, None
        if self._operations is not None:
            self._operations.__exit__(None, None, None)
        self._facts.remove()
        if self._listener is not None:
            self._listener.remove()
        if self._inputs is not None:
            self._inputs.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hear_engine(None)
        _patches.unwatch(self)
        for root in self._roots:
            _captured.discard(root)

    def _complete(self) -> None:
        if self._record is None or self._exchange is None:
            return
        counts = {"micro_batches": self._micro_batches, "targets": self._targets if self._ranks()[1] == 1 else 0}
        metadata = {key: str(count) for key, count in counts.items() if count}
        updated = {id(p) for o in self._optimizers if "Muon" in type(o).__name__ for p in _tensors_of(o)}
        formats = {**self._formats, "orthogonal": [name for name, p in self._parameters if id(p) in updated]}
        if any(formats.values()):
            metadata["anyrank.formats"] = json.dumps(formats)
        self._write_announced(wait=True)
        if not self._sketched:
            self._record.finish(self._exchange, metadata,
                                self._step - 1 if self._chosen.max_step is None and "count" in self._values else 0)
            self._record.files.remove_older(self._record.groups.mesh.world)
        if self._inputs is not None:
            failed = self._inputs.finish(self._exchange, self._record)
            self._facts.stage["inputs"] = self._inputs.references
            if failed:
                self._warn(f"{self._folder}: what modules read could not be written: {failed}")
        elif self._record.groups.mesh.rank == 0:
            _inputs.remove(self._folder)
        if self._record.groups.mesh.rank == 0:
            _operations.remove(self._folder)
        if self._rounding is not None and self._rounding.failed:
            self._warn(f"{self._folder}: rounding=True: what rounding does could not be measured: "
                       f"{self._rounding.failed}")
        elif self._rounding is not None and self._record.magnitudes is not None:
            self._rounding.write(self._folder / "allowed.safetensors", self._record.magnitudes)
        step_count = self._step - self._first_step
        self._facts.finish(self._exchange, self._folder, self._record.groups.mesh, step_count, self._micro_batches,
                           self._optimizers)
        self._exchange.end()
        self.without_backward = self._differentiable and not any(
            name.endswith((":bwd", ":grad")) for name in self._record.seen)
        for text in dict.fromkeys(self._record.notes):
            self._warn(text)
        self._record = None

    def _ranks(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        if dist.is_available() and dist.is_initialized():
            if self._given_rank not in (None, dist.get_rank()):
                raise AnyrankError(f"rank={self._given_rank}: by the process group this is rank {dist.get_rank()}")
            return dist.get_rank(), dist.get_world_size()
        world = 1
        for size in (self._spec.mesh or {}).values():
            world *= size if isinstance(size, int) else 1
        rank = self._given_rank or 0
        if not 0 <= rank < world:
            reason = f"the mesh {self._spec.mesh} has {world} ranks, from 0" if self._spec.mesh else (
                "without a process group the ranks are those of spec={\"mesh\": ..}, which is not given")
            raise AnyrankError(f"rank={rank}: {reason}")
        if world > 1 and self._given_rank is None:
            raise AnyrankError(f"the mesh {self._spec.mesh} has {world} ranks, without a process group: say rank=")
        return rank, world

    def _check_optimizers(self) -> None:
        parameters = [p for _, p in parameters_of(self._model)]
        # An engine gives an optimizer parts of its own in place of the parameters, but for those that are frozen.
        parameter_ids = {id(p) for p in parameters} if not any(map(is_divided, parameters)) else set()
        for optimizer in self._optimizers:
            if parameter_ids and not any(id(p) in parameter_ids for p in _tensors_of(optimizer)):
                raise AnyrankError(f"the optimizer {type(optimizer).__name__} updates none of the model's parameters: "
                                   "was it made for another model, or before fully_shard or .to() replaced them?")

    def _prepare(self) -> None:
        """Collects what is known at the first pass: parameters as the optimizer has them, wrappers, the mesh."""
        if self._record is not None or not self._running:
            return
        self._model, wrapper = unwrapped(self._given)
        wrapper = wrapper or (unwrapped(self._around)[1] if self._around is not None else None)
        rank, world = self._ranks()
        if self._spec.of_megatron:
            self._spec = Spec(spec_of(self._model, rank, world), read=True)
        self._hear_engine(engine_of(wrapper))
        self._check_optimizers()
        named_parameters = parameters_of(self._model)
        empty = [name for name, p in named_parameters if p.numel() == 0]
        if self._engine is None and 2 * len(empty) > len(named_parameters):
            raise AnyrankError(
                f"{len(empty)} of {len(named_parameters)} parameters are empty where the model is called, first "
                f"{empty[0]}: an engine puts them together for each use, and this one is not known "
                "(DeepSpeed's ZeRO-3 is): capture a run without it, or with fully_shard"
            )
        self._spec.parameters = {name for name, _ in named_parameters}
        self._spec.modules = {path for path, _ in modules_of(self._model)}
        self._parameters = [(self._spec.tied.get(name, name), p) for name, p in named_parameters]
        names = [name for name, _ in self._parameters]
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        if twice:
            raise AnyrankError(f"{self._spec.source}: tied: this rank has {twice[0]} and what is tied to it, apart")
        self._groups = groups_of(self._model, wrapper, rank, world, self._spec.mesh, self._spec.mean_over,
                                 group_of_stages(wrapper))
        self._spec.check(self._groups.mesh.sizes)
        self._formats = formats_of(self._model, wrapper) if world > 1 else {}
        several = world > 1 and dist.is_initialized()
        if self._exchange is None:
            self._exchange = Store(rank, world, self._timeout, str(self._folder)) if several else Alone()
        self._listener = Listener(self._model, self._parameters, self)
        self._facts.begin(self._model, wrapper, self._parameters)
        self._open_record()

    def _hear_engine(self, engine: Engine | None) -> None:
        if self._unhear is not None:
            self._unhear()
        self._engine, self._unhear = engine, None
        if engine is not None:
            self._unhear = engine.hear_steps(self._before_engine, self._after_engine)

    def _before_engine(self) -> None:
        """Handles an engine that is about to clip and to update, so that its gradients are complete."""
        engine = self._engine
        if engine is not None and self._passes:
            self._over = True
            selected = [(name, p) for name, p in self._parameters if self._wanted(f"{name}:grad")]
            self._take_gradients((name, engine.gradient(p)) for name, p in selected)

    def _after_engine(self) -> None:
        norm = self._engine.norm() if self._engine is not None else None
        if norm is not None:
            self.on_norm(norm, 2.0)

    def _open_record(self) -> None:
        """Begins the run's files with the first step, and writes the initial weights."""
        steps = min(self._chosen.max_step or 8, 8)
        entries = (6 * len(self._parameters) + 2 * len(list(self._model.modules())) + 8) * steps
        files = SketchFiles(self._folder, self._groups.mesh.rank, self._step) if self._sketched else None
        self._record = Record(self._folder, self._groups, self._spec, self._only, entries, files)
        if self._rounding_wanted and self._groups.mesh.world == 1 and self._engine is not None:
            self._warn(f"{self._folder}: rounding=True: what rounding does is not measured under an engine, which has "
                       "its gradients elsewhere")
        elif self._rounding_wanted and self._groups.mesh.world == 1:
            self._rounding, self._record.magnitudes = Rounding(self._parameters, self._model), {}
        if self._inputs_of is not None and "fwd" in self._values and not self._sketched:
            self._inputs = _inputs.Inputs(self._folder, self._groups, self._spec, self._inputs_of, SMALL, self._wanted)
        self._micro_batches, self._targets = 1, 0
        if self._step in self._chosen:
            kind, step = ("init", 1) if self._step == 1 else ("new", self._step - 1)
            self._keep_parameters(kind, step)
            if self._step > 1:
                self._keep_states(step)

    # --- passes and steps ---------------------------------------------------------------------------------------------

    def _first_pass(self, module: nn.Module, _args: typing.Any) -> None:
        """Handles the first call of the model itself. Earlier calls of its parts, outside of the model, were no
        passes."""
        if module in self._roots and not in_backward() and not in_transform():
            self._handles.pop(0).remove()
            self._whole = True
            if self._record is not None:
                self._begin_again()
            else:
                self._prepare()

    def on_call(self, module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> bool:
        """Handles a call of a module. If the model itself is never called, a pass consists of all calls of its parts
        until one goes backward."""
        if not self._trained and any(inner in self._roots for inner in wrapped_in(module)):
            self._around = self._around if module in wrapped_in(self._around) else module
        if (self._whole or self._in_part or id(module) not in self._parts or not self._running or in_backward() or
                self._again or self._replay is not None or module in self._roots or in_transform()):
            return False
        self._in_part = True
        self._deaf = not torch.is_grad_enabled()
        if not self._deaf:
            self._choose_pass(module, args, kwargs)
        self._called(module, args, kwargs)
        return True

    def _choose_pass(self, module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> None:
        """Chooses the pass that a call of a part of the model belongs to."""
        if self._pass is None or not self._pass.open or self._is_over():
            self._prepare()
            if self._passes and self._is_over():
                self._end_step()
            self._start_pass(args, kwargs)
        else:
            forward_pass = pass_of_call(id(module), [*args, *kwargs.values()], self._pass, self._open_passes())
            if forward_pass is None:
                self._start_pass(args, kwargs, further=True)
            else:
                self._pass = forward_pass
        if self._pass is not None:
            self._pass.called.add(id(module))
            self._pass.begin_nodes()

    def _open_passes(self) -> list[Pass]:
        return [forward_pass for forward_pass in self._of_step if forward_pass.open]

    def _whole_passes(self, reached: list[Pass]) -> list[Pass]:
        """Returns the passes from which a loss is computed, after merging those that turn out to be one."""
        if self._whole:
            return reached
        joined_passes, parts = join(reached, self._of_step, self._transfers.count)
        self._of_step = [forward_pass for forward_pass in self._of_step if forward_pass not in parts]
        self._passes -= len(parts)
        self._pass = joined_passes[0] if self._pass in parts else self._pass
        if parts and self._rounding is not None:
            self._rounding.failed = "a pass is several calls of parts of the model, and not one of the model"
        return joined_passes

    def on_transfer(self, received: typing.Any) -> None:
        """This rank sends another one something, or is about to receive it in this tensor."""
        if not (self._in_part or in_backward()):
            self._transfers.hear(received)

    def hears_calls(self) -> bool:
        return not (self._whole and self._trained)

    def _called(self, module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> None:
        if self._rounding is not None and self._pass is not None and not self._deaf:
            self._rounding.called(self._pass, module, args, kwargs)

    def _gave(self, output: typing.Any) -> None:
        if self._rounding is not None and self._pass is not None:
            self._rounding.gave(self._pass, leaves_of(output))

    def after_call(self, output: typing.Any) -> None:
        deaf, self._in_part, self._deaf = self._deaf, False, False
        if deaf:
            return
        self._end_nodes()
        if self._pass is not None:
            self._pass.gave += [weakref.ref(t) for t in leaves_of(output)]
        self._gave(output)
        self._heads = self._heads_now()
        self._differentiable |= any(t.requires_grad for t in tensors_of(output))

    def _begin_pass(self, module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> None:
        if in_backward() or self._again or self._replay is not None or in_transform():
            return  # computed again: by activation checkpointing, by an optimizer's closure, to measure rounding
        training = torch.is_grad_enabled()
        heard, self._heard = self._heard, True
        chunk = chunk_now()
        probe = has_no_values(args) or (chunk is not None and chunk.probe)
        self._deaf = probe or (not training and (self._trained or bool(self._optimizers)))
        if self._passes and (self._is_over() or not (training or self._trained)):
            self._end_step()
        if self._deaf or not self._running:
            return
        if training and not self._trained and heard:
            self._begin_again()  # samples were drawn before, or an evaluation was made
        self._start_pass(args, kwargs, module, chunk)
        self._called(module, args, kwargs)

    def _begin_again(self) -> None:
        """Discards what came before the first training step, which was no step. Wrappers may have been added since."""
        self._facts.remove()
        if self._listener is not None:
            self._listener.remove()
        if self._record is not None:
            self._record.files.discard()
        if self._inputs is not None:
            self._inputs.discard(begins_again=True)
        self._record, self._step, self._pass, self.passes = None, self._first_step, None, 0
        self._announced, self._written = [], 0
        self._begin()
        self._prepare()

    def _start_pass(self, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any], root: nn.Module | None = None,
                    chunk: Chunk | None = None, further: bool = False) -> None:
        """further: it may be a part of one before, as is not known yet."""
        if not self._running:
            return
        if chunk is not None:
            _patches.hear_stages(chunk.stage)
        self._trained = self._trained or torch.is_grad_enabled()
        if self._passes == 0 and self._step in self._chosen and self._listener is not None:
            self._listener.install()
            self._facts.install()
            self._state.begin()
            if self._inputs is not None:
                self._inputs.install(self._model, self._reading, self._step)
            if self._step > self._first_step and self._step - 1 not in self._chosen:
                self._keep_parameters("new", self._step - 1)
        if self._passes == 0:
            self._open_roots = []
        is_nested = root in self._open_roots  # Lightning calls training_step through the model, which calls the model
        if root is not None:
            self._open_roots.append(root)
        self._passes += 1
        self._clips.begin_pass(p for _, p in self._parameters)
        self._calls_of[root] = self._calls_of.get(root, 0) + 1
        number = chunk.number if chunk is not None else self._calls_of[root] - 1
        if root is not None:
            self._micro_batches = max(self._micro_batches, number + 1)
        labels = kwargs.get("labels")
        if self._step == 1 and isinstance(labels, torch.Tensor):
            self._targets += int((labels[..., 1:] != -100).sum())
        self._pass = Pass(number, args, kwargs, chunk) if self._step in self._chosen else None
        if self._pass is not None:
            forward_pass = self._pass
            forward_pass.is_nested = is_nested
            forward_pass.received = self._transfers.numbers_of(forward_pass.inputs.values()) if root is None else set()
            forward_pass.pending = (
                []
                if further and not all(forward_pass.is_apart(open_pass) for open_pass in self._open_passes())
                else None
            )
            self._of_step.append(forward_pass)
            self.passes += 1
            if forward_pass.pending is None:
                self._take_inputs(forward_pass)
            else:
                forward_pass.pending.append(
                    ("", lambda owner_pass, _: self._take_inputs(forward_pass) if owner_pass is forward_pass else None)
                )

    def _left_out(self, category: str, name: str) -> None:
        if self._record is not None:
            self._record.left_out(category, name)

    def _take_inputs(self, forward_pass: Pass) -> None:
        """Records the model's input. A later stage of a pipeline is given the output of the stage before."""
        if self._record is None or not (forward_pass.chunk.stage.is_first if forward_pass.chunk is not None else
                                        self._record.groups.mesh.is_first("pp")):
            return
        if not forward_pass.is_nested:
            self._record.count_inputs(forward_pass.inputs, forward_pass.batch, self._step)
        for key, t in forward_pass.inputs.items():
            if t.numel() > SMALL:
                self._record.left_out("inputs of the model that are large", f"input.{key}")
            elif t.is_meta or not t.dim():
                continue
            else:
                samples = 0 if t.shape[0] == forward_pass.batch else forward_pass.samples_dim(t, "fwd")
                self.receive(forward_pass, forward_pass.name(f"input.{key}", "fwd"), t, whole_of(t), samples)

    def _end_pass(self, module: nn.Module, _args: typing.Any, output: typing.Any) -> None:
        if in_backward() or self._again or self._replay is not None or in_transform():
            return
        if self._open_roots and self._open_roots[-1] is module:
            self._open_roots.pop()
        forward_pass, deaf, self._deaf = self._pass, self._deaf, False
        if deaf:
            return
        self._end_nodes()
        self._gave(output)
        self._heads = self._heads_now()
        if forward_pass is None:
            return
        self._differentiable |= any(t.requires_grad for t in tensors_of(output))
        if any(t.requires_grad for t in [*scalars_of(output), *filter(None, [loss_of(output)])]):
            forward_pass.output = output  # until it is known on which of them backward() is called
        else:
            self._take_output(forward_pass, output, loss_of(output))

    def _end_nodes(self) -> None:
        if self._pass is not None:
            self._pass.end_nodes()

    def _take_output(
        self, forward_pass: Pass, output: typing.Any, loss: torch.Tensor | None, unused: bool = False
    ) -> None:
        """Records the model's output: only its loss, if it has one; unused: a loss that is not minimised."""
        forward_pass.output = None
        if loss is not None and not unused:
            self._take_own(forward_pass, "loss", loss)
            return
        several = isinstance(output, (tuple, list))
        parts = [t for t in (parts_of if several else tensors_of)(output) if loss is None or t is not loss]
        for i, t in enumerate(parts[:None if several else 1]):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self._take_own(forward_pass, f"output.{i}" if i else "output", t)

    def _take_own(self, forward_pass: Pass, path: str, t: torch.Tensor) -> str:
        """Writes what the model itself gives out, but for what a pipeline's stage hands to the next. The name that it
        has."""
        name = forward_pass.output_name(path, t)
        is_last_stage = forward_pass.chunk is not None and forward_pass.chunk.stage.is_last
        if name and (is_last_stage or path == "loss" or self._record is None or
                     (forward_pass.chunk is None and self._record.groups.mesh.is_last("pp"))):
            self._take(forward_pass, name, t, whole_of(t), forward_pass.samples_dim(t, "fwd"))
        return name or f"{path}:fwd"

    def _end_step(self) -> None:
        """Ends the step, because the next pass belongs to another one: records gradients not written yet, and the
        update."""
        if self._passes:
            self._write_announced()
        if self._record is None or not self._passes or self._step not in self._chosen:
            if self._passes:
                self._next_step()
            return
        for forward_pass in self._of_step:
            forward_pass.release()
            self._take_scalars(forward_pass, None)
            if forward_pass.output is not None:
                self._take_output(forward_pass, forward_pass.output, loss_of(forward_pass.output))
        self._keep_gradients(unseen=True)
        self._micro_batches = max(self._micro_batches, 0 if self._whole else len(self._of_step))
        self._facts.on_step(self._step, self._passes, self._without_gradient(), self._clips.odd)
        has_last_stage = any(
            (
                forward_pass.chunk.stage.is_last
                if forward_pass.chunk is not None
                else self._record.groups.mesh.is_last("pp")
            )
            for forward_pass in self._of_step
        )
        if (
            has_last_stage
            and (self._has_gradients or self._given_gradients)
            and not any(forward_pass.loss for forward_pass in self._of_step)
        ):
            self._record.left_out("losses, as no backward pass of a scalar was seen", "loss")
        if self._is_over():
            self._keep_parameters("new", self._step)
            self._keep_states(self._step)
        for name, t in self._averages.items():
            self._keep(f"ema.{name}:new", t, whole_of(t))
        for name, b in buffers_of(self._model):
            if b.numel() > SMALL:
                self._record.left_out("buffers that are large", name)
            else:
                self._keep(f"{name}:buffer", b, whole_of(b))
        self._record.end_step()
        if self._rounding is not None:
            self._rounding.end_step(lambda name: self._at(name, self._step), self._optimizers)
        if self._sketched:
            self._append_step()
        self._next_step()

    def _append_step(self) -> None:
        """Ends the record of a step, which is complete once all ranks have said what they have of it. Nothing waits for
        that here: another rank may wait for this one in its forward pass, as a pipeline's stage, or in a collective."""
        if self._record is None or self._exchange is None:
            return
        ended = self._record
        assert isinstance(ended.files, SketchFiles)
        ended.files.step = self._step
        ended.files.state = self._state.report_of(ended, self._step, self._optimizers, self._facts.rates_now(),
                                                  self._parameters)
        ended.announce(self._exchange)
        self._announced.append(ended)
        self._record = Record(self._folder, self._groups, self._spec, self._only, 0, SketchFiles(
            self._folder, self._groups.mesh.rank, self._step + 1, ended.files))
        self._record.carry(ended)
        self._write_announced()
        if len(self._announced) == MOST_SAID:
            self._warn(f"{self._folder}: other ranks are {MOST_SAID} captured steps behind rank {self._ranks()[0]}: it "
                       "sketches no further ones")
            self._ended, self._chosen = True, Chosen(lambda _: False)

    def _write_announced(self, wait: bool = False) -> None:
        """Writes steps that all ranks have announced."""
        while self._announced and self._exchange is not None and (
                wait or self._exchange.is_said(self._announced[0].round)):
            ended = self._announced.pop(0)
            assert isinstance(ended.files, SketchFiles)
            ended.files.is_new = self._written == 0 or self._is_read()
            try:
                ended.finish(self._exchange, {}, 0)
            except RanksEnded as error:
                self._warn(f"{self._folder}: {error}: the steps from {ended.files.step} on are not sketched")
                self._ended, self._chosen = True, Chosen(lambda _: False)
                self._announced.clear()
                return
            if self._written == 0:
                ended.files.remove_older(ended.groups.mesh.world)
            self._written = ended.files.step
            self._on_written()

    def _is_read(self) -> bool:
        """Returns whether nobody needs the file's contents any more."""
        return False

    def _on_written(self) -> None:
        """Called when the sketches of a step are in this rank's file."""

    def _take_scalars(self, forward_pass: Pass, loss: torch.Tensor | None) -> None:
        """Writes the scalars that modules gave out, but for the loss itself, which is written once, as what it is."""
        for name, t in forward_pass.scalars:
            if loss is None or not is_scaled(loss, t):
                self._take(forward_pass, name, t, whole_of(t), None)
            elif name in forward_pass.calls:
                forward_pass.calls[name] -= 1  # nothing has this name
        forward_pass.scalars = []

    def _with_state(self) -> list[typing.Any]:
        """Returns the optimizers, and those inside of them that have a rank's share of the state."""
        return [*self._optimizers, *filter(None, map(_share_of, self._optimizers))]

    def _of_other_ranks(self) -> set[int]:
        """Returns the ids of parameters that other ranks update; nothing reads this rank's .grad of them."""
        divided = [o for o in self._optimizers if _share_of(o) is not None]
        return ({id(p) for o in divided for p in _tensors_of(o)} -
                {id(p) for o in divided for p in _tensors_of(_share_of(o))})

    def _next_step(self) -> None:
        self._facts.remove()
        if self._inputs is not None:
            self._inputs.remove()
        if self._listener is not None:
            self._listener.remove()
        self._step, self._pass = self._step + 1, None
        self._begin()
        if not self.hears_calls():
            _patches.hear_calls()
        self._parts = {id(m) for m in self._model.modules()}
        if self._trained and self._chosen.is_past(self._step):
            self.stop()

    # --- what a program says itself -----------------------------------------------------------------------------------

    def gradients(self, given: typing.Mapping[str, torch.Tensor] | None = None) -> None:
        """The gradients are complete now: for programs that clip or use them without torch's functions, before they do.
        The next forward pass is another step's. given: by parameters' names, where p.grad is not what the update reads,
        as the rank's own that an engine sums up in a buffer of its own; those that are missing have none."""
        if given is not None:
            self._take_gradients((self._named(name, t), t) for name, t in given.items())
        self._keep_gradients()
        self._over = self._passes > 0

    def state(self, given: typing.Mapping[str, typing.Mapping[str, torch.Tensor]]) -> None:
        """What the update remembers of each parameter, by its name, where no torch optimizer has it: {NAME: {"m": t,
        "v": t}}, or under the names of torch's optimizers. After the update, before step()."""
        self._given_states.update({self._named(name, None): dict(states) for name, states in given.items()})

    def _named(self, name: str, t: torch.Tensor | None) -> str:
        """Returns the name of a parameter that is given, whose values are t."""
        parameter_by_name = {name: p for name, p in self._parameters} if self._record is not None else {}
        plain_name = plain(name)
        plain_name = plain_name if plain_name in parameter_by_name else plain_name.replace("module.", "", 1)
        if plain_name not in parameter_by_name:
            raise AnyrankError(f"{name!r} is no parameter of the model that has been called; the first of them is "
                               f"{next(iter(parameter_by_name), None)!r}")
        shape = parameter_by_name[plain_name].shape
        if t is not None and t.shape != shape:
            raise AnyrankError(f"{name}: the gradient that is given has the shape {list(t.shape)}, the parameter "
                               f"{list(shape)}")
        return plain_name

    def gradient_norm(self, norm: typing.Any, norm_type: float = 2.0) -> None:
        """States the norm by which gradients are clipped, if torch.nn.utils did not compute it."""
        self.on_norm(norm, norm_type)

    def logged(self, name: str, value: typing.Any) -> None:
        """Records a value that the program logs in this step as `logged.NAME`: a number or a tensor, the same on each
        rank that gives it."""
        if self._passes and self._pass is not None:
            self._keep(f"logged.{name}:fwd", torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1), None)

    def step(self) -> None:
        """Ends the step after the parameters are updated, if no optimizer shows that."""
        self._over = self._passes > 0
        self._end_step()

    # --- what is heard ------------------------------------------------------------------------------------------------

    def current(self) -> Pass | None:
        if self._replay is not None:
            return self._replay.replay_pass
        return None if self._deaf or self._again or in_transform() else self._pass

    def _reading(self) -> Pass | None:
        """Returns the pass to which a module's input belongs; None while a pass is repeated."""
        return self.current() if self._replay is None else None

    def wants(self, kind: str) -> bool:
        return kind in self._values

    def in_spec(self, name: str) -> bool:
        return bool(self._spec.dims_of(name))

    def reserve(self, name: str) -> None:
        if self._record is not None and self._pass is not None and self._replay is None and self._wanted(name):
            self._record.reserve(self._at(name, self._step))

    def unplaced(self, name: str) -> None:
        if self._record is not None:
            self._record.unplaced.add(self._at(name, self._step))

    def receive(self, owner: Pass, name: str, tensor: torch.Tensor, full_layout: Whole | None,
                samples: int | None) -> None:
        if self._replay is not None:
            self._replay.receive(name, tensor)
            return
        owner, name = owner.final(name)
        if owner.open and tensor.dim() == 0 and tensor.requires_grad:
            self.reserve(name)
            owner.scalars.append((name, tensor))
        else:
            owner.emit(name, tensor,
                       lambda owner_pass, final, t: self._take(owner_pass, final, t, full_layout, samples))

    def _take(
        self, forward_pass: Pass, name: str, tensor: torch.Tensor, full_layout: Whole | None, samples: int | None
    ) -> None:
        if self._record is None or not self._running:
            return
        self._record.seen.add(name)
        if not self._wanted(name):
            return
        if self._inputs is not None:
            forward_pass.written(tensor, self._at(name, self._step))
        local, spec = local_of(tensor), self._spec.dims_of(name)
        if set(spec) - {"dp"} and not isinstance(tensor, DTensor):
            full_layout = None  # was worked out from a DTensor that it was made of, and the spec knows better
        divided = spec.get("dp", 0) is not None
        if name.endswith(":bwd"):
            divisor = forward_pass.divisor * self._record.groups.mesh.size(self._record.groups.mean if divided else [])
            scale = self._engine.loss_scale() if self._engine is not None else 1.0
            local = local / (divisor * scale) if divisor * scale != 1.0 else local
        self._record.add(
            name, self._at(name, self._step), local, full_layout, samples, forward_pass.number, forward_pass.batch
        )

    def on_scaled(self, outputs: typing.Any, scaler: typing.Any) -> None:
        """Records that a GradScaler has multiplied losses and returned these."""
        for t in [outputs] if isinstance(outputs, torch.Tensor) else []:
            self._scales[id(t)] = self._state.scale = scaler.get_scale()
        self._facts.on_scaler(scaler)

    def on_backward(self, loss: torch.Tensor) -> None:
        """Assigns a loss to the open passes from which it is computed: a schedule may run several before they go
        backward. A later loss is a further term of the last pass's loss."""
        if self._record is None or in_backward() or self._again or self._replay is not None:
            return
        if loss.numel() != 1:  # what a stage of a pipeline gave out
            for reached_pass in self._whole_passes(reached_of(loss, self._open_passes())) if not self._whole else []:
                self._take_scalars(reached_pass, None)
                reached_pass.open = False
            return
        reached = self._whole_passes(reached_of(loss, self._open_passes())) or reached_of(loss, self._of_step[-1:])
        if not reached:
            return
        loss_pass = reached[0]
        scale = self._scales.pop(id(loss), 1.0) * (self._engine.loss_scale() if self._engine is not None else 1.0)
        value = loss.detach().reshape(()) / (scale * loss_pass.divisor)
        if loss_pass.output is not None:
            model_loss = next(
                (
                    t
                    for t in [loss_of(loss_pass.output), *scalars_of(loss_pass.output)]
                    if t is not None and is_scaled(loss, t)
                ),
                None,
            )
            unused = named_loss_of(loss_pass.output) if model_loss is None else None
            if unused is not None:
                self._record.left_out("losses of the model on which backward() is not called", "loss")
            if model_loss is None:
                self._take_output(loss_pass, loss_pass.output, unused, unused=True)
            if model_loss is not None and is_loss_scale(value, model_loss):
                value = model_loss.detach()
            loss_pass.output = None
        for reached_pass in reached:
            self._take_scalars(reached_pass, loss)
            reached_pass.open = False
            reached_pass.reached = True
        loss_pass.loss = loss_pass.loss or loss_pass.name("loss", "fwd")
        self._take(loss_pass, loss_pass.loss, value, None, None)
        self._record.sums.add(loss_pass.loss)

    def after_backward(self) -> None:
        if self._replay is not None:
            return
        self._clips.after_backward()
        if self._listener is not None:
            self._listener.flush()
        for forward_pass in self._of_step:
            if forward_pass.reached and self._rounding is not None and self._listener is not None:
                forward_pass.reached = False
                self._rounding.repeat(forward_pass, self._listener, self._during)
        if self._pass is not None and self._record is not None and not self._optimizers:
            self._grads.update({name: (p.grad, version_of(p.grad)) for name, p in self._parameters
                                if p.grad is not None and name not in self._has_gradients})

    def _during(self, replay: Replay | None) -> None:
        self._replay = replay

    def on_clip(self, parameters: list[torch.Tensor]) -> bool:
        if not self._is_ours(parameters):
            return False
        is_tracked = self._passes > 0 and self._engine is None
        early, odd = self._clips.judge(parameters) if is_tracked else (False, "")
        if odd and odd not in self._odd_clips:
            self._warn(f"step {self._step}: {odd}")
        self._odd_clips.add(odd)
        if not early:
            self._keep_gradients()
            self._state.clipped += len(parameters)
        return not early

    def on_saved(self, saved: typing.Any) -> None:
        if self._sketched and self._record is not None and self._engine is None:
            self._state.on_saved(saved, self._parameters)

    def on_norm(self, norm: typing.Any, norm_type: float) -> None:
        if not self._passes:
            return
        self._over = True
        if self._pass is None or self._record is None or not self._wanted("grad_norm:clip"):
            return
        norm = torch.as_tensor(norm)
        self._calls["clip"] = self._calls.get("clip", 0) + 1
        name = "grad_norm:clip" if self._calls["clip"] == 1 else f"grad_norm.call{self._calls['clip']}:clip"
        self._record.add_norm(self._at(name, self._step), local_of(norm), whole_of(norm), norm_type)

    def before_update(self, optimizer: typing.Any) -> None:
        """Records the complete gradients of an optimizer's parameters: it steps, or its closure has been called
        once."""
        parameters = _tensors_of(optimizer)
        if not self._running or not self._passes:
            return
        if not self._is_ours(parameters):
            # fp32 copies of all parameters, which the program writes back: an optimizer's step all the same.
            self._over = self._over or (bool(self._grads) and not self._optimizers and sum(
                p.numel() for p in parameters) == sum(p.numel() for _, p in self._parameters if p.requires_grad))
            return
        if not any(optimizer is tracked_optimizer for tracked_optimizer in self._with_state()):
            self._optimizers.append(optimizer)
        self._over = True
        if self._step in self._chosen:
            self._facts.on_update(self._optimizers, self._step)
        updated = {id(p) for p in parameters}
        if self._told_optimizers:  # then those that none of them has, which zero_grad() may remove, are complete too
            optimized_ids = {id(p) for listed_optimizer in self._optimizers for p in _tensors_of(listed_optimizer)}
            updated |= {id(p) for _, p in self._parameters if id(p) not in optimized_ids}
        self._keep_gradients(updated)

    def on_closure(self, is_repeat: bool) -> None:
        """Handles an optimizer's call of its closure. From the second call on, the passes repeat those of the first."""
        self._again = is_repeat

    def _is_ours(self, parameters: list[torch.Tensor]) -> bool:
        ids = {id(p) for p in parameters}
        return self._record is not None and any(id(p) in ids for _, p in self._parameters)

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _at(self, name: str, step: int) -> str:
        return name if step == 1 else f"{name}@{step}"

    def _wanted(self, name: str) -> bool:
        return (name.rsplit(":", 1)[1] in self._values and
                (self._only is None or any(fnmatch.fnmatchcase(name, glob) for glob in self._only)))

    def _keep(self, name: str, tensor: torch.Tensor, full_layout: Whole | None, step: int | None = None) -> None:
        if self._record is not None:
            self._record.seen.add(name)
        if self._record is not None and self._wanted(name):
            self._record.add(name, self._at(name, step or self._step), local_of(tensor), full_layout, None, 0)
            if self._rounding is not None and name.endswith(":grad"):
                self._rounding.captured[name] = local_of(tensor).clone()

    def _keep_parameters(self, kind: str, step: int) -> None:
        for name, p in [*self._parameters, *router_biases_of(self._model)]:
            if self._engine is None or not self._wanted(f"{name}:{kind}"):
                self._keep(f"{name}:{kind}", p, whole_of(p), step)
            else:
                self._keep(f"{name}:{kind}", self._engine.weight(p), whole_of(p), step)

    def _keep_states(self, step: int) -> None:
        """Records the optimizers' state of each parameter; state that this package does not know is reported."""
        sources = [(type(optimizer).__name__, optimizer.state.get) for optimizer in self._with_state()]
        if self._engine is not None:
            sources.append(("the engine", self._engine.states))
        if self._given_states:
            states_by_id = {id(p): self._given_states.get(name) for name, p in self._parameters}
            sources.append(("the program", lambda p: states_by_id[id(p)]))
        for kind, read in sources if self._record is not None else []:
            for name, p in self._parameters:
                states = read(p)
                recognized, unknown = states_of(kind, name, p, states or {})
                for state, value in recognized.items():
                    self._keep(state, value, whole_of(value) or (whole_of(p) if value.shape == p.shape else None), step)
                for key in unknown:
                    self._left_out(f"states of {kind}", f"{name}.{key}")
                if states is None and kind == "the engine":
                    self._left_out(f"states of {kind}", name)

    def _take_gradients(self, named_gradients: typing.Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Writes gradients that are no parameter's own .grad."""
        if self._record is None or self._pass is None or self._listener is None:
            return
        self._listener.flush()
        self._given_gradients = True
        for name, grad in named_gradients:
            if grad is not None:
                self._keep(f"{name}:grad", grad, whole_of(grad))

    def _keep_gradients(self, parameter_ids: set[int] | None = None, unseen: bool = False) -> None:
        """Writes the gradients as they are now, of all parameters or of these; each once in a step. unseen: the program
        may have used them already, and removed them."""
        if self._record is None or self._pass is None or self._listener is None:
            return
        self._listener.flush()
        elsewhere = self._of_other_ranks()
        for name, p in self._parameters if not self._given_gradients else []:
            if (
                name in self._has_gradients
                or id(p) in elsewhere
                or (parameter_ids is not None and id(p) not in parameter_ids)
            ):
                continue
            saved_grad, version = self._grads.get(name, (p.grad, 0))
            grad = saved_grad if p.grad is None else p.grad
            if grad is None:
                continue
            self._has_gradients.add(name)
            if unseen and name in self._grads and version != version_of(grad) and not local_of(grad).any():
                self._warn(f"step {self._step}: {name}.grad was set to zero before its end was seen, and is not "
                           "written: call gradients() when it is complete")
                continue
            if unseen and not self._optimizers:
                self._record.unread.add(self._at(f"{name}:grad", self._step))
            self._keep(f"{name}:grad", grad, whole_of(grad))

    def _without_gradient(self) -> list[str] | None:
        """Parameters to which none came in this step, of those that require one; None: no backward pass was seen."""
        if not self._has_gradients or self._given_gradients:
            return None
        elsewhere = self._of_other_ranks()
        return [name for name, p in self._parameters if p.requires_grad and name not in self._has_gradients and
                id(p) not in elsewhere and local_of(p).numel()]

    # --- updates that nothing shows -----------------------------------------------------------------------------------

    def _heads_now(self) -> list[torch.Tensor]:
        """Copies a corner of each parameter, which shows an update by something other than an optimizer; None if an
        optimizer updates."""
        if self._record is None or self._optimizers or self._engine is not None or not torch.is_grad_enabled():
            return []
        return [local_of(p)[(slice(2),) * p.dim()].clone() for _, p in self._parameters]

    def _is_over(self) -> bool:
        """Returns whether the step's gradients are complete: seen or given, or shown by changed parameters."""
        if self._heads and not self._over:
            self._over = not all(map(torch.equal, self._heads, self._heads_now()))
        return self._over
