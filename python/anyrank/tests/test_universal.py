# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints of DeepSpeed: every state of every parameter, with its name and its bits, or an error."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import shutil
import typing

import anyrank
from anyrank import _safetensors, convert, ranks, resume
from anyrank.tests import FolderCase, needs

Values = typing.Dict[str, typing.Tuple[str, typing.Tuple[int, ...], typing.List[float]]]


def read(path: pathlib.Path) -> Values:
    """The tensors of a file: {name: (dtype, shape, elements)}."""
    import torch
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    return {name: (one.dtype, one.shape, torch.frombuffer(bytearray(one.data), dtype=types[one.dtype]).tolist())
            for name, one in _safetensors.read(path)[0].items()}


def counted(first: float, *shape: int) -> typing.Any:
    """Element i is first + i, which bf16 does not hold."""
    import torch
    return (torch.arange(1, dtype=torch.float64) + first if not shape else
            first + torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)).float()


def span(first: float, count: int) -> list[float]:
    return [first + i for i in range(count)]


STATES = ("fp32", "exp_avg", "exp_avg_sq")
# Parameter: its shape, the dimension that two ranks cut (None: they have copies), the first of its elements.
PARAMS: dict[str, tuple[tuple[int, ...], int | None, float]] = {
    "embed.weight": ((6, 2), 0, 1000.25), "fc.weight": ((4, 3), 0, 2000.25), "out.weight": ((2, 4), 1, 3000.25),
    "norm.weight": ((3,), None, 4000.25)}
EXPECTED: Values = {
    "embed.weight": ("F32", (6, 2), span(1000.25, 12)), "embed.weight:m": ("F32", (6, 2), span(1100.25, 12)),
    "embed.weight:v": ("F32", (6, 2), span(1200.25, 12)), "fc.weight": ("F32", (4, 3), span(2000.25, 12)),
    "fc.weight:m": ("F32", (4, 3), span(2100.25, 12)), "fc.weight:v": ("F32", (4, 3), span(2200.25, 12)),
    "out.weight": ("F32", (2, 4), span(3000.25, 8)), "out.weight:m": ("F32", (2, 4), span(3100.25, 8)),
    "out.weight:v": ("F32", (2, 4), span(3200.25, 8)), "norm.weight": ("F32", (3,), span(4000.25, 3)),
    "norm.weight:m": ("F32", (3,), span(4100.25, 3)), "norm.weight:v": ("F32", (3,), span(4200.25, 3)),
    **{f"{name}.step": ("F32", (), [7.0]) for name in PARAMS}}
# What the optimizer does not hold: embed.weight by its other name, a frozen parameter and a buffer.
OTHERS: Values = {"head.weight": ("F32", (6, 2), span(1000.25, 12)), "frozen": ("BF16", (2,), [0.5, 3.0]),
                  "ids": ("I64", (3,), [0, 1, 2])}


