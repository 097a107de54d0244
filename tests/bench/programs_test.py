#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The programs of bench/ at small sizes: the rows of each, and what they refuse. How fast anything is, is not tested.

    tests/bench/programs_test.py [BINARY] [unittest options]

The programs are those beside BINARY, a command: in bench/ of its folder.
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, Case, start  # noqa: E402


def program(name, *arguments):
    return start([pathlib.Path(COMMAND).parent / "bench" / name, *arguments])


class Programs(Case):
    def result(self, name, *arguments):
        """The JSON of a program, whose columns the table on stdout has too."""
        path = self.folder / "rows.json"
        done = program(name, *arguments, "--json", path)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(path.read_text(encoding="utf-8"))
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0].split(), list(result["rows"][0]))
        self.assertEqual(lines[:-6].count(""), 2 if "profile" in result else 1)
        self.assertIn(f"kernels: {result['machine']['kernels']}", lines)
        self.assertEqual(result["what"], name)
        return result

    def rows(self, name, *arguments):
        return self.result(name, *arguments)["rows"]

    def refused(self, name, *arguments, says):
        done = program(name, *arguments)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertIn(says, done.stderr)

    def positive(self, row, *keys):
        for key in keys:
            self.assertGreater(row[key], 0, key)

    def test_a_product_and_its_parts(self):
        bits = set()
        for device, apart in (("cpu", False), ("emulated", True)):
            row, = self.rows("gemm", "--m", "40", "--n", "24", "--k", "16", "--device", device, "--repetitions", "1")
            self.assertEqual([row[key] for key in ("batch", "m", "n", "k", "spread")], [1, 40, 24, 16, 0])
            self.positive(row, "native_gflops", "exact_over_native", "exact_over_native_prepared", "bf16_over_native",
                          "pack_seconds", "products_seconds", *(["sums_seconds"] if apart else []))
            self.assertEqual(row["sums_seconds"] == "NaN", not apart)
            bits.add(row["bits"])
        self.assertRegex(" ".join(bits), "^[0-9a-f]{64}$")

    def test_a_block_native_and_exact(self):
        # Weights that every token meets, those of an expert, experts, the rows of each, other parameters, heads. GPT-2's
        # others are the biases and the norms' offsets.
        blocks = {"small": {"gpt2": (12 * 768 * 768, 0, 0, 0, 768 * 13, 12),
                            "llama": (4 * 768 * 768 + 3 * 768 * 2048, 0, 0, 0, 768 * 2, 12)},
                  "experts": {"mixtral": (512 * (2 * 512 + 2 * 128 + 8), 3 * 512 * 1792, 8, 2, 512 * 2, 8),
                              "qwen3-moe": (512 * (2 * 512 + 2 * 64 + 128), 3 * 512 * 192, 128, 1, 512 * 2 + 64 * 2, 8)}}
        for which, expected in blocks.items():
            rows = self.rows("block", "--blocks", which, "--batch", "1", "--seq", "8", "--repetitions", "1")
            self.assertEqual([(row["block"], row["numerics"]) for row in rows],
                             [(name, numerics) for name in expected for numerics in ("native", "exact")])
            for row in rows:
                weights, expert, experts, each, others, heads = expected[row["block"]]
                self.assertEqual((row["batch"], row["seq"], row["spread"]), (1, 8, 0))
                self.assertEqual(row["parameters"], weights + experts * expert + others)
                self.positive(row, "over_native")
                # 2*3*tokens*parameters of the weights, and six products of [8, 8, 64] for each head.
                operations = 6 * 8 * weights + 6 * experts * each * expert + 6 * 2 * heads * 8 * 8 * 64
                self.assertAlmostEqual(row["gflops"] * row["seconds"] * 1e9 / operations, 1, places=6)
            self.assertEqual({row["over_native"] for row in rows[0::2]}, {1})

    def test_a_block_in_another_precision_beside_fp32(self):
        for precision, exact in (("bf16", ["exact"]), ("tf32", [])):
            rows = self.rows("block", "--blocks", "llama-demo", "--batch", "1", "--seq", "2", "--repetitions", "2",
                             "--precision", precision)
            self.assertEqual([(row["numerics"], row["precision"]) for row in rows],
                             [("native", "f32"), ("exact", "f32"), *((n, precision) for n in ["native", *exact])])
            self.assertEqual(len({row["bits"] for row in rows if row["numerics"] == "exact"}), 1 + len(exact))
            self.positive(rows[1], "spread")

    def test_the_slots_of_a_block(self):
        bits = set()  # those of native numerics are each library's own
        for device in ("cpu", "emulated"):
            result = self.result("block", "--blocks", "llama-demo", "--batch", "1", "--seq", "2", "--repetitions", "1",
                                 "--device", device, "--profile")
            bits.update(row["bits"] for row in result["rows"] if row["numerics"] == "exact")
            rows = result["profile"]
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
        self.assertRegex(" ".join(bits), "^[0-9a-f]{64}$")

    def test_a_step_with_and_without_buckets(self):
        rows = self.rows("ddp", "--model", "stack-demo", "--repetitions", "1", "--cluster",
                         "inside=100us:1GB/s flops=1T")
        self.assertEqual(len(rows), 13)
        self.assertEqual([rows[0][key] for key in ("bucket_bytes", "mode", "over_alone", "all_reduces", "bytes")],
                         [None, None, 1, 0, 0])
        for row in rows[1:]:
            self.positive(row, "over_alone", "buckets", "bytes")
            # Each all-reduce of two ranks is two steps of a link; a busy machine takes longer, never less.
            self.assertGreaterEqual(row["seconds"], row["all_reduces"] * 2e-4 if row["mode"] == "eager" else 0)
            self.assertEqual(row["bytes"], rows[1]["bytes"])  # buckets change messages, not bytes
            # Two more than buckets: the count of targets, and the loss.
            self.assertEqual(row["all_reduces"], row["buckets"] + 2)
        self.assertEqual([row["mode"] for row in rows[1:3]], ["eager", "overlap"])
        self.assertGreater(rows[1]["buckets"], rows[-1]["buckets"])

    def test_a_collective_in_every_algorithm_and_type(self):
        for of, ways in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
            for algorithm in ("auto", "direct", "ring", "last"):
                rows = self.rows("collective", "--collective", of, "--ranks", "3", "--bytes", "1040", "--algorithm", algorithm,
                                 "--repetitions", "2")
                self.assertEqual([(row["collective"], row["ranks"], row["bytes"], row["numerics"], row["algorithm"])
                                  for row in rows],
                                 [(of, 3, 1040, numerics, algorithm) for numerics in ("f32", "i64")])
                for row in rows:
                    self.positive(row, "over_copy", "copy_seconds", "spread")
                    self.assertIn(row["copy"], ("memcpy", "streaming stores"))
                    self.assertAlmostEqual(row["bus_gbps"] * row["seconds"] * 1e9 / (ways * 2 / 3 * 1040), 1, places=6)

    def test_an_all_reduce_between_every_number_of_ranks(self):
        rows = self.rows("collective", "--bytes", "64", "--repetitions", "1")
        self.assertEqual([(row["ranks"], row["numerics"], row["spread"]) for row in rows],
                         [(n, numerics, 0) for n in (2, 4, 8) for numerics in ("f32", "i64")])
        for row in rows:
            self.assertAlmostEqual(row["over_copy"] * row["copy_seconds"] / row["seconds"], 1, places=6)

    def test_one_form_alone(self):
        result = json.loads(program("gemm", "--m", "4", "--n", "4", "--k", "4", "--json", "-").stdout)
        self.assertEqual((result["device"], len(result["rows"])), ("cpu", 1))
        self.assertIn("--repetitions", program("gemm", "--help").stdout)

    def test_refusals(self):
        self.refused("gemm", "--nix", says="unknown option --nix")
        self.refused("gemm", "nix", says="unknown option nix")
        self.refused("gemm", "--m", says="no value for --m")
        for number in ("0", "-1", "1x", "99999999999999999999"):
            self.refused("gemm", "--m", number, says="a number from 1 on is needed for --m")
        self.refused("gemm", "--m", "4", says="--m, --n and --k go together")
        self.refused("gemm", "--device", "abacus", says="abacus")
        self.refused("block", "--precision", "f16", says="none of f32, tf32 and bf16")
        self.refused("block", "--blocks", "no-such-model", says="no-such-model")
        self.refused("ddp", "--ranks", "9", says="--ranks from 2 to 8")
        self.refused("ddp", "--cluster", "nonsense", says="nonsense")
        self.refused("collective", "--bytes", "1028", says="elements of 8 bytes")
        self.refused("collective", "--ranks", "1", says="--ranks from 2")
        self.refused("collective", "--collective", "gather", says="all_reduce, reduce_scatter or all_gather")
        self.refused("collective", "--algorithm", "tree", says="auto, direct, ring or last")
        self.refused("nccl", "--share", "1", says="unknown option 1")


if __name__ == "__main__":
    unittest.main()
