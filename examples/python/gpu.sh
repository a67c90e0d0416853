#!/usr/bin/env bash
# What only a GPU can show of the Python package, in ten minutes at most; a table, and JSON for each part in OUT:
#
#   bash examples/python/gpu.sh OUT [MODEL.gguf | MODEL.gguf.part-*]...
#
# Needs nvcc, and a Python with torch, transformers, pytest, scikit-build-core, nanobind and ninja ($PYTHON, by default python3); kvpress
# and optimum-quanto or hqq where they are to be compared. Fetches nothing. Parts of one file, as split(1) makes them, are joined.
#   MDKV_GPU_PACKAGE   a folder with the package, built with CUDA elsewhere: nothing is built
#   MDKV_GPU_DRY=1     the CPU, and small sizes: shows that the script runs
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
(($# > 0)) || { echo "which folder? (bash examples/python/gpu.sh OUT [MODEL.gguf | MODEL.gguf.part-*]...)" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3} device=cuda sizes=() quality=()
if [[ -n ${MDKV_GPU_DRY:-} ]]; then device=cpu sizes=(--small --tokens 256) quality=(--tokens 256 --texts 1); fi
end=$((SECONDS + 590))
failed=0

# part NAME SECONDS COMMAND...: at most so long, and not beyond the ten minutes; its output is kept and shown
part() {
    local name=$1 most=$2 left=$((end - SECONDS))
    shift 2
    if ((left < 10)); then
        echo "SKIPPED: $name: the ten minutes are over"
        return
    fi
    echo "--- $name"
    timeout $((left < most ? left : most)) "$@" 2>&1 | tee "$out/$name.log" || { echo "FAILED: $name" && failed=1; }
}

package=${MDKV_GPU_PACKAGE:-$out/package}
if [[ ! -d $package ]]; then
    part build 280 env PATH="$PATH:/usr/local/cuda/bin:/opt/cuda/bin" CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}" \
        "$python" -m pip install -q --no-deps --no-build-isolation --no-index --target "$package" "$root"
fi
export PYTHONPATH=$package
"$python" -c 'import mdkv; print(mdkv.build())'

models=()
for file; do
    whole=${file%.part-*}
    if [[ $whole != "$file" ]]; then
        [[ $file == "$(printf '%s\n' "$whole".part-* | head -n 1)" ]] || continue
        cat "$whole".part-* >"$out/$(basename "$whole")"
        whole=$out/$(basename "$whole")
    fi
    models+=(--model "$whole")
done

part suite 200 "$python" -m pytest -q -p no:cacheprovider --device "$device" \
    "$here"/tests/test_{device,transformers,while_reading,reader,storing,mdkv}.py -k "not real_model"
part memory 150 "$python" "$here/gpu_figures.py" memory others --device "$device" "${sizes[@]}" --json "$out/memory.json"
if ((${#models[@]} > 0)); then
    part quality 200 "$python" "$here/gpu_figures.py" quality --device "$device" "${quality[@]}" "${models[@]}" --json "$out/quality.json"
fi
exit $failed
