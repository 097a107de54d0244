# SPDX-License-Identifier: Apache-2.0
"""The commands as functions. Each runs `anyrank COMMAND` as a process and returns its report.

Every option of the command is a keyword argument: --micro-batches 2 is micro_batches=2, --sp is sp=True. The errors of
all: TypeError for an unknown keyword, with the likely one, or a value of another type; AnyrankError with the command's
message where it refuses the input (exit_status 2) or the machine failed (3). A difference is a result, no error.
"""

from __future__ import annotations

import collections.abc
import json
import os
import typing

from anyrank._arguments import option_words, with_options
from anyrank._command import run
from anyrank._model import model_path
from anyrank._progress import Progress
from anyrank._scratch import Scratch
from anyrank.report import CheckReport, LintReport, PlanReport, TrainReport, VerifyReport, report_of

if typing.TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyrank._options import CheckOptions, LintOptions, PlanOptions, TrainOptions, VerifyOptions

Path = typing.Union[str, "os.PathLike[str]"]
Mapping = typing.Union[None, Path, typing.Mapping[str, typing.Any]]  # of a dump: a file, or what would be in it
Model = typing.Any  # a bundled name, a folder with a config.json, or a model of transformers in memory
_R = typing.TypeVar("_R")


def _run(kind: type[_R], command: str, model: Model, options: typing.Mapping[str, object], progress: Progress) -> _R:
    """Runs a command on a model."""
    option_words(command, options)  # a wrong one, before the model is written
    with model_path(model) as path:
        return report_of(kind, run(command, [] if path is None else [path], options, progress))


@with_options("verify")
def verify(reference: Path, other: Path, *, map: Mapping = None, reference_map: Mapping = None,
           progress: Progress = None, **options: Unpack[VerifyOptions]) -> VerifyReport:
    """Compares two dumps of tensors and explains what differs: `anyrank verify` (verify.md).

    reference, other: a .safetensors or .npy file, a checkpoint's folder or index, or a folder with a file of each rank;
    or a folder that anyrank.convert knows (PyTorch's DCP, DeepSpeed, Megatron), which is converted first.
    map, reference_map: the path of a mapping file, or its JSON as a dict (pytorch.md).
    progress: True for a line on a terminal or in a notebook, or a function of (fraction or None, text).

        report = anyrank.verify("one", "run/dump", rtol=1e-4, atol=1e-5)
        if not report.ok:
            print(report.first.tensor, report.first.rank, report.first.cause)
    """
    command_options: dict[str, typing.Any] = {**options, "map": map, "reference_map": reference_map}
    scratch = Scratch()  # lives as long as the report, which can be made a page
    for name, mapping in (("map", map), ("reference_map", reference_map)):
        if isinstance(mapping, collections.abc.Mapping):
            command_options[name] = scratch.path / f"{name}.json"
            command_options[name].write_text(json.dumps(mapping), encoding="utf-8")
    paths = [
        _as_dump(reference, scratch, "reference_map", command_options),
        _as_dump(other, scratch, "map", command_options),
    ]
    return report_of(VerifyReport, run("verify", paths, command_options, progress), scratch)


def _as_dump(path: Path, scratch: Scratch, mapping: str, command_options: dict[str, typing.Any]) -> Path:
    """Converts another program's checkpoint; returns everything else unchanged."""
    if not isinstance(path, (str, os.PathLike)):
        side = "other" if mapping == "map" else "reference"
        raise TypeError(f"anyrank.verify(): {side}: expected the path of a dump, got {type(path).__name__}; "
                        "anyrank.testing.assert_same compares tensors in memory")
    if not os.path.isdir(path):
        return path
    from anyrank.convert import convert, is_foreign

    if not is_foreign(path):
        return path
    conversion = convert(path, scratch.path / f"{mapping}-of" / os.path.basename(os.path.abspath(path)))
    if conversion.needs_map and command_options.get(mapping) is None:
        command_options[mapping] = conversion.map
    return conversion.path


@with_options("check")
def check(model: Model = None, *, progress: Progress = None, **options: Unpack[CheckOptions]) -> CheckReport:
    """Compares every tensor of training steps under layouts with one rank's: `anyrank check` (check.md).

    model: a bundled name, a folder with a Hugging Face config.json, or a model of transformers in memory; None: the two
    bundled demos.

        assert anyrank.check("llama-demo", dp=2, tp=2, sp=True, steps=1).ok
    """
    return _run(CheckReport, "check", model, options, progress)


@with_options("train")
def train(model: Model = None, *, progress: Progress = None, **options: Unpack[TrainOptions]) -> TrainReport:
    """Trains on text under any layout, with the same weights under every one: `anyrank train` (train.md).

    model: a bundled name or a folder; None with resume=FOLDER. Ctrl-C saves a checkpoint first, where save= is given.
    """
    return _run(TrainReport, "train", model, options, progress)


@with_options("plan")
def plan(model: Model, *, progress: Progress = None, **options: Unpack[PlanOptions]) -> PlanReport:
    """Ranks layouts by predicted time and says what fits: `anyrank plan` (planner.md).

    model: a bundled name, a folder with a config.json or that file, or a model in memory. No weights are read.

        anyrank.plan("llama-3-8b", gpus=16).best.layout
    """
    return _run(PlanReport, "plan", model, options, progress)


@with_options("lint")
def lint(model: Model = None, *, progress: Progress = None, **options: Unpack[LintOptions]) -> LintReport:
    """Types every value of a step under a layout, without numbers: `anyrank lint` (planner.md)."""
    return _run(LintReport, "lint", model, options, progress)
