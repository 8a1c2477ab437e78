#!/usr/bin/env bash
# A rank of MPI is killed, or stopped, at random moments: the launcher ends with an error, in time, and leaves no
# process; the same command goes on from the last checkpoint, and the end is, byte for byte, that of an undisturbed
# run. Usage: kill_mpi.sh openmpi|mpich BUILD; KILLS=n (6) and SEED=n choose how many and when.
mpi=${1:?openmpi or mpich}
source "$(dirname "$0")/runs.sh" "kill_mpi: $mpi" "${2:?build folder}/dropless"
kills=${KILLS:-6} seed=${SEED:-$$} timeout_s=4
RANDOM=$seed
echo "kill_mpi: $mpi SEED=$seed KILLS=$kills"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
launcher=mpirun.openmpi
mesh=ici_expert_parallelism=2
[ "$mpi" = openmpi ] || launcher=mpiexec.mpich mesh=ici_fsdp_parallelism=2
train() # folder
{
    cd "$1" && exec "$launcher" -n 2 "$program" train "$work/tiny.yml" "$mesh" \
        per_device_batch_size=2 checkpoint_period=2 comm_timeout_s=$timeout_s > out 2>&1 < /dev/null
}
ranks() { pgrep -f "^$program train $work/tiny.yml"; }
milliseconds() { echo $(($(date +%s%N) / 1000000)); }

mkdir straight
begin=$(milliseconds)
train straight &
wait $! || { bad "the undisturbed run failed: $(tail -n 3 straight/out)"; finish; exit; }
whole_ms=$(($(milliseconds) - begin))
n_killed=0 round=0
while [ $n_killed -lt "$kills" ] && [ $n_bad = 0 ] && [ $round -lt 20 ]; do
    mkdir killed
    for attempt in $(seq 100); do
        train killed &
        launched=$!
        victim=
        # The last attempts of a round are left alone, so that it ends.
        if [ $n_killed -lt "$kills" ] && [ "$attempt" -le 20 ]; then
            delay=$((RANDOM % whole_ms))
            sleep "$(printf '%d.%03d' $((delay / 1000)) $((delay % 1000)))"
            victim=$(ranks | sort -R --random-source=<(yes "$RANDOM") | head -n 1)
            signal=KILL
            [ $((RANDOM % 3)) = 0 ] && signal=STOP
            [ -z "$victim" ] || kill -$signal "$victim" 2> /dev/null || victim=
        fi
        begin=$SECONDS
        # One that was stopped after the others had ended well has nobody left to miss it.
        (trap - EXIT && sleep $((timeout_s + 6)) && [ "$(ranks)" = "$victim" ] && kill -CONT "$victim") 2> /dev/null &
        wait $launched
        code=$?
        took=$((SECONDS - begin))
        n=$((n + 1))
        [ -z "$victim" ] || [ $took -le $((timeout_s + 10)) ] ||
            bad "attempt $attempt: $signal: the launcher took $took s"
        sleep 0.3
        if [ -n "$(ranks)" ]; then
            bad "attempt $attempt: $signal: ranks are left"
            pkill -KILL -f "^$program train $work/tiny.yml"
        fi
        [ $code = 0 ] && break
        [ -n "$victim" ] || { bad "attempt $attempt: exit code $code: $(tail -n 3 killed/out)"; break; }
        n_killed=$((n_killed + 1))
    done
    [ $code = 0 ] && same_run straight/runs/run killed/runs/run
    rm -rf killed
    round=$((round + 1))
done
echo "kill_mpi: $mpi: $n_killed kills in $round rounds"
finish
