#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks the GPU's kernels on purpose, one mistake at a time, and expects the conformance suite to see each.

    tests/gpu/mutate.py [--jobs N] [--keep DIR] [NAME ...]

In a copy of the tree: each mistake is written into gpu/, the emulated device and conformance_main are built again, and
the suite is run. Prints a line for each and "caught/total"; exit status 1 where one was not caught, or no longer
applies. NAME: only mistakes whose description or file contains it. Takes some minutes; ./test --extended runs it.
"""

import argparse
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RUN_LIMIT_S, MEMORY_LIMIT = 300, 8 << 30

# What is wrong, the file, what stands there, what stands there instead.
MISTAKES = [
    ("add: an operand twice", "elementwise.cu", "ari_add32(a[i], b[i])", "ari_add32(a[i], a[i])"),
    ("bias_act: the first bias for every column", "elementwise.cu", "bias[i % cols]", "bias[0 * (i % cols)]"),
    ("act_backward: the activation in place of its slope", "elementwise.cu", "ari_dact32(act, x[i])",
     "ari_act32(act, x[i])"),
    ("dropout: the wrong lane of Philox", "elementwise.cu", "bits[lane] >= which.threshold",
     "bits[lane ^ 1u] >= which.threshold"),
    ("softmax: the window one key too long", "attention.cu", "query - window + 1", "query - window"),
    ("softmax: a causal query does not see itself", "attention.cu", "(causal ? query + 1 : s)",
     "(causal && query > 0 ? query : s)"),
    ("softmax: the mask of another head", "attention.cu", "head_start + head", "head"),
    ("softmax: the scale after the mask", "attention.cu",
     "m.additive ? ari_add32(scaled, m.additive[key]) : scaled",
     "m.additive ? ari_mul32(ari_add32(in[key], m.additive[key]), scale) : scaled"),
    ("softmax_backward: masked places keep their gradient", "attention.cu",
     "m.sees(key) ? ari_attention_ds(pr[key], dp[key], dot, scale) : 0.0f",
     "ari_attention_ds(pr[key], dp[key], dot, scale)"),
    ("rope: backward turns forward", "attention.cu", "^ flip);", "^ (0u * flip));"),
    ("norm_forward: a rounding dropped", "norm.cu", "static_cast<double>(deviation<centred>(in[j], m));",
     "static_cast<double>(in[j]) - m;"),
    ("norm_backward: two means swapped", "norm.cu", "ari_layernorm_dx(down, mean_g, mean_product, at, r)",
     "ari_layernorm_dx(down, mean_product, mean_g, at, r)"),
    ("row sums: one bit less", "row_sum.h", "ari_rowsum_value(row_integer(b, n, e, p, term), e, p)",
     "ari_rowsum_value(row_integer(b, n, e, p - 1, term), e, p - 1)"),
    ("ce_backward: the target's neighbour", "loss.cu", "static_cast<int64_t>(j) == at,",
     "static_cast<int64_t>(j) == at + 1,"),
    ("ce_terms: tokens that do not count, counted", "loss.cu", "valid[i] ? term : 0.0f", "term"),
    ("ce_max: each thread keeps a largest value of its own", "loss.cu",
     "const int32_t top = b.max(v_local, [&](size_t j) { return ari_key32(x[j]); });",
     "int32_t top = INT32_MIN;\n        b.each(v_local, [&](size_t j) { top = ari_key32(x[j]) > top ? ari_key32(x[j]) : "
     "top; });"),
    ("ce_sum: threads part at a value of their own", "loss.cu", "const int64_t total = row_integer(",
     "bool mine = false;\n        b.each(1, [&](size_t) { mine = true; });\n        if (mine)\n            "
     "b.each(1, [&](size_t) { sum[b.index] = 0; });\n        const int64_t total = row_integer("),
    ("rows_in_range: one row too many", "embedding.cu", "row < count", "row <= count"),
    ("combine: the other ranks in reverse", "combine.cu", "N::combined(op, sum, in[k][i])",
     "N::combined(op, sum, in[n - k][i])"),
    ("sum_squares: the upper half twice", "optimizer.cu", "i == 0 ? high : low", "i == 0 ? high : high + 0 * low"),
    ("round_bits: a bit less", "rounding.cu", "ari_f32_to_bits(*x.at(p), bits)", "ari_f32_to_bits(*x.at(p), bits - 1)"),
    ("narrow_bf16: cut off in place of rounded", "rounding.cu", "y[i] = ari_bf16_of_f32(x[i]);",
     "y[i] = static_cast<uint16_t>(ari_bits32(x[i]) >> 16);"),
    ("take_bf16: the condition the wrong way round", "rounding.cu", "ari_bits32(rounded) != ", "ari_bits32(rounded) == "),
    ("copy_strided: a corner of each tile forgotten", "strided.cu", "const size_t r = i / side, c = i % side;\n            if (",
     "const size_t r = i / side, c = i % side;\n            if (i + 1 < side * side && "),
    ("acc_add: a row that is its own is skipped", "accumulator.cu", "for (size_t w = own / 32; w < words; w++)",
     "for (size_t w = own / 32 + 1; w < words; w++)"),
    ("acc_add: the last part is not merged", "accumulator.cu", "for (size_t k = 0; k < count; k++) {\n            const exact_sums",
     "for (size_t k = 0; k + 1 < count; k++) {\n            const exact_sums"),
    ("sum_rows_f32: rows in another order", "accumulator.cu", "e.add(tile[r * COLUMNS + col]);",
     "e.add(tile[(count - 1 - r) * COLUMNS + col]);"),
    ("col_exponents: one of eight runs forgotten", "exponents.cu", "for (size_t s = 1; s < SPLIT; s++)",
     "for (size_t s = 1; s + 1 < SPLIT; s++)"),
    ("row_exponents: the shift with the wrong sign", "exponents.cu", "ari_contract_shift(c[at * x.shape[3] + k], sign)",
     "ari_contract_shift(c[at * x.shape[3] + k], -sign)"),
    ("pack: the top digit cut to four bits", "pack.cu", "r.d[3] = q;", "r.d[3] = q & 15;"),
    ("pack: columns of the first matrix for all", "pack.cu", "c[at * x.shape[3] + k]", "c[k]"),
    ("imma16: a digit's weight halved", "sums.h", "p[5] * 128", "p[5] * 64"),
    ("imma10: a Karatsuba sum without its high part", "sums.h", "(both - high - low) * 128", "(both - low) * 128"),
    ("gemm_round: the bias missing", "gemm_exact.cu", "FINISH && bias ? ari_add32(value, bias[col]) : value", "value"),
    ("gemm_acc: the last matrix missing", "gemm_exact.cu", "for (size_t g = 0; g < x.t.matrices; g++) {",
     "for (size_t g = 0; g + 1 < x.t.matrices; g++) {"),
    ("round_i64: another row's exponent", "gemm_exact.cu", "const size_t row = start / n + b.index / chunks",
     "const size_t row = start / n + 0 * b.index / chunks"),
    ("gemm_f32: what is added to forgotten", "gemm_native.cu", "copy_of(d, q, &copied, &of_c, c, add)",
     "copy_of(d, q, &copied, &of_c, c, false)"),
    ("gemm_f32: a column's line for a transposed operand", "gemm_native.cu", "s = {s.n, s.m, s.k, s.batch};",
     "s = {s.m, s.n, s.k, s.batch};"),
]


def command(arguments, limit=None, **more):
    """(exit status, output); status 124 where the limit passed."""
    try:
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              timeout=limit, check=False, stdin=subprocess.DEVNULL, **more)
    except subprocess.TimeoutExpired as error:
        return 124, error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
    return done.returncode, done.stdout


def copy_tree(to):
    """What git tracks or would track."""
    status, names = command(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    paths = [ROOT / name for name in names.splitlines()] if status == 0 else [
        path for path in ROOT.rglob("*") if path.is_file() and path.relative_to(ROOT).parts[0] not in ("build", ".git")]
    for path in paths:
        if path.is_file():
            target = to / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def configure(tree):
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DANYRANK_CUDA=OFF", "-DANYRANK_MPI=OFF", "-DANYRANK_OPENMP=OFF"]
    if shutil.which("ninja"):
        options.append("-GNinja")
    if shutil.which("ccache"):
        options += ["-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    return command(["cmake", "-S", tree, "-B", tree / "build", *options])


def build(tree, jobs):
    return command(["cmake", "--build", tree / "build", "-j", str(jobs), "--target", "conformance_main"])


def suite(tree):
    """Runs it; a mistake may make a kernel ask for much memory or for ever."""
    def limits():
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return command([tree / "build/tests/conformance_main"], RUN_LIMIT_S, preexec_fn=limits)


def last_line(output):
    lines = output.strip().splitlines()
    return lines[-1] if lines else "no output"


def trial(tree, mistake, jobs):
    """(caught, what to say)."""
    _, name, old, new = mistake
    path = tree / "gpu" / name
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        return False, f"does not apply: gpu/{name} has {text.count(old)} times '{old}'"
    try:
        path.write_text(text.replace(old, new), encoding="utf-8")
        status, output = build(tree, jobs)
        if status != 0:
            errors = [line for line in output.splitlines() if "error" in line] or [last_line(output)]
            return False, "does not compile: " + errors[0]
        status, output = suite(tree)
    finally:
        path.write_text(text, encoding="utf-8")
    if status == 0:
        return False, "NOT CAUGHT: " + last_line(output)
    if status < 0 or status == 124:
        return True, f"the suite ended with status {status}"
    seen = [line.split()[0] for line in output.splitlines() if line.split()[-1:] in (["DIFFERS"], ["bound)"])
            and "DIFFERS" in line]
    return status == 1, "seen in " + ", ".join(seen) if seen else last_line(output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--keep", metavar="DIR", help="make the copy there, and leave it")
    o = parser.parse_args()
    chosen = [m for m in MISTAKES if not o.names or any(name in m[0] or name in m[1] for name in o.names)]
    tree = pathlib.Path(o.keep or tempfile.mkdtemp(prefix="anyrank-mutate-")).resolve()
    caught = 0
    try:
        copy_tree(tree)
        status, output = configure(tree)
        if status == 0:
            status, output = build(tree, o.jobs)
        if status == 0:
            status, output = suite(tree)
        if status != 0:
            print(output[-4000:])
            print(f"the suite does not pass before anything is broken (status {status})")
            return 1
        print("unbroken: " + last_line(output), flush=True)
        for mistake in chosen:
            start = time.monotonic()
            seen, what = trial(tree, mistake, o.jobs)
            caught += seen
            print(f"{'caught' if seen else 'MISSED':7}{mistake[0]} ({time.monotonic() - start:.0f} s): {what}", flush=True)
    finally:
        if not o.keep:
            shutil.rmtree(tree, ignore_errors=True)
    print(f"mistakes in the GPU's kernels: {caught}/{len(chosen)} caught")
    return 0 if chosen and caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
