#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of docs/pytorch.md, and what docs/dumps.md says of PyTorch's checkpoints, as the pages have them.

    tests/verify/pytorch_page_test.py [BINARY] [unittest options]

BINARY (or the environment variable ANYRANK) is another build; default build/anyrank. Exit status 77 (skipped) where
there is no torch, safetensors or transformers. Other versions of PyTorch round otherwise than the page's: numbers with
a point are compared by what they stand beside, names and whole numbers exactly.
"""

import json
import os
import pathlib
import re
import socket
import sys
import unittest

from pages import GOLDEN, ROOT, PageTest, block, blocks, flat, text

try:
    import safetensors.torch
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import transformers
except ImportError as missing:
    print(f"no {missing.name} here, which the examples of docs/pytorch.md need")
    sys.exit(77)

sys.path.insert(0, str(ROOT / "examples/pytorch"))

BLOCKS = ["from anyrank_dump import Dumper", "anyrank verify one dump", 'Dumper(model, "dump", mesh={"tp": 4}',
          "activations = ", "loss.backward()", "model = AutoModelForCausalLM", "$ anyrank grads tests/golden", "verify: the same within rtol",
          "different: 14 of 47"]
MESH = ', mesh={"dp": 2, "tp": 4}'


def rounded(output):
    """Numbers with a point, of bits and of the worst tensor are those of one version of PyTorch."""
    output = re.sub(r"\d+ tensors? bit for bit", "N tensors bit for bit", flat(output))
    output = re.sub(r"of what is allowed, in \S+", "of what is allowed, in NAME", output)
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+", "#", output)


def tiny():
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(GOLDEN), attn_implementation="eager").eval()


def a_batch():
    return torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(4))


def first_step(rank, world, folder, code):
    """The page's first block, on one rank or under DDP over dp, whose tp ranks compute the same."""
    import anyrank_dump  # noqa: F401  for the block
    os.chdir(folder)
    model, ids = tiny(), a_batch()
    if world > 1:
        groups = [dist.new_group([t, 4 + t]) for t in range(4)]
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=groups[rank % 4])
        ids = ids.chunk(2)[rank // 4]
    exec(code, {"model": model, "ids": ids})


class Projections(torch.nn.Module):
    """q_proj column-parallel, o_proj row-parallel, the gradient of the input not yet summed."""

    def __init__(self, rank, world):
        super().__init__()
        draw = torch.Generator().manual_seed(6)
        q, o = torch.randn(16, 8, generator=draw), torch.randn(8, 16, generator=draw)
        self.self_attn = torch.nn.Module()
        self.self_attn.q_proj, self.self_attn.o_proj = (torch.nn.Linear(*n, bias=False) for n in
                                                        ((8, 16 // world), (16 // world, 8)))
        self.self_attn.q_proj.weight.data = q.chunk(world)[rank].clone()
        self.self_attn.o_proj.weight.data = o.chunk(world, 1)[rank].clone()

    def forward(self, x):
        return self.self_attn.o_proj(self.self_attn.q_proj(x))


def hand_written(rank, world, folder, code):
    from anyrank_dump import Dumper
    os.chdir(folder)
    model = Projections(rank, world)
    dump = eval(code, {"Dumper": Dumper, "model": model})
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(7)).requires_grad_(True)
    model(x).sum().backward()
    dump.write()


def unplaced(rank, world, folder):
    hand_written(rank, world, folder, f'Dumper(model, "{"one" if world == 1 else "dump"}")')


def flat_parameters(rank, world, folder):
    from anyrank_dump import Dumper
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(Projections(0, 1), device_id=torch.device("cpu"))
    try:
        Dumper(model, folder / "dump")
    except ValueError as refused:
        (folder / f"refused-{rank}").write_text(str(refused))


def one_of_many(rank, function, world, port, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    function(rank, world, *arguments)
    dist.destroy_process_group()


def run_ranks(function, world, *arguments):
    if world == 1:
        return function(0, 1, *arguments)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return mp.start_processes(one_of_many, (function, world, port, arguments), nprocs=world, start_method="fork")


class PytorchPage(PageTest):
    def setUp(self):
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())

    def test_every_block_is_tried(self):
        found = blocks("pytorch.md")
        self.assertEqual(len(found), len(BLOCKS))
        for one, start in zip(found, BLOCKS):
            self.assertTrue(one.startswith(start), f"{one[:60]!r} is not {start!r}")

    def test_one_rank_and_many_are_the_same(self):
        code = block("pytorch.md", BLOCKS[0])
        self.assertIn(MESH, code)
        run_ranks(first_step, 8, self.folder, code)
        run_ranks(first_step, 1, self.folder, code.replace(MESH, "").replace('"dump"', '"one"'))
        self.assertEqual(len(list((self.folder / "dump").iterdir())), 8)
        printed = self.run_line(block("pytorch.md", BLOCKS[1]).strip(), [0])
        self.assertIn("verify: the same within rtol 0.0001 and atol 1e-05: ", printed)

    def test_hand_written_layers_are_placed(self):
        code = block("pytorch.md", BLOCKS[2])
        run_ranks(hand_written, 4, self.folder, code)
        run_ranks(hand_written, 1, self.folder, code.replace('mesh={"tp": 4}', 'mesh={"tp": 1}').replace('"dump"', '"one"'))
        printed = self.run_line("anyrank verify one dump --rtol 1e-4 --atol 1e-5 --only '*q_proj*,*o_proj.weight:*'", [0])
        self.assertIn(": 6 tensors, ", printed)

    def test_samples_in_dimension_1_are_written_in_front(self):
        from anyrank_dump import Dumper
        os.chdir(self.folder)
        told = {}
        exec(block("pytorch.md", BLOCKS[3]), told)
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5))  # samples, positions, features
        for folder, value, shard in (("one", x, None), ("dump", x.transpose(0, 1), told["activations"])):
            torch.manual_seed(6)
            model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
            dump = Dumper(model, folder, mesh={"dp": 1, "tp": 1}, shard=shard)
            model(value).square().sum().backward()
            dump.write()
        self.assertIn("the same", self.run_line("anyrank verify one dump --rtol 1e-5 --atol 1e-6", [0]))

    def test_a_mapping_adds_what_the_dumper_was_not_told(self):
        for world in (1, 2):
            run_ranks(unplaced, world, self.folder)
        only = "--rtol 1e-4 --atol 1e-5 --only '*_proj.weight:*'"
        self.assertIn("DIFFERENT", self.run_line(f"anyrank verify one dump {only}", [1]))
        rules = [{"match": f"*.{name}_proj.weight:*", "shard": {"tp": dim}} for name, dim in (("q", 0), ("o", 1))]
        (self.folder / "map.json").write_text(json.dumps({"version": 1, "mesh": [["tp", 2]], "tensors": rules}))
        self.assertIn(": 4 tensors, ", self.run_line(f"anyrank verify one dump --map map.json {only}", [0]))

    def test_flat_parameters_are_refused(self):
        run_ranks(flat_parameters, 2, self.folder)
        for rank in range(2):
            self.assertIn("fully_shard", (self.folder / f"refused-{rank}").read_text())

    def test_a_whole_step_is_recorded(self):
        from anyrank_dump import Dumper
        os.chdir(self.folder)
        model, ids = tiny(), a_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        dump = Dumper(model, "dump")
        code = block("pytorch.md", BLOCKS[4])
        for _ in range(2):
            exec(code, {"torch": torch, "model": model, "optimizer": optimizer, "dump": dump,
                        "loss": model(ids, labels=ids).loss})
            optimizer.zero_grad()
        names = safetensors.torch.load_file(dump.write())
        for name in ("grad_norm:clip", "lm_head.weight:new", "lm_head.weight:m", "lm_head.weight:v", "loss:fwd"):
            self.assertIn(name, names)
            self.assertIn(f"{name}@2", names)

    def test_pytorch_on_one_rank_and_anyrank_on_two(self):
        os.chdir(self.folder)
        (self.folder / "batch.safetensors").symlink_to(GOLDEN / "batch.safetensors")
        ids = safetensors.torch.load_file("batch.safetensors")["input_ids"]
        from anyrank_dump import Dumper
        exec(block("pytorch.md", BLOCKS[5]), {"torch": torch, "Dumper": Dumper, "folder": GOLDEN, "ids": ids,
                                              "AutoModelForCausalLM": transformers.AutoModelForCausalLM})
        self.assertEqual(self.run_session(block("pytorch.md", BLOCKS[6]), rounded), 1)

    def test_checkpoints_of_pytorch_are_read(self):
        line = block("dumps.md", "python3 tests/golden/dcp.py").strip().replace("DUMP", "tests/golden/dcp-tiny")
        merge, verify = line.split(" && ")
        done = self.run_words([sys.executable, *merge.split()[1:]])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("verify: the same bits", self.run_line(verify, [0]))


class WorkedExample(PageTest):
    def test_run_sh_prints_what_the_page_shows(self):
        done = self.run_words([ROOT / "examples/pytorch/run.sh", "run"],
                              env={**os.environ, "PYTHON": sys.executable, "ANYRANK": self.command})
        self.assertEqual(done.returncode, 0, done.stderr)
        parts = re.split(r"^=== (\w+)\n", done.stdout, flags=re.MULTILINE)
        printed = dict(zip(parts[1::2], parts[2::2]))
        self.assertEqual(rounded(printed["none"]), rounded(block("pytorch.md", BLOCKS[7])))
        self.assertIn("verify: the same within ", printed["dtensor"])
        for line in block("pytorch.md", BLOCKS[8]).replace("\n              ", " ").splitlines():
            self.assertIn(rounded(line), rounded(printed["dx_not_reduced"]))
        rows = re.findall(r"^\| \*\*(\w+)\*\*: .* \| (\d+) \| `(\S+)` \| (.*) \| (.*) \|$", text("pytorch.md"), re.MULTILINE)
        self.assertEqual(len(rows), 4)
        for fault, differ, first, pattern, hint in rows:
            head, rest = printed[fault].split("\n", 1)
            self.assertEqual(head, f"different: {differ} of 47 tensors; first in execution order: {first}")
            detail = rounded(rest[rest.index("first in execution order"):].split("worst, with")[0])
            self.assertIn(f"pattern {rounded(pattern)}", detail, fault)
            self.assertIn(rounded(hint), detail, fault)


PageTest.command = os.environ.get("ANYRANK", PageTest.command)

if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        PageTest.command = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()
