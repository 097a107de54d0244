# SPDX-License-Identifier: Apache-2.0
"""python means.py: DPO's loss "sft" (part of MPO's) has other gradients in two micro-batches than in one."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w3"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokens = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
pairs = Dataset.from_list([{"prompt": "w5 w6 ", "rejected": "w9",
                            "chosen": " ".join(f"w{7 * i + j}" for j in range(2 + 4 * i))} for i in range(4)])
config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
weights = []
for micro_batches in (1, 2):
    torch.manual_seed(0)
    model, reference = (LlamaForCausalLM(config) for _ in range(2))
    before = model.lm_head.weight.detach().clone()
    DPOTrainer(model, reference, processing_class=tokens, train_dataset=pairs, args=DPOConfig(
        output_dir="/tmp/means", loss_type=["sft"], use_cpu=True, bf16=False, max_steps=1, optim="sgd",
        learning_rate=1.0, gradient_accumulation_steps=micro_batches, max_grad_norm=0.0,
        per_device_train_batch_size=4 // micro_batches, lr_scheduler_type="constant", report_to=[],
        gradient_checkpointing=False, save_strategy="no")).train()
    weights.append(model.lm_head.weight.detach() - before)
print("relative difference of lm_head's gradient:", ((weights[1] - weights[0]).norm() / weights[0].norm()).item())
