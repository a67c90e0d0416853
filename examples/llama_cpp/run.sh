#!/usr/bin/env bash
# llama.cpp, as it is, decoding from KV caches that mdkv compresses. From a fresh clone:
#
#   bash examples/llama_cpp/run.sh                            an answer and both tables
#   bash examples/llama_cpp/run.sh answer  [MODEL.gguf]       an answer to a long prompt, with and without
#   bash examples/llama_cpp/run.sh quality [MODEL.gguf]       table: KL divergence and bytes beside llama.cpp's own codes,
#                                                             bytes of all layers, and of those that mdkv served
#   bash examples/llama_cpp/run.sh speed   [MODEL.gguf [DEPTH [THREADS]]]   table: decoded tokens a second
#   bash examples/llama_cpp/run.sh server  [MODEL.gguf [MINUTES [SLOTS]]]   llama-server under load, every answer checked: half
#                                                             a minute each with its default slots (0), with four that have
#                                                             cells of their own and with one, at 100 and 25 %
#   bash examples/llama_cpp/run.sh with    COMMAND...         any program of llama.cpp: with llama-cli -fa on -m ...
#
# The first time it fetches llama.cpp (77 MB), builds it (nine minutes of one core) and the backend; all is kept. Variables:
# examples/setup.sh for MDKV_LLAMA_CPP and the like, README.md beside this file for the backend's own (MDKV_BUDGET, ...).
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

task=${1:-all}
(($# > 0)) && shift
case $task-$# in
    all-* | answer-* | quality-* | speed-* | server-* | with-[!0]*) ;;
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
    *) wanted=(llama-completion llama-perplexity llama-bench) ;;
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
    say "answer: the same with mdkv, ${MDKV_BUDGET:-25%} of the bytes, the rest given back"
    with_mdkv MDKV_BUDGET="${MDKV_BUDGET:-25%}" MDKV_FREE=1 "${completion[@]}" 2>"$build/answer-mdkv.log"
    printf '\n'
    grep '^mdkv' "$build/answer-mdkv.log"
}

# --- quality ---------------------------------------------------------------------------------------------------------

# quality: 1,023 tokens fed after 1,024, in two texts of 2,048; divergence from llama.cpp with f16 cells
quality() {
    local base=$build/base.kld log row bytes of_served
    local perplexity=("$programs/llama-perplexity" -m "$MDKV_MODEL" -f "$MDKV_TEXT" -c 2048 -b 512 -ub 512 --chunks "${MDKV_CHUNKS:-2}"
        -fa on -t "$threads" --kl-divergence-base "$base")
    say "quality: the full cache"
    "${perplexity[@]}" >"$build/quality-f16.log" 2>&1 || die 1 "llama-perplexity failed: $build/quality-f16.log"
    printf '\n| cache | bytes, %% of f16 | of the layers served | perplexity | mean KLD | same top, %% |\n|:--|--:|--:|--:|--:|--:|\n'
    row() { # LABEL BYTES BYTES_OF_SERVED LOG
        awk -v label="$1" -v bytes="$2 | $3" '/^Mean PPL\(Q\) /{ppl = $4} /^Mean +KLD:/{kld = $3} /^Same top p:/{top = $4}
            END { printf "| %s | %s | %s | %s | %s |\n", label, bytes, ppl, kld, top }' "$4"
    }
    for row in q8_0:53.1 q4_0:28.1; do
        log=$build/quality-${row%:*}.log
        "${perplexity[@]}" --kl-divergence -ctk "${row%:*}" -ctv "${row%:*}" >"$log" 2>&1 || die 1 "llama-perplexity failed: $log"
        row "llama.cpp, ${row%:*}" "${row#*:}" "${row#*:}" "$log"
    done
    for row in ${MDKV_BUDGETS:-100% 53.1% 28.1% 25% 12.5%}; do
        log=$build/quality-mdkv-${row%\%}.log
        with_mdkv MDKV_BUDGET="$row" MDKV_AT=1024 "${perplexity[@]}" --kl-divergence >"$log" 2>&1 ||
            die 1 "llama-perplexity failed: $log"
        bytes=$(sed -n 's/^mdkv: decoded .* \([0-9.]*\) % of the cells of all .*/\1/p' "$log")
        of_served=$(sed -n 's/^mdkv: decoded .* \([0-9.]*\) % of those of the [0-9]* served.*/\1/p' "$log")
        row "mdkv, $row" "$bytes" "$of_served" "$log"
    done
    rm -f "$base"
}

# --- speed -----------------------------------------------------------------------------------------------------------

# speed DEPTHS THREADS: 64 tokens decoded after so many
speed() {
    local depth t log
    printf '\n| tokens before | threads | cache | tokens/s | without compressing |\n|--:|--:|:--|--:|--:|\n'
    bench() { # LABEL DEPTH THREADS LOG COMMAND...
        local label=$1 depth=$2 t=$3 log=$4
        shift 4
        "$@" "$programs/llama-bench" -m "$MDKV_MODEL" -p 0 -n 64 -d "$depth" -r 1 -fa on -t "$t" -o jsonl \
            ${cache_type:+-ctk "$cache_type" -ctv "$cache_type"} >"$log" 2>&1 || die 1 "llama-bench failed: $log"
        python3 - "$label" "$depth" "$t" "$log" <<'PYTHON'
import json, re, sys
label, depth, threads, log = sys.argv[1:]
text = open(log).read()
rate = next(json.loads(line)["avg_ts"] for line in text.splitlines() if line.startswith("{"))
spent = re.search(r"compressed \d+ layers in ([\d.]+) s", text)
pure = 64 / (64 / rate - float(spent[1])) if spent else rate
print(f"| {depth} | {threads} | {label} | {rate:.1f} | {pure:.1f} |", flush=True)
PYTHON
    }
    for depth in $1; do
        for t in $2; do
            log=$build/speed-$depth-$t
            cache_type='' bench 'llama.cpp, f16' "$depth" "$t" "$log-f16.log" env
            cache_type=q8_0 bench 'llama.cpp, q8_0' "$depth" "$t" "$log-q8_0.log" env
            cache_type=q4_0 bench 'llama.cpp, q4_0' "$depth" "$t" "$log-q4_0.log" env
            for budget in ${MDKV_BUDGETS:-28.1% 12.5% 256}; do
                cache_type='' bench "mdkv, $budget" "$depth" "$t" "$log-mdkv-${budget%\%}.log" with_mdkv MDKV_BUDGET="$budget"
            done
        done
    done
}

# --- a server under load -------------------------------------------------------------------------------------------------

# server MINUTES SLOTS: four clients; tests/llama_cpp/server_load.py says what they do
server() {
    python3 "$mdkv_root/tests/llama_cpp/server_load.py" --server "$programs/llama-server" --plugin "$plugin" --model "$MDKV_MODEL" \
        --text "$MDKV_TEXT" --minutes "$1" --slots "$2" --budget "${MDKV_BUDGET:-100%,25%}" --threads "$threads"
}

case $task in
    all)
        answer
        quality
        speed '1024 4096' '1 2'
        ;;
    answer) answer ;;
    quality) quality ;;
    speed) speed "${2:-1024 4096}" "${3:-1 2}" ;;
    server) server "${2:-0.5}" "${3:-0,4,1}" ;;
esac
