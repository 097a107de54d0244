#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The whole check of the accelerated build on a machine with a GPU: builds it, runs every step below, and prints one
# table at the end.
#
#   gpu/device-check.sh [--arch A] [--deps DIR] [--only STEP[,STEP]] [--rounds R] [--jobs N]
#   gpu/device-check.sh --host      the same steps on the emulated device, where there is no GPU
#   gpu/device-check.sh --list      the steps
#
#   --arch A     CUDA architectures to build for: native (default), or as CMake has them: 90, 80;90
#   --deps DIR   .deb files of what the build needs and this machine lacks; they are unpacked beside the build, nothing
#                is installed. On a machine with apt, DIR is filled by:
#                    cd DIR && apt-get download libblis4-openmp libblis-openmp-dev libjansson4 libjansson-dev libssl3 libssl-dev
#   --only       these steps alone (the build is made where it is missing)
#   --rounds R   rounds of random sizes in the conformance suite (default 20; with --host 1)
#   --budget S   no further step is begun after S seconds; what is left counts as skipped (default: none)
#   --build DIR  where to build (default build/device)
#
# Everything a step says goes to a log of its own in $OUT, or where that is not set in build/device-check. A step is ok,
# FAIL, or skip with the reason; it is stopped at its time limit. Exit status 1 if one failed.
set -u

steps="build conformance check1 check2 check4 check8 golden training nccl2 nccl4 ncclcalls memcheck racecheck initcheck
bench_gemm bench_block bench_torch bench_nccl"

limit_of() {
    case $1 in
        build) echo 900 ;;
        conformance) echo 600 ;;
        check* | nccl* | golden | training) echo 240 ;;
        *) echo 300 ;;
    esac
}

# --- what is asked for ------------------------------------------------------------------------------------------------

usage() { sed -n '3,22s/^# \{0,1\}//p' "$0"; }
refuse() { echo "device-check.sh: $1 (--help lists the options)" >&2; exit 2; }

host=no arch=native deps='' only='' rounds='' jobs='' budget=0 build='' step=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --list) printf '%s\n' $steps; exit 0 ;;
        --host) host=yes ;;
        --arch | --deps | --only | --rounds | --jobs | --budget | --build | --step)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            case $1 in
                --arch) arch=$2 ;;
                --deps) deps=$2 ;;
                --only) only=$(echo "$2" | tr ',' ' ') ;;
                --rounds) rounds=$2 ;;
                --jobs) jobs=$2 ;;
                --budget) budget=$2 ;;
                --build) build=$2 ;;
                --step) step=$2 ;; # one step, in this process: how the script runs them under a time limit
            esac
            shift ;;
        *) refuse "unknown option $1" ;;
    esac
    shift
done
for number in "${rounds:-1}" "${jobs:-1}" "$budget"; do
    case $number in '' | *[!0-9]*) refuse "'$number' is not a number" ;; esac
done
for name in $only; do
    case " $(echo $steps) " in *" $name "*) ;; *) refuse "no step $name" ;; esac
done
[ -z "$deps" ] || [ -d "$deps" ] || refuse "--deps: $deps is no folder"
[ -z "$deps" ] || deps=$(cd "$deps" && pwd)

