#!/usr/bin/env bash
# What every command does, as a user sees it: output, exit code, errors, streams, signals.
# Usage: test_cli.sh PROGRAM
set -uo pipefail
program=$(realpath "${1:?program}")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
n=0 n_bad=0

bad()
{
    echo "test_cli: $*" >&2
    n_bad=$((n_bad + 1))
}
# Runs the program; then out, err (files) and code are what it left.
run()
{
    code=0
    "$program" "$@" > out 2> err < /dev/null || code=$?
    last="dropless $*"
    n=$((n + 1))
}
expect() # code [pattern in stdout] [pattern in stderr]; "-": must be empty
{
    [ "$code" = "$1" ] || bad "$last: exit code $code, expected $1: $(tail -n 2 err)"
    match out "${2:-}"
    match err "${3:-}"
}
match()
{
    case $2 in
    "") ;;
    -) [ ! -s "$1" ] || bad "$last: std$1 should be empty, it has: $(head -c 300 "$1")" ;;
    *) grep -qE -- "$2" "$1" || bad "$last: std$1 lacks /$2/, it has: $(head -c 300 "$1")" ;;
    esac
}

cat > tiny.yml << YAML
decoder_block: deepseek
attention_type: mla
vocab_size: 256
base_emb_dim: 32
base_num_decoder_layers: 2
first_num_dense_layers: 1
base_mlp_dim: 48
base_moe_mlp_dim: 16
num_experts: 8
num_experts_per_tok: 2
shared_experts: 1
routed_score_func: sigmoid
routed_bias: true
norm_topk_prob: true
base_num_query_heads: 2
q_lora_rank: 16
kv_lora_rank: 16
qk_nope_head_dim: 8
qk_rope_head_dim: 8
v_head_dim: 8
max_position_embeddings: 128
max_target_length: 32
per_device_batch_size: 2
dtype: float32
dataset_type: text
dataset_path: text.txt
learning_rate: 2e-3
steps: 6
checkpoint_period: 3
base_output_directory: runs
run_name: a
YAML
for i in $(seq 300); do echo "line $i of a text to learn from, no line like another"; done > text.txt

# ---- help, version, wrong usage
run --help && expect 0 'dropless train CONFIG' -
run -h && expect 0 'Exit codes' -
run --version && expect 0 '^dropless [0-9]+\.[0-9]+\.[0-9]+$' -
run && expect 2 - 'Commands:'
run trian && expect 2 - "unknown command 'trian'"
match err '^  dropless train CONFIG'
run evaluate && expect 2 - '^  dropless eval PATH'
for command in train eval generate inspect probe; do
    run $command --help && expect 0 "^usage: dropless $command " -
    run $command -h && expect 0 "^usage: dropless $command " -
    run $command && expect 2 - "dropless $command: .*missing"
    run $command --no-such-option x && expect 2 - "dropless $command: unrecognized option '--no-such-option'"
done
run bench --help && expect 0 'machine' -
run bench && expect 2 - 'dropless bench KIND'
run bench no_such_kind && expect 2 - 'gemm'
run bench gemm experts=2 rows=3 k=64 n=32 runs=1 mbytes=1 && expect 2 - 'mbytes'
run bench gemm precision=fp64 && expect 2 - 'precision=fp64: expected default|bf16_x6|bf16_x3'
run bench gemm precision=bf16_x6 op=wgrad experts=2 rows=3 k=64 n=32 runs=1 && expect 0 'op=wgrad dtype=f32 .* precision=bf16_x6 .* fraction_fma=' -
run bench layer skew=flat && expect 2 - 'skew=flat: expected balanced|zipf|hot'
run bench layer experts=8 top_k=9 && expect 2 - 'top_k=9'
run bench report && expect 2 - 'ends in .md'
run bench report none/x.md && expect 1 - 'none/x.md'
ln -s "$root/configs" "$root/data" .
run bench report report.md quick=true && expect 0 - 'Training step'
for title in 'Grouped GEMM of MXFP8' Quantizers Experts Layer 'Training step'; do
    grep -A 5 "^## $title" report.md | grep -q '^| [a-z0-9]' || bad "bench report: no rows of $title"
