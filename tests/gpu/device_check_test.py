#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu/device-check.sh where there is no GPU: what it makes of programs that do not start, of skips that nobody
expected, of errors that end a GPU's context, and how much it prints and leaves behind. Most programs are scripts that
stand for them; one run has the real ones on the emulated device."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
from command import COMMAND, ROOT, Case, start  # noqa: E402

# To an option that is none every program answers with 2.
PROGRAM = "#!/bin/sh\n[ \"$1\" != --no-such-option ] || exit 2\n"
NVIDIA_SMI = """#!/bin/sh
case "$*" in
    -L) echo 'GPU 0: Paper 100 (UUID: GPU-0)' ;;
    *-lms*) printf '1200, 90.5, 100\\n1500, 300.5, 4096\\n1600, 200, 4000\\n'; exec sleep 60 ;;
esac
"""
# What anyrank says on a machine with a GPU.
ON_GPU = PROGRAM + """case $1 in
    info) printf 'CUDA          13.0, driver for 13.0, 1 GPU\\nNCCL          2.28.9\\n' ;;
    train) echo '"weights_hash": "0123ab"' ;;
    check) case "$*" in *--inject*) exit 1 ;; esac ;;
esac
"""
BENCH = PROGRAM + """while [ $# -gt 0 ]; do
    case "$1 $2" in '--json -') echo "'bits': same" | tr "'" '"'; exit ;;
        '--json '*) echo '{"rows": []}' > "$2" ;; esac
    shift
done
printf 'batch m n k native exact prepared spread\\n1 4096 4096 4096 50.0 0.5 0.4 1\\n\\n'
printf 'block  numerics  slot\\ngpt  exact  gemm_acc\\n'
"""
# A build is a link to each program of FAKE_BUILT.
CMAKE = """#!/bin/sh
[ -n "$FAKE_BUILT" ] || { echo 'no compiler'; exit 1; }
if [ "$1" = --build ]; then
    mkdir -p "$2/tests"
    ln -sf "$FAKE_BUILT/anyrank" "$2/anyrank"
    ln -sf "$FAKE_BUILT/conformance_main" "$FAKE_BUILT/gpu_smoke" "$2/tests/"
fi
"""


