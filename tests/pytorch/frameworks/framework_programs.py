# SPDX-License-Identifier: Apache-2.0
"""Programs with Lightning, accelerate, transformers' Trainer, PEFT, trl and sentence-transformers."""

import itertools
import os
import warnings

import torch

from programs import (BERT, BF16, LLAMA, capture, full_weights, generator, gpt, llama, lm_loss, program, sentence,
                      tokenizer, tokens)
from torch_programs import hf_train

warnings.filterwarnings("ignore")

DEALT = {"samples": "dealt"}
LIGHTNING, ACCELERATE = ("lightning",), ("accelerate",)
TRAINER = ("transformers", "accelerate", "datasets")
TRL = (*TRAINER, "trl")
SENTENCES = (*TRAINER, "sentence_transformers")


# -- Lightning

def lightning_module(warm=False):
    import lightning as L

    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = gpt()

        def training_step(self, batch, index):
            ids, = batch
            return lm_loss(self.net(ids), ids)

        def validation_step(self, batch, index):
            ids, = batch
            self.log("val", lm_loss(self.net(ids), ids), sync_dist=True)

        def configure_optimizers(self):
            opt = torch.optim.AdamW(self.parameters(), lr=1e-3)
            if not warm:
                return opt
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 3))
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
    return Lit()


def token_dataset(n=48):
    from torch.utils.data import TensorDataset
    return TensorDataset(tokens(5, n))


