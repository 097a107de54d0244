# SPDX-License-Identifier: Apache-2.0
"""The registry of programs, and what they share: capture, batches, small models.

A program is a function of (rank, world, folder) that trains a small model, on one rank or on its part of each batch,
captures into `folder` and returns its final weights. A program with bugs also takes bug=NAME: a broken twin of it has
that bug on several ranks.
"""

import contextlib
import dataclasses
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

PROGRAMS = {}
# Options of capture that the runner sets for a run; None captures nothing.
CAPTURE_OPTIONS = {}

FP32 = ["--rtol", "1e-4", "--atol", "1e-5"]
BF16 = ["--rtol", "5e-2", "--atol", "2e-3"]
# A file of allowances that a program writes beside its dumps.
ALLOWED = "allowed.safetensors"


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    function: object
    about: str
    ranks: int
    spec: dict
    needs: tuple             # packages besides torch
    tolerance: list          # options of verify
    rounding: bool           # whether `verify --rounding` can judge it
    expected: str            # "same" or "different"
    bug: str
    weights_tolerance: float  # of final weights, relative to a tensor's largest element
    zero_gradients: tuple    # globs of weights whose gradients are zero but for rounding, of which Adam makes steps


def program(name, *, about, bugs=None, ranks=2, spec=None, needs=(), tolerance=FP32, rounding=True, expected="same",
            weights_tolerance=2e-5, zero_gradients=()):
    """Registers a program, and NAME!BUG for each of its bugs, {BUG: what it is}."""
    def register(function):
        def add(full_name, text, result, bug):
            PROGRAMS[full_name] = Program(full_name, function, text, ranks, spec or {}, needs, tolerance, rounding,
                                          result, bug, weights_tolerance, tuple(zero_gradients))
        add(name, about, expected, None)
        for bug, text in (bugs or {}).items():
            add(f"{name}!{bug}", text, "different", bug)
        return function
    return register


def capture(model, folder, **options):
    """anyrank.capture with the runner's options; nothing without a folder."""
    if folder is None:
        return contextlib.nullcontext()
    import anyrank
    return anyrank.capture(model, folder, **CAPTURE_OPTIONS, **options)


def join_group(world):
    if world > 1:
        dist.init_process_group("gloo")


def full_copy(tensor):
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.float().clone()


def full_weights(model):
    """Copies of a model's parameters, by their names without those of wrappers."""
    return {re.sub(r"^module\.|_orig_mod\.|_checkpoint_wrapped_module\.", "", name): full_copy(p)
            for name, p in model.named_parameters()}


def share(tensor, rank, world):
    return tensor.chunk(world)[rank]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def samples(step, n=8, inputs=16, outputs=8):
    g = generator(1000 + 10 * step)
    return torch.randn(n, inputs, generator=g), torch.randn(n, outputs, generator=g)


def tokens(step, n=8, length=12, micro=0):
    return torch.randint(2, 61, (n, length), generator=generator(2000 + 10 * step + micro))


def with_ddp(model, world, **options):
    return nn.parallel.DistributedDataParallel(model, **options) if world > 1 else model


def mlp(inputs=16, hidden=32, outputs=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, hidden),
                         nn.GELU(), nn.Linear(hidden, outputs))


class Attention(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Feed(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, feed, d=32):
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d), feed()

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=64, d=32, layers=2, feed=Feed):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(32, d)
        self.layers = nn.ModuleList(Block(feed, d) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt(**options):
    torch.manual_seed(0)
    return GPT(**options)


def lm_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


LLAMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="eager")
BERT = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            initializer_range=0.15)


def llama():
    import transformers
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, max_position_embeddings=64))


def tokenizer():
    import tokenizers
    import transformers
    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{k}" for k in range(60)]
    model = tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>")
    words_to_ids = tokenizers.Tokenizer(model)
    words_to_ids.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words_to_ids, pad_token="<pad>", bos_token="<s>",
                                                eos_token="</s>", unk_token="<unk>")


def sentence(seed, low=4, high=10):
    """From `low` to `high` words of the tokenizer's."""
    g = generator(seed)
    length = int(torch.randint(low, high + 1, (1,), generator=g))
    return " ".join(f"w{int(k)}" for k in torch.randint(0, 60, (length,), generator=g))
