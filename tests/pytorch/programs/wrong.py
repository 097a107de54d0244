# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a program, put in from outside: each is a bug that real systems had.

The letters are those of a list of such bugs with their sources: B01 to B48 and, from 2025 on, C1 to C31. A bug is a
function that is called before the program, with a list; what it appends is called with the model and its optimizer when
the program asks for the capture.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.parallel import DistributedDataParallel as DDP

import cases
import deal
from runs import FROM_CHECKPOINT, Case

BUGS, BROKEN = {}, []


def bug(of, program, layout, first, causes, **more):
    """first: globs of the tensor that verify has to name; causes: right ones, and after "|" those that are near."""
    def register(function):
        BUGS[function.__name__] = function
        BROKEN.append(Case(program, layout, bug=function.__name__, of=of, first=tuple(first.split()),
                           **dict(zip(("causes", "partly"), cases.split_causes(causes))), **more))
        return function
    return register


def of_model(*args, **more):
    """The same of a function of the model and its optimizer."""
    def register(function):
        def before(changes):
            changes.append(function)
        before.__name__ = function.__name__
        return bug(*args, **more)(before)
    return register


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def without_hooks(module, forward):
    """A module as someone writes it by hand: no plan looks after what goes in and comes out."""
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    module.forward = forward


def part_of(x, m, bias):
    return F.linear(x, m.weight.to_local(), bias)


