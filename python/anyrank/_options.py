# SPDX-License-Identifier: Apache-2.0
"""The command's options as keyword arguments, out of its own tables.

`anyrank describe python/options.py.in python/anyrank/_options.py` writes this file, and a test compares it with what
the command says: an option of the command is one here, too.
"""

from __future__ import annotations

import os
import typing

Path = typing.Union[str, "os.PathLike[str]"]
Text = typing.Union[str, float, typing.Sequence[float]]  # numbers with commas between them: betas=(0.9, 0.95)
Texts = typing.Union[str, typing.Sequence[str]]  # each of them is one more
Bytes = typing.Union[int, str]  # 4096, "25MiB"
Part = typing.Union[int, str]  # 16 and "1/16": a sixteenth
Counts = typing.Union[str, typing.Sequence[int]]  # (3, 5, 4), "3,5,4"
Optional = typing.Union[bool, int]  # True: the option without its number


class Option(typing.NamedTuple):
    """type: one of the names above, "bool", "int", "float", or the words that it may be."""

    type: str
    help: str


OPTIONS: dict[str, dict[str, Option]] = {}


class CheckOptions(typing.TypedDict, total=False):
    scale: Part
    plan: Path
    tp: int
    mlp_order: typing.Literal["column-row", "row-column"]
    collectives: typing.Literal["direct", "ring"]
    timeout: float
    numerics: typing.Literal["exact", "native"]
    device: Text
    precision: typing.Literal["f32", "tf32", "bf16"]
    sp: bool
    keep_gathered: bool
    overlap: int
    recompute: typing.Literal["none", "selective", "full"]
    recompute_every: int
    dp: int
    cp: int
    cp_inner: int
    zigzag: bool
    micro_batches: int
    forward_first: bool
    pp: int
    schedule_pp: Path
    virtual_stages: int
    stages: Counts
    zero: int
    dp_replicate: int
    bucket_bytes: Bytes
    bucket_mode: typing.Literal["overlap", "eager"]
    bucket_order: typing.Literal["reverse", "largest-first"]
    find_unused: bool
    sweep: Optional
    batch: int
    seq: int
    text: Path
    documents: int
    steps: int
    optimizer: typing.Literal["sgd", "adam", "adamw"]
    lr: float
    lr_schedule: typing.Literal["constant", "cosine"]
    warmup: int
    min_lr: float
    momentum: float
    nesterov: bool
    betas: Text
    weight_decay: float
    decay: typing.Literal["all", "matrices"]
    group: Texts
    clip: float
    dropout: float
    label_smoothing: float
    z_loss: float
    inject: Text
    gradcheck: bool
    skip_f64: bool
    strict_predictions: bool
    memory: bool
    list_tensors: bool
    dump: Path
    transport: typing.Literal["sim", "mpi", "nccl"]
    share_gpus: bool
    open_store: bool
    trace: Path
    timeline: Path
    cluster: Text
    schedule: Text
    net_fault: Text
    verify_transfers: bool
    threads: int
    seed: int


