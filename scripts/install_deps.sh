#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what building anyrank needs, and nothing that is there already.
#
#   scripts/install_deps.sh            to build and run the command
#   scripts/install_deps.sh --tests    also to build and run the tests: of MPI and of the kernels of CUDA too
#   scripts/install_deps.sh --lint     also clang-format, clang-tidy, clang with libFuzzer, llvm-nm
#   scripts/install_deps.sh --wheel    also to make wheels (scripts/wheel.sh)
#   scripts/install_deps.sh --aarch64  also to build for 64-bit ARM Linux on another processor, and to run that
#   scripts/install_deps.sh --pytorch  also PyTorch, Transformers, pytest and mypy (scripts/pytorch_tools.txt) into
#                                      ~/.cache/anyrank/python-venv (or $ANYRANK_PYTHON_VENV), with which ./test --all
#                                      and ./test NAME run what is written in Python: 6 GB. pip decides from where:
#                                      PIP_INDEX_URL can name an index of builds without CUDA, a tenth as large
#   scripts/install_deps.sh --check    installs nothing; tells what is missing
#
# Each need is looked for by use (a compiler that links a program, a header that compiles), so a machine that has it
# from elsewhere than apt is left alone. Debian and Ubuntu: what is missing comes from apt-get, through sudo if not
# root. Elsewhere the missing packages are named. Exit status: 0 everything is there, 2 something is missing.
set -eu

tests=no lint=no wheel=no aarch64=no pytorch=no check_only=no
while [ $# -gt 0 ]; do
    case $1 in
        --tests) tests=yes ;;
        --lint) lint=yes ;;
        --wheel) wheel=yes ;;
        --aarch64) aarch64=yes ;;
        --pytorch) pytorch=yes ;;
        --check) check_only=yes ;;
        -h | --help) sed -n '3,18s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "install_deps.sh: unknown option $1; it takes --tests, --lint, --wheel, --aarch64, --pytorch, --check" >&2; exit 2 ;;
    esac
    shift
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

have() { command -v "$1" >/dev/null 2>&1; }

compiler() {
    for candidate in ${CC:-} cc gcc clang; do
        if have "$candidate"; then echo "$candidate"; return 0; fi
    done
    return 1
}

# links SOURCE FLAGS...: whether a one-line program compiles and links.
links() {
    cc_command=$(compiler) || return 1
    printf '%s\n' "$1" > "$scratch/try.c"
    shift
    "$cc_command" -std=gnu17 -o "$scratch/try" "$scratch/try.c" "$@" >/dev/null 2>&1
}

# from_pkg_config LIBRARY: where it is, if pkg-config is there and knows; the build asks it too.
from_pkg_config() { if have pkg-config; then pkg-config --cflags --libs "$1" 2>/dev/null || true; fi; }

# cmake_version: "MAJOR MINOR", or nothing.
cmake_version() { cmake --version 2>/dev/null | sed -n '1s/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p'; }