def lightning_run(rank, world, folder, warm=False, val=False, per=8, bug=None, **options):
    """Lightning's own sampler shuffles on several ranks only, whatever the loader says, so the sampler is given."""
    import lightning as L
    from torch.utils.data import DataLoader, DistributedSampler
    model = lightning_module(warm=warm)
    trainer = L.Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_steps=3,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        use_distributed_sampler=False, **options)
    data = token_dataset()
    sampler = DistributedSampler(data, 1 if bug else world, 0 if bug else rank, shuffle=True)
    loader = DataLoader(data, batch_size=per // world, sampler=sampler)
    with capture(model, folder):
        trainer.fit(model, loader, DataLoader(token_dataset(8), batch_size=4) if val else None)
    return full_weights(model)


@program("lightning_ddp", needs=LIGHTNING, spec=DEALT, about="Lightning Trainer, strategy ddp",
         bugs={"sampler": "no distributed sampler: both ranks train on the same samples"})
def lightning_ddp(rank, world, folder, bug=None):
    return lightning_run(rank, world, folder, bug=bug)


@program("lightning_accum_clip", needs=LIGHTNING, spec=DEALT, about="accumulate_grad_batches=2, gradient_clip_val")
def lightning_accum_clip(rank, world, folder):
    return lightning_run(rank, world, folder, per=4, accumulate_grad_batches=2, gradient_clip_val=0.5)


@program("lightning_val_warmup", needs=LIGHTNING, spec=DEALT,
         about="sanity check, validation every 2 batches, warm-up from lr 0")
def lightning_val_warmup(rank, world, folder):
    return lightning_run(rank, world, folder, warm=True, val=True, val_check_interval=2)


@program("fabric_accum", needs=LIGHTNING, spec=DEALT, about="Lightning Fabric, no_backward_sync",
         bugs={"never_synced": "no_backward_sync also around the last micro-batch"})
def fabric_accum(rank, world, folder, bug=None):
    import lightning as L
    from torch.utils.data import DataLoader
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    model = gpt()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    net, opt = fabric.setup(model, opt)
    loader = fabric.setup_dataloaders(DataLoader(token_dataset(16), batch_size=4 // world, shuffle=False))
    with capture(model, folder):
        for k, (ids,) in enumerate(loader):
            last = k % 2 == 1
            with fabric.no_backward_sync(net, enabled=not last or bool(bug)):
                fabric.backward(lm_loss(net(ids), ids) / 2)
            if last:
                opt.step()
                opt.zero_grad()
    return full_weights(model)


# -- accelerate

def accelerate_run(rank, world, folder, accumulate=1, warm=False, bug=None, gather=False, clip=None, dtype=None):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate,
                              **({"mixed_precision": dtype} if dtype else {}))
    model = gpt()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 4)) if warm else None
    loader = DataLoader(token_dataset(24), batch_size=8 // accumulate // world, shuffle=False)
    if bug == "loader":
        net, opt = accelerator.prepare(model, opt)
    else:
        net, opt, loader = accelerator.prepare(model, opt, loader)
    if bug == "scheduler":
        schedule = accelerator.prepare(schedule)
    with capture(model, folder):
        for k, (ids,) in enumerate(loader):
            if k == 3 * accumulate:
                break
            with accelerator.accumulate(net):
                loss = lm_loss(net(ids), ids)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
                opt.step()
                if schedule and accelerator.sync_gradients:
                    schedule.step()
                opt.zero_grad()
            if gather:
                accelerator.gather(loss.detach().reshape(1)).mean()
    return full_weights(model)


@program("accelerate_plain", needs=ACCELERATE, about="prepare, backward, gather of the loss",
         bugs={"loader": "the loader is not prepared: both ranks have the same batches"})
def accelerate_plain(rank, world, folder, bug=None):
    return accelerate_run(rank, world, folder, gather=True, bug=bug)


@program("accelerate_accum_clip", needs=ACCELERATE,
         about="accumulate 2, clip, gather, warm-up with an unprepared scheduler",
         bugs={"scheduler": "the scheduler is prepared, so it steps once per process"})
def accelerate_accum_clip(rank, world, folder, bug=None):
    return accelerate_run(rank, world, folder, accumulate=2, clip=0.5, gather=True, warm=True, bug=bug)


@program("accelerate_bf16", needs=ACCELERATE, tolerance=BF16, weights_tolerance=3e-2, ranks=4,
         about="mixed_precision bf16, 4 ranks")
def accelerate_bf16(rank, world, folder):
    return accelerate_run(rank, world, folder, dtype="bf16")


# -- transformers.Trainer

def trainer_options(world, per=8, **options):
    return dict(output_dir="out", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=3,
                per_device_train_batch_size=per // world, learning_rate=1e-3, seed=1, logging_steps=1) | options


def token_rows(n=32, ragged=False):
    import datasets
    rows = []
    for k in range(n):
        g = generator(6000 + k)
        length = int(torch.randint(5, 16, (1,), generator=g)) if ragged else 12
        ids = torch.randint(4, 64, (length,), generator=g).tolist()
        rows.append({"input_ids": ids, "labels": list(ids), "attention_mask": [1] * length})
    return datasets.Dataset.from_list(rows)


def trainer_run(rank, world, folder, model, ragged=False, **options):
    import transformers
    tok = tokenizer()
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(**trainer_options(world, **options)),
        train_dataset=token_rows(ragged=ragged), eval_dataset=token_rows(8) if options.get("eval_strategy") else None,
        data_collator=transformers.DataCollatorForSeq2Seq(tok, padding=True), processing_class=tok)
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


@program("trainer_fp32", needs=TRAINER, about="Trainer, Llama, fp32, shuffled, default schedule and clipping")
def trainer_fp32(rank, world, folder):
    return trainer_run(rank, world, folder, llama())


@program("trainer_bf16", needs=TRAINER, tolerance=BF16, weights_tolerance=3e-2,
         about="Trainer with bf16=True on the CPU")
def trainer_bf16(rank, world, folder):
    return trainer_run(rank, world, folder, llama(), bf16=True)


@program("trainer_ragged_accum", needs=TRAINER,
         about="rows of different lengths, gradient_accumulation_steps=2, warm-up",
         bugs={"mean_of_means": "average_tokens_across_devices=False"})
def trainer_ragged_accum(rank, world, folder, bug=None):
    return trainer_run(rank, world, folder, llama(), ragged=True, per=4, gradient_accumulation_steps=2, warmup_steps=2,
                       **({"average_tokens_across_devices": False} if bug else {}))


@program("trainer_eval_4", needs=TRAINER, ranks=4,
         about="4 ranks, evaluation before and between steps, gradient checkpointing, adafactor")
def trainer_eval_4(rank, world, folder):
    return trainer_run(rank, world, folder, llama(), eval_strategy="steps", eval_steps=1, eval_on_start=True,
                       gradient_checkpointing=True, per_device_eval_batch_size=8 // world, optim="adafactor")


@program("trainer_bert_classifier", needs=TRAINER, zero_gradients=["*key.bias"], expected="different",
         about="Trainer, BERT sequence classifier: transformers multiplies gradients by the number of ranks")
def trainer_bert_classifier(rank, world, folder):
    import datasets
    import transformers
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(
        **BERT, num_labels=3, attn_implementation="eager"))
    data = datasets.Dataset.from_list([{"input_ids": tokens(k, 1, 10)[0].tolist(), "labels": k % 3} for k in range(32)])
    # Adam and clipping would hide the factor in the weights.
    options = trainer_options(world, optim="sgd", max_grad_norm=0.0)
    trainer = transformers.Trainer(model=model, args=transformers.TrainingArguments(**options), train_dataset=data)
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


# -- PEFT

def lora(model):
    import peft
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM",
                                                      target_modules=["q_proj", "v_proj", "down_proj"]))


