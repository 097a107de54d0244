#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The steps of gpu/device-check.sh, which starts this with the name of one: sh steps.sh NAME. What a step found is its
# last line; exit status 0 ok, 77 skip with the reason, others FAIL. $logs/NAME.figures is printed below the table,
# $logs/NAME*.json goes into summary.json.
# shellcheck disable=SC2154 # device-check.sh exports what it knows
set -u
have() { command -v "$1" >/dev/null 2>&1; }
skip() { echo "$1"; exit 77; }
on_gpu() { [ "$host" = no ]; }
# Lines of a table that anyrank prints, up to the empty one before its explanation.
first_table() { sed '/^$/,$d' "$1"; }

# --- the machine ------------------------------------------------------------------------------------------------------

is_gvisor() {
    dmesg 2>/dev/null | grep -qi gvisor || grep -q 'Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54' /proc/version
}
step_machine() {
    gvisor=no
    is_gvisor && gvisor=yes
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null || echo "unknown C library")
    echo "$(uname -sm), $(getconf _NPROCESSORS_ONLN) processors, $libc, gVisor: $gvisor"
    nvcc=$(PATH=$PATH:/usr/local/cuda/bin nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    cmake=$(cmake --version 2>/dev/null | sed -n '1s/.* //p')
    echo "nvcc: ${nvcc:-none}, cmake: ${cmake:-none}, python3: $(python3 -V 2>&1 | head -n 1)"
    gpus=$(nvidia-smi -L 2>/dev/null | grep '^GPU')
    echo "${gpus:-no GPU that nvidia-smi lists}"
    nvidia-smi --query-gpu=driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null
    [ ! -f "$prebuilt/manifest.txt" ] || cat "$prebuilt/manifest.txt"
    "$anyrank" info || { echo "anyrank info fails"; return 1; }
    "$anyrank" info | grep -E '^(CUDA|cuBLAS|NCCL) ' > "$logs/machine.figures"
    if on_gpu && ! "$anyrank" info | grep -q '^CUDA.*, [1-9][0-9]* GPU'; then
        "$anyrank" info | sed -n 's/^CUDA  */no GPU: /p' | head -n 1
        return 1
    fi
    echo "$(echo "${gpus:-no GPU}" | head -n 1 | sed 's/ (UUID.*//'), $libc, gVisor: $gvisor, nvcc: ${nvcc:-none}"
}

# --- the same bits ----------------------------------------------------------------------------------------------------

step_smoke() { "$smoke" "$device"; }

# Every slot, also after one that differs; a case that does is printed with its shape. Three passes: 16 and 10 products
# of digits, and with small shapes left to the kernel that stands in for cuBLAS.
step_conformance() {
    set -- "$device" --rounds 1
    on_gpu || set -- "$@" --passes first --small
    "$conformance" "$@" > "$logs/conformance.txt" 2>&1
    status=$?
    cat "$logs/conformance.txt"
    [ $status -eq 0 ] || grep -v ' ok\( (within a bound)\)*$' "$logs/conformance.txt" | head -n 25 | cut -c 1-200 \
        > "$logs/conformance.figures"
    grep '^cpu and ' "$logs/conformance.txt"
    return $status
}

# check_all LAYOUT MODELS NUMERICS OPTIONS...: bundled models, compared with the baseline on the host.
check_all() {
    layout=$1 models=$2 all=$3
    shift 3
    count=0
    for model in $models; do
        for numerics in $all; do
            # shellcheck disable=SC2086
            "$anyrank" check "$model" $layout "$@" --numerics "$numerics" --skip-f64 --strict-predictions \
                --device "$device" --no-color ||
                { echo "$model $layout $numerics: exit status $?"; return 1; }
            count=$((count + 1))
        done
    done
    echo "$layout: $count checks ($models; $all): 0 differ"
}
step_check1() { check_all "--tp 1" "llama-demo" exact --seq 8 --steps 1; }
step_check2() { check_all "--tp 2" "llama-demo" exact --seq 8 --steps 1; }
step_check4() { check_all "--tp 2 --dp 2" "llama-demo" exact --seq 8 --steps 1; }
step_check8() {
    if on_gpu; then
        check_all "--tp 4 --dp 2" "llama-demo gpt2-demo stack-demo" "exact native"
    else
        check_all "--tp 4 --dp 2" "llama-demo" exact --seq 4 --steps 1
    fi
}

