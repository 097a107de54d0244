#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles the library and the command for macOS on ARM, as far as that goes without one: with the compiler and the
# system's headers that zig has (scripts/wheel_tools.sh), and this machine's headers of jansson. What the objects need from
# elsewhere must be in the system's library, but for CBLAS, jansson and the pages that the build makes.
#
#   scripts/check_darwin.sh      exit status 0, 1 with what is wrong, or 77 without zig or llvm-nm
set -eu
cd "$(dirname "$0")/.."
if ! command -v llvm-nm >/dev/null 2>&1; then
    echo "no llvm-nm here (scripts/install_deps.sh --lint installs it)"
    exit 77
fi
zig=$(scripts/wheel_tools.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/include" "$scratch/objects"
for header in jansson.h jansson_config.h; do
    path=$(printf '#include <%s>\n' $header | cc -E - | sed -n "s:^# 1 \"\(.*/$header\)\".*:\1:p" | head -n 1)
    cp "$path" "$scratch/include/"
done
folders=$(sed -n '/^set(ANYRANK_FOLDERS/,/)/p' CMakeLists.txt | sed 's/set(ANYRANK_FOLDERS//; s/)//')
# Unquoted on purpose: a list of folders.
# shellcheck disable=SC2086
for folder in $folders ref/cpu/blas gpu/cluster/mpi cli cli/* bench; do
    case $folder in
        gpu/cluster/mpi) echo gpu/cluster/mpi/absent.c ;;
        ref/cpu/blas) printf 'ref/cpu/blas/%s.c\n' native cblas cblas_info ;;
        *.[ch]) ;;
        *) find "$folder" -maxdepth 1 -name "*.c" ;;
    esac
done > "$scratch/files"
export scratch zig
status=0
xargs -P "$(getconf _NPROCESSORS_ONLN)" -I{} sh -c '
    exec "$zig" cc -target aarch64-macos.13.0 -c -o "$scratch/objects/$(echo {} | tr / _).o" -isystem "$scratch/include" \
        -Iinclude -Isrc -I. -std=gnu17 -D_GNU_SOURCE -D_DARWIN_C_SOURCE -ffp-contract=off -fno-sanitize=all -O1 -Wall -Wextra \
        -Werror -Wno-unknown-pragmas -Wno-format-zero-length -Wno-missing-field-initializers -Wno-string-concatenation -DANYRANK_VERSION=\"\" -DANYRANK_BUILD_TYPE=\"\" \
        -DANYRANK_SOURCE_DATA=\"\" -DANYRANK_BUILD_TREE=\"\" -DANYRANK_INSTALLED_DATA=\"\" \
        -DANYRANK_DATA_FROM_COMMAND=\"\" -DANYRANK_WHY_NO_CUDA=\"\" -DANYRANK_WHY_NO_MPI=\"\" \
        -DANYRANK_DATA_FROM_BUILD=\"\" "-Dmain=main_$(echo {} | tr -c "[:alnum:]\n" _)" {}' < "$scratch/files" ||
    status=1
[ $status -eq 0 ] || exit 1
"$zig" cc -target aarch64-macos.13.0 -shared -Wl,-undefined,dynamic_lookup -o "$scratch/anyrank.dylib" "$scratch"/objects/*.o
llvm-nm -u "$scratch/anyrank.dylib" | sed -n 's/^ *U  *//p; s/^\(_[^ ]*\)$/\1/p' | sort -u |
    grep -vE '^_(cblas_|json_|ari_(plan|report|trace)_(kinds|page)|ari_fault_texts)|^dyld_' > "$scratch/needed" || true
tr -cs 'A-Za-z0-9_$' '\n' < "$("$zig" env | sed -n 's/.*lib_dir[^"]*"\([^"]*\)".*/\1/p')/libc/darwin/libSystem.tbd" |
    sort -u > "$scratch/offered"
if comm -23 "$scratch/needed" "$scratch/offered" | grep .; then
    echo "are in no library of macOS"
    exit 1
fi
echo "compiled $(wc -l < "$scratch/files") files for macOS"
