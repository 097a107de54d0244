# SPDX-License-Identifier: Apache-2.0
"""Two steps of a saved model of transformers under its own tensor-parallel plan, tp_plan="auto".

    hf_plan.py FOLDER MICRO_BATCHES
"""

import os
import sys

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

import anyrank

transformers.logging.set_verbosity_error()


def main(folder, micro_batches):
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    plan = {"tp_plan": "auto", "device_mesh": mesh} if world > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32,
                                                              **plan)
    # A key's bias has a gradient of rounding alone, of which an eps of 1e-8 would make a whole step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, foreach=False)
    # The spec is for what plain modules compute of a rank's own heads.
    c = anyrank.capture(model, "dump", spec={"shard": {"*.self_attn.1:*": {"tp": 1}, "*_norm:*": {"tp": 2}}}).start()
    for step in range(2):
        ids = torch.randint(3, 140, (4, 16), generator=torch.Generator().manual_seed(step))
        for part in ids.chunk(int(micro_batches)):
            (model(input_ids=part, labels=part, use_cache=False).loss / int(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    c.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