# The device's bits are the CPU's, and both are PyTorch's within the sensitivity of the model.
step_golden() {
    scratch=$(mktemp -d) || return 1
    trap 'rm -rf "$scratch"' EXIT
    count=0
    for folder in "$root"/tests/golden/*/; do
        name=$(basename "$folder")
        [ -f "$folder/grads.safetensors" ] || continue
        on_gpu || [ "$name" = gpt2-tiny ] || continue
        set -- "$folder" --input "$folder/batch.safetensors" -q
        "$anyrank" grads "$@" --out "$scratch/cpu" --sensitivity &&
            "$anyrank" grads "$@" --out "$scratch/device" --device "$device" ||
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
    echo "golden models: $count have the CPU's bits and PyTorch's values"
}

hash_after_training() {
    "$anyrank" train "$@" --json - -q | sed -n 's/.*"weights_hash": *"\([0-9a-f]*\)".*/\1/p'
}
step_training() {
    models="llama-demo gpt2-demo" steps=20 seq=16
    on_gpu || models=gpt2-demo steps=2 seq=4
    for model in $models; do
        cpu=$(hash_after_training $model --steps $steps --batch 4 --seq $seq)
        own=$(hash_after_training $model --steps $steps --batch 4 --seq $seq --device "$device")
        shared=$(hash_after_training $model --steps $steps --batch 4 --seq $seq --device "$device" --tp 2 --dp 2)
        echo "$model: cpu $cpu, $device $own, on 4 ranks $shared"
        [ -n "$cpu" ] && [ "$cpu" = "$own" ] && [ "$cpu" = "$shared" ] || return 1
    done
    echo "weights after $steps steps: one hash on the CPU, on $device, and on 4 ranks sharing it"
}

# --- processes over NCCL ----------------------------------------------------------------------------------------------

# launch N COMMAND...: N processes on this machine's GPU, as torchrun would start them.
launch() {
    n=$1
    shift
    port=$((20000 + $$ % 12000))
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
    on_gpu || skip "NCCL needs a GPU"
    found=$("$anyrank" info | sed -n 's/^NCCL  *//p' | head -n 1)
    case $found in [0-9]*) ;; *) skip "no NCCL: ${found:-anyrank info says nothing of it}" ;; esac
}
# nccl_ranks LAYOUT N NUMERICS
nccl_ranks() {
    nccl_ready
    for numerics in $3; do
        # shellcheck disable=SC2086
        launch "$2" "$anyrank" check llama-demo $1 --seq 8 --numerics "$numerics" --skip-f64 \
            --strict-predictions --device cuda --transport nccl --share-gpus --no-color || { echo "$1 $numerics: exit status $?"; return 1; }
    done
    echo "$2 processes on one GPU through NCCL, $1, $3: 0 differ"
}
step_nccl2() { nccl_ranks "--tp 2" 2 exact; }
step_nccl4() { nccl_ranks "--tp 2 --dp 2" 4 "exact native"; }

# A fault of one layer is found by all processes, and none hangs.
step_ncclcalls() {
    nccl_ready
    launch 2 "$anyrank" check llama-demo --tp 2 --seq 8 --skip-f64 --device cuda --transport nccl --share-gpus \
        --timeout 20 --inject column_dx_not_reduced --no-color
    status=$?
    [ $status -eq 1 ] || { echo "exit status $status where a difference was to be found"; return 1; }
    echo "a fault injected into 2 processes is found and named"
}
step_bench_nccl() {
    nccl_ready
    [ -x "$bench_nccl" ] || skip "no program bench_nccl beside $conformance"
    ANYRANK_BENCH_SHARE=1
    export ANYRANK_BENCH_SHARE
    launch 2 "$bench_nccl" 5 || return 1
    head -n 12 "$logs/$name.rank0.txt" > "$logs/bench_nccl.figures"
    tail -n 1 "$logs/$name.rank0.txt"
}

# --- how fast ---------------------------------------------------------------------------------------------------------

# The first row of a table of bench gemm.
gemm_words() {
    awk 'NR == 2 {printf "%s x %s x %s: exact at %.2f x the speed of sgemm, weights prepared %.2f x; ", $2, $3, $4,
                         1 / $6, 1 / $7
                  print "pedantic sgemm: " $10}' "$1"
}

# On the emulated device times say nothing: one small size shows that the measurement runs.
step_bench_gemm() {
    set -- bench gemm --device "$device" --no-color --json "$logs/bench_gemm.json"
    on_gpu || set -- "$@" --m 40 --n 24 --k 16 --repetitions 1
    "$anyrank" "$@" > "$logs/bench_gemm.txt" || return 1
    cat "$logs/bench_gemm.txt"
    first_table "$logs/bench_gemm.txt" > "$logs/bench_gemm.figures"
    gemm_words "$logs/bench_gemm.txt"
}

