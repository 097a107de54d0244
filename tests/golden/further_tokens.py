# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction around a model of transformers, in plain PyTorch (DeepSeek-V3, arXiv:2412.19437, section 2.2).
Depth d takes, of token i of a document, the token i + d and what the depth before has made of token i:

    h_d = norm(block(M [norm(Emb(t_(i+d))) | norm(h_(d-1))])),  h_0 the model's last hidden state

and predicts token i + d + 1 with the model's own head. The loss is the model's and w/D times each depth's mean over the
tokens that it has a target for."""
import types

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, model, layer):
        super().__init__()
        config, inner = model.config, model.model
        norm, eps = type(inner.norm), config.rms_norm_eps
        self.enorm, self.hnorm = norm(config.hidden_size, eps=eps), norm(config.hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = type(inner.layers[-1])(config, len(inner.layers) - 1)
        self.norm = norm(config.hidden_size, eps=eps)
        self.layer = layer


class WithFurther(nn.Module):
    def __init__(self, model, depth, weight):
        super().__init__()
        self.base, self.weight, self.config = model, weight, model.config
        layers = model.config.num_hidden_layers
        self.further = nn.ModuleList(Block(model, layers + d) for d in range(depth))
        self.further.apply(model._init_weights)

    def _name(self, name):
        """As DeepSeek-V3's files have it."""
        if name.startswith("base."):
            return name[5:]
        _, depth, rest = name.split(".", 2)
        rest = f"shared_head.{rest}" if rest.startswith("norm.") else rest.removeprefix("block.")
        return f"model.layers.{self.further[int(depth)].layer}.{rest}"

    def files(self, named):
        return ((self._name(name), tensor) for name, tensor in named)

    def hidden(self, d, entered, ids, mask, places):
        block, inner = self.further[d], self.base.model
        both = torch.cat([block.enorm(inner.embed_tokens(ids)), block.hnorm(entered)], dim=-1)
        z = block.eh_proj(both)
        made = block.block(z, attention_mask=mask, position_ids=places,
                           position_embeddings=inner.rotary_emb(z, places))
        return block.norm(made[0] if isinstance(made, tuple) else made)

    def forward(self, input_ids, labels, attention_mask=None, position_ids=None, documents=None, **_):
        rows, length = input_ids.shape
        documents = torch.zeros_like(input_ids) if documents is None else documents
        places = torch.arange(length).expand(rows, length) if position_ids is None else position_ids
        out = self.base(input_ids=input_ids, labels=labels, attention_mask=attention_mask, position_ids=position_ids,
                        output_hidden_states=True)
        seen = torch.ones(length, length, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
        mask = torch.zeros(rows, 1, length, length, dtype=out.logits.dtype).masked_fill(~seen[:, None], -torch.inf)
        loss, h = out.loss, out.hidden_states[-1]
        for d in range(len(self.further)):
            ids, targets = torch.zeros_like(input_ids), torch.full_like(labels, -100)
            for row in range(rows):
                for i in range(length):
                    if i + d + 1 < length and documents[row, i + d + 1] == documents[row, i]:
                        ids[row, i] = input_ids[row, i + d + 1]
                    if i + d + 2 < length and documents[row, i + d + 2] == documents[row, i]:
                        targets[row, i] = labels[row, i + d + 2]
            h = self.hidden(d, h, ids, mask, places)
            terms = nn.functional.cross_entropy(self.base.lm_head(h).flatten(0, 1), targets.flatten(), reduction="sum")
            count = int((targets != -100).sum())
            loss = loss + self.weight / len(self.further) * terms / max(count, 1)
        return types.SimpleNamespace(loss=loss, logits=out.logits, hidden_states=out.hidden_states)
