# SPDX-License-Identifier: Apache-2.0
"""python padding.py: of Youtu, from_pretrained on one rank sets a row of the loaded embedding to zero; on shards not."""

import torch
from transformers import AutoModelForCausalLM, YoutuConfig, YoutuForCausalLM

model = YoutuForCausalLM(YoutuConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                                     num_attention_heads=4, num_key_value_heads=4, pad_token_id=3))
torch.nn.init.normal_(model.model.embed_tokens.weight)
model.save_pretrained("/tmp/youtu")
loaded = AutoModelForCausalLM.from_pretrained("/tmp/youtu")
different = (loaded.model.embed_tokens.weight != model.model.embed_tokens.weight).any(1)
print("rows of embed_tokens that differ from the checkpoint:", different.nonzero().flatten().tolist())