# The blocks of width 4096 in each precision, and what the longest slots take.
step_bench_block() {
    for precision in f32 tf32 bf16; do
        set -- --size large --seq 1024 --repetitions 5 --batch 8
        [ $precision != f32 ] || set -- "$@" --batch 2
        on_gpu || set -- llama-demo --seq 4 --repetitions 1 --batch 1
        "$anyrank" bench block "$@" --precision $precision --device "$device" --profile --no-color \
            --json "$logs/bench_block_$precision.json" > "$logs/bench_block_$precision.txt" || return 1
        cat "$logs/bench_block_$precision.txt"
        {
            echo "$precision:"
            first_table "$logs/bench_block_$precision.txt"
        } >> "$logs/bench_block.figures"
        on_gpu || break
    done
    {
        echo "slots, those of f32:"
        awk '$2 == "numerics" {on = 1; print; next} on && ++n[$1, $2] <= 8' "$logs/bench_block_f32.txt"
    } >> "$logs/bench_block.figures"
    echo "$(first_table "$logs/bench_block_f32.txt" |
        awk 'NR > 1 {printf "%s%s %s %s %s", n++ ? ", " : "", $1, $3, $6, $7}'), batch and sequence below"
}

# The kernel of our own in place of cuBLAS's int8 products (gpu/sm90): first its bits, then how fast.
step_own_kernel() {
    ANYRANK_IMMA_KERNEL=own
    export ANYRANK_IMMA_KERNEL
    for slot in gemm_i64 gemm_round gemm_acc; do
        set -- "$device" --slot $slot --passes first
        on_gpu || set -- "$@" --small
        "$conformance" "$@" > "$logs/own_kernel.txt" 2>&1
        status=$?
        cat "$logs/own_kernel.txt"
        if [ $status -eq 77 ] && grep -q 'is for compute capability 9.0' "$logs/own_kernel.txt"; then
            echo "the kernel is for compute capability 9.0 alone: nothing to check"
            return 0
        fi
        [ $status -eq 0 ] || return $status
    done
    on_gpu || { echo "3 slots, 0 differ"; return 0; }
    "$anyrank" bench gemm --device cuda --no-color --json "$logs/own_gemm.json" > "$logs/own_gemm.txt" &&
        "$anyrank" bench block --size large --seq 1024 --batch 2 --repetitions 5 --device cuda --profile --no-color \
            --json "$logs/own_block.json" > "$logs/own_block.txt" || return 1
    cat "$logs/own_gemm.txt" "$logs/own_block.txt"
    { first_table "$logs/own_gemm.txt"; first_table "$logs/own_block.txt"; } > "$logs/own_kernel.figures"
    echo "3 slots, 0 differ; $(gemm_words "$logs/own_gemm.txt")"
}

# The same blocks in PyTorch, in turns with these.
step_bench_torch() {
    on_gpu || skip "PyTorch beside anyrank needs a GPU"
    python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || skip "no PyTorch with CUDA"
    PYTHONUNBUFFERED=1 python3 "$root/bench/torch_block.py" --device cuda --size large --repetitions 5 \
        --beside "$anyrank" --json "$logs/bench_torch.json" > "$logs/bench_torch.figures" 2> "$logs/bench_torch.err"
    status=$?
    cat "$logs/bench_torch.err" "$logs/bench_torch.figures"
    [ $status -eq 0 ] || return $status
    echo "$(wc -l < "$logs/bench_torch.figures") rows, ratios of one run below"
}

# --- compute-sanitizer ------------------------------------------------------------------------------------------------

# Small: a tool makes every access a hundred times slower.
sanitize() {
    on_gpu || skip "compute-sanitizer needs a GPU"
    PATH=$PATH:/usr/local/cuda/bin
    have compute-sanitizer || skip "no compute-sanitizer here"
    compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 "$conformance" cuda --passes first --small \
        > "$logs/$1.txt" 2>&1
    status=$?
    tail -n 60 "$logs/$1.txt"
    if grep -q 'Device not supported' "$logs/$1.txt"; then
        skip "compute-sanitizer refuses this machine: Device not supported"
    fi
    [ $status -eq 0 ] || { echo "$1: exit status $status (9: the tool found something)"; return 1; }
    echo "$1: no error in the conformance suite"
}
step_memcheck() { sanitize memcheck; }
step_racecheck() { sanitize racecheck; }
step_initcheck() { sanitize initcheck; }

name=$1
"step_$name"
