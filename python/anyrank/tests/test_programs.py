# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody here wrote, on one rank and on two: transformers' Trainer under DDP, torch's plans."""

from __future__ import annotations

import pathlib
import typing

from anyrank.tests import FolderCase, needs


def train(_rank: int, folder: pathlib.Path, broken: bool) -> None:
    """Two steps of transformers' Trainer. broken: each rank divides by its own targets, and DDP takes the mean."""
    import torch
    import torch.distributed as dist
    import transformers

    import anyrank

    draw = torch.Generator().manual_seed(5)
    samples = []
    for i in range(8):  # prompts of different lengths are no targets
        ids = torch.randint(3, 60, (12,), generator=draw)
        samples.append({"input_ids": ids, "labels": torch.where(torch.arange(12) < 2 * i, -100, ids) if i < 5 else ids})
    torch.manual_seed(3)
    transformers.logging.set_verbosity_error()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager"))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=4 // dist.get_world_size(),
        train_sampling_strategy="sequential", max_grad_norm=0.5, use_cpu=True, ddp_backend="gloo", report_to=[],
        save_strategy="no", disable_tqdm=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=samples)
    trainer.model_accepts_loss_kwargs = not broken
    with anyrank.capture(model, folder, spec={} if broken else {"partial": {"loss:fwd": "dp"}}):
        trainer.train()


def plan(_rank: int, folder: pathlib.Path, broken: bool) -> None:
    """A step of torch's own encoder layer, its MLP under a plan. broken: the second layer's output is not summed."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from anyrank.tests.torch_names import Partial
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import anyrank

    torch.manual_seed(1)
    model = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    if dist.get_world_size() > 1:
        row = RowwiseParallel(output_layouts=Partial()) if broken else RowwiseParallel()
        parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
                           {"linear1": ColwiseParallel(), "linear2": row})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    # The activation between the two layers is a function, behind which nothing says whose part a tensor is.
    with anyrank.capture(model, folder, optimizer=optimizer, spec={"shard": {"dropout:*": {"tp": 2}}}):
        model(torch.randn(2, 5, 16)).square().mean().backward()
        optimizer.step()


@needs("torch")
class Programs(FolderCase):
    def compare(self, program: typing.Callable[[int, pathlib.Path, bool], None]) -> typing.Any:
        """The report of a right run on two ranks, and that of a broken one."""
        import anyrank

        one, two, other = (self.path / name for name in ("one", "two", "other"))
        anyrank.ranks.spawn(1, program, one, False)
        anyrank.ranks.spawn(2, program, two, False)
        anyrank.ranks.spawn(2, program, other, True)
        right = anyrank.verify(one, two, rtol=1e-4, atol=1e-5)
        self.assertTrue(right.ok, right)
        self.assertGreater(right.compared, 20)
        return anyrank.verify(one, other, rtol=1e-4, atol=1e-5)

    def test_a_plan_of_parallelize_module_is_right_on_two_ranks_and_a_missing_sum_is_named(self) -> None:
        first = self.compare(plan).first
        self.assertEqual((first.tensor, first.cause), ("linear2:fwd", "missing_all_reduce"), first)

    @needs("transformers", "accelerate")
    def test_trainer_under_ddp_is_right_on_two_ranks_and_a_mean_of_means_is_named(self) -> None:
        first = self.compare(train).first
        self.assertEqual((first.tensor, first.cause), ("loss:fwd", "mean_of_means"), first)
