#!/usr/bin/env bash
# kill -9 at random moments: the same command must go on each time, and the end must be, byte for byte, that of a run
# which nobody disturbed. Usage: kill_test.sh PROGRAM; KILLS=n (10) and SEED=n choose how many and when.
source "$(dirname "$0")/runs.sh" kill_test "$1"
kills=${KILLS:-10} seed=${SEED:-$$}
RANDOM=$seed
echo "kill_test: SEED=$seed KILLS=$kills"
milliseconds() { echo $(($(date +%s%N) / 1000000)); }

# Every run lies in a folder of its own under one relative name, so that config.yml and trainer.json are equal too.
# Started with & only: the shell then becomes the program, which $! names.
train() # folder [key=value ...]
{
    cd "$1" && exec "$program" train "$work/tiny.yml" "${@:2}" > out 2>&1 < /dev/null
}
variants=("checkpoint_period=1" "checkpoint_period=2 max_num_checkpoints_to_keep=2"
    "checkpoint_period=3 per_device_batch_size=1 gradient_accumulation_steps=4 max_num_checkpoints_to_keep=1"
    "checkpoint_period=1 dtype=bfloat16 packing=false threads=1 max_target_length=32")
n_killed=0 n_late=0 round=0
while [ $n_killed -lt "$kills" ] && [ $n_bad = 0 ]; do
    variant=${variants[round % ${#variants[@]}]}
    # On a disk most kills meet a sync, in memory they meet writes and arithmetic.
    place=$work
    [ $((round % 2)) = 1 ] && [ -w /dev/shm ] && place=$(mktemp -d -p /dev/shm) && trap 'rm -rf "$work" "$place"' EXIT
    mkdir -p "$place/straight.$round" "$place/killed.$round"
    begin=$(milliseconds)
    # shellcheck disable=SC2086 # the variant is several words
    train "$place/straight.$round" $variant &
    wait $! || { bad "the undisturbed run failed: $(tail -n 3 "$place/straight.$round/out")"; break; }
    whole_ms=$(($(milliseconds) - begin + 60))
    for attempt in $(seq 200); do
        train "$place/killed.$round" $variant &
        pid=$!
        # The last attempts of a round are left alone, so that it ends.
        if [ $n_killed -lt "$kills" ] && [ "$attempt" -le 60 ]; then
            delay=$((RANDOM % (whole_ms / 2 + 1)))
            sleep "$(printf '%d.%03d' $((delay / 1000)) $((delay % 1000)))"
            kill -9 $pid 2> /dev/null
        fi
        wait $pid 2> /dev/null
        code=$?
        n=$((n + 1))
        [ $code = 0 ] && break
        if [ $code != 137 ]; then
            bad "round $round ($variant), attempt $attempt: exit code $code: $(tail -n 3 "$place/killed.$round/out")"
            break
        fi
        n_killed=$((n_killed + 1))
    done
    [ $code = 0 ] && same_run "$place/straight.$round/runs/run" "$place/killed.$round/runs/run"
    [ "$place" = "$work" ] || { [ $n_bad = 0 ] && rm -rf "$place"; }
    round=$((round + 1))
done
echo "kill_test: $n_killed kills in $round rounds"
finish
