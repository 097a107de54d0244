# SPDX-License-Identifier: Apache-2.0
"""Programs of the package index as they are: accelerate, transformers' Trainer, trl, torchtune, DeepSpeed,
Megatron-core, each under layouts of several ranks and micro-batches against one rank.

    python tests/pytorch/wild_programs.py --anyrank build/anyrank [--only GLOB..] [--json FILE]

Needs what is run (pip install accelerate trl torchtune deepspeed megatron-core); what is not installed is left out. A
run is two steps of SGD of a tiny Llama (a GPT of Megatron's) on rows of several lengths, on 1 to 4 gloo processes of a
CPU; what the steps took from each weight, the losses and the norms of gradients are compared by `verify`.
docs/evidence/found.md has what was found.
"""

import argparse
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401  here once, instead of in each process
import torch.distributed.tensor.parallel  # noqa: F401
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from wild import on_ranks, why  # noqa: E402

sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != HERE]  # it has a megatron.py

ROWS, SEQ, STEPS, LR = 8, 12, 2, 0.1


def rows():
    """Of every step 8 rows of 4 to 12 tokens; the first half of each predicts nothing."""
    draw = torch.Generator().manual_seed(1)
    out = []
    for i in range(ROWS * STEPS):
        ids = torch.randint(3, 90, (4 + 5 * i % 9,), generator=draw).tolist()
        out.append({"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2:]})
    return out


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64, attn_implementation="eager", **more))


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().contiguous().clone()


def state(model):
    return {name: whole(p) for name, p in model.named_parameters()}


def update(before, after):
    return {name.replace("module.", ""): before[name] - after[name] for name in before}


def padded(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    def fill(key, value):
        return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in batch])
    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", -100), "attention_mask": torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch])}


def arguments(kind, folder, world, micro, **more):
    return kind(output_dir=str(folder / "out"), use_cpu=True, max_steps=STEPS, optim="sgd", learning_rate=LR,
                per_device_train_batch_size=ROWS // world // micro, gradient_accumulation_steps=micro,
                lr_scheduler_type="constant", save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True,
                dataloader_drop_last=True, train_sampling_strategy="sequential", **more)


def trained(trainer):
    before = state(trainer.model)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {**update(before, state(trainer.accelerator.unwrap_model(trainer.model))),
            "losses": torch.tensor([row["loss"] for row in logs]),
            "norms": torch.tensor([float(row.get("grad_norm", 0)) for row in logs])}


# --- the programs: (folder, rank, world, micro-batches, options) -> tensors ------------------------------------------