@program("peft_trainer", needs=(*TRAINER, "peft"), about="LoRA under Trainer",
         bugs={"base_trained": "a norm of the base model is not frozen"})
def peft_trainer(rank, world, folder, bug=None):
    model = lora(llama())
    if bug:
        for n, p in model.named_parameters():
            if n.endswith("model.norm.weight"):
                p.requires_grad_(True)
    return trainer_run(rank, world, folder, model)


@program("peft_ddp", needs=("transformers", "peft"), about="LoRA under plain DDP with a hand-written loop")
def peft_ddp(rank, world, folder):
    return hf_train(rank, world, folder, lora(llama()))


# -- trl

def trl_options(world, **options):
    return trainer_options(world, **({"bf16": False} | options))


def sft(rank, world, folder, n=32, **options):
    import datasets
    import trl
    model = llama()
    trainer = trl.SFTTrainer(model=model, args=trl.SFTConfig(**trl_options(world, max_length=32, **options)),
                             train_dataset=datasets.Dataset.from_list([{"text": sentence(k, 4, 14)} for k in range(n)]),
                             processing_class=tokenizer())
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


@program("trl_sft_pad", needs=TRL, about="SFTTrainer, padded rows of different lengths")
def trl_sft_pad(rank, world, folder):
    return sft(rank, world, folder)


@program("trl_sft_accum", needs=TRL, about="SFTTrainer, 2 micro-batches",
         bugs={"mean_of_means": "average_tokens_across_devices=False"})
def trl_sft_accum(rank, world, folder, bug=None):
    return sft(rank, world, folder, per=4, gradient_accumulation_steps=2,
               **({"average_tokens_across_devices": False} if bug else {}))


@program("trl_sft_packing", needs=TRL, about="SFTTrainer, packing=True (bfd: rows flattened to one)")
def trl_sft_packing(rank, world, folder):
    return sft(rank, world, folder, n=120, per=4, packing=True)


@program("trl_sft_packing_wrapped", needs=TRL, about="SFTTrainer, packing with packing_strategy wrapped")
def trl_sft_packing_wrapped(rank, world, folder):
    return sft(rank, world, folder, n=120, per=4, packing=True, packing_strategy="wrapped")


def pairs():
    import datasets
    return datasets.Dataset.from_list([{"prompt": sentence(k) + " ", "chosen": sentence(100 + k),
                                        "rejected": sentence(200 + k)} for k in range(32)])


@program("trl_dpo", needs=TRL, weights_tolerance=1e-4, about="DPOTrainer")
def trl_dpo(rank, world, folder):
    import trl
    model = llama()
    trainer = trl.DPOTrainer(model=model, ref_model=llama(), args=trl.DPOConfig(**trl_options(world, max_length=32)),
                             train_dataset=pairs(), processing_class=tokenizer())
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