OPTIONS["check"] = {
    "scale": Option('Part',
        "shrink the model: about 1/N of each size, split by the same rules, with fresh weights"),
    "plan": Option('Path',
        "which module is split how: rules as JSON, or a tp_plan of Hugging Face (default: as Megatron-LM)"),
    "tp": Option('int',
        "tensor-parallel ranks (no layout given: a set of those that the model allows)"),
    "mlp_order": Option('typing.Literal["column-row", "row-column"]',
        "how the MLP's two layers are split (default column-row)"),
    "collectives": Option('typing.Literal["direct", "ring"]',
        "how the simulated cluster moves data; the bits are the same (default direct)"),
    "timeout": Option('float',
        "longest wait of a rank for another, in seconds (default 60)"),
    "numerics": Option('typing.Literal["exact", "native"]',
        "exact: the same bits; native: fp32, within an allowance (default exact)"),
    "device": Option('Text',
        "what the ranks compute on: cpu, cuda (cuda:N: GPU N, which they share) or emulated, the CUDA "
        "device's kernels on the host (default cpu)"),
    "precision": Option('typing.Literal["f32", "tf32", "bf16"]',
        "with --numerics native: f32; tf32: of products; bf16: of activations and matrices, in memory and "
        "between ranks (default f32)"),
    "sp": Option('bool',
        "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"),
    "keep_gathered": Option('bool',
        "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"),
    "overlap": Option('int',
        "with --sp: gathers and reduce-scatters in K chunks of tokens, each beside the product of another "
        "(default 1: one after the other)"),
    "recompute": Option('typing.Literal["none", "selective", "full"]',
        "what of a block's forward pass the backward pass computes again in place of keeping it: none, "
        "selective (the attention) or full (default none)"),
    "recompute_every": Option('int',
        "with --recompute: of every N blocks the first is computed again (default 1: each)"),
    "dp": Option('int',
        "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences"),
    "cp": Option('int',
        "context-parallel ranks, or groups of --tp ranks: each holds some positions of every sequence"),
    "cp_inner": Option('int',
        "so many neighbours of --cp exchange heads for positions instead, so that the ring has N/U places "
        "(default 1: the ring alone; N: the all-to-all alone)"),
    "zigzag": Option('bool',
        "each of the R places of the ring of --cp takes the chunks r and 2R-1-r of 2R of a sequence, so that "
        "causal attention gives all as much to do"),
    "micro_batches": Option('int',
        "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"),
    "forward_first": Option('bool',
        "all micro-batches go forward before the first goes backward"),
    "pp": Option('int',
        "pipeline ranks, or groups of the others: each holds some of the layers, the first also the "
        "embedding, the last the head"),
    "schedule_pp": Option('Path',
        "with --pp: in which order its ranks go through the micro-batches: 1f1b, gpipe, interleaved, "
        "zero-bubble, or a file of torch.distributed.pipelining with a line for each rank, as "
        "0F0,0F1,0B0,0B1 (default 1f1b)"),
    "virtual_stages": Option('int',
        "with --schedule-pp interleaved: parts of the layers that each rank of --pp holds and that take "
        "turns (default 2)"),
    "stages": Option('Counts',
        "with --pp: layers of each stage, as 3,5,4 (default: evenly, and where that cannot be, one more in "
        "the middle)"),
    "zero": Option('int',
        "1: each rank of --dp and --cp keeps its share of the optimizer's state and updates its share of the "
        "weights (ZeRO-1); 2: it also keeps its share alone of the gradients; 3: and of the weights, "
        "gathered block by block (FSDP); 0: each does all (default 0)"),
    "dp_replicate": Option('int',
        "with --zero: the ranks of --dp are R groups, each of which shares out what --zero does not keep "
        "whole (hybrid sharding; default 1)"),
    "bucket_bytes": Option('Bytes',
        "capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default: an eighth of the "
        "model's gradients, so that there are several, and at most 25MiB)"),
    "bucket_mode": Option('typing.Literal["overlap", "eager"]',
        "overlap: each bucket is reduced while the backward pass goes on; eager: all after it (default "
        "overlap)"),
    "bucket_order": Option('typing.Literal["reverse", "largest-first"]',
        "in which order parameters are put into buckets: reverse (the last one registered first, whose "
        "gradient is ready first) or largest-first (default reverse)"),
    "find_unused": Option('bool',
        "the ranks of --dp agree which parameters got a gradient; the others are left alone"),
    "sweep": Option('Optional',
        "every legal layout of up to W ranks (W: 8 unless given)"),
    "batch": Option('int',
        "sequences of a step, all ranks together (default 8)"),
    "seq": Option('int',
        "tokens of each (default 64, or the next number that fits the layouts; fewer if the model holds "
        "fewer)"),
    "text": Option('Path',
        "any file, one byte one token (default: the project's own text)"),
    "documents": Option('int',
        "cut every sequence at random into up to N packed documents (default 1: none)"),
    "steps": Option('int',
        "training steps; 0: one forward and backward, no update (default 3)"),
    "optimizer": Option('typing.Literal["sgd", "adam", "adamw"]',
        "what updates the weights (default adamw)"),
    "lr": Option('float',
        "learning rate (default 0.001)"),
    "lr_schedule": Option('typing.Literal["constant", "cosine"]',
        "how the learning rate goes on after the warm-up; cosine: down to --min-lr in the last step (default "
        "constant)"),
    "warmup": Option('int',
        "steps in which the learning rate rises linearly to --lr (default 0)"),
    "min_lr": Option('float',
        "learning rate at the end of a cosine (default 0)"),
    "momentum": Option('float',
        "of sgd, below 1 (default 0)"),
    "nesterov": Option('bool',
        "of sgd with --momentum: Nesterov's variant"),
    "betas": Option('Text',
        "of adam and adamw (default 0.9,0.999)"),
    "weight_decay": Option('float',
        "added to the gradient by sgd and adam, decoupled in adamw (default 0; adamw 0.01)"),
    "decay": Option('typing.Literal["all", "matrices"]',
        "which parameters decay: all, or matrices only, not norms and biases (default all)"),
    "group": Option('Texts',
        "parameters whose names match the glob learn at X times the rate and decay by Y; the last group that "
        "matches counts (up to 8 of them)"),
    "clip": Option('float',
        "largest norm of all gradients together; 0: no clipping (default 1)"),
    "dropout": Option('float',
        "probability, below 1 (default 0, whatever the config says)"),
    "label_smoothing": Option('float',
        "share of each label that goes to all tokens of the vocabulary alike, below 1 (default 0)"),
    "z_loss": Option('float',
        "add C times the squared logarithm of the softmax's denominator to the loss of each token (default 0)"),
    "inject": Option('Text',
        "switch a known mistake on ('anyrank bugs' lists them)"),
    "gradcheck": Option('bool',
        "compare the binary64 baseline's gradients with central differences, on a small batch"),
    "skip_f64": Option('bool',
        "do not run the binary64 baseline, which only measures the exact one's error"),
    "strict_predictions": Option('bool',
        "fail where other bytes move, or are held, than model and layout predict, or in other shapes"),
    "memory": Option('bool',
        "print the memory of a rank in every layout too, and whether the shapes of its parts are the layout's"),
    "list_tensors": Option('bool',
        "print the tensors that are compared, in the order of execution, and compare nothing"),
    "dump": Option('Path',
        "write the baseline's tensors to DIR/reference.safetensors and each layout's ranks to a folder of "
        "its own, for 'anyrank verify'"),
    "transport": Option('typing.Literal["sim", "mpi", "nccl"]',
        "sim: ranks are threads of this process; mpi, nccl: each process that mpirun, srun or torchrun "
        "starts is a rank (default sim)"),
    "share_gpus": Option('bool',
        "with --transport nccl: several processes may use one GPU (slow; for tests)"),
    "open_store": Option('bool',
        "with --transport nccl: let processes of other machines join without a job key"),
    "trace": Option('Path',
        "record the run for Perfetto (ui.perfetto.dev); one run only"),
    "timeline": Option('Path',
        "the same as a page of its own, for any browser, without a network"),
    "cluster": Option('Text',
        "tell what the run would take on that cluster, and record by its clock: h100, b200, or words as '8x "
        "inside=2us:300GB/s between=5us:25GB/s flops=400T'"),
    "schedule": Option('Text',
        "let a seed decide which rank goes on wherever one could wait; FIRST..LAST: each of these seeds, "
        "until one run is not the same"),
    "net_fault": Option('Text',
        "let the transport do wrong once, as in 'corrupt rank 1 collective 14 transfer 0 bit 77' or 'kill "
        "rank 0 collective 3'; seed:N draws one; one run only"),
    "verify_transfers": Option('bool',
        "compare number, length and checksum of every transfer: what the transport does wrong is an error "
        "there"),
    "threads": Option('int',
        "threads of the whole process (default: the number of cores)"),
    "seed": Option('int',
        "seed of everything random (default 0)"),
}