@needs("torch")
class Universal(FolderCase):
    """Folders as ds_to_universal.py of DeepSpeed 0.19.8 writes them."""

    def save(self, name: str, value: typing.Any) -> None:
        import torch
        path = self.path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    def load(self, name: str) -> typing.Any:
        import torch
        return torch.load(self.path / "source" / name, weights_only=False)

    def model(self, tp: int, others: bool) -> list[dict[str, typing.Any]]:
        """What the ranks' model_states.pt hold, the embedding with two rows of padding where ranks cut it."""
        import torch
        out = []
        for rank in range(tp):
            module = {}
            for name, (shape, dim, first) in PARAMS.items():
                full = counted(first, *shape).bfloat16()
                if tp > 1 and name == "embed.weight":
                    full = torch.cat([full, torch.zeros(2, 2).bfloat16()])
                module[name] = full.chunk(tp, dim)[rank].clone() if tp > 1 and dim is not None else full
            shapes = [{name: module[name].shape for name in ("embed.weight", "fc.weight", "out.weight")},
                      {"norm.weight": module["norm.weight"].shape}]
            if others:
                module.update({"head.weight": module["embed.weight"], "ids": torch.arange(3),
                               "frozen": torch.tensor([0.5, 3.0]).bfloat16()})
            out.append({"module": module, "param_shapes": shapes, "optimizer": None, "global_steps": 7,
                        "dp_world_size": 2, "shared_params": {"head.weight": "embed.weight"} if others else {},
                        "lr_scheduler": {"last_batch_iteration": 6}})
        return out

    def put_zero(self, others: bool = False, flat: bool = False, tp: int = 1) -> None:
        import torch
        for name, (shape, dim, first) in PARAMS.items():
            for i, kind in enumerate(STATES):
                full = counted(first + 100 * i, *shape)
                keys = {"cat_dim": dim} if tp == 1 or dim is not None else {}
                if tp > 1 and name == "embed.weight":
                    keys["vocab_tensor"] = True
                self.save(f"zero/{name}/{kind}.pt", full.flatten() if flat else {**keys, "param": full})
            if not flat:
                self.save(f"zero/{name}/step.pt", torch.tensor(7.0))
        groups = [{"lr": 0.5, "weight_decay": 0.1, "params": [0]}, {"lr": 0.25, "weight_decay": 0.0, "params": [1]}]
        state: dict[str, typing.Any] = {"zero_stage": 1, "param_groups": groups, "partition_count": [2, 2]}
        if flat:  # rank 0's own dictionary, with its shares
            state.update(zero_stage=3, optimizer_state_dict={"param_groups": groups, "state": {
                g: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(9)} for g in range(2)}})
        self.save("zero/optimizer_state.pt", state)
        module = self.load("mp_rank_00_model_states.pt")["module"] if others else {}
        for name in OTHERS if others else ():
            self.save(f"zero/{name}/fp32.pt", {"param": module[name].float()})

    def put(self, tp: int = 1, others: bool = True) -> None:
        """A checkpoint of ZeRO 1 or 2."""
        for rank, state in enumerate(self.model(tp, others)):
            if tp > 1:
                state["universal_checkpoint_info"] = {
                    "universal_checkpoint_version": 0.4, "original_vocab_size": 6,
                    "vocabulary_parameter_patterns": ["^embed"], "tp_replicated_parameter_patterns": ["^norm"],
                    "parameter_with_row_parallelism_patterns": ["^out"]}
            self.save(f"mp_rank_{rank:02d}_model_states.pt", state)
        self.put_zero(others, tp=tp)

    def converted(self, **options: typing.Any) -> tuple[Values, convert.Converted]:
        out = self.path / "out.safetensors"
        out.unlink(missing_ok=True)
        done = convert.convert(self.path / "source", out, full=True, **options)
        return read(out), done

    def refused(self, *words: str) -> None:
        for run in (lambda: convert.convert(self.path / "source", self.path / "out"),
                    lambda: resume.compare(self.path / "source", self.path / "source")):
            with self.assertRaises(anyrank.AnyrankError) as caught:
                run()
            for word in words:
                self.assertIn(word, str(caught.exception))
        self.assertFalse((self.path / "out").exists())

    def test_every_state_of_every_parameter(self) -> None:
        self.put()
        found, done = self.converted()
        self.assertEqual(found, {**EXPECTED, **OTHERS})
        self.assertEqual((done.kind, done.notes), ("DeepSpeed universal", ()))
        found, _ = self.converted(weights="model")
        self.assertEqual(found["fc.weight"], ("BF16", (4, 3), counted(2000.25, 4, 3).bfloat16().flatten().tolist()))
        (self.path / "latest_universal").write_text("source")
        convert.convert(self.path, self.path / "whole.safetensors", full=True)
        self.assertEqual(read(self.path / "whole.safetensors"), {**EXPECTED, **OTHERS})

    def put_flat(self, world: int) -> None:
        """A checkpoint of ZeRO 3."""
        import torch
        for rank in range(world):
            (state,) = self.model(1, False)
            state["module"] = {name: torch.zeros(0).bfloat16() for name in PARAMS}
            self.save(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", {**state, "dp_world_size": world})
        self.put_zero(flat=True)

    def test_flat_tensors_of_stage_3_and_the_steps_of_its_groups(self) -> None:
        self.put_flat(2)
        self.assertEqual(self.converted()[0], EXPECTED)

    def test_other_numbers_of_ranks_hold_the_same(self) -> None:
        self.put_flat(2)
        (self.path / "source").rename(self.path / "before")
        self.put_flat(3)
        report = resume.compare(self.path / "before", self.path / "source")
        self.assertEqual((report.same, report.tensors), (True, 16), str(report))
        name = "zero_pp_rank_2_mp_rank_00_model_states.pt"
        self.save(name, {**self.load(name), "lr_scheduler": {"last_batch_iteration": 5}})
        report = resume.compare(self.path / "before", self.path / "source")
        self.assertEqual([finding.names for finding in report.findings],
                         [("zero_pp_rank_2_mp_rank_00_model_states.lr_scheduler.last_batch_iteration",)])

    def test_folders_that_have_to_be_made_universal_first(self) -> None:
        for name, words in (("layer_00-model_states.pt", "pipeline stages of DeepSpeed"),
                            ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts of DeepSpeed")):
            self.save("mp_rank_00_model_states.pt", self.model(1, False)[0])
            self.save(name, {})
            self.refused(name, words, "read only from a universal checkpoint", "with ds_to_universal.py first")
            shutil.rmtree(self.path / "source")

    def test_merged_parts_of_tensor_parallel_ranks_and_a_vocabulary_without_padding(self) -> None:
        self.put(2, False)
        self.assertEqual(self.converted()[0], EXPECTED)
        found, done = self.converted(weights="model")
        self.assertEqual((found["embed.weight"][:2], found["out.weight"][:2]), (("BF16", (8, 2)), ("BF16", (2, 4))))
        self.assertEqual(found["out.weight"][2], counted(3000.25, 2, 4).bfloat16().flatten().tolist())
        for rank in range(2):
            state = self.load(f"mp_rank_{rank:02d}_model_states.pt")
            state["universal_checkpoint_info"]["parameter_with_2_sub_params_cat_dim_0"] = ["^fc"]
            self.save(f"mp_rank_{rank:02d}_model_states.pt", state)
        found, done = self.converted(weights="model")
        self.assertEqual(found["fc.weight"], EXPECTED["fc.weight"])
        self.assertIn("how ranks cut 1 parameters, the first fc.weight, is not known", done.notes[0])

    def test_pipeline_stages(self) -> None:
        (state,) = self.model(1, False)
        for stage, names in enumerate((("embed.weight", "fc.weight"), ("out.weight", "norm.weight"))):
            self.save(f"mp_rank_{stage:02d}_model_states.pt", {
                **state, "module": None, "checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1},
                "param_shapes": [{name: PARAMS[name][0] for name in names}]})
        self.put_zero()
        self.assertEqual(self.converted()[0], EXPECTED)

    def test_whole_experts(self) -> None:
        self.put()
        state = self.load("mp_rank_00_model_states.pt")
        state["param_shapes"].append({"experts.w1": (2, 3)})  # a rank's two of four
        self.save("mp_rank_00_model_states.pt", state)
        for kind in (*STATES, "step"):
            self.save(f"zero/experts.w1/{kind}.pt", 7 if kind == "step" else {
                "param": counted(1.0, 4, 3), "cat_dim": 0, "is_expert_param": True, "ep_num_experts": 4})
        found, _ = self.converted()
        self.assertEqual(found["experts.w1:v"], ("F32", (4, 3), span(1.0, 12)))
        self.assertEqual(found["experts.w1.step"], ("I64", (), [7]))

    def test_a_resumed_run_that_lost_its_state_is_another(self) -> None:
        self.put()
        shutil.copytree(self.path / "source", self.path / "before")
        report = resume.compare(self.path / "before", self.path / "source")
        self.assertTrue(report.same, str(report))
        self.assertEqual(report.tensors, 4 * 5 + 4)  # weights in bf16 and fp32, moments, step; head.weight has both
        for name in PARAMS:
            for kind in STATES:
                held = self.load(f"zero/{name}/{kind}.pt")
                self.save(f"zero/{name}/{kind}.pt", {**held, "param": held["param"] * 0})
            self.save(f"zero/{name}/step.pt", self.load(f"zero/{name}/step.pt") * 0)
        state = self.load("zero/optimizer_state.pt")
        state["param_groups"][1]["lr"] = 1.0
        self.save("zero/optimizer_state.pt", state)
        found = {one.cause: one.names for one in resume.compare(self.path / "before", self.path / "source").findings}
        self.assertEqual({cause: len(names) for cause, names in found.items()},
                         {"moments_reset": 8, "zeroed": 5, "step_reset": 4, "schedule": 1})
        self.assertEqual(found["schedule"], ("optimizer.param_groups.1.lr 0.25 -> 1.0",))

    def leave_weight(self) -> None:
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            (self.path / f"source/zero/fc.weight/{kind}.pt").unlink()

    def test_what_is_not_understood_is_refused(self) -> None:
        import torch
        change: typing.Callable[[], object]
        for change, words in (
                (lambda: (self.path / "source/zero/fc.weight/exp_avg.pt").unlink(), (
                    "MissingShard", "zero/fc.weight", "has no exp_avg.pt")),
                (self.leave_weight, ("MissingShard", "fc.weight", "has no exp_avg.pt, exp_avg_sq.pt, step.pt")),
                (lambda: (self.path / "source/zero/fc.weight/fp32.pt").unlink(), ("MissingShard", "has no fp32.pt")),
                (lambda: shutil.rmtree(self.path / "source/zero/fc.weight"), ("MissingShard", "zero/fc.weight")),
                (lambda: shutil.rmtree(self.path / "source/zero"), ("MissingShard", "zero/")),
                (lambda: (self.path / "source/zero/optimizer_state.pt").unlink(), (
                    "MissingShard", "optimizer_state.pt is missing")),
                (lambda: self.save("zero/fc.weight/fp32.pt", {"param": torch.zeros(4, 4), "cat_dim": 0}), (
                    "zero/fc.weight/fp32.pt", "[4, 4]", "[4, 3]")),
                (lambda: self.save("zero/fc.weight/fp32.pt", {"param": torch.zeros(4, 3), "cut": 0}), (
                    "zero/fc.weight/fp32.pt", "has cut, which")),
                (lambda: self.save("zero/fc.weight/fp32.pt", 3.0), ("zero/fc.weight/fp32.pt", "holds no tensor")),
                (lambda: self.save("zero/fc.weight/fp32.pt", {"param": torch.zeros(4, 3), "vocab_tensor": True}), (
                    "zero/fc.weight/fp32.pt", "original_vocab_size")),
                (lambda: self.save("zero/fc.weight/step.pt", "seven"), ("'fc.weight.step' is a str",)),
                (lambda: self.save("zero/other.weight/fp32.pt", {"param": torch.zeros(3)}), (
                    "zero/other.weight", "neither a parameter of the optimizer")),
                (lambda: self.save("zero/frozen/fp32.pt", {"param": torch.tensor([0.5, 3.5])}), (
                    "zero/frozen", "nor, in fp32.pt alone, a copy")),
                (lambda: (self.path / "source/zero/fc.weight/more.bin").write_bytes(b"1"), (
                    "more.bin: is no state of a parameter",)),
                (lambda: self.save("zero_pp_rank_0_mp_rank_00_optim_states.pt", {}), ("holds files of ranks",)),
                (lambda: (self.path / "source/mp_rank_00_model_states.pt").rename(
                    self.path / "source/mp_rank_01_model_states.pt"), ("MissingShard", "mp_rank_XX_model_states.pt"))):
            with self.subTest(words=words):
                self.put()
                change()
                self.refused(*words)
                shutil.rmtree(self.path / "source")

    def test_a_parameter_that_never_had_a_gradient_is_named(self) -> None:
        self.put()
        shutil.rmtree(self.path / "source/zero/fc.weight")
        self.save("zero/fc.weight/fp32.pt", {"param": counted(2000.25, 4, 3).bfloat16().float()})
        found, done = self.converted()
        self.assertIn("1 parameters have no optimizer state, the first fc.weight", done.notes[0])
        self.assertEqual(set(EXPECTED) - set(found), {"fc.weight:m", "fc.weight:v", "fc.weight.step"})


def trained(rank: int, folder: str) -> dict[str, dict[str, typing.Any]]:
    """Two steps of DeepSpeed under each stage, saved, and by rank 0 converted; the true values of each."""
    import torch
    import torch.distributed as dist
    deepspeed, utils, ds_to_universal = (importlib.import_module(name) for name in (
        "deepspeed", "deepspeed.utils", "deepspeed.checkpoint.ds_to_universal"))
    deepspeed.init_distributed("gloo")
    out = {}
    for dtype in ("fp32", "bf16"):
        for stage in (1, 2, 3):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 7), torch.nn.LayerNorm(7),
                                        torch.nn.Linear(7, 6), torch.nn.Linear(6, 11, bias=False))
            model[4].weight = model[0].weight
            model[3].requires_grad_(False)
            held = [p for p in model.parameters() if p.requires_grad]
            groups = [{"params": [p for p in held if (p.dim() > 1) == many], "weight_decay": 0.1 * many}
                      for many in (True, False)]
            config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
                      "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                      "bf16": {"enabled": dtype == "bf16"}}
            engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
            for step in range(2):
                torch.manual_seed(10 * step + rank)
                engine.backward(engine(torch.randint(0, 11, (2, 5))).float().square().mean())
                engine.step()
            true = {name: utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()
                    if p.requires_grad}
            if stage == 3:
                for name, p in engine.module.named_parameters():
                    if p.requires_grad:
                        true[f"{name}:m"] = utils.safe_get_full_optimizer_state(p, "exp_avg")
                        true[f"{name}:v"] = utils.safe_get_full_optimizer_state(p, "exp_avg_sq")
            else:
                true.update(moments(engine))
            out[f"{stage}{dtype}"] = {name: value.flatten().tolist() for name, value in true.items()}
            path = os.path.join(folder, f"{stage}{dtype}")
            engine.save_checkpoint(path)
            dist.barrier()
            if rank == 0:
                ds_to_universal.main(argparse.Namespace(
                    input_folder=f"{path}/global_step2", output_folder=f"{path}/universal", num_extract_workers=1,
                    num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
            dist.barrier()
    return out


def moments(engine: typing.Any) -> dict[str, typing.Any]:
    """Of ZeRO 1 and 2, whose ranks each have a stretch of every group's parameters, one after the other."""
    import torch
    import torch.distributed as dist
    names, out = {id(p): name for name, p in engine.module.named_parameters()}, {}
    zero = engine.optimizer
    for group, part in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups):
        for kind, suffix in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            own = zero.optimizer.state[part][kind]
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
            flat, at = torch.cat(parts), 0
            for p in group:
                out[f"{names[id(p)]}:{suffix}"] = flat[at:at + p.numel()]
                at += p.numel()
    return out


@needs("torch", "deepspeed")
class DeepSpeed(FolderCase):
    def test_its_own_checkpoints_have_the_values_of_the_run(self) -> None:
        env = {"DS_ACCELERATOR": "cpu"}  # also on a machine with a GPU: the ranks' group is gloo
        true = ranks.spawn(2, trained, str(self.path), env=env)[0]
        for name, expected in true.items():
            with self.subTest(name):
                universal, ordinary = self.path / name / "universal", self.path / name / "global_step2"
                done = convert.convert(universal, self.path / f"{name}.safetensors", full=True)
                self.assertEqual((done.kind, done.notes), ("DeepSpeed universal", ()))
                found = read(self.path / f"{name}.safetensors")
                self.assertEqual(len(expected), 5 * 3)
                steps = {f"{key}.step": [2.0] for key in expected if ":" not in key}
                frozen = {key: value for key, (_, _, value) in found.items() if key.startswith("3.")}
                self.assertEqual({key: value for key, (_, _, value) in found.items()},
                                 {**expected, **steps, **frozen, "4.weight": expected["0.weight"]})
                self.assertEqual((len(frozen), found["0.weight:m"][:2]), (2, ("F32", (11, 6))))
                report = resume.compare(ordinary, universal)
                self.assertTrue(report.same, str(report))


if __name__ == "__main__":
    import unittest
    unittest.main()
