# SPDX-License-Identifier: Apache-2.0
"""A few training steps of the models of strangers.py, and of Hugging Face's, as people write them: gradients that
accumulate, a schedule, a checkpoint in the middle, wrappers, optimizers whose state is cut. Right, or with one mistake.
"""

import contextlib
import functools
import operator

import anyrank
import torch
import torch.distributed as dist
import torch.nn.functional as F

from strangers import BATCH, C, MODELS, SEQ, Grid, placements, split_of

MISTAKES = {}  # name: [(moment, function)]; strangers_mistakes.py fills it
SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
             intermediate_size=48, bos_token_id=0, eos_token_id=0, pad_token_id=0)
HUGGING_FACE = {
    "bloom": ("Bloom", dict(vocab_size=64, hidden_size=48, n_layer=2, n_head=6, hidden_dropout=0, attention_dropout=0)),
    "gptj": ("GPTJ", dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, rotary_dim=8, n_inner=48, resid_pdrop=0,
                          embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)),
    "granite": ("Granite", dict(SMALL, num_key_value_heads=2, embedding_multiplier=3.0, residual_multiplier=0.5,
                                attention_multiplier=0.2, logits_scaling=2.0)),
    "cohere": ("Cohere", dict(SMALL, num_key_value_heads=2, logit_scale=0.5)),
}
GAINS = ("ln", "norm", "gain", "layernorm")


def moment(name):
    """Registers a function that changes a Run at this moment as the mistake of the function's name."""
    def register(function):
        MISTAKES.setdefault(function.__name__, []).append((name, function))
        return function
    return register


def at(when, **mistakes):
    """Registers functions of one expression by name; where a moment asks for values, they are what the function makes."""
    for name, function in mistakes.items():
        MISTAKES.setdefault(name, []).append((when, function))


def changes(when, of, attribute, **mistakes):
    """Registers mistakes that give an attribute of each object of(run) the value that function(run, object) makes."""
    def change(r, *_, made):
        for one in of(r):
            setattr(one, attribute, made(r, one))
    at(when, **{name: functools.partial(change, made=made) for name, made in mistakes.items()})


def reduced_only(**mistakes):
    """Registers mistakes that reduce those gradients alone whose name the function takes."""
    def reduce(r, taken):
        for name, p in r.model.named_parameters():
            if taken(name):
                r.reduce_one(name, p)
        return True
    at("reduce", **{name: functools.partial(reduce, taken=taken) for name, taken in mistakes.items()})


# What `changes` is of.

def itself(r):
    return [r]


def grid(r):
    return [r.grid]


def model(r):
    return [r.model]


def parameters(r, *parts):
    return [p for n, p in r.model.named_parameters() if not parts or any(part in n for part in parts)]


def of_blocks(path):
    return lambda r: [operator.attrgetter(path)(block) for block in r.blocks()]


attentions = of_blocks("attn")


def clip_by(r, c, norm):
    """Clips as clip_grad_norm_ would if this were the norm. True, as it is done."""
    if c is not None:
        c.gradients()
        c.gradient_norm(norm)
    for p in r.model.parameters():
        p.grad.mul_(min(1.0, r.limit / (float(norm) + 1e-6)))
    return True


def fill(model):
    """Weights that do not depend on how the model is split: drawn name by name."""
    found = {}
    draw = torch.Generator().manual_seed(21)
    for name, p in model.named_parameters():
        gain = p.dim() == 1 and not name.endswith("bias") and any(word in name for word in GAINS)
        found[name] = torch.randn(p.shape, generator=draw) * (0.1 if p.dim() == 1 else 0.18) + (1 if gain else 0)
    return found


@functools.cache
def whole_weights(name):
    return fill(MODELS[name](Grid()))


def hugging_face(name):
    import transformers
    family, config = HUGGING_FACE[name]
    config = getattr(transformers, f"{family}Config")(**config, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for (_, p), w in zip(model.named_parameters(), fill(model).values()):
            p.copy_(w)
    return model.train()


def batch(packed):
    """Ids, labels (shifted already; -100 is no target), places within documents, and which document a token is of."""
    draw = torch.Generator().manual_seed(17)
    ids = torch.randint(1, C.vocab, (BATCH, SEQ), generator=draw)
    labels = torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], 1)
    positions, documents = torch.arange(SEQ).expand(BATCH, -1).clone(), torch.zeros(BATCH, SEQ, dtype=torch.long)
    for i in range(BATCH):
        if packed:
            cut = 5 + 2 * i
            positions[i, cut:] -= cut
            documents[i, cut:] = 1
            labels[i, cut - 1] = -100
        else:
            labels[i, :2 * i] = -100  # a prompt
            labels[i, 11 + i:] = -100  # padding
    return ids, labels, positions, documents


