# SPDX-License-Identifier: Apache-2.0
"""The exact reference of a model and a batch: loss, outputs and gradients, with what rounding may change in each."""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import os
import pathlib
import struct
import typing

from anyrank import _arrays, _html, _safetensors, testing
from anyrank._arguments import option_words, with_options
from anyrank._command import run
from anyrank._dtensor import is_dtensor
from anyrank._errors import AnyrankError
from anyrank._model import model_path, unwrapped
from anyrank._progress import Progress
from anyrank._safetensors import Entry
from anyrank._scratch import Scratch
from anyrank.report import GradsReport, report_of

if typing.TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyrank._options import GradsOptions

Path = typing.Union[str, "os.PathLike[str]"]
Tensor = typing.Any  # of torch or of numpy
_Kind = typing.Literal["torch", "numpy"]

# What a batch may say that changes no value.
_NO_VALUES = ("max_length_q", "max_length_k", "use_cache", "return_dict", "output_hidden_states", "output_attentions")


class Tensors(typing.Mapping[str, Tensor]):
    """Tensors by name, mapped from a file and made when they are asked for."""

    def __init__(self, entries: typing.Mapping[str, Entry], kind: str | None) -> None:
        self._entries = entries
        self._kind = kind

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if self._kind is None:
            return entry
        return _arrays.torch_of(entry) if self._kind == "torch" else _arrays.numpy_of(entry)

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors: {', '.join([*self][:3])}{', ..' if len(self) > 3 else ''}>"


@dataclasses.dataclass(frozen=True, repr=False)
class Reference:
    """What `grads` gives. Tensors are those of torch where the model or the batch was, else arrays of numpy, else
    (dtype, shape, bytes); all float32."""

    report: GradsReport  #: the command's own
    folder: pathlib.Path  #: its files, a dump for `anyrank.verify`; of temporary files unless out= names it
    grads: typing.Mapping[str, Tensor]  #: by the parameter's name, as in Hugging Face's model
    outputs: typing.Mapping[str, Tensor]  #: loss [1], logits [b, s, V], hidden_states.i [b, s, h]
    activations: typing.Mapping[str, Tensor]  #: with activations=True: every tensor of both passes (models.md)
    allowed: typing.Mapping[str, float]  #: with sensitivity: how much rounding may change each tensor
    keeps: object = None  # the folder, where it is temporary

    @property
    def loss(self) -> float:
        """Returns the mean over all targets; NaN for a block, which has no targets."""
        return self.report.loss[0] if self.report.loss else math.nan

    @property
    def logits(self) -> Tensor:
        """[b, s, V]."""
        return self.outputs["logits"]

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        return f"<Reference: loss {self.loss:.9g}, gradients {self.grads!r}>"

    def _repr_html_(self) -> str:
        rows = [[name, _html.place(self.grads[name].shape), f"{self.allowed[name]:.3g}" if name in self.allowed else ""]
                for name in self.grads]
        columns = ["gradient", "shape", "rounding may change it by"]
        return _html.table(f"loss {self.loss:.9g}", True, columns, rows, str(self))

    def assert_same(self, other: typing.Any, output: typing.Any = None, **rules: typing.Any) -> None:
        """Raises anyrank.testing.NotSame unless gradients, and an output, are those of the reference.

        other: a module after backward(), a dict of gradients by name, a list of such dicts, one a rank, or a dump.
        output: what the model returned, or a dict: its loss, logits and hidden_states are compared first.
        rules: those of anyrank.testing.assert_same; without one, what the reference allows each tensor.
        Errors: TypeError where no rule is given and the reference was made without sensitivity=True.
        """
        __tracebackhide__ = True
        if not any(rules.get(rule) is not None for rule in ("rtol", "atol", "ulp", "close", "sensitivity")):
            if not self.allowed:
                raise TypeError("the reference does not know what rounding allows: make it with sensitivity=True, or "
                                "give rtol and atol (rtol=0: equal values)")
            rules["sensitivity"] = self.folder / "allowed.safetensors"
        if output is not None:
            found = _outputs_of(output)
            common = {**rules, "common": True}
            testing.assert_same(self.folder / "outputs.safetensors", found, **common)
        if hasattr(other, "named_parameters"):
            other = _gradients_of(other, rules)
        parts = isinstance(other, collections.abc.Mapping) and any(map(is_dtensor, other.values()))
        reference = _as_gradients(self.grads) if parts else self.folder / "grads.safetensors"
        testing.assert_same(reference, _as_gradients(other), **rules)


