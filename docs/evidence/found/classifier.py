# SPDX-License-Identifier: Apache-2.0
"""python classifier.py: Trainer's gradients of a classifier grow with the ranks, and with the micro-batches."""

import os

import torch
import torch.multiprocessing
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

ROWS = 8


def train(rank, world, micro_batches, norms):
    """Puts the norm of the gradient of one step on the same eight rows into norms[0]."""
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT="29417")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    before = [p.detach().clone() for p in model.parameters()]
    rows = Dataset.from_list([{"input_ids": [(5 * i + j) % 60 + 2 for j in range(9)], "labels": i % 3}
                              for i in range(ROWS)])
    Trainer(model, TrainingArguments(
        output_dir="/tmp/classifier", use_cpu=True, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        gradient_accumulation_steps=micro_batches, per_device_train_batch_size=ROWS // world // micro_batches,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", disable_tqdm=True), train_dataset=rows).train()
    if rank == 0:
        norms[0] = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before)]).norm()


def gradient_norm(world, micro_batches):
    norms = torch.zeros(1).share_memory_()
    torch.multiprocessing.spawn(train, (world, micro_batches, norms), nprocs=world)
    return norms.item()


if __name__ == "__main__":
    once = gradient_norm(1, 1)
    print("norm of the gradient, relative to one rank's in one batch:")
    print("two ranks:", gradient_norm(2, 1) / once)
    print("two micro-batches:", gradient_norm(1, 2) / once)
    print("two ranks, two micro-batches:", gradient_norm(2, 2) / once)