@program("trl_reward", needs=TRL, weights_tolerance=1e-4, about="RewardTrainer")
def trl_reward(rank, world, folder):
    import datasets
    import transformers
    import trl
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA, num_labels=1))
    data = datasets.Dataset.from_list([{"chosen": sentence(100 + k), "rejected": sentence(200 + k)} for k in range(32)])
    trainer = trl.RewardTrainer(model=model, args=trl.RewardConfig(**trl_options(world, max_length=32)),
                                train_dataset=data, processing_class=tokenizer())
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


def grpo(rank, world, folder, bug=None, **options):
    import datasets
    import trl
    tok = tokenizer()
    calls = itertools.count()

    def rollout(prompts, trainer):
        """Deterministic rollouts: completion k of the step's global batch is drawn from its own seed."""
        first = 10_000 * next(calls) + (0 if bug else rank * len(prompts))
        out = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for k, prompt in enumerate(prompts):
            g = generator(first + k)
            length = int(torch.randint(3, 8, (1,), generator=g))
            completion = torch.randint(4, 64, (length,), generator=g).tolist() + [2]
            out["prompt_ids"].append(tok(prompt)["input_ids"])
            out["completion_ids"].append(completion)
            out["logprobs"].append([0.0] * len(completion))
        return out

    def reward(completions, **_):
        return [sum(int(w[1:]) for w in c.split() if w.startswith("w")) / 100 for c in completions]
    model = llama()
    trainer = trl.GRPOTrainer(model=model, reward_funcs=reward, rollout_func=rollout, processing_class=tok,
                              args=trl.GRPOConfig(**trl_options(world, num_generations=4, max_completion_length=8,
                                                                **options)),
                              train_dataset=datasets.Dataset.from_list([{"prompt": sentence(k)} for k in range(16)]))
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


@program("trl_grpo_1", needs=TRL, weights_tolerance=1e-4,
         about="GRPOTrainer, 1 micro-batch, deterministic rollouts",
         bugs={"same_rollouts": "both ranks draw the same completions"})
def trl_grpo_1(rank, world, folder, bug=None):
    return grpo(rank, world, folder, bug)


@program("trl_grpo_2", needs=TRL, weights_tolerance=1e-4, about="GRPOTrainer, gradient_accumulation_steps=2")
def trl_grpo_2(rank, world, folder):
    return grpo(rank, world, folder, gradient_accumulation_steps=2)


# -- sentence-transformers

def sentence_model():
    import sentence_transformers
    import transformers
    from sentence_transformers import models
    torch.manual_seed(0)
    path = f"bert_{os.getpid()}"
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    encoder = models.Transformer(path, max_seq_length=32)
    return sentence_transformers.SentenceTransformer(modules=[encoder, models.Pooling(32)], device="cpu")


def sentence_run(rank, world, folder, make_loss, data):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    model = sentence_model()
    trainer = SentenceTransformerTrainer(
        model=model, args=SentenceTransformerTrainingArguments(**trainer_options(world)), train_dataset=data,
        loss=make_loss(model))
    with capture(trainer.model, folder):
        trainer.train()
    return full_weights(model)


@program("st_cosine", needs=SENTENCES, zero_gradients=["*key.bias"], weights_tolerance=1e-4,
         about="SentenceTransformerTrainer, CosineSimilarityLoss")
def st_cosine(rank, world, folder):
    import datasets
    from sentence_transformers import losses
    data = datasets.Dataset.from_list([{"sentence1": sentence(k), "sentence2": sentence(300 + k), "score": (k % 5) / 4}
                                       for k in range(32)])
    return sentence_run(rank, world, folder, losses.CosineSimilarityLoss, data)


@program("st_mnrl_gathered", needs=SENTENCES, zero_gradients=["*key.bias"], weights_tolerance=1e-4,
         about="MultipleNegativesRankingLoss(gather_across_devices=True)",
         bugs={"local": "without gather_across_devices: negatives of its own rank only"})
def st_mnrl_gathered(rank, world, folder, bug=None):
    import datasets
    from sentence_transformers import losses
    data = datasets.Dataset.from_list([{"anchor": sentence(k), "positive": sentence(300 + k)} for k in range(32)])
    return sentence_run(rank, world, folder, lambda model: losses.MultipleNegativesRankingLoss(
        model, gather_across_devices=not bug), data)