class GradsOptions(typing.TypedDict, total=False):
    input: Path
    block: Path
    out: Path
    scale: Part
    plan: Path
    tp: int
    mlp_order: typing.Literal["column-row", "row-column"]
    collectives: typing.Literal["direct", "ring"]
    timeout: float
    numerics: typing.Literal["exact", "native"]
    device: Text
    precision: typing.Literal["f32", "tf32", "bf16"]
    sp: bool
    keep_gathered: bool
    overlap: int
    recompute: typing.Literal["none", "selective", "full"]
    recompute_every: int
    dp: int
    cp: int
    cp_inner: int
    zigzag: bool
    micro_batches: int
    forward_first: bool
    pp: int
    schedule_pp: Path
    virtual_stages: int
    stages: Counts
    zero: int
    dp_replicate: int
    bucket_bytes: Bytes
    bucket_mode: typing.Literal["overlap", "eager"]
    bucket_order: typing.Literal["reverse", "largest-first"]
    find_unused: bool
    label_smoothing: float
    z_loss: float
    inject: Text
    trace: Path
    timeline: Path
    cluster: Text
    per_rank: bool
    activations: bool
    sensitivity: bool
    sensitivity_of: typing.Literal["f32", "tf32", "bf16", "bf16-pure", "f16", "f16-pure"]
    threads: int
    seed: int


OPTIONS["grads"] = {
    "input": Option('Path',
        "input_ids [b, s]; optional attention_mask ([b, s] of 0/1, or additive [b|1, heads|1, s, s]), labels"),
    "block": Option('Path',
        "a single block in place of a model: case.json and inputs.safetensors"),
    "out": Option('Path',
        "where outputs.safetensors and grads.safetensors (or block.safetensors) go"),
    "scale": Option('Part',
        "shrink the model: about 1/N of each size, split by the same rules, with fresh weights"),
    "plan": Option('Path',
        "which module is split how: rules as JSON, or a tp_plan of Hugging Face (default: as Megatron-LM)"),
    "tp": Option('int',
        "tensor-parallel ranks (default 1)"),
    "mlp_order": Option('typing.Literal["column-row", "row-column"]',
        "how the MLP's two layers are split (default column-row)"),
    "collectives": Option('typing.Literal["direct", "ring"]',
        "how the simulated cluster moves data; the bits are the same (default direct)"),
    "timeout": Option('float',
        "longest wait of a rank for another, in seconds (default 60)"),
    "numerics": Option('typing.Literal["exact", "native"]',
        "exact: the same bits in every layout; native: fp32 (default exact)"),
    "device": Option('Text',
        "what the ranks compute on: cpu, cuda (cuda:N: GPU N, which they share) or emulated, the CUDA "
        "device's kernels on the host (default cpu)"),
    "precision": Option('typing.Literal["f32", "tf32", "bf16"]',
        "with --numerics native: f32; tf32: of products; bf16: of activations and matrices, in memory and "
        "between ranks (default f32)"),
    "sp": Option('bool',
        "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"),
    "keep_gathered": Option('bool',
        "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"),
    "overlap": Option('int',
        "with --sp: gathers and reduce-scatters in K chunks of tokens, each beside the product of another "
        "(default 1: one after the other)"),
    "recompute": Option('typing.Literal["none", "selective", "full"]',
        "what of a block's forward pass the backward pass computes again in place of keeping it: none, "
        "selective (the attention) or full (default none)"),
    "recompute_every": Option('int',
        "with --recompute: of every N blocks the first is computed again (default 1: each)"),
    "dp": Option('int',
        "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences"),
    "cp": Option('int',
        "context-parallel ranks, or groups of --tp ranks: each holds some positions of every sequence"),
    "cp_inner": Option('int',
        "so many neighbours of --cp exchange heads for positions instead, so that the ring has N/U places "
        "(default 1: the ring alone; N: the all-to-all alone)"),
    "zigzag": Option('bool',
        "each of the R places of the ring of --cp takes the chunks r and 2R-1-r of 2R of a sequence, so that "
        "causal attention gives all as much to do"),
    "micro_batches": Option('int',
        "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"),
    "forward_first": Option('bool',
        "all micro-batches go forward before the first goes backward"),
    "pp": Option('int',
        "pipeline ranks, or groups of the others: each holds some of the layers, the first also the "
        "embedding, the last the head"),
    "schedule_pp": Option('Path',
        "with --pp: in which order its ranks go through the micro-batches: 1f1b, gpipe, interleaved, "
        "zero-bubble, or a file of torch.distributed.pipelining with a line for each rank, as "
        "0F0,0F1,0B0,0B1 (default 1f1b)"),
    "virtual_stages": Option('int',
        "with --schedule-pp interleaved: parts of the layers that each rank of --pp holds and that take "
        "turns (default 2)"),
    "stages": Option('Counts',
        "with --pp: layers of each stage, as 3,5,4 (default: evenly, and where that cannot be, one more in "
        "the middle)"),
    "zero": Option('int',
        "1: each rank of --dp and --cp keeps its share of the optimizer's state and updates its share of the "
        "weights (ZeRO-1); 2: it also keeps its share alone of the gradients; 3: and of the weights, "
        "gathered block by block (FSDP); 0: each does all (default 0)"),
    "dp_replicate": Option('int',
        "with --zero: the ranks of --dp are R groups, each of which shares out what --zero does not keep "
        "whole (hybrid sharding; default 1)"),
    "bucket_bytes": Option('Bytes',
        "capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default: 25MiB)"),
    "bucket_mode": Option('typing.Literal["overlap", "eager"]',
        "overlap: each bucket is reduced while the backward pass goes on; eager: all after it (default "
        "overlap)"),
    "bucket_order": Option('typing.Literal["reverse", "largest-first"]',
        "in which order parameters are put into buckets: reverse (the last one registered first, whose "
        "gradient is ready first) or largest-first (default reverse)"),
    "find_unused": Option('bool',
        "the ranks of --dp agree which parameters got a gradient; the others are left alone"),
    "label_smoothing": Option('float',
        "share of each label that goes to all tokens of the vocabulary alike, below 1 (default 0)"),
    "z_loss": Option('float',
        "add C times the squared logarithm of the softmax's denominator to the loss of each token (default 0)"),
    "inject": Option('Text',
        "switch a known mistake on ('anyrank bugs' lists them)"),
    "trace": Option('Path',
        "record the run for Perfetto (ui.perfetto.dev); one run only"),
    "timeline": Option('Path',
        "the same as a page of its own, for any browser, without a network"),
    "cluster": Option('Text',
        "tell what the run would take on that cluster, and record by its clock: h100, b200, or words as '8x "
        "inside=2us:300GB/s between=5us:25GB/s flops=400T'"),
    "per_rank": Option('bool',
        "write what each rank holds to DIR/ranks too: weights, gradients and outputs, with their places"),
    "activations": Option('bool',
        "write every tensor of the two passes to activations.safetensors too, and to the ranks' files"),
    "sensitivity": Option('bool',
        "write allowed.safetensors too: what rounding alone may change in each tensor"),
    "sensitivity_of": Option('typing.Literal["f32", "tf32", "bf16", "bf16-pure", "f16", "f16-pure"]',
        "with --sensitivity, in which arithmetic: f32, tf32, bf16 (mixed precision), bf16-pure (all of it "
        "stored in bf16), f16, f16-pure (default: that of --precision)"),
    "threads": Option('int',
        "threads of the whole process (default: the number of cores)"),
    "seed": Option('int',
        "seed of everything random (default 0)"),
}


