#!/usr/bin/env bash
# One command from a fresh clone to a table: a real language model on real prose, answering from its full KV cache and from
# one a quarter of its size, side by side. See examples/setup.sh for what it fetches and where it keeps it.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

build=$mdkv_root/build/quickstart

setup_packages "${mdkv_build_packages[@]}"
setup_compiler
setup_model
setup_text

say "building mdkv_run (Release) in $build (some minutes; a line a minute)"
mkdir -p "$build"
: >"$build/build.log"
if ! { configure "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" \
    -DMDKV_BUILD_TESTS=OFF -DMDKV_BUILD_BENCH=OFF &&
    cmake --build "$build" --target mdkv_run --parallel "$(build_jobs)"; } 2>&1 |
    minutely "$build/build.log"; then
    tail -n 40 "$build/build.log" >&2
    die 1 "the build failed; all of its output is in $build/build.log"
fi
mdkv_run=$(find "$build" -name mdkv_run -type f -perm -u+x)

prompt=$build/prompt.txt
{
    awk '{ print; words += NF } words >= 1200 { exit }' "$MDKV_TEXT"
    printf '\nWhat is the text above about? Answer in three sentences.\n'
} >"$prompt"

# answer POLICY BUDGET: a file whose first lines tell the policy and the bytes of its cache, the model's answer below
answer() {
    local file=$build/answer-$1.txt
    "$mdkv_run" generate --model "$MDKV_MODEL" --prompt-file "$prompt" --policy "$1" --budget "$2" --max-tokens 100 \
        >"$build/answer.txt" 2>"$build/answer.log" || { cat "$build/answer.log" >&2 && die 1 "mdkv_run generate failed"; }
    {
        sed -n "s/^KV cache of the prompt: \(.* %\) of .*(policy \([a-z_]*\), .*/\2: a KV cache of \1/p" "$build/answer.log"
        printf '%s\n\n' '----------------------------------------------------'
        fold -s -w 52 "$build/answer.txt"
    } >"$file"
    cp "$build/answer.txt" "$build/words-$1.txt"
}

say "generate: a question about $(wc -w <"$prompt") words, answered twice (half a minute)"
answer full 100%
answer best 25%
echo
pr -m -t -w 112 "$build/answer-full.txt" "$build/answer-best.txt"
echo
if cmp -s "$build/words-full.txt" "$build/words-best.txt"; then
    say "the same words from a quarter of the bytes"
else
    say "the answers differ: a quarter of the bytes was too little for the same words"
fi

say "compare: 2,048 tokens of prose, then 128 more fed through each cache (a minute or two; as JSON: $build/compare.json)"
say "at equal bytes: mdkv's presets best, any_question and by_window, the paper's method, and SnapKV, which drops whole tokens"
"$mdkv_run" compare --model "$MDKV_MODEL" --text "$MDKV_TEXT" --context 2048 --continue 128 \
    --budgets 6.25%,12.5%,25% --policies full,best,any_question,by_window,paper,snapkv --json "$build/compare.json"
