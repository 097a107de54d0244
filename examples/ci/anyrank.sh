#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The bits of a project's models under its layouts, for continuous integration without GPUs (pytest.md).
#
#   anyrank.sh check              runs cases.txt and compares the hashes of outputs, gradients and weights with golden.txt
#   anyrank.sh explain REVISION   of each case whose hashes differ: the first tensor with other bits than in REVISION
#   anyrank.sh golden             writes golden.txt anew: for a change that is meant to change bits
#
# ANYRANK is the command (default anyrank); reports go to the folder out. On GitHub what differs is also in the summary
# of the job. Exit status: 0 the same, 1 a difference, 2 wrong input, 3 the machine failed.
set -u
cd "$(dirname "$0")" || exit 3
anyrank=${ANYRANK:-anyrank} out=$PWD/out summary=${GITHUB_STEP_SUMMARY:-/dev/null}

# Calls `$1 NAME ARGUMENTS...` for every case of a file; gives the first status that is not 0.
each_case() {
    each_status=0
    while read -r case_name case_arguments; do
        case $case_name in '' | '#'*) continue ;; esac
        # Unquoted on purpose: words.
        # shellcheck disable=SC2086
        "$1" "$case_name" $case_arguments < /dev/null
        code=$?
        [ $each_status -ne 0 ] || each_status=$code
    done < "$2"
    return $each_status
}

# One line for each hash that the baseline or a layout has: where all agree, three.
check_case() {
    name=$1
    shift
    echo "== $name: anyrank check $*"
    "$anyrank" check "$@" --skip-f64 --json "$out/$name.json"
    check_status=$?
    [ ! -f "$out/$name.json" ] || grep -oE '"(outputs|gradients|weights)_hash": "[0-9a-f]+"' "$out/$name.json" |
        sort -u | tr -d '":' | sed "s/^/$name /" >> "$out/hashes.txt"
    return $check_status
}

run_cases() {
    rm -rf "$out"
    mkdir -p "$out" && : > "$out/hashes.txt" || exit 3
    each_case check_case cases.txt
}

check() {
    run_cases
    status=$?
    if diff -u golden.txt "$out/hashes.txt" > "$out/difference.diff"; then
        [ $status -ne 0 ] || echo "the hashes are those of golden.txt"
    else
        [ $status -ne 0 ] || status=1
        {
            echo "### Bits differ from golden.txt"
            echo '```diff'
            cat "$out/difference.diff"
            echo '```'
        } | tee -a "$summary"
    fi
    return $status
}

# The baseline's tensors in the other revision and here; 0 if they were compared.
explain_case() {
    name=$1
    shift
    grep -q "^[-+]$name " "$out/difference.diff" || return 0
    old=$(sed -n "s/^${name}[[:space:]]*//p" "$base/cases.txt" 2>/dev/null)
    if [ -z "$old" ]; then
        echo "== $name: there is no such case in the other revision"
        return 0
    fi
    # A layout that is wrong has its baseline all the same.
    # shellcheck disable=SC2086
    (cd "$base" && "$anyrank" check $old --skip-f64 --quiet --dump "$out/before") > /dev/null
    "$anyrank" check "$@" --skip-f64 --quiet --dump "$out/after" > /dev/null
    echo "== $name: the baseline's tensors in that revision, and here"
    "$anyrank" verify "$out/before/reference.safetensors" "$out/after/reference.safetensors" --max-report 3 \
        --html "$out/$name.html"
    code=$?
    rm -rf "$out/before" "$out/after"
    [ $code -eq 1 ] || return $code
}

explain() {
    [ -s "$out/difference.diff" ] || { echo "nothing differs from golden.txt: run '$0 check' first" >&2; return 2; }
    tree=$out/revision
    base=$tree/$(git rev-parse --show-prefix)
    git worktree add --quiet --detach --force "$tree" "$1" || return 2
    each_case explain_case cases.txt > "$out/explanation.txt" 2>&1
    status=$?
    {
        echo '```'
        cat "$out/explanation.txt"
        echo '```'
    } | tee -a "$summary"
    git worktree remove --force "$tree"
    return $status
}

case ${1:-} in
    check) check ;;
    explain) explain "${2:?a revision to compare with}" ;;
    golden) run_cases && cp "$out/hashes.txt" golden.txt ;;
    *) sed -n '5,7s/^# \{0,1\}//p' "$(basename "$0")" >&2; exit 2 ;;
esac
