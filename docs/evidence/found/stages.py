# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed 0.19.8, a pipeline in fp32: all stages clip by the norm of the first one's gradients.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 docs/evidence/found/stages.py
"""

import deepspeed
import deepspeed.runtime.engine as home
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = PipelineModule(layers=[nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], num_stages=2,
                     loss_fn=nn.functional.mse_loss, partition_method="uniform")
engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config={
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.01,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
clip = home.clip_grad_norm_


def printing(parameters, **options):
    parameters = list(parameters)
    stage_norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    of_all = stage_norm.square()
    dist.all_reduce(of_all)
    norm = clip(parameters, **options)
    print(f"stage {dist.get_rank()}: its gradients {stage_norm:.6f}, all gradients {of_all.sqrt():.6f}, "
          f"clipped by {norm:.6f}")
    return norm


home.clip_grad_norm_ = printing
batch = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
engine.train_batch(data_iter=iter(batch))
