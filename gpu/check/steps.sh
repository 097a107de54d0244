#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The steps of gpu/device-check.sh, which starts this with the name of one: sh steps.sh NAME. What a step found is its
# last line; exit status 0 ok, 77 skip with the reason, others FAIL. $logs/NAME.figures is printed below the table,
# $logs/NAME*.json goes into summary.json.
# shellcheck disable=SC2154 # device-check.sh exports what it knows
set -u
. "$root/gpu/check/errors.sh"
have() { command -v "$1" >/dev/null 2>&1; }
skip() { echo "$1"; exit 77; }
on_gpu() { [ "$host" = no ]; }
# Lines of the first table that a program prints, up to the empty one behind it.
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

# compare_slots OPTIONS...: the conformance suite into $logs/$name.txt. After an error that ends the GPU's context, which
# all later cases of a process meet, the slots run once more, each in a process of its own.
compare_slots() {
    "$conformance" "$device" "$@" > "$logs/$name.txt" 2>&1
    status=$?
    if [ $status -ne 0 ] && sticky_error "$logs/$name.txt" > /dev/null; then
        mv "$logs/$name.txt" "$logs/$name.together.txt"
        for slot in $("$conformance" --list); do
            timeout 20 "$conformance" "$device" "$@" --slot "$slot" 2>&1 | tail -n 30
        done > "$logs/$name.txt"
    fi
    cat "$logs/$name.txt"
    return $status
}

