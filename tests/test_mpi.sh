#!/usr/bin/env bash
# Runs the suites of the communicator and of expert parallelism as processes of an MPI; trains there,
# with the bits of ranks that are threads; and lets a rank give up or fall silent: the others name
# it, and the launcher ends, with an error and in time. Usage: test_mpi.sh openmpi|mpich BUILD [RANKS ...]
set -euo pipefail
mpi=${1:?openmpi or mpich}
build=${2:?build folder}
shift 2
numbers=("$@")
[ ${#numbers[@]} -gt 0 ] || numbers=(2 3)
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
out=$work/out
trap 'rm -rf "$work"' EXIT
# Containers run as root, and have fewer processors than ranks.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl_base_warn_component_unused=0
launch() # ranks program [argument ...]
{
    local launcher=mpirun.openmpi
    [ "$mpi" = openmpi ] || launcher=mpiexec.mpich
    timeout 300 "$launcher" -n "$@" > "$out" 2>&1
}
fail()
{
    cat "$out" >&2
    echo "test_mpi: $mpi: $*" >&2
    exit 1
}

for n in "${numbers[@]}"; do
    for suite in test_comm test_ep; do
        launch "$n" "$build/$suite" || fail "$suite with $n ranks failed"
        [ "$(grep -c '  PASSED  ' "$out")" -eq "$n" ] || fail "$suite: not $n ranks passed"
    done
done

# The same mesh has the same bits on both transports; a launcher's ranks need not be told.
options=("$root/configs/bench-small.yml" per_device_batch_size=2 gradient_accumulation_steps=2 max_target_length=64
    steps=4 eval_interval=-1 "dataset_path=$root/data/shakespeare.txt" "base_output_directory=$work")
results() { sed -E 's/"(seconds|mfu|[a-z_]*_ms|t[a-z_]*_per_[a-z_]*device)": *[^,}]*,? ?//g' "$work/$1/metrics.jsonl"; }
lanes=(lane_threads=1 ep_shared_memory=false)
for axis in expert fsdp data; do
    mesh=("ici_${axis}_parallelism=2")
    "$build/dropless" train "${options[@]}" "${mesh[@]}" ranks=2 run_name=threads > "$out" 2>&1 ||
        fail "training on threads, $axis"
    launch 2 "$build/dropless" train "${options[@]}" "${mesh[@]}" run_name=processes || fail "training failed, $axis"
    [ "$(results threads)" = "$(results processes)" ] || fail "processes train otherwise than threads, $axis"
    # So have messages in place of memory in common, and lanes; chunks have the same losses at first.
    launch 2 "$build/dropless" train "${options[@]}" "${mesh[@]}" "${lanes[@]}" run_name=lanes ||
        fail "training with lanes failed, $axis"
    [ "$(results threads)" = "$(results lanes)" ] || fail "lanes and messages train otherwise, $axis"
    for file in "$work"/threads/checkpoints/3/*.safetensors; do
        cmp "$file" "$work/processes/checkpoints/3/$(basename "$file")" || fail "other weights than threads, $axis"
    done
    rm -rf "$work"/{threads,processes,lanes}
done
launch 2 "$build/dropless" train "${options[@]}" ici_expert_parallelism=2 "${lanes[@]}" run_name=one || fail "training"
launch 2 "$build/dropless" train "${options[@]}" ici_expert_parallelism=2 "${lanes[@]}" ep_chunks=3 run_name=chunks ||
    fail "training in chunks failed"
[ "$(results one | head -1 | grep -o '"loss": [^,]*')" = "$(results chunks | head -1 | grep -o '"loss": [^,]*')" ] ||
    fail "chunks have another first loss"
! launch 2 "$build/dropless" train "${options[@]}" ranks=3 run_name=wrong || fail "ranks=3 of 2 was accepted"
grep -q "ranks=3, but the launcher started 2" "$out" || fail "ranks=3 of 2: another error"

# The note in the file by which builds are told from each other.
objcopy --remove-section .note.gnu.build-id "$build/dropless" "$work/other"
cp "$build"/dropless_*.so "$work"
! launch 1 "$build/dropless" train "${options[@]}" ici_data_parallelism=2 : -n 1 "$work/other" train "${options[@]}" \
    ici_data_parallelism=2 || fail "two builds in one run were accepted"
grep -q "rank 1: another build" "$out" || fail "two builds: another error"

# What srun starts without --mpi would be so many lone processes in one run directory.
! env SLURM_STEP_NUM_TASKS=2 "$build/dropless" train "${options[@]}" run_name=lone > "$out" 2>&1 ||
    fail "a process that srun started without an MPI trains alone"
grep -q "srun started 2 processes that cannot find each other" "$out" || fail "srun without MPI: another error"

for how in abort silent; do
    start=$SECONDS
    ! launch 3 "$build/test_comm" "$how" || fail "$how: the launcher ended without an error"
    [ $((SECONDS - start)) -le 30 ] || fail "$how: it took $((SECONDS - start)) s"
    text='rank 2: disk is gone'
    [ "$how" = abort ] || text='rank 2 has not been heard of for 1 s'
    grep -q "^rank 0: .*$text" "$out" || fail "$how: rank 0 does not say: $text"
done
echo "test_mpi: $mpi: suites with ${numbers[*]} ranks, a rank that gives up, a silent one"