cd "$(dirname "$0")/.." || exit 2
root=$(pwd)
logs=${OUT:-$root/build/device-check}
build=${build:-build/device}
case $build in /*) ;; *) build=$root/$build ;; esac
if [ $host = yes ]; then device=emulated; else device=cuda; fi
rounds=${rounds:-$([ $host = yes ] && echo 1 || echo 20)}
jobs=${jobs:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
mkdir -p "$logs" || exit 2
anyrank=$build/anyrank
conformance=$build/tests/conformance_main
have() { command -v "$1" >/dev/null 2>&1; }
skip() { echo "$1"; exit 77; }
cuda_bin=/usr/local/cuda/bin
[ -d $cuda_bin ] && PATH=$PATH:$cuda_bin
if have nvcc; then CUDACXX=${CUDACXX:-$(command -v nvcc)}; export CUDACXX; fi

# --- what the machine lacks -------------------------------------------------------------------------------------------

# Unpacks the .deb files once, and lets compiler, pkg-config, CMake and loader look there.
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
        # BLIS's library and header lie in folders of their own, to which Debian's alternatives point once installed.
        for folder in "$unpacked"/usr/lib/*/blis-*; do
            [ -d "$folder" ] && ln -sf "$folder"/libblis.* "$(dirname "$folder")/"
        done
        mkdir -p "$unpacked/usr/include/blis"
        for header in "$unpacked"/usr/include/*/blis-*/blis.h; do
            [ -f "$header" ] && ln -sf "$header" "$unpacked/usr/include/blis/"
        done
        # pkg-config files name /usr.
        find "$unpacked" -name '*.pc' -exec sed -i "s|^prefix=/usr|prefix=$unpacked/usr|" {} +
        touch "$unpacked/done"
    fi
    for folder in "$unpacked"/usr/lib "$unpacked"/usr/lib/*-linux-gnu; do
        LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        PKG_CONFIG_PATH=$folder/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
    done
    CMAKE_PREFIX_PATH=$unpacked/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
    CMAKE_LIBRARY_PATH=$(echo "$unpacked"/usr/lib/*-linux-gnu)${CMAKE_LIBRARY_PATH:+:$CMAKE_LIBRARY_PATH}
    export LD_LIBRARY_PATH PKG_CONFIG_PATH CMAKE_PREFIX_PATH CMAKE_LIBRARY_PATH
}
use_deps

# --- steps: each says in its last line what it found; exit status 0 ok, 77 skip, others FAIL -------------------------

step_build() {
    set -- -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DANYRANK_TESTS=ON -DANYRANK_CRITERION=OFF
    if have ninja; then set -- "$@" -GNinja; fi
    if [ $host = yes ]; then
        set -- "$@" -DANYRANK_CUDA=OFF
    else
        set -- "$@" -DANYRANK_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch"
    fi
    cmake "$@" || return 1
    cmake --build "$build" -j "$jobs" --target anyrank_cli conformance_main || return 1
    "$anyrank" info
    if [ $host = yes ]; then
        echo "the emulated device alone"
    else
        "$anyrank" info | sed -n 's/^CUDA  *//p' | head -n 1
    fi
}

step_conformance() {
    "$conformance" $device --rounds "$rounds" > "$logs/conformance.txt" 2>&1
    status=$?
    cat "$logs/conformance.txt"
    return $status
}

# The bundled models in one layout of N ranks that share the GPU, exact and native.
check_ranks() {
    case $1 in
        1) layout="--tp 1 --dp 1" ;;
        2) layout="--tp 2" ;;
        4) layout="--tp 2 --dp 2" ;;
        8) layout="--tp 4 --dp 2" ;;
    esac
    small=
    [ $host = no ] || small="--seq 16 --steps 1"
    count=0
    for model in llama-demo gpt2-demo stack-demo; do
        for numerics in exact native; do
            # shellcheck disable=SC2086
            "$anyrank" check $model $layout $small --numerics $numerics --skip-f64 --device $device --no-color ||
                { echo "$model $layout $numerics: exit status $?"; return 1; }
            count=$((count + 1))
        done
    done
    echo "$layout: $count checks of 3 models, exact and native: 0 differ"
}
step_check1() { check_ranks 1; }
step_check2() { check_ranks 2; }
step_check4() { check_ranks 4; }
step_check8() { check_ranks 8; }

