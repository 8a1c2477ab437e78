#!/usr/bin/env bash
# Trains through the command line as a user would: 20 steps, a resume to 25, the same 25 in one go,
# a run that is told to stop, then eval, generate and inspect on what came out. The resumed steps
# must repeat those of the straight run to the last digit. Usage: ci_train.sh [PROGRAM]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
program=$(realpath "${1:-$root/build/dropless}")
config=$root/configs/shakespeare.yml
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cd "$root"

fail()
{
    echo "ci_train: $*" >&2
    exit 1
}
# The learning rate is that of a 25-step run throughout, so that 20 + 5 steps equal 25.
options=(learning_rate_schedule_steps=25 checkpoint_period=10 eval_interval=-1
    "base_output_directory=$out")
train() # run_name [key=value ...]
{
    "$program" train "$config" "${options[@]}" run_name="$1" "${@:2}" > "$out/$1.out" 2>&1 ||
        { tail -n 30 "$out/$1.out" >&2; fail "training '$1' with ${*:2} failed"; }
}
# Training rows have lm_loss, evaluation rows do not.
column() # run key -> "step value" lines
{
    sed -nE '/"lm_loss"/ s/.*"step": *([0-9]+)[,}].*/\1 &/p' "$out/$1/metrics.jsonl" |
        sed -nE "s/^([0-9]+) .*\"$2\": *([^,}]+).*/\1 \2/p"
}
expect_steps() # run first last
{
    [ "$(column "$1" loss | cut -d' ' -f1)" = "$(seq "$2" "$3")" ] ||
        fail "run '$1' should have logged the steps $2 to $3, it has: $(column "$1" loss | tr '\n' ';')"
}

train resumed steps=20
expect_steps resumed 0 19
for file in config.yml metrics.jsonl log.txt checkpoints/19; do
    [ -e "$out/resumed/$file" ] || fail "the run directory lacks $file"
done
grep -q '^completed step: 19, ' "$out/resumed/log.txt" || fail "log.txt lacks the line of step 19"
column resumed loss | awk '{ value[NR] = $2 } END { exit !(NR == 20 && value[20] < value[1]) }' ||
    fail "the loss did not fall: $(column resumed loss | tr '\n' ';')"

train resumed steps=25
expect_steps resumed 0 24
grep -q '^completed step: 20, ' "$out/resumed.out" || fail "the resumed run printed no step 20"
! grep -q '^completed step: 19, ' "$out/resumed.out" || fail "the resumed run repeated step 19"

train straight steps=25
for key in loss raw_grad_norm learning_rate; do
    [ -n "$(column straight $key)" ] || fail "metrics.jsonl has no $key"
    diff <(column resumed $key) <(column straight $key) ||
        fail "$key differs between 20 + 5 steps (<) and 25 steps (>)"
done

# A signal: the step is finished, a checkpoint written, the exit code 0.
"$program" train "$config" "${options[@]}" run_name=stopped steps=100000 > "$out/stopped.out" 2>&1 &
pid=$!
for _ in $(seq 600); do
    [ "$(column stopped loss 2> /dev/null | wc -l)" -lt 2 ] || break
    sleep 0.1
done
kill -TERM "$pid"
wait "$pid" || { tail -n 30 "$out/stopped.out" >&2; fail "a run that is told to stop must exit 0"; }
last=$(column stopped loss | tail -n 1 | cut -d' ' -f1)
[ -d "$out/stopped/checkpoints/$last" ] || fail "no checkpoint of step $last after SIGTERM"

json=$("$program" eval "$out/straight" --data data/shakespeare.txt eval_steps=2 --json)
grep -qE '"loss": *[0-9.]+' <<< "$json" || fail "eval --json printed: $json"
text=$("$program" generate "$out/straight" --prompt "First " --tokens 16 --seed 1)
[ -n "$text" ] || fail "generate printed nothing"
[ "$text" = "$("$program" generate "$out/straight" --prompt "First " --tokens 16 --seed 1)" ] ||
    fail "generate with one seed printed two texts"
"$program" inspect "$out/straight" > /dev/null || fail "inspect failed"
status=0
"$program" train "$config" no_such_key=1 > "$out/usage.out" 2>&1 || status=$?
[ "$status" -ne 0 ] || fail "an unknown key was accepted"
grep -q no_such_key "$out/usage.out" || fail "the error does not name the unknown key"

echo "ci_train: 20 + 5 steps equal 25, SIGTERM leaves a checkpoint, eval, generate, inspect work"
