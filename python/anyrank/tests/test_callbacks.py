# SPDX-License-Identifier: Apache-2.0
"""anyrank.Callback: the Trainers of transformers and of Lightning call it, on one rank and on two, in right runs and in
broken ones; and a loop of accelerate, which needs none."""

from __future__ import annotations

import logging
import pathlib
import pickle
import typing
import warnings

import anyrank
from anyrank import ranks
from anyrank.tests import FolderCase, needs, run_python

STEPS = 6
NONE, GROUP, COPY = "", "not_updated: step 3", "copies: step 3"  # what is found, of every step


def found(callback: typing.Any) -> str:
    return ", ".join(f"{one.rule}: step {one.step}" for one in callback.findings)


def trainer(rank: int, folder: pathlib.Path, bug: str) -> typing.Any:
    """What is found, the history's numbers of findings and texts, and what a callback reads that comes after."""
    import torch
    import transformers

    class After(transformers.TrainerCallback):  # type: ignore[misc]
        read: list[typing.Any] = []

        def on_step_end(self, _args: typing.Any, state: typing.Any, *_: typing.Any, **given: typing.Any) -> None:
            if bug == COPY and rank == 1 and state.global_step == 2:
                given["model"].lm_head.weight.data[0, 0] += 1.0
            if bug == "raise" and state.global_step == 2:
                raise KeyError(bug)

        def on_log(self, *_: typing.Any, **given: typing.Any) -> None:
            self.read.append(given["logs"].get("anyrank/findings"))

    transformers.logging.set_verbosity_error()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8))
    ids = torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(5))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, use_cpu=True,
        ddp_backend="gloo", ddp_find_unused_parameters=False, report_to=[], save_strategy="no", disable_tqdm=True,
        max_grad_norm=0.0)
    optimizer = torch.optim.AdamW(list(model.parameters())[:-1 if bug == GROUP else None], lr=0.01)
    callback = anyrank.Callback(every=1, folder=folder / "run", on_finding=lambda one: None)
    program = transformers.Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
                                   optimizers=(optimizer, None), callbacks=[callback, After()])
    program.remove_callback(transformers.PrinterCallback)
    try:
        program.train()
    except KeyError:  # no callback hears of it, so that the next run is watched from its own first step
        bug = NONE
        program.train()
    history = program.state.log_history
    return (found(callback), [line.get("anyrank/findings") for line in history],
            [line["anyrank/first"] for line in history if "anyrank/first" in line], After.read[-len(history):])


def lightning(rank: int, folder: pathlib.Path, bug: str, passes: int = 1) -> typing.Any:
    """What is found, and the number that is logged last."""
    import lightning as pl
    import torch
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
            self.register_buffer("mean", torch.zeros(8))

        def training_step(self, batch: typing.Any, _number: int) -> typing.Any:
            self.mean.copy_(batch[0].mean(0))  # of a rank's own samples, until DDP's next forward pass
            return self.net(batch[0]).square().mean()

        def on_train_batch_start(self, _batch: typing.Any, number: int) -> None:
            if bug == COPY and rank == 1 and number == 2:
                self.net[2].weight.data[0, 0] += 1.0
            if bug == "raise" and number == 2:
                raise KeyError(bug)

        def configure_optimizers(self) -> typing.Any:
            return torch.optim.AdamW(list(self.net.parameters())[:-1 if bug == GROUP else None], lr=0.01)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    callback = anyrank.Callback(every=1, folder=folder / "run", on_finding=lambda one: None)
    program = pl.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), max_steps=STEPS, callbacks=callback,
        accumulate_grad_batches=passes, logger=CSVLogger(str(folder), "log", 0), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(5)))
    model = Module()
    try:
        program.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    except KeyError:
        with anyrank.capture(model, folder / "next"):  # the watch is over
            model.training_step([torch.ones(2, 8)], 0).backward()
        return found(callback), "raised"
    program.logger.save()
    lines = (folder / "log/version_0/metrics.csv").read_text().splitlines() if rank == 0 else [""]
    return found(callback), lines[-1].split(",")[0]


def accelerate(rank: int, folder: pathlib.Path, bug: str) -> typing.Any:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: typing.Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(list(model.parameters())[:-1 if GROUP in bug else None], lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(5)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    with anyrank.watch(model, optimizer, every=1, folder=folder, on_finding=lambda one: None) as watch:
        for step, (x,) in zip(range(STEPS), loader):
            accelerator.backward(model(x).square().mean())
            if COPY in bug and rank == 1 and step == 2:
                model.module[2].weight.data[0, 0] += 1.0
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found(watch)


@needs("torch")
class Callbacks(FolderCase):
    @needs("transformers", "accelerate")
    def test_trainer(self) -> None:
        import transformers  # noqa: F401  once, and not in each rank

        for i, (world, bug) in enumerate(((1, "raise"), (1, GROUP), (2, COPY))):
            said = ranks.spawn(world, trainer, self.path / str(i), bug)
            rules, counts, texts, read = said[0]
            after = [*[0] * 2, *[1] * (STEPS - 1)] if bug in (GROUP, COPY) else [0] * (STEPS + 1)  # one is the summary
            self.assertEqual(rules, "" if bug == "raise" else bug)
            if world > 1:  # a step is read once all ranks have written it, which may be a step later or two
                self.assertEqual((counts, counts[:2], counts[-1]), (sorted(counts), [0] * 2, 1))
            self.assertEqual((read, counts if world == 1 else after), (counts, after), bug)
            self.assertEqual([text.split(": ")[0] for text in texts], ["step 3"] if any(after) else [])
            for other in said[1:]:
                self.assertEqual(other, (NONE, [None] * (STEPS + 1), [], [None] * (STEPS + 1)))

    @needs("lightning")
    def test_lightning(self) -> None:
        import lightning as pl

        self.assertIsInstance(pickle.loads(pickle.dumps(anyrank.Callback(every=3))), pl.Callback)
        for i, (world, bug, passes) in enumerate(((1, "raise", 1), (1, NONE, 1), (1, GROUP, 2), (2, COPY, 1))):
            said = ranks.spawn(world, lightning, self.path / str(i), bug, passes)
            expected = {NONE: (NONE, "0"), "raise": (NONE, "raised")}.get(bug, (bug, "1"))
            self.assertEqual(said, [expected, *[(NONE, "")] * (world - 1)], bug)

    @needs("accelerate")
    def test_accelerate(self) -> None:
        for i, bug in enumerate((NONE, f"{COPY}, {GROUP}")):
            self.assertEqual(ranks.spawn(2, accelerate, self.path / str(i), bug), [bug, NONE])

    @needs("transformers", "accelerate")
    def test_an_end_that_fails_is_a_warning(self) -> None:
        import torch
        import transformers

        callback: typing.Any = anyrank.Callback(folder=self.path / "run")
        state = transformers.TrainerState(global_step=4)
        callback.on_train_begin(None, state, None, model=torch.nn.Linear(2, 2), optimizer=None)
        with self.assertWarnsRegex(UserWarning, "no forward pass of the model was seen"):
            callback.on_train_end(None, state, None, model=None)

    def test_a_library_is_imported_before(self) -> None:
        ended = run_python("import sys, anyrank\nassert anyrank.Callback and 'torch' not in sys.modules\n"
                           "anyrank.Callback()")
        self.assertIn("none of transformers, lightning.pytorch, pytorch_lightning is imported", ended.stderr)
