# SPDX-License-Identifier: Apache-2.0
"""Programs that train other kinds of models than causal language models: two towers of a contrastive loss, a masked language
model with a second head, convolutions, a recurrent model that carries its state, a vision transformer with tensor
parallelism by hand, a pipeline by hand, batch norms, a recommender, a classifier whose classes are cut, fields that are cut
in strips, and weight norms. Each is run(rank, world, fault, path); other_kinds_cases.py lists faults."""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from ranks import Ranks, copy_to, reduce_from

WIDTH, HEADS, INNER, WORDS = 32, 4, 64, 97


def draw(seed):
    return torch.Generator().manual_seed(seed)


def own(rank, world, *data):
    return tuple(t.chunk(world)[rank] for t in data)


def wrapped(model, world):
    return DistributedDataParallel(model, find_unused_parameters=True) if world > 1 else model


def filled(model, seed=1, std=0.15):
    """Weights that are nowhere zero or one."""
    g = draw(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * std + (0.5 if p.dim() == 1 else 0.0))
    return model


# --- two towers -------------------------------------------------------------------------------------------------------

class Towers(nn.Module):
    """Gives out the features of both, and the scale of their products: the only scalar, and no loss."""

    def __init__(self):
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(n, INNER), nn.LayerNorm(INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))
                                 for n in (24, 20))
        self.scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.scale.exp()


def towers(rank, world, fault, path):
    model = filled(Towers())
    with torch.no_grad():
        model.scale.fill_(2.3)
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            a, b, scale = ddp(*own(rank, world, torch.randn(12, 24, generator=g), torch.randn(12, 20, generator=g)))
            if world > 1 and fault != "negatives_of_own_rank":
                a, b = (torch.cat(torch.distributed.nn.all_gather(t)) for t in (a, b))
            if fault == "features_of_others_detached":
                mine = torch.arange(len(a)) // (len(a) // world) == rank
                a, b = (torch.where(mine[:, None], t, t.detach()) for t in (a, b))
            products, target = scale * a @ b.t(), torch.arange(len(a))
            loss = (F.cross_entropy(products, target) + F.cross_entropy(products.t(), target)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# --- a masked language model with a second head -----------------------------------------------------------------------

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.pos, self.kind = nn.Embedding(WORDS, WIDTH), nn.Embedding(24, WIDTH), nn.Embedding(2, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, "gelu", batch_first=True)
                                    for _ in range(2))
        self.pair = nn.Linear(WIDTH, 2)

    def forward(self, ids, kinds, real):
        x = self.norm(self.word(ids) + self.pos(torch.arange(ids.shape[1]).expand_as(ids)) + self.kind(kinds))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~real)
        return F.linear(self.last(x), self.word.weight), self.pair(x[:, 0])


def masked_batch(g):
    ids, lengths = torch.randint(5, WORDS, (8, 20), generator=g), torch.randint(9, 21, (8,), generator=g)
    real = torch.arange(20) < lengths[:, None]
    picked = (torch.rand(8, 20, generator=g) < 0.2) & real
    picked[:, 3] = True
    kinds = ((torch.arange(20) >= lengths[:, None] // 2) & real).long()
    return (ids * real).masked_fill(picked, 4), kinds, real, ids.where(picked, -100), torch.randint(0, 2, (8,), generator=g)


def masked(rank, world, fault, path):
    model = filled(Masked())
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=5e-4), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            data = masked_batch(g)
            targets = int((data[3] != -100).sum())
            if fault != "whole_batch_on_each_rank":
                data = own(rank, world, *data)
            logits, pair = (model if fault == "module_within_called" else ddp)(*data[:3])
            each = F.cross_entropy(logits.flatten(0, 1), data[3].flatten(), reduction="sum")
            divisor = int((data[3] != -100).sum()) if fault == "own_number_of_targets" else targets / world
            term = 0.5 if fault == "second_term_halved" else 1.0
            optimizer.zero_grad()
            (each / divisor + term * F.cross_entropy(pair, data[4])).backward()
            if fault == "clipped_element_by_element":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


# --- convolutions -----------------------------------------------------------------------------------------------------

class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.GroupNorm(4, channels) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, 2, 1), nn.ModuleList(Residual(16) for _ in range(2))
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((2, 3)))


def convolutions(rank, world, fault, path):
    model = filled(Convolutions())
    ddp, g = wrapped(model, world), draw(5)
    rate, decay = (0.1 * world if fault == "rate_times_ranks" else 0.1), (0.0 if fault == "decay_left_out" else 1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=decay)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            x, y = torch.randn(12, 3, 16, 16, generator=g), torch.randint(0, 10, (12,), generator=g)
            x, y = (x[rank::world], y[rank::world]) if fault == "samples_in_turn" else own(rank, world, x, y)
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()