class TrainOptions(typing.TypedDict, total=False):
    data: Path
    data_format: typing.Literal["auto", "bytes", "u16", "u32", "safetensors", "jsonl"]
    in_order: bool
    pack: bool
    separator: int
    steps: int
    batch: int
    seq: int
    optimizer: typing.Literal["sgd", "adam", "adamw"]
    lr: float
    lr_schedule: typing.Literal["constant", "cosine"]
    warmup: int
    min_lr: float
    momentum: float
    nesterov: bool
    betas: Text
    weight_decay: float
    decay: typing.Literal["all", "matrices"]
    group: Texts
    clip: float
    dropout: float
    label_smoothing: float
    z_loss: float
    scale: Part
    plan: Path
    tp: int
    mlp_order: typing.Literal["column-row", "row-column"]
    collectives: typing.Literal["direct", "ring"]
    timeout: float
    numerics: typing.Literal["exact", "native"]
    device: Text
    precision: typing.Literal["f32", "tf32", "bf16"]
    storage: typing.Literal["f32", "bf16"]
    loss_scale: Text
    sp: bool
    keep_gathered: bool
    overlap: int
    recompute: typing.Literal["none", "selective", "full"]
    recompute_every: int
    dp: int
    cp: int
    cp_inner: int
    zigzag: bool
    micro_batches: int
    forward_first: bool
    pp: int
    schedule_pp: Path
    virtual_stages: int
    stages: Counts
    zero: int
    dp_replicate: int
    bucket_bytes: Bytes
    bucket_mode: typing.Literal["overlap", "eager"]
    bucket_order: typing.Literal["reverse", "largest-first"]
    find_unused: bool
    save: Path
    save_every: int
    keep: int
    resume: Path
    stop_after: int
    verify_every: int
    plot: Path
    log_every: int
    inject: Text
    transport: typing.Literal["sim", "mpi", "nccl"]
    share_gpus: bool
    open_store: bool
    trace: Path
    timeline: Path
    cluster: Text
    threads: int
    seed: int


