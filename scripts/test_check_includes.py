#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check_includes.py on made-up trees: every rule is seen to reject, and a good tree to pass."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # the checkout stays as it was
import check_includes  # noqa: E402

SCRIPT = pathlib.Path(__file__).resolve().parent / "check_includes.py"

GOOD = {
    "include/anyrank/status.h": "#include <stddef.h>\n",
    "include/anyrank/config.h": '#include "anyrank/status.h"\n',
    "include/anyrank/sim.h": '#include "anyrank/status.h"\n',
    "include/anyrank/baseline.h": '#include "anyrank/config.h"\n',
    "ref/core/size.h": '#include "anyrank/status.h"\n',
    "ref/core/wait.h": "#include <pthread.h>\n",
    "ref/numerics/scalar.h": '#include "ref/core/size.h"\n#include <math.h>\n',
    "ref/numerics/rows.h": '#include "ref/core/size.h"\n',
    "ref/numerics/elementary.h": "#include <math.h>\n",
    "ref/cpu/gemm.c": '#include "ref/numerics/scalar.h"\n#include "kernel.h"\n#include <blis.h>\n#include <omp.h>\n',
    "ref/cpu/kernel.h": "",
    "ref/io/json.h": '#include "ref/core/size.h"\n',
    "ref/arith/exact.h": '#include "ref/numerics/rows.h"\n',
    "ref/layers/norm.c": '#include "ref/arith/exact.h"\n#include "anyrank/config.h"\n',
    "ref/models/llama.h": '#include "ref/io/json.h"\n',
    "ref/train/adam.h": '#include "ref/models/llama.h"\n',
    "ref/baseline/run.c": '#include "ref/numerics/elementary.h"\n#include "anyrank/baseline.h"\n#include "own.h"\n'
                          "#include <stdio.h>\n",
    "ref/baseline/own.h": '#include "ref/core/size.h"\n',
    "sim/ring.c": '#include "ref/core/wait.h"\n#include "anyrank/sim.h"\n',
    "verify/bytes/bytes.c": '#include "anyrank/config.h"\n',
    "ref/comm/call.h": '#include "anyrank/status.h"\n',
    "ref/comm/moves.h": '#include "ref/comm/call.h"\n',
    "tests/sim/plain.h": '#include <stdio.h>\n#include "anyrank/sim.h"\n#include "tests/sim/plain_number.h"\n',
    "tests/sim/plain_number.h": "#include <math.h>\n",
    "tests/sim/ring_test.c": '#include "ref/comm/moves.h"\n',
    "gpu/gemm.cu": '#include "ref/numerics/scalar.h"\n#include <cuda_runtime.h>\n',
    "gpu/cluster/nccl/comm.c": '#include "ref/core/wait.h"\n#include <nccl.h>\n',
    "verify/check/check.c": '#include "ref/train/adam.h"\n#include "anyrank/sim.h"\n#include "anyrank/baseline.h"\n',
    "cli/main.c": '#include "verify/check.h"\n',
    "verify/check.h": "",
    "examples/01.c": '#include "anyrank/sim.h"\n#include <stdio.h>\n',
}


