#!/usr/bin/env bash
# Runs under trouble: full disks, signals, damaged and odd files, two at once, other options on resume. What can go on
# ends with the bytes of an undisturbed run, what cannot says why and leaves what was there. Usage: test_runs.sh PROGRAM
source "$(dirname "$0")/runs.sh" test_runs "$1"
seed=${SEED:-$$}
RANDOM=$seed
echo "test_runs: SEED=$seed"
train() { run train "$work/tiny.yml" "$@"; }
start() # in the background, with SIGINT as a terminal would have it; $! is the program
{
    exec env --default-signal=INT "$program" train "$work/tiny.yml" "$@" > out 2> err < /dev/null
}
wait_for() # pattern in out
{
    for _ in $(seq 400); do
        grep -q -- "$1" out 2> /dev/null && return
        sleep 0.02
    done
    bad "no /$1/ in the output"
}
fresh() # folder: a copy of the run of 8 steps in it, which becomes current
{
    mkdir "$work/$1" && cd "$work/$1" && cp -r "$work/eight/runs" .
}
mkdir straight && cd straight && train && expect 0
mkdir "$work/eight" && cd "$work/eight" && train steps=8 learning_rate_schedule_steps=24 && expect 0

# ---- a full disk: an error that names the file, the last whole checkpoint stays, space lets it go on
disk_full() # size
{
    mkdir "$work/disk.$1" && mount -t tmpfs -o "size=$1k" tmpfs "$work/disk.$1" 2> mount.err || {
        skip "full disks: $(cat mount.err)"
        return 1
    }
    trap 'cd /; umount "$work"/disk.* 2> /dev/null; rm -rf "$work"' EXIT
    cd "$work/disk.$1" || exit 1
    code=0
    "$program" train "$work/tiny.yml" > ../out 2> ../err || code=$?
    n=$((n + 1))
    [ $code = 1 ] || bad "disk of $1 KiB: exit code $code, expected 1"
    grep -qE 'runs/run.*: No space left on device' ../err || bad "disk of $1 KiB: $(head -c 300 ../err)"
    [ -z "$(find . -name '*.tmp')" ] || bad "disk of $1 KiB: left $(find . -name '*.tmp')"
    if [ -n "$(ls runs/run/checkpoints 2> /dev/null)" ]; then
        "$program" inspect runs/run > ../out 2>&1 || bad "disk of $1 KiB: the last checkpoint is bad: $(cat ../out)"
    fi
    mount -o remount,size=100m "$work/disk.$1"
    "$program" train "$work/tiny.yml" > ../out 2> ../err || bad "disk of $1 KiB, then space: $(tail -n 2 ../err)"
    same_run "$work/straight/runs/run" runs/run
    cd "$work" && umount "$work/disk.$1"
}
for size in 4 12 200 840 1000 1500 1720 2360 $((900 + RANDOM % 2000)) $((900 + RANDOM % 2000)); do
    [ -d "$work/disk.$size" ] || disk_full "$size" || break
done

# ---- signals at random moments, in steps, evaluations and checkpoints: exit 0, and the same end
stop_often() # name [key=value ...]
{
    mkdir "$work/$1" "$work/$1/straight" && cd "$work/$1/straight" || exit 1
    local keys=("${@:2}") n_stopped=0 begin ms
    begin=$(date +%s%N)
    train "${keys[@]}" && expect 0
    ms=$((($(date +%s%N) - begin) / 1000000))
    cd ..
    for _ in $(seq 100); do
        start "${keys[@]}" &
        pid=$!
        if [ $n_stopped -lt 8 ]; then
            sleep "0.$(printf '%03d' $((RANDOM % (ms < 1800 ? ms / 2 : 900))))"
            signal=$([ $((RANDOM % 2)) = 0 ] && echo TERM || echo INT)
            kill -$signal $pid 2> /dev/null
            n_stopped=$((n_stopped + 1))
        fi
        wait $pid 2> /dev/null
        code=$?
        n=$((n + 1))
        # Before there is anything to save the signal has its usual effect.
        [ $code = 0 ] || { [ $code -gt 128 ] && [ ! -s out ]; } || bad "a signal: exit code $code: $(tail -n 2 err)"
        grep -q '^completed step: 23,' runs/run/log.txt 2> /dev/null && [ $n_stopped = 8 ] && break
    done
    train "${keys[@]}" && expect 0
    same_run straight/runs/run runs/run
}
stop_often signals
seq -f 'a longer text to evaluate on, line %g' 600 > long.txt # nearly all of the time
stop_often evaluations "eval_dataset_path=$PWD/long.txt" eval_interval=6 eval_steps=-1 checkpoint_period=100

