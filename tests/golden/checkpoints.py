#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as the libraries themselves write them, on gloo ranks of one machine without a GPU. Run by hand, never by the
tests; what tests/golden/checkpoints/ holds was made with torch 2.15.0, deepspeed 0.19.8 and megatron-core 0.16.1.

    DS_ACCELERATOR=cpu python3 tests/golden/checkpoints.py FOLDER [CASE ..]     CASE.tar.xz, and CASE.safetensors: its
                                                                                full tensors

    dcp         torch.distributed.checkpoint: FSDP2 over tensor parallelism on 4 ranks,
    AdamW; expected by get_state_dict
    zero1..3    DeepSpeed in bf16, two parameter groups; expected by zero_to_fp32.py and safe_get_full_optimizer_state
    tied        DeepSpeed, ZeRO 3, with tied and frozen parameters and a buffer; expected by zero_to_fp32.py
    torch_dist  megatron-core's GPTModel and DistributedOptimizer, tp=2 pp=2; expected by torch's own reader
    flattened   torch_dist as megatron-core 0.12.3 flattens the optimizer's state; the fp32 copies are the weights. On its own,
                with that version on PYTHONPATH
    legacy      the same ranks' state_dict() in the files that Megatron-LM's format torch has
                (megatron/training/checkpointing.py, generate_state_dict, at d98e8a64)
"""
import argparse
import inspect
import os
import pathlib
import sys
import tarfile
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import torch.overrides
from safetensors.torch import save_file

PORT = 29731


def start(rank, world):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(PORT))
    torch.set_num_threads(1)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 10), torch.nn.ReLU(),
                               torch.nn.LayerNorm(10),
                               torch.nn.Linear(10, 3, bias=False))


def batch(step, rank):
    torch.manual_seed(step * 10 + rank)
    return torch.randint(0, 11, (2, 5))


def save_dcp(rank, world, folder, expected):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    start(rank, world)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    m, mesh = model(), dist.device_mesh.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(m, mesh["tp"], {"1": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(m, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False)
    for step in range(2):
        m(batch(step, mesh.get_local_rank("dp"))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(m, optimizer)
    dcp.save({"model": weights, "optimizer": state, "steps": 2}, checkpoint_id=folder)
    weights, state = get_state_dict(m, optimizer, options=StateDictOptions(full_state_dict=True))
    full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in weights.items()}
    for name, of in state["state"].items():
        full.update({f"{name}:m": of["exp_avg"], f"{name}:v": of["exp_avg_sq"], f"{name}.step": of["step"]})
    finish(rank, full, expected)


def finish(rank, full, expected):
    if rank == 0:
        save_file({name: t.detach().cpu().contiguous().clone() for name, t in full.items()}, expected)
    dist.barrier()
    dist.destroy_process_group()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.frozen = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 5).requires_grad_(False)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(5.0))

    def forward(self, x):
        y = self.embed(x % 7)
        return self.head(self.frozen(y) * self.scale.to(y.dtype))


def save_deepspeed(rank, world, folder, expected, stage, make=model):
    start(rank, world)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    deepspeed.init_distributed(dist_backend="gloo")
    m = make()
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage, "sub_group_size": 60, "stage3_param_persistence_threshold": 0}}
    if stage == 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    params = [p for p in m.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if (p.dim() > 1) == matrices], "weight_decay": 0.1 * matrices}
              for matrices in (True, False)]
    groups = [group for group in groups if group["params"]]
    engine, *_ = deepspeed.initialize(model=m, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    for step in range(2):
        engine.backward(engine(batch(step, rank)).float().pow(2).mean())
        engine.step()
    engine.save_checkpoint(folder)
    full = {}
    if stage != 2 and make is model:  # safe_get_full_optimizer_state fails there with torch's AdamW
        for name, p in engine.module.named_parameters():
            full[name] = safe_get_full_fp32_param(p)
            full[f"{name}:m"] = safe_get_full_optimizer_state(p, "exp_avg")
            full[f"{name}:v"] = safe_get_full_optimizer_state(p, "exp_avg_sq")
    dist.barrier()
    if rank == 0:
        if stage != 1:  # where bf16 adds up in fp32, zero_to_fp32.py does not know the files
            full.update(get_fp32_state_dict_from_zero_checkpoint(folder))
        os.remove(os.path.join(folder, "zero_to_fp32.py"))
    finish(rank, full, expected)


class OnCpu(torch.overrides.TorchFunctionMode):
    """megatron-core asks for CUDA by name; here it gets the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if getattr(function, "__name__", "") == "cuda" and args:
            return args[0]
        result = function(*("cpu" if isinstance(a, torch.device) and a.type == "cuda" else a for a in args), **kwargs)
        is_type = isinstance(result, str) and result.startswith("torch.") and result.endswith("Tensor")
        return result.replace("torch.", "torch.cuda.") if is_type else result


