# SPDX-License-Identifier: Apache-2.0
"""A model in memory as the folder that the command reads: config.json and weights, as transformers writes them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import typing

from anyrank import _arrays, _safetensors
from anyrank._errors import AnyrankError
from anyrank._scratch import Scratch


@contextlib.contextmanager
def model_path(model: typing.Any) -> typing.Iterator[str | os.PathLike[str] | None]:
    """A path or a bundled name as it is; of a model of transformers a folder, while the block runs, which is called as
    its class is: reports name a model by its folder. Names of parameters are the model's own. Errors: TypeError for
    what is no such model; AnyrankError for one without values. Those of the block name the class instead of the folder.
    """
    if model is None or isinstance(model, (str, os.PathLike)):
        yield model
        return
    scratch = Scratch()
    folder = scratch.path / type(unwrapped(model)).__name__
    try:
        folder.mkdir()
        _write(model, folder)
        yield folder
    except AnyrankError as error:
        if str(folder) not in str(error):
            raise
        raise AnyrankError(str(error).replace(str(folder), folder.name), error.exit_status) from None
    finally:
        scratch.remove()


def unwrapped(model: typing.Any) -> typing.Any:
    """Returns the model inside of DistributedDataParallel, torch.compile, or both."""
    for wrapper in ("module", "_orig_mod", "module"):
        model = getattr(model, wrapper, model)
    return model


def _write(model: typing.Any, folder: pathlib.Path) -> None:
    model = unwrapped(model)
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string") or not hasattr(model, "named_parameters"):
        raise TypeError(f"{type(model).__name__} is no model of transformers: give one with a .config, the folder of "
                        "one, or a bundled name")
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    writer = _safetensors.Writer(folder / "model.safetensors")
    try:
        for name, parameter in model.named_parameters():
            full_tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if full_tensor.is_meta:
                raise AnyrankError(f"{type(model).__name__}: {name} is on the meta device: it has no values")
            entry = _arrays.entry_of(full_tensor)
            writer.add(name, entry.dtype, entry.shape, entry.data)
        writer.close({"format": "pt"})
    except BaseException:
        writer.discard()
        raise
