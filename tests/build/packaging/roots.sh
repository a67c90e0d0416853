#!/usr/bin/env bash
# Debian roots in which scripts of this folder try what a release offers: functions to make one, to run commands in it, and to
# note what passed. A script sources examples/setup.sh, sets `folder`, the roots' own folder, and sources this file.

# shellcheck disable=SC2154 # examples/setup.sh and the script assign these variables
((EUID == 0)) || die 2 "only root can make a root and change to it"
setup_packages mmdebstrap
unshare --mount --pid --fork true 2>"$folder/make.log" || die 2 "this machine allows no namespace for mounts: $(tail -n 1 "$folder/make.log")"

suites=(bookworm trixie forky) # Debian 12, 13 and the next one
results=$folder/results.txt     # lines that tests/tools/count_results.py counts
: >"$results"

# try NAME COMMAND...: notes whether the command succeeds
try() {
    local name=$1
    shift
    if "$@" </dev/null >"$folder/try.log" 2>&1; then
        echo "PASSED: $name" >>"$results"
        say "passed: $name"
    else
        echo "FAILED: $name" >>"$results"
        tail -n 10 "$folder/try.log"
        say "FAILED: $name"
    fi
}

# skip NAME REASON
skip() {
    echo "SKIPPED: $1: $2" >>"$results"
    say "skipped: $1: $2"
}

apt-config dump Acquire | grep -E '^Acquire::(https?|Check-[A-Za-z-]*|Retries)(::[^ ]*)? ".+";' >"$folder/apt.conf" || true
certificates=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}
base=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive)
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_DEFAULT_TIMEOUT http_proxy https_proxy no_proxy; do
    [[ -z ${!name:-} ]] || base+=("$name=${!name}")
done
environment=("${base[@]}" PIP_CERT=/etc/pip-certificates.crt)

# make_root SUITE: makes $folder/SUITE of essential packages and Python, unless it is there
make_root() {
    local root=$folder/$1
    [[ -x $root/usr/bin/python3 ]] && return
    say "making a root of $1 in $root"
    rm -rf --one-file-system "$root"
    if ! mmdebstrap --quiet --variant=minbase --aptopt="$folder/apt.conf" --include=python3-venv "$1" "$root" >"$folder/make.log" 2>&1; then
        skip "$1" "mmdebstrap failed: $(tail -n 1 "$folder/make.log")"
        return 1
    fi
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    cp "$certificates" "$root/etc/pip-certificates.crt" # ca-certificates would rewrite its own file
}

# inside ROOT CPUINFO COMMAND...: runs a command with another root (/ is this machine's) and, unless it is "", another /proc/cpuinfo
inside() {
    local root=$1 cpuinfo=$2
    shift 2
    # shellcheck disable=SC2016 # sh reads its own arguments
    unshare --mount --pid --fork --mount-proc="${root%/}/proc" sh -ec 'root=$1; cpuinfo=$2; shift 2
        [ "$root" = / ] || mount --rbind /dev "$root/dev"
        [ -z "$cpuinfo" ] || mount --bind "$cpuinfo" "${root%/}/proc/cpuinfo"
        exec chroot "$root" "$@"' sh "$root" "$cpuinfo" env -i "${environment[@]}" "$@"
}