for second in INT TERM; do
    fresh "second.$second"
    start steps=1000000 base_output_directory=other &
    pid=$!
    wait_for '^completed step: 2,'
    kill -STOP $pid # so that both are there when it goes on
    [ $second = INT ] && kill -TERM $pid
    kill -INT $pid
    [ $second = TERM ] && kill -TERM $pid
    kill -CONT $pid
    wait $pid 2> /dev/null
    code=$?
    [ $code = 130 ] || [ $code = 143 ] || bad "two signals: exit code $code, expected 130 or 143"
    train base_output_directory=other steps=3 && expect 0
done
fresh pipe
{ env --default-signal=PIPE "$program" train "$work/tiny.yml" 2>&1; echo $? > code; } | head -n 1 > /dev/null
[ "$(cat code)" = 0 ] || bad "a reader that goes away: exit code $(cat code), expected 0"
same_run "$work/straight/runs/run" runs/run

# ---- two at once
fresh lock
start steps=1000000 &
pid=$!
wait_for '^completed step: 9,'
cp out first
train && expect 1 'runs/run: another process is training'
kill -TERM $pid
wait $pid || bad "the first of two runs: exit code $?"
rm -rf runs
for i in 1 2 3 4; do
    (cd . && exec "$program" train "$work/tiny.yml" > "out.$i" 2> "err.$i") &
done
wait
[ "$(cat err.? | grep -c 'another process is training')" = 3 ] || bad "four at once: $(cat err.?)"
same_run "$work/straight/runs/run" runs/run

