# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154,SC2034 # device-check.sh reads this file
# Of gpu/device-check.sh: the programs that its steps run, and what a build of them lacks.

# Sets anyrank, conformance, smoke and bench, which with gemm, block or nccl behind it is a program: those of --prebuilt, else of the build. False: they must be built.
find_programs() {
    if [ -n "$prebuilt" ]; then
        programs_at "$prebuilt" "$prebuilt" "$prebuilt/bench_"
        lend_libgcc
        if why=$(programs_start) && why=$(driver_serves); then
            return 0
        fi
        echo "--prebuilt $prebuilt: $why; building instead" | tee "$logs/prebuilt.log"
        prebuilt=
    fi
    programs_at "$build" "$build/tests" "$build/bench/"
    return 1
}

programs_at() {
    anyrank=$1/anyrank conformance=$2/conformance_main smoke=$2/gpu_smoke bench=$3
    export anyrank conformance smoke bench prebuilt
}

# A thread of OpenMP that ends asks the C library for libgcc_s, which every machine with a compiler's library has. Where
# there is none, it is the one beside the programs; nowhere else, since libraries of the machine may want their own.
lend_libgcc() {
    for file in /lib/libgcc_s.so.1 /lib64/libgcc_s.so.1 /usr/lib/libgcc_s.so.1 /usr/lib64/libgcc_s.so.1 \
        /lib/*-linux-gnu/libgcc_s.so.1 /usr/lib/*-linux-gnu/libgcc_s.so.1; do
        [ ! -e "$file" ] || return 0
    done
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$prebuilt/lib
    export LD_LIBRARY_PATH
}

# What they say to an argument that is none shows that they start. Else prints why they do not.
programs_start() {
    for program in "$anyrank" "$conformance" "$smoke"; do
        if [ ! -x "$program" ]; then
            echo "there is no program $(basename "$program")"
            return 1
        fi
        said=$("$program" --no-such-option 2>&1 < /dev/null)
        status=$?
        if [ $status -ne 2 ]; then
            said=$(echo "$said" | head -n 1 | cut -c 1-200)
            echo "$(basename "$program") does not start (exit status $status): $said"
            return 1
        fi
    done
}

# A driver that is older than what the programs were built with may yet do for a build of this machine's toolkit. Else
# prints what anyrank says of it.
driver_serves() {
    [ "$host" = no ] || return 0
    old=$("$anyrank" info 2>/dev/null | sed -n 's/^CUDA .*\(driver is for CUDA\)/\1/p')
    [ -z "$old" ] || ! PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null 2>&1 || { echo "its $old"; return 1; }
}

# Unpacks the .deb files of --deps once, and lets compiler, CMake and loader look there.
use_deps() {
    [ -n "$deps" ] || return 0
    unpacked=$build.deps
    if [ ! -f "$unpacked/done" ]; then
        rm -rf "$unpacked"
        mkdir -p "$unpacked"
        for file in "$deps"/*.deb; do
            [ -f "$file" ] || refuse "--deps: no .deb file in $deps"
            dpkg -x "$file" "$unpacked" || refuse "--deps: $file cannot be unpacked"
        done
        touch "$unpacked/done"
    fi
    # BLIS lies in a folder of its own, to which Debian's alternatives point once it is installed.
    for folder in "$unpacked"/usr/lib/*-linux-gnu "$unpacked"/usr/lib/*-linux-gnu/blis-*; do
        [ ! -d "$folder" ] || LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    done
    for folder in "$unpacked"/usr/include "$unpacked"/usr/include/*-linux-gnu/blis-*; do
        [ ! -d "$folder" ] || CMAKE_INCLUDE_PATH=$folder${CMAKE_INCLUDE_PATH:+:$CMAKE_INCLUDE_PATH}
    done
    CMAKE_LIBRARY_PATH=$LD_LIBRARY_PATH
    export LD_LIBRARY_PATH CMAKE_INCLUDE_PATH CMAKE_LIBRARY_PATH
}
