#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/release.py, on a small repository and on this one's statements of its version."""

import datetime
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest
from unittest import mock

import release

TODAY = datetime.date.today()


class Release(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="anyrank-release-")
        self.addCleanup(holder.cleanup)
        self.root = pathlib.Path(holder.name, "tree")
        for path, _ in release.places(release.ROOT):
            copy = self.root / path.relative_to(release.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        release.git(self.root, "init", "-q")
        release.git(self.root, "config", "user.name", "somebody")
        release.git(self.root, "config", "user.email", "somebody@example.org")
        self.out = self.root.parent / "out"

    def write(self, version, title, lines=3):
        release.write_version(self.root, version)
        (self.root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {title}\n\n" + "- a line\n" * lines +
                                                "\n## 0.0.1, 2020-01-01\n\n- older\n")
        release.git(self.root, "add", "-A")
        release.git(self.root, "commit", "-qm", "state the version")

    def refused(self, says, version="7.8.9"):
        with self.assertRaises(release.Refused) as raised:
            release.release(self.root, version, self.out, True)
        self.assertIn(says, str(raised.exception))
        self.assertEqual((release.git(self.root, "tag"), self.out.exists()), ("", False))

    def test_every_file_states_one_version(self):
        self.assertEqual(len({match.group(1) for _, match in release.places(release.ROOT)}), 1)

    def test_a_release_is_built_summed_and_tagged(self):
        self.write("7.8.9", f"7.8.9, {TODAY}")
        wheel_patch = mock.patch.object(release, "build",
                                        lambda root, version, out: (out / "a.whl").write_bytes(b"wheel"))
        with wheel_patch, mock.patch("builtins.print"):
            release.release(self.root, "7.8.9", self.out, True)
        self.assertEqual(subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=self.out, check=False).returncode, 0)
        message = release.git(self.root, "tag", "-l", "--format=%(contents)", "v7.8.9")
        self.assertEqual(message, "anyrank 7.8.9\n\n- a line\n- a line\n- a line")
        with self.assertRaisesRegex(release.Refused, "there is a tag v7.8.9 already"):
            release.release(self.root, "7.8.9", self.out, True)

    @unittest.skipUnless(shutil.which("gpg"), "no gpg here")
    def test_it_is_signed_by_the_key_of_git(self):
        home = tempfile.TemporaryDirectory(prefix="anyrank-gpg-")  # short: a socket is in it
        self.addCleanup(home.cleanup)
        self.write("7.8.9", f"7.8.9, {TODAY}")
        with self.assertRaisesRegex(release.Refused, "no user.signingkey"), \
                mock.patch.dict(os.environ, {"GIT_CONFIG_GLOBAL": "/dev/null"}):
            release.release(self.root, "7.8.9", self.out, True, True)
        with mock.patch.dict(os.environ, {"GNUPGHOME": home.name}), mock.patch("builtins.print"), \
                mock.patch.object(release, "build", lambda root, version, out: (out / "a.whl").write_bytes(b"wheel")):
            subprocess.run(["gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key",
                            "somebody@example.org", "ed25519", "sign", "never"], check=True, stderr=subprocess.DEVNULL)
            release.git(self.root, "config", "user.signingkey", "somebody@example.org")
            release.release(self.root, "7.8.9", self.out, True, True)
            release.git(self.root, "tag", "-v", "v7.8.9")

    def test_what_is_not_ready_is_refused(self):
        self.write("7.8.9", "7.8.9, unreleased")
        self.refused("begins with '7.8.9, unreleased'")
        self.write("7.8.9", f"7.8.9, {TODAY}", release.SCREEN + 1)
        self.refused(f"over {release.SCREEN}")
        self.write("7.8.8", f"7.8.9, {TODAY}")
        self.refused("CITATION.cff states 7.8.8")
        self.write("7.8.9", f"7.8.9, {TODAY}")
        (self.root / "new.txt").write_text("new")
        self.refused("the working tree has changes")

    def test_tests_that_fail_end_it_before_a_tag(self):
        self.write("7.8.9", f"7.8.9, {TODAY}")
        (self.root / "test").write_text("#!/bin/sh\nexit 1\n")
        (self.root / "test").chmod(0o755)
        release.git(self.root, "add", "-A")
        release.git(self.root, "commit", "-qm", "a test that fails")
        with self.assertRaises(subprocess.CalledProcessError):
            release.release(self.root, "7.8.9", self.out, False)
        self.assertEqual(release.git(self.root, "tag"), "")


if __name__ == "__main__":
    unittest.main()