# --- a recurrent model that carries its state -------------------------------------------------------------------------

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cells = nn.Embedding(50, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, 50)

    def forward(self, ids, state):
        y, state = self.cells(self.embed(ids), state)
        return self.out(y), state


def recurrent(rank, world, fault, path):
    model = filled(Recurrent(), std=0.3)
    ddp, optimizer = wrapped(model, world), torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    (text,), state = own(rank, world, torch.randint(0, 50, (8, 61), generator=draw(5))), None
    with anyrank.capture(ddp, path):
        for i in range(0, 60, 20):
            logits, state = ddp(text[:, i:i + 20], None if fault == "state_not_carried" else state)
            state = tuple(t.detach() for t in state)
            labels = text[:, i:i + 20] if fault == "labels_not_shifted" else text[:, i + 1:i + 21]
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            for _ in range(2 if fault == "schedule_twice_a_step" else 1):
                schedule.step()


# --- a vision transformer, tensor parallel ----------------------------------------------------------------------------

class Vision(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.blocks = nn.ModuleList(VisionBlock(r) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x).mean(1))


class VisionBlock(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.r, heads = r, HEADS // r.tp
        self.norm1, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH // r.tp)
        self.proj, self.norm2 = nn.Linear(WIDTH // r.tp, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER // r.tp), nn.Linear(INNER // r.tp, WIDTH, bias=False)
        self.near = nn.Embedding(31, HEADS)  # of relative places, which all ranks have, and each uses its heads of
        self.own = slice(r.tp_rank * heads, (r.tp_rank + 1) * heads)

    def forward(self, x):
        b, n, _ = x.shape
        enter = (lambda t: t) if self.r.has("input_gradient_not_summed") else (lambda t: copy_to(t, self.r))
        q, k, v = self.qkv(enter(self.norm1(x))).view(b, n, 3, HEADS // self.r.tp, -1).permute(2, 0, 3, 1, 4)
        at = torch.arange(n)
        score = q @ k.transpose(-1, -2) / 8 ** 0.5 + self.near(at[None] - at[:, None] + 15)[..., self.own].permute(2, 0, 1)
        x = x + reduce_from(self.proj((score.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1)), self.r)
        return x + reduce_from(self.fc2(F.gelu(self.fc1(copy_to(self.norm2(x), self.r)))), self.r)


SPLIT = {"*.qkv.*:*": {"tp": 0, "blocks": [1, 1, 1]}, "*.qkv:fwd": {"tp": -1, "blocks": [1, 1, 1]}, "*.fc1.*:*": {"tp": 0},
         "*.fc1:fwd": {"tp": -1}, "*.proj.weight:*": {"tp": 1}, "*.fc2.weight:*": {"tp": 1}, "*.proj:bwd": {"tp": -1},
         "*.fc2:bwd": {"tp": -1}}
SUMMED = {"*.proj:fwd": "tp", "*.fc2:fwd": "tp", "*.qkv:bwd": "tp", "*.fc1:bwd": "tp"}


def vision_part(r, name, full):
    if ".qkv." in name and not r.has("packed_weight_cut_as_one"):
        return torch.cat([r.part(t, 0) for t in full.chunk(3)])
    dim = 0 if ".qkv." in name or ".fc1." in name else 1 if ".proj." in name or ".fc2." in name else None
    return full if dim is None else r.part(full, dim)


def vision(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    whole, model = filled(Vision(Ranks())), Vision(r)
    for (name, p), full in zip(model.named_parameters(), whole.parameters()):
        p.data = vision_part(r, name, full.data).clone()
    decay = [0.05 * (p.dim() > 1 or fault == "vectors_decay") for p in model.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], "weight_decay": d} for p, d in zip(model.parameters(), decay)], lr=1e-3)
    g, spec = draw(3), {"mesh": {"tp": world}, "shard": SPLIT, "partial": SUMMED} if world > 1 else None
    with anyrank.capture(model, path, spec=spec):
        for _ in range(2):
            x, y = torch.randn(6, 3, 16, 16, generator=g), torch.randint(0, 10, (6,), generator=g)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for name, p in model.named_parameters():
                if ".near." in name and fault != "relative_places_of_own_heads":
                    p.grad = r.sum(p.grad)
            optimizer.step()


# --- a pipeline of two stages -----------------------------------------------------------------------------------------

def stage(rank, world):
    layers = nn.ModuleDict({str(i): nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(),
                                                  nn.Linear(INNER, WIDTH)) for i in range(4)})
    model = nn.Module()
    model.embed, model.layers, model.head = nn.Embedding(50, WIDTH), layers, nn.Linear(WIDTH, 50)
    filled(model)
    if world > 1:
        for i in range(4):
            if i // 2 != rank:
                del layers[str(i)]
        delattr(model, "head" if rank == 0 else "embed")

    def forward(x):
        x = model.embed(x) if hasattr(model, "embed") else x
        for layer in model.layers.values():
            x = x + layer(x)
        return model.head(x) if hasattr(model, "head") else x
    model.forward = forward
    return model


