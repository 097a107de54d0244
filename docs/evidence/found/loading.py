# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 loading.py: weights that the checkpoint has fused are cut up wrongly where they are loaded
as shards, for tensor parallelism and for FSDP."""

import torch
from transformers import AutoModelForCausalLM, HrmTextConfig, HrmTextForCausalLM
from transformers.distributed import DistributedConfig

torch.manual_seed(0)
HrmTextForCausalLM(HrmTextConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16,
                                 num_attention_heads=4, num_key_value_heads=4)).save_pretrained("/tmp/hrm_text")
right = dict(AutoModelForCausalLM.from_pretrained("/tmp/hrm_text").named_parameters())
for config in (DistributedConfig(tp_size=2), DistributedConfig(fsdp_size=2)):
    model = AutoModelForCausalLM.from_pretrained("/tmp/hrm_text", distributed_config=config)
    for name, p in model.named_parameters():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        wrong = int((p != right[name]).sum())
        if wrong and torch.distributed.get_rank() == 0:
            print(f"tp={config.tp_size} fsdp={config.fsdp_size} {name}: {wrong} of {p.numel()} elements differ")
torch.distributed.destroy_process_group()
