#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The time of a training step with recomputation beside its multiply-adds: bench/recompute_time.py [ANYRANK]

A Llama of four blocks 512 wide on one rank in native numerics. Steps with and without recomputation take turns in
`bench step`; predicted is the ratio of the multiply-adds that `plan --flow --backward` counts."""

import json
import pathlib
import subprocess
import sys
import tempfile

CONFIG = {"model_type": "llama", "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1536,
          "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu",
          "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
BATCH, SEQ, REPETITIONS = 2, 128, 7


def result(anyrank, *arguments):
    words = [anyrank, *map(str, arguments), "--json", "-", "-q"]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def multiply_adds(anyrank, model, *layout):
    flow = result(anyrank, "plan", model, "--flow", "--backward", "--numerics", "native", "--batch", BATCH, "--seq",
                  SEQ, *layout)
    return sum(flow["totals"][of]["multiply_adds"] for of in ("forward", "backward"))


def main():
    anyrank = sys.argv[1] if len(sys.argv) > 1 else "build/anyrank"
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        plain = multiply_adds(anyrank, folder)
        print("| recompute | plain | recomputed | ratio | of multiply-adds | difference |\n|---|---|---|---|---|---|")
        for what in ("selective", "full"):
            rows = result(anyrank, "bench", "step", folder, "--tp", 1, "--recompute", what, "--numerics", "native",
                          "--batch", BATCH, "--seq", SEQ, "--repetitions", REPETITIONS, "--threads", 1)["rows"]
            without, with_it = (row["seconds"] for row in rows)
            predicted = multiply_adds(anyrank, folder, "--recompute", what) / plain
            ratio = with_it / without
            print(f"| {what} | {1e3 * without:.1f} ms | {1e3 * with_it:.1f} ms | {ratio:.3f} | {predicted:.3f} | "
                  f"{100 * (ratio / predicted - 1):+.1f} % |")


if __name__ == "__main__":
    main()
