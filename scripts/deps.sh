#!/usr/bin/env bash
# Names what is missing to build, test or package dropless, and installs it with apt-get (as root
# or through sudo). It looks for the tools and headers themselves, so that nothing is installed,
# and no network is used, on a machine that has them.
# Usage: scripts/deps.sh [build] [test] [package] [mpi]
set -euo pipefail

has_program() { command -v "$1" > /dev/null 2>&1; }
has_header()
{
    local compiler=cc
    has_program cc || compiler=gcc
    has_program "$compiler" || return 1
    printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n%s\n' \
        "#include <$1>" | "$compiler" -E -x c - > /dev/null 2>&1
}
links_with_clang() # flag: does a program link with this flag of clang?
{
    echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
        clang "$1" -x c - -o /dev/null > /dev/null 2>&1
}

missing=()
need() # package check argument
{
    "$2" "$3" || missing+=("$1")
}

groups=("$@")
[ ${#groups[@]} -gt 0 ] || groups=(build)
for group in "${groups[@]}"; do
    case $group in
    build)
        need gcc has_program cc
        need libc6-dev has_header stdio.h
        need make has_program make
        need cmake has_program cmake
        need libjansson-dev has_header jansson.h
        need libyaml-dev has_header yaml.h
        ;;
    test)
        need libcmocka-dev has_header cmocka.h
        need clang has_program clang
        need libclang-rt-dev links_with_clang -fsanitize=fuzzer,address
        need g++ has_program c++
        need pkg-config has_program pkg-config
        ;;
    mpi)
        need libopenmpi-dev has_program mpicc.openmpi
        need openmpi-bin has_program mpirun.openmpi
        need libmpich-dev has_program mpicc.mpich
        need mpich has_program mpiexec.mpich
        ;;
    package)
        need dpkg-dev has_program dpkg-shlibdeps
        need file has_program file
        ;;
    *)
        echo "deps.sh: unknown group '$group', expected build, test, package or mpi" >&2
        exit 2
        ;;
    esac
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "dropless needs: ${missing[*]}"
if ! has_program apt-get; then
    echo "There is no apt-get here. Install the equivalents with your package manager, for example"
    echo "  Fedora:     dnf install gcc make cmake jansson-devel libyaml-devel libcmocka-devel clang compiler-rt gcc-c++"
    echo "  Arch:       pacman -S gcc make cmake jansson libyaml cmocka clang compiler-rt"
    echo "  openSUSE:   zypper install gcc make cmake libjansson-devel libyaml-devel libcmocka-devel clang gcc-c++"
    echo "  Alpine:     apk add build-base linux-headers cmake jansson-dev yaml-dev cmocka-dev clang compiler-rt bash"
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! has_program sudo; then
        echo "Run as root: apt-get install ${missing[*]}"
        exit 1
    fi
    as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
apt_install() { "${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"; }
# The package lists may be absent or stale: refresh them only if the first try fails.
apt_install || { "${as_root[@]}" apt-get update -q && apt_install; }