done
[ "$(grep -c '<circle' report.svg)" -ge 2 ] || bad "bench report: no points in the picture"
run bench step && expect 2 - 'CONFIG is missing'
run bench step none.yml && expect 1 - 'none.yml: No such file'
run bench step tiny.yml learning_rte=1 && expect 2 - "'learning_rate'"
layer="experts=4 top_k=2 d=32 f=16 rows=24 runs=1 mbytes=1 threads=2"
for skew in "balanced 1" "zipf 1\.[0-9]+" "hot 2"; do
    # shellcheck disable=SC2086 # several words
    run bench layer $layer skew=${skew% *} && expect 0 "op=forward_backward .* load_max_over_mean=${skew#* } " -
done
for skew in "balanced 1" "zipf 2" "hot 2\.33333"; do # of 24 rows the first expert has 6, 12, 14
    # shellcheck disable=SC2086 # several words
    run bench experts experts=4 rows=6 d=32 f=16 runs=1 mbytes=1 threads=2 dtype=bf16 skew=${skew% *} && expect 0 "op=forward_backward .* load_max_over_mean=${skew#* } over_balanced=.* fraction=.* fraction_fma=" -
done
run bench experts rows=0 && expect 2 - 'rows='
DPL_CPU=ref run bench machine mbytes=1 --json && expect 0 '"gflops_bf16":' -
for op in f32_gemm bf16_gemm f32_attention bf16_attention rows; do
    match out "^\{\"bench\":\"machine_kernel\",\"op\":\"$op\",\"level\":\"ref\",\"kernel\":\"ref\",\"why\":\"forced by DPL_CPU\""
done
DPL_CPU='' run bench machine mbytes=1 && expect 0 'op=rows .* why=best of this machine' -
number='-?[0-9.]+(e[-+][0-9]+)?'
run bench step tiny.yml runs=2 warmup=1 threads=2 step_profile=true --json && expect 0 "^\{\"bench\":\"step\",\"config\":\"tiny.yml\",\"dtype\":\"f32\",\"threads\":2,\"median_ms\":$number,\"tokens_per_s\":$number,\"gflops\":$number,\"limit_ms\":$number,\"fraction\":$number\}$" -
grep -c '"bench":"step_phase"' out | grep -qx 12 || bad "$last: expected a row for each of 11 phases and one for the rest"
sed -n 's/.*"share":\([^}]*\)}/\1/p' out | awk '{ all += $1 } END { exit !(all > 0.99 && all < 1.01) }' || bad "$last: the shares do not add up to 1"
run bench step tiny.yml runs=1 warmup=0 dtype=bfloat16 && expect 0 'dtype=bf16 .* fraction=.* fraction_fma=' -
run bench step tiny.yml dataset_path=none runs=1 warmup=0 && expect 0 'config=tiny.yml dtype=f32 .* fraction=' 'synthetic'
[ ! -e runs ] || bad "bench step wrote a run directory"
run train --help && expect 0 '^  learning_rate=3e-0?5' -
run eval x && expect 2 - '--data FILE is missing'
run eval x --data && expect 2 - "option '--data' requires an argument"
run eval x --data a --data b && expect 2 - 'given twice'
run eval x --json=1 --data a && expect 2 - "option '--json' doesn't allow an argument"
run inspect -x && expect 2 - "dropless inspect: invalid option -- 'x'"
run inspect --json -- --json && expect 1 - 'cannot find --json'
run inspect a b && expect 2 - "unexpected argument 'b'"
for wrong in --tokens=x --tokens=-1 --tokens=1.5 --temperature=nan --temperature=-1 --top-p=0 --top-p=1.1 --seed=; do
    run generate x $wrong && expect 2 - "${wrong%%=*} is '"
done
run generate x --prompt a --prompt-ids 1 && expect 2 - 'exclude each other'
run generate x --prompt "" && expect 2 - 'prompt is empty'
run generate x --prompt-ids 1,,2 && expect 2 - '--prompt-ids is'
run probe a b && expect 2 - '1 of 3 arguments'
run probe a b c --steps -3 && expect 2 - '--steps is'
run generate x --t 0 && expect 2 - "option '--t' is ambiguous"
run generate x --prompt-id 1,,2 && expect 2 - '--prompt-ids is' # an abbreviation that has one meaning
run train a=1 --no-such-option && expect 2 - "^dropless train: unrecognized option '--no-such-option'"

