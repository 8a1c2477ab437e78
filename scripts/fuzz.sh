#!/usr/bin/env bash
# Runs every fuzzer of a build for some seconds and prints a summary. Seeds come from
# tests/corpus/NAME where there are any; they are never written to. Usage: fuzz.sh BUILD SECONDS
set -euo pipefail
build=${1:?build folder}
seconds=${2:-10}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

n_passed=0
n_failed=0
for fuzzer in "$build"/fuzz_*; do
    [[ -f $fuzzer && -x $fuzzer ]] || continue
    name=$(basename "$fuzzer")
    mkdir "$work/$name"
    seeds=("$work/$name")
    [ ! -d "$root/tests/corpus/$name" ] || seeds+=("$root/tests/corpus/$name")
    if "$fuzzer" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$build/" "${seeds[@]}" > "$work/$name.log" 2>&1; then
        echo "PASS $name: $(grep -o 'number_of_executed_units: [0-9]*' "$work/$name.log") in ${seconds}s"
        n_passed=$((n_passed + 1))
    else
        tail -n 40 "$work/$name.log"
        echo "FAIL $name: the input is in $build/"
        n_failed=$((n_failed + 1))
    fi
done
echo "fuzz: $n_passed passed, $n_failed failed"
[ "$n_failed" -eq 0 ] && [ "$n_passed" -gt 0 ]