class DeviceCheck(Case):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "bin"
        self.prebuilt = self.folder / "prebuilt"
        for name in ("anyrank", "conformance_main", "gpu_smoke"):
            self.script(self.prebuilt / name, PROGRAM + "echo all is well\n")

    def script(self, path, text):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def check(self, *arguments, status, prebuilt=True, **environment):
        """The output of a run, the lines of its table by step, and its JSON; three files are left."""
        out = self.folder / "out"
        options = ["--build", str(self.folder / "build"), *(["--prebuilt", str(self.prebuilt)] if prebuilt else [])]
        done = start(["sh", ROOT / "gpu/device-check.sh", *options, *arguments],
                     env={**os.environ, "OUT": str(out), "PATH": f"{self.path}:{os.environ['PATH']}", **environment})
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        if status == 2:
            self.assertEqual(done.stdout, "")
            return done.stderr, {}, {}
        self.assertEqual(sorted(path.name for path in out.iterdir()), ["logs.tgz", "summary.json", "summary.txt"])
        summary = (out / "summary.txt").read_text(encoding="utf-8")
        self.assertLessEqual(len(summary), 12000)
        self.assertTrue(done.stdout.endswith(summary))
        found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return done.stdout, {step["name"]: (step["verdict"], step["found"]) for step in found["steps"]}, found

    def test_refuses_what_it_does_not_know(self):
        for arguments, says in ((["--nix"], "unknown option --nix"), (["--only", "smoke,nix"], "no step nix"),
                                (["--budget", "soon"], "'soon' is not a number"), (["--only"], "--only needs a value"),
                                (["--deps", "/nowhere"], "/nowhere is no folder"),
                                (["--build", "/dev/null/x"], "no folder can be made at /dev/null/x.logs")):
            self.assertIn(says, self.check(*arguments, status=2)[0])

    def test_runs_the_programs_themselves_on_the_emulated_device(self):
        build = pathlib.Path(COMMAND).parent
        programs = {"anyrank": COMMAND, "conformance_main": build / "tests/conformance_main",
                    "gpu_smoke": build / "tests/gpu_smoke", "bench_gemm": build / "bench/gemm",
                    "bench_block": build / "bench/block"}
        if not all(os.access(path, os.X_OK) for path in programs.values()):
            self.skipTest("the programs were not built")
        for name, path in programs.items():
            (self.prebuilt / name).unlink(missing_ok=True)
            (self.prebuilt / name).symlink_to(path)
        self.script(self.path / "nvidia-smi", NVIDIA_SMI)
        said, steps, found = self.check("--host", "--only", "machine,smoke,bench_gemm,bench_block,nccl2", status=0)
        self.assertIn("GPU 0: Paper 100", steps["machine"][1])
        self.assertEqual(steps["smoke"], ("ok", "smoke on emulated: 5 of 5 passed"))
        self.assertRegex(steps["bench_gemm"][1], "^40 x 24 x 16: exact at ")
        self.assertEqual(found["results"]["bench_gemm"]["rows"][0]["m"], 40)
        self.assertIn("int8 products", {row["part"] for row in found["results"]["bench_block_f32"]["profile"]})
        self.assertIn("gemm_acc", said)  # the slots are below the table
        self.assertEqual(steps["nccl2"], ("skip", "NCCL needs a GPU"))
        self.assertEqual(found["failed"], 0)

    def test_clocks_are_those_while_a_step_ran(self):
        self.script(self.path / "nvidia-smi", NVIDIA_SMI)
        # Until the clocks have been written.
        self.script(self.prebuilt / "gpu_smoke", PROGRAM + f"while ! grep -q 1600 {self.folder}/build.logs/clocks.now; "
                    "do sleep 0.05; done\necho seen\n")
        said, _, found = self.check("--host", "--only", "smoke", status=0)
        self.assertIn("smoke: 1500 MHz (1200 least), 300.5 W, 4096 MiB\n", said)
        self.assertEqual(found["steps"][0]["gpu"], "1500 MHz (1200 least), 300.5 W, 4096 MiB")

    def test_builds_where_a_program_does_not_start(self):
        self.script(self.path / "cmake", CMAKE)
        good = self.folder / "good"
        for name in ("anyrank", "conformance_main", "gpu_smoke"):
            self.script(good / name, PROGRAM + "echo built here\n")
        self.script(self.prebuilt / "conformance_main", "#!/bin/sh\necho 'GLIBC_2.99 not found' >&2\nexit 1\n")
        said, steps, _ = self.check("--host", "--only", "smoke", status=0, FAKE_BUILT=str(good))
        self.assertIn("conformance_main does not start (exit status 1): GLIBC_2.99 not found; building instead", said)
        self.assertEqual((steps["build"][0], steps["smoke"]), ("ok", ("ok", "built here")))
        _, steps, _ = self.check("--host", "--only", "smoke", status=1, FAKE_BUILT="")
        self.assertEqual(steps["build"][0], "FAIL")
        self.assertEqual(steps["smoke"], ("FAIL", "skipped, which was not expected: nothing was built"))

    def test_builds_where_the_driver_is_too_old_for_the_programs(self):
        self.script(self.path / "cmake", CMAKE)
        self.script(self.path / "nvcc", "#!/bin/sh\n")
        for name in ("anyrank", "conformance_main", "gpu_smoke"):
            self.script(self.folder / "good" / name, PROGRAM + "echo built here\n")
        info = "[ \"$1\" != info ] || echo 'CUDA          13.0, but the driver is for CUDA 12.4'\n"
        self.script(self.prebuilt / "anyrank", PROGRAM + info)
        said, steps, _ = self.check("--only", "smoke", status=0, FAKE_BUILT=str(self.folder / "good"))
        self.assertIn("its driver is for CUDA 12.4; building instead", said)
        self.assertEqual(steps["smoke"], ("ok", "built here"))

    def test_takes_an_archive_of_the_programs(self):
        archive = self.folder / "programs.tgz"
        subprocess.run(["tar", "-C", str(self.prebuilt), "-czf", str(archive), "."], check=True, timeout=600)
        _, steps, _ = self.check("--host", "--prebuilt", str(archive), "--only", "smoke", status=0, prebuilt=False)
        self.assertEqual(steps, {"smoke": ("ok", "all is well")})
        archive.write_text("no archive", encoding="utf-8")
        self.assertIn("cannot be unpacked", self.check("--prebuilt", str(archive), status=2, prebuilt=False)[0])

    def test_a_skip_that_was_not_expected_fails(self):
        _, steps, _ = self.check("--host", "--only", "nccl2,bench_torch", status=0)
        self.assertEqual([steps[name][0] for name in ("nccl2", "bench_torch")], ["skip", "skip"])
        _, steps, found = self.check("--host", "--expect", "nccl", "--only", "nccl2,bench_torch", status=1)
        self.assertEqual(steps["nccl2"], ("FAIL", "skipped, which was not expected: NCCL needs a GPU"))
        self.assertEqual((steps["bench_torch"][0], found["failed"]), ("skip", 1))

    def test_without_a_gpu_nothing_is_ok(self):
        info = "[ \"$1\" != info ] || echo 'CUDA          13.0, but this machine has no NVIDIA driver'\n"
        self.script(self.prebuilt / "anyrank", PROGRAM + info)
        _, steps, _ = self.check("--only", "machine,smoke", status=1)
        self.assertEqual(steps["machine"], ("FAIL", "no GPU: 13.0, but this machine has no NVIDIA driver"))
        self.assertEqual(steps["smoke"][0], "FAIL")

    def test_a_sanitizer_that_ends_no_slot_is_skipped(self):
        self.script(self.path / "nvidia-smi", NVIDIA_SMI)
        self.script(self.path / "compute-sanitizer", "#!/bin/sh\nexit 124\n")
        self.script(self.prebuilt / "anyrank", ON_GPU)
        self.script(self.prebuilt / "conformance_main", PROGRAM + "[ \"$1\" != --list ] || { echo pack; exit; }\n")
        _, steps, _ = self.check("--only", "memcheck", "--allow-skip", "sanitizers", status=0)
        self.assertEqual(steps["memcheck"], ("skip", "compute-sanitizer ended no slot in its time"))

    def test_every_step_of_a_machine_with_a_gpu(self):
        self.script(self.path / "nvidia-smi", NVIDIA_SMI)
        self.script(self.path / "compute-sanitizer", "#!/bin/sh\necho 'Error: Device not supported'\nexit 1\n")
        self.script(self.path / "python3", "#!/bin/sh\nexit 1\n")  # without PyTorch
        self.script(self.prebuilt / "anyrank", ON_GPU)
        for name in ("bench_gemm", "bench_block"):
            self.script(self.prebuilt / name, BENCH)
        self.script(self.prebuilt / "conformance_main", PROGRAM + """case $1 in --list) echo pack; exit ;; esac
echo 'cpu and cuda: 50 slots'
""")
        self.script(self.prebuilt / "bench_nccl", "#!/bin/sh\necho \"rank $RANK of $WORLD_SIZE\"\n")
        _, steps, _ = self.check("--allow-skip", "torch,sanitizers", status=0)
        skipped = [name for name, (verdict, _) in steps.items() if verdict == "skip"]
        self.assertEqual(skipped, ["bench_torch", "gpus2", "memcheck", "racecheck", "initcheck"])
        self.assertEqual(steps["bench_gemm"][1], "4096 x 4096 x 4096: exact at 2.00 x the speed of sgemm, weights "
                         "prepared 2.50 x")
        self.assertEqual(steps["memcheck"][1], "compute-sanitizer refuses this machine: Device not supported")
        self.assertEqual(steps["nccl4"][1],
                         "4 processes on one GPU through NCCL, --tp 2 --dp 2, exact native: 0 differ")
        self.assertEqual(steps["bench_nccl"][1], "rank 0 of 2")
        self.assertRegex(steps["golden"][1], "^golden models: [1-9][0-9]+ have the CPU's bits")
        listed = start(["sh", ROOT / "gpu/device-check.sh", "--list"]).stdout.split()
        self.assertEqual(list(steps), listed)

    def test_ranks_as_threads_take_two_gpus(self):
        self.script(self.path / "nvidia-smi", NVIDIA_SMI)
        self.script(self.prebuilt / "anyrank", ON_GPU)
        _, steps, _ = self.check("--only", "gpus2", status=0)
        self.assertEqual(steps["gpus2"], ("skip", "two ranks as threads need 2 GPUs; this machine has 1"))
        _, steps, _ = self.check("--only", "gpus2", "--expect", "gpus2", status=1)
        self.assertEqual(steps["gpus2"][0], "FAIL")
        # With two, what NCCL has no pointers for alone does not hide that its direct accesses fail.
        fails = 'case "$NCCL_PROTO $*" in "Simple check"*"--transport nccl"*) echo an illegal address; exit 1 ;; esac\n'
        for more, verdict, status in (("", "ok", 0), (fails, "FAIL", 1)):
            self.script(self.prebuilt / "anyrank", ON_GPU.replace("1 GPU", "2 GPUs") + more)
            _, steps, _ = self.check("--only", "gpus2", status=status)
            self.assertEqual(steps["gpus2"][0], verdict)

    def test_bits_of_results_that_another_way_computes_are_compared(self):
        self.script(self.prebuilt / "bench_gemm", BENCH.replace("same", "$ANYRANK_IMMA_PATH"))
        _, steps, _ = self.check("--host", "--only", "bits", status=1)
        self.assertEqual(steps["bits"], ("FAIL", "gemm --m 40 --n 24 --k 600: imma10 has other bits than imma16"))

    def test_an_error_that_ends_the_context_ends_one_process(self):
        error = "echo 'the GPU failed: fill: an illegal address (cudaErrorIllegalAddress)'\nexit 1\n"
        self.script(self.prebuilt / "gpu_smoke", PROGRAM + error)
        self.script(self.prebuilt / "conformance_main", PROGRAM + f"""case "$*" in
    --list) echo fill; echo pack ;;
    *'--slot pack') echo 'cpu and emulated: 1 slots' ;;
    *) {error} ;;
esac
""")
        said, steps, _ = self.check("--host", "--stop-early", "--only", "smoke,conformance", status=1)
        self.assertEqual(steps["smoke"][0], "FAIL")
        self.assertIn("smoke ended the GPU's context", steps["conformance"][1])
        said, steps, _ = self.check("--host", "--only", "smoke,conformance", status=1)
        self.assertEqual(steps["conformance"], ("FAIL", "cpu and emulated: 1 slots"))
        self.assertIn("illegal address", said[said.index("conformance:"):])

    def test_a_step_that_hangs_is_stopped(self):
        self.script(self.prebuilt / "gpu_smoke", PROGRAM + "exec sleep 600\n")
        _, steps, _ = self.check("--host", "--budget", "2", "--only", "smoke", status=1)
        self.assertRegex(steps["smoke"][1], "^stopped after [12] s|budget of 2 s is used up")
        _, steps, _ = self.check("--host", "--budget", "0", "--only", "smoke", status=1)
        self.assertIn("the budget of 0 s is used up; --only smoke runs it alone", steps["smoke"][1])

    def test_what_is_interrupted_leaves_nothing_behind(self):
        self.script(self.path / "nvidia-smi", NVIDIA_SMI)
        started = self.folder / "started"
        os.mkfifo(started)
        # The reader comes to the end of the pipe when no process of the step is left.
        self.script(self.prebuilt / "gpu_smoke", PROGRAM + f"exec > {started}\necho started\nsleep 60\n")
        with subprocess.Popen(
                ["sh", str(ROOT / "gpu/device-check.sh"), "--host", "--only", "smoke", "--prebuilt",
                 str(self.prebuilt), "--build", str(self.folder / "build")], stdout=subprocess.DEVNULL,
                env={**os.environ, "OUT": str(self.folder / "out"), "PATH": f"{self.path}:{os.environ['PATH']}"}) as run:
            with started.open(encoding="utf-8") as lines:
                self.assertEqual(lines.readline(), "started\n")
                run.send_signal(signal.SIGTERM)
                self.assertEqual(lines.read(), "")
            self.assertEqual(run.wait(600), 143)

    def test_a_flood_of_words_does_not_hide_the_table(self):
        flood = ("i=0\nwhile [ $i -lt 600 ]; do\n"
                 "echo \"slot $i 3 4 5 2.0 2.0 0 - \\\"\\\\ DIFFERS\"; i=$((i + 1))\ndone\n")
        self.script(self.prebuilt / "conformance_main", PROGRAM + flood + "exit 1\n")
        self.script(self.prebuilt / "bench_gemm", PROGRAM + flood)
        said, steps, _ = self.check("--host", "--only", "conformance,bench_gemm,smoke", status=1)
        self.assertIn("slot 3 3 4", said)
        self.assertEqual([steps[name][0] for name in ("conformance", "bench_gemm", "smoke")], ["FAIL", "ok", "ok"])
        self.assertRegex(said, "\n2 ok, 1 FAIL, 0 skip; [0-9]+ s; logs.tgz has what each step said\n$")


if __name__ == "__main__":
    unittest.main()
