#!/usr/bin/env bash
# What the shell scripts promise: setup_clang with a made-up apt, the options of run.sh and ggml.sh, what is reported of
# growth, no pipe that fails by SIGPIPE.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
unset MDKV_SKIP_PACKAGES

# check NAME COMMAND...
check() {
    local name=$1
    shift
    if "$@" >"$folder/output" 2>&1; then
        echo "passed: $name"
    else
        echo "failed: $name (status $?)"
        sed 's/^/    /' "$folder/output"
        failed=1
    fi
}

# program NAME: an executable of the made-up machine, its text from the standard input
program() {
    { echo '#!/bin/bash' && cat; } >"$folder/bin/$1"
    chmod +x "$folder/bin/$1"
}

# A machine without clang whose apt offers clang of one version and prints far more about it than a pipe holds.
mkdir "$folder/bin"
for name in bash cat cp; do
    ln -s "$(command -v "$name")" "$folder/bin/$name"
done
program apt-cache <<'E2'
case "$1 ${2:-}" in
    "policy clang-17" | "policy libclang-rt-17-dev")
        printf '  Installed: (none)\n  Candidate: 1:17.0.6-1\n  Version table:\n'
        for ((i = 0; i < 20000; ++i)); do echo "     1:17.0.6-$i 500"; done
        ;;
    policy*) printf '  Installed: (none)\n  Candidate: (none)\n' ;;
esac
E2
program apt-get <<<'exit 0'

# with_apt SCRIPT: runs it after setup.sh as the tests do, on that machine, where a stub installs packages
with_apt() {
    cat >"$folder/script" <<E2
set -euo pipefail
dirname() { echo "\${1%/*}"; }
source "$root/examples/setup.sh"
setup_packages() { cp "$folder/bin/apt-get" "$folder/bin/clang++-17"; }
$1
E2
    PATH=$folder/bin bash "$folder/script"
}
# shellcheck disable=SC2016 # the script reads its own variables
found='setup_clang; [[ $mdkv_clang == */bin/clang++-17 ]]'
none='setup_clang; [[ -z $mdkv_clang ]]'
check "clang is found in apt, installed and used" with_apt "$found"
check "a clang that is there is used" with_apt "$found"
rm -f "$folder/bin/clang++-17"
check "packages that must not be installed are not" with_apt "MDKV_SKIP_PACKAGES=1; $none"
program apt-cache <<<'printf "  Installed: (none)\n  Candidate: (none)\n"'
check "no clang in apt leaves none" with_apt "$none"

# refused OPTION...
refused() {
    local code=0 output
    output=$(bash "$root/tests/run.sh" "$@" 2>&1) || code=$?
    echo "$output"
    [[ $code == 2 && $output == *'unknown option: '* ]]
}
check "run.sh refuses an unknown option" refused --everything
check "run.sh refuses an unknown option beside a known one" refused --all everything
usage() { [[ $(bash "$root/tests/run.sh" --help) == *'bash tests/run.sh --all '*' passed, '* ]]; }
check "run.sh says how it is used" usage

# no_ggml FOLDER...: ggml.sh refuses it and says how to get a checkout
no_ggml() {
    local code=0 output
    output=$(bash "$root/bench/peers/ggml.sh" "$@" 2>&1) || code=$?
    echo "$output"
    [[ $code == 2 && $output == *'git clone '* ]]
}
check "ggml.sh asks for a checkout" no_ggml
check "ggml.sh refuses a folder without ggml" no_ggml "$folder"

# growth RECORDED NOW: what instruction_counts.py prints of one stage's counts
growth() {
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$root/tests/tools python3 -c \
        'import sys, instruction_counts as c; sys.exit(c.compare({"a": int(sys.argv[2])}, {"a": int(sys.argv[1])}, 5.0))' "$@"
}
reported() { [[ $(growth 1000 1051) == *$'\nWARNING: a executes 5.1 % more'* ]]; }
unreported() { [[ $(growth 1000 1050) != *WARNING* && $(growth 1000 500) != *WARNING* ]]; }
check "instructions that grew by more than 5 % are reported" reported
check "those that grew less or shrank are not" unreported
closing() {
    printf 'PASSED: a\nWARNING: b grew\nSKIPPED: c: no c\n' >"$folder/notes.txt"
    [[ $(python3 "$root/tests/tools/count_results.py" "$folder/notes.txt") == *'  warning: b grew'$'\n''1 passed, 0 failed, 1 skipped' ]]
}
check "a warning stands in the closing lines and counts as nothing" closing

# counts INPUT...: what minutely prints of input that comes in a second and a half, and whether the log has all of it
counts() {
    bash -c "source '$root/examples/setup.sh'; rm -f '$folder/counted'
        { printf '%s\n' \"\$@\"; sleep 1.5; printf end; } | minutely '$folder/counted' 1" - "$@" >"$folder/said"
    [[ $(cat "$folder/counted") == "$(printf '%s\n' "$@" end)" ]]
}
counts_of_ninja() { counts '[0/2] Re-checking' '[1/9] cc a.cpp' '  note: [7/8]' '[2/9] cc b.cpp' && [[ $(cat "$folder/said") == 'mdkv: 0 min: [2/9] (log: '* ]]; }
counts_of_ctest() { counts '      Start 3: c' ' 2/31 Test  #3: c .... Passed' && [[ $(cat "$folder/said") == 'mdkv: 0 min:  2/31 Test  #3: c (log: '* ]]; }
no_counts() { counts 'cmake' '[0/2] Re-checking' && [[ $(cat "$folder/said") == 'mdkv: 0 min: still busy (log: '* ]]; }
status_stays() { ! bash -c "set -o pipefail; source '$root/examples/setup.sh'; { echo; exit 3; } | minutely '$folder/counted'"; }
check "a build's count is printed now and then, and its log is whole" counts_of_ninja
check "the tests' count is printed, too" counts_of_ctest
check "a build without counts yet says that it is busy" no_counts
check "a build that fails has failed" status_stays

# A reader that leaves early ends the writer with SIGPIPE, and pipefail makes that the pipe's status.
no_early_reader() {
    ! grep -nE '\| *(grep (-[a-zA-Z]*q|-m|--quiet|--max-count)|head( |$)|sed [^|]*[0-9/;{]q|awk [^|]*exit)' "$@"
}
mapfile -t scripts < <(find "$root/docs" "$root/examples" "$root/tests" "$root/bench" "$root/.ci" \( -name '*.sh' -o -path '*/.ci/run' \) ! -name scripts.sh)
check "no script pipes into what leaves early" no_early_reader "${scripts[@]}"
for script in "${scripts[@]}"; do
    check "bash reads ${script#"$root"/}" bash -n "$script"
done
exit "$failed"
