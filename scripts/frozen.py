#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the command says, kept before a change of its inside and compared after it:

    scripts/frozen.py record BINARY FOLDER [WORD ...]   runs the cases (those with such a WORD in their name,
                                                        a regular expression)
    scripts/frozen.py compare A B                       tells which files of two records differ, and where
    scripts/frozen.py causes A B                        tells which tensors have another cause; a folder may also hold
                                                        what tests/pytorch/trial.py --json writes

A case is one or more commands in the sources' folder, TMP standing for an empty folder of the case. Kept are standard
output, standard error, exit status and the files in TMP: text as it is, the rest as its SHA-256. MASKS hides times and
what else differs between two runs on one machine. The cases: every subcommand, family, axis and schedule; every fault
with cause and evidence, in the layout in which it matters and in one of `grads`; corrupted dumps; the short rows of
bits.tsv; what is refused.
"""

import array
import collections
import concurrent.futures
import difflib
import hashlib
import json
import os
import pathlib
import re
import shlex
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = "tests/golden"
GQA, GPT2 = f"{GOLDEN}/llama-gqa-tiny", f"{GOLDEN}/gpt2-tiny"
SMALL = "--steps 2 --batch 4 --seq 16"


def of_two(text):
    """Which of the ranks that disagree is told, and first, is chance."""
    return " ".join(sorted(re.findall(r"[\w.]+", re.sub(r"\branks? \d+(?:, \d+| and \d+|-\d+)*", "rank", text))))


# (what is hidden, by what): in each output and each text file, in this order. What `plan` predicts is no measured time.
TIME = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
MASKS = [
    (re.compile(rf'("(?:seconds|\w+_seconds|tokens_per_second|pid)": ?){TIME}'), r"\1TIME"),
    (re.compile(rf"\b{TIME} (?:ns|us|ms|s|min|h)\b"), "TIME"),
    (re.compile(rf"\b{TIME}k? tokens/s"), "TOKENS/s"),
    (re.compile(r"^( +\d+(?: +[\d.e+-]+){3}) +\d+$", re.MULTILINE), r"\1 TOKENS/s"),  # of a step of train
    (re.compile(r"rank \d+ returned while rank \d+ waits"), "a rank returned while another waits"),
    (re.compile(r'\branks? [\d, and-]+ disagree(?:[^"\\\n]|\\.)*'), lambda match: of_two(match.group())),
    (re.compile(r"^ +rank  +last finished .*\n(?: +[-\d, ]+  .*\n)*", re.MULTILINE), "WHERE EACH RANK IS\n"),
    (re.compile(r'("input": ")[0-9a-f]{64}'), r"\1HASH"),  # of names and times of files
    (re.compile(r"(measured: )\d+\.\d+"), r"\1NUMBER"),
    (re.compile(r"(?<=\S) {2,}"), "  "),  # columns are as wide as their times
]
AS_IT_IS = ("plan", "lint", "help")  # cases whose times are predicted
# Files whose content is by the clock.
CLOCKED = re.compile(r"trace\.\w+$")

# --- the cases --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "tp2": "--tp 2", "tp2-sp": "--tp 2 --sp", "tp2-sp-keep": "--tp 2 --sp --keep-gathered",
    "tp2-sp-overlap": "--tp 2 --sp --overlap 2", "dp2": "--dp 2", "dp2-eager": "--dp 2 --bucket-mode eager",
    "dp2-unused": "--dp 2 --find-unused --bucket-bytes 4096", "cp2": "--cp 2", "cp4-zigzag": "--cp 4 --zigzag",
    "cp2-ulysses": "--cp 2 --cp-inner 2", "cp4-mixed": "--cp 4 --cp-inner 2 --zigzag", "pp2": "--pp 2",
    "pp2-gpipe": "--pp 2 --schedule-pp gpipe --micro-batches 2",
    "pp2-1f1b": "--pp 2 --schedule-pp 1f1b --micro-batches 4",
    "pp2-zero-bubble": "--pp 2 --schedule-pp zero-bubble --micro-batches 2",
    "dp2-zero1": "--dp 2 --zero 1", "dp2-zero2": "--dp 2 --zero 2 --micro-batches 2", "dp2-zero3": "--dp 2 --zero 3",
    "dp4-replicate": "--dp 4 --zero 2 --dp-replicate 2", "micro": "--micro-batches 2 --forward-first",
    "recompute": "--tp 2 --recompute full --dropout 0.1", "selective": "--tp 2 --sp --recompute selective",
    "row-column": "--tp 2 --mlp-order row-column", "ring": "--tp 2 --dp 2 --collectives ring",
    "all": "--tp 2 --sp --cp 2 --dp 2 --zero 3",
    "four": "--tp 2 --cp 2 --zigzag --pp 2 --dp 2 --micro-batches 2 --zero 1",
}

HELP = [f"{name} --help" for name in ("", "check", "grads", "train", "verify", "plan", "lint", "bugs",
                                      "causes", "info")]

REFUSED = """
frobnicate
--frobnicate
check --frobnicate
check no-such-model
check tests/golden/gpt2-tiny --tp 5
check tests/golden/llama-gqa-tiny --tp 2 --tp
check tests/golden/llama-gqa-tiny --cp 3 --seq 17 --zigzag
check tests/golden/llama-gqa-tiny --cp 2 --cp-inner 3
check tests/golden/llama-gqa-tiny --pp 9
check tests/golden/llama-gqa-tiny --pp 2 --stages 3,3
check tests/golden/llama-gqa-tiny --schedule-pp gpipe
check tests/golden/llama-gqa-tiny --pp 2 --schedule-pp nonsense
check tests/golden/llama-gqa-tiny --virtual-stages 2
check tests/golden/llama-gqa-tiny --sp
check tests/golden/llama-gqa-tiny --overlap 2
check tests/golden/llama-gqa-tiny --zigzag
check tests/golden/llama-gqa-tiny --dp 2 --zero 4
check tests/golden/llama-gqa-tiny --dp 2 --zero 1 --dp-replicate 3
check tests/golden/llama-gqa-tiny --inject nonsense
check tests/golden/llama-gqa-tiny --numerics native --precision f64
check tests/golden/llama-gqa-tiny --device abacus
check tests/golden/llama-gqa-tiny --net-fault nonsense
check tests/golden/llama-gqa-tiny --documents 0
check tests/golden/llama-gqa-tiny --transport mpi --tp 2
train tests/golden/llama-gqa-tiny --data no-such-file
train --resume no-such-folder
train tests/golden/llama-gqa-tiny --lr -1
train tests/golden/llama-gqa-tiny --group nonsense
train tests/golden/llama-gqa-tiny --dp 2 --zero 3 --find-unused
grads tests/golden/llama-gqa-tiny
grads tests/golden/gpt2-tiny --input no-such-file --out TMP/out
grads --block no-such-folder --out TMP/out
verify
verify no-such-file other
verify tests/golden/gpt2-tiny/grads.safetensors tests/golden/gpt2-tiny/outputs.safetensors
verify README.md README.md
plan
plan llama-demo --gpus 0
plan llama-demo --gpus 4 --cluster nonsense
plan llama-demo --rank 9
plan llama-3-8b --tp 3
lint tests/golden/llama-gqa-tiny --zero 2 --dp 2
lint tests/golden/llama-gqa-tiny --pp 2 --micro-batches 1 --stages 1
bugs --curves
causes averaged_agian
info --frobnicate
"""

PLANS = [(f"tests/plans/{name}.json", model) for name, model in (
    ("gpt2", GPT2), ("gpt2-sequence", GPT2), ("llama", GQA), ("llama-local", GQA), ("llama-rep", GQA),
    ("llama-sequence", GQA), ("llama-sequence-loss", GQA), ("mistral-base", f"{GOLDEN}/mistral-window-tiny"),
    ("qwen2-attention-replicated", f"{GOLDEN}/qwen2-tiny"), ("qwen2-embedding", f"{GOLDEN}/qwen2-tiny"))]
FC, PROJ, MLP = ({"modules": f"transformer.h.*.{name}", "style": style} for name, style in
                 (("mlp.c_fc", "colwise"), ("mlp.c_proj", "rowwise"), ("mlp", "prepare")))
WRONG = {  # plans of GPT-2: what is refused, and what lint finds
    "column": {"transformer.h.*.mlp.c_fc": "colwise"}, "none": {}, "nonsense": {"transformer.h.*": "diagonal"},
    "last-terms": {"rules": [FC, PROJ | {"output": "P(sum)"}]},
    "first-terms": {"rules": [FC | {"style": "rowwise", "output": "P(sum)"}, PROJ | {"input": "R"}]},
    "input-summed": {"rules": [FC | {"input": "P(sum)"}, PROJ]},
    "middle-summed": {"rules": [FC | {"output": "R"}, PROJ | {"input": "P(sum)"}]},
    "output-summed": {"rules": [FC, PROJ | {"output": "R"}, MLP | {"output": ["P(sum)", "R"]}]},
}

# Their values are those of memory that happens to be there, others in each run.
UNSTABLE = {(fault, "--dp 2 --zero 3") for fault in ("bucket_not_packed", "stale_activation_reuse")}

GRADS = f"grads {GQA} --input {GQA}/batch.safetensors"
RUNS = {
    "check-default": ["check stack-demo --steps 1 --batch 2 --seq 16"],
    "check-sweep": [f"check {GQA} --sweep 4 --steps 1 --batch 4 --seq 8 --skip-f64"],
    "check-demos": ["check llama-demo --tp 2 --steps 1 --batch 2 --seq 8 --memory",
                    "check gpt2-demo --pp 2 --cp 2 --steps 1 --batch 2 --seq 8 --memory"],
    "check-scale": ["check qwen2.5-7b --scale 1/64 --tp 2 --steps 1 --batch 2 --seq 8 --skip-f64",
                    "check llama-3-8b --scale 1/64 --cp 2 --steps 1 --batch 2 --seq 8 --skip-f64"],
    "check-interleaved": ["check llama-demo --pp 2 --schedule-pp interleaved --virtual-stages 2 --micro-batches 2 "
                          "--steps 1 --batch 2 --seq 8 --skip-f64 --memory --json -"],
    "check-stages": ["check llama-demo --pp 2 --stages 3,1 --steps 1 --batch 2 --seq 8 --skip-f64 --memory"],
    "check-options": [f"check {GQA} --dp 2 --tp 2 --optimizer sgd --momentum 0.9 --nesterov --group *norm*:lr=0.5,decay=0 "
                      f"{SMALL} --json -",
                      f"check {GPT2} --tp 2 --optimizer adam --lr-schedule cosine --warmup 1 --documents 3 {SMALL}",
                      f"check {GQA} --cp 2 --label-smoothing 0.1 --z-loss 0.01 --dropout 0.1 --clip 0 {SMALL} --json -",
                      f"check {GQA} --tp 4 --steps 0 --batch 2 --seq 8", f"check {GQA} --tp 2 --list-tensors",
                      f"check {GQA} --tp 2 --gradcheck --steps 1 --batch 2 --seq 8 --seed 7"],
    "check-native": [f"check {GQA} --tp 2 --sp --numerics native {SMALL}",
                     f"check {GQA} --dp 2 --zero 2 --numerics native --precision bf16 {SMALL} --json -"],
    "check-plans": [f"check {model} --tp 2 --plan {plan} --steps 1 --batch 2 --seq 8 --skip-f64" for plan, model in PLANS],
    "check-cluster": [f"check {GQA} --tp 2 --dp 2 --cluster h100 --steps 1 --batch 2 --seq 8 --skip-f64 --json -"],
    "check-trace": [f"check {GQA} --tp 2 --dp 2 --steps 1 --batch 2 --seq 8 --skip-f64 "
                    "--trace TMP/trace.json"],
    "check-schedules": [f"check {GQA} --tp 2 --schedule 1..4 --steps 1 --batch 2 --seq 8 --skip-f64"],
    "check-net": [f"check {GQA} --tp 2 --net-fault 'corrupt rank 1 collective 14 transfer 0 bit 77' --verify-transfers "
                  "--steps 1 --batch 2 --seq 8 --skip-f64"],
    "check-dump": [f"check {GQA} --tp 2 --pp 2 --steps 1 --batch 2 --seq 8 --skip-f64 --dump TMP/dump",
                   f"check {GQA} --dp 2 --zero 3 --steps 1 --batch 2 --seq 8 --skip-f64 --dump TMP/zero"],
    "check-inject-text": ["check --inject column_dx_not_reduced --steps 1 --batch 2 --seq 8 --skip-f64",
                          "check --inject row_bias_every_rank", "check --inject pp_tied_not_summed --json -",
                          "check --inject zero_shards_misaligned", "check --inject attention_over_documents",
                          "check --inject collective_order_swapped --skip-f64 --schedule 3"],
    "train": [f"train {GQA} --steps 6 --batch 4 --seq 16 --tp 2 --save TMP/run --save-every 3",
              "train --resume TMP/run --dp 2 --zero 2 --steps 8 --save TMP/run --json -"],
    "train-pp": [f"train {GPT2} --steps 4 --batch 4 --seq 16 --pp 2 --micro-batches 2 --schedule-pp zero-bubble "
                 "--json -", "train stack-demo --steps 4 --batch 4 --seq 16 --cp 2 --zigzag --tp 2"],
    "train-zero": [f"train {GQA} --steps 4 --batch 4 --seq 16 --dp 4 --zero 3 --dp-replicate 2 --save TMP/run",
                   "train --resume TMP/run --tp 2 --steps 6 --json -"],
    "train-data": [f"train {GQA} --steps 3 --batch 2 --seq 16 --data README.md --pack --separator 10 --in-order "
                   "--optimizer sgd --momentum 0.9 --json -",
                   f"train {GQA} --steps 3 --batch 2 --seq 16 --numerics native --precision bf16 --loss-scale dynamic "
                   "--verify-every 1",
                   f"train {GQA} --steps 3 --batch 2 --seq 16 --dp 2 --inject dp_mean_of_means --verify-every 1"],
    "grads": [f"{GRADS} --out TMP/a --json -", f"{GRADS} --out TMP/b --dp 2 --tp 2 --per-rank --activations",
              "verify TMP/a/grads.safetensors TMP/b/ranks --common",
              "verify TMP/a/outputs.safetensors TMP/b/outputs.safetensors --json -"],
    "grads-layouts": [f"{GRADS} --out TMP/c --cp 2 --zigzag --per-rank --activations --json -",
                      f"{GRADS} --out TMP/d --pp 2 --dp 2 --zero 3 --per-rank --activations --json -",
                      f"{GRADS} --out TMP/e --cp 4 --cp-inner 2 --tp 2 --sp --per-rank --activations",
                      "verify TMP/c/ranks TMP/d/ranks --json - --html TMP/page.html",
                      "verify TMP/c/activations.safetensors TMP/e/ranks"],
    "grads-sensitivity": [f"{GRADS} --out TMP/s --sensitivity --sensitivity-of bf16-pure --json -",
                          f"{GRADS} --out TMP/n --numerics native --precision bf16 --tp 2",
                          "verify TMP/s/grads.safetensors TMP/n/grads.safetensors --sensitivity TMP/s/allowed.safetensors",
                          "verify TMP/s/grads.safetensors TMP/n/grads.safetensors --rtol 1e-3 --atol 1e-5 --json -",
                          "verify TMP/s/grads.safetensors TMP/n/grads.safetensors --ulp 4 --only *norm* --max-report 3"],
    "plan-search": ["plan llama-3-8b --gpus 8", "plan llama-3-8b --gpus 16 --batch 64 --seq 4096 --all --csv TMP/a.csv",
                    "plan llama-3-70b --gpus 64 --batch 128 --seq 8192 --cluster b200 --json -",
                    "plan llama-3-8b --gpus 16 --tp 2 --zero 3 --shared-links",
                    "plan gpt-22b --gpus 8 --table decision --no-flash", "plan qwen3-8b --gpus 8 --table scaling",
                    "plan gemma-2-9b --gpus 8 --table memory", "plan stack-4.8b --gpus 8 --top 3 --json -"],
    "plan-one": ["plan llama-3-70b --tp 8 --pp 4 --dp 2 --sp --batch 128 --seq 8192",
                 "plan llama-3-70b --tp 8 --pp 4 --dp 2 --sp --batch 128 --seq 8192 --json -",
                 "plan llama-3.1-405b --tp 8 --pp 16 --cp 2 --batch 64 --seq 8192 --schedule-pp interleaved --stages "
                 "4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,3,3,3,3,3,3,8 --json -",
                 "plan llama-3-8b --cp 8 --cp-inner 2 --zigzag --zero 3 --dp 8 --dp-replicate 2 --batch 16 --json -",
                 "plan gpt-530b --tp 8 --pp 35 --dp 1 --batch 280 --seq 2048"],
    "plan-pipeline": ["plan llama-3-8b --pipeline --pp 4 --schedule-pp zero-bubble --micro-batches 8",
                      "plan llama-3-8b --pipeline --pp 4 --schedule-pp interleaved --virtual-stages 2 --micro-batches 8 "
                      "--csv TMP/s.csv --json -",
                      "plan llama-3-8b --pipeline --pp 4 --schedule-pp TMP/s.csv --micro-batches 8"],
    "plan-flow": [f"plan {model} --flow --backward {layout} --batch 8 --seq 64 {form}" for model, layout, form in (
        ("llama-demo", "--tp 4 --sp", ""), ("llama-demo", "--tp 4 --sp --dp 2 --zero 2", "--json -"),
        ("gpt2-demo", "--cp 4 --zigzag", "--numerics native"), ("llama-demo", "--cp 4 --cp-inner 2", "--json -"),
        ("stack-demo", "--pp 2 --micro-batches 2 --rank 1", "--each-layer"),
        ("gpt2-demo", "--pp 2 --schedule-pp zero-bubble --micro-batches 2 --tp 2", "--json -"),
        ("llama-demo", "--dp 4 --zero 3 --dp-replicate 2", "--markdown"), (GOLDEN + "/gemma2-tiny", "--tp 2", ""),
        ("llama-demo", "--tp 2 --sp --overlap 2 --recompute selective --dp 2", "--json -"),
        ("gpt2-demo", "--tp 2 --recompute full --recompute-every 2 --dropout 0.1", "--json -"))],
    "lint": [f"lint {model} {layout} {form}" for model, layout, form in (
        ("llama-demo", "--tp 4 --sp", ""), ("llama-demo", "--tp 2 --dp 2 --zero 1 --micro-batches 2", "--json -"),
        ("gpt2-demo", "--cp 4 --zigzag", "--json -"), ("stack-demo", "--pp 2 --micro-batches 2", ""),
        ("llama-3-70b", "--tp 8 --sp --overlap 4 --recompute selective", "--json -"),
        ("llama-demo", "--cp 4 --cp-inner 2 --tp 2", "--json -"),
        ("llama-demo", "--pp 2 --schedule-pp zero-bubble --micro-batches 2", "--json -"))] + [
        f"lint {model} --tp 2 --plan {plan} --json -" for plan, model in PLANS],
    "lint-wrong": [f"lint {GPT2} --tp 2 --plan INPUT/{name}.json {form}" for name in WRONG for form in ("", "--json -")],
    "plan-plans": [f"plan {model} --flow --backward --tp 2 --batch 2 --seq 8 --plan {plan}" for plan, model in PLANS],
    "info": ["info --json -", "info"],
    "bugs": ["bugs", "bugs --json -"],
    "causes": ["causes", "causes averaged_again", "causes --json -"],
    "faults": ["bugs --run --json -"],
}


def cases(binary):
    """{name: its commands}."""
    faults = [fault["name"] for fault in told_by(binary, "bugs")["faults"]]
    table = {f"help-{command.split()[0]}": [command] for command in HELP}
    table["refused"] = REFUSED.strip().split("\n")
    for name, layout in LAYOUTS.items():
        table[f"check-llama-{name}"] = [f"check {GQA} {layout} {SMALL} --memory --json -"]
        table[f"check-gpt2-{name}"] = [f"check {GPT2} {layout} {SMALL} --skip-f64 --memory"]
    for folder in sorted(path.parent for path in (ROOT / GOLDEN).glob("*/config.json")):
        name = folder.name
        table[f"family-{name}"] = [f"check {GOLDEN}/{name} --tp 2 --steps 1 --batch 2 --seq 8 --skip-f64 --json -",
                                   f"plan {GOLDEN}/{name} --flow --tp 2 --batch 2 --seq 8",
                                   f"lint {GOLDEN}/{name} --tp 2 --sp --batch 2 --seq 8"]
    table.update(RUNS)
    rows = (line.split("\t") for line in (ROOT / "docs/evidence/bits.tsv").read_text(encoding="utf-8").splitlines())
    table["bits"] = [words_of_bits(command) for _, duration, command in rows if duration == "second"]
    for model, layout in ((GQA, "--tp 2 --sp --dp 2"), (GQA, "--cp 2 --zigzag"), (GPT2, "--pp 2 --micro-batches 2"),
                          (GPT2, "--dp 2 --zero 3"), (GQA, "--dp 2"), (GPT2, "--tp 2")):
        grads = f"grads {model} --input {model}/batch.safetensors --activations --out TMP"
        table["grads-faults-" + layout.replace("--", "").replace(" ", "")] = [f"{grads}/right"] + [
            command for fault in faults if (fault, layout) not in UNSTABLE for command in (
                f"{grads}/{fault} --inject {fault} {layout} --per-rank",
                f"verify TMP/right/activations.safetensors TMP/{fault}/ranks --json -")]
    for way, (_, rule) in ROUNDED.items():
        table["spoiled" + way] = [
            f"verify {GOLDEN}/{folder}/{file}.safetensors INPUT/{name}{way}.safetensors {options} {rule}--json -"
            for name, (folder, file, *_) in SPOILED.items() for options in ("", "--tp 4 --heads 8 --kv-heads 2")]
    return table


def told_by(binary, subcommand):
    process = subprocess.run([binary, subcommand, "--json", "-"], capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def words_of_bits(command):
    """A command of bits.tsv as it is typed."""
    kind, name, *rest = command.split()
    if kind != "grads":
        return command + " --json -"
    rest = " ".join(rest)
    if name.startswith("block-"):
        return f"grads --block {GOLDEN}/{name} {rest} --out TMP/{name} --json -"
    return f"grads {GOLDEN}/{name} --input {GOLDEN}/{name}/batch.safetensors {rest} --out TMP/{name} --json -"


# --- dumps that are spoiled -------------------------------------------------------------------------------------------

def times(factor, begin=0, end=1 << 30):
    return lambda rows, _: [[factor * x for x in row] if begin <= i < end else row for i, row in enumerate(rows)]


def entrywise(change):
    return lambda rows, _: [[change(x) for x in row] for row in rows]


def rows_from(place):
    """Row i gets what row place(i, rows) had."""
    return lambda rows, _: [rows[place(i, len(rows))] for i in range(len(rows))]


def columns_from(place):
    return lambda rows, _: [[row[place(i, len(row))] for i in range(len(row))] for row in rows]


def noise(i):
    """A fixed number of -1 to 1."""
    return ((i * 2654435761 + 12345) % 4294967296 * 1103515245 % 4294967296) / 2147483648 - 1


def zero_some(rows, every, rest=1.0):
    return [[0.0 if noise(i * len(row) + k) < 2 / every - 1 else rest * x for k, x in enumerate(row)]
            for i, row in enumerate(rows)]


def cut(x, mask):
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", x))[0] & mask))[0]


def one_changed(change):
    return lambda rows, _: rows[:3] + [[change(x) if k == 5 else x for k, x in enumerate(rows[3])]] + rows[4:]


def of_other(name):
    return lambda rows, tensors: rows_of(tensors[name])[:len(rows)]


def norm_of_parts(rows, _):
    size = len(rows[0]) // 4
    parts = [[row[begin:begin + size] for begin in range(0, len(row), size)] for row in rows]
    return [[x / (1e-6 + sum(y * y for y in part) / size) ** 0.5 for part in row for x in part] for row in parts]


def partial(rows, _):
    return [[0.25 * x + 0.43 * abs(x) * noise(i * len(row) + k) for k, x in enumerate(row)] for i, row in enumerate(rows)]


BLOCK0, BLOCK1 = "model.layers.0.", "model.layers.1."
GPT_BLOCK = "transformer.h.0."
LLAMA, GPT = "llama-gqa-tiny", "gpt2-tiny"
# name: (golden folder, file, tensor, what is done to its rows)
SPOILED = {
    "quarter": (LLAMA, "grads", BLOCK1 + "self_attn.o_proj.weight", times(0.25)),
    "four-times": (LLAMA, "grads", BLOCK1 + "input_layernorm.weight", times(4.0)),
    "negative": (LLAMA, "grads", BLOCK1 + "mlp.down_proj.weight", times(-1.0)),
    "loss-scale": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", times(65536.0)),
    "shard-thrice": (LLAMA, "grads", BLOCK1 + "self_attn.q_proj.weight", times(3.0, 16, 32)),
    "three-quarters": (LLAMA, "grads", BLOCK1 + "mlp.gate_proj.weight", times(0.75)),
    "odd-factor": (LLAMA, "grads", "model.norm.weight", times(0.731)),
    "each-shard": (LLAMA, "grads", BLOCK1 + "mlp.gate_proj.weight",
                   lambda rows, _: [[(0.5, 2.0, 1.5, 0.9)[i // 44] * x for x in row] for i, row in enumerate(rows)]),
    "zero-keys": (GPT, "grads", GPT_BLOCK + "attn.c_attn.weight",
                  lambda rows, _: [row[:64] + [0.0] * 64 + row[128:] for row in rows]),
    "constant": (LLAMA, "grads", BLOCK1 + "mlp.down_proj.weight", entrywise(lambda x: x + 0.01)),
    "absolute": (LLAMA, "grads", BLOCK1 + "mlp.down_proj.weight", entrywise(abs)),
    "clamped": (LLAMA, "grads", BLOCK1 + "mlp.down_proj.weight", entrywise(lambda x: min(max(x, -0.004), 0.004))),
    "one-flipped": (LLAMA, "grads", BLOCK1 + "mlp.down_proj.weight", one_changed(lambda x: x * 2.0 ** 16)),
    "nan": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", one_changed(lambda x: float("nan"))),
    "nan-row": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", times(float("nan"), 10, 11)),
    "infinite": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", times(float("inf"), 0, 44)),
    "bf16": (LLAMA, "model", BLOCK1 + "mlp.down_proj.weight", entrywise(lambda x: cut(x, 0xFFFF0000))),
    "tf32": (LLAMA, "model", BLOCK1 + "mlp.down_proj.weight", entrywise(lambda x: cut(x, 0xFFFFE000))),
    "int8": (LLAMA, "model", BLOCK1 + "mlp.down_proj.weight", entrywise(lambda x: round(x * 1000.0) / 1000.0)),
    "rotated": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", rows_from(lambda i, n: (i + n // 4) % n)),
    "repeated": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight",
                 rows_from(lambda i, n: i - n // 4 if n <= 4 * i < 2 * n else i)),
    "heads": (LLAMA, "model", BLOCK1 + "self_attn.q_proj.weight", rows_from(lambda i, n: (i - 8) % n)),
    "head-columns": (LLAMA, "grads", BLOCK1 + "self_attn.o_proj.weight", columns_from(lambda i, n: (i - 8) % n)),
    "rope-pairs": (LLAMA, "model", BLOCK1 + "self_attn.q_proj.weight",
                   rows_from(lambda i, n: i // 8 * 8 + i % 2 * 4 + i % 8 // 2)),
    "kv-head": (LLAMA, "model", BLOCK1 + "self_attn.k_proj.weight", rows_from(lambda i, n: i % 8)),
    "token-blocks": (LLAMA, "outputs", "hidden_states.1", rows_from(lambda i, n: i // 32 * 32 + (i + 8) % 32)),
    "tokens-dealt": (LLAMA, "outputs", "hidden_states.1",
                     rows_from(lambda i, n: i // 32 * 32 + i % 4 * 8 + i % 32 // 4)),
    "tokens-reversed": (LLAMA, "outputs", "hidden_states.1", rows_from(lambda i, n: i // 32 * 32 + 31 - i % 32)),
    "rank-order": (LLAMA, "outputs", "hidden_states.1", rows_from(lambda i, n: i // 8 % 2 * 32 + i // 16 * 8 + i % 8)),
    "tokens-shifted": (LLAMA, "outputs", "hidden_states.1",
                       lambda rows, _: [rows[i - 1] if i % 32 else [0.0] * 64 for i in range(64)]),
    "one-sample": (LLAMA, "outputs", "hidden_states.1", rows_from(lambda i, n: i if i < 32 else 32 + (i + 8) % 32)),
    "zigzag": (LLAMA, "outputs", "hidden_states.1",
               rows_from(lambda i, n: i // 32 * 32 + (0, 3, 1, 2)[i % 32 // 8] * 8 + i % 8)),
    "samples": (LLAMA, "outputs", "hidden_states.2", rows_from(lambda i, n: (i + 32) % n)),
    "qkv-one": (GPT, "model", GPT_BLOCK + "attn.c_attn.weight",
                columns_from(lambda i, n: i // 32 % 3 * 64 + i // 96 * 32 + i % 32)),
    "qkv-interleaved": (GPT, "model", GPT_BLOCK + "attn.c_attn.weight", columns_from(lambda i, n: i % 3 * 64 + i // 3)),
    "ids": (LLAMA, "model", "model.embed_tokens.weight", rows_from(lambda i, n: (i + 1) % n)),
    "transposed": (LLAMA, "grads", BLOCK1 + "self_attn.o_proj.weight",
                   lambda rows, _: [list(row) for row in zip(*rows)]),
    "moved-on": (LLAMA, "model", BLOCK1 + "mlp.up_proj.weight",
                 lambda rows, _: [row[5:] + (rows[i + 1] if i + 1 < len(rows) else row)[:5] for i, row in enumerate(rows)]),
    "two-rows": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", rows_from(lambda i, n: 1 - i if i < 2 else i)),
    "other-layer": (LLAMA, "model", BLOCK1 + "mlp.up_proj.weight", of_other(BLOCK0 + "mlp.up_proj.weight")),
    "other-module": (LLAMA, "model", BLOCK1 + "self_attn.k_proj.weight", of_other(BLOCK1 + "self_attn.v_proj.weight")),
    "gate-for-up": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", of_other(BLOCK1 + "mlp.gate_proj.weight")),
    "no-residual": (LLAMA, "outputs", "hidden_states.1",
                    lambda rows, tensors: [[x - y for x, y in zip(row, input_row)] for row, input_row in
                                           zip(rows, rows_of(tensors["hidden_states.0"]))]),
    "bias": (GPT, "outputs", "hidden_states.1",
             lambda rows, _: [[x + 0.3 * noise(k) for k, x in enumerate(row)] for row in rows]),
    "partial": (LLAMA, "grads", BLOCK1 + "self_attn.o_proj.weight", partial),
    "shard-new": (LLAMA, "model", BLOCK1 + "mlp.up_proj.weight",
                  lambda rows, _: rows[:44] + [[0.02 * noise(i * 64 + k) for k in range(64)] for i in range(44)] + rows[88:]),
    "dropout": (LLAMA, "outputs", "hidden_states.1", lambda rows, _: zero_some(rows, 10, 1 / 0.9)),
    "unscaled": (LLAMA, "outputs", "hidden_states.1", lambda rows, _: zero_some(rows, 10)),
    "third-tokens": (LLAMA, "outputs", "hidden_states.1",
                     lambda rows, _: [row if i % 3 else [0.0] * 64 for i, row in enumerate(rows)]),
    "zero-shard": (LLAMA, "model", BLOCK1 + "mlp.up_proj.weight", times(0.0, 88, 132)),
    "filled": (LLAMA, "model", BLOCK1 + "mlp.up_proj.weight",
               lambda rows, _: rows[:44] + [[1e30] * 64 for _ in range(44)] + rows[88:]),
    "norm-of-shard": (LLAMA, "outputs", "hidden_states.1", norm_of_parts),
    "loss-four": (LLAMA, "outputs", "loss", times(4.0)),
    "loss-vocabulary": (LLAMA, "outputs", "loss", entrywise(lambda x: x + 0.693147181)),
    "logits": (LLAMA, "outputs", "logits", times(0.5)),
    "nothing": (LLAMA, "grads", BLOCK1 + "mlp.up_proj.weight", times(1.0)),
}


def rows_of(tensor):
    shape, values = tensor
    row_size = shape[-1] if shape else 1
    return [list(values[i:i + row_size]) for i in range(0, len(values), row_size)]


def read(path):
    """{name: (shape, values)} of a .safetensors file of float32."""
    raw, tensors = path.read_bytes(), {}
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    for name, entry in json.loads(raw[8:begin]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            start, end = entry["data_offsets"]
            tensors[name] = entry["shape"], array.array("f", raw[begin + start:begin + end])
    return tensors


def write(path, tensors):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        raw = values.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def summed_otherwise(values):
    """As sums in another order leave it."""
    largest = 3e-6 * max(map(abs, values), default=0.0)
    return array.array("f", [x + largest * noise(i + len(values)) for i, x in enumerate(values)])


def in_bf16(values):
    """The nearest of 8 bits, ties to even."""
    bits = array.array("I", values.tobytes())
    return array.array("f", array.array("I", [u + 0x7FFF + (u >> 16 & 1) & 0xFFFF0000 for u in bits]).tobytes())


# What is done to every tensor before one is spoiled, and the rule under which that is no difference.
ROUNDED = {"": (lambda values: values, ""), "-rounded": (summed_otherwise, ""), "-bf16": (in_bf16, "--rtol 0.01 ")}


def write_inputs(folder, names):
    """The plans and dumps of these names."""
    for name in names & set(WRONG):
        (folder / f"{name}.json").write_text(json.dumps(WRONG[name]))
    clean = {}
    for name in sorted(names - set(WRONG)):
        way = next((way for way in ROUNDED if way and name.endswith(way)), "")
        model, file, tensor, change = SPOILED[name.removesuffix(way)]
        kind = model, file, way
        if kind not in clean:
            plain = read(ROOT / GOLDEN / model / f"{file}.safetensors")
            clean[kind] = {n: (shape, ROUNDED[way][0](x)) for n, (shape, x) in plain.items()}
        tensors = clean[kind]
        spoiled = array.array("f", [x for row in change(rows_of(tensors[tensor]), tensors) for x in row])
        write(folder / f"{name}.safetensors", tensors | {tensor: (tensors[tensor][0], spoiled)})


# --- record and compare -----------------------------------------------------------------------------------------------

def masked(text, name, places):
    for path, word in places.items():
        text = text.replace(path, word)
    for pattern, replacement in MASKS if not name.startswith(AS_IT_IS) else ():
        text = pattern.sub(replacement, text)
    return text


def content(path, name, places):
    """What is kept of a file that a command wrote."""
    if CLOCKED.search(path.name):
        return "by the clock"
    raw = path.read_bytes()
    try:
        raw = masked(raw.decode(), name, places).encode()
    except UnicodeDecodeError:
        pass
    return hashlib.sha256(raw).hexdigest()


def run_case(binary, name, commands, inputs, data):
    """The text of a case's record."""
    parts = []
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        places = {folder: "TMP", data: "DATA", str(inputs): "INPUT", str(ROOT): "ROOT", str(binary): "anyrank"}
        for command in commands:
            words = shlex.split(command.replace("TMP/", folder + "/").replace("INPUT/", f"{inputs}/"))
            process = subprocess.run([binary, *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
                                     check=False, env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}, timeout=1200)
            parts.append(f"$ anyrank {command}\n")
            for title, text in (("stdout", process.stdout), ("stderr", process.stderr)):
                parts.append(f"--- {title}\n" + masked(text.decode(errors="replace"), name, places) if text else "")
            parts.append(f"--- exit status {process.returncode}\n\n")
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.is_file():
                parts.append(f"{content(path, name, places)}  {path.relative_to(folder)}\n")
    return "".join(parts)