# Every slot, also after one that differs; a case that does is printed with its shape. Three passes: 16 and 10 products
# of digits, and with small shapes left to the kernel that stands in for cuBLAS. The second round has the results of
# many tiles.
step_conformance() {
    if on_gpu; then compare_slots --rounds 2; else compare_slots --rounds 1 --passes first --small; fi
    status=$?
    [ $status -eq 0 ] || grep -v ' ok\( (within a bound)\)*$' "$logs/conformance.txt" | head -n 25 | cut -c 1-200 \
        > "$logs/conformance.figures"
    grep '^cpu and ' "$logs/conformance.txt" | tail -n 1
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
# train_and_compare MODELS STEPS SEQ LAYOUTS..: the hash of the CPU on one rank, and of the device in each layout.
train_and_compare() {
    models=$1 steps=$2 seq=$3
    shift 3
    for model in $models; do
        cpu=$(hash_after_training "$model" --steps "$steps" --batch 4 --seq "$seq")
        for layout; do
            # shellcheck disable=SC2086
            other=$(hash_after_training "$model" --steps "$steps" --batch 4 --seq "$seq" --device "$device" $layout)
            echo "$model: cpu $cpu, $device $layout $other"
            [ -n "$cpu" ] && [ "$cpu" = "$other" ] || return 1
        done
    done
}
step_training() {
    models="llama-demo gpt2-demo" steps=20 seq=16
    on_gpu || models=gpt2-demo steps=2 seq=4
    train_and_compare "$models" $steps $seq "--tp 1" "--tp 2 --dp 2" || return 1
    echo "weights after $steps steps: one hash on the CPU, on $device, and on 4 ranks sharing it"
}

# --- processes over NCCL ----------------------------------------------------------------------------------------------

# launch N COMMAND...: N processes on this machine's GPU, as torchrun would start them.
launch() {
    n=$1
    shift
    rank=0
    pids=
    while [ $rank -lt "$n" ]; do
        RANK=$rank WORLD_SIZE=$n LOCAL_RANK=$rank ANYRANK_NCCL_ID_FILE=$logs/$name.nccl-id \
            NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_HOSTID=anyrank-check-$rank NCCL_SOCKET_IFNAME=lo "$@" > "$logs/$name.rank$rank.txt" 2>&1 &
        pids="$pids $!"
        rank=$((rank + 1))
    done
    worst=0
    for pid in $pids; do
        wait "$pid" || worst=$?
    done
    cat "$logs/$name.rank0.txt"
    [ $worst -eq 0 ] || tail -n 3 "$logs/$name".rank[1-9]*.txt
    # What NCCL itself says, which may be that it takes no two processes on one GPU.
    [ $worst -eq 0 ] || grep -h ' NCCL WARN ' "$logs/$name".rank*.txt | sort -u | head -n 8 > "$logs/$name.figures"
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
# And what it costs that processes of NCCL load all of CUDA's modules when they begin: the same without, told and not
# judged, for a module that is loaded beside a collective can wait for it for ever.
step_nccl2() {
    from=$(date +%s)
    nccl_ranks "--tp 2" 2 exact || return
    eager=$(($(date +%s) - from)) from=$(date +%s) lazy=failed
    CUDA_MODULE_LOADING=LAZY nccl_ranks "--tp 2" 2 exact > "$logs/nccl2.lazy.txt" 2>&1 &&
        lazy="$(($(date +%s) - from)) s"
    echo "2 processes on one GPU through NCCL, --tp 2, exact: 0 differ; in $eager s, with modules loaded one by one: $lazy"
}
step_nccl4() { nccl_ranks "--tp 2 --dp 2" 4 "exact native"; }

# Ranks that are threads of one process, a GPU each. Between these NCCL reads and writes the ranks' own buffers, but
# small messages go another way, unless it is told otherwise.
step_gpus2() {
    nccl_ready
    gpus=$("$anyrank" info | sed -n 's/^CUDA .*, \([0-9]*\) GPU.*/\1/p')
    [ "${gpus:-0}" -ge 2 ] || skip "two ranks as threads need 2 GPUs; this machine has ${gpus:-none}"
    for protocol in Simple LL; do
        NCCL_PROTO=$protocol check_all "--tp 2" "llama-demo" "exact native" --seq 8 --steps 1 --transport nccl ||
            { echo "NCCL_PROTO=$protocol: failed"; return 1; }
    done
    echo "2 threads, a GPU each, through NCCL (Simple, LL), --tp 2, exact native: 0 differ"
}

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
    [ -x "${bench}nccl" ] || skip "no program ${bench}nccl"
    launch 2 "${bench}nccl" --repetitions 5 --share || return 1
    first_table "$logs/$name.rank0.txt" > "$logs/bench_nccl.figures"
    tail -n 1 "$logs/bench_nccl.figures"
}

# --- how fast ---------------------------------------------------------------------------------------------------------

# The first row of gemm's table.
gemm_words() {
    awk 'NR == 2 {printf "%s x %s x %s: exact at %.2f x the speed of sgemm, weights prepared %.2f x\n", $2, $3, $4,
                         1 / $6, 1 / $7}' "$1"
}

# On the emulated device times say nothing: one small size shows that the measurement runs.
step_bench_gemm() {
    set -- --device "$device" --json "$logs/bench_gemm.json"
    on_gpu || set -- "$@" --m 40 --n 24 --k 16 --repetitions 1
    "${bench}gemm" "$@" > "$logs/bench_gemm.txt" || return 1
    cat "$logs/bench_gemm.txt"
    first_table "$logs/bench_gemm.txt" > "$logs/bench_gemm.figures"
    gemm_words "$logs/bench_gemm.txt"
}

# The blocks of width 4096 in each precision, and what the longest slots take.
step_bench_block() {
    for precision in f32 tf32 bf16; do
        set -- --blocks large --seq 1024 --repetitions 5 --batch 8
        [ $precision != f32 ] || set -- "$@" --batch 2
        on_gpu || set -- --blocks llama-demo --seq 4 --repetitions 1 --batch 1
        "${bench}block" "$@" --precision $precision --device "$device" --profile \
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
        awk 'NR > 1 {printf "%s%s %s %s s", n++ ? ", " : "", $1, $3, $7}'), batch and sequence below"
}