def pipeline(rank, world, fault, path):
    micro, model = 4, stage(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.randint(0, 50, (8, 13), generator=draw(7))
    labels = [t / 1 for t in ids[:, 1:].chunk(micro)]
    losses = [lambda y, t=t.long(): F.cross_entropy(y.flatten(0, 1), t.flatten()) / micro for t in labels]
    with anyrank.capture(model, path, spec={"mesh": {"pp": 2}} if world > 1 else None):
        if world == 1:
            for x, loss in zip(ids[:, :-1].chunk(micro), losses):
                loss(model(x)).backward()
        elif rank == 0:
            sent = [model(x) for x in ids[:, :-1].chunk(micro)]
            for y in sent:
                dist.send(y.detach(), 1)
            for y in reversed(sent) if fault == "gradients_in_other_order" else sent:
                back = torch.empty_like(y)
                dist.recv(back, 1)
                y.backward(back)
        else:
            received = [torch.empty(2, 12, WIDTH) for _ in range(micro)]
            for x in received:
                dist.recv(x, 0)
            made = [loss(model(x.requires_grad_())) for x, loss in zip(received, losses)]
            for i, loss in enumerate(made):
                loss.backward()
                dist.send(received[0 if fault == "first_gradient_sent_again" else i].grad, 0)
        optimizer.step()


# --- batch norms over all ranks ---------------------------------------------------------------------------------------

class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(_ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(_ctx, grad):
        return Summed.forward(None, grad)


class BatchNorm(nn.Module):
    """As SyncBatchNorm, which needs a GPU."""

    def __init__(self, channels, world):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.world = world

    def forward(self, x):
        sums = torch.stack([x.mean((0, 2, 3)), (x * x).mean((0, 2, 3))])
        mean, square = Summed.apply(sums) / self.world if self.world > 1 else sums
        scale = self.weight * (square - mean * mean + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def images(rank, world, fault, path):
    of = 1 if fault == "statistics_of_own_rank" else world
    model = filled(nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), BatchNorm(16, of), nn.ReLU(),
                                 nn.Conv2d(16, 16, 3, 2, 1, bias=False), BatchNorm(16, of), nn.ReLU(), nn.Flatten(),
                                 nn.Linear(256, 10)))
    ddp, optimizer, g = wrapped(model, world), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            x, y = own(rank, world, torch.randn(12, 3, 16, 16, generator=g), torch.randint(0, 10, (12,), generator=g))
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y, label_smoothing=0.1).backward()
            optimizer.step()


# --- a recommender ----------------------------------------------------------------------------------------------------

class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(3))
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(14, 1)

    def forward(self, dense, ids):
        x = F.relu(self.dense(dense))
        every = torch.stack([x] + [bag(ids[:, i]) for i, bag in enumerate(self.bags)], 1)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (every @ every.transpose(1, 2))[:, i, j]], 1))[:, 0]


def recommender(rank, world, fault, path):
    model = filled(Recommender())
    ddp, optimizer, g = wrapped(model, world), torch.optim.Adagrad(model.parameters(), lr=0.05), draw(5)
    positive = torch.tensor(3.0 if fault == "positives_weighted" else 1.0)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            dense, ids, y = own(rank, world, torch.randn(12, 5, generator=g), torch.randint(0, 30, (12, 3, 4), generator=g),
                                torch.randint(0, 2, (12,), generator=g).float())
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(ddp(dense, ids), y, pos_weight=positive).backward()
            optimizer.step()


# --- a classifier whose classes are cut over ranks --------------------------------------------------------------------