def record(binary, folder, words):
    binary = pathlib.Path(binary).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: commands for name, commands in cases(binary).items()
              if not words or any(re.search(word, name) for word in words)}
    data = told_by(binary, "info")["data_dir"]
    with tempfile.TemporaryDirectory(prefix="frozen-input-") as inputs:
        text = " ".join(command for commands in chosen.values() for command in commands)
        write_inputs(pathlib.Path(inputs), set(re.findall(r"INPUT/([\w-]+)\.", text)))

        def record_case(name):
            (folder / f"{name}.txt").write_text(run_case(binary, name, chosen[name], inputs, data), encoding="utf-8")
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(record_case, chosen))
    print(f"{sum(map(len, chosen.values()))} commands in {len(chosen)} files of {folder}")
    return 0


def compare(before, after):
    """Both folders' cases that both have, and the names that only a whole record may lack."""
    names = [{path.name for path in folder.glob("*.txt")} for folder in (before, after)]
    different = 0
    for name in sorted(names[0] & names[1]):
        texts = [(folder / name).read_text(encoding="utf-8").splitlines() for folder in (before, after)]
        if texts[0] != texts[1]:
            different += 1
            print("\n".join(list(difflib.unified_diff(*texts, str(before / name), str(after / name), n=2,
                                                      lineterm=""))[:60]))
    only = sorted(names[0] ^ names[1])
    print(f"{len(names[0] & names[1])} cases compared, {different} differ, {len(only)} in one record only"
          + (": " + " ".join(only) if 0 < len(only) <= 10 else ""))
    return 1 if different or not names[0] & names[1] else 0


