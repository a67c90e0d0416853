#!/usr/bin/env bash
# libggml-mdkv as files that run where nothing is compiled: x86-64 Linux with a C library of version 2.28 or newer.
#
#   bash cmake/packaging/plugin.sh OUT_FOLDER
#
# OUT_FOLDER/libggml-mdkv-VERSION-linux-x86_64/ gets the file that GGML_BACKEND_PATH names, libggml-mdkv.so, and one backend for
# each version of ggml's backend interface and each kind of processor, from which it chooses; OUT_FOLDER/....tar.gz holds the
# same. No llama.cpp is built: its headers are enough. The compiler is zig's clang, with libc++ linked in.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup.sh"

(($# == 1)) || die 2 "which folder? (bash cmake/packaging/plugin.sh OUT_FOLDER)"
mkdir -p "$1"
out=$(cd "$1" && pwd)
glibc=2.28
source=$mdkv_root/examples/llama_cpp

setup_packages g++ python3 python3-venv ca-certificates binutils
setup_compiler
setup_llama_cpp
setup_newer_llama_cpp
setup_zig

number() { sed -n "s/^#define MDKV_VERSION_$1 //p" "$mdkv_root/include/mdkv/core/version.hpp"; }
version=$(number MAJOR).$(number MINOR).$(number PATCH)
name=libggml-mdkv-$version-linux-x86_64
folder=$out/$name
rm -rf "$folder" "$folder.tar.gz"
mkdir -p "$folder"

flags=(-target "x86_64-linux-gnu.$glibc" -O3 -DNDEBUG -fPIC -fvisibility=hidden -Wall -Wextra -I"$mdkv_root/include"
    "-ffile-prefix-map=$mdkv_root=mdkv" "-ffile-prefix-map=$mdkv_cache=cache" -g0)

# interface SOURCES: the version of ggml's backend interface
interface() { sed -n 's/.*#define GGML_BACKEND_API_VERSION //p' "$1/ggml/src/ggml-backend-impl.h"; }

# backend SOURCES NAME OPTION...: the backend for the ggml of these sources and one kind of processor. It is linked for the
# oldest processor, so that zig compiles its libc++ once. Symbols of ggml are those of the program that loads it; its own are
# hidden, because names of libc++'s exceptions are also those of the program's C++ library. It stays loaded if ggml refuses it,
# because zig's start files run no destructors of a library that is closed: they would be called at the end, when it is gone.
backend() {
    local llama_cpp=$1 file
    file=libggml-mdkv-api$(interface "$1")-$2.so
    shift 2
    say "plug-in: $file"
    "$mdkv_zig" c++ "${flags[@]}" "$@" -std=c++20 -fvisibility-inlines-hidden -isystem "$llama_cpp/ggml/include" \
        -isystem "$llama_cpp/ggml/src" -c -o "$folder/backend.o" "$source/ggml_backend.cpp"
    "$mdkv_zig" c++ -target "x86_64-linux-gnu.$glibc" -O3 -mcpu=x86_64_v3 -shared -s -Wl,-z,nodelete \
        -Wl,--version-script="$folder/exports" \
        -o "$folder/$file" "$folder/backend.o"
    rm "$folder/backend.o"
}

printf '{ global: ggml_backend_init; mdkv_ggml_register; local: *; };\n' >"$folder/exports"
say "plug-in: libggml-mdkv.so"
"$mdkv_zig" cc "${flags[@]}" -mcpu=x86_64 -shared -s -o "$folder/libggml-mdkv.so" "$source/chooser.c"
for llama_cpp in "$MDKV_LLAMA_CPP" "$mdkv_newer_llama_cpp"; do
    backend "$llama_cpp" x64-v3 -mcpu=x86_64_v3
    backend "$llama_cpp" x64-v4 -mcpu=x86_64_v4 -mprefer-vector-width=512
    backend "$llama_cpp" x64-v4-vnni -mcpu=x86_64_v4+avx512vnni -mprefer-vector-width=512
done
rm "$folder/exports"
cp "$mdkv_root/LICENSE" "$folder"
cat >"$folder/README" <<END
libggml-mdkv $version: compressed KV caches for programs of llama.cpp, and for Ollama, on a CPU. Linux, x86-64 with AVX2 and FMA,
C library $glibc or newer; llama.cpp with version $(interface "$MDKV_LLAMA_CPP") or $(interface "$mdkv_newer_llama_cpp") of ggml's backend interface, built with GGML_BACKEND_DL, as its releases are.

  GGML_BACKEND_PATH=/path/to/libggml-mdkv.so llama-server -fa on -m MODEL.gguf
  GGML_BACKEND_PATH=/path/to/libggml-mdkv.so OLLAMA_FLASH_ATTENTION=1 ollama serve

Keep the files together: libggml-mdkv.so loads one of the others. MDKV_BUDGET=25% and other settings, and what is passed on to
llama.cpp's own code: examples/llama_cpp/README.md of the sources.
END

for file in "$folder"/*.so; do
    for path in "$mdkv_root" "$mdkv_cache" "$out" "${HOME:-/root}/"; do
        if grep -qaF -- "$path" "$file"; then die 1 "$(basename "$file") holds a path of this machine: $path"; fi
    done
    exports=$(nm -D --defined-only "$file" | grep -vE ' (ggml_backend_init|ggml_backend_score|mdkv_ggml_register)$' || true)
    [[ -z $exports ]] || die 1 "$(basename "$file") exports more than the backend:" "$(sed -n 1,5p <<<"$exports")"
    needs=$(readelf -V "$file" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
    [[ $(printf '%s\n' "$needs" "GLIBC_$glibc" | sort -V | tail -n 1) == "GLIBC_$glibc" ]] || die 1 "$(basename "$file") needs $needs"
    say "plug-in: $(basename "$file"), $(stat -c %s "$file") bytes, $needs"
done
time=$(git -C "$mdkv_root" log -1 --format=%ct 2>/dev/null || echo 0)
tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$time" -c "$name" | gzip -9n >"$folder.tar.gz"
say "plug-in: $folder.tar.gz, $(stat -c %s "$folder.tar.gz") bytes, no path of this machine in any file"
