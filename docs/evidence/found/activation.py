# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 activation.py: of Apertus' activation, each rank has the gradient of its own neurons alone,
and after a step weights of its own."""

import torch
from transformers import ApertusConfig, ApertusForCausalLM, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

torch.manual_seed(0)
ApertusForCausalLM(ApertusConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                                 num_attention_heads=4, num_key_value_heads=4)).save_pretrained("/tmp/apertus")
ids = torch.randint(96, (4, 16))
plans = [DistributedConfig(tp_size=2), DistributedConfig(
    tp_size=2, tp_plan={"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"})]  # what mends it
for config in [None, *plans]:
    model = AutoModelForCausalLM.from_pretrained("/tmp/apertus", dtype=torch.float32,
                                                 **({"distributed_config": config} if config else {}))
    model(ids, labels=ids).loss.backward()
    act = model.model.layers[0].mlp.act_fn
    print(config and torch.distributed.get_rank(), act.alpha_p.grad.item(), act.alpha_n.grad.item())
torch.distributed.destroy_process_group()