# bits_of WAY PROGRAM...: the hashes of exact results that gemm or block computes in a way.
bits_of() {
    way=$1 program=$bench$2
    shift 2
    ANYRANK_IMMA_PATH=$way "$program" "$@" --device "$device" --repetitions 1 --json - > "$logs/bits.txt" || return 1
    awk '/"numerics": "native"/ {native = 1} /"bits":/ {if (!native) print $2; native = 0}' "$logs/bits.txt"
}
# Every way to compute the products has the same bits at every shape that is timed: cuBLAS with 16 and with 10 products
# of digits.
step_bits() {
    set -- "gemm" "block --blocks large --seq 1024 --batch 2"
    on_gpu || set -- "gemm --m 40 --n 24 --k 600" "block --blocks llama-demo --seq 4 --batch 1"
    ways="imma16 imma10"
    count=0
    for what; do
        first=''
        for way in $ways; do
            # shellcheck disable=SC2086
            found=$(bits_of "$way" $what) || { echo "$what by $way failed"; return 1; }
            echo "$what, $way:" $found
            [ -n "$found" ] || { echo "$what gave no bits"; return 1; }
            first=${first:-$found}
            [ "$found" = "$first" ] || { echo "$what: $way has other bits than imma16"; return 1; }
        done
        count=$((count + $(echo "$first" | wc -l)))
    done
    echo "$count results, each one hash by $ways"
}

# The same blocks in PyTorch, in turns with these.
step_bench_torch() {
    on_gpu || skip "PyTorch beside anyrank needs a GPU"
    python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || skip "no PyTorch with CUDA"
    PYTHONUNBUFFERED=1 python3 "$root/bench/torch_block.py" --device cuda --size large --repetitions 5 \
        --turns 1 --beside "${bench}block" --json "$logs/bench_torch.json" > "$logs/bench_torch.figures" 2> "$logs/bench_torch.err"
    status=$?
    cat "$logs/bench_torch.err" "$logs/bench_torch.figures"
    [ $status -eq 0 ] || return $status
    echo "$(wc -l < "$logs/bench_torch.figures") rows, ratios of one run below"
}

# --- compute-sanitizer ------------------------------------------------------------------------------------------------

# A slot at a time, those of the largest kernels first, small shapes, and of the library's kernels none: a tool makes
# every access a hundred times slower. What the time does not suffice for is said, and is no failure.
SANITIZED_FIRST="gemm_i64 gemm_acc pack row_exponents softmax_forward norm_backward acc_add"
sanitize() {
    on_gpu || skip "compute-sanitizer needs a GPU"
    PATH=$PATH:/usr/local/cuda/bin
    have compute-sanitizer || skip "no compute-sanitizer here"
    ended=$(($(date +%s) + ${limit:-90} - 10))
    done_slots=0 left=''
    for slot in $SANITIZED_FIRST $("$conformance" --list | grep -v -x -F "$(echo "$SANITIZED_FIRST" | tr ' ' '\n')"); do
        seconds=$((ended - $(date +%s)))
        [ $seconds -ge 3 ] || { left="$left $slot"; continue; }
        timeout $seconds compute-sanitizer --tool "$1" --kernel-name kns=ari_cuda --error-exitcode 9 --print-limit 20 \
            "$conformance" cuda --slot "$slot" --passes first --small > "$logs/$1.$slot.txt" 2>&1
        status=$?
        tail -n 8 "$logs/$1.$slot.txt"
        if grep -q 'Device not supported' "$logs/$1.$slot.txt"; then
            skip "compute-sanitizer refuses this machine: Device not supported"
        fi
        case $status in
            0) done_slots=$((done_slots + 1)) ;;
            124) left="$left $slot" ;;
            *) echo "$1: $slot: exit status $status (9: the tool found something)"; return 1 ;;
        esac
    done
    [ $done_slots -gt 0 ] || skip "compute-sanitizer ended no slot in its time"
    echo "$1: no error in $done_slots slots${left:+; no time for $(echo "$left" | wc -w)}"
}
step_memcheck() { sanitize memcheck; }
step_racecheck() { sanitize racecheck; }
step_initcheck() { sanitize initcheck; }

name=$1
"step_$name"
