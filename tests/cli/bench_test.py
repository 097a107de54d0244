#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of `anyrank bench` from outside: the JSON rows of every benchmark and what it refuses. How fast anything is, is
not tested: measured.md tells it.

    tests/cli/bench_test.py [BINARY] [unittest options]

BINARY (or the environment variable ANYRANK) is another build; default build/anyrank.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMMAND = os.environ.get("ANYRANK", str(ROOT / "build/anyrank"))


def bench(*arguments):
    return subprocess.run([COMMAND, "bench", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=1800)


class Bench(unittest.TestCase):
    def rows(self, *arguments, head="", key="rows"):
        """The rows of a benchmark, in whose text the head of the table says `head`."""
        with tempfile.TemporaryDirectory(prefix="anyrank-bench-") as folder:
            path = pathlib.Path(folder) / "rows.json"
            done = bench(*arguments, "--json", str(path))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(head, done.stdout.splitlines()[0])
            result = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual((result["tool"], result["command"], result["what"]), ("anyrank", "bench", arguments[0]))
        machine = result["machine"]
        self.assertIn(f"kernels {machine['kernels']}: {machine['reason']}\n", done.stdout)
        info = subprocess.run([COMMAND, "info"], capture_output=True, text=True, check=True, timeout=600).stdout
        for said in ("cpu", "features", "blas", "kernels", "reason"):
            self.assertIn(machine[said], info)
        return result[key]

    def refused(self, *arguments, says):
        done = bench(*arguments)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(says, done.stderr)
        self.assertEqual(done.stdout, "")

    def positive(self, row, *keys):
        for key in keys:
            self.assertIsInstance(row[key], (int, float), key)
            self.assertGreater(row[key], 0, key)

    def test_a_block_native_and_exact(self):
        rows = self.rows("block", "--batch", "1", "--seq", "8", "--repetitions", "1", head="of native")
        # Weights that every token meets, those of an expert, experts, the rows of each, other parameters, heads. GPT-2's
        # others are the biases and the norms' offsets.
        blocks = {"gpt2": (12 * 768 * 768, 0, 0, 0, 768 * 13, 12),
                  "llama": (4 * 768 * 768 + 3 * 768 * 2048, 0, 0, 0, 768 * 2, 12),
                  "mixtral": (512 * (2 * 512 + 2 * 128 + 8), 3 * 512 * 1792, 8, 2, 512 * 2, 8),
                  "qwen3-moe": (512 * (2 * 512 + 2 * 64 + 128), 3 * 512 * 192, 128, 1, 512 * 2 + 64 * 2, 8)}
        self.assertEqual([(row["block"], row["numerics"]) for row in rows],
                         [(name, numerics) for name in blocks for numerics in ("native", "exact")])
        for row in rows:
            weights, expert, experts, each, others, heads = blocks[row["block"]]
            self.assertEqual((row["batch"], row["seq"], row["spread"]), (1, 8, 0))
            self.assertEqual(row["parameters"], weights + experts * expert + others)
            self.positive(row, "seconds", "gflops", "gemm_fraction", "over_native")
            # 2*3*tokens*parameters of the weights, and six products of [8, 8, 64] for each head.
            operations = 6 * 8 * weights + 6 * experts * each * expert + 6 * 2 * heads * 8 * 8 * 64
            self.assertAlmostEqual(row["gflops"] * row["seconds"] * 1e9 / operations, 1, places=6)
        for row in rows[0::2]:
            self.assertEqual(row["over_native"], 1)

    def test_a_block_in_another_precision_beside_fp32(self):
        for precision, exact in (("bf16", ["exact"]), ("tf32", [])):
            rows = self.rows("block", "llama-demo", "--batch", "1", "--seq", "2", "--repetitions", "1",
                             "--precision", precision)
            self.assertEqual([(row["numerics"], row["precision"]) for row in rows],
                             [("native", "f32"), ("exact", "f32"), *((n, precision) for n in ["native", *exact])])
            self.assertEqual(len({row["bits"] for row in rows if row["numerics"] == "exact"}), 1 + len(exact))

    def test_a_product_and_its_parts(self):
        bits = set()
        for device, apart in (("cpu", False), ("emulated", True)):
            rows = self.rows("gemm", "--m", "40", "--n", "24", "--k", "16", "--device", device, "--repetitions", "1",
                             head="weights prepared")
            self.assertEqual([(row["m"], row["n"], row["k"], row["batch"]) for row in rows], [(40, 24, 16, 1)])
            self.positive(rows[0], "exact_over_native", "exact_over_native_prepared", "bf16_over_native", "pack_seconds",
                          "products_seconds", *(["sums_seconds"] if apart else []))
            self.assertEqual(rows[0]["sums_seconds"] == "NaN", not apart)
            bits.add(rows[0]["bits"])
        self.assertRegex(" ".join(bits), "^[0-9a-f]{64}$")

    def test_the_slots_of_a_block(self):
        bits = {"native": set(), "exact": set()}  # those of native numerics are each library's own
        for device in ("cpu", "emulated"):
            command = ["block", "llama-demo", "--batch", "1", "--seq", "2", "--repetitions", "1", "--device", device]
            for row in self.rows(*command):
                bits[row["numerics"]].add(row["bits"])
            rows = self.rows(*command, "--profile", key="profile")
            calls = {(row["numerics"], row["slot"], row["part"]): row["calls"] for row in rows}
            # Of each of 7 weights Y, dX and dW, and 6 products of attention; the norms and the residuals.
            self.assertEqual(calls["native", "gemm_f32", None], 7 * 3 + 6 + 1)
            for numerics in ("native", "exact"):
                self.assertEqual([calls[numerics, slot, None] for slot in ("norm_forward", "gated_backward", "add")],
                                 [2, 1, 2])
                whole = [row for row in rows if row["numerics"] == numerics and row["part"] is None]
                self.assertEqual(whole[-1]["slot"], "between slots")
                self.assertAlmostEqual(sum(row["share"] for row in whole), 1, places=6)
                self.assertEqual([row["seconds"] for row in whole[:-1]],
                                 sorted((row["seconds"] for row in whole[:-1]), reverse=True))
            self.assertEqual(calls["exact", "gemm_acc", None], 7)
            self.assertEqual(("exact", "gemm_acc", "int8 products") in calls, device == "emulated")
        self.assertRegex(" ".join(bits["exact"]), "^[0-9a-f]{64}$")

    def test_kernels_beside_a_copy_of_as_many_bytes(self):
        for device in ("cpu", "emulated"):
            rows = self.rows("kernels", "--m", "5", "--n", "33", "--repetitions", "1", "--device", device,
                             head="times a copy")
            found = {(row["kernel"], row["dtype"]): row["bytes_per_element"] for row in rows}
            self.assertEqual(len(found), len(rows))
            self.assertEqual({name: found[name, "f32"] for name in ("LayerNorm backward", "AdamW", "quantisation",
                                                                    "rounding of int64 sums", "accumulator: value")},
                             {"LayerNorm backward": 20, "AdamW": 28, "quantisation": 8, "rounding of int64 sums": 12,
                              "accumulator: value": 21})
            self.assertEqual(found["add", "bf16"], 6)
            for row in rows:
                self.assertEqual((row["rows"], row["cols"]), (5, 33))
                self.positive(row, "seconds", "gbps", "over_copy")
                self.assertAlmostEqual(row["gbps"] * row["seconds"] * 1e9 / (row["bytes_per_element"] * 5 * 33), 1,
                                       places=6)
        self.refused("kernels", "--m", "5", "--n", "1", says="two columns")

    def test_without_a_cluster_no_virtual_time_passes(self):
        rows = self.rows("ddp", "stack-demo", "--batch", "2", "--seq", "4", "--repetitions", "1")
        self.assertEqual({row["virtual_seconds"] for row in rows}, {"NaN"})

    def test_a_step_with_and_without_buckets(self):
        rows = self.rows("ddp", "stack-demo", "--dp", "2", "--batch", "2", "--seq", "8", "--repetitions", "1",
                         "--cluster", "inside=100us:1GB/s flops=1T", "--paced")
        self.assertEqual(len(rows), 13)
        self.assertEqual((rows[0]["ddp"], rows[0]["bucket_bytes"], rows[0]["over_alone"]), (False, None, 1))
        self.assertEqual((rows[0]["all_reduces"], rows[0]["bytes"]), (0, 0))
        for row in rows[1:]:
            self.positive(row, "seconds", "over_alone", "buckets", "bytes")
            # Each all-reduce of two ranks is two steps of a link; a busy machine takes longer, never less.
            self.assertGreaterEqual(row["virtual_seconds"], row["all_reduces"] * 2e-4 if row["mode"] == "eager" else 0)
            if row["mode"] == "eager":
                self.assertGreaterEqual(row["seconds"], row["all_reduces"] * 2e-4)
            self.assertEqual(row["bytes"], rows[1]["bytes"])  # buckets change messages, not bytes
            # Two more than buckets: the count of targets, and the loss.
            self.assertEqual(row["all_reduces"], row["buckets"] + 2)
        self.assertEqual([row["mode"] for row in rows[1:3]], ["eager", "overlap"])
        self.assertGreater(rows[1]["buckets"], rows[-1]["buckets"])

    def test_an_all_reduce_in_every_algorithm_and_type(self):
        for algorithm in ("auto", "direct", "ring", "last"):
            rows = self.rows("allreduce", "--ranks", "3", "--bytes", "1032", "--algorithm", algorithm,
                             "--repetitions", "2")
            self.assertEqual([(row["ranks"], row["bytes"], row["numerics"], row["algorithm"]) for row in rows],
                             [(3, 1032, "f32", algorithm), (3, 1032, "i64", algorithm)])
            for row in rows:
                self.assertEqual(set(row), {"ranks", "bytes", "numerics", "algorithm", "seconds", "bus_gbps",
                                            "over_copy", "copy_seconds", "copy", "spread"})
                self.positive(row, "seconds", "bus_gbps", "over_copy", "copy_seconds", "spread")
                self.assertIn(row["copy"], ("memcpy", "streaming stores", "rep movsb"))
                self.assertAlmostEqual(row["bus_gbps"] * row["seconds"] * 1e9 / (4 / 3 * 1032), 1, places=6)

    def test_an_all_reduce_between_every_number_of_ranks(self):
        rows = self.rows("allreduce", "--bytes", "64", "--dtype", "i64", "--repetitions", "1", head="times a copy")
        self.assertEqual([(row["ranks"], row["bytes"], row["numerics"], row["algorithm"], row["spread"])
                          for row in rows], [(n, 64, "i64", "auto", 0) for n in (2, 4, 8)])
        for row in rows:
            self.assertAlmostEqual(row["over_copy"] * row["copy_seconds"] / row["seconds"], 1, places=6)

    def test_refusals(self):
        self.refused("allreduce", "--bytes", "1026", "--dtype", "f32", says="1026 bytes are no whole number")
        self.refused("allreduce", "--bytes", "1028", "--dtype", "i64", says="elements of 8 bytes")
        self.refused("allreduce", "--ranks", "1", says="--ranks")
        self.refused("allreduce", "--dtype", "f16", says="f32")
        self.refused("allreduce", "--algorithm", "tree", says="auto")
        self.refused("allreduce", "llama-demo", says="has no use for a model")
        self.refused("blocks", says="there is no benchmark 'blocks'")
        self.refused("gemm", "llama-demo", says="has no use for a model")
        for what, options in (("gemm", ("--ranks", "--seq", "--dp")), ("kernels", ("--k", "--seq")),
                              ("block", ("--n", "--ranks", "--dp")), ("ddp", ("--k", "--ranks")),
                              ("allreduce", ("--batch", "--seq", "--m"))):
            for option in options:
                self.refused(what, option, "4", says=f"bench {what} has no use for {option}: it is for bench ")
        self.refused("gemm", "--dtype", "f32", says="it is for bench allreduce")
        self.refused("gemm", "--algorithm", "ring", says="it is for bench allreduce")
        self.refused("block", "--numerics", "exact", says="it is for bench ddp")
        self.refused("ddp", "--precision", "bf16", says="it is for bench block")
        self.refused("allreduce", "--device", "emulated", says="--device")
        self.refused("block", "--seq", "0", says="--seq")
        self.refused("block", "llama-demo", "--size", "large", says="--size is of its own blocks")
        self.refused("ddp", "--size", "large", says="it is for bench block")
        self.refused("gemm", "--profile", says="it is for bench block")
        self.refused("block", "--timeout", "30", says="it is for bench ddp and allreduce")
        self.refused("ddp", "--paced", says="give --cluster SPEC too")
        self.refused("ddp", "no-such-model", says="no-such-model")
        self.refused("ddp", "llama-demo", "--tp", "2", says="--tp")
        self.refused("ddp", "llama-3.1-405b", says="this would take about ")
        self.refused("ddp", "llama-demo", "--paced", says="cluster")
        self.refused("block", "llama-demo", "--cluster", "h100", says="bench ddp")
        self.refused("ddp", "llama-demo", "--cluster", "nonsense", says="nonsense")


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and os.access(sys.argv[1], os.X_OK):
        COMMAND = sys.argv.pop(1)
    unittest.main()