# ---- damage: the error names the file, a place where there is one, and what to go back to
fresh damage
for file in runs/run/checkpoints/7/*; do
    base=$(basename "$file")
    cp "$file" good
    bytes=$(stat -c %s good) at=$((RANDOM * 32768 + RANDOM))
    at=$((at % bytes))
    byte=$(od -An -tu1 -j $at -N 1 good)
    printf "\\x$(printf %x $((byte ^ 1)))" | dd of="$file" bs=1 seek=$at conv=notrunc 2> dd.err
    train && expect 1 'checkpoints/7' 'checkpoints/6: move the damaged one'
    [ "$base" = manifest.json ] || expect 1 "7/$base.*between byte [0-9]+ and [0-9]+"
    head -c $((bytes / 2)) good > "$file"
    train && expect 1 "7/$base" 'checkpoints/6: move the damaged one'
    : > "$file"
    train && expect 1 "7/$base" 'checkpoints/6: move the damaged one'
    rm "$file"
    train && expect 1 'checkpoints/7' 'checkpoints/6: move the damaged one'
    mkdir "$file"
    train && expect 1 'checkpoints/7' 'checkpoints/6: move the damaged one'
    rmdir "$file"
    cp good "$file"
done
for _ in $(seq 20); do # a manifest may be hurt where it does not matter; then the rest is whole
    cp runs/run/checkpoints/7/manifest.json good
    printf "\\x$(printf %x $((RANDOM % 256)))" |
        dd of=runs/run/checkpoints/7/manifest.json bs=1 seek=$((RANDOM % $(stat -c %s good))) conv=notrunc 2> dd.err
    run inspect runs/run
    [ $code -le 1 ] || bad "a damaged manifest: exit code $code: $(cat err)"
    cp good runs/run/checkpoints/7/manifest.json
done
mkdir runs/run/checkpoints/9 && train && expect 1 'checkpoints/9: no checkpoint' 'checkpoints/7: move the damaged'
rmdir runs/run/checkpoints/9 && touch runs/run/checkpoints/9
train && expect 1 'checkpoints/9' 'checkpoints/7: move the damaged'
rm runs/run/checkpoints/9
rm runs/run/checkpoints/6/trainer.json && : > runs/run/checkpoints/7/config.json
train && expect 1 'checkpoints/5: move the damaged'
rm -r runs/run/checkpoints/[67] # as it was told
train && expect 0
rm -r "$work"/straight/runs/run/checkpoints/[67]
same_run "$work/straight/runs/run" runs/run

# ---- odd files in the run directory
fresh files
truncate -s -7 runs/run/metrics.jsonl # as a power cut leaves it
printf '{"step": 7, "lo\0garbage\n[1]\n\n{"step": "7"}\n{"step": 9}\n{"st' >> runs/run/metrics.jsonl
mkdir -p runs/run/checkpoints/.8.tmp/deep && touch runs/run/checkpoints/.8.tmp/deep/file runs/run/checkpoints/.9.tmp
touch runs/run/.metrics.jsonl.tmp runs/run/.config.yml.tmp runs/run/checkpoints/notes.txt runs/run/checkpoints/7.old
printf 'completed st' >> runs/run/log.txt
train && expect 0
rows runs/run > have && rows "$work/straight/runs/run" | grep -v '"step": 7,' > want
diff want have > difference || bad "rows after a cut metrics.jsonl: $(head -n 3 difference)"
[ -z "$(find . -name '*.tmp')" ] || bad "left behind: $(find . -name '*.tmp')"
grep -q '^completed st$' runs/run/log.txt || bad "log.txt goes on in the middle of a line"
rm runs/run/metrics.jsonl runs/run/log.txt && train steps=25 && expect 0
for file in metrics.jsonl log.txt config.yml; do
    rm -f "runs/run/$file" && mkdir "runs/run/$file"
    train steps=26 && expect 1 "runs/run/$file"
    rmdir "runs/run/$file"
done
rm -r runs/run/checkpoints && touch runs/run/checkpoints && train && expect 1 'runs/run/checkpoints'
for where in /proc/none text.txt /dev/null "$work/tiny.yml"; do
    [ "$where" = text.txt ] && touch text.txt
    train "base_output_directory=$where" steps=1 && expect 1 "$where"
done
if [ "$(id -u)" != 0 ]; then
    mkdir closed && chmod 555 closed
    train base_output_directory=closed steps=1 && expect 1 'closed.*Permission denied'
elif mkdir closed && mount -t tmpfs -o ro tmpfs closed 2> mount.err; then
    train base_output_directory=closed steps=1 && expect 1 'closed.*Read-only file system'
    umount closed
fi
for good in a/b/c ./x/ 'with space' 'naïve-名前' "quote'\"\\" '[list' '#no' '- a' 'yes' '1e5' '{a: b}' '[1, 2]'; do
    train "run_name=$good" steps=1 && expect 0
    [ -d "runs/$good/checkpoints/0" ] || bad "run_name=$good has no checkpoint"
    run train "runs/$good/config.yml" steps=2 && expect 0
    [ -d "runs/$good/checkpoints/1" ] || bad "config.yml of run_name=$good means another run"
done
train "run_name=$(printf '%0300d' 1)" steps=1 && expect 1 'File name too long'
train "run_name=$(printf '%05000d' 1)" steps=1 && expect 1 'path longer than'
train "run_name=$(printf 'a\377b')" steps=1 && expect 1 'UTF-8'

# ---- data that goes away
fresh data
cp "$work/text.txt" own.txt && train run_name=own dataset_path=own.txt steps=3 && expect 0
rm own.txt && train run_name=own dataset_path=own.txt && expect 1 'own.txt'
: > own.txt && train run_name=own dataset_path=own.txt && expect 1 'own.txt'
head -c 400 "$work/text.txt" > own.txt && train run_name=own dataset_path=own.txt && expect 0 'it had 10 when'

for _ in $(seq 800); do cat "$work/text.txt"; done > own.txt
start run_name=cut dataset_path=own.txt eval_interval=-1 steps=1000000 checkpoint_period=1000 &
pid=$!
wait_for '^completed step: 5,'
: > own.txt
wait $pid
code=$? last="a run whose data is cut"
expect 1 'became shorter'

# ---- resuming with other options
fresh resume
train && expect 0 # steps= alone; the learning rates of "eight" were those of 24 steps
rows runs/run > have && rows "$work/straight/runs/run" | diff - have || bad "8 + 16 steps are not 24"
cmp runs/run/checkpoints/23/optimizer.safetensors "$work/straight/runs/run/checkpoints/23/optimizer.safetensors" ||
    bad "8 + 16 steps are not 24"
cp -r runs again && touch -d '1 hour ago' again/run/checkpoints/23
train base_output_directory=again && expect 0 # it is complete
grep -q '^nothing to do: the run has its 24 steps' out || bad "a complete run does not say so: $(tail -n 2 out)"
[ -z "$(find again/run/checkpoints/23 -maxdepth 0 -mmin -30)" ] || bad "a complete run was saved again"
diff runs/run/metrics.jsonl again/run/metrics.jsonl || bad "a complete run changed metrics.jsonl"
train base_output_directory=again steps=5 && expect 0
diff runs/run/metrics.jsonl again/run/metrics.jsonl || bad "fewer steps than made changed metrics.jsonl"
run train again/run/config.yml steps=25 && expect 0
train base_output_directory=again learning_rate=1e-3 steps=26 && expect 0
grep -q '"step": 25,.*"learning_rate": 0.0001' again/run/metrics.jsonl || bad "the new learning rate is not in use"
train base_output_directory=again steps=27 per_device_batch_size=2 && expect 1 '4 sequences of 64 tokens' 'has 2 of 64'
train base_output_directory=again steps=27 gradient_accumulation_steps=2 && expect 1 'has 8 of 64'
train base_output_directory=again steps=27 gradient_accumulation_steps=2 per_device_batch_size=2 && expect 0
for other in base_emb_dim=64 num_experts=4 num_experts_per_tok=3 base_num_decoder_layers=3 routed_bias=false \
    vocab_size=300 routed_score_func=softmax mtp_num_layers=0 norm_topk_prob=false shared_experts=2 q_lora_rank=0 \
    base_moe_mlp_dim=24 v_head_dim=16 rope_max_timescale=500 first_num_dense_layers=0; do
    train base_output_directory=again steps=28 $other && expect 1 "${other%%=*}=${other#*=}" 'checkpoints/26'
done
yarn=(base_output_directory=yarn rope_type=yarn rope_factor=4 original_max_position_embeddings=32)
train "${yarn[@]}" steps=2 && expect 0
for other in rope_factor=8 original_max_position_embeddings=64 beta_fast=16 beta_slow=2 mscale=0.5 rope_truncate=false \
    rope_type=default; do
    train "${yarn[@]}" steps=3 $other && expect 1 "${other%%=*}=${other#*=}, but" 'checkpoints/1'
done
run train yarn/run/config.yml steps=3 && expect 0
train base_output_directory=yarn steps=4 && expect 0 # as the checkpoint says
grep -q '^rope_factor: 4$' yarn/run/config.yml || bad "config.yml has not the checkpoint's rope_factor"
run train again/run/config.yml base_output_directory=anew steps=24 learning_rate=2e-3 per_device_batch_size=4 \
    gradient_accumulation_steps=1 && expect 0 # as the beginning of another run
rows anew/run | diff <(rows "$work/straight/runs/run") - || bad "config.yml of a run is not that run"
for epochs in 2 4; do # 10 windows, 4 a step
    train base_output_directory=epochs num_epoch=$epochs learning_rate_schedule_steps=24 && expect 0
done
train base_output_directory=whole num_epoch=4 learning_rate_schedule_steps=24 && expect 0
[ "$(rows whole/run | grep -c lm_loss)" = 10 ] || bad "4 epochs of 10 windows are not 10 steps"
rows epochs/run | diff <(rows whole/run) - || bad "2 + 2 epochs are not 4"
train base_output_directory=target target_eval_loss=5 && expect 0
rows target/run > have
[ "$(tail -n 1 have | grep -c eval_loss)" = 1 ] || bad "target_eval_loss=5 ended with $(tail -n 1 have)"
train base_output_directory=target target_eval_loss=5 && expect 0 # it has reached it
rows target/run | diff have - || bad "a run that had reached target_eval_loss went on"
finish
