# SPDX-License-Identifier: Apache-2.0
"""A run of a program, and the right ones."""

import dataclasses

import cases


@dataclasses.dataclass
class Case:
    """bug: a function of wrong.py's BUGS; of: the known bug that it is one of; causes, partly, first: what is right."""
    program: str
    layout: str = "tp2"
    arguments: tuple = ()
    seed: int = 0
    model: str = None  # of tests/pytorch: a saved Hugging Face model
    micro: int = 1  # micro-batches
    state: str = None  # what a run on one rank leaves behind, from which this one begins
    dtype: str = "fp32"  # bf16 is compared with anyrank's own run, within what rounding may do
    bug: str = None
    of: str = ""
    causes: tuple = ()
    partly: tuple = ()
    first: tuple = ()

    @property
    def dp(self):
        return self._size("dp")

    @property
    def tp(self):
        return self._size("tp")

    @property
    def world(self):
        return self.dp * self.tp

    def _size(self, dim):
        return next((int(part[2:]) for part in self.layout.split("-") if part.startswith(dim)), 1)

    def setup(self):
        """What is the same on one rank."""
        more = [self.program, *(a.strip("-{}").replace("=", "") for a in self.arguments), self.model or "",
                f"micro{self.micro}" if self.micro > 1 else "", f"seed{self.seed}" if self.seed else "",
                self.dtype if self.dtype != "fp32" else ""]
        return "-".join(part for part in more if part)

    @property
    def name(self):
        return f"{self.setup()}-{self.layout}" + (f"-{self.bug}" if self.bug else "")

    def on_one(self, **changes):
        return dataclasses.replace(self, layout="one", bug=None, of="", **changes)


def several(program, layouts, *variants, **common):
    """Every layout with every variant, a dictionary of further fields."""
    for layout in layouts.split():
        for variant in variants or ({},):
            yield Case(program, layout, **{**common, **variant})


SEEDS = [{"seed": n} for n in (0, 1, 2)]
FROM_CHECKPOINT = {"state": "checkpoints"}
RIGHT = [
    *several("tensor_parallel_example", "tp2 tp4", *SEEDS),
    *several("sequence_parallel_example", "tp2 tp4", *SEEDS[:2]),
    *several("fsdp_tp_example", "tp2 dp2 dp2-tp2", *SEEDS[:2]),
    *several("fsdp2_example", "dp2 dp4", {}, {"seed": 1}, {"arguments": ("--explicit-prefetching",)},
             **FROM_CHECKPOINT),
    *several("ddp_example", "dp2 dp4", *SEEDS[:2]),
    *several("minGPT-ddp", "dp2 dp4", *SEEDS[:2]),
    *several("nanoGPT", "dp2 dp4", {}, {"arguments": ("--bias=True",)}, micro=4),
    *several("hf_trainer", "dp2 dp4", {}, {"micro": 2}, model="llama-hf"),
    *several("hf_trainer", "dp2", {"model": "qwen3"}, {"model": "gpt2"}, {"model": "llama-hf", "dtype": "bf16"}),
    *several("hf_plan", "tp2", *({"model": name} for name in ("llama-hf", "qwen3", "qwen2", "mistral"))),
    *several("dtensor_transformer", "tp2 tp4", {}, {"arguments": ("sp",)}, {"arguments": ("untied",)}),
    Case("dtensor_transformer", "tp2", ("dropout",)),
]
