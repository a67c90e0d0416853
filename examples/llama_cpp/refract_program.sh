#!/usr/bin/env bash
# A program of llama.cpp for the harness refract-llm, in which the cache type "mdkv-PRESET-BUDGET" (mdkv-by_window-28.1) means f16
# cells with the backend loaded. docs/lab/2026-11/quality.md says how links to it are set up. Variables:
#   LLAMA_BIN    the programs themselves
#   MDKV_PLUGIN  libggml-mdkv.so
#   PATCHED      folder of libllama-completion-impl.so with the harness's own patch, for its axis A
#   MDKV_LOG     file to which the backend's closing lines are appended; none if it is not set
set -uo pipefail
name=${0##*/} chosen='' arguments=() before=''
for argument; do
    if [[ $argument == mdkv-*-* && ($before == -ctk || $before == -ctv) ]]; then
        chosen=$argument argument=f16
    fi
    arguments+=("$argument")
    before=$argument
done
variables=(LD_LIBRARY_PATH="${PATCHED:-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
if [[ -n $chosen ]]; then
    IFS=- read -r _ preset budget <<<"$chosen"
    variables+=(LD_PRELOAD="$MDKV_PLUGIN" MDKV_PRESET="$preset" MDKV_BUDGET="$budget%")
    [[ $name == llama-perplexity ]] && variables+=(MDKV_AT=1024) # it scores the second half of each chunk of 2,048
fi
# llama-cli prints a banner and the prompt before the answer, which the harness does not remove.
answer_only() { if [[ $name == llama-cli ]]; then awk 'on && !/^ \.\.\. \(truncated\)$/; /^> / { on = 1 }'; else cat; fi; }
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
env "${variables[@]}" "$LLAMA_BIN/$name" "${arguments[@]}" 2>"$errors" | answer_only
status=${PIPESTATUS[0]}
if [[ -n $chosen && -n ${MDKV_LOG:-} ]]; then
    { printf '%s %s\n' "$name" "$chosen"; grep -o 'mdkv: .*' "$errors"; } >>"$MDKV_LOG"
fi
cat "$errors" >&2
exit "$status"
