#!/usr/bin/env bash
# llama.cpp, as it is, decoding from KV caches that mdkv compresses. From a fresh clone:
#
#   bash examples/llama_cpp/run.sh                            an answer and a short table of quality, by the preset best
#   bash examples/llama_cpp/run.sh answer  [MODEL.gguf]       an answer to a long prompt, with and without
#   bash examples/llama_cpp/run.sh quality [MODEL.gguf]       table: KL divergence and bytes beside llama.cpp's own codes,
#                                                             bytes of all layers, and of those that mdkv served
#   bash examples/llama_cpp/run.sh recall  [MODEL.gguf]       table: hidden numbers that are asked for after the compression
#   bash examples/llama_cpp/run.sh speed   [MODEL.gguf [DEPTHS [THREADS]]]  table: decoded tokens a second
#   bash examples/llama_cpp/run.sh server  [MODEL.gguf [MINUTES [SLOTS]]]   llama-server under load, every answer checked: half
#                                                             a minute each with its default slots (0), with four that have
#                                                             cells of their own and with one, at 100 and 25 %
#   bash examples/llama_cpp/run.sh with    COMMAND...         any program of llama.cpp: with llama-cli -fa on -m ...
#
# The first time it fetches llama.cpp (77 MB), and builds it (nine minutes of processor time) and the backend; all is kept. Answer and
# table take nine minutes more. These are minutes of a processor; the clock's depend on what else runs. Variables:
# examples/setup.sh for MDKV_LLAMA_CPP and the like, README.md beside this file for the backend's own (MDKV_BUDGET, ...).
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

task=${1:-all}
(($# > 0)) && shift
case $task-$# in
    all-* | answer-* | quality-* | recall-* | speed-* | server-* | with-[!0]*) ;;
    *)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 2
        ;;
esac
if [[ $task != with && -n ${1:-} ]]; then
    MDKV_MODEL=$1
fi

build=$mdkv_root/build/llama_cpp
setup_packages g++ cmake ninja-build python3 python3-venv ca-certificates libcli11-dev libpcre2-dev nlohmann-json3-dev libeigen3-dev
setup_compiler
case $task in
    server) wanted=(llama-server) ;; # five minutes more than the others
    with) wanted=("$1") ;;
    speed) wanted=(llama-bench) ;;
    *) wanted=(llama-completion llama-perplexity) ;;
esac
[[ ${wanted[0]} == llama-* ]] || wanted=(ggml) # a program from elsewhere
setup_llama_cpp "${wanted[@]}"
if [[ $task != with ]]; then
    setup_model
    setup_text
fi
say "building the backend in $build"
mkdir -p "$build"
if ! { configure "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_BUILD_TESTS=OFF \
    -DMDKV_BUILD_BENCH=OFF -DMDKV_LLAMA_CPP="$MDKV_LLAMA_CPP" -DMDKV_LLAMA_CPP_BUILD="$MDKV_LLAMA_CPP_BUILD" &&
    cmake --build "$build" --target ggml_mdkv; } >"$build/build.log" 2>&1; then
    tail -n 40 "$build/build.log" >&2
    die 1 "the build failed; all of its output is in $build/build.log"
fi
plugin=$build/examples/llama_cpp/libggml-mdkv.so
programs=$MDKV_LLAMA_CPP_BUILD/bin
threads=$(nproc)

# with_mdkv VARIABLE=VALUE... COMMAND...: a program of llama.cpp with the backend. Programs that have their backends linked
# in look for no others, so this one comes by LD_PRELOAD; elsewhere GGML_BACKEND_PATH is enough.
with_mdkv() { env LD_PRELOAD="$plugin" "$@"; }

if [[ $task == with ]]; then
    PATH=$programs:$PATH with_mdkv "$@"
    exit
fi

# --- an answer -------------------------------------------------------------------------------------------------------

answer() {
    local prompt=$build/prompt.txt
    {
        awk '{ print; words += NF } words >= 800 { exit }' "$MDKV_TEXT"
        printf '\nWhat is the text above about? Answer in three sentences.\n'
    } >"$prompt"
    local completion=("$programs/llama-completion" -m "$MDKV_MODEL" -f "$prompt" -c 4096 -n 80 --temp 0 -fa on -t "$threads"
        --no-display-prompt --no-warmup -st)
    say "answer: $(wc -w <"$prompt") words and a question, all cells"
    "${completion[@]}" 2>"$build/answer.log"
    printf '\n'
    say "answer: the same with mdkv, preset ${MDKV_PRESET:-best}, ${MDKV_BUDGET:-25%} of the bytes, the rest given back"
    with_mdkv MDKV_PRESET="${MDKV_PRESET:-best}" MDKV_BUDGET="${MDKV_BUDGET:-25%}" MDKV_FREE=1 "${completion[@]}" 2>"$build/answer-mdkv.log"
    printf '\n'
    grep '^mdkv' "$build/answer-mdkv.log"
}

# --- tables ----------------------------------------------------------------------------------------------------------

# table COLUMNS TYPES BUDGETS OPTIONS...: rows of llama.cpp's own cache types and of one preset; same_bytes.py says what is measured
table() {
    local columns=$1 rows=$2 budget
    for budget in $3; do rows+=,${MDKV_PRESET:-best}:$budget; done
    shift 3
    python3 "$(dirname "${BASH_SOURCE[0]}")/same_bytes.py" "$MDKV_MODEL" --programs "$programs" --plugin "$plugin" \
        --text "$MDKV_TEXT" --logs "$build/tables" --columns "$columns" --rows "$rows" --chunks "${MDKV_CHUNKS:-2}" "$@"
}
quality() { table quality q8_0,K8V4,q4_0 "${MDKV_BUDGETS:-53.1% 28.1% 12.5%}"; }
recall() { table recall f16,q8_0,K8V4,q4_0 "${MDKV_BUDGETS:-53.1% 28.1% 12.5%}"; }
speed() { table speed f16,q8_0,K8V4,q4_0 "${MDKV_BUDGETS:-28.1% 12.5% 256}" --depths "$1" --threads "$2"; } # DEPTHS THREADS

# --- a server under load -------------------------------------------------------------------------------------------------

# server MINUTES SLOTS: four clients; tests/llama_cpp/server_load.py says what they do
server() {
    python3 "$mdkv_root/tests/llama_cpp/server_load.py" --server "$programs/llama-server" --plugin "$plugin" --model "$MDKV_MODEL" \
        --text "$MDKV_TEXT" --minutes "$1" --slots "$2" --budget "${MDKV_BUDGET:-100%,25%}" --threads "$threads"
}

case $task in
    all)
        answer
        table quality q8_0,q4_0 "${MDKV_BUDGETS:-28.1% 12.5%}"
        ;;
    answer) answer ;;
    quality) quality ;;
    recall) recall ;;
    speed) speed "${2:-1024 4096}" "${3:-1 2}" ;;
    server) server "${2:-0.5}" "${3:-0,4,1}" ;;
esac
