#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of pytorch.md, and what pytorch.md says of PyTorch's checkpoints, as the pages have them.

Exit status 77 (skipped) where there is no torch, safetensors or transformers. Other versions of PyTorch round
otherwise than the page's: numbers with a point are compared by what they stand beside, names and whole numbers
exactly.
"""

import json
import os
import re
import sys
import tempfile
import unittest

from pages import COMMAND, GOLDEN, ROOT, PageTest, block, flat, text

try:
    import safetensors.torch
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import transformers
except ImportError as missing:
    print(f"no {missing.name} here, which the examples of pytorch.md need")
    sys.exit(77)

sys.path.insert(0, str(ROOT / "python"))

# How the blocks of the page begin.
FIRST, VERIFY, TRAINER, OBJECT, SPEC, ACTIVATIONS, LIBRARY, SESSION, ENGINE = (
    "import anyrank\n", "anyrank verify one dump", "with anyrank.capture(trainer.model", "c = anyrank.capture", "spec = {",
    "activations = ", "model = AutoModelForCausalLM", "$ anyrank grads tests/golden",
    "reduced = engine")


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
    os.chdir(folder)
    model, ids = tiny(), a_batch()
    if world > 1:
        groups = [dist.new_group([t, 2 + t]) for t in range(2)]
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=groups[rank % 2])
        ids = ids.chunk(2)[rank // 2]
    exec(code, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-5), "train": train,
                "batches": [ids, ids.flip(1)]})


def train(model, optimizer, batches):
    for ids in batches:
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


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


def hand_written(rank, world, folder, spec):
    import anyrank
    model = Projections(rank, world)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(7)).requires_grad_(True)
    with anyrank.capture(model, folder / ("one" if world == 1 else "dump"), spec=spec):
        model(x).sum().backward()


def flat_parameters(rank, world, folder):
    import anyrank
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(Projections(0, 1), device_id=torch.device("cpu"))
    try:
        anyrank.capture(model, folder / "dump")
    except anyrank.AnyrankError as refused:
        (folder / f"refused-{rank}").write_text(str(refused))


def one_of_many(rank, function, world, store, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank, world, *arguments)
    dist.destroy_process_group()


def run_ranks(function, world, *arguments):
    if world == 1:
        return function(0, 1, *arguments)
    with tempfile.TemporaryDirectory(prefix="anyrank-store-") as folder:
        mp.start_processes(one_of_many, (function, world, f"{folder}/store", arguments), nprocs=world,
                           start_method="fork")


class PytorchPage(PageTest):
    def setUp(self):
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())

    def test_one_rank_and_many_are_the_same(self):
        code = block("pytorch.md", FIRST)
        readme = re.sub(r' +# on each rank: "many"', "", block("README.md", FIRST))
        self.assertEqual(re.sub(r" +# on every rank", "", code), readme.replace('"one"', '"dump"'))
        run_ranks(first_step, 4, self.folder, code)
        run_ranks(first_step, 1, self.folder, code.replace('"dump"', '"one"'))
        self.assertEqual(len(list((self.folder / "dump").glob("rank-*"))), 4)
        printed = self.run_line(block("pytorch.md", VERIFY).strip(), [0])
        self.assertIn("verify: the same within rtol 0.0001 and atol 1e-05: ", printed)
        names = safetensors.torch.load_file(self.folder / "one" / "rank-00000.safetensors")
        for name in ("grad_norm:clip", "lm_head.weight:grad", "lm_head.weight:new", "lm_head.weight:m", "lm_head.weight:v",
                     "loss:fwd", "model.norm:bwd"):
            self.assertIn(name, names)
            self.assertIn(f"{name}@2", names)

    def test_a_trainer_is_captured_from_outside(self):
        try:
            import accelerate  # noqa: F401
        except ImportError:
            self.skipTest("no accelerate")
        os.chdir(self.folder)
        rows = [{"input_ids": row, "labels": row} for row in torch.cat([a_batch()] * 3)]
        options = transformers.TrainingArguments("trained", per_device_train_batch_size=4, max_steps=3, use_cpu=True,
                                                 report_to=[], save_strategy="no", disable_tqdm=True)
        import anyrank
        trainer = transformers.Trainer(tiny(), options, train_dataset=rows)
        exec(block("pytorch.md", TRAINER), {"anyrank": anyrank, "trainer": trainer})
        names = safetensors.torch.load_file(self.folder / "dump" / "rank-00000.safetensors")
        for name in ("loss:fwd", "grad_norm:clip", "lm_head.weight:new", "lm_head.weight:v"):
            self.assertIn(name, names)
            self.assertIn(f"{name}@3", names)
            self.assertNotIn(f"{name}@2", names) if not name.endswith(":new") else None

    def test_hand_written_layers_are_placed(self):
        said = {}
        exec(block("pytorch.md", SPEC), said)
        run_ranks(hand_written, 4, self.folder, said["spec"])
        run_ranks(hand_written, 1, self.folder, {**said["spec"], "mesh": {"tp": 1}})
        printed = self.run_line("anyrank verify one dump --rtol 1e-4 --atol 1e-5 --only '*q_proj*,*o_proj.weight:*'", [0])
        self.assertIn(": 6 tensors, ", printed)

    def test_samples_in_dimension_1_are_written_in_front(self):
        import anyrank
        os.chdir(self.folder)
        told = {}
        exec(block("pytorch.md", ACTIVATIONS), told)
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5))  # samples, positions, features
        for folder, value, shard in (("one", x, None), ("dump", x.transpose(0, 1), told["activations"])):
            torch.manual_seed(6)
            model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
            with anyrank.capture(model, folder, spec={"mesh": {"dp": 1, "tp": 1}, "shard": shard}):
                model(value).square().sum().backward()
        self.assertIn("the same", self.run_line("anyrank verify one dump --rtol 1e-5 --atol 1e-6", [0]))

    def test_a_mapping_adds_what_capture_was_not_told(self):
        for world in (1, 2):
            run_ranks(hand_written, world, self.folder, None)
        only = "--rtol 1e-4 --atol 1e-5 --only '*_proj.weight:*'"
        self.assertIn("DIFFERENT", self.run_line(f"anyrank verify one dump {only}", [1]))
        rules = [{"match": f"*.{name}_proj.weight:*", "shard": {"tp": dim}} for name, dim in (("q", 0), ("o", 1))]
        (self.folder / "map.json").write_text(json.dumps({"version": 1, "mesh": [["tp", 2]], "tensors": rules}))
        self.assertIn(": 4 tensors, ", self.run_line(f"anyrank verify one dump --map map.json {only}", [0]))

    def test_flat_parameters_are_refused(self):
        run_ranks(flat_parameters, 2, self.folder)
        for rank in range(2):
            self.assertIn("fully_shard", (self.folder / f"refused-{rank}").read_text())

    def test_a_program_with_its_own_update_says_where_it_is(self):
        import anyrank
        os.chdir(self.folder)

        def clip(model):
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.mul_(0.5)
            return norm

        def update(model):
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
                    p.grad = None
        model = tiny()
        exec(block("pytorch.md", OBJECT), {"anyrank": anyrank, "model": model, "batches": [a_batch()] * 2, "clip": clip,
                                           "update": update})
        found = safetensors.torch.load_file(self.folder / "dump" / "rank-00000.safetensors")
        own = dict(model.named_parameters())
        self.assertTrue(torch.equal(found["model.norm.weight:new@2"], own["model.norm.weight"]))
        half = found["model.norm.weight:init"] - 0.5 * found["model.norm.weight:grad"]
        self.assertTrue(torch.equal(found["model.norm.weight:new"], half))
        self.assertIn("grad_norm:clip@2", found)

    def test_an_engine_hands_in_what_its_update_reads(self):
        import anyrank
        os.chdir(self.folder)
        model = Projections(0, 1)

        class Engine:
            def reduce(self):
                self.gradients = {name: 2 * p.grad for name, p in model.named_parameters()}
                return self.gradients

            def update(self):
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.sub_(self.gradients[name])
                return {name: (0.1 * g, 0.01 * g.square()) for name, g in self.gradients.items()}

        with anyrank.capture(model, "dump") as c:
            model(torch.ones(2, 3, 8)).sum().backward()
            exec(block("pytorch.md", ENGINE), {"engine": Engine(), "c": c})
        found = safetensors.torch.load_file(self.folder / "dump" / "rank-00000.safetensors")
        for name, p in model.named_parameters():
            self.assertTrue(torch.equal(found[f"{name}:grad"], 2 * p.grad))
            self.assertTrue(torch.equal(found[f"{name}:new"], found[f"{name}:init"] - 2 * p.grad))
            self.assertTrue(torch.equal(found[f"{name}:m"], 0.2 * p.grad))
            self.assertTrue(torch.equal(found[f"{name}:v"], 0.01 * (2 * p.grad).square()))

    def test_pytorch_on_one_rank_and_anyrank_on_two(self):
        os.chdir(self.folder)
        (self.folder / "batch.safetensors").symlink_to(GOLDEN / "batch.safetensors")
        ids = safetensors.torch.load_file("batch.safetensors")["input_ids"]
        import anyrank
        exec(block("pytorch.md", LIBRARY), {"torch": torch, "anyrank": anyrank, "folder": GOLDEN, "ids": ids,
                                            "AutoModelForCausalLM": transformers.AutoModelForCausalLM})
        self.assertEqual(self.run_session(block("pytorch.md", SESSION), rounded), 1)

    def test_checkpoints_of_pytorch_are_read(self):
        line = block("pytorch.md", "python3 tests/golden/dcp.py").strip().replace("DUMP", "tests/golden/dcp-tiny")
        merge, verify = line.split(" && ")
        done = self.run_words([sys.executable, *merge.split()[1:]])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("verify: the same bits", self.run_line(verify, [0]))


# Of examples/pytorch: how many of 50 tensors differ, the first of them, and what is said of it.
FAULTS = {
    "dx_not_reduced": (14, "blocks.1.norm:bwd: off by 88 % of its size: a missing sum over tp", "missing_all_reduce"),
    "bias_every_rank": (32, "blocks.0.down:fwd: off by 105 % of its size: the bias is added 4 times",
                        "bias_counted_again"),
    "sum_not_reduced": (32, "blocks.0.down:fwd: off by 80.4 % of its size: a missing sum over tp", "missing_all_reduce"),
    "wrong_shard": (34, "blocks.0.up.weight:init on rank 2: off by 71 % of its size: a shard stands at another rank's "
                    "place too: rank 2 has rank 1's", "slices_repeated"),
    "norm_grad_doubled": (2, "blocks.1.norm.weight:grad: off by 300 % of its size: every element is the reference times "
                          "4 (tp = 4)", "reduced_again"),
}


class WorkedExample(PageTest):
    def test_each_fault_is_explained(self):
        done = self.run_words([ROOT / "examples/pytorch/run.sh", "run"],
                              env={**os.environ, "PYTHON": sys.executable, "ANYRANK": COMMAND})
        self.assertEqual(done.returncode, 0, done.stderr)
        parts = re.split(r"^=== (\w+)\n", done.stdout, flags=re.MULTILINE)
        printed = dict(zip(parts[1::2], parts[2::2]))
        for right in ("none", "dtensor"):
            self.assertIn("verify: the same within rtol 0.0001 and atol 1e-05: ", printed[right])
        self.assertEqual(set(printed), {"none", "dtensor", *FAULTS})
        for fault, (differ, first, cause) in FAULTS.items():
            with self.subTest(fault):
                self.assertTrue(flat(printed[fault]).startswith(first), printed[fault])
                self.assertIn(f"\n  cause      {cause}", printed[fault])
                self.assertIn(f"\ndifferent: {differ} of 50 tensors\n", printed[fault])


if __name__ == "__main__":
    unittest.main()