OPTIONS["train"] = {
    "data": Option('Path',
        "what to train on: any file, one byte one token, or a token file (default: the project's own text)"),
    "data_format": Option('typing.Literal["auto", "bytes", "u16", "u32", "safetensors", "jsonl"]',
        "of --data; auto: by its name (.u16, .u32, .safetensors, .jsonl; else bytes)"),
    "in_order": Option('bool',
        "take the data's windows as they come, in place of shuffling them anew in every epoch"),
    "pack": Option('bool',
        "the data is documents, one after another: attention, positions and predictions keep to each"),
    "separator": Option('int',
        "with --pack: the token that ends a document, its last one; of text 10 is the end of a line, 0 the "
        "byte 0"),
    "steps": Option('int',
        "training steps since the start of the run, also with --resume (default 100)"),
    "batch": Option('int',
        "sequences of a step, all ranks together (default 8)"),
    "seq": Option('int',
        "tokens of each (default 64)"),
    "optimizer": Option('typing.Literal["sgd", "adam", "adamw"]',
        "what updates the weights (default adamw)"),
    "lr": Option('float',
        "learning rate (default 0.001)"),
    "lr_schedule": Option('typing.Literal["constant", "cosine"]',
        "how the learning rate goes on after the warm-up; cosine: down to --min-lr in the last step (default "
        "constant)"),
    "warmup": Option('int',
        "steps in which the learning rate rises linearly to --lr (default 0)"),
    "min_lr": Option('float',
        "learning rate at the end of a cosine (default 0)"),
    "momentum": Option('float',
        "of sgd, below 1 (default 0)"),
    "nesterov": Option('bool',
        "of sgd with --momentum: Nesterov's variant"),
    "betas": Option('Text',
        "of adam and adamw (default 0.9,0.999)"),
    "weight_decay": Option('float',
        "added to the gradient by sgd and adam, decoupled in adamw (default 0; adamw 0.01)"),
    "decay": Option('typing.Literal["all", "matrices"]',
        "which parameters decay: all, or matrices only, not norms and biases (default all)"),
    "group": Option('Texts',
        "parameters whose names match the glob learn at X times the rate and decay by Y; the last group that "
        "matches counts (up to 8 of them)"),
    "clip": Option('float',
        "largest norm of all gradients together; 0: no clipping (default 1)"),
    "dropout": Option('float',
        "probability, below 1 (default 0, whatever the config says)"),
    "label_smoothing": Option('float',
        "share of each label that goes to all tokens of the vocabulary alike, below 1 (default 0)"),
    "z_loss": Option('float',
        "add C times the squared logarithm of the softmax's denominator to the loss of each token (default 0)"),
    "scale": Option('Part',
        "shrink the model: about 1/N of each size, split by the same rules, with fresh weights"),
    "plan": Option('Path',
        "which module is split how: rules as JSON, or a tp_plan of Hugging Face (default: as Megatron-LM)"),
    "tp": Option('int',
        "tensor-parallel ranks (default 1)"),
    "mlp_order": Option('typing.Literal["column-row", "row-column"]',
        "how the MLP's two layers are split (default column-row)"),
    "collectives": Option('typing.Literal["direct", "ring"]',
        "how the simulated cluster moves data; the bits are the same (default direct)"),
    "timeout": Option('float',
        "longest wait of a rank for another, in seconds (default 60)"),
    "numerics": Option('typing.Literal["exact", "native"]',
        "exact: the same bits under every layout; native: fp32 (default exact)"),
    "device": Option('Text',
        "what the ranks compute on: cpu, cuda (cuda:N: GPU N, which they share) or emulated, the CUDA "
        "device's kernels on the host (default cpu)"),
    "precision": Option('typing.Literal["f32", "tf32", "bf16"]',
        "with --numerics native: f32; tf32: of products; bf16: of activations and matrices, in memory and "
        "between ranks (default f32)"),
    "storage": Option('typing.Literal["f32", "bf16"]',
        "with --numerics native: of the matrices and their gradients alone; bf16: the optimizer keeps fp32 "
        "ones (default: bf16 with --precision bf16, else f32)"),
    "loss_scale": Option('Text',
        "with --numerics native: gradients are taken of S times the loss; dynamic: S begins at 65536 and "
        "falls where they overflow; none: of the loss (default none)"),
    "sp": Option('bool',
        "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"),
    "keep_gathered": Option('bool',
        "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"),
    "overlap": Option('int',
        "with --sp: gathers and reduce-scatters in K chunks of tokens, each beside the product of another "
        "(default 1: one after the other)"),
    "recompute": Option('typing.Literal["none", "selective", "full"]',
        "what of a block's forward pass the backward pass computes again in place of keeping it: none, "
        "selective (the attention) or full (default none)"),
    "recompute_every": Option('int',
        "with --recompute: of every N blocks the first is computed again (default 1: each)"),
    "dp": Option('int',
        "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences"),
    "cp": Option('int',
        "context-parallel ranks, or groups of --tp ranks: each holds some positions of every sequence"),
    "cp_inner": Option('int',
        "so many neighbours of --cp exchange heads for positions instead, so that the ring has N/U places "
        "(default 1: the ring alone; N: the all-to-all alone)"),
    "zigzag": Option('bool',
        "each of the R places of the ring of --cp takes the chunks r and 2R-1-r of 2R of a sequence, so that "
        "causal attention gives all as much to do"),
    "micro_batches": Option('int',
        "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"),
    "forward_first": Option('bool',
        "all micro-batches go forward before the first goes backward"),
    "pp": Option('int',
        "pipeline ranks, or groups of the others: each holds some of the layers, the first also the "
        "embedding, the last the head"),
    "schedule_pp": Option('Path',
        "with --pp: in which order its ranks go through the micro-batches: 1f1b, gpipe, interleaved, "
        "zero-bubble, or a file of torch.distributed.pipelining with a line for each rank, as "
        "0F0,0F1,0B0,0B1 (default 1f1b)"),
    "virtual_stages": Option('int',
        "with --schedule-pp interleaved: parts of the layers that each rank of --pp holds and that take "
        "turns (default 2)"),
    "stages": Option('Counts',
        "with --pp: layers of each stage, as 3,5,4 (default: evenly, and where that cannot be, one more in "
        "the middle)"),
    "zero": Option('int',
        "1: each rank of --dp and --cp keeps its share of the optimizer's state and updates its share of the "
        "weights (ZeRO-1); 2: it also keeps its share alone of the gradients; 3: and of the weights, "
        "gathered block by block (FSDP); 0: each does all (default 0)"),
    "dp_replicate": Option('int',
        "with --zero: the ranks of --dp are R groups, each of which shares out what --zero does not keep "
        "whole (hybrid sharding; default 1)"),
    "bucket_bytes": Option('Bytes',
        "gradients are summed over --dp in buckets of so many bytes of fp32, as 4096, 25MiB (default 25MiB)"),
    "bucket_mode": Option('typing.Literal["overlap", "eager"]',
        "overlap: each bucket is reduced while the backward pass goes on; eager: all after it (default "
        "overlap)"),
    "bucket_order": Option('typing.Literal["reverse", "largest-first"]',
        "in which order parameters are put into buckets: reverse (the last one registered first, whose "
        "gradient is ready first) or largest-first (default reverse)"),
    "find_unused": Option('bool',
        "the ranks of --dp agree which parameters got a gradient; the others are left alone"),
    "save": Option('Path',
        "write a checkpoint there at the end, and where the run is interrupted"),
    "save_every": Option('int',
        "with --save: one every K steps, too"),
    "keep": Option('int',
        "with --save: only the newest N checkpoints stay (default: all)"),
    "resume": Option('Path',
        "go on with a checkpoint, under any layout: data, steps, optimizer and the like are the checkpoint's "
        "where they are not given"),
    "stop_after": Option('int',
        "end after step N, as an interruption would, but with exit status 0"),
    "verify_every": Option('int',
        "verify in every K-th step, before the update, that all gradients are there and finite, and that "
        "ranks which hold copies of weights, gradients and optimizer state hold the same (default: never)"),
    "plot": Option('Path',
        "draw the loss against the step"),
    "log_every": Option('int',
        "print every K-th step (default: at most 40 lines in all)"),
    "inject": Option('Text',
        "switch a known mistake on ('anyrank bugs' lists them)"),
    "transport": Option('typing.Literal["sim", "mpi", "nccl"]',
        "sim: ranks are threads of this process; mpi, nccl: each process that mpirun, srun or torchrun "
        "starts is a rank (default sim)"),
    "share_gpus": Option('bool',
        "with --transport nccl: several processes may use one GPU (slow; for tests)"),
    "open_store": Option('bool',
        "with --transport nccl: let processes of other machines join without a job key"),
    "trace": Option('Path',
        "record the run for Perfetto (ui.perfetto.dev); one run only"),
    "timeline": Option('Path',
        "the same as a page of its own, for any browser, without a network"),
    "cluster": Option('Text',
        "tell what the run would take on that cluster, and record by its clock: h100, b200, or words as '8x "
        "inside=2us:300GB/s between=5us:25GB/s flops=400T'"),
    "threads": Option('int',
        "threads of the whole process (default: the number of cores)"),
    "seed": Option('int',
        "seed of everything random (default 0)"),
}


