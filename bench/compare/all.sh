#!/usr/bin/env bash
# Runs what here measures speed beside other programs, and writes its tables:
#     [PYTHON=DIR/bin/python] [DNNL_ROOT=DIR] bench/compare/all.sh [FILE.md]
# One that lacks a package says so and is left out. It takes most of an hour, on an idle machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../docs/peers.md}
python=${PYTHON:-python3}
cd "$here/../.."
trap 'rm -f "$out.new"' EXIT
cat > "$out.new" << TEXT
# Other programs on the same work

Written by \`bench/compare/all.sh\`, which needs what the scripts beside it name at their beginning: for the first
tables torch, transformers and pyyaml, then oneDNN 3, for the last an MPI. None of it is needed to build or to use dropless. All
run on the same threads and take turns, round by round; \`over dropless\` is the median of the rounds' ratios, above 1
where dropless is faster.

A step is forward, backward, clipping and AdamW on a batch, in bf16 with fp32 weights on both sides (autocast there).
Experts are gate and up, SwiGLU and down; torch's gradients of weights are bf16 in fresh memory, those here fp32.
TEXT
while read -r script; do
    echo "$script" >&2
    # shellcheck disable=SC2086 # arguments
    if "$python" bench/compare/$script > "$out.table"; then
        printf '\n## ' >> "$out.new"
        cat "$out.table" >> "$out.new"
    fi
    rm -f "$out.table"
done << 'SCRIPTS'
torch_step.py configs/bench-small.yml --rounds 5
torch_step.py configs/bench-medium.yml --rounds 3 --steps 1
torch_grouped.py --rounds 3 --runs 3
torch_grouped.py --rounds 3 --runs 3 --rows 48 --skew hot
onednn.py --rounds 5
alltoall.py --mpi openmpi
alltoall.py --mpi mpich
SCRIPTS
mv "$out.new" "$out"
