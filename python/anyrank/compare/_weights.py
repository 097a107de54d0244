# SPDX-License-Identifier: Apache-2.0
"""Initial weights of one run for another."""

from __future__ import annotations

import typing

import torch

from anyrank._errors import AnyrankError
from anyrank.capture._model import DTensor, parameters_of, unwrapped
from anyrank.dump import open_dump


def load_weights(model: typing.Any, folder: str) -> None:
    """Copies each NAME:init of the dump into the model's parameter NAME, or this rank's shard of it, which a DTensor
    knows. Errors: AnyrankError for a parameter that the dump lacks or has in another shape."""
    with open_dump(folder) as dump, torch.no_grad():
        for name, parameter in parameters_of(unwrapped(model)[0]):
            if f"{name}:init" not in dump:
                raise AnyrankError(f"--same-weights: the reference has no initial weights of {name}")
            value = dump.torch(f"{name}:init")
            if value.shape != parameter.shape:
                raise AnyrankError(f"--same-weights: {name} is {list(value.shape)} in the reference and "
                                   f"{list(parameter.shape)} here: only DTensors know which part a rank has")
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor
                value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
