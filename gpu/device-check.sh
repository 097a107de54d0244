#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The whole check of the accelerated build on a machine with a GPU, in one command and under ten minutes: the steps that
# tell most in a second come first, each has its own limit, and one table is printed at the end.
#
#   gpu/device-check.sh [--prebuilt DIR] [options]
#   gpu/device-check.sh --host      the same steps on the emulated device, where there is no GPU
#   gpu/device-check.sh --list      the steps
#
#   --prebuilt DIR  what gpu/prebuilt.sh made, or its archive DIR.tgz. Where one of the programs does not start, it says
#                   why and builds
#   --deps DIR      .deb files of BLIS and jansson with their -dev packages, for a machine that builds and lacks them:
#                   they are unpacked beside the build, nothing is installed. Where there is apt, in DIR:
#                       apt-get download libblis4-openmp libblis-openmp-dev libjansson4 libjansson-dev
#   --arch A        CUDA architectures to build for: native (default), or as CMake has them: 90, 80;90
#   --only STEPS    these alone, with commas between
#   --expect WORDS  nccl, torch, sanitizers or steps whose skip is a failure; with a GPU, all are
#   --allow-skip WORDS  those whose skip is none; always gpus2, which takes two GPUs; with --host, nccl, torch and
#                   sanitizers
#   --stop-early    no further steps after an error that ends a GPU's context, which each process has anew
#   --keep-going    further steps also then, as without either
#   --budget S      no step runs past S seconds in all (default 540); what is left over has failed
#   --jobs N        of a build
#   --build DIR     where to build and to keep the logs (default: a folder of $TMPDIR or /tmp, never the sources')
#
# Results are three files in $OUT, or where that is not set in DIR.results: summary.txt, the table; summary.json;
# logs.tgz, written anew after every step. A step is ok, FAIL, or skip with the reason; a skip that nothing allows is a
# FAIL. Exit status 1 if one failed.
set -u

steps="machine smoke conformance check1 check2 check4 golden training bench_gemm bench_block bits bench_torch
nccl2 gpus2 check8 nccl4 ncclcalls bench_nccl memcheck racecheck initcheck"

# Seconds.
limit_of() {
    case $1 in
        build) echo 500 ;;
        machine | smoke) echo 30 ;;
        conformance) echo 120 ;;
        bench_torch) echo 300 ;;
        bench_* | nccl4 | *check) echo 90 ;;
        *) echo 60 ;;
    esac
}

# --- what is asked for ------------------------------------------------------------------------------------------------

refuse() { echo "device-check.sh: $1 (--help lists the options)" >&2; exit 2; }
# The steps of words like "nccl,golden".
steps_of() {
    for word in $(echo "$1" | tr ',' ' '); do
        case $word in
            nccl) echo nccl2 nccl4 ncclcalls bench_nccl ;;
            torch) echo bench_torch ;;
            sanitizers) echo memcheck racecheck initcheck ;;
            all) echo $steps ;;
            *)
                case " $(echo $steps) " in *" $word "*) ;; *) refuse "no step $word; --list has them" ;; esac
                echo "$word" ;;
        esac
    done
}

host=no arch=native deps='' prebuilt='' only='' expect='' allow='' going=yes budget=540 jobs='' build=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '3,30s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --list) printf '%s\n' $steps; exit 0 ;;
        --host) host=yes ;;
        --keep-going) going=yes ;;
        --stop-early) going=no ;;
        --arch | --deps | --prebuilt | --only | --expect | --allow-skip | --budget | --jobs | --build)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            case $1 in
                --arch) arch=$2 ;;
                --deps) deps=$2 ;;
                --prebuilt) prebuilt=$2 ;;
                --only) only=$(steps_of "$2") || exit 2 ;;
                --expect) expect=$(steps_of "$2") || exit 2 ;;
                --allow-skip) allow=$(steps_of "$2") || exit 2 ;;
                --budget) budget=$2 ;;
                --jobs) jobs=$2 ;;
                --build) build=$2 ;;
            esac
            shift ;;
        *) refuse "unknown option $1" ;;
    esac
    shift
done
for number in "${jobs:-1}" "$budget"; do
    case $number in '' | *[!0-9]*) refuse "'$number' is not a number" ;; esac
done
[ "${jobs:-1}" -ge 1 ] || refuse "--jobs takes a number from 1 on"
archive=''
[ ! -f "$prebuilt" ] || archive=$(cd "$(dirname "$prebuilt")" && pwd)/$(basename "$prebuilt") prebuilt=''
for folder in $deps $prebuilt; do
    [ -d "$folder" ] || refuse "$folder is no folder"