class VerifyOptions(typing.TypedDict, total=False):
    bits: bool
    ulp: int
    rtol: float
    atol: float
    sensitivity: Path
    only: Texts
    ignore: Texts
    common: bool
    all_matched: bool
    no_equal_nan: bool
    html: Path
    max_report: int
    tp: int
    cp: int
    dp: int
    heads: int
    kv_heads: int
    threads: int
    seed: int


OPTIONS["verify"] = {
    "bits": Option('bool',
        "the same is what has the same bits (the default)"),
    "ulp": Option('int',
        "or what is at most N steps of the reference's dtype apart"),
    "rtol": Option('float',
        "or |other - reference| <= atol + rtol*|reference|"),
    "atol": Option('float',
        "the absolute part of it; one of the two that is not given is 0"),
    "sensitivity": Option('Path',
        "or what this file of grads --sensitivity allows each tensor"),
    "map": Option('Path',
        "how the files of OTHER make full tensors: shards, packing, transposition, names"),
    "reference_map": Option('Path',
        "the same for REFERENCE"),
    "only": Option('Texts',
        "only tensors of these names; may be given several times"),
    "ignore": Option('Texts',
        "no tensors of these names; may be given several times"),
    "common": Option('bool',
        "compare what both have; what only one has is left out and counted, not a difference"),
    "all_matched": Option('bool',
        "a tensor that only one has is an error, and so is a rule of --map that matches none"),
    "no_equal_nan": Option('bool',
        "NaN against NaN is a difference"),
    "html": Option('Path',
        "write the report as a page too, which needs no network"),
    "max_report": Option('int',
        "print at most N rows of a table (default 20)"),
    "tp": Option('int',
        "tensor-parallel ranks of OTHER's run, where its files do not tell: for the hints alone"),
    "cp": Option('int',
        "its context-parallel ranks, for the hints alone"),
    "dp": Option('int',
        "its data-parallel ranks, for the hints alone"),
    "heads": Option('int',
        "attention heads of the model, for the hints alone"),
    "kv_heads": Option('int',
        "key/value heads of the model, for the hints alone"),
    "threads": Option('int',
        "threads of the whole process (default: the number of cores)"),
    "seed": Option('int',
        "seed of everything random (default 0)"),
}


class PlanOptions(typing.TypedDict, total=False):
    gpus: int
    cluster: Text
    pp: int
    schedule_pp: Path
    virtual_stages: int
    stages: Counts
    no_flash: bool
    hierarchical: bool
    shared_links: bool
    table: typing.Literal["memory", "scaling", "decision"]
    all: bool
    top: int
    csv: Path
    html: Path
    svg: Path
    pipeline: bool
    flow: bool
    backward: bool
    each_layer: bool
    rank: int
    markdown: bool
    numerics: typing.Literal["exact", "native"]
    tp: int
    scale: Part
    plan: Path
    mlp_order: typing.Literal["column-row", "row-column"]
    sp: bool
    keep_gathered: bool
    overlap: int
    recompute: typing.Literal["none", "selective", "full"]
    recompute_every: int
    dp: int
    cp: int
    cp_inner: int
    zigzag: bool
    micro_batches: int
    forward_first: bool
    zero: int
    bucket_bytes: Bytes
    bucket_mode: typing.Literal["overlap", "eager"]
    bucket_order: typing.Literal["reverse", "largest-first"]
    find_unused: bool
    batch: int
    seq: int
    clip: float
    dropout: float
    label_smoothing: float
    z_loss: float
    dp_replicate: int
    threads: int
    seed: int