def _outputs_of(output: typing.Any) -> dict[str, typing.Any]:
    """Returns the outputs under the names of outputs.safetensors."""
    def part(name: str) -> typing.Any:
        return output.get(name) if isinstance(output, collections.abc.Mapping) else getattr(output, name, None)

    found = {name: part(name) for name in ("loss", "logits") if part(name) is not None}
    found.update({f"hidden_states.{i}": hidden_state for i, hidden_state in enumerate(part("hidden_states") or ())})
    if not found:
        raise TypeError(f"output: {type(output).__name__} has no loss, logits or hidden_states")
    if "loss" in found:
        entry = _arrays.entry_of(found["loss"])
        found["loss"] = Entry(entry.dtype, (1,), entry.data)
    return found


def _gradients_of(module: typing.Any, rules: dict[str, typing.Any]) -> dict[str, typing.Any]:
    parameters = dict(module.named_parameters())
    without = [name for name, parameter in parameters.items() if parameter.requires_grad and parameter.grad is None]
    if without:
        raise testing.NotSame(f"No gradient: {', '.join(without[:5])}{', ..' if len(without) > 5 else ''} of "
                              f"{len(parameters)} parameters: was backward() called, and does the loss depend on them?")
    if any(not parameter.requires_grad for parameter in parameters.values()):
        rules["common"] = True
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def _as_gradients(gradients: typing.Any) -> typing.Any:
    """Names that say so: a dump's `x.weight` alone would be a weight."""
    if isinstance(gradients, (list, tuple)):
        return [_as_gradients(rank_gradients) for rank_gradients in gradients]
    if isinstance(gradients, collections.abc.Mapping):
        return {name if ":" in name else f"{name}:grad": gradient for name, gradient in gradients.items()}
    return gradients


@with_options("grads")
def grads(model: typing.Any = None, batch: typing.Any = None, *, tensors: _Kind | None = None,
          progress: Progress = None, **options: Unpack[GradsOptions]) -> Reference:
    """Loss, outputs and gradients of the exact reference: `anyrank grads` (check.md).

    model: a model of transformers in memory, whose configuration and weights are written to temporary files, a folder
    with a config.json, or a bundled name. What the configuration asks for and anyrank does not compute is refused.
    batch: a dict of input_ids [b, s] and optionally labels, attention_mask, position_ids, cu_seqlens, of tensors,
    arrays or lists; the ids alone; or a file. Without labels, the ids are the labels; -100 is no target. position_ids
    that restart keep documents apart where model(**batch) does: without attention_mask and use_cache.
    sensitivity=True also measures how much rounding may change each tensor, in the arithmetic of sensitivity_of, which
    is "bf16-pure" of a model in bfloat16 and "f16-pure" of one in float16, if it is not given.
    tensors: "torch" or "numpy"; otherwise torch's where model or batch has them, else numpy's.
    out: a folder for the files, which are temporary without it. block: a folder with one block instead of a model.

        ref = anyrank.grads(model, batch, sensitivity=True)
        output = model(**batch); output.loss.backward()
        ref.assert_same(model, output)
    """
    scratch = Scratch()
    command_options: dict[str, typing.Any] = {"out": scratch.path / "reference", **options}
    option_words("grads", command_options)  # a wrong one, before anything is written
    if tensors not in (None, *typing.get_args(_Kind)):
        raise ValueError(f"anyrank.grads(): tensors={tensors!r}: expected 'torch' or 'numpy'")
    folder = pathlib.Path(command_options["out"])
    if (
        command_options.get("sensitivity")
        and command_options.get("sensitivity_of") is None
        and command_options.get("precision") is None
    ):
        command_options["sensitivity_of"] = _arithmetic(model)
    kind = tensors or _kind(model, batch)
    if batch is not None:
        if command_options.get("input") is not None:
            raise TypeError("anyrank.grads(): batch and input are the same: give one of them")
        command_options["input"] = _batch_file(batch, model, scratch.path / "batch.safetensors")
    elif command_options.get("input") is None and command_options.get("block") is None:
        raise TypeError("anyrank.grads(): batch is missing: the model's input_ids [b, s], or a dict with them")
    with model_path(model) as path:
        try:
            finished = run("grads", [] if path is None else [path], command_options, progress)
        except AnyrankError as error:  # the caller has not seen the temporary file
            text = str(error).replace(str(scratch.path / "batch.safetensors"), "batch")
            raise AnyrankError(text, error.exit_status) from None
    return _reference(report_of(GradsReport, finished), folder, kind, scratch)