has_compiler() {
    links '#include <stdio.h>
#include <pthread.h>
#include <math.h>
_Static_assert(sizeof(void *) == 8, "64 bits");
int main(void) { return printf("%d%f", pthread_equal(pthread_self(), pthread_self()), sin(1)) < 0; }' -lm -pthread
}
has_cmake() {
    have cmake || return 1
    # Unquoted on purpose: the two numbers become $1 and $2.
    # shellcheck disable=SC2046
    set -- $(cmake_version)
    [ "${1:-0}" -gt 3 ] || { [ "${1:-0}" -eq 3 ] && [ "${2:-0}" -ge 25 ]; }
}
has_make() { have make || have ninja; }
has_blis() {
    links '#include <blis.h>
int main(void) { return bli_info_get_version_str() == 0; }' \
        -I/usr/include/blis -I/usr/local/include/blis -lblis -lm -pthread
}
# Unquoted on purpose: a list of flags.
# shellcheck disable=SC2046
has_jansson() {
    links '#include <jansson.h>
_Static_assert(JANSSON_VERSION_HEX >= 0x020d00, "2.13");
int main(void) { json_decref(json_object()); }' $(from_pkg_config jansson) -ljansson
}
has_pkg_config() { have pkg-config; }
has_python() { have python3 && python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; }
# Any python3 on the PATH, as the command looks for it (verify/explain/explain.c).
has_numpy() {
    for python in $(printf '%s' "$PATH" | tr ':' '\n'); do
        if [ -x "$python/python3" ] && "$python/python3" -I -c 'import numpy' >/dev/null 2>&1; then return 0; fi
    done
    return 1
}
# shellcheck disable=SC2046
has_criterion() {
    # No header of it has its version.
    ! have pkg-config || ! pkg-config --exists criterion || pkg-config --atleast-version=2.4.1 criterion || return 1
    links '#include <criterion/criterion.h>
#include <criterion/new/assert.h>
Test(one, two) {}' $(from_pkg_config criterion) -lcriterion
}
has_cxx() {
    for candidate in ${CXX:-} c++ g++ clang++; do
        have "$candidate" || continue
        echo 'int main() { return 0; }' > "$scratch/try.cc"
        if "$candidate" -std=c++17 -o "$scratch/try" "$scratch/try.cc" >/dev/null 2>&1; then return 0; fi
    done
    return 1
}
has_mpi() {
    have mpirun && have mpicc || return 1
    echo '#include <mpi.h>
int main(void) { return MPI_Finalize(); }' > "$scratch/try.c"
    mpicc -o "$scratch/try" "$scratch/try.c" >/dev/null 2>&1
}
has_aarch64_compilers() { have aarch64-linux-gnu-gcc && have aarch64-linux-gnu-g++; }
has_qemu() { have qemu-aarch64-static || have qemu-aarch64; }
has_venv() { have python3 && python3 -c 'import venv, ensurepip, sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1; }
has_clang_format() { have clang-format; }
has_clang_tidy() { have clang-tidy; }
has_llvm_nm() { have llvm-nm; }
has_fuzzer() {
    have clang || return 1
    echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' > "$scratch/try.c"
    clang -fsanitize=fuzzer -o "$scratch/try" "$scratch/try.c" >/dev/null 2>&1
}

# One line a need: the check's name, what a person calls it, the packages of Debian and Ubuntu. Headers of the C library
# are named because apt is told not to install what gcc only recommends.
needs() {
    cat <<'TABLE'
compiler|a C17 compiler for a 64-bit machine, with the C library's headers|gcc libc6-dev
cmake|CMake 3.25 or newer|cmake
make|make or ninja|make
blis|BLIS, with its headers|libblis-openmp-dev
jansson|jansson 2.13 or newer, with its headers|libjansson-dev
numpy|a python3 with numpy, which tells the causes of differences|python3-numpy
TABLE
    if [ $tests = yes ]; then
        echo "python|Python 3.8 or newer, for the test runner and the checks|python3"
        echo "pkg_config|pkg-config, for the test of what is installed for it|pkg-config"
        echo "cxx|a C++ compiler, for the kernels of the CUDA device on the host|g++"
        echo "mpi|MPI with its headers and mpirun, for ranks as processes|libopenmpi-dev openmpi-bin"
        echo "criterion|Criterion 2.4.1 or newer, for the tests|libcriterion-dev"
    fi
    if [ $pytorch = yes ] || [ $wheel = yes ]; then
        echo "venv|Python 3.9 or newer with venv, for an environment of PyTorch or of what makes wheels|python3-venv"
    fi
    if [ $lint = yes ]; then
        echo "clang_format|clang-format|clang-format"
        echo "clang_tidy|clang-tidy|clang-tidy"
        echo "fuzzer|clang with libFuzzer|clang libclang-rt-dev"
        echo "llvm_nm|llvm-nm|llvm"
    fi
    if [ $aarch64 = yes ]; then
        echo "aarch64_compilers|gcc and g++ for aarch64-linux-gnu|gcc-aarch64-linux-gnu g++-aarch64-linux-gnu"
        echo "qemu|qemu for programs of aarch64|qemu-user-static"
    fi
}

# Sets `missing` to the names of the needs not met, and `packages` to what apt would install for them.
look() {
    missing='' packages=''
    needs > "$scratch/needs"
    while IFS='|' read -r name _ package; do
        if ! "has_$name"; then
            missing="$missing $name"
            packages="$packages $package"
        fi
    done < "$scratch/needs"
}

# Says what is missing, one line each.
report() {
    while IFS='|' read -r name what package; do
        case " $missing " in
            *" $name "*) echo "  missing: $what (Debian, Ubuntu: $package)" >&2 ;;
        esac
    done < "$scratch/needs"
    if have cmake && ! has_cmake; then
        echo "  the cmake here is $(cmake --version | sed -n '1s/^cmake version //p')" >&2
    fi
}