class Faces(nn.Module):
    def __init__(self, r, classes=40):
        super().__init__()
        self.r, self.classes = r, classes
        self.body = nn.Sequential(nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, classes // r.tp, bias=False)

    def forward(self, x):
        return self.head(copy_to(self.body(x), self.r))

    def loss(self, logits, y, smoothing=0.1):
        r, n = self.r, logits.shape[1]
        top = r.max(logits.detach().max(1).values)[:, None]
        lse = reduce_from((logits - top).exp().sum(1), r).log()
        place = y - r.tp_rank * n
        own_target = (logits - top).gather(1, place.clamp(0, n - 1)[:, None])[:, 0] * ((place >= 0) & (place < n))
        mean = (logits - top).mean(1) if r.has("smoothing_of_own_classes") else (
            reduce_from((logits - top).sum(1), r) / self.classes)
        return (lse - (1 - smoothing) * reduce_from(own_target, r) - smoothing * mean).mean()


def faces(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    whole, model = filled(Faces(Ranks())), Faces(r)
    for (name, p), full in zip(model.named_parameters(), whole.parameters()):
        p.data = (r.part(full.data, 0) if name == "head.weight" else full.data).clone()
    optimizer, g = torch.optim.SGD(model.parameters(), lr=0.1), draw(3)
    spec = {"mesh": {"tp": world}, "shard": {"head.weight:*": {"tp": 0}, "head:fwd": {"tp": 1}, "output:fwd": {"tp": 1}},
            "partial": {"head:bwd": "tp"}}
    with anyrank.capture(model, path, spec=spec if world > 1 else None):
        for _ in range(2):
            x, y = torch.randn(6, 20, generator=g), torch.randint(0, 40, (6,), generator=g)
            optimizer.zero_grad()
            model.loss(model(x), y).backward()
            optimizer.step()


# --- fields that are cut in strips ------------------------------------------------------------------------------------

class Edges(torch.autograd.Function):
    """A strip with a row of each neighbour's, zeros beyond the field; backward what each neighbour's row is owed."""

    @staticmethod
    def forward(ctx, x, r):
        ctx.r, zero, all_rows = r, torch.zeros_like(x[:, :, :1]), r.gather(x[:, :, [0, -1]], 2)
        above, below = 2 * r.tp_rank - 1, 2 * r.tp_rank + 2
        return torch.cat([all_rows[:, :, above:above + 1] if r.tp_rank > 0 else zero, x,
                          all_rows[:, :, below:below + 1] if r.tp_rank + 1 < r.tp else zero], 2)

    @staticmethod
    def backward(ctx, grad):
        r, own_grad = ctx.r, grad[:, :, 1:-1].clone()
        all_rows = r.gather(grad[:, :, [0, -1]], 2)
        if r.tp_rank > 0:
            own_grad[:, :, :1] += all_rows[:, :, 2 * r.tp_rank - 1:2 * r.tp_rank]
        if r.tp_rank + 1 < r.tp:
            own_grad[:, :, -1:] += all_rows[:, :, 2 * r.tp_rank + 2:2 * r.tp_rank + 3]
        return own_grad, None


class Field(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.r, self.layers = r, nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in ((2, 8), (8, 8), (8, 1)))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.pad(x, (1, 1))
            x = F.pad(x, (0, 0, 1, 1)) if self.r.has("edges_not_exchanged") else Edges.apply(x, self.r)
            x = layer(x) if i == 2 else F.gelu(layer(x))
        return x


def field(rank, world, fault, path):
    r = Ranks(rank, 1, world, bug=fault)
    model, g = filled(Field(r)), draw(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    spec = {"mesh": {"cp": world}, "shard": {"input.*": {"cp": 2}, "*:fwd": {"cp": 2}},
            "mean_over": "cp"} if world > 1 else None
    with anyrank.capture(model, path, spec=spec, values=["init", "fwd", "grad", "new", "m", "v"]):
        for _ in range(2):
            x, y = (r.part(torch.randn(4, n, 16, 12, generator=g), 2) for n in (2, 1))
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in model.parameters():
                p.grad = r.sum(p.grad) / world
            optimizer.step()


# --- norms of weights -------------------------------------------------------------------------------------------------

def norms_of_weights(rank, world, fault, path):
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(10, 24)),
              nn.utils.parametrizations.spectral_norm(nn.Linear(24, 24)), nn.Linear(24, 3)]
    model = nn.Sequential(layers[0], nn.LeakyReLU(), layers[1], nn.LeakyReLU(), layers[2])
    ddp, optimizer, g = wrapped(model, world), torch.optim.AdamW(model.parameters(), lr=1e-3), draw(5)
    with anyrank.capture(ddp, path):
        for _ in range(2):
            x, y = own(rank, world, torch.randn(12, 10, generator=g), torch.randn(12, 3, generator=g))
            optimizer.zero_grad()
            F.mse_loss(ddp(x), y, reduction="sum" if fault == "sum_for_mean" else "mean").backward()
            optimizer.step()


PROGRAMS = {"towers": towers, "masked": masked, "convolutions": convolutions, "recurrent": recurrent, "vision": vision,
            "pipeline": pipeline, "images": images, "recommender": recommender, "faces": faces, "field": field,
            "norms_of_weights": norms_of_weights}