def hf_trainer(folder, rank, world, micro, **more):
    from transformers import Trainer, TrainingArguments
    args = arguments(TrainingArguments, folder, world, micro, bf16=False, **more)
    return trained(Trainer(llama(), args, train_dataset=rows(), data_collator=padded))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def trl_sft(folder, rank, world, micro, **more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    data = [{"prompt": text(row["input_ids"][:len(row["input_ids"]) // 2]) + " ",
             "completion": text(row["input_ids"][len(row["input_ids"]) // 2:])} for row in rows()]
    args = arguments(SFTConfig, folder, world, micro, bf16=False, shuffle_dataset=False, gradient_checkpointing=False,
                     max_length=32, **more)
    return trained(SFTTrainer(llama(), args, train_dataset=Dataset.from_list(data), processing_class=tokenizer()))


def pairs():
    return [{"prompt": text(row["input_ids"][:3]) + " ", "chosen": text(row["input_ids"][3:]),
             "rejected": text(row["input_ids"][3:][::-1] + row["input_ids"][:i % 3])} for i, row in enumerate(rows())]


def trl_dpo(folder, rank, world, micro, **more):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    args = arguments(DPOConfig, folder, world, micro, bf16=False, gradient_checkpointing=False, max_length=32, **more)
    return trained(DPOTrainer(llama(), llama(), args=args, train_dataset=Dataset.from_list(pairs()),
                              processing_class=tokenizer()))


def trl_reward(folder, rank, world, micro, **more):
    from datasets import Dataset
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(type(llama().config)(**{**llama().config.to_dict(), "num_labels": 1}))
    args = arguments(RewardConfig, folder, world, micro, bf16=False, gradient_checkpointing=False, max_length=32,
                     **more)
    data = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in pairs()]
    return trained(RewardTrainer(model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer()))


def accelerated(folder, rank, world, micro, clip=1.0):
    """A loop as in its documentation; the loss of a micro-batch is a sum, divided by all targets of the step."""
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    data = torch.utils.data.DataLoader(rows(), batch_size=ROWS // world // micro, collate_fn=padded)
    model = llama()
    before = state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    norms, parts = [], list(data)
    for at in range(0, len(parts), micro):
        group = parts[at:at + micro]
        targets = accelerator.reduce(sum((part["labels"][:, 1:] != -100).sum() for part in group), "sum")
        for part in group:
            with accelerator.accumulate(model):
                logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten(),
                                                         reduction="sum") / targets * world * micro
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                optimizer.zero_grad()
    return {**update(before, state(accelerator.unwrap_model(model))), "norms": torch.tensor(norms)}


def torchtuned(folder, rank, world, micro, tp=1):
    """The step of its recipe full_finetune_distributed: shard_model, the sum of losses, scale_grads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module
    from torchtune import training
    from torchtune.models.llama3 import base_llama_tp_plan, llama3
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    torch.manual_seed(0)
    model = llama3(96, 2, 4, 2, 32, 64, intermediate_dim=64)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    before = state(model)
    dp = world // (tp if world > 1 else 1)
    if world > 1:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        if tp > 1:
            training.prepare_mha_for_tp(model, mesh["tp"])
            parallelize_module(model, mesh["tp"], base_llama_tp_plan())
        if dp > 1:
            training.shard_model(model, [lambda name, module: name.startswith("layers.") and name.count(".") == 1],
                                 cpu_offload=False, dp_mesh=mesh["dp"])
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=LR), CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_of.num_output_chunks)
    norms = []
    for step in range(STEPS):
        own = rows()[step * ROWS:(step + 1) * ROWS]
        own = [own[i] for i in range(ROWS) if i * dp // ROWS == rank // (world // dp)]
        tokens, running = torch.tensor(0), 0
        for at in range(micro):
            part = padded(own[at * len(own) // micro:(at + 1) * len(own) // micro])
            labels = torch.hstack((part["labels"][:, 1:], torch.full((len(part["labels"]), 1), -100)))
            n = (labels != -100).sum()
            tokens += n
            logits = model(part["input_ids"])
            (loss_of(logits, labels) * n * (dp if world > 1 else 1)).backward()
        if world > 1:
            dist.all_reduce(tokens)
            tokens = tokens // (world // dp)
        training.scale_grads(model, 1 / tokens)
        if tp == 1:  # refused with tp: DTensors of several meshes, and tensors that are none
            norms.append(float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    return update(before, state(model))


def deepspeeded(folder, rank, world, micro, stage=1):
    import deepspeed
    model = llama()
    before = state(model)
    config = {"train_micro_batch_size_per_gpu": ROWS // world // micro,
              "gradient_accumulation_steps": micro, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage}}
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if world == 1:
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config,
                                      dist_init_required=False)
    norms = []
    for step in range(STEPS):
        batch = rows()[step * ROWS:(step + 1) * ROWS]
        targets = sum(x != -100 for row in batch for x in row["labels"][1:])
        own = [batch[i] for i in range(ROWS) if i * world // ROWS == rank]
        for at in range(micro):
            part = padded(own[at * len(own) // micro:(at + 1) * len(own) // micro])
            logits = engine(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten(),
                                                     reduction="sum") / targets * world * micro
            engine.backward(loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    if stage == 3 and world > 1:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            after = state(model)
    else:
        after = state(model)
    return {**update(before, after), "norms": torch.tensor(norms)}


def megatron(folder, rank, world, micro, tp=1, pp=1, gated=False, tied=False):
    """GPTModel, DistributedDataParallel, the pipeline's schedule and the optimizer of megatron.core, on CPU."""
    cpu = torch.device("cpu")

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = {key: cpu if key == "device" and str(value).startswith("cuda") else value
                      for key, value in (kwargs or {}).items()}
            return function(*args, **kwargs)
    OnCpu().__enter__()
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    type_of = torch.Tensor.type  # gradients are asserted to be of CUDA
    torch.Tensor.type = lambda self, *a, **k: type_of(self, *a, **k) if a or k else "torch.cuda.FloatTensor"
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig
    if world == 1:
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        tp = pp = 1
    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        use_cpu_initialization=True, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=gated,
        bias_activation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, calculate_per_token_loss=True,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu)
    torch.manual_seed(0)
    core = GPTModel(config, get_gpt_layer_local_spec(), 96, 64, position_embedding_type="learned_absolute",
                    share_embeddings_and_output_weights=tied,
                    pre_process=parallel_state.is_pipeline_first_stage(),
                    post_process=parallel_state.is_pipeline_last_stage())
    offset = parallel_state.get_pipeline_model_parallel_rank() * (2 // pp)
    draw = {}
    with torch.no_grad():  # the same weights however they are cut
        for name, p in core.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                parts[parts.index("layers") + 1] = str(int(parts[parts.index("layers") + 1]) + offset)
            key, dim = ".".join(parts), getattr(p, "partition_dim", -1)
            if tied and key == "output_layer.weight":  # the last stage's copy
                key = "embedding.word_embeddings.weight"
            cut = tp > 1 and dim >= 0 and getattr(p, "tensor_model_parallel", False)
            shape = list(p.shape)
            if cut:
                shape[dim] *= tp
            full = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, key)))) * 0.1 + (
                1.0 if "layernorm" in key and key.endswith("weight") else 0.0)
            draw[name] = key, dim if cut else -1, full
            own = parallel_state.get_tensor_model_parallel_rank()
            p.copy_(piece(full, dim, tp, own, gated and "fc1" in key) if cut else full)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False), core)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=False,
        params_dtype=torch.float32), [model])
    dp, own_dp = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    norms = []

    def forward(parts, model):
        part = next(parts)
        seq = part["input_ids"].shape[1]
        mask = torch.ones(1, 1, seq, seq).tril() < 0.5
        out = model(part["input_ids"], torch.arange(seq).repeat(len(part["input_ids"]), 1), mask, labels=part["next"])
        keep = part["next"] != 0

        def loss_of(out):
            loss, n = (out * keep).sum(), keep.sum().to(torch.int)
            return loss, n, {"loss": loss.detach()}
        return out, loss_of

    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batch = padded(rows()[step * ROWS:(step + 1) * ROWS])
        ids, labels = (torch.nn.functional.pad(batch[key], (0, SEQ - batch[key].shape[1]), value=fill)
                       for key, fill in (("input_ids", 0), ("labels", -100)))
        following = torch.hstack((labels[:, 1:], torch.full((ROWS, 1), -100))).clamp(min=0)
        each = ROWS // dp // micro
        parts = [{"input_ids": ids[at:at + each], "next": following[at:at + each]}
                 for at in range(own_dp * ROWS // dp, (own_dp + 1) * ROWS // dp, each)]
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(parts), model=[model], num_microbatches=micro, seq_length=SEQ,
            micro_batch_size=each, forward_only=False)
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
    out = {}
    for name, p in core.named_parameters():
        key, dim, full = draw[name]
        after = p.detach().clone()
        if dim >= 0:
            parts = [torch.empty_like(after) for _ in range(tp)]
            dist.all_gather(parts, after.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            after = joined(parts, dim, gated and "fc1" in key)
        out[key] = full - after
    if world > 1:
        every = [None] * world
        dist.all_gather_object(every, out)
        out = {key: value for each in every for key, value in each.items()}
    return {**out, "norms": torch.tensor(norms)}


def piece(full, dim, n, i, pair):
    return torch.cat([half.chunk(n, dim)[i] for half in full.chunk(2, dim)], dim) if pair else full.chunk(n, dim)[i]


def joined(parts, dim, pair):
    if not pair:
        return torch.cat(parts, dim)
    return torch.cat([torch.cat([part.chunk(2, dim)[half] for part in parts], dim) for half in (0, 1)], dim)


# package: program: its options, and layouts as (processes, micro-batches, options of several ranks)
PLAIN = [(1, 2, {}), (2, 1, {}), (2, 2, {}), (4, 1, {}), (4, 2, {})]
CASES = {
    "Trainer": ("transformers", hf_trainer, {
        "": PLAIN, "label_smoothing_factor=0.1": [(1, 2, {}), (2, 1, {})],
        "average_tokens_across_devices=False": [(2, 1, {})]}),
    "SFT": ("trl", trl_sft, {"": PLAIN, "loss_type='dft'": [(1, 2, {}), (2, 1, {}), (4, 2, {})],
                             "loss_type='chunked_nll'": [(1, 2, {}), (2, 1, {}), (4, 2, {})]}),
    "DPO": ("trl", trl_dpo, {
        "": PLAIN[:3], "loss_type=['ipo']": [(2, 1, {})], "loss_type=['sft']": [(1, 2, {}), (2, 1, {})],
        "loss_type=['sigmoid_norm']": [(2, 1, {})], "use_weighting=True": [(2, 1, {})]}),
    "Reward": ("trl", trl_reward, {"": [(1, 2, {}), (2, 1, {}), (4, 2, {})]}),
    "accelerate": ("accelerate", accelerated, {"": PLAIN}),
    "torchtune": ("torchtune", torchtuned, {"": [
        (1, 2, {}), (2, 1, {}), (2, 2, {}), (4, 1, {}), (2, 1, dict(tp=2)), (4, 1, dict(tp=2)), (4, 2, dict(tp=2))]}),
    "DeepSpeed": ("deepspeed", deepspeeded, {"": [
        *((world, micro, dict(stage=stage)) for stage in (1, 2, 3) for world, micro in ((2, 1), (2, 2)))]}),
    "Megatron": ("megatron-core", megatron, {
        "": [(1, 2, {}), (2, 1, {}), (2, 2, {}), (2, 1, dict(tp=2)), (2, 2, dict(pp=2)), (4, 2, dict(tp=2, pp=2)),
             (4, 1, dict(tp=4))],
        "gated=True": [(2, 1, dict(tp=2))],
        "tied=True": [(2, 1, dict(tp=2)), (2, 2, dict(pp=2)), (4, 2, dict(tp=2, pp=2))]}),
}


def runs():
    for program, (package, function, variants) in CASES.items():
        for variant, layouts in variants.items():
            fixed = eval(f"dict({variant})")
            for world, micro, more in layouts:
                text = " ".join([program, *([variant] if variant else []), f"ranks={world}",
                                 *([f"micro={micro}"] if micro > 1 else []), *(f"{k}={v}" for k, v in more.items())])
                yield text, package, program, variant, function, fixed, world, micro, more


def look(anyrank, folder, program, variant, function, fixed, world, micro, more):
    def made(path, world, micro, more):
        def run(rank):
            torch.manual_seed(0)
            tensors = function(folder, rank, world, micro, **fixed, **more)
            if rank == 0:
                save_file({name: value.contiguous() for name, value in tensors.items()}, path)
        return on_ranks(world, path.with_suffix(""), run)

    one = folder / f"{program}{variant}.safetensors".replace("'", "").replace("/", "")
    other = folder / "other.safetensors"
    other.unlink(missing_ok=True)
    if not one.exists() and not (made(one, 1, 1, {}) and one.exists()):
        return "failed", "on one rank: " + why(one.with_suffix(""))
    if not made(other, world, micro, more):
        return "failed", why(other.with_suffix(""))
    report = folder / "report.json"
    done = subprocess.run([anyrank, "verify", one, other, "--rtol", "1e-4", "--atol", "3e-6", "--json", report, "-q"],
                          capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return "failed", done.stderr
    said = json.loads(report.read_text())
    if said["result"] == "same":
        return "same", ""
    return "different", f"{said['first']['tensor']}: {said['first'].get('hint')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--anyrank", default="build/anyrank")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="of names such as 'DPO ranks=2'")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps tensors and logs")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="anyrank-wild-"))
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for name, package, *case in runs():
        if not any(fnmatch.fnmatchcase(name, glob) for glob in args.only):
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        verdict, said = look(args.anyrank, folder, *case)
        done.append({"run": name, "package": f"{package} {version}", "verdict": verdict, "text": said})
        print(f"{verdict:10} {name:48} {said}", flush=True)
    count = {verdict: sum(row["verdict"] == verdict for row in done) for verdict in ("same", "different", "failed")}
    print(*(f"{verdict} {n}" for verdict, n in count.items()), f"of {len(done)}", sep=", ")
    if args.json:
        args.json.write_text(json.dumps(done, indent=1) + "\n")
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