# The device's bits are the CPU's, and both are PyTorch's within the sensitivity of the model.
step_golden() {
    scratch=$(mktemp -d) || return 1
    trap 'rm -rf "$scratch"' EXIT
    count=0
    for folder in "$root"/tests/golden/*/; do
        [ -f "$folder/grads.safetensors" ] || continue
        name=$(basename "$folder")
        "$anyrank" grads "$folder" --input "$folder/batch.safetensors" --out "$scratch/cpu" --sensitivity -q &&
            "$anyrank" grads "$folder" --input "$folder/batch.safetensors" --out "$scratch/device" --device $device -q ||
            { echo "$name: grads failed"; return 1; }
        for file in outputs grads; do
            "$anyrank" verify "$scratch/cpu/$file.safetensors" "$scratch/device/$file.safetensors" --bits -q ||
                { echo "$name: $file of $device have other bits than the CPU's"; return 1; }
            "$anyrank" verify "$folder/$file.safetensors" "$scratch/device/$file.safetensors" -q \
                --sensitivity "$scratch/cpu/allowed.safetensors" ||
                { echo "$name: $file are not PyTorch's within the allowance"; return 1; }
        done
        rm -rf "$scratch/cpu" "$scratch/device"
        count=$((count + 1))
    done
    [ $count -gt 0 ] || { echo "no golden models"; return 1; }
    echo "$count golden models: bits of the CPU, values of PyTorch"
}

hash_after_training() {
    seq=16
    [ $host = no ] || seq=4
    "$anyrank" train "$@" --steps 20 --batch 4 --seq $seq --json - -q | sed -n 's/.*"weights_hash": *"\([0-9a-f]*\)".*/\1/p'
}
step_training() {
    for model in llama-demo gpt2-demo; do
        cpu=$(hash_after_training $model)
        own=$(hash_after_training $model --device $device)
        shared=$(hash_after_training $model --device $device --tp 2 --dp 2)
        echo "$model: cpu $cpu, $device $own, on 4 ranks $shared"
        [ -n "$cpu" ] && [ "$cpu" = "$own" ] && [ "$cpu" = "$shared" ] || return 1
    done
    echo "weights after 20 steps: one hash on the CPU, on $device, and on 4 ranks sharing it"
}

# launch N COMMAND...: N processes on this machine's GPU, as torchrun would start them.
launch() {
    n=$1
    shift
    port=$((20000 + $$ % 20000))
    rank=0
    pids=
    while [ $rank -lt "$n" ]; do
        RANK=$rank WORLD_SIZE=$n LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            NCCL_HOSTID=anyrank-check-$rank NCCL_SOCKET_IFNAME=lo "$@" > "$logs/$name.rank$rank.txt" 2>&1 &
        pids="$pids $!"
        rank=$((rank + 1))
    done
    worst=0
    for pid in $pids; do
        wait "$pid" || worst=$?
    done
    cat "$logs/$name.rank0.txt"
    [ $worst -eq 0 ] || tail -n 3 "$logs/$name".rank[1-9]*.txt
    return $worst
}

nccl_ready() {
    [ $host = no ] || skip "real NCCL needs a GPU"
    case $("$anyrank" info | sed -n 's/^NCCL  *//p') in
        '' | 'not '* | none*) skip "this build has no NCCL" ;;
    esac
}
nccl_ranks() {
    nccl_ready
    name=nccl$1
    layout="--tp $1"
    [ "$1" = 4 ] && layout="--tp 2 --dp 2"
    for model in llama-demo gpt2-demo; do
        for numerics in exact native; do
            # shellcheck disable=SC2086
            launch "$1" "$anyrank" check $model $layout --numerics $numerics --skip-f64 --device cuda --transport nccl \
                --share-gpus --no-color || { echo "$model $layout $numerics: exit status $?"; return 1; }
        done
    done
    echo "$1 processes on one GPU through NCCL: 2 models, exact and native, 0 differ"
}
step_nccl2() { nccl_ranks 2; }
step_nccl4() { nccl_ranks 4; }

# A mistake of one process is told by all, within the timeout, and none hangs.
step_ncclcalls() {
    nccl_ready
    name=ncclcalls
    launch 2 "$anyrank" check llama-demo --tp 2 --skip-f64 --device cuda --transport nccl --share-gpus --timeout 20 \
        --inject column_dx_not_reduced --no-color
    status=$?
    [ $status -eq 1 ] || { echo "exit status $status where a difference was to be found"; return 1; }
    echo "a fault injected into 2 processes is found and named"
}

# Small: a tool makes every access a hundred times slower.
sanitize() {
    [ $host = no ] || skip "compute-sanitizer needs a GPU"
    have compute-sanitizer || skip "no compute-sanitizer here"
    compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 "$conformance" cuda --passes first --small
    status=$?
    [ $status -eq 0 ] || { echo "$1: exit status $status (9: the tool found something)"; return 1; }
    echo "$1: no error in the conformance suite"
}
step_memcheck() { sanitize memcheck; }
step_racecheck() { sanitize racecheck; }
step_initcheck() { sanitize initcheck; }

