# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154 # device-check.sh and steps.sh read this file

# Prints the line of a log that names an error after which a GPU's context is lost; false where there is none.
sticky_error() {
    names=$(sed -n 's/^ *X(\(cudaError[A-Za-z]*\),.*/\1/p' "$root/gpu/report/sticky.h" | tr '\n' '|')
    grep -E -m 1 "(${names}cudaErrorNone)\\b" "$1" | cut -c 1-200 | grep .
}
