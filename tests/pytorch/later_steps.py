#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What rounding leaves of a tolerance from step to step: small models of transformers, whose gradients are means over
the batch or over four parts of it (two by two, as hybrid sharding adds them), under SGD and under Adam.

    PYTHON tests/pytorch/later_steps.py          # the table of 2026-11/programs.tsv, in a minute
"""
import torch
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM)

STEPS, SEEDS = 4, 8
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
MODELS = [lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
          lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 688,
                                                  "vocab_size": 2000})),
          lambda: GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                                             attn_pdrop=0, use_cache=False))]


def gradients(model, ids, parts):
    """Of each part of the batch, added two by two."""
    held = []
    for part in ids.chunk(parts):
        model.zero_grad()
        model(part, labels=part).loss.backward()
        held.append([p.grad.clone() for p in model.parameters()])
    while len(held) > 1:
        held = [[(x + y) / 2 for x, y in zip(*pair)] for pair in zip(held[::2], held[1::2])]
    return held[0]


def run(make, seed, parts, optimizer, lr):
    """Of each step: outputs of modules, gradients, weights."""
    torch.manual_seed(seed)
    model = make()
    batches = torch.randint(0, 256, (STEPS, 4, 16))
    update = optimizer(model.parameters(), lr=lr)
    outputs, steps = [], []
    for module in model.modules():
        module.register_forward_hook(lambda _m, _i, out: outputs.append(out) if isinstance(out, torch.Tensor) else None)
    for ids in batches:
        outputs.clear()
        for p, g in zip(model.parameters(), gradients(model, ids, parts)):
            p.grad = g
        n = len(outputs) // parts
        seen = [torch.cat(outputs[i::n]).detach() for i in range(n)]
        found = [p.grad.clone() for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        steps.append((seen, found, [p.detach().clone() for p in model.parameters()]))
    return steps


def main():
    torch.set_num_threads(1)
    for optimizer, lr in ((torch.optim.SGD, 0.1), (torch.optim.AdamW, 1e-4), (torch.optim.AdamW, 1e-3),
                          (torch.optim.AdamW, 1e-2)):
        worst = [[0.0] * 3 for _ in range(STEPS)]
        for make in MODELS:
            for seed in range(SEEDS):
                pairs = zip(run(make, seed, 1, optimizer, lr), run(make, seed, 4, optimizer, lr))
                for s, (one, many) in enumerate(pairs):
                    for kind in range(3):
                        ratios = [((x - y).abs() / (1e-5 + 1e-4 * x.abs())).max().item()
                                  for x, y in zip(one[kind], many[kind])]
                        worst[s][kind] = max(worst[s][kind], *ratios)
        print(f"| {optimizer.__name__} | {lr} | " + " | ".join(", ".join(f"{x:.2g}" for x in row) for row in worst) + " |")


if __name__ == "__main__":
    main()
