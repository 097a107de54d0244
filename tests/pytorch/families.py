# SPDX-License-Identifier: Apache-2.0
"""Hugging Face families with other names and parts than Llama's and GPT-2's, as people train them: right, or with one bug.

A bug (mistakes.py) is a function that changes a Run at one moment of the step; its rows say where it runs and which
causes are right.
"""

import contextlib
import operator

import anyrank
import torch
import torch.distributed as dist
from torch import nn

BATCH, SEQ = 4, 22
SIZE = dict(vocab_size=152, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=48)
GROUPED = dict(SIZE, intermediate_size=112, num_key_value_heads=2)
CONFIGS = {  # model: class and configuration
    "llama-hf": ("Llama", dict(GROUPED)),
    "qwen3": ("Qwen3", dict(GROUPED, head_dim=16)),
    "gemma2": ("Gemma2", dict(GROUPED, head_dim=16, sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
                              final_logit_softcapping=4.0)),
    "neox": ("GPTNeoX", dict(SIZE, intermediate_size=112, rotary_pct=0.5, hidden_dropout=0, attention_dropout=0)),
    "opt": ("OPT", dict(SIZE, ffn_dim=112, word_embed_proj_dim=48, dropout=0)),
    "phi": ("Phi", dict(SIZE, intermediate_size=112, num_key_value_heads=6)),
    "falcon": ("Falcon", dict(SIZE, multi_query=True, new_decoder_architecture=False, alibi=False)),
    "starcoder2": ("Starcoder2", dict(GROUPED, sliding_window=None, residual_dropout=0, embedding_dropout=0,
                                      tie_word_embeddings=False)),
    "phi3": ("Phi3", dict(GROUPED, pad_token_id=0)),
    "olmo2": ("Olmo2", dict(GROUPED)),
}
BUGS = {}  # name: (function, moment)
ROWS = []  # bug, model, way, ranks, dtype, options, causes


def bug(moment, *rows, **given):
    """rows: "model way ranks [bf16]", causes (partly right ones after "|"), and options of the run. given: the function by
    name, or it is what follows."""
    def register(function, key=None):
        key = key or function.__name__
        BUGS[key] = (function, moment)
        for where, causes, *options in rows:
            model, way, n, *dtype = where.split()
            ROWS.append((key, model, way, int(n), (dtype or ["fp32"])[0], options[0] if options else {}, causes))
        return function
    for name, function in given.items():
        register(function, name)
    return register


def changed(of, attribute, made):
    """Gives an attribute of each object of(run) the value that made(run, object) is."""
    def change(r):
        for one in of(r):
            setattr(one, attribute, made(r, one))
    return change


def rewritten(parts, made):
    """Gives the parameters with one of `parts`, between spaces, in their name the values made(them)."""
    def change(r):
        with torch.no_grad():
            for p in r.parameters(*(parts.split() or [""])):
                p.copy_(made(p).clone())
    return change


def exchanged(pairs):
    """Exchanges the values of the two parameters of each pair."""
    def change(r):
        with torch.no_grad():
            for a, b in pairs(r):
                old = a.clone()
                a.copy_(b)
                b.copy_(old)
    return change


def itself(r):
    return [r]


def of_layers(path):
    return lambda r: [operator.attrgetter(path)(layer) for layer in r.layers()]


def make(name, folder):
    import transformers
    torch.manual_seed(4)
    family, config = CONFIGS[name]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config))
    with torch.no_grad():
        for n, p in model.named_parameters():
            gain = ("norm" in n or "ln_f" in n) and n.endswith("weight") and name != "gemma2"
            p.copy_(torch.randn_like(p) * 0.09 + (1 if gain else 0))
    model.save_pretrained(folder)


def batch():
    """Ids, and labels of which two samples ignore a prompt."""
    draw = torch.Generator().manual_seed(13)
    ids = torch.randint(3, 150, (BATCH, SEQ), generator=draw)
    labels = ids.clone()
    labels[1, :7], labels[2, :12] = -100, -100
    return ids, labels


