#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A sixth of the trial of trial.py, a twelfth of its strangers' runs, in ./test --extended all of it: no right PyTorch
run is called different, and no broken one the same, or given a cause that is wrong. KNOWN: the runs that are judged
otherwise today, to be mended.

    PYTHON tests/pytorch/trial_test.py

ANYRANK names another command than build/anyrank. Exit status 77 (skipped) where there is no torch or transformers.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
COMMAND = os.environ.get("ANYRANK", str(HERE.parents[1] / "build/anyrank"))
EVERY = 1 if "ANYRANK_TEST_EXTENDED" in os.environ else 6
GOOD = ("right", "partly")
KNOWN = {
    # Within what bf16 may round.
    "llama-hf-ddp2-bf16-slow_frequencies_divided": ("unseen",),
    "stranger-rover-alone-bf16-loss_of_bf16_logits": ("unseen",),
    "stranger-vesper-alone-bf16-kept_values_not_scaled": ("unseen",),
    "stranger-rover-fsdp2-dp2-bf16-norms_in_bf16": ("unseen",),
    "stranger-rover-ddp-dp2-bf16-softmax_in_bf16": ("unseen",),
    # Rounding makes some tokens choose other experts, which the allowance takes for what rounding does.
    "experts-tern-dp2-ep2-bf16-weights_before_experts": ("unjudged",),
    "experts-right-tern-dp2-ep2-bf16-as-it-is": ("unjudged",),
    # The allowance is eight times the largest difference of any element, more than the gradient's largest element.
    "blind2-quarry-alone-bf16-scaled_by_frequency": ("unseen",),
    "blind-vesper-ddp-dp2-clipped_after_the_step": ("other tensor",),
    "blind3-quarry-ddp-dp3-bf16-targets_of_own_rank": ("unseen",),
    "blind3-mosaic-ddp-dp2-bf16-one_norm_decays": ("unseen",),
    # The loss is within the tolerance; attention of the first block is taken for rounding.
    "blind3-harbor-hand-tp2-smoothing_of_own_vocabulary": ("other tensor",),
    "blind3-harbor-alone-frequencies_in_bf16": ("other tensor",),
}


def main():
    for name in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            print(f"no {name} here, which the trial of PyTorch programs needs")
            return 77
    with tempfile.TemporaryDirectory(prefix="anyrank-trial-") as folder:
        report = pathlib.Path(folder, "report.json")
        subprocess.run([sys.executable, str(HERE / "trial.py"), "--anyrank", COMMAND, "--every", str(EVERY), "--json",
                        str(report)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = json.loads(report.read_text(encoding="utf-8"))
    wrong = [row for row in rows if row["verdict"] not in GOOD + KNOWN.get(row["case"], ())]
    for row in wrong:
        print(f"{row['case']}: {row['verdict']}, {row['tensor']}, {row['cause']}")
    for row in rows:
        if row["case"] in KNOWN and row["verdict"] in GOOD:
            print(f"{row['case']} is {row['verdict']} now, and need not be KNOWN")
    print(f"{len(rows)} runs, {len(wrong)} judged wrong")
    return 1 if wrong or len(rows) < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