# ---- keys
run train tiny.yml learning_rte=1e-4 && expect 2 - "unknown key 'learning_rte'.*'learning_rate'"
run train tiny.yml num-epochs=2 && expect 2 - "unknown key 'num-epochs'"
run train tiny.yml learning_rate=abc && expect 2 - 'learning_rate'
run train tiny.yml learning_rate=1e400 && expect 2 - 'learning_rate'
run train tiny.yml steps=-7 && expect 2 - 'steps: .*expected -1'
{ cat tiny.yml; echo 'learning_rte: 1e-4'; } > typo.yml
run train typo.yml && expect 2 - 'typo.yml.*learning_rte.*learning_rate'
run train tiny.yml extra && expect 2 - "unexpected argument 'extra', expected key=value"
run train tiny.yml num_experts_per_tok=9 run_name=bad && expect 1 - 'num_experts_per_tok'
run train none.yml && expect 1 - 'none.yml: No such file'
run train . && expect 1 - 'not a regular file'

# ---- train: lines when piped, resume, nothing on stderr
run train tiny.yml && expect 0 '^completed step: 5, seconds: ' -
[ "$(grep -c '^completed step: ' out)" = 6 ] || bad "6 steps gave $(grep -c '^completed step' out) lines"
grep -q $'\r' out && bad "a piped run printed carriage returns"
grep -q '"step": *0' runs/a/metrics.jsonl || bad "metrics.jsonl has no step 0"
run train tiny.yml steps=8 && expect 0 '^completed step: 6, ' -
grep -q '^completed step: 5, ' out && bad "the resumed run repeated step 5"
env LC_ALL=de_DE.UTF-8 "$program" train tiny.yml run_name=german > /dev/null || bad "LC_ALL=de_DE.UTF-8 fails"
diff <(grep -oE '"loss": *[^,]*' runs/german/metrics.jsonl) <(head -n 6 runs/a/metrics.jsonl | grep -oE '"loss": *[^,]*') || bad "the locale changed the losses"

# ---- a terminal: one line that updates
if script -qec true /dev/null > /dev/null 2>&1; then
    script -qec "$program train tiny.yml run_name=terminal" /dev/null > terminal.out 2>&1 < /dev/null
    grep -q 'step 6/6  loss [0-9.]*  [0-9]* tokens/s  0:00:0[0-9] left' terminal.out ||
        bad "no progress line on a terminal: $(head -c 300 terminal.out)"
    grep -q '^completed step' terminal.out && bad "a terminal shows lines of steps"
else
    echo "test_cli: SKIPPED the terminal: there is no 'script'"
fi

# ---- signals: the first one saves, the second one ends at once
wait_for_step() # log file
{
    for _ in $(seq 200); do
        grep -q '^completed step: 2, ' "$1" 2> /dev/null && return
        sleep 0.05
    done
    bad "no step in $1"
}
for signal in TERM INT; do
    # A background job of a script ignores SIGINT; env gives it back its default.
    env --default-signal=INT "$program" train tiny.yml steps=1000000 run_name=$signal > $signal.out 2> $signal.err &
    pid=$!
    wait_for_step $signal.out
    kill -$signal $pid
    wait $pid
    code=$?
    [ $code = 0 ] || bad "SIG$signal: exit code $code, expected 0: $(tail -n 2 $signal.err)"
    step=$(sed -n 's/^completed step: \([0-9]*\),.*/\1/p' $signal.out | tail -n 1)
    [ -d "runs/$signal/checkpoints/$step" ] || bad "SIG$signal: no checkpoint of step $step"
    n=$((n + 1))
done
"$program" train tiny.yml steps=1000000 run_name=twice base_emb_dim=512 base_mlp_dim=4096 max_target_length=128 \
    per_device_batch_size=64 > twice.out 2> twice.err &
pid=$!
for _ in $(seq 200); do
    [ -s twice.out ] && break
    sleep 0.05
done
kill -TERM $pid
for _ in $(seq 100); do
    [ -s twice.err ] && break # the first one was taken
    sleep 0.01
done
kill -TERM $pid 2> /dev/null
wait $pid
code=$?
[ $code = 143 ] || [ $code = 0 ] || bad "SIGTERM twice: exit code $code, expected 143"
n=$((n + 1))

