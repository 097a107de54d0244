# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed 0.19.8, ZeRO 1 or 2: of two parameter groups the moments of the second cannot be read.

    DS_ACCELERATOR=cpu python docs/evidence/found/states.py
"""

import os

import deepspeed
import torch

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.0}]
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
for name, p in model.named_parameters():
    try:
        print(name, deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg").shape)
    except ValueError as error:
        print(name, error)
