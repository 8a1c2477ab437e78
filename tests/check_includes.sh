#!/usr/bin/env bash
# Checks the laws of the source tree that a compiler does not see: which folder may include which,
# where intrinsics and mpi.h may stand, that the library never ends the process, and the sizes of
# functions, lines and the whole. Prints one line for each violation. Usage: check_includes.sh [ROOT]
set -euo pipefail
export LC_ALL=C
cd "${1:-$(dirname "$0")/..}"

max_function_lines=90
max_kernel_lines=150 # Kernels are long because they are unrolled, not because they decide much.
max_line=100
max_total_lines=23000 # a newcomer is to be able to read it all

declare -A may_include=(
    [base]="base"
    [cpu]="base cpu"
    [comm]="base comm"
    [moe]="base cpu comm moe"
    [io]="base io"
    [model]="base cpu comm moe io model"
    [train]="base cpu comm moe io model train"
    [api]="base cpu comm moe io model train api"
)
n_bad=0
report() # reads violations, one a line; the argument says which law they break
{
    local line
    while IFS= read -r line; do
        echo "$line   <- $1"
        n_bad=$((n_bad + 1))
    done
}
files() { find "$@" -type f \( -name '*.c' -o -name '*.h' \) 2> /dev/null | sort; }
quoted_includes() # files... -> file:line:path
{
    grep -HnE '^[ \t]*#[ \t]*include[ \t]*"' "$@" < /dev/null |
        sed -E 's/^([^:]+:[0-9]+):[^"]*"([^"]*)".*/\1:\2/' || true
}
# A search over file lists that may be empty; comments behind // do not count.
search() # pattern files...
{
    local pattern=$1
    shift
    [ $# -gt 0 ] || return 0
    awk -v pattern="$pattern" '{ sub(/\/\/.*/, "") } /^[ ]*\*/ { next }
        $0 ~ pattern { print FILENAME ":" FNR ": " $0 }' "$@"
}

for dir in src/*/; do
    folder=$(basename "$dir")
    if [ -z "${may_include[$folder]:-}" ]; then
        report "a folder that the include law does not know" <<< "$dir"
        continue
    fi
    mapfile -t sources < <(files "$dir")
    [ ${#sources[@]} -gt 0 ] || continue
    report "src/$folder may include dropless.h and: ${may_include[$folder]}" < <(
        quoted_includes "${sources[@]}" | while IFS=: read -r file line path; do
            [ "$path" != dropless.h ] || continue
            [[ " ${may_include[$folder]} " == *" ${path%%/*} "* && $path == */* ]] ||
                echo "$file:$line: $path"
        done)
done

mapfile -t tools < <(files tools)
mapfile -t examples < <(files examples)
for file in "${tools[@]}" "${examples[@]}"; do
    report "tools and examples see dropless.h only (tools also bench/bench.h and each other)" < <(
        quoted_includes "$file" | while IFS=: read -r _ line path; do
            case $file:$path in
            *:dropless.h | tools/*:bench/bench.h | tools/*:../bench/bench.h) ;;
            tools/*:*/* | examples/*) echo "$file:$line: $path" ;;
            *) [ -f "tools/$path" ] || echo "$file:$line: $path" ;;
            esac
        done)
done

mapfile -t sources < <(files src)
mapfile -t product < <(files src include tools)
mapfile -t code < <(files src include tools bench tests examples)
mapfile -t plain < <(files src include tools bench examples | grep -v '^src/cpu/kernels_' || true)
mapfile -t no_comm < <(files src include tools bench examples tests |
    grep -vE '^(src/comm/mpi[.]c|bench/compare/)' || true)
mapfile -t kernels < <(files src/cpu | grep '^src/cpu/kernels_' || true)

report "intrinsics belong to src/cpu/kernels_*" < <(search \
    '[a-z]mmintrin[.]h|immintrin[.]h|x86intrin[.]h|arm_neon[.]h|(^|[^A-Za-z0-9_])_mm(256|512)?_|__m(128|256|512)|__attribute__ *[(][(] *target|GCC +target' \
    "${plain[@]}")
report "mpi.h belongs to src/comm/mpi.c" < <(search '#[ ]*include[ ]*[<"]mpi[.]h' "${no_comm[@]}")
# abort() stays allowed: it is how an assertion about our own code ends.
report "the library must not end the process" < <(search \
    '(^|[^A-Za-z0-9_.>])(exit|_exit|_Exit|quick_exit)[ ]*[(]' "${sources[@]}")
report "open work does not belong on main" < <(
    [ ${#code[@]} -eq 0 ] || grep -nwE "TODO|FIXME|XXX" "${code[@]}" || true)
report "no -ffast-math: it breaks comparisons and NaN checks" < <(
    grep -nE 'ffast-math|funsafe-math|Ofast' CMakeLists.txt CMakePresets.json || true)
report "lines have at most $max_line columns" < <(
    [ ${#code[@]} -eq 0 ] || awk -v max=$max_line '{ text = $0; gsub(/[\200-\277]/, "", text) }
        length(text) > max { print FILENAME ":" FNR ": " length(text) " columns" }' "${code[@]}")

# A body runs from the line that ends the signature with ") {" to "}" in column 0. A brace on a line of its
# own would escape the count and is reported too.
function_lines='FNR == 1 { start = 0 }
    /^[}]/ { if (start && FNR - start - 1 > max)
                 print FILENAME ":" start ": " FNR - start - 1 " lines"; start = 0 }
    !start && !/^#/ && /[)] *[{]$/ { start = FNR }
    /^[{]$/ { print FILENAME ":" FNR ": brace on a line of its own" }'
report "functions have at most $max_function_lines lines" < <(
    [ ${#plain[@]} -eq 0 ] || awk -v max=$max_function_lines "$function_lines" "${plain[@]}")
report "kernels have at most $max_kernel_lines lines" < <(
    [ ${#kernels[@]} -eq 0 ] || awk -v max=$max_kernel_lines "$function_lines" "${kernels[@]}")

n_lines=0
[ ${#product[@]} -eq 0 ] || n_lines=$(cat "${product[@]}" | wc -l)
[ "$n_lines" -lt $max_total_lines ] ||
    report "the product has fewer than $max_total_lines lines" <<< "src include tools: $n_lines lines"

# The public header stands alone, in strict C11 and in C++17.
report "dropless.h must compile alone" < <(
    cc -std=c11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c include/dropless.h 2>&1 || true
    if command -v c++ > /dev/null; then
        c++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c++ \
            include/dropless.h 2>&1 || true
    fi)

echo "check_includes: ${#code[@]} files, $n_lines lines in src include tools, $n_bad violations"
[ "$n_bad" -eq 0 ]