def summed(part, m):
    return DTensor.from_local(part, m.weight.device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


class SumBothWays(torch.autograd.Function):
    """An all-reduce whose backward pass sums a gradient that is whole on every rank already."""

    @staticmethod
    def forward(_ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    backward = forward


# --- PyTorch's tensor-parallel examples -------------------------------------------------------------------------------

@bug("B20", "tensor_parallel_example", "tp2", "out_proj:fwd", "missing_all_reduce")
def row_output_not_summed(_):
    RowwiseParallel._prepare_output_fn = staticmethod(lambda layouts, is_local, m, out, mesh: out.to_local())


@of_model("B27", "tensor_parallel_example", "tp4", "out_proj:fwd", "bias_counted_again vector_added")
def bias_on_every_rank(model, _):
    m = model.out_proj
    without_hooks(m, lambda x: summed(part_of(x, m, m.bias.to_local()), m))


@of_model("B15", "tensor_parallel_example", "tp2", "out_proj.bias:grad", "averaged_again | half_is_missing")
def bias_divided_in_the_graph(model, _):
    m = model.out_proj
    without_hooks(m, lambda x: summed(part_of(x, m, m.bias.to_local() / dist.get_world_size()), m))


@of_model("B14", "tensor_parallel_example", "tp2", "out_proj:bwd out_proj.weight:grad", "reduced_again counted_twice")
def gradient_of_sum_summed(model, _):
    m = model.out_proj
    without_hooks(m, lambda x: SumBothWays.apply(part_of(x, m, None)) + m.bias.to_local())


@bug("B42", "sequence_parallel_example", "tp2", "out_proj:fwd",
     "missing_reduce_scatter missing_all_reduce | partial_sum")
def own_rows_of_partial_output(_):
    def output(_layouts, _local, _m, out, mesh):
        return out.to_local().chunk(mesh.size())[mesh.get_local_rank()]
    RowwiseParallel._prepare_output_fn = staticmethod(output)


@bug("Megatron-LM#7452 item 7", "sequence_parallel_example", "tp4", "out_proj:fwd",
     "shard_repeated slices_repeated wrong_group | shards_misplaced")
def scattered_over_other_group(_):
    def output(_layouts, _local, _m, out, mesh):
        whole = out.redistribute(placements=[Replicate()]).to_local()
        return whole.chunk(mesh.size())[mesh.get_local_rank() % 2]
    RowwiseParallel._prepare_output_fn = staticmethod(output)


def norm_by_hand(m):
    """A norm of a sequence shard whose weight's gradient nobody sums."""
    forward, hooks = type(m).forward, m.forward
    assert hooks

    def on_shard(x):
        plain = nn.Module()
        plain.__dict__.update({k: v for k, v in m.__dict__.items() if k != "forward"})
        plain.__class__ = type(m)
        plain._parameters = {n: local(p) for n, p in m._parameters.items()}
        return DTensor.from_local(forward(plain, x.to_local()), x.device_mesh, x.placements)
    m.forward = on_shard


@of_model("B02", "fsdp_tp_example", "tp2", "norm.weight:grad", "missing_all_reduce")
def last_norm_not_summed(model, _):
    norm_by_hand(model.norm)


@of_model("B01", "dtensor_transformer", "tp2", "norm.*:grad", "missing_all_reduce", arguments=("sp",))
def no_norm_summed(model, _):
    for m in model.modules():
        if isinstance(m, nn.LayerNorm):
            norm_by_hand(m)


@bug("B30", "fsdp_tp_example", "tp2", "layers.0.attention.wo:* layers.0.attention:fwd",
     "rope_restarts positions | later_tokens")
def positions_of_second_half_restart(_):
    import llama2_model
    apply = llama2_model.apply_rotary_emb

    def restart(q, k, freqs_cis):
        half = freqs_cis[:len(freqs_cis) // 2]
        return apply(q, k, torch.cat([half, half]))
    llama2_model.apply_rotary_emb = restart


@of_model("B40", "fsdp_tp_example", "dp2-tp2", "*:grad", "averaged_again | half_is_missing wrong_scalar")
def divided_by_all_ranks(model, _):
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_force_sum_reduction_for_comms(True)
            m.set_gradient_divide_factor(4.0)


# --- torch's own Transformer ------------------------------------------------------------------------------------------

@of_model("B07", "dtensor_transformer", "tp2", "layers.1.feed_forward*:bwd layers.1.ffn_norm.*:grad",
          "missing_all_reduce")
def column_input_gradient_not_summed(model, _):
    for layer in model.layers:
        m = layer.feed_forward.w1
        without_hooks(m, lambda x, m=m: part_of(x, m, m.bias.to_local()))


@of_model("C30", "dtensor_transformer", "tp2", "*tok_embeddings.weight:grad output.weight:grad",
          "tied_weight embedding_sum half_is_missing | partial_sum")
def untied_by_sharding(model, _):
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())


@of_model("B48", "dtensor_transformer", "tp2", "dropout:fwd",
          "mask_differs_in_replica | dropout replicas_apart mask_of_other_seed",
          arguments=("dropout",))
def dropout_seed_of_rank(model, _):
    def draw(_m, _args):
        torch.rand(dist.get_rank())
    model.register_forward_pre_hook(draw)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------

def replace_clip(function):
    function.__name__ = "clip_grad_norm_"
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = function


def clip_with(norm_of):
    def clip_grad_norm_(parameters, max_norm, *_args, **_more):
        parameters = list(parameters)
        norm = norm_of([p.grad for p in parameters])
        for p in parameters:
            p.grad.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm
    replace_clip(clip_grad_norm_)


def own_norm(grads):
    return torch.stack([local(g).norm() for g in grads]).norm()


@bug("B47", "fsdp2_example", "dp2", "grad_norm:clip", "norm_of_own_shards", **FROM_CHECKPOINT)
def clipped_by_own_shards(_):
    clip_with(own_norm)


@bug("C10", "fsdp2_example", "dp2", "grad_norm:clip", "norm_mean_of_ranks | norm_leaves_out", **FROM_CHECKPOINT)
def mean_of_ranks_norms(_):
    def mean(grads):
        norm = own_norm(grads)
        dist.all_reduce(norm)
        return norm / dist.get_world_size()
    clip_with(mean)


@bug("DeepSpeed PR#3790", "fsdp2_example", "dp2", "*:m *:new *:v",
     "clip_factor | update_scaled wrong_scalar moments", **FROM_CHECKPOINT)
def not_clipped(_):
    clip = torch.nn.utils.clip_grad_norm_
    replace_clip(lambda parameters, max_norm: clip(parameters, float("inf")))


@of_model("B16", "fsdp2_example", "dp2", "*:grad", "reduced_again counted_twice | wrong_scalar sum_for_mean",
          **FROM_CHECKPOINT)
def summed_instead_of_averaged(model, _):
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_force_sum_reduction_for_comms(True)
            m.set_gradient_divide_factor(1.0)


# --- DDP: minGPT, nanoGPT, the example --------------------------------------------------------------------------------

def changed_wrapper(**changes):
    wrap = DDP.__init__

    def init(self, module, **more):
        wrap(self, module, **{**more, **{k: v(module) for k, v in changes.items()}})
    DDP.__init__ = init


@bug("B42", "nanoGPT", "dp2", "*:init", "replicas_apart missing_broadcast", micro=4)
def group_of_one(_):
    def alone(_module):
        return [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    changed_wrapper(process_group=alone)


@bug("B45", "nanoGPT", "dp2", "*:grad", "missing_average | missing_all_reduce", micro=4)
def never_synchronised(_):
    forward = DDP.forward

    def silent(self, *args, **more):
        self.require_backward_grad_sync = False
        return forward(self, *args, **more)
    DDP.forward = silent


@of_model("B43", "nanoGPT", "dp2", "*:grad", "one_micro_batch | partial_sum", micro=4)
def accumulator_reset(model, optimizer):
    model.register_forward_pre_hook(lambda m, args: optimizer.zero_grad())


@bug("B38", "nanoGPT", "dp2", "lm_head:bwd *.lm_head:bwd *:grad",
     "reduced_again sum_for_mean | counted_twice wrong_scalar",
     micro=8, arguments=("--gradient_accumulation_steps=8",))
def micro_batches_summed(_):
    torch.cuda.amp.GradScaler.scale = torch.amp.GradScaler.scale = lambda self, loss: loss * 4


@of_model("C26", "nanoGPT", "one", "*:grad", "accumulation_divided", micro=4)
def divided_at_every_micro_batch(model, _):
    def divide(_m, _args):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(4)
    model.register_forward_pre_hook(divide)


@bug("torchtitan#166, OLMo-core PR#319", "minGPT-ddp", "dp2", "*:init",
     "replicas_apart missing_broadcast | mask_of_other_seed")
def replicas_start_apart(_):
    def fresh(module):
        if dist.get_rank() == 1:
            with torch.no_grad():
                for p in module.parameters():
                    if p.dim() > 1:
                        p.normal_(0, 0.02)
        return False
    changed_wrapper(init_sync=fresh)


@bug("a slice of the batch", "minGPT-ddp", "dp2", "emb_stem*:fwd", "same_samples | slices_repeated shard_repeated")
def samples_of_rank_0(_):
    deal.ranks = lambda: (0, dist.get_world_size())


@of_model("B48 (Megatron-LM#5974)", "minGPT-ddp", "dp2", "*:new", "adam_step_counter | update_scaled")
def counter_ahead(_model, optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p),
                                  "exp_avg_sq": torch.zeros_like(p)}


@bug("B08", "minGPT-ddp", "dp2", "*:new *:m *:v", "update_of_ranks_apart replicas_apart clip_factor | update_scaled")
def clipped_on_rank_0(_):
    clip = torch.nn.utils.clip_grad_norm_
    replace_clip(lambda parameters, max_norm: clip(parameters, max_norm / 5 if dist.get_rank() == 0 else float("inf")))


@of_model("optimizer state not broadcast", "minGPT-ddp", "dp2", "*:m@2 *:new@2",
          "replicas_apart part_of_one_rank | update_of_ranks_apart")
def moments_lost_on_one_rank(_model, optimizer):
    def lose(opt, _args, _more):
        if dist.get_rank() == 1:
            for state in opt.state.values():
                state["exp_avg"].zero_()
    lose.done = optimizer.register_step_pre_hook(lose)


@bug("B01", "ddp_example", "dp2", "*:grad", "missing_average | missing_all_reduce")
def module_inside_called(_):
    DDP.forward = lambda self, *args, **more: self.module(*args, **more)


# --- transformers: Trainer under DDP ----------------------------------------------------------------------------------


def trainer_with(**attributes):
    import transformers
    init = transformers.Trainer.__init__

    def changed(self, *args, **more):
        init(self, *args, **more)
        for name, value in attributes.items():
            setattr(self, name, value)
    transformers.Trainer.__init__ = changed


@bug("B31", "hf_trainer", "dp2", "loss:fwd lm_head:bwd", "mean_of_means", model="llama-hf")
def mean_of_ranks_means(_):
    trainer_with(model_accepts_loss_kwargs=False)


@bug("B29", "hf_trainer", "dp2", "loss:fwd", "labels_shifted", model="llama-hf")
def labels_shifted_again(_):
    from transformers.loss import loss_utils
    of = loss_utils.LOSS_MAPPING["ForCausalLM"]
    loss_utils.LOSS_MAPPING["ForCausalLM"] = lambda logits, labels, *args, **more: of(
        logits, F.pad(labels[:, 1:], (0, 1), value=-100), *args, **more)


@of_model("C31", "hf_trainer", "dp2", "model.rotary_emb*:fwd",
          "rope_restarts positions attention_across_documents | later_tokens",
          model="llama-hf")
def positions_restart(model, _):
    def restart(_m, args, more):
        ids = more["input_ids"]
        positions = torch.arange(ids.shape[1]) % (ids.shape[1] // 2)
        return args, {**more, "position_ids": positions[None].expand(len(ids), -1)}
    model.register_forward_pre_hook(restart, with_kwargs=True)


@of_model("B45", "hf_trainer", "dp2", "*.mlp.up_proj.weight:grad", "missing_average | missing_all_reduce",
          model="llama-hf")
def parameters_not_reduced(model, _):
    DDP._set_params_and_buffers_to_ignore_for_model(
        model, [n for n, _ in model.named_parameters() if n.endswith("mlp.up_proj.weight")])


# --- transformers' own tensor-parallel plans --------------------------------------------------------------------------

@bug("B04", "hf_plan", "tp2", "*_norm.weight:grad", "missing_all_reduce", model="qwen3")
def head_norms_not_summed(_):
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce, TensorParallelLayer
    ReplicatedWithGradAllReduce.install_forward = TensorParallelLayer.install_forward


@of_model("B48 (torchtitan#166)", "hf_plan", "tp2", "model.layers.1.mlp.up_proj.weight:init",
          "one_shard_on_all_ranks shards_seeded_alike shard_repeated", model="llama-hf")
def shard_of_rank_0_loaded(model, _):
    dist.broadcast(model.model.layers[1].mlp.up_proj.weight.to_local(), 0)


@of_model("B09", "hf_plan", "tp2", "lm_head:bwd model.norm.weight:grad model.norm:bwd", "missing_all_reduce",
          model="qwen2")
def gradient_of_head_not_summed(model, _):
    m = model.lm_head

    def forward(x):
        part = DTensor.from_local(part_of(x, m, None), m.weight.device_mesh, [Shard(-1)])
        return part.redistribute(placements=[Replicate()]).to_local()
    m.forward = forward


@bug("found here, transformers 5.23", "hf_plan", "tp2", "*_norm.weight:grad",
     "micro_batches_weighted counted_twice | partial_sum tensor_added", model="qwen3", micro=2)
def as_it_is(_):
    """ReplicatedWithGradAllReduce sums what has accumulated after each micro-batch, and so the first one's sum again."""
