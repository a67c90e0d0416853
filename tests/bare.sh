#!/usr/bin/env bash
# README's commands on a machine that has nothing: a Debian root of essential packages, made by mmdebstrap in 15 seconds, in which
# a fresh clone of the last commit runs them as its root.
#
#   bash tests/bare.sh FOLDER [COMMAND]...   each COMMAND a command line; without one the quick start and the tests
#
# The root is FOLDER/root, the output of the k-th command FOLDER/k.log; the clone lies in the root where this repository lies.
# What the root has and a user's machine would not: this machine's settings for apt and pip (proxies, a file of certificates for
# pip), and, if CCACHE_DIR names a folder, ccache with a copy of it, so that objects are not compiled a second time. Model, text
# and packages are fetched.
# Exit status: that of the last command that failed; 2 if no root can be made, after a line that says why.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"

(($# > 0)) || die 2 "which folder? (bash tests/bare.sh FOLDER [COMMAND]...)"
folder=$1
shift
(($# > 0)) || set -- 'bash examples/quickstart.sh' 'bash tests/run.sh'
((EUID == 0)) || die 2 "only root can make a root and change to it"
setup_packages "${mdkv_bare_packages[@]}"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
root=$folder/root
suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
unshare --mount --pid --fork true 2>"$folder/make.log" || die 2 "this machine allows no namespace for mounts: $(tail -n 1 "$folder/make.log")"

say "bare: making a root of $suite in $root"
rm -rf --one-file-system "$root"
apt-config dump Acquire | grep -E '^Acquire::(https?|Check-[A-Za-z-]*|Retries)(::[^ ]*)? ".+";' >"$folder/apt.conf" || true
mmdebstrap --quiet --variant=minbase --aptopt="$folder/apt.conf" ${CCACHE_DIR:+--include=ccache} "$suite" "$root" >"$folder/make.log" 2>&1 ||
    die 2 "mmdebstrap failed: $(tail -n 1 "$folder/make.log")"
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/pip-certificates.crt" # ca-certificates would rewrite its own file
git clone --quiet --no-hardlinks "$mdkv_root" "$root$mdkv_root"
environment=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PIP_CERT=/etc/pip-certificates.crt)
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_DEFAULT_TIMEOUT http_proxy https_proxy no_proxy CI; do
    [[ -z ${!name:-} ]] || environment+=("$name=${!name}")
done
if [[ -n ${CCACHE_DIR:-} ]]; then
    cp -r "$CCACHE_DIR" "$root/var/cache/ccache"
    environment+=(CCACHE_DIR=/var/cache/ccache CCACHE_COMPILERCHECK=content CCACHE_SLOPPINESS=locale)
fi

number=0 status=0
for command in "$@"; do
    number=$((number + 1))
    say "bare: $command (log: $folder/$number.log)"
    code=0
    # shellcheck disable=SC2016 # sh reads its own arguments
    unshare --mount --pid --fork --mount-proc="$root/proc" sh -c 'mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"' "$root" \
        env -i "${environment[@]}" bash -c "cd '$mdkv_root' && $command" </dev/null >"$folder/$number.log" 2>&1 || code=$?
    if ((code != 0)); then
        tail -n 40 "$folder/$number.log"
        say "bare: failed with status $code: $command"
        status=$code
    fi
done
exit "$status"
