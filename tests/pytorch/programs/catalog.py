# SPDX-License-Identifier: Apache-2.0
"""The programs that nobody here wrote: where they come from, what is changed in them, and how they are run.

`changed` are the lines that must say something else on a CPU, on one rank, or with sizes that a test can afford; a
patch with the same name adds anyrank's lines. Those of `pip` come with torch and transformers: the script here calls
them, and has anyrank's lines in it.
"""

import dataclasses
import pathlib

import torch

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = {  # folder below --sources: repository, commit
    "examples": ("https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"),
    "nanoGPT": ("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
}


@dataclasses.dataclass
class Program:
    """source: a folder below --sources, None for the script here."""
    name: str
    file: str
    source: str = None
    arguments: tuple = ()  # {per_rank} is the share of 8 samples
    changed: dict = dataclasses.field(default_factory=dict)  # file: {line: line}
    needs: tuple = ()  # modules besides torch
    files: dict = dataclasses.field(default_factory=dict)  # {name: function(path) that writes it}

    @property
    def patch(self):
        return HERE / f"{self.name}.patch"

    def added_lines(self):
        """How many lines of the program are anyrank's."""
        text = self.patch.read_text() if self.source else (HERE / self.file).read_text()
        if self.source:
            return sum(line.startswith("+") and not line.startswith("+++") for line in text.splitlines())
        return sum("anyrank" in line.split("#")[0] or line.strip() in ("dump.stop()", "c.stop()")
                   for line in text.splitlines() if not line.startswith(('"""', "# ")))


TP = "examples/distributed/tensor_parallelism"
ANY_NUMBER = {"    _world_size % 2 == 0": "    _world_size >= 1"}


def random_tokens(path):
    torch.randint(150, (4000,), generator=torch.Generator().manual_seed(1)).numpy().astype("uint16").tofile(path)


PROGRAMS = [
    Program("tensor_parallel_example", "tensor_parallel_example.py", TP,
            changed={"tensor_parallel_example.py": ANY_NUMBER}),
    # Each rank has its own rows of one batch, instead of rows of its own.
    Program("sequence_parallel_example", "sequence_parallel_example.py", TP,
            changed={"sequence_parallel_example.py": {
                "    inp = torch.rand(20, 10, device=device_type)":
                "    inp = torch.rand(40, 10, device=device_type).chunk(device_mesh.size())[_rank]"}}),
    # FSDP averages the gradients of ranks: a sum over all samples is dp times the sum over one's own.
    Program("fsdp_tp_example", "fsdp_tp_example.py", TP,
            changed={"fsdp_tp_example.py": {
                "tp_size = 2": 'tp_size = int(os.environ["TP"])',
                "simple_llama2_config = ModelArgs(dim=256, n_layers=2, n_heads=16, vocab_size=32000)":
                "simple_llama2_config = ModelArgs("
                "dim=32, n_layers=2, n_heads=4, vocab_size=96, max_seq_len=16, multiple_of=16)",
                "    torch.manual_seed(i + dp_rank)": "    torch.manual_seed(i)",
                "    inp = torch.randint(32000, (8, 256), device=device_type)":
                "    inp = torch.randint(96, (8, 16), device=device_type).chunk(dp_size)[dp_rank]",
                "    output.sum().backward()": "    (output.sum() * dp_size).backward()",
            }}),
    # The example draws the same batch on every rank, and leaves its layers as memory has them.
    Program("fsdp2_example", "example.py", "examples/distributed/FSDP2",
            changed={"example.py": {
                "    vocab_size = 1024": "    vocab_size = 96",
                "    batch_size = 32": "    batch_size = 8",
                "    seq_len = 64": "    seq_len = 12",
                "        n_layers=10,": "        n_layers=2,",
                "        x = torch.randint(0, vocab_size, (batch_size, seq_len), device=device)":
                "        x = torch.randint(0, vocab_size, (batch_size, seq_len), device=device)"
                ".chunk(torch.distributed.get_world_size())[rank]",
                "        loss = model(x).sum()": "        loss = model(x).sum() * torch.distributed.get_world_size()",
            }, "model.py": {
                "        self.output.reset_parameters()":
                "        self.output.reset_parameters(); [layer.reset_parameters() for layer in self.layers]",
            }}),
    Program("ddp_example", "example.py", "examples/distributed/ddp",
            changed={"example.py": {
                "    outputs = ddp_model(torch.randn(20, 10))":
                "    outputs = ddp_model(torch.randn(20, 10).chunk(dist.get_world_size())[rank])",
                "    labels = torch.randn(20, 5).to(rank)":
                "    labels = torch.randn(20, 5).chunk(dist.get_world_size())[rank].to(rank)"}}),
    Program("minGPT-ddp", "main.py", "examples/distributed/minGPT-ddp/mingpt",
            needs=("hydra", "omegaconf", "fsspec", "boto3"),
            changed={"trainer.py": {"            sampler=DistributedSampler(dataset)":
                                    "            sampler=__import__('deal').Blocks(dataset, self.config.batch_size)"}},
            arguments=("data_config.path=data/input.txt", "data_config.block_size=12", "data_config.truncate=0.0003",
                       "trainer_config.max_epochs=1", "trainer_config.data_loader_workers=0",
                       "trainer_config.use_amp=False", "trainer_config.batch_size={per_rank}",
                       "gpt_config.n_layer=2", "gpt_config.n_head=4", "gpt_config.n_embd=32",
                       "+gpt_config.embd_pdrop=0.0", "+gpt_config.resid_pdrop=0.0", "+gpt_config.attn_pdrop=0.0")),
    # Each micro-batch of the step has its own seed, whichever rank draws it.
    Program("nanoGPT", "train.py", "nanoGPT",
            changed={"train.py": {
                "    ix = torch.randint(len(data) - block_size, (batch_size,))":
                "    ix = torch.randint(len(data) - block_size, (batch_size,), generator=next(draws))",
                "import pickle": "import pickle, deal; draws = deal.draws()"}},
            files={"data/tiny/train.bin": random_tokens}, needs=("numpy",),
            arguments=("--backend=gloo", "--compile=False", "--dtype=float32", "--n_layer=2", "--n_head=4",
                       "--n_embd=32",
                       "--block_size=16", "--batch_size=2", "--gradient_accumulation_steps=4", "--max_iters=2",
                       "--eval_iters=0", "--always_save_checkpoint=False", "--dataset=tiny", "--warmup_iters=0",
                       "--learning_rate=1e-3")),
]

# With torch and transformers come:
PROGRAMS += [
    Program("hf_trainer", "hf_trainer.py", needs=("transformers", "accelerate"),
            arguments=("{model}", "{batch}", "{micro}", "{dtype}")),
    Program("hf_plan", "hf_plan.py", needs=("transformers",), arguments=("{model}", "{micro}")),
    Program("dtensor_transformer", "dtensor_transformer.py", needs=("numpy", "expecttest")),
]
BY_NAME = {program.name: program for program in PROGRAMS}