class Run:
    """What one rank does. way: alone, ddp, fsdp2, zero, dtensor (tensor parallelism), hand (tp, sp, cp and dp by hand)."""

    def __init__(self, name, folder, rank=0, dp=1, cp=1, tp=1, way="alone", fault=None, dtype="fp32", sp=False, zigzag=False,
                 ring=False, micro=1, steps=1, packed=False, dropout=0.0, update=False, resume=None, adam="adamw",
                 checkpointing=False, frozen=(), smoothing=0.0, z_loss=0.0, scaled=False, lr=4e-3, warmup=0):
        self.name, self.folder, self.rank, self.dp, self.cp, self.tp, self.way = name, folder, rank, dp, cp, tp, way
        self.fault, self.dtype, self.micro, self.steps, self.packed, self.dropout = fault, dtype, micro, steps, packed, dropout
        self.update, self.resume, self.adam, self.checkpointing, self.frozen = update, resume, adam, checkpointing, frozen
        self.smoothing, self.z_loss, self.scale = smoothing, z_loss, 1024.0 if scaled else 1.0
        if way == "fsdp2" and not dist.is_initialized():  # one rank, whose parameters are in bf16 as those of many
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.grid = Grid(rank, dp, cp, tp, sp, zigzag, ring)
        self.hand = name in MODELS
        self.lr, self.warmup, self.limit, self.divisor, self.decay = lr, warmup, 0.3, None, 0.2
        self.hyper = dict(betas=(0.9, 0.95), eps=1e-8)
        self.spec = {"mesh": {k: n for k, n in dict(dp=dp, cp=cp, tp=tp).items()}, "samples": "by_rank"}

    def moment(self, name, *args):
        for when, function in MISTAKES.get(self.fault, ()):
            if when == name:
                return function(self, *args)
        return None

    # --- the model ----------------------------------------------------------------------------------------------------

    def build(self):
        torch.manual_seed(1)
        if not self.hand:
            self.model = hugging_face(self.name)
            return
        self.moment("grid")
        arguments = (self.dropout,) if self.name == "vesper" else ()
        cut = self.way == "hand" and self.tp > 1
        self.model = MODELS[self.name](self.grid if self.way != "dtensor" else Grid(), *arguments)
        weights = dict(whole_weights(self.name))
        self.moment("weights", weights)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                dim = split_of(name) if cut else None
                part = self.moment("part", name, weights[name], dim)
                p.copy_(part if part is not None else weights[name] if dim is None else self.grid.own(weights[name], dim, "tp"))
        if self.way == "dtensor":
            for block in self.model.blocks:
                block.attn.grid = self.grid

    def blocks(self):
        inner = getattr(self.model, "transformer", None) or getattr(self.model, "model", None) or self.model
        return next(getattr(inner, n) for n in ("blocks", "layers", "h") if hasattr(inner, n))

    def wrap(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        self.wrapped, self.plan = self.model, {}
        if self.way == "dtensor" or (self.way == "fsdp2" and self.tp > 1):
            self.split_by_plan()
        self.bucket = dict(process_group=self.grid.group("dp")) if self.grid.mesh is not None else {}
        if self.way == "ddp":
            self.moment("ddp")
            self.wrapped = torch.nn.parallel.DistributedDataParallel(self.model, **self.bucket)
        if self.way == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if self.dtype == "bf16" \
                else MixedPrecisionPolicy()
            for block in self.blocks():
                fully_shard(block, mesh=self.grid.mesh["dp"], mp_policy=policy)
            if not self.moment("root"):
                fully_shard(self.model, mesh=self.grid.mesh["dp"], mp_policy=policy)

    def split_by_plan(self):
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        columns, rows = ("wq", "up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("wo", "down", "o_proj", "down_proj")
        for name, _ in self.model.named_modules():
            last = name.rsplit(".", 1)[-1]
            if last in columns or last in rows:
                self.plan[name] = ColwiseParallel() if last in columns else RowwiseParallel()
        if self.name == "mosaic":
            self.plan["unembed"] = ColwiseParallel(output_layouts=Replicate())
        for block in self.blocks() if self.hand else ():
            block.attn.grid = self.grid
        self.moment("plan")
        parallelize_module(self.model, self.grid.mesh["tp"], self.plan)

    def make_optimizer(self):
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        self.groups = [{"params": decayed, "weight_decay": self.decay}, {"params": rest, "weight_decay": 0.0}]
        self.moment("optimizer")
        if self.way == "zero":
            every = list(self.model.parameters())
            self.owner = {p: i % self.dp for i, p in enumerate(every)}
            for group in self.groups:
                group["params"] = [p for p in group["params"] if self.owner[p] == self.rank]
        if self.adam == "sgd":
            self.optimizer = torch.optim.SGD(self.groups, lr=self.lr, momentum=0.9, **self.hyper)
        else:
            self.optimizer = getattr(self, "own_optimizer", torch.optim.AdamW)(self.groups, lr=self.lr, **self.hyper)
        ramp = self.warmup
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: min(1.0, (i + 1) / ramp) if ramp else 1.0)

    # --- a step -------------------------------------------------------------------------------------------------------

    def go(self):
        if self.adam == "sgd":
            self.hyper = {}
        self.build()
        torch.manual_seed(1)  # whatever building it has drawn
        for name, p in self.model.named_parameters():
            p.requires_grad_(not any(part in name for part in self.frozen))
        if self.checkpointing:
            from torch.utils.checkpoint import checkpoint
            self.checkpoint = functools.partial(checkpoint, use_reentrant=False)
        self.moment("model")
        if self.checkpointing:
            for block in self.blocks():
                block.forward = functools.partial(self.checkpoint, block.forward)
        self.moment("early")
        self.wrap()
        self.moment("wrapped")
        self.make_optimizer()
        self.moment("made")
        self.place()
        self.criterion = self.losses
        self.moment("criterion")
        first = 0
        if self.resume == "before":  # what another process did, and saved
            self.step = 0
            self.train(None)
            self.loaded()
            first = 1
        with anyrank.capture(self.wrapped, self.folder, self.optimizer if self.update else None, spec=self.spec) as c:
            for self.step in range(first, first + self.steps):
                self.train(c)
                if self.resume == "between" and self.step == 0:
                    self.loaded()

    def place(self):
        if self.way in ("ddp", "fsdp2", "zero"):
            self.spec["mean_over"] = "dp"
        if self.way == "hand":
            self.spec.update(placements(self.grid))
        if self.tp > 1 and not self.hand:  # attention's probabilities are of a rank's own heads
            self.spec["shard"] = {"*.self_attn.1:*": {"tp": 1}}
        self.moment("spec")

    def loaded(self):
        """The state of model, optimizer and schedule, saved and loaded again."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "schedule": self.schedule.state_dict()}
        import copy
        state = copy.deepcopy(state)
        self.moment("saved", state)
        self.model.load_state_dict(state["model"])
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.moment("loaded")

    def samples(self):
        data = batch(self.packed)
        data = self.moment("data", *data) or data
        self.targets = int((data[1] != -100).sum())
        data = self.moment("samples", *data) or tuple(t.chunk(self.dp)[self.grid.at["dp"]] for t in data)
        if self.cp > 1:
            data = self.moment("tokens", *data) or tuple(self.grid.tokens(t).contiguous() for t in data)
        return data

    def losses(self, logits, labels):
        """The sum of this micro-batch's losses over all targets of the step; DDP and FSDP2 average over dp, as ZeRO does."""
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=self.smoothing)
        if self.z_loss:
            total = total + self.z_loss * (logits.float().logsumexp(-1).square() * (labels != -100)).sum()
        return total / (self.divisor or self.targets)

    def forward(self, ids, positions, documents):
        if self.hand:
            return self.wrapped(ids, positions, documents)
        return self.wrapped(input_ids=ids, use_cache=False, **(self.moment("inputs", ids) or {})).logits

    def train(self, c):
        self.moment("step")
        data = self.samples()
        for self.m, (ids, labels, positions, documents) in enumerate(zip(*(t.chunk(self.micro) for t in data))):
            last = self.m + 1 == self.micro
            silent = self.wrapped.no_sync() if self.way == "ddp" and not last else contextlib.nullcontext()
            if self.way == "fsdp2" and hasattr(self.wrapped, "set_requires_gradient_sync"):
                self.wrapped.set_requires_gradient_sync(last)
            ids, labels, positions, documents = self.moment("batch", ids, labels, positions, documents) or \
                (ids, labels, positions, documents)
            with silent:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16" and self.way != "fsdp2"):
                    logits = self.forward(ids, positions, documents)
                    loss = self.criterion(logits, labels)
                self.loss = loss * self.scale * (self.dp if self.way in ("ddp", "fsdp2", "zero") else 1)
                self.moment("loss")
                self.loss.backward()
            self.moment("backward")
        self.reduce()
        self.moment("gradients")
        if self.update:
            self.renew(c)
        elif c is not None:
            c.gradients()

    def reduce(self):
        """By hand: sums over dp and cp, and over tp of what a rank's own heads or tokens gave."""
        if self.moment("reduce"):
            return
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            if self.way == "zero":
                p.grad = self.grid.sum(p.grad, "dp") / self.dp
            if self.way == "hand":
                self.reduce_one(name, p)

    def reduce_one(self, name, p):
        if self.tp > 1 and name.endswith("gain") and ("q_norm" in name or "k_norm" in name or self.grid.sp):
            p.grad = self.grid.sum(p.grad, "tp")
        p.grad = self.grid.sum(self.grid.sum(p.grad, "cp"), "dp")

    def renew(self, c):
        if self.scale != 1.0 and not self.moment("unscale"):
            for p in self.model.parameters():
                p.grad.div_(self.scale)
        if self.moment("clip", c) is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        if not self.moment("renew"):
            self.optimizer.step()
        if self.way == "zero" and not self.moment("share"):
            for p in self.model.parameters():
                dist.broadcast(p.data, self.owner[p], group=self.grid.group("dp"))
        self.moment("updated")
        self.schedule.step()
        if not self.moment("zero_grad"):
            self.model.zero_grad()


def run(*args, **options):
    Run(*args, **options).go()