gpu_bench() { [ $host = no ] || skip "times of the emulated device say nothing"; }
step_bench_gemm() {
    gpu_bench
    "$anyrank" bench gemm --device cuda --no-color --json "$logs/bench_gemm.json" || return 1
    echo "exact products beside cuBLAS: bench_gemm.json"
}
# The blocks of width 768, and one of a large model, whose sizes bench/torch_block.py has too.
step_bench_block() {
    gpu_bench
    large=$logs/large-block
    mkdir -p "$large"
    cat > "$large/config.json" <<JSON
{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32,
 "num_key_value_heads": 8, "intermediate_size": 11008, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 256,
 "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": false}
JSON
    "$anyrank" bench block --device cuda --no-color --batch 4 || return 1
    for precision in f32 tf32 bf16; do
        batch=8
        [ $precision != f32 ] || batch=2
        echo "h 4096, 32 heads, 8 kv, ffn 11008, batch $batch x seq 1024, $precision:"
        "$anyrank" bench block "$large" --device cuda --no-color --batch $batch --seq 1024 --precision $precision \
            --repetitions 7 --json "$logs/bench_block_$precision.json" || return 1
    done
    echo "blocks: bench_block_f32.json, _tf32, _bf16"
}
step_bench_torch() {
    gpu_bench
    python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || skip "no PyTorch with CUDA"
    python3 "$root/bench/torch_block.py" --device cuda --batch 4 || return 1
    python3 "$root/bench/torch_block.py" --device cuda --batch 4 --fused || return 1
    echo "the same blocks in PyTorch"
}
step_bench_nccl() {
    gpu_bench
    nccl_ready
    name=bench_nccl
    "$anyrank" bench --help | grep -q -e '--transport' || skip "bench takes no --transport"
    launch 2 "$anyrank" bench allreduce --device cuda --transport nccl --share-gpus --no-color || return 1
    echo "all-reduces through ar_comm beside direct calls"
}

if [ -n "$step" ]; then
    "step_$step"
    exit $?
fi

# --- all of them ------------------------------------------------------------------------------------------------------

if [ $host = no ] && ! have nvcc; then
    refuse "no nvcc here; --host checks what needs no GPU"
fi
limited() {
    if have timeout; then timeout -k 10 "$@"; else shift && "$@"; fi
}
again() {
    set -- --step "$1" --arch "$arch" --rounds "$rounds" --jobs "$jobs" --build "$build"
    [ -z "$deps" ] || set -- "$@" --deps "$deps"
    [ $host = no ] || set -- "$@" --host
    limited "$(limit_of "$2")" sh "$root/gpu/device-check.sh" "$@"
}

chosen=$(echo ${only:-$steps}) # on one line
case " $chosen " in
    *" build "*) ;;
    *) [ -x "$anyrank" ] || chosen="build $only" ;;
esac
began=$(date +%s)
table=$logs/summary.txt
passed=0 failed=0 skipped=0 broken=no
: > "$table"
for name in $chosen; do
    from=$(date +%s)
    log=$logs/$name.log
    if [ $broken = yes ]; then
        status=77
        echo "nothing was built" > "$log"
    elif [ "$budget" -gt 0 ] && [ $((from - began)) -ge "$budget" ]; then
        status=77
        echo "the budget of $budget s is used up" > "$log"
    else
        echo "--- $name"
        OUT=$logs again "$name" > "$log" 2>&1 < /dev/null
        status=$?
    fi
    what=$(tail -n 1 "$log" | cut -c 1-150)
    case $status in
        0) verdict=ok passed=$((passed + 1)) ;;
        77) verdict=skip skipped=$((skipped + 1)) ;;
        124 | 137) verdict=FAIL failed=$((failed + 1)) what="stopped after $(limit_of "$name") s; $what" ;;
        *) verdict=FAIL failed=$((failed + 1)) ;;
    esac
    [ $status -eq 0 ] || [ "$name" != build ] || broken=yes
    printf '%-12s %-4s %5d s  %s\n' "$name" $verdict $(($(date +%s) - from)) "$what" | tee -a "$table"
    [ $verdict != FAIL ] || tail -n 15 "$log" | sed 's/^/     | /'
done
echo
echo "device-check on $device:"
cat "$table"
echo "$passed ok, $failed failed, $skipped skipped; logs in $logs" | tee -a "$table"
[ $failed -eq 0 ]
