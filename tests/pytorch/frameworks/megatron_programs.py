# SPDX-License-Identifier: Apache-2.0
"""Programs with Megatron-core: its GPT under tensor and sequence parallelism, its data parallelism and optimizers.

Megatron asks for CUDA: as in other tests of it on a CPU, what it calls of torch.cuda is replaced.
"""

import importlib
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from programs import BF16, capture, generator, program, share, tokens

LENGTH = 12


def on_cpu():
    cpu = torch.device("cpu")

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = {key: cpu if key == "device" and str(value).startswith("cuda") else value
                      for key, value in (kwargs or {}).items()}
            return function(*args, **kwargs)
    OnCpu().__enter__()
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    type_of = torch.Tensor.type  # gradients are asserted to be of CUDA
    torch.Tensor.type = lambda self, *a, **k: type_of(self, *a, **k) if a or k else "torch.cuda.FloatTensor"


class Norm(nn.LayerNorm):
    """torch's, which Megatron's own wrapper refuses under sequence parallelism: its gradients are summed over tp."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for p in self.parameters():
            p.sequence_parallel = config.sequence_parallel


def parts_of(full, dim, count, packed):
    """The parts of a weight, of each half if it is packed."""
    halves = full.chunk(2, dim) if packed else [full]
    return [torch.cat(pieces, dim) for pieces in zip(*(half.chunk(count, dim) for half in halves))]


def joined(parts, dim, packed):
    halves = [[part.chunk(2, dim)[half] for part in parts] for half in (0, 1)] if packed else [parts]
    return torch.cat([torch.cat(half, dim) for half in halves], dim)


def gpt_of_megatron(config, gated):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    torch.manual_seed(0)
    model = GPTModel(config, TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=Norm), 64, 32,
                     position_embedding_type="rope" if gated else "learned_absolute",
                     share_embeddings_and_output_weights=False)
    tp, own = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    cut = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            dim = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
            packed = gated and "linear_fc1" in name
            shape = [n * tp if i == dim else n for i, n in enumerate(p.shape)]
            full = 0.1 * torch.randn(shape, generator=generator(sum(map(ord, name))))
            full += 1.0 if "norm" in name and name.endswith("weight") else 0.0
            p.copy_(full if dim is None else parts_of(full, dim, tp, packed)[own])
            cut[name] = dim, packed
    return model, cut


def whole_weights(model, cut):
    from megatron.core import parallel_state
    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for name, p in model.named_parameters():
        dim, packed = cut[name]
        parts = [torch.empty_like(p.data) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, p.detach().contiguous(), group=group)
        found[name] = (parts[0] if dim is None else joined(parts, dim, packed)).float()
    return found


def break_it(bug, model, net, config):
    if bug == "unsummed":
        layers = importlib.import_module("megatron.core.tensor_parallel.layers")
        layers.reduce_from_tensor_model_parallel_region = lambda x, *_, **__: x
    elif bug == "biases":
        for layer in model.decoder.layers:
            layer.mlp.linear_fc2.register_forward_hook(lambda m, _, out: (out[0] + m.bias, out[1]))
    elif bug == "norms":
        home = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        home._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None
        config.finalize_model_grads_func = home.finalize_model_grads
    elif bug == "unreduced":
        net.finish_grad_sync = lambda *_, **__: None


def with_megatron(rank, world, folder, tp=1, sequence=False, gated=False, micro_batches=1, engine=True, divided=False,
                  bf16=False, inside=False, bug=None):
    """engine: Megatron's data parallelism, schedule and optimizer, divided: of which each rank updates a part."""
    on_cpu()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    if world == 1:
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(dir=os.getcwd()), "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        tp = 1
    else:
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64, bf16=bf16,
        params_dtype=dtype, use_cpu_initialization=True, tensor_model_parallel_size=tp,
        sequence_parallel=sequence and tp > 1, hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=gated,
        add_bias_linear=not gated, bias_activation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        activation_func=nn.functional.silu if gated else nn.functional.gelu)
    model, cut = gpt_of_megatron(config, gated)
    net = Float16Module(config, model) if bf16 else model
    if engine:
        net = DistributedDataParallel(config, DistributedDataParallelConfig(
            grad_reduce_in_fp32=not bf16, overlap_grad_reduce=False, use_distributed_optimizer=divided), net)
        config.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.1, clip_grad=0.3, use_distributed_optimizer=divided, bf16=bf16,
            params_dtype=dtype), [net])
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    break_it(bug, model, net, config)

    def forward(parts, net):
        ids = next(parts)
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
        out = net(ids[:, :-1], torch.arange(LENGTH).repeat(len(ids), 1), mask, labels=ids[:, 1:].contiguous())
        return out, lambda out: (out.float().mean(), {})

    with capture(model if inside else net, folder):
        for step in range(3):
            ids = share(tokens(step, length=LENGTH + 1), parallel_state.get_data_parallel_rank(),
                        parallel_state.get_data_parallel_world_size())
            optimizer.zero_grad()
            if engine:
                net.zero_grad_buffer()
                get_forward_backward_func()(
                    forward_step_func=forward, data_iterator=iter(ids.chunk(micro_batches)), model=[net],
                    num_microbatches=micro_batches, seq_length=LENGTH, micro_batch_size=len(ids) // micro_batches,
                    forward_only=False)
            else:
                out, loss_of = forward(iter([ids]), net)
                loss_of(out)[0].backward()
            optimizer.step()
    return whole_weights(model, cut)


def megatron_program(name, about, ranks=2, bugs=None, bf16=False, **options):
    tolerances = dict(tolerance=BF16, weights_tolerance=1.0) if bf16 else {}

    @program(name, about=about, ranks=ranks, bugs=bugs, spec="megatron", needs=("megatron.core",), rounding=False,
             zero_gradients=("*.linear_qkv.bias",), **tolerances)
    def run(rank, world, folder, bug=None):
        return with_megatron(rank, world, folder, bf16=bf16, bug=bug, **options)


megatron_program("mcore_tp2", "Megatron's GPT, tp 2", tp=2,
                 bugs={"unsummed": "the sums of row-parallel layers are left out",
                       "biases": "a bias is added on each rank"})
megatron_program("mcore_tp2_gated", "tp 2, gated, rotary, without biases", tp=2, gated=True, inside=True)
megatron_program("mcore_tp2_torch", "tp 2, torch's optimizer, no data parallelism", tp=2, engine=False)
megatron_program("mcore_sp2", "tp 2 with sequence parallelism", tp=2, sequence=True,
                 bugs={"norms": "gradients of norms are not summed over tp"})
megatron_program("mcore_sp2_gated", "sequence parallelism, gated, rotary", tp=2, sequence=True, gated=True)
megatron_program("mcore_dp2", "Megatron's data parallelism, two micro-batches", micro_batches=2,
                 bugs={"unreduced": "gradients are not summed"})
megatron_program("mcore_dp2_divided", "its distributed optimizer", divided=True)
megatron_program("mcore_dp2_bf16", "data parallelism in bf16", bf16=True)
megatron_program("mcore_tp2_dp2", "tp 2 x dp 2", ranks=4, tp=2, micro_batches=2)
megatron_program("mcore_sp2_dp2_divided", "sequence parallelism x the distributed optimizer", ranks=4, tp=2,
                 sequence=True, divided=True)
