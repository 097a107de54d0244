#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How near right runs on N ranks come to what compare_ranks allows, and which factor on a gradient it sees.

    PYTHON bench/rounding_allowances.py [NAME ..]

Needs torch; the rows of Llama also transformers. A row for each model and format, of two seeds: the worst difference of
any tensor over what is allowed, and the smallest e such that 1 + e times any one parameter's gradient is outside. The
table is that of docs/evidence/right-runs.tsv.
"""

import math
import pathlib
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "pytest")]

import anyrank  # noqa: E402
import torch  # noqa: E402
from parallel_layers import Net, part  # noqa: E402
from test_layers import TENSOR_PARALLEL  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def layers(dtype, width=32, tokens=16, blocks=2, autocast=False):
    """examples/pytest's tensor parallelism, on four ranks."""
    def build(mesh):
        return Net(width, blocks, group=mesh and mesh.get_group("tp")).to(dtype)

    def step(model, mesh):
        with torch.autocast("cpu", BF16, enabled=autocast):
            out = model(torch.randn(4, tokens, width).to(dtype))
            out.to(torch.promote_types(dtype, F32)).square().mean().backward()
    return build, step, {"ranks": 4, "spec": TENSOR_PARALLEL}


def data_parallel(dtype, tokens=16, ranks=4):
    def build(mesh):
        model = Net(32).to(dtype)
        return DistributedDataParallel(model) if mesh else model

    def step(model, mesh):
        x = part(torch.randn(8, tokens, 32).to(dtype), mesh and mesh.get_group("dp"))
        model(x).to(torch.promote_types(dtype, F32)).square().mean().backward()
    return build, step, {"layout": {"dp": ranks}}


def long_sums(dtype):
    """Products over 4096 values, divided over four ranks."""
    def build(mesh):
        model = nn.Sequential(nn.Linear(4096, 8), nn.ReLU(), nn.Linear(8, 4096)).to(dtype)
        return parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())}) if mesh else model

    def step(model, mesh):
        model(torch.randn(300, 4096).to(dtype)).to(torch.promote_types(dtype, F32)).square().mean().backward()
    return build, step, {"ranks": 4}


def llama(dtype, width=64, depth=3):
    """transformers' Llama by a plan for parallelize_module, on two ranks."""
    def build(mesh):
        import transformers
        config = transformers.LlamaConfig(vocab_size=96, hidden_size=width, intermediate_size=width * 11 // 4,
                                          num_hidden_layers=depth, num_attention_heads=8, num_key_value_heads=4,
                                          attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        plan = {f"model.layers.*.{name}": ColwiseParallel() for name in
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")}
        plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        return parallelize_module(model, mesh, plan) if mesh else model

    def step(model, mesh):
        ids = torch.randint(0, 96, (3, 40))
        model(ids, labels=ids).loss.backward()
    return build, step, {"ranks": 2, "only": ["*:grad", "*:init", "loss:fwd"]}


ROWS = {
    "tensor-parallel layers, fp32": layers(F32), "the same, fp64": layers(F64),
    "the same, 4 blocks 256 wide": layers(F32, 256, 64, 4),
    "DDP, fp32": data_parallel(F32), "DDP, 16,384 tokens": data_parallel(F32, 2048),
    "products of 4,096 terms, fp32": long_sums(F32), "Llama of transformers, fp32": llama(F32),
    "the same, 6 layers 256 wide": llama(F32, 256, 6),
    "tensor-parallel layers, autocast": layers(F32, autocast=True), "the same, all bf16": layers(BF16),
    "DDP, all bf16": data_parallel(BF16), "products of 4,096 terms, bf16": long_sums(BF16),
}


def row(case):
    build, step, options = case
    worst = seen = 0.0
    for seed in (0, 1):
        compared = anyrank.compare_ranks(build, step, seed=seed, **options)
        worst = max(worst, compared.worst)
        seen = max([seen] + [one.allowed / one.largest for name, one in compared.allowed.items()
                             if name.endswith(":grad") and one.largest > 0])
    return worst, seen


def main():
    warnings.simplefilter("ignore")
    for name, case in ROWS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        worst, seen = row(case)
        digits = 10.0 ** math.floor(math.log10(seen))
        print(f"| {name} | {worst:.2g} | 1 + {math.ceil(seen / digits) * digits:.0e} |", flush=True)


if __name__ == "__main__":
    main()