# --- causes -----------------------------------------------------------------------------------------------------------

def findings(report, place):
    """{where: tensor and cause} of all that a report says; of what comes first its own, which decides."""
    found = {}
    if isinstance(report, list):
        for inner in report:
            found |= findings(inner, place)
    elif isinstance(report, dict):
        place = " ".join([place, *(report[key] for key in ("name", "case") if key in report)])
        if "cause" in report and "tensor" in report:  # those considered are of no tensor of their own
            found[f"{place}: {report['tensor']}"] = f"{report['cause']} {report.get('verdict', '')}".strip()
        for key, inner in report.items():
            part = findings(inner, place)
            found |= {f"{location} (first)": cause for location, cause in part.items()} if key.startswith(
                "first") else part
    return found


def findings_of(folder):
    """The findings of a record, and of the trial's report in it."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        found |= findings(json.loads(file.read_text(encoding="utf-8")), file.stem)
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8").replace(": TIME", ": 0")
        for command, report in re.findall(r"^\$ anyrank (.*)\n--- stdout\n(\{\n(?:.*\n)*?\})$", text, re.MULTILINE):
            found |= findings(json.loads(report), f"{file.stem} {command}")
    return found


def causes(before, after):
    old, new = findings_of(before), findings_of(after)
    changes = {location: f"{old.get(location, 'nothing')} -> {new.get(location, 'nothing')}" for location in old | new
               if old.get(location) != new.get(location)}
    for location, change in changes.items():
        print(f"{location}: {change}")
    for change, n in collections.Counter(changes.values()).most_common():
        print(f"{n:5} {change}")
    print(f"{len(old | new)} tensors, {len(changes)} with another cause")
    return 1 if changes or not old else 0


def main():
    verb, *rest = sys.argv[1:] or [""]
    if verb == "record" and len(rest) >= 2:
        return record(rest[0], pathlib.Path(rest[1]), rest[2:])
    if verb in ("compare", "causes") and len(rest) == 2:
        return (compare if verb == "compare" else causes)(*map(pathlib.Path, rest))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
