# SPDX-License-Identifier: Apache-2.0
"""What modules read in the first captured step: in a dump of its own, inputs/ in the folder of the run's. A value that
is another module's output is written once, as that, and named in model.json."""

from __future__ import annotations

import contextlib
import fnmatch
import pathlib
import typing

import torch
from torch import nn

from anyrank._errors import AnyrankError
from anyrank.capture._exchange import Alone, Store
from anyrank.capture._listen import (Pass, _samples_of_states, _whole_by_weight, in_backward, inputs_of, local_of,
                                     untraced, whole_of)
from anyrank.capture._model import Groups, modules_of
from anyrank.capture._record import Record
from anyrank.capture._spec import Spec

FOLDER = "inputs"


class Inputs:
    """The inputs of leaf modules, and of those that globs of paths name. max_elements: of one, up to which it is
    written. wanted: whether a name is."""

    def __init__(self, folder: pathlib.Path, groups: Groups, spec: Spec, globs: typing.Sequence[str], max_elements: int,
                 wanted: typing.Callable[[str], bool]) -> None:
        self.folder, self.groups, self.globs, self.max_elements, self.wanted = (
            folder / FOLDER, groups, globs, max_elements, wanted)
        self.record = Record(self.folder, groups, spec, None, 256)
        self.references: dict[str, dict[str, str]] = {}  # of each module: the output that an argument is
        self.failed = ""
        self.handles: list[typing.Any] = []
        self.finished = False  # the step is

    def install(self, model: nn.Module, current: typing.Callable[[], Pass | None], step: int) -> None:
        """Hears what modules are called with, in this step."""
        for path, module in modules_of(model) if not (self.handles or self.finished) else ():
            leaf = not any(True for _ in module.children())
            if path and (leaf or any(fnmatch.fnmatchcase(path, glob) for glob in self.globs)):
                hook = untraced(self._hook(path, current, step))
                self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        self.finished = self.finished or bool(self.handles)
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _hook(self, path: str, current: typing.Callable[[], Pass | None], step: int) -> typing.Callable[..., None]:
        def hook(module: nn.Module, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> None:
            current_pass = current()
            if current_pass is None or in_backward() or self.failed:
                return
            try:
                for key, t in inputs_of(args, kwargs, 1).items():
                    self._take(current_pass, path, module, key, t, step)
            except Exception as error:  # what is read is an extra: the run goes on without it
                self.failed = f"{path}: {type(error).__name__}: {error}"
        return hook

    def _take(self, current_pass: Pass, path: str, module: nn.Module, key: str, t: torch.Tensor, step: int) -> None:
        base = f"{path}.in" if key == "0" else f"{path}.in.{key}"
        produced_name = current_pass.produced_as(t)
        if produced_name:
            self.references.setdefault(path, {}).setdefault(key, produced_name)
            return
        if isinstance(t, nn.Parameter) or t.is_meta or not t.dim() or not self.wanted(f"{base}:fwd"):
            return
        full_layout = whole_of(t) or (_whole_by_weight(module, tuple(t.shape), 1) if key == "0" else None)
        if t.numel() > self.max_elements:
            self.record.left_out("inputs of modules that are large", f"{base}:fwd")
        elif full_layout is None and not self._is_placed():
            self.record.left_out("inputs of modules without a place", f"{base}:fwd")
        else:
            recurrent = isinstance(module, nn.RNNBase)
            samples = (
                _samples_of_states(module, key == "0", t.dim())
                if recurrent
                else current_pass.samples_dim(t, "fwd", path)
            )
            def write(owner_pass: Pass, name: str, values: torch.Tensor) -> None:
                self.record.add(name, name if step == 1 else f"{name}@{step}", local_of(values), full_layout, samples,
                                owner_pass.number, current_pass.batch)

            current_pass.emit(current_pass.name(base, "fwd"), t, write)

    def _is_placed(self) -> bool:
        """Returns whether ranks divide only samples, so that a plain tensor is the whole of its rank's samples."""
        return all(n == 1 or name in self.groups.data for name, n in self.groups.mesh.sizes.items())

    def finish(self, exchange: Alone | Store, record: Record) -> str:
        """Completes the files, of all ranks or of none. record: what else was written of the run.
        Returns why there are none."""
        failed: list[str] = exchange.tell(self.failed)
        why = next((text for text in failed if text), "")
        if why or not any(exchange.tell(bool(self.record.values))):
            self.discard()
            return why
        self.record.inputs, self.record.samples = record.inputs, record.samples
        self.record.finish(exchange, {}, 0)
        self.record.files.remove_older(self.groups.mesh.world)
        return ""

    def discard(self, begins_again: bool = False) -> None:
        """begins_again: other ranks may have begun to write their new files, so only this rank's are removed."""
        self.remove()
        self.record.files.discard()
        if self.groups.mesh.rank == 0 and not begins_again:
            remove(self.folder.parent)


def remove(folder: pathlib.Path) -> None:
    """Removes what an earlier run left of its inputs."""
    for path in (folder / FOLDER).glob("rank-*.safetensors*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, or it has files of the user's
        (folder / FOLDER).rmdir()


def check(globs: typing.Any) -> tuple[str, ...] | None:
    """Checks the argument keep_inputs: globs of paths; None: nothing is kept."""
    if globs is False:
        return None
    if globs is True or not isinstance(globs, (str, list, tuple, set, frozenset)):
        raise AnyrankError(f"keep_inputs: {globs!r} has to be globs of modules' paths, or False")
    return (globs,) if isinstance(globs, str) else tuple(globs)