def _reference(report: GradsReport, folder: pathlib.Path, kind: str | None, scratch: object) -> Reference:
    written = {pathlib.Path(file).stem for file in report.files}  # the folder may have others, of an earlier run
    folder = pathlib.Path(report.files[0]).parent  # with against= the device's own, inside `folder`
    file_entries = {name: _safetensors.read(folder / f"{name}.safetensors")[0] if name in written else {}
             for name in ("grads", "outputs", "activations", "allowed", "block")}
    allowed = {name: struct.unpack("<d", entry.data)[0] for name, entry in file_entries["allowed"].items()}
    return Reference(
        report,
        folder,
        Tensors({**file_entries["grads"], **file_entries["block"]}, kind),
        Tensors(file_entries["outputs"], kind),
        Tensors(file_entries["activations"], kind),
        allowed,
        scratch,
    )


def _kind(model: object, batch: object) -> str | None:
    """Whose tensors the caller uses."""
    values = [*batch.values()] if isinstance(batch, collections.abc.Mapping) else [batch]
    if hasattr(model, "named_parameters") or any(_arrays.is_torch(value) for value in values):
        return "torch"
    try:
        import numpy  # noqa: F401
    except ImportError:
        return None
    return "numpy"


def _arithmetic(model: typing.Any) -> str | None:
    """Returns the arithmetic for the type of the model's parameters; None for the command's choice."""
    if not hasattr(model, "parameters"):
        return None
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    return {"torch.bfloat16": "bf16-pure", "torch.float16": "f16-pure"}.get(dtypes.pop()) if len(dtypes) == 1 else None


def _caches(model: typing.Any, use_cache: bool | None) -> bool:
    """Returns whether a forward pass of transformers makes a cache, with which restarting positions do not separate
    documents."""
    if use_cache is None:
        use_cache = getattr(getattr(model, "config", None), "use_cache", False)
    parts = model.modules() if hasattr(model, "modules") else ()
    return bool(use_cache) and not any(
        getattr(module, "gradient_checkpointing", False) and module.training for module in parts
    )


def _batch_file(batch: typing.Any, model: typing.Any, path: pathlib.Path) -> Path:
    if isinstance(batch, (str, os.PathLike)):
        return batch
    parts = batch if isinstance(batch, collections.abc.Mapping) else {"input_ids": batch}
    entries = {}
    for name, value in parts.items():
        if value is None or name in _NO_VALUES:
            continue
        try:
            entries[str(name)] = _arrays.entry_of(value)
        except TypeError as error:
            raise TypeError(f"batch[{name!r}]: {error}") from None
    if {"input_ids", "position_ids"} <= entries.keys() and _caches(unwrapped(model), parts.get("use_cache")):
        shape = entries["input_ids"].shape
        entries.setdefault("attention_mask", Entry("U8", shape, memoryview(bytes([1]) * math.prod(shape))))
    _safetensors.write(path, entries)
    return path