OPTIONS["plan"] = {
    "gpus": Option('int',
        "compare all layouts of so many GPUs; a given extent is fixed"),
    "cluster": Option('Text',
        "what they are and how they are joined: a machine's name, or words as '8x inside=2us:300GB/s "
        "between=5us:25GB/s flops=400T memory=80GB' (default h100)"),
    "pp": Option('int',
        "pipeline ranks, or groups of the others: each holds some of the layers, the first also the "
        "embedding, the last the head"),
    "schedule_pp": Option('Path',
        "with --pp: in which order its ranks go through the micro-batches: 1f1b, gpipe, interleaved, "
        "zero-bubble, or a file of torch.distributed.pipelining with a line for each rank, as "
        "0F0,0F1,0B0,0B1 (default 1f1b)"),
    "virtual_stages": Option('int',
        "with --schedule-pp interleaved: parts of the layers that each rank of --pp holds and that take "
        "turns (default 2)"),
    "stages": Option('Counts',
        "with --pp: layers of each stage, as 3,5,4 (default: evenly, and where that cannot be, one more in "
        "the middle)"),
    "no_flash": Option('bool',
        "attention that stores its scores (default: flash attention)"),
    "hierarchical": Option('bool',
        "collectives over nodes go inside them first, then between them (default: one ring)"),
    "shared_links": Option('bool',
        "collectives that are in flight at once on one kind of link share its rate (default: each has it)"),
    "table": Option('typing.Literal["memory", "scaling", "decision"]',
        "memory: of a rank by tp; scaling: time by tp; decision: the best layout by number of GPUs"),
    "all": Option('bool',
        "every layout, also those that cannot be, with the reason (default: the best of each tp x cp x pp x "
        "dp)"),
    "top": Option('int',
        "layouts that are listed; 0: all (default 10)"),
    "csv": Option('Path',
        "write the layouts as rows of numbers; with --pipeline the schedule, as --schedule-pp reads it"),
    "html": Option('Path',
        "write the layouts as a page to filter and sort, which needs no network"),
    "svg": Option('Path',
        "write memory and time of the layouts that are listed as a picture"),
    "pipeline": Option('bool',
        "the schedule of the ranks of --pp as a picture of text, what of the time they wait, and how many "
        "micro-batches they have in flight"),
    "flow": Option('bool',
        "the operations of one rank: shapes, placements, collectives with their bytes, multiply-adds"),
    "backward": Option('bool',
        "the whole step: backward pass, sums of gradients and update too (default: the forward pass)"),
    "each_layer": Option('bool',
        "a line for every layer (default: equal layers in one)"),
    "rank": Option('int',
        "whose: ranks are numbered over tp, then over cp, then over dp (default 0)"),
    "markdown": Option('bool',
        "the table as Markdown"),
    "numerics": Option('typing.Literal["exact", "native"]',
        "exact: sums of integers, with the exchanges of exponents that they need; native: fp32 (default "
        "exact)"),
    "tp": Option('int',
        "tensor-parallel ranks (default 1)"),
    "scale": Option('Part',
        "shrink the model: about 1/N of each size, split by the same rules, with fresh weights"),
    "plan": Option('Path',
        "which module is split how: rules as JSON, or a tp_plan of Hugging Face (default: as Megatron-LM)"),
    "mlp_order": Option('typing.Literal["column-row", "row-column"]',
        "how the MLP's two layers are split (default column-row)"),
    "sp": Option('bool',
        "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"),
    "keep_gathered": Option('bool',
        "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"),
    "overlap": Option('int',
        "with --sp: gathers and reduce-scatters in K chunks of tokens, each beside the product of another "
        "(default 1: one after the other)"),
    "recompute": Option('typing.Literal["none", "selective", "full"]',
        "what of a block's forward pass the backward pass computes again in place of keeping it: none, "
        "selective (the attention) or full (default none)"),
    "recompute_every": Option('int',
        "with --recompute: of every N blocks the first is computed again (default 1: each)"),
    "dp": Option('int',
        "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences"),
    "cp": Option('int',
        "context-parallel ranks, or groups of --tp ranks: each holds some positions of every sequence"),
    "cp_inner": Option('int',
        "so many neighbours of --cp exchange heads for positions instead, so that the ring has N/U places "
        "(default 1: the ring alone; N: the all-to-all alone)"),
    "zigzag": Option('bool',
        "each of the R places of the ring of --cp takes the chunks r and 2R-1-r of 2R of a sequence, so that "
        "causal attention gives all as much to do"),
    "micro_batches": Option('int',
        "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"),
    "forward_first": Option('bool',
        "all micro-batches go forward before the first goes backward"),
    "zero": Option('int',
        "ZeRO: 1 shares optimizer states over --dp, 2 gradients too, 3 weights too (default 0)"),
    "bucket_bytes": Option('Bytes',
        "capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default 25MiB)"),
    "bucket_mode": Option('typing.Literal["overlap", "eager"]',
        "overlap: each bucket is reduced while the backward pass goes on; eager: all after it (default "
        "overlap)"),
    "bucket_order": Option('typing.Literal["reverse", "largest-first"]',
        "in which order parameters are put into buckets: reverse (the last one registered first, whose "
        "gradient is ready first) or largest-first (default reverse)"),
    "find_unused": Option('bool',
        "the ranks of --dp agree which parameters got a gradient; the others are left alone"),
    "batch": Option('int',
        "sequences of a step, all ranks together (default 8)"),
    "seq": Option('int',
        "tokens of each sequence (default: the model's longest, at most 4096)"),
    "clip": Option('float',
        "largest norm of all gradients together; 0: no clipping (default 1)"),
    "dropout": Option('float',
        "probability, below 1 (default 0, whatever the config says)"),
    "label_smoothing": Option('float',
        "share of each label that goes to all tokens of the vocabulary alike, below 1 (default 0)"),
    "z_loss": Option('float',
        "add C times the squared logarithm of the softmax's denominator to the loss of each token (default 0)"),
    "dp_replicate": Option('int',
        "with --zero: the ranks of --dp are R groups, each of which shares out by itself (default 1; a "
        "search also tries groups within nodes)"),
    "threads": Option('int',
        "threads of the whole process (default: the number of cores)"),
    "seed": Option('int',
        "seed of everything random (default 0)"),
}


