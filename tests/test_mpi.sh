#!/usr/bin/env bash
# Runs the suites of the communicator and of expert parallelism as processes of an MPI, and lets a
# rank give up or fall silent there: the others name it, and the launcher ends, with an error and in
# time. Usage: test_mpi.sh openmpi|mpich BUILD [RANKS ...]
set -euo pipefail
mpi=${1:?openmpi or mpich}
build=${2:?build folder}
shift 2
numbers=("$@")
[ ${#numbers[@]} -gt 0 ] || numbers=(2 3)
out=$(mktemp)
trap 'rm -f "$out"' EXIT
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

for how in abort silent; do
    start=$SECONDS
    ! launch 3 "$build/test_comm" "$how" || fail "$how: the launcher ended without an error"
    [ $((SECONDS - start)) -le 30 ] || fail "$how: it took $((SECONDS - start)) s"
    text='rank 2: disk is gone'
    [ "$how" = abort ] || text='rank 2 has not been heard of for 1 s'
    grep -q "^rank 0: .*$text" "$out" || fail "$how: rank 0 does not say: $text"
done
echo "test_mpi: $mpi: suites with ${numbers[*]} ranks, a rank that gives up, a silent one"
