#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks at what nvcc makes of the GPU's kernels, with the options of the build: whether the arithmetic that PTX spells
is the scalar header's. No GPU is needed; where there is no nvcc, nothing is tested (exit status 77).

    tests/gpu/ptx_test.py [unittest options]
"""

import concurrent.futures
import re
import unittest

from nvcc import ROOT, compile_as_one, need_nvcc

ARCHITECTURE = "compute_90"
# The kernels that call functions of ref/numerics/elementary.h, which spells its fused multiply-adds.
SPELL_FMA = {"attention.cu", "elementwise.cu", "experts.cu", "gemm_exact.cu", "loss.cu"}

# Kernels that still divide integers: those of products, once a tile or block, and the means of integers.
DIVIDE = {"accumulate", "combine_each", "contract", "copy_digits", "give_to", "multiply_tile", "narrowed", "pack_tile",
          "round_i64"}
# Those that move several elements at once.
MOVE_VECTORS = {"acc_value", "act_backward_of", "add_gated_backward_of", "add_gated_of", "add_of",
                "along_lines", "bias_act_of", "ce_backward_of", "ce_logits_of", "ce_max_of", "ce_sum_of",
                "combine_rows_of", "dot_rows_of", "dropout_block", "fill_of", "forward_of",
                "gated_backward_of", "gated_forward_of", "gather_rows_of", "input_gradient", "mul_of", "optimizer_element", "scale_of",
                "softmax_backward", "softmax_forward"}
VECTOR = re.compile(r"\b(?:ld|st)\.global(?:\.\w+)*\.v[24]\.")

# Some share a line, in what a source spells itself.
INSTRUCTION = re.compile(r"(?:^|(?<=[;{]))\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*)((?:\.\w+(?:::\w+)*)*)(?=[\s;])",
                         re.MULTILINE)
DEFINED = re.compile(r"^(?:(?:template <[^>]*> )?struct (?=\w+)|\w[\w:<>*& ]*[ *](?=\w+\())(\w+)", re.MULTILINE)  # structs, functions
ROUNDED = {"add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"}
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}


def compile_to_ptx(sources):
    return compile_as_one(sources, ARCHITECTURE, "-ptx", "-o", "-")


def instructions(ptx):
    """(name, modifiers) of each; "fma.rn.f64" is ("fma", ["rn", "f64"])."""
    return [(name, modifiers.split(".")[1:]) for name, modifiers in INSTRUCTION.findall(ptx)]


def kernels(ptx):
    """(mangled name, text) of each."""
    parts = re.split(r"\.entry (\w+)", ptx)
    return zip(parts[1::2], parts[2::2])


LABEL_OR_BRANCH = re.compile(r"^(\$\w+):|^\s*(?:@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);", re.MULTILINE)


def loops(body):
    """The text from each label to the last branch back to it."""
    label, last = {}, {}
    for found in LABEL_OR_BRANCH.finditer(body):
        defined, target = found.groups()
        if defined:
            label[defined] = found.start()
        elif target in label:
            last[target] = found.end()
    return [body[label[target]:end] for target, end in last.items()]


def is_wide_fence(name, modifiers):
    """Whether it orders memory beyond the block: a MEMBAR of the whole GPU, or an L1 cache that forgets all."""
    if name == "membar":
        return modifiers[0] != "cta"
    scope = {"cluster", "gpu", "sys"} & set(modifiers)
    return bool(scope) and (name == "fence" or bool({"acquire", "release", "acq_rel"} & set(modifiers)))


def named(mangled, names):
    """Which of the names the kernel's own has as a whole."""
    return {name for name in names if f"{len(name)}{name}" in mangled}


