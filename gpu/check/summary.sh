# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154,SC2034 # device-check.sh reads this file
# Of gpu/device-check.sh: clocks, the table, the three result files.

MOST=12000 # characters of the table
table=$logs/table comma=''
commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null)
: > "$table"
: > "$logs/clocks"

# --- clocks, power and memory while a step runs -----------------------------------------------------------------------

monitor=''
monitor_begin() {
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    nvidia-smi --query-gpu=clocks.sm,power.draw,memory.used --format=csv,noheader,nounits -lms 250 \
        > "$logs/clocks.now" 2>/dev/null < /dev/null &
    monitor=$!
}

# "median of a column", "least", "most" of lines of numbers.
summary_of() {
    awk -F', *' -v at="$1" '$at ~ /^[0-9.]+$/ {print $at}' "$logs/clocks.now" | sort -n |
        awk '{v[NR] = $1} END {if (NR) printf "%g %g %g", v[1], v[int((NR + 1) / 2)], v[NR]}'
}

# shellcheck disable=SC2046 # three numbers, or none
# Keeps "1980 MHz (1755 least), 512 W, 40211 MiB": the medians, the largest power and memory. Of all GPUs together.
monitor_end() {
    [ -n "$monitor" ] || return 0
    kill "$monitor" 2>/dev/null
    wait "$monitor" 2>/dev/null
    monitor=
    [ -n "$1" ] || return 0
    set -- "$1" $(summary_of 1) - - -
    clocks="$3 MHz ($2 least)"
    [ "$2" != - ] || return 0
    set -- "$1" $(summary_of 2) - - -
    power=$4
    set -- "$1" $(summary_of 3) - - -
    printf '%s: %s, %s W, %s MiB\n' "$1" "$clocks" "$power" "$4" >> "$logs/clocks"
}

# --- the table --------------------------------------------------------------------------------------------------------

# add_step NAME VERDICT SECONDS WHAT: prints the line, and keeps it and its JSON.
add_step() {
    printf '%-12s %-4s %4d s  %.170s\n' "$1" "$2" "$3" "$4" | tee -a "$table"
    printf '%s{"name": "%s", "verdict": "%s", "seconds": %s, "found": %s, "gpu": "%s"}\n' "$comma" "$1" "$2" "$3" \
        "$(quoted "$4")" "$(sed -n "s/^$1: //p" "$logs/clocks")" >> "$logs/steps"
    comma=,
}

print_table() {
    echo "device-check on $device, ${commit:-no git here}, $(date -u '+%Y-%m-%d %H:%M')"
    cat "$table"
    if [ -s "$logs/clocks" ]; then
        echo
        echo "GPU meanwhile: processors' clock, median; power and memory at most"
        cat "$logs/clocks"
    fi
    for figures in "$logs"/*.figures; do
        [ -s "$figures" ] || continue
        echo
        echo "$(basename "$figures" .figures):"
        cat "$figures"
    done
}

# A string of JSON.
quoted() {
    printf '"%s"' "$(printf '%s' "$1" | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

print_json() {
    printf '{"tool": "device-check", "device": "%s", "failed": %s, "steps": [\n' "$device" "$failed"
    cat "$logs/steps"
    printf '],\n "results": {'
    between=''
    for file in "$logs"/*.json; do
        [ -s "$file" ] || continue
        printf '%s\n  "%s": ' "$between" "$(basename "$file" .json)"
        cat "$file"
        between=,
    done
    printf '}}\n'
}

# Made beside the logs and moved, so that a run that is stopped leaves whole files.
write_results() {
    ended=$(awk '{n[$2]++} END {printf "%d ok, %d FAIL, %d skip", n["ok"], n["FAIL"], n["skip"]}' "$table")
    {
        print_table | head -c $((MOST - 200))
        echo
        echo "$ended; $(($(date +%s) - began)) s; logs.tgz has what each step said"
    } > "$build.summary"
    print_json > "$build.json"
    tar -C "$logs" -czf "$build.tgz" . 2>/dev/null
    mv "$build.summary" "$out/summary.txt"
    mv "$build.json" "$out/summary.json"
    mv "$build.tgz" "$out/logs.tgz"
}
