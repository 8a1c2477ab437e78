#!/usr/bin/env bash
# Installs a finished build into a scratch folder, moves it, and builds one small user of the library
# four ways: CMake package and pkg-config, shared and static. Usage: check_install.sh BUILD
set -euo pipefail
build=${1:?build folder}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" > /dev/null
mv "$work/first" "$work/moved" # Nothing in it may depend on where it was installed.
mkdir "$work/user"
cat > "$work/user/user.c" << 'C'
#include <dropless.h>
#include <stdio.h>

int main(void)
{
    return puts(dpl_status_text(DPL_OK)) < 0;
}
C
cat > "$work/user/CMakeLists.txt" << 'CMAKE'
cmake_minimum_required(VERSION 3.21)
project(user C)
find_package(dropless REQUIRED)
add_executable(user_shared user.c)
target_link_libraries(user_shared dropless::dropless)
add_executable(user_static user.c)
target_link_libraries(user_static dropless::static)
CMAKE
check() { [ "$("$@")" = success ] || { echo "$* did not print 'success'" >&2; exit 1; }; }

export LD_LIBRARY_PATH
LD_LIBRARY_PATH=$(dirname "$(find "$work/moved" -name libdropless.so | head -n 1)")
cmake -S "$work/user" -B "$work/user/build" -DCMAKE_PREFIX_PATH="$work/moved" > /dev/null
cmake --build "$work/user/build" > /dev/null
check "$work/user/build/user_shared"
check "$work/user/build/user_static"
n_ways=2

if command -v pkg-config > /dev/null; then
    export PKG_CONFIG_PATH=$LD_LIBRARY_PATH/pkgconfig
    read -ra flags < <(pkg-config --cflags --libs dropless)
    cc -o "$work/shared" "$work/user/user.c" "${flags[@]}"
    check "$work/shared"
    read -ra flags < <(pkg-config --static --cflags --libs dropless)
    cc -o "$work/static" "$work/user/user.c" "${flags[@]/-ldropless/-l:libdropless.a}"
    check "$work/static"
    n_ways=4
else
    echo "check_install: SKIPPED the pkg-config half: there is no pkg-config"
fi

# Only the public names leave the shared library.
if nm -D --defined-only "$LD_LIBRARY_PATH/libdropless.so" | awk '{ print $3 }' | grep -v '^dpl_'; then
    echo "libdropless.so exports the names above" >&2
    exit 1
fi
"$work/moved/bin/dropless" --help > /dev/null
echo "check_install: built and ran a user of the library in $n_ways ways"
