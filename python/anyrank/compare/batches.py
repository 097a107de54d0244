# SPDX-License-Identifier: Apache-2.0
"""What makes a comparison of two runs pointless and is said first: other samples, or other initial weights."""

from __future__ import annotations

import collections
import typing

from anyrank._errors import AnyrankError

if typing.TYPE_CHECKING:
    from anyrank.compare.options import Options
    from anyrank.compare.runs import Result

# Frameworks whose batch size is per rank, by their module: what to give them.
PER_RANK = {"transformers.trainer": "--per_device_train_batch_size", "lightning": "the DataLoader's batch_size",
            "pytorch_lightning": "the DataLoader's batch_size", "accelerate": "the DataLoader's batch_size",
            "deepspeed": "train_micro_batch_size_per_gpu"}


def judge(reference: Result, candidate: Result, report: dict[str, typing.Any], options: Options) -> list[str]:
    """Sentences that come before verify's report of the two dumps. None if samples and initial weights are the same."""
    if report.get("result") == "same":
        return []
    sentences = []
    try:
        samples = _samples(reference, candidate, options)
    except (AnyrankError, ImportError):
        samples = ""
    if samples:
        sentences.append(samples)
    first = report.get("first") or {}
    if str(first.get("tensor", "")).endswith(":init"):
        sentences.append(f"The runs start from different weights, first in {first['tensor'][:-5]}. "
                         "--same-weights loads the reference's initial weights into the other run.")
    return sentences


def _samples(reference: Result, candidate: Result, options: Options) -> str:
    """Why the first captured step has other samples; "" if it has the same ones, in any order, or none are recorded."""
    import numpy as np

    from anyrank.dump import open_dump

    with open_dump(reference.dump) as ours, open_dump(candidate.dump) as theirs:
        ending = ":fwd" if options.first_step == 1 else f":fwd@{options.first_step}"
        names = [name for name in ours if name.startswith("input.") and name.endswith(ending) and name in theirs]
        for name in names:
            pair = [np.ascontiguousarray(dump.numpy(name)) for dump in (ours, theirs)]
            if any(values.ndim < 2 for values in pair):
                continue
            rows = [collections.Counter(row.tobytes() for row in values) for values in pair]
            if rows[0] != rows[1]:
                return _reason(reference, candidate, rows[0], rows[1])
    return ""


def _reason(reference: Result, candidate: Result, expected: collections.Counter[bytes],
            actual: collections.Counter[bytes]) -> str:
    label, size = candidate.run.label, (sum(expected.values()), sum(actual.values()))
    begin = "The runs do not train on the same global batch: "
    if actual == collections.Counter({row: candidate.run.ranks * count for row, count in expected.items()}):
        return (f"{begin}with {label}, every rank got the whole batch of {size[0]} samples. Let each rank take its "
                "part, for example by DistributedSampler or batch.chunk(world)[rank].")
    if size[0] * candidate.run.ranks == size[1] * reference.run.ranks:
        return (f"{begin}it has {size[0]} samples with {reference.run.label} and {size[1]} with {label}, so the "
                f"script's batch size counts per rank. {_remedy(reference, candidate)}")
    if size[0] != size[1]:
        return f"{begin}it has {size[0]} samples with {reference.run.label} and {size[1]} with {label}."
    shared = sum((expected & actual).values())
    return (f"{begin}{shared} of {size[0]} samples are the same. Samples come from a sampler that draws by rank, from "
            "random crops or masks, or from a seed that depends on the rank: let all runs draw the same global batch.")


def _remedy(reference: Result, candidate: Result) -> str:
    frameworks = {name for report in candidate.reports for name in report.get("frameworks", ())}
    option = next((text for name, text in PER_RANK.items() if name in frameworks), None)
    counts = f"{reference.run.ranks},{candidate.run.ranks}"
    text = f"Divide it in the script's arguments: --batch {{SIZE//ranks}} (--ranks {counts})."
    if option and option.startswith("--"):
        return f"Divide it: {option} {{SIZE//ranks}}."
    return f"{text} Here it is {option}." if option else text