class Run:
    """One or more training steps on one rank."""

    def __init__(self, name, source, folder, rank=0, dp=1, tp=1, way=None, fault=None, dtype="fp32", micro=1, update=False,
                 steps=1, even=False):
        self.name, self.source, self.folder, self.rank, self.dp, self.tp, self.way = name, source, folder, rank, dp, tp, way
        self.fault, self.dtype, self.micro, self.update, self.steps, self.even = fault, dtype, micro, update, steps, even
        self.dp_rank, self.norm = rank // tp, None
        self.plan, self.adam = {}, dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.3)
        self.ddp, self.fsdp = {}, {}  # further arguments of the wrappers

    def moment(self, name, *args):
        function, when = BUGS.get(self.fault, (None, None))
        return function(self, *args) if when == name else None

    def layers(self):
        inner = next(m for m in self.model.children() if not isinstance(m, (nn.Linear, nn.Embedding)))
        inner = getattr(inner, "decoder", inner)
        return getattr(inner, "layers", None) or inner.h

    def parameters(self, *parts):
        """The parameters with one of `parts` in their name."""
        return [p for n, p in self.model.named_parameters() if any(part in n for part in parts)]

    def batch(self):
        return batch()

    def wrap(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        self.mesh = init_device_mesh("cpu", (self.dp, self.tp), mesh_dim_names=("dp", "tp")) if self.dp * self.tp > 1 else None
        self.wrapped = self.model
        if self.tp > 1:
            tensor_parallel(self)
        if self.way == "ddp":
            self.wrapped = nn.parallel.DistributedDataParallel(self.model, **self.ddp)
        if self.way == "fsdp2":
            ignored = self.moment("ignored") or set()
            if self.dtype == "bf16-fsdp":
                self.fsdp = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
            for layer in self.layers():
                of_layer = {p for p in ignored if p in set(layer.parameters())}
                fully_shard(layer, mesh=self.mesh["dp"], ignored_params=of_layer, **self.fsdp)
            fully_shard(self.model, mesh=self.mesh["dp"], ignored_params=ignored, **self.fsdp)
        self.called = self.wrapped

    def go(self):
        import transformers
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.source, attn_implementation="eager",
            dtype=torch.bfloat16 if self.dtype == "bf16-pure" else torch.float32).train()
        self.moment("model")
        self.wrap()
        self.moment("wrapped")
        # What plain modules compute of a rank's own heads: attention's probabilities, the norms of q and k.
        heads = {"*.self_attn.1:fwd": {"dp": 0, "tp": 1}, "*.[qk]_norm:*wd": {"dp": 0, "tp": 2}} if self.tp > 1 else None
        if self.name == "phi3":
            heads = None
        self.make_optimizer()
        spec = {"mesh": {"dp": self.dp, "tp": self.tp}, "mean_over": "dp", "shard": heads, "samples": "by_rank"}
        with anyrank.capture(self.wrapped, self.folder, self.optimizer, spec=spec) as c:
            for self.step in range(self.steps):
                self.train(c)

    def train(self, c):
        self.gradients()
        if self.update:
            c.gradients()
            self.clip()
            c.gradient_norm(self.norm)
            self.moment("update")
            self.optimizer.step()
            self.moment("updated")
            self.optimizer.zero_grad()

    def gradients(self):
        ids, labels = self.batch()
        if self.even:
            labels = ids.clone()
        self.targets = int((labels[:, 1:] != -100).sum()) / self.dp
        parts = self.moment("samples", ids, labels) or (ids.chunk(self.dp)[self.dp_rank], labels.chunk(self.dp)[self.dp_rank])
        for m, (i, l) in enumerate(zip(*(t.chunk(self.micro) for t in parts))):
            self.m, self.ids, self.labels, self.inputs = m, i, l, {}
            self.silent = self.way == "ddp" and m + 1 < self.micro
            if self.way == "fsdp2":
                self.wrapped.set_requires_gradient_sync(m + 1 == self.micro)
            self.moment("batch")
            with self.wrapped.no_sync() if self.silent else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
                    loss = self.called(input_ids=self.ids, labels=self.labels, use_cache=False, **{
                        "num_items_in_batch": torch.tensor(float(self.targets)), **self.inputs}).loss
                self.loss = loss
                self.moment("loss")
                self.loss.backward()
            self.moment("backward")
        if self.tp > 1 and self.fault != "head_norms_not_reduced":
            # The norms of q and k are whole on every rank and see its own heads alone.
            for p in self.parameters("q_norm", "k_norm"):
                dist.all_reduce(p.grad)
        self.moment("gradients")

    def make_optimizer(self):
        self.moment("optimizer")
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": self.adam.pop("decay_of_rest", 0.0)}]
        self.optimizer = torch.optim.AdamW(groups, **self.adam)

    def clip(self):
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        self.norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm
        self.moment("norm")
        factor = min(1.0, 0.4 / (float(self.norm) + 1e-6))
        for p in self.model.parameters():
            p.grad.mul_(factor)


