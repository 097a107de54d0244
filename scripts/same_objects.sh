#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that a change of names changes no object file of the product:
#
#   scripts/same_objects.sh [--cuda] BASE [COMMIT]     COMMIT is HEAD if it is not given
#
# Builds the library and the command at both commits, at the same path, with the same compiler and without debug
# information, strips each object and compares the hashes. An object keeps the names of C++ members and of static
# variables in functions: if hashes differ, instructions and data are compared without the names of symbols. --cuda: also
# the objects that nvcc makes. Prints the commits and the number of objects; exit status 1 if one differs, 2 if a build
# fails.
set -eu

preset=release
[ "${1:-}" != --cuda ] || { preset=cuda; shift; }
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '3,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.."
base=$(git rev-parse --short "$1") commit=$(git rev-parse --short "${2:-HEAD}")
work=$(mktemp -d)
trap 'git worktree remove --force "$work/tree" >/dev/null 2>&1; rm -rf "$work"' EXIT
git worktree add --quiet --detach "$work/tree" "$base"

hashes_of() { # commit, file
    git -C "$work/tree" checkout --quiet "$1"
    (cd "$work/tree" &&
        cmake --preset "$preset" -B "$work/build" -DCMAKE_C_FLAGS=-g0 -DCMAKE_CXX_FLAGS=-g0 &&
        cmake --build "$work/build" -j"$(nproc)" --target anyrank anyrank_cli) >"$work/log" 2>&1 || {
        tail -20 "$work/log" >&2
        echo "same_objects.sh: $1 does not build" >&2
        exit 2
    }
    (cd "$work/build" && find . -name '*.o' | LC_ALL=C sort | while read -r object; do
        strip --strip-unneeded -o "$work/stripped" "$object"
        objdump -d -r -s -w "$work/stripped" | sed -e 's/<[^>]*>//g' -e 's/\(R_[A-Z0-9_]*[ \t]*\).*/\1/' \
            -e '/^Contents of section/d' -e '/^Disassembly of section/d' >"$work/code"
        printf '%s %s %s\n' "$(sha256sum <"$work/stripped" | cut -c1-64)" "$(sha256sum <"$work/code" | cut -c1-64)" "$object"
    done) >"$2"
}

hashes_of "$base" "$work/base"
hashes_of "$commit" "$work/commit"
differing=$(diff "$work/base" "$work/commit" | grep -c '^>' || true)
cut -d' ' -f2,3 "$work/base" >"$work/base.code"
cut -d' ' -f2,3 "$work/commit" >"$work/commit.code"
if ! diff "$work/base.code" "$work/commit.code" >"$work/difference"; then
    sed -n 's/^> [0-9a-f]* /differs: /p' "$work/difference"
    exit 1
fi
echo "$base and $commit: the same $(wc -l <"$work/commit" | tr -d ' ') objects; in $differing only names of symbols differ"