class Kernels(unittest.TestCase):
    sources = {False: [], True: []}  # whether they spell fused multiply-adds
    ptx = {}

    @classmethod
    def setUpClass(cls):
        for path in sorted((ROOT / "gpu").glob("*.cu")):
            cls.sources[path.name in SPELL_FMA].append(path)
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            cls.ptx = dict(zip(cls.sources, pool.map(compile_to_ptx, cls.sources.values())))

    def each(self, wrong):
        """Fails with every instruction of which wrong(spells_fma, name, modifiers) says what is wrong with it."""
        found = set()
        for spells_fma, text in self.ptx.items():
            files = ", ".join(path.name for path in self.sources[spells_fma])
            for instruction, modifiers in instructions(text):
                complaint = wrong(spells_fma, instruction, modifiers)
                if complaint:
                    found.add(f"gpu/, one of {files}: {'.'.join([instruction, *modifiers])}: {complaint}")
        self.assertEqual(sorted(found), [])

    def test_there_are_kernels(self):
        self.assertEqual({path.name for path in self.sources[True]}, SPELL_FMA)
        self.assertLessEqual({"norm.cu", "optimizer.cu", "pack.cu"}, {path.name for path in self.sources[False]})
        for spells_fma, text in self.ptx.items():
            entries = "\n".join(re.findall(r"\.entry (\w+)", text))
            for path in self.sources[spells_fma]:
                defined = DEFINED.findall(path.read_text(encoding="utf-8"))
                self.assertTrue(any(f"{len(name)}{name}" in entries for name in defined), path.name)
        self.assertTrue(any(("fma", ["rn", "f64"]) in instructions(text) for text in self.ptx.values()))

    def test_arithmetic_is_rounded_to_nearest(self):
        # Without .rn the assembler may fuse a product and a sum; .approx and .full are not correctly rounded.
        self.each(lambda _, name, modifiers: "not rounded to nearest" if name in ROUNDED and "rn" not in modifiers
                  and FLOATS & set(modifiers) else None)

    def test_nothing_is_approximate_and_subnormals_are_kept(self):
        self.each(lambda _, name, modifiers: "approximate" if {"approx", "full"} & set(modifiers) else
                  "subnormal numbers become 0" if "ftz" in modifiers else None)

    def test_conversions_round_to_nearest(self):
        def wrong(_, name, modifiers):
            if name != "cvt" or modifiers[-2] not in FLOATS:
                return None
            widens = modifiers == ["f64", "f32"]
            whole = modifiers in (["rmi", "f64", "f64"], ["rpi", "f64", "f64"])  # floor and ceil, of yarn's pairs
            return None if widens or whole or modifiers[0] in ("rn", "rni") else "not rounded to nearest"
        self.each(wrong)

    def test_products_and_sums_are_fused_where_the_source_says_so_alone(self):
        def wrong(spells_fma, name, modifiers):
            if name != "fma" and not (name == "mad" and FLOATS & set(modifiers)):
                return None
            return None if spells_fma and modifiers == ["rn", "f64"] else "fused"
        self.each(wrong)

    def test_no_library_function_is_called(self):
        self.each(lambda _, name, modifiers: "a function" if name == "call" else None)

    def test_indices_are_not_divided(self):
        # A GPU divides 64 bits in a subroutine of a hundred instructions.
        divide = {mangled for text in self.ptx.values() for mangled, body in kernels(text)
                  if any(name in ("div", "rem") and not FLOATS & set(modifiers) for name, modifiers in instructions(body))}
        self.assertEqual([mangled for mangled in sorted(divide) if not named(mangled, DIVIDE)], [])

    def test_neighbours_are_moved_at_once(self):
        moved = {name: [] for name in MOVE_VECTORS}
        for text in self.ptx.values():
            for mangled, body in kernels(text):
                for name in named(mangled, MOVE_VECTORS) if not named(mangled, ("add_exact", "add_native")) else ():
                    moved[name].append(bool(VECTOR.search(body)))
        # Of a slot with a kernel for strided tensors too, one of two.
        alone = {name for name, found in moved.items() if not any(found) or not (all(found) or name == "acc_value")}
        self.assertEqual(alone, set())

    def test_sums_of_floats_are_not_atomic(self):
        self.each(lambda _, name, modifiers: "atomic" if name in ("atom", "red") and FLOATS & set(modifiers)
                  else None)

    def test_no_loop_has_a_fence_of_the_whole_gpu(self):
        found = set()
        for text in self.ptx.values():
            for mangled, body in kernels(text):
                found |= {f"{mangled}: {'.'.join([name, *modifiers])}" for loop in loops(body)
                          for name, modifiers in instructions(loop) if is_wide_fence(name, modifiers)}
        self.assertEqual(sorted(found), [])
        # The looking itself: there are loops.
        self.assertTrue(all(any(loops(body) for _, body in kernels(text)) for text in self.ptx.values()))


if __name__ == "__main__":
    need_nvcc()
    unittest.main()