# ---- streams
"$program" train tiny.yml run_name=reader steps=40 | head -n 1 > /dev/null
[ -d runs/reader/checkpoints/39 ] || bad "a run ended because the reader of its output went away"
for closed in '>&-' '> /dev/full'; do
    for arguments in --version --help 'inspect runs/a' 'generate runs/a --tokens 4' \
        'eval runs/a --data text.txt eval_steps=1'; do
        code=0
        eval "$program $arguments $closed" 2> err || code=$?
        last="dropless $arguments $closed"
        : > out
        expect 1 - 'cannot write to standard output'
        n=$((n + 1))
    done
done
"$program" train tiny.yml run_name=silent >&- 2>&- <&- || bad "a run without streams failed"
[ -d runs/silent/checkpoints/5 ] || bad "a run without streams left no checkpoint"

# ---- eval
run eval runs/a --data text.txt --json && expect 0 '^\{"loss":[0-9.]+,"tokens":[0-9]+,"perplexity":[0-9.]+\}$' -
tokens=$(($(wc -c < text.txt) - 1))
grep -q "\"tokens\":$tokens," out || bad "eval predicted other than $tokens tokens: $(cat out)"
json=$(cat out)
for path in runs/a/checkpoints/7 runs/a/ ./runs/../runs/a/checkpoints/7/; do
    run eval $path --data text.txt --json threads=1
    [ "$(cat out)" = "$json" ] || bad "eval $path gave $(cat out), not $json"
done
run eval runs/a --data text.txt eval_steps=2 && expect 0 '^tokens: 128$' -
run eval runs/a/checkpoints/3 --data text.txt && expect 0 '^loss: [0-9.]+$' -
run eval none --data text.txt && expect 1 - 'cannot find the model none'
run eval runs --data text.txt && expect 1 - 'runs is no model'
run eval runs/a --data none.txt && expect 1 - 'none.txt'
run eval runs/a --data text.txt no_key=1 && expect 2 - "unknown key 'no_key'"
run eval runs/a --data text.txt max_target_length=4096 && expect 1 - 'max_position_embeddings'
: > empty.txt
run eval runs/a --data empty.txt && expect 1 - 'empty'
run eval runs/a --data text.txt dataset_type=bin dataset_token_bytes=1 && expect 1 - 'dataset_token_bytes is odd'

# ---- generate
run generate runs/a --prompt "line 1" --tokens 20 --seed 3 && expect 0 "" -
[ "$(wc -c < out)" = 20 ] || bad "generate --tokens 20 printed $(wc -c < out) bytes"
cp out first
run generate runs/a --prompt "line 1" --tokens 20 --seed 3 threads=1
cmp -s out first || bad "generate with one seed printed two texts"
printf 'line 1' | "$program" generate runs/a --prompt - --tokens 20 --seed 3 > out
cmp -s out first || bad "a prompt from stdin gave another text"
run generate runs/a --prompt-ids 108,105,110,101,32,49 --tokens 20 --seed 3 && expect 0 '^[0-9]+( [0-9]+){19}$' -
[ "$(cat out)" = "$(od -An -v -tu1 -w100 first | tr -s ' ' | sed 's/^ //')" ] || bad "ids and bytes differ"
run generate runs/a --tokens 0 && expect 0 - -
run generate runs/a --tokens 128 && expect 2 - '128 positions'
run generate runs/a --prompt-ids 3 && expect 0 '^[0-9]+( [0-9]+){126}$' - # as many as the default, or fit
run generate runs/a --prompt-ids 256 && expect 1 - '0 to 255'
run generate runs/a --prompt-ids 1 --temperature 0 --tokens 5 && expect 0 '^[0-9 ]+$' -
cp -r runs/a/checkpoints/7 wide
sed -i 's/"vocab_size": *256/"vocab_size": 300/' wide/config.json
run generate wide --tokens 3 && expect 1 - 'wide|manifest|config.json' # the checksum has changed
TIMEFORMAT='%U %S'
cpu=$( { time { sleep 2; printf x; } | "$program" generate runs/a --prompt - --tokens 1 > out; } 2>&1 | tail -n 1)
awk -v cpu="$cpu" 'BEGIN { split(cpu, t, " "); exit !(t[1] + t[2] < 1) }' ||
    bad "waiting two seconds for a prompt took $cpu s of CPU"

# ---- inspect
run inspect runs/a && expect 0 '^kind: +checkpoint$' -
match out '^checksums: +verified$'
match out '^  total: +40,928$'
run inspect runs/a --json && expect 0 '"checksums": ?"verified"' -
python3 -c 'import json; json.load(open("out"))' 2> /dev/null || ! command -v python3 > /dev/null ||
    bad "inspect --json is not JSON: $(cat out)"