# The libraries of arm64 are unpacked, not installed: apt installs a library for two architectures only in one version, and
# removes what stands in the way (Criterion, for one); and the loader of these must not be mixed with another's libraries.
# Nothing that apt knows of this machine is read or written, so root is not needed.
sysroot=$(cd "$(dirname "$0")/.." && pwd)/build/aarch64/sysroot
unpack_sysroot() {
    if [ $aarch64 = no ]; then return 0; fi
    if [ -e "$sysroot/complete" ] && [ -e "$sysroot/usr/lib/aarch64-linux-gnu/libblis.a" ]; then return 0; fi
    echo "install_deps.sh: unpacking libraries of arm64 to $sysroot (20 MB of packages, 100 MB on disk)"
    mkdir -p "$scratch/apt/lists/partial" "$scratch/apt/archives/partial"
    set -- apt-get -q -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= \
        -o Debug::NoLocking=1 -o Dir::State::status=/dev/null -o Dir::State="$scratch/apt" \
        -o Dir::State::lists="$scratch/apt/lists" -o Dir::Cache="$scratch/apt" \
        -o Dir::Cache::archives="$scratch/apt/archives"
    if ! { "$@" update && "$@" install --no-install-recommends --download-only libc6-dev libgomp1 libstdc++6 \
        libblis-openmp-dev libjansson-dev libcriterion-dev; } > "$scratch/apt.log" 2>&1; then
        tail -n 30 "$scratch/apt.log" >&2
        echo "install_deps.sh: packages of arm64 could not be had; do apt's sources have them?" >&2
        exit 2
    fi
    rm -rf "$sysroot"
    mkdir -p "$sysroot"
    for package in "$scratch"/apt/archives/*.deb; do dpkg-deb -x "$package" "$sysroot"; done
    # As installing them would.
    ln -s blis-openmp/libblis.so blis-openmp/libblis.so.4 blis-openmp/libblis.a "$sysroot/usr/lib/aarch64-linux-gnu/"
    ln -s blis-openmp/blis.h "$sysroot/usr/include/aarch64-linux-gnu/"
    : > "$sysroot/complete"
}

# The interpreter of tests with PyTorch. An environment that lacks something is made anew.
install_pytorch() {
    if [ $pytorch = no ]; then return 0; fi
    wanted=$(dirname "$0")/pytorch_tools.txt
    venv=${ANYRANK_PYTHON_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/anyrank/python-venv}
    if cmp -s "$wanted" "$venv/installed.txt"; then return 0; fi
    if [ $check_only = yes ]; then
        echo "  missing: PyTorch and what else scripts/pytorch_tools.txt lists, in $venv" >&2
        exit 2
    fi
    echo "install_deps.sh: installing what scripts/pytorch_tools.txt lists into $venv"
    rm -rf "$venv"
    if ! { python3 -m venv "$venv" && "$venv/bin/python" -m pip install --disable-pip-version-check -r "$wanted"; } \
        > "$scratch/pip.log" 2>&1; then
        tail -n 30 "$scratch/pip.log" >&2
        echo "install_deps.sh: PyTorch could not be installed; its messages are above" >&2
        exit 2
    fi
    cp "$wanted" "$venv/installed.txt"
}

if [ $aarch64 = yes ] && [ "$(uname -m)" = aarch64 ]; then
    aarch64=no # this machine is one
fi
# Not a need: a GPU's users have it, and it is gigabytes.
has_nvcc() {
    for candidate in ${CUDACXX:-} nvcc ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc; do
        if have "$candidate"; then return 0; fi
    done
    return 1
}
if [ $tests = yes ] && ! has_nvcc; then
    echo "install_deps.sh: no nvcc here: the CUDA device (gpu/cuda) and the command with it stay unbuilt and untested"
fi
look
if [ -z "$missing" ]; then
    [ $check_only = yes ] || unpack_sysroot
    install_pytorch
    exit 0
fi
if [ $check_only = yes ]; then
    report
    exit 2
fi
if ! have apt-get; then
    echo "install_deps.sh: this machine has no apt-get; install these and run it again:" >&2
    report
    exit 2
fi

if [ "$(id -u)" -eq 0 ]; then
    as_root=''
elif have sudo; then
    as_root=sudo
else
    echo "install_deps.sh: not root, and there is no sudo; as root run:" >&2
    echo "  apt-get install --no-install-recommends$packages" >&2
    report
    exit 2
fi

# A system package database that another apt-get holds is waited for, for two minutes.
# Its hundreds of lines are for a terminal, or for the case that it fails.
apt() {
    set -- env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 "$@"
    if [ -t 1 ]; then
        $as_root "$@"
    else
        apt_status=0
        $as_root "$@" > "$scratch/apt.log" 2>&1 || apt_status=$?
        [ $apt_status -eq 0 ] || tail -n 30 "$scratch/apt.log" >&2
        return $apt_status
    fi
}

echo "install_deps.sh: installing$packages (100 to 400 MB on disk)"
# A failed update is no reason to give up: one broken third-party source fails it, and the lists may be good enough.
apt update || echo "install_deps.sh: apt-get update failed; trying with the package lists there are" >&2
# Unquoted on purpose: a list of packages.
# shellcheck disable=SC2086
if ! apt install --no-install-recommends $packages; then
    echo "install_deps.sh: apt-get install failed; its message is above. Wanted:$packages" >&2
    exit 2
fi

look
if [ -n "$missing" ]; then
    echo "install_deps.sh: the packages are installed, and this is still missing:" >&2
    report
    exit 2
fi
unpack_sysroot
install_pytorch
