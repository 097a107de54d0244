# SPDX-License-Identifier: Apache-2.0
"""What optimizers remember of a parameter, and under which name it is written."""

from __future__ import annotations

import typing

import torch

# Moments of the gradient: `NAME:m` and `NAME:v`.
MOMENTS = {"m": "m", "exp_avg": "m", "momentum_buffer": "m", "grad_avg": "m",
           "v": "v", "exp_avg_sq": "v", "square_avg": "v"}
# Further states, `NAME.KEY:state`: of Adam and Adamax, Adagrad, Adafactor (torch's and transformers'), Rprop, ASGD.
FURTHER = frozenset(("max_exp_avg_sq", "exp_inf", "sum", "row_var", "col_var", "variance", "exp_avg_sq_row",
                     "exp_avg_sq_col", "ax"))
# Numbers of the step, which the learning rate and the weights show; and what is a moment of normalised updates: a
# rounding of a small gradient is a whole step in it, and two consecutive weights tell it.
LEFT = frozenset(("step", "eta", "mu", "RMS", "mu_product", "prev", "step_size"))
OF_UPDATES = {"RMSprop": ("momentum_buffer",), "Adafactor": ("exp_avg",), "Adadelta": ("acc_delta",)}


def states_of(kind: str, name: str, p: torch.Tensor, states: typing.Mapping[str, typing.Any]
              ) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The states that a kind of optimizer has of a parameter, by the names under which they are written; and the keys
    of those that are not."""
    named_states: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    skipped_keys = {*LEFT, *OF_UPDATES.get(kind, ())}
    for key, value in states.items():
        if not isinstance(value, torch.Tensor) or key in skipped_keys:
            continue
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) or hasattr(value, "device_mesh")
        if key in MOMENTS and plain:
            named_states[f"{name}:{MOMENTS[key]}"] = value
        elif key in FURTHER and plain and (value.shape == p.shape or not hasattr(p, "device_mesh")):
            named_states[f"{name}.{key}:state"] = value
        else:
            unknown.append(key)
    return named_states, unknown
