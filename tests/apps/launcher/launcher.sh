#!/usr/bin/env bash
# What mdkv_run's launcher promises, with made-up programs beside it:  launcher.sh LAUNCHER LACKING
# and that a program compiled for more than the processor has (LACKING, of lacking.cpp) says so and ends.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$1" "$folder/mdkv_run"
lacking=$2
failed=0
unset MDKV_RUN_INSTRUCTIONS

# gives EXPECTED COMMAND...: what it prints, on one line, and its status
gives() {
    local expected=$1 got status=0
    shift
    got=$("$@" 2>&1) || status=$?
    got="${got//$'\n'/ } ($status)"
    # shellcheck disable=SC2053 # a pattern
    if [[ $got == $expected ]]; then
        echo "passed: $got"
    else
        echo "failed: expected $expected, got $got"
        failed=1
    fi
}

# has FEATURE...: whether the processor has all
has() {
    local flags name
    flags=" $(sed -n 's/^flags[^:]*: //p;T;q' /proc/cpuinfo) "
    for name in "$@"; do
        [[ $flags == *" $name "* ]] || return 1
    done
}

for name in x86-64 x86-64-v3 x86-64-v4-vnni; do
    printf '#!/bin/sh\necho "%s got $# arguments, the last is <$3>"\nexit 5\n' "$name" >"$folder/mdkv_run-$name"
    chmod +x "$folder/mdkv_run-$name"
done
best=x86-64
if has avx2 fma bmi1 bmi2; then best=x86-64-v3; fi
if has avx2 fma bmi1 bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni; then best=x86-64-v4-vnni; fi
run=("$folder/mdkv_run" one two 'three and four')
gives "$best got 3 arguments, the last is <three and four> (5)" "${run[@]}"
for name in x86-64 x86-64-v3 x86-64-v4-vnni; do
    gives "$name got 3 arguments, the last is <three and four> (5)" env MDKV_RUN_INSTRUCTIONS="$name" "${run[@]}"
done
gives "mdkv_run: MDKV_RUN_INSTRUCTIONS is fastest; there are x86-64-v4-vnni, x86-64-v3 and x86-64 (1)" env MDKV_RUN_INSTRUCTIONS=fastest "${run[@]}"
(cd / && ln -s "$folder/mdkv_run" "$folder/link")
gives "$best got 3 *" "$folder/link" "${run[@]:1}"
rm "$folder/mdkv_run-x86-64-v4-vnni" "$folder/mdkv_run-x86-64-v3"
gives "x86-64 got 3 *" "${run[@]}"
gives "mdkv_run: *mdkv_run-x86-64-v3 cannot be run: No such file or directory (1)" env MDKV_RUN_INSTRUCTIONS=x86-64-v3 "${run[@]}"
rm "$folder/mdkv_run-x86-64"
gives "mdkv_run: none of the programs mdkv_run-x86-64... lies in $folder/ (1)" "${run[@]}"
gives "this program is compiled for instructions that this processor lacks:* fma4* (77)" "$lacking"
exit "$failed"
