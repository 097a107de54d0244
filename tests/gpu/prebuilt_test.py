#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu/prebuilt.sh makes programs that run where there is a C library and nothing else: in a root that has one, a shell
and a few tools, whose library is all that they are linked with. The build is without the CUDA device. Skipped where
Linux lets no user have a root of its own, and without ANYRANK_TEST_EXTENDED, which ./test --extended sets: it builds
the library once more."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SKIPPED = 77
TOOLS = ("sh", "cat", "uname", "timeout")
ENTER = ["unshare", "--user", "--map-root-user", "--mount"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ANYRANK")}


def run(*command, **options):
    options.setdefault("env", ENVIRONMENT)
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=3600, check=False,
                          stdin=subprocess.DEVNULL, **options)


def libraries(program):
    """The files that the loader opens for a program."""
    return re.findall(r"(/\S+) \(0x", run("ldd", program).stdout)


def make_root(root):
    """A C library, tools that need no other, and places to mount the kernel's file systems on."""
    for folder in ("bin", "tmp", "proc", "dev"):
        (root / folder).mkdir()
    for tool in TOOLS:
        path = pathlib.Path(shutil.which(tool)).resolve()
        shutil.copy(path, root / "bin" / tool)
        for library in libraries(path):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    libc = pathlib.Path(next(path for path in libraries(shutil.which("cat")) if "/libc.so" in path))
    shutil.copy(libc.with_name("libm.so.6"), root / libc.relative_to("/").with_name("libm.so.6"))


class Prebuilt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="anyrank-prebuilt-")
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        make_root(cls.root)
        cls.out = cls.root / "opt/prebuilt"
        done = run("sh", ROOT / "gpu/prebuilt.sh", "--host", "--out", cls.out)
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)

    def bare(self, *command):
        """Standard output of a command in that root."""
        script = 'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
        done = run(*ENTER, "sh", "-c", script, self.root, *command, env={"PATH": os.environ["PATH"], "HOME": "/tmp"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_the_manifest_is_of_these_programs(self):
        facts = [line.split() for line in (self.out / "manifest.txt").read_text(encoding="utf-8").splitlines()]
        files = {fact[1]: fact[2:] for fact in facts if fact[0] == "file"}
        self.assertEqual(list(files), ["gpu_programs"])
        for name in ("anyrank", "bench_block", "bench_gemm", "bench_nccl", "conformance_main", "gpu_smoke"):
            self.assertEqual(os.readlink(self.out / name), "gpu_programs")
        for name, (size, digest) in files.items():
            content = (self.out / name).read_bytes()
            self.assertEqual((int(size), digest), (len(content), hashlib.sha256(content).hexdigest()))
        self.assertEqual([fact[0] for fact in facts if fact[0] != "file"],
                         ["version", "commit", "arch", "machine", "glibc"])

    def test_the_archive_is_the_folder(self):
        archive = self.out.with_suffix(".tgz")
        names = run("tar", "-tzf", archive).stdout.split()
        self.assertLessEqual({"./anyrank", "./gpu_programs", "./data/anyrank/llama-demo/", "./manifest.txt"}, set(names))

    def test_the_command_runs_with_a_c_library_alone(self):
        info = self.bare("/opt/prebuilt/anyrank", "info")
        self.assertRegex(info, r"\nCUDA +not in this build: ")
        self.assertRegex(info, r"\nNCCL +NCCL cannot be loaded: .*/usr/local/cuda, ")
        self.assertRegex(info, r"\ndata +/opt/prebuilt/data/anyrank\n")
        self.assertIn("check: the same bits", self.bare(
            "/opt/prebuilt/anyrank", "check", "llama-demo", "--tp", "2", "--steps", "1", "--seq", "16", "--device",
            "emulated"))

    def test_smoke_and_conformance_run_there(self):
        self.bare("/opt/prebuilt/gpu_smoke", "emulated")
        self.bare("/opt/prebuilt/conformance_main", "emulated", "--rounds", "1")


if __name__ == "__main__":
    if run(*ENTER, "chroot", "/", "true").returncode != 0:
        print("no root of one's own here (unshare --user --mount)")
        sys.exit(SKIPPED)
    if "ANYRANK_TEST_EXTENDED" not in os.environ:
        print("a long test, of ./test --extended: it builds the library once more")
        sys.exit(SKIPPED)
    unittest.main()
