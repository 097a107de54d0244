# SPDX-License-Identifier: Apache-2.0
"""What the test of the pages has to be told. A row of a block is found by its page and by how the block begins."""

import hashlib
import importlib.util
import os
import pathlib
import re
import shutil

GPL = "/usr/share/common-licenses/GPL-3"
GPL_SHA256 = "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986"  # of the GPL with https

# Of Open MPI, more ranks than cores and any user.
SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
            "OMPI_MCA_mpi_yield_when_idle": "1"}

# Pages that take more than some seconds of processor time: long_test.py runs their commands, in ./test --all.
LONG = {"README.md", "by-looking.md", "check.md", "clusters.md", "find-a-bug.md", "models.md", "planner.md",
        "pytest.md", "python.md", "simulated-cluster.md", "train.md", "watch.md"}

# What differs between machines and runs, on both sides: of all pages, and of one.
DIFFERS = {
    "": [(r"\d+\.\d+ m?s(?=;|,|$|  same bits|  DIFFERENT)", "#"), (r"\b(in|waited) \d+\.\d+ m?s", r"\1 #"),
         (r"(?<![\w.])/\S*/", "")],
    "README.md": [(r"varies by \S+ of its size", "varies by # of its size"), (r"in \d+\.\d+s", "in #s")],
    "find-a-bug.md": [(r"in \d+\.\d+s", "in #s"), (r"in \S+ of test_block\S*", "in NAME of test_block"),
                      # A processor without AVX-512 has other last bits in PyTorch.
                      (r"-?\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+", "#"), (r"the same +\d+ of", "the same # of")],
    "pytest.md": [(r"in \d+\.\d+s", "in #s"), (r"in \S+ of test_mlp\S*", "in NAME of test_mlp"), (r"\.\./", ""),
                  (r"-?\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+", "#")],
    "train.md": [(r"^( +\d+ +\S+ +\S+ +\S+) +\d+$", r"\1"), (r"[\d,]+ tokens/s", "# tokens/s")],
}

# Pages whose spaces count.
SPACED = {"parallelism.md"}

# What a page takes as given, as a line of shell.
GIVEN = {
    "clusters.md": "cp -r tests/golden/llama-gqa-tiny MODEL",
    "planner.md": """echo '{"rules": [{"modules": "*.[qkv]_proj", "style": "colwise", "input": "R"}]}' > p.json""",
    "train.md": "mkdir model && cp tests/golden/llama-gqa-tiny/[cm]*[ns] model",
    "verify.md": "cp -r tests/golden/llama-gqa-tiny torch",
}

# The command whose output a block is.
PRINTED_BY = {
    ("README.md", "..\ncheck: "): f"anyrank check --text {GPL}",
    ("README.md", "E "): "pytest -q test_mlp.py | awk '/^E / && n++ < 4'",
    ("parallelism.md", "0F0,"): "anyrank plan llama-demo --pipeline --pp 2 --micro-batches 3 --csv s.csv > /dev/null && "
                             "sed -E 's/,?[01](SEND|RECV)_[^,]*//g' s.csv",
    ("pytest.md", "E "): r"""
    sed -i 's/mean().backward()/&\n    if mesh and mesh.get_rank() == 2:\n        model[0].bias.grad *= 1.001/' test_mlp.py
    pytest -q test_mlp.py | grep '^E '""",
}

# The names of the files that a page's blocks of json are, in order.
WRITTEN = {
    "by-looking.md": ["two/config.json"],
    "modules.md": ["column-row.json", "not-summed.json"],
    "planner.md": ["paper/config.json", "small.json", None, "wrong.json"],
}

# What a block of C stands behind: declarations, and the parameters of the function that it is inside; None: of none.
STATEMENTS = "ar_ctx *ctx, ar_ddp *ddp, ar_module *module, ar_optimizer *optimizer, "
DECLARED = {
    ("pytorch.md", "ar_dump_listener"): ("", "ar_comm *tp, ar_comm *dp, ar_comm *world, ar_parallel parallel"),
    ("modules.md", "ar_ddp_options"): ("", STATEMENTS + "ar_saved *saved, ar_tensor x, ar_tensor y, ar_tensor dy, "
                                       "const ar_batch *batch, int steps"),
    ("modules.md", "ar_gradients"): ("", STATEMENTS + "int steps"),
    ("modules.md", "typedef"): ("enum { SAVED_X, SAVED_F };", None),
    ("modules.md", "    AR_TRY_TO(done"): ("", STATEMENTS + "ar_module *half, ar_module **layers, ar_status st"),
    ("modules.md", "    AR_TRY(ar_enter_region"): (
        "typedef struct regions { ar_param weight[2]; } regions;",
        STATEMENTS + "ar_tensor *y, const ar_tensor *x, regions *l, ar_tensor in, ar_tensor up, ar_tensor act, "
                     "ar_tensor terms"),
    ("modules.md", "ar_batch global"): ("", STATEMENTS + "ar_loss *loss, float *points, int64_t *classes, "
                                        "ar_train_result result, int step, ar_train_options options"),
    ("simulated-cluster.md", "uint64_t"): ("", "ar_rank_fn rank, int arg"),
    ("simulated-cluster.md", "const"): ("", "ar_rank_fn rank, int arg"),
    ("simulated-cluster.md", "ar_trace"): ("", "ar_rank_fn rank_function"),
}

