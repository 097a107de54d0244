# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 accumulation.py: one batch in two micro-batches has other gradients of q_norm and k_norm."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16,
                             num_attention_heads=4, num_key_value_heads=4)).save_pretrained("/tmp/qwen3")
ids = torch.randint(96, (4, 16))
gradients = []
for micro_batches in (1, 2):
    model = AutoModelForCausalLM.from_pretrained("/tmp/qwen3", distributed_config=DistributedConfig(tp_size=2))
    for part in ids.chunk(micro_batches):
        (model(part, labels=part).loss / micro_batches).backward()
    gradients.append({name: p.grad for name, p in model.named_parameters()})
if torch.distributed.get_rank() == 0:
    for name, once in gradients[0].items():
        once, twice = (g.to_local() if hasattr(g, "to_local") else g for g in (once, gradients[1][name]))
        print(f"{(twice - once).norm() / once.norm():8.1e} {name}")
torch.distributed.destroy_process_group()
