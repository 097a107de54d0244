#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests of install_deps.sh with an apt-get of its own making: it installs nothing when all is there, asks for what is
# missing, goes through sudo only where it has to, and fails with a message where it cannot.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

# expect NAME STATUS TEXT: the last run's exit status, and a text in its output.
expect() {
    if [ "$status" -ne "$2" ] || ! grep -qF -- "$3" "$scratch/output"; then
        echo "$1: expected exit status $2 and '$3'; got $status and:"
        cat "$scratch/output"
        failures=$((failures + 1))
    fi
}
# absent NAME TEXT: a text that must not be in the log of calls.
absent() {
    if grep -qF -- "$2" "$scratch/calls" 2>/dev/null; then
        echo "$1: '$2' was called"
        failures=$((failures + 1))
    fi
}
# with_path DIRECTORY ARGUMENTS...: runs the script with only that directory on the path.
with_path() {
    path=$1
    shift
    : > "$scratch/calls"
    status=0
    env -i PATH="$path" HOME=/ "$shell" scripts/install_deps.sh "$@" > "$scratch/output" 2>&1 || status=$?
}

shell=$(command -v sh)
bare=$scratch/bare
mkdir "$bare"
for tool in mktemp rm sed grep cat printf env tr head; do
    ln -s "$(command -v $tool)" "$bare/$tool"
done
# fake DIRECTORY NAME BODY: a program that logs its call.
fake() {
    printf '#!%s\necho "%s $*" >> %s/calls\n%s\n' "$shell" "$2" "$scratch" "$3" > "$1/$2"
    chmod +x "$1/$2"
}

# Without apt-get: named packages, exit status 2.
with_path "$bare"
expect no_apt 2 "no apt-get"
expect no_apt 2 "libblis-openmp-dev"
expect no_apt 2 "cmake"

# --check installs nothing.
fake "$bare" apt-get ''
fake "$bare" id 'echo 0'
with_path "$bare" --check
expect check_only 2 "missing: a C17 compiler"
absent check_only apt-get

# As root: update, then install of everything missing, with the tests' packages only where asked for; what is still
# missing afterwards is told.
with_path "$bare"
expect as_root 2 "this is still missing"
cp "$scratch/calls" "$scratch/output"
status=0
expect as_root_calls 0 "update"
expect as_root_calls 0 "install --no-install-recommends gcc libc6-dev cmake make libblis-openmp-dev libjansson-dev"
absent as_root libcriterion-dev
absent as_root openmpi
absent as_root sudo
with_path "$bare" --tests --lint
cp "$scratch/calls" "$scratch/output"
status=0
expect with_tests 0 "g++ libopenmpi-dev openmpi-bin libcriterion-dev clang-format clang-tidy"
with_path "$bare" --aarch64
cp "$scratch/calls" "$scratch/output"
status=0
expect for_arm 0 "gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user-static"
absent for_arm libcriterion-dev

# A failing install is told; a failing update alone is not the end.
fake "$bare" apt-get 'exit 100'
with_path "$bare"
expect failing_install 2 "apt-get install failed"

# Not root, without and with sudo.
fake "$bare" id 'echo 1000'
with_path "$bare"
expect no_sudo 2 "there is no sudo"
absent no_sudo apt-get
fake "$bare" apt-get ''
fake "$bare" sudo 'exec "$@"'
with_path "$bare"
cp "$scratch/calls" "$scratch/output"
status=0
expect with_sudo 0 "sudo env DEBIAN_FRONTEND=noninteractive apt-get"

# Where everything is there, nothing is called. This machine has it: ./test has just installed it.
full=$scratch/full
mkdir "$full"
fake "$full" apt-get ''
fake "$full" sudo ''
with_path "$full:$PATH" --tests
if [ "$status" -ne 0 ] || [ -s "$scratch/calls" ] || [ -s "$scratch/output" ]; then
    echo "all_there: exit status $status, output and calls:"
    cat "$scratch/output" "$scratch/calls"
    failures=$((failures + 1))
fi

with_path "$bare" --check
expect blis 2 "missing: BLIS, with its headers (Debian, Ubuntu: libblis-openmp-dev)"
with_path "$PATH" --frobnicate
expect unknown_option 2 "unknown option --frobnicate"

[ $failures -eq 0 ] || { echo "$failures failures"; exit 1; }