class CheckIncludes(unittest.TestCase):
    def run_on(self, changes, git=False):
        """Whether the good tree with some files changed has violations, and their lines; git: as a checkout."""
        with tempfile.TemporaryDirectory() as root:
            for name, text in {**GOOD, **changes}.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if git:
                subprocess.run(["git", "init", "-q", root], check=True)
                subprocess.run(["git", "add", "."], cwd=root, check=True)
            found, _ = check_includes.violations(pathlib.Path(root).resolve())
            return int(bool(found)), found

    def rejects(self, name, text, line, *words):
        """One changed file gives a violation at that line, with those words."""
        status, output = self.run_on({name: text})
        self.assertEqual(status, 1, output)
        reported = [entry for entry in output if entry.startswith(f"{name}:{line}: ")]
        self.assertTrue(any(all(word in entry for word in words) for entry in reported), output)

    def test_a_good_tree_passes(self):
        self.assertEqual(self.run_on({}), (0, []))

    def test_no_arrow_goes_up(self):
        up = [("ref/core/a.c", "ref/numerics/rows.h"), ("ref/placement/a.c", "ref/arith/exact.h"),
              ("ref/numerics/a.c", "ref/cpu/kernel.h"), ("ref/cpu/a.c", "ref/arith/exact.h"),
              ("ref/arith/a.c", "ref/layers/l.h"),
              ("ref/layers/a.c", "ref/models/llama.h"), ("ref/models/a.c", "ref/train/adam.h"),
              ("ref/train/a.c", "verify/check.h"), ("verify/a.c", "cli/c.h"), ("ref/io/a.c", "ref/numerics/rows.h"),
              ("bench/a.c", "cli/c.h"), ("cli/a.c", "bench/b.h"), ("verify/a.c", "bench/b.h")]
        files = {"ref/layers/l.h": "", "cli/c.h": "", "bench/b.h": ""}
        for name, target in up:
            with self.subTest(name=name, target=target):
                status, output = self.run_on({**files, name: f'\n#include "{target}"\n'})
                self.assertEqual(status, 1)
                self.assertTrue(output[0].startswith(f"{name}:2: "), output)
                self.assertIn(target, output[0])

    def test_communicators_stand_on_core_and_comm_alone(self):
        for name in ("ref/comm/a.c", "sim/a.c", "gpu/cluster/process/a.c", "gpu/cluster/mpi/a.c", "gpu/cluster/nccl/a.c", "verify/bytes/a.c"):
            with self.subTest(name=name):
                self.rejects(name, '#include "ref/numerics/rows.h"\n', 1, "ref/numerics/rows.h")

    def test_what_predicts_or_checks_collectives_does_not_reach_what_they_move(self):
        for header in ("ref/comm/call.h", "ref/comm/moves.h"):
            for name in ("verify/bytes/bytes.c", "ref/baseline/own.h", "tests/sim/plain.h", "tests/sim/plain_number.h"):
                with self.subTest(name=name, header=header):
                    self.rejects(name, f'#include "{header}"\n', 1, header)
        self.rejects("ref/core/record.h", '#include "ref/comm/call.h"\n', 1, "ref/comm/call.h")
        self.assertEqual(self.run_on({"sim/ring.c": '#include "ref/comm/moves.h"\n'}), (0, []))

    def test_sim_and_gpu_do_not_know_each_other(self):
        status, output = self.run_on({"sim/ring.h": "", "gpu/gemm.h": "", "sim/a.c": '#include "gpu/gemm.h"\n',
                                      "gpu/a.c": '#include "sim/ring.h"\n'})
        self.assertEqual((status, len(output)), (1, 2), output)

    def test_layers_know_no_thread_no_cpu_no_cuda(self):
        for header in ("pthread.h", "omp.h", "blis.h", "cuda_runtime.h", "mpi.h", "cublas_v2.h"):
            with self.subTest(header=header):
                self.rejects("ref/layers/a.c", f"#include <stdio.h>\n#include <{header}>\n", 2, header)
        self.rejects("ref/layers/a.c", '#include "ref/cpu/kernel.h"\n', 1, "ref/cpu/kernel.h")
        self.rejects("ref/layers/a.c", '#include "anyrank/sim.h"\n', 1, "sim.h")

    def test_layers_do_not_reach_a_thread_through_another_header(self):
        self.rejects("ref/layers/a.c", '#include "ref/core/size.h"\n#include "ref/core/wait.h"\n', 2, "pthread.h",
                     "through ref/core/wait.h")

    def test_the_baseline_stands_on_its_list(self):
        formulas = ("ref/numerics/scalar.h", "ref/numerics/rope.h", "ref/numerics/optimizer.h")
        for header in ("ref/numerics/rows.h", "ref/core/wait.h", "ref/io/json.h", "anyrank/sim.h", *formulas):
            with self.subTest(header=header):
                self.rejects("ref/baseline/own.h", f'#include "{header}"\n', 1, header.split("/")[-1])
        for header in ("pthread.h", "blis.h", "unistd.h"):
            with self.subTest(header=header):
                self.rejects("ref/baseline/own.h", f"#include <{header}>\n", 1, header)

    def test_a_page_names_what_the_baseline_calls_of_others(self):
        page = "# The baseline\n\n{}\n\n| elementary: `ari_exp` |\n\n## Modes\n\n`ari_bl_own`, `ari_mode`\n"
        page = page.format(check_includes.SHARED_SECTION)
        defined = {"ref/numerics/elementary.h": "ARI_FN double ari_exp(double x)\n{\n    return x;\n}\n"
                                                "ARI_FN double ari_rate(double x)\n{\n    return x;\n}\n"}
        text = "int ari_bl_own(void)\n{\n    return x;\n}\nint ari_own(void)\n{\n    return ari_bl_own()%s;\n}\n"

        def reported(calls):
            return self.run_on({**defined, check_includes.SHARED_PAGE: page, "ref/baseline/a.c": text % calls})[1]

        self.assertEqual(reported(" + ari_exp(ari_own())"), [])
        self.assertEqual(reported(" + ari_exp(1)\n        + ari_rate(1)"),
                         ["ref/baseline/a.c:8: the baseline shares ari_rate: write it anew in ref/baseline, or say so in "
                          "docs/design/baseline.md"])
        self.assertEqual(reported(""), ["docs/design/baseline.md:3: the baseline calls no ari_exp"])

    def test_the_baseline_reaches_nothing_through_a_header(self):
        status, output = self.run_on({"ref/numerics/elementary.h": '#include "ref/numerics/rows.h"\n'})
        self.assertEqual(status, 1)
        self.assertIn("ref/baseline/run.c:1: the baseline may not reach ref/numerics/rows.h through "
                      "ref/numerics/elementary.h", output)

    def test_public_headers_include_only_public_headers(self):
        self.rejects("include/anyrank/a.h", '#include "ref/core/size.h"\n', 1, "ref/core/size.h")
        self.rejects("include/anyrank/a.h", "#include <pthread.h>\n", 1, "pthread.h")
        self.rejects("examples/02.c", '#include "ref/core/size.h"\n', 1, "ref/core/size.h")

    def test_an_include_must_name_a_file(self):
        self.rejects("cli/a.c", '#include "verify/none.h"\n', 1, "verify/none.h")

    def test_a_new_folder_needs_a_rule(self):
        self.rejects("ref/new/a.c", "", 1, "no rule")

    def test_every_folder_of_a_checkout_is_read_and_every_rule_has_one(self):
        status, output = self.run_on({"new/a.c": "", "docs/a.md": "", "tests/core/a_test.c": ""}, git=True)
        self.assertEqual(status, 1)
        self.assertIn("new/a.c:1: this folder has no rule in scripts/check_includes.py", output)
        empty = sorted(folder for folder in check_includes.ALLOWED
                       if not any(name.startswith(folder + "/") for name in GOOD))
        self.assertIn("verify/plan", empty)
        self.assertEqual(sorted(line.split()[4].rstrip(",") for line in output if "has no sources" in line), empty)
        everything = {folder + "/a.h": "" for folder in check_includes.ALLOWED if folder != "tests/sim"}
        self.assertEqual(self.run_on(everything, git=True), (0, []))

    def test_an_archive_is_read_by_the_folders_with_rules(self):
        files = {folder + "/none.c": '#include "none.h"\n' for folder in {*check_includes.ALLOWED} - {"tests/sim"}}
        self.assertEqual([line.split(":")[0] for line in self.run_on(files)[1]], sorted(files))

    def test_no_call_goes_up_through_a_public_header(self):
        files = {"include/anyrank/status.h": "void ar_f(void);\ntypedef struct ari_a ari_a;\n",
                 "ref/models/f.c": "void ar_f(void)\n{\n}\n"}
        for text, line in (("static void g(void)\n{\n    ar_f();\n    ar_f();\n}\n", 3),
                           ("void (*ari_p)(void) = ar_f;\n", 1)):
            self.assertEqual(self.run_on({**files, "ref/layers/a.c": text})[1],
                             [f"ref/layers/a.c:{line}: ref/layers may not call ar_f (ref/models/f.c)"])
            for allowed in ("ref/models/a.c", "ref/train/a.c", "verify/bytes/a.c", "examples/a.c", "tests/sim/plain.h"):
                self.assertEqual(self.run_on({**files, allowed: text}), (0, []))
        for text in ('const char *s = "ar_f";\n', "/* ar_f */\n", "void ar_free(void);\n", "extern ari_a *a;\n"):
            self.assertEqual(self.run_on({**files, "ref/layers/a.c": text}), (0, []))

    def test_the_rules_have_no_circle(self):
        below = {folder: {*check_includes.ALLOWED[folder], *check_includes.CALLS.get(folder, ())} - {"verify"}
                 for folder in check_includes.ALLOWED}
        self.assertLessEqual(set(check_includes.CALLS), set(below))
        while below:
            lowest = {folder for folder in below if not below[folder] & set(below)}
            self.assertTrue(lowest, f"in or above a circle: {below}")
            below = {folder: below[folder] for folder in set(below) - lowest}

    def test_comments_and_strings_are_no_includes(self):
        text = '/*\n#include "cli/c.h"\n*/\n// #include "cli/c.h"\nconst char *s = "/*";\n'
        self.assertEqual(self.run_on({"ref/core/a.c": text}), (0, []))
        self.rejects("ref/core/a.c", text + '#include "ref/io/json.h"\n', 6, "ref/io/json.h")

    def test_a_name_has_one_definition(self):
        struct, enum = "typedef struct ari_a {\n    int n;\n} ari_a;\n", "typedef enum ari_a {\n    ARI_ONE\n} ari_a;\n"
        function = "AR_NODISCARD ar_status ar_f(const char *name,\n                            int n)\n{\n}\n"
        for text in (struct, enum, "struct ari_a {\n    int n;\n};\n", "typedef struct {\n    int n;\n} ari_a;\n",
                     "typedef int32_t ari_a;\n", "typedef int ari_a(const char *name);\n",
                     "typedef int (*ari_a)(void);\n"):
            with self.subTest(text=text):
                status, output = self.run_on({"sim/a.h": struct, "verify/check/a.h": "\n" + text})
                self.assertEqual(status, 1)
                self.assertIn("ari_a is also defined in sim/a.h", output[0])
                self.assertTrue(output[0].startswith("verify/check/a.h:"), output)
        status, output = self.run_on({"gpu/f.cu": function, "sim/a.c": "\n" + function})
        self.assertEqual((status, len(output)), (1, 1), output)
        self.assertTrue(output[0].startswith("sim/a.c:2: ar_f is also defined in gpu/f.cu"), output)

    def test_a_declaration_or_an_alternative_is_no_second_definition(self):
        defined = "struct ari_a {\n    int n;\n};\nar_status ar_f(int n)\n{\n}\n"
        for name, text in (("sim/b.h", "typedef struct ari_a ari_a;\nstruct ari_a;\nar_status ar_f(int n);\n"),
                           ("sim/b.c", "static ar_status ar_f(int n)\n{\n    return ar_f(n);\n}\n"),
                           ("sim/c.c", "typedef struct b {\n    struct ari_a a;\n} b;\n"),
                           ("sim/d.c", "/* struct ari_a {\n} ari_a; */\n"), ("mpi/absent.c", defined)):
            with self.subTest(name=name):
                self.assertEqual(self.run_on({"sim/a.c": defined, name: text}), (0, []))

    def test_an_enumerator_or_a_macro_has_one_definition(self):
        enums = ("enum { ARI_A = 1 };\n", "typedef enum ari_e {\n    ARI_B,\n    ARI_A\n} ari_e;\n",
                 "struct s {\n    enum { OWN = ARI_C, ARI_A } is;\n};\n", "enum { ARI_ROWS(ARI_ROW) ARI_A };\n",
                 "enum e {\n#define ARI_ROW(x) ARI_##x,\n    ARI_ROWS(ARI_ROW)\n#undef ARI_ROW\n        ARI_A\n};\n")
        for text in (*enums, "#define ARI_A 1\n", "#  define ARI_A(x) (x)\n"):
            for name, definition in (("verify/a.h", "enum { ARI_A };\n"), ("verify/a.c", "#define ARI_A 2\n")):
                with self.subTest(text=text, name=name):
                    status, output = self.run_on({"sim/a.h": definition, name: text})
                    self.assertEqual((status, len(output)), (1, 1), output)
                    self.assertIn("ARI_A is also defined in sim/a.h", output[0])
                    line = text[:text.index("ARI_A")].count("\n") + 1
                    self.assertTrue(output[0].startswith(f"{name}:{line}: "), output)

    def test_a_use_of_a_constant_is_no_second_definition(self):
        for text in ("enum { OWN = ARI_A };\n", "enum { OWN = 2 * ARI_A, OTHER };\n", "enum ari_e *f(void);\n",
                     "static const int row[] = {ARI_A, ARI_A};\n", "/* #define ARI_A */\n",
                     "#define ARI_A 1\n#undef ARI_A\n", "#define OWN ARI_A\n"):
            with self.subTest(text=text):
                self.assertEqual(self.run_on({"sim/a.h": "enum { ARI_A };\n", "sim/b.c": text}), (0, []))
        values = "#define ARI_VALUES struct v\n"  # what a file sets for the header of tables of options
        self.assertEqual(self.run_on({"cli/a.c": values, "cli/b.c": values}), (0, []))

    def test_a_fault_that_is_asked_for_is_in_the_table(self):
        table = {"ref/core/fault.c": '#define FAULTS(X) \\\n    X(sum_missing, "text") \\\n    X(other, "text")\n'}
        asks = "void f(void)\n{\n    if (ari_faulty(ctx_of(x), \"%s\"))\n        g();\n}\n"
        self.assertEqual(self.run_on({**table, "ref/layers/a.c": asks % "sum_missing"}), (0, []))
        self.assertEqual(self.run_on({**table, "ref/layers/a.c": asks % "sum_mising"})[1],
                         ["ref/layers/a.c:3: there is no fault 'sum_mising' in ref/core/fault.c"])

    def test_a_file_has_at_most_900_lines(self):
        self.assertEqual(self.run_on({"sim/a.c": "\n" * 900}), (0, []))
        self.rejects("sim/a.c", "\n" * 901, 1, "901 lines")

    def test_a_function_has_at_most_60_lines(self):
        def text(lines):
            return "int a;\nstatic void f(int n)\n{\n" + "    n++;\n" * lines + "}\n\nstatic void g(void)\n{\n}\n"
        self.assertEqual(self.run_on({"sim/a.c": text(60)}), (0, []))
        self.rejects("sim/a.c", text(61), 3, "61 lines")
        classes = "namespace\n{\nclass a\n{\n" + "    int n;\n" * 90 + "};\n" + text(9) + "}\n"
        self.assertEqual(self.run_on({"gpu/a.cu": classes}), (0, []))

    def test_an_edge_is_as_wide_as_the_table_says_and_a_little(self):
        def tree(limit, *names):
            defined = {f"ref/core/{name}.h": f"void ari_{name}(void);\n" for name in "abcdefgh"}
            defined.update({f"ref/core/{name}.c": f"void ari_{name}(void)\n{{\n}}\n" for name in "abcdefgh"})
            uses = "static void f(void)\n{\n" + "".join(f"    ari_{name}();\n    ari_{name}();\n" for name in names) + "}\n"
            table = "" if limit is None else f"ref/layers, ref/core: {limit}\n"
            return self.run_on({**defined, "ref/layers/a.c": uses, "scripts/edges.txt": table})[1]

        self.assertEqual(tree(4, *"abcd"), [])
        self.assertEqual(tree(4, *"abcdef"), [])
        self.assertEqual(tree(4, *"ab"), [])
        for limit, names, says in ((4, "abcdefg", "uses 7 names of ref/core, where 4 did"), (None, "a", "where 0 did"),
                                   (4, "a", "uses 1 names of ref/core, no longer 4"), (1, "", "no longer 1")):
            with self.subTest(limit=limit, names=names):
                found = tree(limit, *names)
                self.assertEqual(len(found), 1, found)
                self.assertTrue(found[0].startswith("scripts/edges.txt:1: ref/layers"), found)
                self.assertIn(says, found[0])
                self.assertIn("--write", found[0])
        self.assertIn("ari_a, ari_b, ari_c, ari_d, ari_e", tree(1, *"abcde")[0])

    def test_the_table_that_is_written_is_the_one_that_holds(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            files = {"ref/core/a.c": "void ari_a(void)\n{\n}\n", "ref/core/b.h": "typedef struct ari_b {\n} ari_b;\n",
                     "ref/layers/a.c": "static ari_b *f(void)\n{\n    ari_a();\n}\n",
                     "examples/a.c": "void f(void)\n{\n    ari_a();\n}\n", "scripts/edges.txt": "sim, mpi: 40\n"}
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            for arguments, status in ((["."], 1), (["--write", "."], 0), (["."], 0), (["--write"], 2)):
                process = subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=root, capture_output=True,
                                         check=False)
                self.assertEqual(process.returncode, status, process)
            self.assertEqual((root / "scripts/edges.txt").read_text().splitlines(keepends=True)[2:],
                             ["ref/layers, ref/core: 2\n"])

    def test_an_empty_root_is_an_error(self):
        with tempfile.TemporaryDirectory() as root:
            process = subprocess.run([sys.executable, str(SCRIPT), root], capture_output=True, text=True, check=False)
            self.assertEqual(process.returncode, 2)


if __name__ == "__main__":
    unittest.main()