def run(name, source, folder, rank=0, dp=1, tp=1, way=None, fault=None, dtype="fp32", **options):
    Run(name, source, folder, rank, dp, tp, way, fault, dtype, **options).go()


def tensor_parallel(r):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc", "query_key_value", "dense_h_to_4h",
               "gate_up_proj")
    rows = ("o_proj", "down_proj", "dense", "fc2", "c_proj", "dense_4h_to_h")
    for name, _ in r.model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in columns:
            r.plan[name] = ColwiseParallel()
        elif last in rows:
            r.plan[name] = RowwiseParallel()
    r.plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    r.moment("plan")
    parallelize_module(r.model, r.mesh["tp"], r.plan)


RIGHT = [

    ("qwen3", "ddp", 2, {}), ("qwen3", "tp", 2, {}), ("gemma2", "fsdp2", 2, {"update": True}), ("gemma2", "ddp", 2, {"micro": 2}),
    ("neox", "ddp", 2, {"update": True, "steps": 2}), ("neox", "fsdp2", 4, {}), ("opt", "ddp", 2, {"update": True}),
    ("opt", "fsdp2", 2, {}), ("phi", "tp", 2, {}), ("phi", "ddp", 4, {"even": True}), ("falcon", "ddp", 2, {}),
    ("falcon", "fsdp2", 2, {"micro": 2}), ("starcoder2", "tp", 2, {}), ("phi3", "fsdp2", 2, {"update": True}),
    ("olmo2", "ddp", 2, {"micro": 2, "update": True}),
    ("llama-hf", "ddp", 2, {"dtype": "bf16"}), ("llama-hf", "alone", 1, {"dtype": "bf16"}),
    ("llama-hf", "tp", 2, {}), ("llama-hf", "fsdp2", 4, {"update": True, "steps": 2}), ("llama-hf", "alone", 1, {"micro": 4}),
    ("qwen3", "fsdp2", 2, {"micro": 2, "update": True}), ("qwen3", "alone", 1, {}), ("qwen3", "ddp", 4, {"even": True}),
    ("gemma2", "alone", 1, {"update": True, "steps": 2}), ("neox", "alone", 1, {"micro": 2}),
    ("opt", "ddp", 4, {}), ("opt", "alone", 1, {"update": True}), ("phi", "fsdp2", 2, {"update": True}),
    ("falcon", "alone", 1, {"update": True, "steps": 2}), ("starcoder2", "ddp", 2, {"update": True, "micro": 2}),
    ("starcoder2", "fsdp2", 4, {}), ("phi3", "ddp", 2, {}), ("phi3", "alone", 1, {"micro": 2}), ("olmo2", "fsdp2", 2, {}),
    ("olmo2", "alone", 1, {"update": True}),
]