# Blocks that another test runs, which names the page; and those that are neither commands nor what one prints.
PICTURE = "a picture"
ELSEWHERE = {(page, start): where for where, page, starts in [
    (PICTURE, "CONTRIBUTING.md", ["ref: core"]),
    (PICTURE, "architecture.md", ["include/"]),
    (PICTURE, "train.md", ["FOLDER/"]),
    ("tests/examples/ci_test.py", "pytest.md", ["ci/anyrank.sh", "layout gradients"]),
    ("tests/verify/pages_test.py", "pytorch.md", ['{"version": 1,\n "rank"', "MissingShard", '{"version": 1,\n "mesh"',
                                                  "anyrank verify DIR"]),
    ("tests/verify/pytorch_page_test.py", "README.md", ["import anyrank"]),
    ("tests/python/convert_test.py", "pytorch.md", ["$ python3 -m anyrank.convert", "anyrank convert: run"]),
    ("tests/sim/message_test.c", "simulated-cluster.md", ["rank 2"]),
    ("tests/verify/pytorch_page_test.py", "pytorch.md", [
        "import anyrank", "anyrank verify one", "with anyrank", "c = anyrank", "spec =", "activations =", "model =",
        "$ anyrank grads", "python3 tests/golden/dcp.py", "reduced ="]),
    ("tests/python/pytest_page_test.py", "pytest.md", ["pip install torch"]),
    ("python/anyrank/tests/test_compare_script.py", "compare.md", ["anyrank compare"]),
    ("python/anyrank/tests/test_compare_script.py", "README.md", ["anyrank compare"]),
    ("tests/verify/pages_test.py", "verify.md", ['{"tool"']),
    ("tests/pytorch/wild.py", "found.md", ["python tests/pytorch/wild.py"]),
    ("tests/pytorch/wild_programs.py", "found.md", ["python tests/pytorch/wild_programs.py"]),
] for start in starts}

# Commands that are not run, and why.
REASONS = [
    (r"^(\./quickstart|scripts/install_deps|pip |python3 -m venv|cmake |scripts/build)", "installs or builds something"),
    (r"^(build/cuda|.*--device cuda)", "needs a GPU"),
    (r"^(torchrun|#!/bin/bash\n#SBATCH)", "needs a cluster"),
    (r"^(\./test|build/tests/)", "runs the tests"),
    (r"^chromium", "needs a browser"),
    (r"^(scripts/run_aarch64|\./test aarch64)", "runs programs of 64-bit ARM"),
]
REASONS += [("mpirun", "no mpirun here")] if not shutil.which("mpirun") else []
REASONS += [("jq ", "no jq here")] if not shutil.which("jq") else []
if not os.path.exists(GPL) or hashlib.sha256(pathlib.Path(GPL).read_bytes()).hexdigest() != GPL_SHA256:
    REASONS.append((re.escape(GPL), f"another {GPL} here, or none"))
REASONS += [("anyrank.logprobs", "no numpy here")] if not importlib.util.find_spec("numpy") else []
REASONS += [(r"\bpytest -q|\$D/ranks", f"no {name} here") for name in ("torch", "pytest") if not importlib.util.find_spec(name)]


def find(rows, block):
    """The row of a block; None if there is none."""
    found = [row for (page, start), row in rows.items() if page == block.page and block.text.startswith(start)]
    return found[0] if found else None


def reason(command):
    return next((why for pattern, why in REASONS if re.search(pattern, command)), None)


def statuses(step):
    """The exit statuses that a step may have: 1 is a difference, which an injected fault has to make."""
    if re.search(r"--inject|--net-fault", step.command):
        return (1,)
    return (0, 1, 2) if step.shown and step.shown.strip() else (0,)
