#!/usr/bin/env bash
# dropless probe against the reference files by their own judge, compare.py: every deepseek_v3 folder, in
# both forms of config.json, with gradients; optimizer steps where there are some. Needs python3 with numpy and
# safetensors, and the fixtures. Usage: test_probe.sh PROGRAM
set -euo pipefail
program=$(realpath "${1:?program}")
root=$(cd "$(dirname "$0")/.." && pwd)
fixtures=${DPL_SHARED:-$root/../shared}/fixtures
skip()
{
    echo "test_probe: SKIPPED: $*" >&2
    exit 77
}
[ -d "$fixtures" ] || skip "no $fixtures"
python3 -c 'import numpy, safetensors' 2> /dev/null || skip "python3 has no numpy or no safetensors"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

n=0
compare() # model folder-of-reference probe-options... -- compare-options...
{
    local model=$1 folder=$2 options=()
    shift 2
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    "$program" probe "$model" "$folder/input.safetensors" "$work/out.safetensors" "${options[@]}"
    python3 "$fixtures/compare.py" "$folder" "$work/out.safetensors" "$@" > "$work/log" ||
        { cat "$work/log"; echo "test_probe: $model ${options[*]} differs from the reference" >&2; exit 1; }
    n=$((n + 1))
}
for folder in "$fixtures"/deepseek_v3*; do
    mkdir -p "$work/legacy"
    cp "$folder"/model* "$work/legacy/"
    cp "$folder/config.legacy.json" "$work/legacy/config.json"
    compare "$folder" "$folder" --grad -- --need-grad
    compare "$work/legacy" "$folder" --grad routed_bias_update_rate=0.001 threads=1 -- --need-grad
    rm -rf "$work/legacy"
done
compare "$fixtures/deepseek_v3" "$fixtures/deepseek_v3" --grad --steps 3 -- --need-grad --need-step 3
compare "$fixtures/deepseek_v3" "$fixtures/deepseek_v3" --steps 1 -- --need-step 1
# bf16 in compute, without what the folder's other tests ask for; routing may differ there.
"$program" probe "$fixtures/deepseek_v3" "$fixtures/deepseek_v3/input.safetensors" "$work/a" dtype=bfloat16
python3 - "$work/a" "$fixtures/deepseek_v3/reference.safetensors" << 'PYTHON'
import sys
from safetensors import safe_open
loss = [safe_open(path, "np").get_tensor("loss")[0] for path in sys.argv[1:]]
sys.exit(0 if abs(loss[0] - loss[1]) < 0.05 else 1)
PYTHON
echo "test_probe: $n comparisons, all within their bounds"
