#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a release, or writes its version where the version stands:

    scripts/release.py --set VERSION                         into every file that states it; commit that by hand
    scripts/release.py VERSION [--out DIR] [--tested] [--sign]   tests, builds, tries, sums and tags it

A release is of a clean tree whose files state VERSION and whose CHANGELOG.md begins with an entry "VERSION, DATE" of at
most one screen. Runs ./test --all (--tested: it has just passed), builds the source distribution and the wheels of
scripts/wheel.sh for both processors beside an archive of the whole tree, tries them, writes SHA256SUMS and tags
vVERSION with the entry. --sign: a signed tag, by the key of git's user.signingkey. Nothing is pushed: it prints what is
left.
"""

import argparse
import datetime
import hashlib
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUMBER = r"\d+\.\d+\.\d+"
SCREEN = 45  # lines of an entry
# Files that state the version, and by which words: the group is the number.
STATED = [("CMakeLists.txt", rf"project\(anyrank VERSION ({NUMBER})"), ("CITATION.cff", rf"^version: ({NUMBER})"),
          ("cli/shared/command.c", rf'ANYRANK_VERSION "({NUMBER})"'), ("cli/shared/command.h", rf'"({NUMBER})"'),
          ("include/anyrank/abi.h", rf'"({NUMBER})"'), ("examples/ci/*.yml", rf"ANYRANK_VERSION: v({NUMBER})"),
          ("examples/pytest/ci.yml", rf"gh release download v({NUMBER})"),
          ("cli/man/*.in", rf'^\.TH .*"anyrank ({NUMBER})"'), ("CHANGELOG.md", rf"^## ({NUMBER}),")]


class Refused(Exception):
    pass


def places(root):
    """(path, match of the first place) of every file that states a version."""
    for pattern, words in STATED:
        for path in sorted(root.glob(pattern)):
            match = re.search(words, path.read_text(encoding="utf-8"), re.MULTILINE)
            if match is None:
                raise Refused(f"{path.relative_to(root)} states no version")
            yield path, match


def write_version(root, version):
    for path, match in list(places(root)):
        if path.name == "CHANGELOG.md":  # a new version has a new entry, which is written by hand
            continue
        text = path.read_text(encoding="utf-8")
        path.write_text(text[:match.start(1)] + version + text[match.end(1):], encoding="utf-8")


def git(root, *words):
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def entry_of(root, version):
    """The changelog's first entry, which has to be this version's, dated and short."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    title, _, rest = text.split("\n## ", 1)[1].partition("\n")
    entry = rest.split("\n## ", 1)[0].strip()
    match = re.fullmatch(rf"({NUMBER}), (\d{{4}}-\d\d-\d\d)", title)
    if match is None or match.group(1) != version:
        raise Refused(f"CHANGELOG.md begins with '{title}', not with '{version}, {datetime.date.today()}'")
    if len(entry.split("\n")) > SCREEN:
        raise Refused(f"the entry of {version} in CHANGELOG.md has {len(entry.splitlines())} lines, over {SCREEN}")
    return f"anyrank {version}\n\n{entry}\n"


def ready(root, version):
    """The text of the tag, if all is ready for a release."""
    stale = {str(path.relative_to(root)): match.group(1) for path, match in places(root) if match.group(1) != version}
    if stale:
        raise Refused(f"not {version}: " + ", ".join(f"{name} states {number}" for name, number in stale.items()) +
                      f" (scripts/release.py --set {version})")
    entry = entry_of(root, version)
    if git(root, "status", "--porcelain"):
        raise Refused("the working tree has changes: commit them first")
    if git(root, "tag", "--list", f"v{version}"):
        raise Refused(f"there is a tag v{version} already")
    return entry


def sum_up(out):
    """Writes SHA256SUMS of the folder's files, as sha256sum -c reads it."""
    files = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    rows = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(rows), encoding="utf-8")
    return files


def build(root, version, out):
    wheel = [str(root / "scripts/wheel.sh"), "--out", str(out)]
    subprocess.run([str(root / "scripts/install_deps.sh"), "--wheel", "--aarch64"], check=True)
    subprocess.run(wheel, check=True)
    subprocess.run([*wheel, "--aarch64"], check=True)
    subprocess.run([sys.executable, str(root / "tests/python/wheel_test.py"), "--wheel", str(out)], check=True)
    git(root, "archive", f"--prefix=anyrank-{version}/", "-o", str(out / f"anyrank-{version}-tree.tar.gz"), "HEAD")


def release(root, version, out, tested, signed=False):
    entry = ready(root, version)
    key = subprocess.run(["git", "config", "user.signingkey"], cwd=root, stdout=subprocess.DEVNULL, check=False)
    if signed and key.returncode:
        raise Refused("git has no user.signingkey, by which to sign the tag")
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    if not tested:
        subprocess.run([str(root / "test"), "--all"], check=True)
    build(root, version, out)
    files = sum_up(out)
    git(root, "tag", "-s" if signed else "-a", f"v{version}", "--cleanup=verbatim", "-m", entry)
    print(f"{out}:", *(f"  {path.name}" for path in [*files, out / "SHA256SUMS"]), sep="\n")
    print(f"tagged v{version}. What is left: git push origin v{version}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--set", action="store_true", help="write the version where it stands, and do nothing else")
    parser.add_argument("--out", type=pathlib.Path, help="where the files go (default: dist/VERSION)")
    parser.add_argument("--tested", action="store_true", help="./test --all has passed at this commit")
    parser.add_argument("--sign", action="store_true", help="sign the tag")
    options = parser.parse_args()
    try:
        if not re.fullmatch(NUMBER, options.version):
            raise Refused(f"'{options.version}' is no version: three numbers with dots")
        if options.set:
            write_version(ROOT, options.version)
        else:
            release(ROOT, options.version, (options.out or ROOT / "dist" / options.version).resolve(), options.tested,
                    options.sign)
    except Refused as reason:
        print(f"release.py: {reason}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"release.py: failed, nothing is tagged: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
