#!/usr/bin/env bash
# Trains a bundled model over meshes of ranks with one global batch, and compares with one rank: the loss of step 0 and
# its load must be the same, losses of the first 20 steps within 2e-5, and that of the last step within three times the
# spread that another order of sums causes on one rank. Then a chain of resumed runs. Takes minutes: run on demand.
# Usage: mesh_runs.sh BUILD [STEPS (200)] [key=value ...]
set -uo pipefail
program=$(realpath "${1:?build folder}")/dropless
steps=${2:-200}
shift $(($# < 2 ? $# : 2))
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n_bad=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
options=("$root/configs/bench-small.yml" "dataset_path=$root/data/shakespeare.txt" "base_output_directory=$work"
    eval_interval=-1 save_checkpoint_on_start=false checkpoint_period=100000 "steps=$steps" "$@")

bad()
{
    echo "mesh_runs: $*" >&2
    n_bad=$((n_bad + 1))
}
train() # name launcher... -- assignment...
{
    local name=$1 launcher=()
    shift
    while [ "$1" != -- ]; do launcher+=("$1") && shift; done
    shift
    "${launcher[@]}" "$program" train "${options[@]}" "run_name=$name" "$@" > "$work/$name.out" 2>&1 < /dev/null ||
        bad "$name: $(tail -n 2 "$work/$name.out")"
}
losses() { sed -E 's/.*"loss": ([^,]*),.*/\1/' "$work/$1/metrics.jsonl"; }
# step-0 loss and load, the largest difference in the first 20 steps, that of the last step
compare() # name reference
{
    paste <(losses "$1") <(losses "$2") | awk -v name="$1" -v steps="$steps" '
        { d = $1 > $2 ? $1 - $2 : $2 - $1; if (NR == 1) first = $1 == $2; if (NR <= 20 && d > most) most = d; last = d }
        END { printf "%-22s step 0 %s  first 20 steps %.1e  step %d %.1e\n", name, first ? "equal" : "DIFFERS", most,
              NR - 1, last }'
    local load='s/.*"load_max_over_mean": ([^,}]*).*/\1/'
    [ "$(head -n 1 "$work/$1/metrics.jsonl" | sed -E "$load")" = \
        "$(head -n 1 "$work/$2/metrics.jsonl" | sed -E "$load")" ] || bad "$1: another load in step 0"
}
last_difference() { paste <(losses "$1") <(losses "$2") | tail -n 1 | awk '{ d = $1 - $2; print d < 0 ? -d : d }'; }

train one -- per_device_batch_size=16
spread=0
for micros in 2 4 8; do
    train "one_by_$micros" -- per_device_batch_size=$((16 / micros)) gradient_accumulation_steps=$micros
    compare "one_by_$micros" one
    spread=$(echo "$spread $(last_difference "one_by_$micros" one)" | awk '{ print ($1 > $2 ? $1 : $2) }')
done
check() # name
{
    local line
    line=$(compare "$1" one)
    echo "$line"
    echo "$line" | awk -v spread="$spread" '{ exit !(/step 0 equal/ && $8 <= 2e-5 && $11 <= 3 * spread) }' ||
        bad "$1: beyond the bound; the spread of one rank is $spread"
}
for mesh in 1x1x4 2x1x2 1x4x1 1x2x2; do
    IFS=x read -r data fsdp expert <<< "$mesh"
    axes=("ici_data_parallelism=$data" "ici_fsdp_parallelism=$fsdp" "ici_expert_parallelism=$expert"
        per_device_batch_size=4 threads=1)
    train "threads_$mesh" -- ranks=4 "${axes[@]}"
    check "threads_$mesh"
    case $mesh in 1x1x4 | 1x2x2) ;; *) continue ;; esac
    for launcher in mpirun.openmpi mpiexec.mpich; do
        command -v "$launcher" > /dev/null || continue
        train "${launcher#*.}_$mesh" "$launcher" -n 4 -- "${axes[@]}"
        check "${launcher#*.}_$mesh"
        cmp -s <(losses "${launcher#*.}_$mesh") <(losses "threads_$mesh") ||
            bad "${launcher#*.}_$mesh: other losses than on threads"
    done
done

# 4 ranks 1x1x4 -> 2 ranks 1x2x1 -> 1 rank -> 3 ranks 1x3x1, against one rank that goes through.
chain=("max_target_length=128" "learning_rate_schedule_steps=$steps")
train straight -- per_device_batch_size=12 steps=20 "${chain[@]}"
train chain -- steps=5 ranks=4 ici_expert_parallelism=4 per_device_batch_size=3 "${chain[@]}"
train chain -- steps=10 ranks=2 ici_fsdp_parallelism=2 per_device_batch_size=6 "${chain[@]}"
train chain -- steps=15 per_device_batch_size=12 "${chain[@]}"
train chain -- steps=20 ranks=3 ici_fsdp_parallelism=3 per_device_batch_size=4 "${chain[@]}"
line=$(compare chain straight)
echo "$line"
echo "$line" | awk '{ exit !(/step 0 equal/ && $8 <= 2e-5) }' || bad "the chain is beyond the bound"
echo "mesh_runs: $steps steps, spread of one rank $spread, $n_bad problems"
[ $n_bad = 0 ]
