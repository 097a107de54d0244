# SPDX-License-Identifier: Apache-2.0
"""Two steps of the Transformer that torch tests its tensor parallelism with, under that model's own plan.

    dtensor_transformer.py [sp] [untied] [dropout]
"""

import os
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

import anyrank


def main(*options):
    sp = "sp" in options or None
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    net = Transformer(ModelArgs(n_layers=2, vocab_size=64, max_seq_len=12, dim=32, n_heads=4,
                                dropout_p=0.2 if "dropout" in options else 0.0, weight_tying="untied" not in options))
    for layer in net.layers:
        layer.attention.dropout_p = 0.0  # a rank would draw for its own heads
    if mesh.size() > 1:
        net = Transformer.parallelize(net, mesh, bool(sp), local_output_for_attn=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    # The spec is for modules that are in no plan.
    c = anyrank.capture(net, "dump", spec=sp and {"shard": {"dropout:*": {"tp": 1}, "layers.?:*": {"tp": 1}}}).start()
    for step in range(2):
        torch.manual_seed(10 + step)
        ids, targets = torch.randint(64, (2, 6, 12))
        torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    c.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