done
[ -z "$deps" ] || deps=$(cd "$deps" && pwd)
[ -z "$prebuilt" ] || prebuilt=$(cd "$prebuilt" && pwd)
allow="$allow gpus2"
[ $host = no ] || allow="$allow $(steps_of nccl,torch,sanitizers)"

root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
cd "$root" || exit 2
build=${build:-${TMPDIR:-/tmp}/anyrank-device-$(id -u)}
case $build in /*) ;; *) build=$root/$build ;; esac
out=${OUT:-$build.results}
logs=$build.logs
rm -rf "$logs"
mkdir -p "$logs" "$out" ||
    refuse "no folder can be made at $logs or $out: is build a link to nowhere? --build DIR and OUT=DIR name others"
rm -f "$out/summary.txt" "$out/summary.json" "$out/logs.tgz"
if [ -n "$archive" ]; then
    prebuilt=$build.prebuilt
    rm -rf "$prebuilt"
    mkdir -p "$prebuilt"
    tar -C "$prebuilt" -xzf "$archive" || refuse "--prebuilt: $archive cannot be unpacked"
fi
device=cuda
[ $host = no ] || device=emulated
jobs=${jobs:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
export root build logs host device arch deps prebuilt jobs limit
export ANYRANK_DATA="$root/ref/data" # a binary from elsewhere looks there

# --- the steps --------------------------------------------------------------------------------------------------------

began=$(date +%s)
broken='' # why the other steps cannot run
failed=0
. "$root/gpu/check/errors.sh"
. "$root/gpu/check/summary.sh"
. "$root/gpu/check/programs.sh"

is_in() {
    case " $(echo $2) " in *" $1 "*) return 0 ;; *) return 1 ;; esac
}

# run_step NAME COMMAND...: with its limit and what is left of the budget; its words are in $logs/NAME.log, whose last
# line says what it found. Sets verdict, and adds a line to the table.
run_step() {
    name=$1
    shift
    log=$logs/$name.log
    from=$(date +%s)
    limit=$(limit_of "$name")
    [ $host = no ] || limit=$((limit * 10)) # a guard against hanging: a machine without a GPU is often a busy one
    left=$((began + budget - from))
    [ $limit -le $left ] || limit=$left
    if [ -n "$broken" ] && [ "$name" != machine ]; then
        echo "$broken" > "$log"
        status=77
    elif [ $left -lt 2 ]; then
        echo "the budget of $budget s is used up; --only $name runs it alone" > "$log"
        status=77
    else
        monitor_begin
        timeout -k 5 $limit "$@" > "$log" 2>&1 < /dev/null &
        running=$!
        wait $running
        status=$?
        running=
        monitor_end "$name"
    fi
    seconds=$(($(date +%s) - from))
    what=$(tail -n 1 "$log" | tr '\t' ' ' | cut -c 1-300)
    case $status in
        0) verdict=ok ;;
        77) verdict=skip ;;
        124 | 137) verdict=FAIL what="stopped after $limit s; $what" ;;
        *) verdict=FAIL ;;
    esac
    if [ $verdict = skip ] && { is_in "$name" "$expect" || ! is_in "$name" "$allow"; }; then
        verdict=FAIL what="skipped, which was not expected: $what"
    fi
    if sticky=$(sticky_error "$log") && [ $going = no ]; then
        broken="$name ended the GPU's context: $sticky"
    fi
    [ $verdict != FAIL ] || failed=$((failed + 1))
    add_step "$name" "$verdict" "$seconds" "$what"
    [ $verdict != FAIL ] || tail -n 12 "$log" | cut -c 1-200 | sed 's/^/     | /'
    write_results
}

# A step has its own process group, which whoever interrupts this one does not reach.
running=
interrupted() {
    trap '' HUP INT TERM
    if [ -n "$running" ]; then
        kill "$running" 2>/dev/null
        wait "$running"
    fi
    exit "$1"
}
trap 'interrupted 129' HUP
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
trap 'monitor_end ""' EXIT
use_deps
if ! find_programs; then
    run_step build sh "$root/gpu/check/build.sh"
    [ "$verdict" = ok ] || broken="nothing was built"
fi
for name in $(echo ${only:-$steps}); do
    run_step "$name" sh "$root/gpu/check/steps.sh" "$name"
    [ "$name" != machine ] || [ "$verdict" = ok ] || broken=${broken:-$what}
done
echo
[ -n "${OUT:-}" ] || echo "results: $out"
cat "$out/summary.txt"
[ $failed -eq 0 ]
