#!/usr/bin/env bash
# One command from a fresh clone to a table: a real language model on real prose, answering from a KV cache a fraction
# of its size, beside the full cache. See examples/setup.sh for what it fetches and where it keeps it.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

build=$mdkv_root/build/quickstart

setup_packages "${mdkv_build_packages[@]}"
setup_compiler
setup_model
setup_text

say "building mdkv_run (Release) in $build"
mkdir -p "$build"
if ! { configure "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" \
    -DMDKV_BUILD_TESTS=OFF -DMDKV_BUILD_BENCH=OFF &&
    cmake --build "$build" --target mdkv_run --parallel "$(build_jobs)"; } >"$build/build.log" 2>&1; then
    tail -n 40 "$build/build.log" >&2
    die 1 "the build failed; all of its output is in $build/build.log"
fi
mdkv_run=$(find "$build" -name mdkv_run -type f -perm -u+x)

prompt=$build/prompt.txt
{
    awk '{ print; words += NF } words >= 1200 { exit }' "$MDKV_TEXT"
    printf '\nWhat is the text above about? Answer in three sentences.\n'
} >"$prompt"

say "generate: a question about $(wc -w <"$prompt") words, answered from a KV cache of 128 tokens' size"
"$mdkv_run" generate --model "$MDKV_MODEL" --prompt-file "$prompt" --policy best --kv-size 128 --max-tokens 100

say "compare: 2,048 tokens of prose, then 128 more fed through each cache (as JSON: $build/compare.json)"
"$mdkv_run" compare --model "$MDKV_MODEL" --text "$MDKV_TEXT" --context 2048 --continue 128 \
    --kv-size 64,128,256,512 --policies full,paper,paper_literal,evict,best --json "$build/compare.json"