run inspect tiny.yml --memory num_experts=16 && expect 0 '^  experts: +16$' -
[ "$(sed -n '/bytes per parameter/,$s/.* //p' out | grep -v : | tr '\n' ' ')" = "4 4 8 0 16 4 4 8 2 18 " ] ||
    bad "$last: bytes per parameter: $(sed -n '/bytes per parameter/,$p' out)"
match out '^  moments bytes: '
run inspect runs/a/checkpoints/3/config.json && expect 0 '^kind: +configuration$' -
run inspect none.yml && expect 1 - 'cannot find none.yml'
POSIXLY_CORRECT=1 run inspect runs/a --json && expect 0 '"checksums": ?"verified"' -
cp tiny.yml $'n\377.yml' && run inspect $'n\377.yml' && expect 0 '^kind: +configuration$' -
run inspect tiny.yml nokey=1 && expect 2 - "unknown key 'nokey'"

# ---- damage: each is found and named, by every command that opens the model
damaged() # what pattern
{
    local data=text.txt
    run inspect hurt && expect 1 - "$2"
    run eval hurt --data $data && expect 1 - "$2"
    run generate hurt --tokens 1 && expect 1 - "$2"
    rm -rf hurt
}
copy() { rm -rf hurt; cp -r runs/a/checkpoints/7 hurt; }
copy; printf 'X' | dd of=hurt/model.safetensors bs=1 seek=20000 conv=notrunc 2> /dev/null; damaged flip model.safetensors
copy; truncate -s 1000 hurt/model.safetensors; damaged cut model.safetensors
copy; rm hurt/model.safetensors; damaged gone model.safetensors
copy; rm hurt/config.json; damaged config 'config.json'
copy; echo '{' > hurt/manifest.json; damaged manifest manifest.json
copy; rm hurt/manifest.json hurt/model.safetensors; mkdir hurt/model.safetensors; damaged folder model.safetensors
copy; rm hurt/manifest.json; printf '\377\377\377\377\377\377\377\177{}' > hurt/model.safetensors; damaged header model.safetensors
copy; rm hurt/manifest.json; rm hurt/model.safetensors; mkfifo hurt/model.safetensors; damaged fifo model.safetensors
copy; rm hurt/manifest.json; printf '{"model_type":"gpt2"}' > hurt/config.json; damaged family 'gpt2'
if [ "$(id -u)" != 0 ]; then # root reads everything
    copy; rm hurt/manifest.json; chmod 0 hurt/config.json; damaged unreadable config.json
fi
cp -r runs/a hurt; printf 'X' | dd of=hurt/checkpoints/7/model.safetensors bs=1 seek=20000 conv=notrunc 2> /dev/null
damaged newest 'checkpoints/7'
mkdir -p hurt/checkpoints; damaged norun 'no checkpoint'

# ---- probe
fixtures=${DPL_SHARED:-$root/../shared}/fixtures
if [ -d "$fixtures" ]; then
    model=$fixtures/deepseek_v3
    run probe "$model" "$model/input.safetensors" probe.out --grad && expect 0 - -
    run probe "$model" "$model/input.safetensors" probe.one --grad threads=1 && expect 0 - -
    cmp -s probe.out probe.one || bad "probe: one thread gives other bits"
    run probe "$model" "$model/model.safetensors" x && expect 1 - 'input_ids'
    run probe "$model" text.txt x && expect 1 - 'text.txt'
    run probe "$model" "$model/input.safetensors" none/x && expect 1 - 'none'
    run probe "$model" "$model/input.safetensors" x no_key=1 && expect 2 - "unknown key 'no_key'"
    [ ! -e x ] || bad "a failed probe left a file"
    copy # an output that is a folder, here of a model, is refused and stays as it is
    run probe "$model" "$model/input.safetensors" hurt && expect 1 - 'hurt'
    diff -r hurt runs/a/checkpoints/7 > difference || bad "probe changed a folder: $(head -n 3 difference)"
    run generate "$model" --tokens 3 && expect 1 - 'use --prompt-ids'
else
    echo "test_cli: SKIPPED probe: no $fixtures"
fi

echo "test_cli: $n runs, $n_bad problems"
[ "$n_bad" = 0 ]