def save_megatron(rank, world, folder, expected, legacy, pp=2):
    start(rank, world)
    torch.cuda.current_device = lambda: torch.device("cpu")
    for module, name in ((torch.cuda, "synchronize"), (torch.cuda, "set_device"), (torch.cuda.nvtx, "range_push"),
                         (torch.cuda.nvtx, "range_pop")):
        setattr(module, name, lambda *_, name=name: None)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    parallel_state.initialize_model_parallel(2, pp)
    flattened = "sharding_type" in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    if flattened:
        suit_old_version()
    config = TransformerConfig(
        num_layers=4, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12,
        normalization="RMSNorm",
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=2, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32)
    m = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=16,
                 max_sequence_length=8, pre_process=parallel_state.is_pipeline_first_stage(),
                 post_process=parallel_state.is_pipeline_last_stage(), position_embedding_type="rope",
                 share_embeddings_and_output_weights=False)
    for i, p in enumerate(m.parameters()):
        cut = parallel_state.get_tensor_model_parallel_rank() if getattr(p, "tensor_model_parallel", False) else 7
        torch.manual_seed(1000 * parallel_state.get_pipeline_model_parallel_rank() + 10 * i + cut)
        p.data.copy_(torch.randint(-99, 99, p.shape))
    args = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=pp, expert_model_parallel_size=1,
        num_attention_heads=4,
        num_query_groups=2, group_query_attention=True, hidden_size=8, kv_channels=2, swiglu=True,
        normalization="RMSNorm",
        num_experts=None, vocab_size=15, padded_vocab_size=16)
    with OnCpu():
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), m)
        optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=0.5,
        use_distributed_optimizer=True),
         [ddp])
        for p in m.parameters():
            torch.manual_seed(p.numel())
            p.main_grad.copy_(torch.randint(-9, 9, p.shape))
        ddp.finish_grad_sync()
        optimizer.step()
    if legacy:
        at = pathlib.Path(folder, "iter_0000003", f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}_"
                          f"{parallel_state.get_pipeline_model_parallel_rank():03d}")
        at.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": m.state_dict()},
                   at / "model_optim_rng.pt")
    at = pathlib.Path(expected + ".dist" if legacy else folder, "iter_0000003")
    at.mkdir(parents=True, exist_ok=True)
    pathlib.Path(folder, "latest_checkpointed_iteration.txt").write_text("3")
    dist.barrier()
    with OnCpu():
        state = {"args": args, "iteration": 3, "model": m.sharded_state_dict()}
        if not legacy:
            how = {"sharding_type": "fully_sharded_model_space"} if flattened else {
                "metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}
            state["optimizer"] = optimizer.sharded_state_dict(state, **how)
        dist_checkpointing.save(state, str(at))
    dist.barrier()
    found = dcp.FileSystemReader(at).read_metadata().state_dict_metadata
    full = {key: torch.zeros(tuple(t.size), dtype=t.properties.dtype) for key, t in found.items()
            if hasattr(t, "size") and not (flattened and key.startswith("optimizer."))}
    dcp.load(full, checkpoint_id=at, no_dist=True)
    finish(rank, apart(full, m, legacy), expected)


def suit_old_version():
    """megatron-core 0.12 with a newer NumPy and PyTorch."""
    import functools

    import megatron.core.dist_checkpointing.strategies.filesystem_async as files
    import megatron.core.optimizer.distrib_optimizer as optimizer
    import numpy
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    numpy.product = numpy.prod
    optimizer.quantize_param_shard = lambda *_, **__: None
    files._write_item = functools.partial(files._write_item, serialization_format=SerializationFormat.TORCH_SAVE)


def apart(full, m, legacy):
    """A tensor for each layer, with the names that the converter gives."""
    out = {}
    for key, t in full.items():
        suffix = ""
        for begin, end in (("optimizer.state.exp_avg.", ":m"), ("optimizer.state.exp_avg_sq.", ":v"),
                           ("optimizer.state.param.", "")):
            if key.startswith(begin):
                key, suffix = key[len(begin):], end
        if legacy:  # the layer specification without TransformerEngine has norms of their own
            key = key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
            key = key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        if ".layers." in key:
            out.update({key.replace(".layers.", f".layers.{i}.") + suffix: row for i, row in enumerate(t)})
        else:
            out[key + suffix] = t
    return out


def main(out, names):
    os.makedirs(out, exist_ok=True)
    cases = [("dcp", save_dcp, 4, ()), ("zero1", save_deepspeed, 2, (1,)), ("zero2", save_deepspeed, 2, (2,)),
             ("zero3", save_deepspeed, 3, (3,)), ("tied", save_deepspeed, 2, (3, Tied)),
             ("torch_dist", save_megatron, 4, (False,)), ("legacy", save_megatron, 4, (True,)),
             ("flattened", save_megatron, 4, (False, 1))]
    for name, save, ranks, more in cases:
        if name not in (names or [case[0] for case in cases[:-1]]):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = os.path.join(scratch, name)
            os.mkdir(folder)
            expected = os.path.join(scratch, "expected.safetensors")
            torch.multiprocessing.spawn(save, args=(ranks, folder, expected, *more), nprocs=ranks)
            os.replace(expected, os.path.join(out, f"{name}.safetensors"))
            with tarfile.open(os.path.join(out, f"{name}.tar.xz"), "w:xz") as archive:
                archive.add(folder, name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else sys.exit(__doc__)
