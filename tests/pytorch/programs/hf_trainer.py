# SPDX-License-Identifier: Apache-2.0
"""Two steps of transformers' Trainer on a saved model; under torchrun it is DDP.

    hf_trainer.py FOLDER BATCH MICRO_BATCHES fp32|bf16
"""

import sys

import torch
import transformers

import anyrank

transformers.logging.set_verbosity_error()


def samples(count=16, length=20):
    """Prompts of different lengths are no targets."""
    draw = torch.Generator().manual_seed(5)
    for i in range(count):
        ids = torch.randint(3, 140, (length,), generator=draw)
        yield {"input_ids": ids, "labels": torch.where(torch.arange(length) < i % 5 * 2, -100, ids)}


def first_batch():
    """Ids and labels of the first step, of all ranks."""
    of_step = list(samples())[:8]
    return [torch.stack([sample[name] for sample in of_step]) for name in ("input_ids", "labels")]


def main(folder, batch, micro_batches, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    arguments = transformers.TrainingArguments(
        output_dir="out", max_steps=2, per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=int(micro_batches),
        bf16=dtype == "bf16", learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=0.5,
        train_sampling_strategy="sequential", use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no",
        disable_tqdm=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=list(samples()))
    dump = anyrank.capture(model, "dump", steps={1, 2}, spec={"partial": {"loss:fwd": "dp"}}).start()
    trainer.train()
    dump.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