class LintOptions(typing.TypedDict, total=False):
    tp: int
    scale: Part
    plan: Path
    mlp_order: typing.Literal["column-row", "row-column"]
    sp: bool
    keep_gathered: bool
    overlap: int
    recompute: typing.Literal["none", "selective", "full"]
    recompute_every: int
    dp: int
    cp: int
    cp_inner: int
    zigzag: bool
    micro_batches: int
    forward_first: bool
    zero: int
    bucket_bytes: Bytes
    bucket_mode: typing.Literal["overlap", "eager"]
    bucket_order: typing.Literal["reverse", "largest-first"]
    find_unused: bool
    batch: int
    seq: int
    clip: float
    dropout: float
    label_smoothing: float
    z_loss: float
    pp: int
    schedule_pp: Path
    virtual_stages: int
    stages: Counts
    threads: int
    seed: int


OPTIONS["lint"] = {
    "tp": Option('int',
        "tensor-parallel ranks (default 1)"),
    "scale": Option('Part',
        "shrink the model: about 1/N of each size, split by the same rules, with fresh weights"),
    "plan": Option('Path',
        "which module is split how: rules as JSON, or a tp_plan of Hugging Face (default: as Megatron-LM)"),
    "mlp_order": Option('typing.Literal["column-row", "row-column"]',
        "how the MLP's two layers are split (default column-row)"),
    "sp": Option('bool',
        "sequence parallel beside --tp: each rank holds a part of every sequence between the regions"),
    "keep_gathered": Option('bool',
        "with --sp: keep gathered inputs for the backward pass, in place of gathering them again"),
    "overlap": Option('int',
        "with --sp: gathers and reduce-scatters in K chunks of tokens, each beside the product of another "
        "(default 1: one after the other)"),
    "recompute": Option('typing.Literal["none", "selective", "full"]',
        "what of a block's forward pass the backward pass computes again in place of keeping it: none, "
        "selective (the attention) or full (default none)"),
    "recompute_every": Option('int',
        "with --recompute: of every N blocks the first is computed again (default 1: each)"),
    "dp": Option('int',
        "data-parallel ranks, or groups of --tp ranks: each holds some of the sequences"),
    "cp": Option('int',
        "context-parallel ranks, or groups of --tp ranks: each holds some positions of every sequence"),
    "cp_inner": Option('int',
        "so many neighbours of --cp exchange heads for positions instead, so that the ring has N/U places "
        "(default 1: the ring alone; N: the all-to-all alone)"),
    "zigzag": Option('bool',
        "each of the R places of the ring of --cp takes the chunks r and 2R-1-r of 2R of a sequence, so that "
        "causal attention gives all as much to do"),
    "micro_batches": Option('int',
        "pieces in which a rank goes through its sequences; gradients are accumulated (default 1)"),
    "forward_first": Option('bool',
        "all micro-batches go forward before the first goes backward"),
    "zero": Option('int',
        "1: each rank of --dp keeps its share of the optimizer's state (ZeRO-1; default 0)"),
    "bucket_bytes": Option('Bytes',
        "capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default 25MiB)"),
    "bucket_mode": Option('typing.Literal["overlap", "eager"]',
        "overlap: each bucket is reduced while the backward pass goes on; eager: all after it (default "
        "overlap)"),
    "bucket_order": Option('typing.Literal["reverse", "largest-first"]',
        "in which order parameters are put into buckets: reverse (the last one registered first, whose "
        "gradient is ready first) or largest-first (default reverse)"),
    "find_unused": Option('bool',
        "the ranks of --dp agree which parameters got a gradient; the others are left alone"),
    "batch": Option('int',
        "sequences of a step, all ranks together (default 8)"),
    "seq": Option('int',
        "tokens of each sequence (default: the model's longest, at most 4096)"),
    "clip": Option('float',
        "largest norm of all gradients together; 0: no clipping (default 1)"),
    "dropout": Option('float',
        "probability, below 1 (default 0, whatever the config says)"),
    "label_smoothing": Option('float',
        "share of each label that goes to all tokens of the vocabulary alike, below 1 (default 0)"),
    "z_loss": Option('float',
        "add C times the squared logarithm of the softmax's denominator to the loss of each token (default 0)"),
    "pp": Option('int',
        "pipeline ranks, or groups of the others: each holds some of the layers, the first also the "
        "embedding, the last the head"),
    "schedule_pp": Option('Path',
        "with --pp: in which order its ranks go through the micro-batches: 1f1b, gpipe, interleaved, "
        "zero-bubble, or a file of torch.distributed.pipelining with a line for each rank, as "
        "0F0,0F1,0B0,0B1 (default 1f1b)"),
    "virtual_stages": Option('int',
        "with --schedule-pp interleaved: parts of the layers that each rank of --pp holds and that take "
        "turns (default 2)"),
    "stages": Option('Counts',
        "with --pp: layers of each stage, as 3,5,4 (default: evenly, and where that cannot be, one more in "
        "the middle)"),
    "threads": Option('int',
        "threads of the whole process (default: the number of cores)"),
    "seed": Option('int',
        "seed of everything random (default 0)"),
}
