# Sourced by the tests of whole runs: a tiny model, a folder to work in, and what every finished run must look like.
# Usage: source runs.sh NAME PROGRAM; afterwards $program, $root and $n_bad are set and the work folder is current.
set -uo pipefail
name=$1
program=$(realpath "${2:?program}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
n=0 n_bad=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

bad()
{
    echo "$name: $*" >&2
    n_bad=$((n_bad + 1))
}
skip()
{
    echo "$name: SKIPPED $*"
}
# Runs the program; then out, err (files) and code are what it left.
run()
{
    code=0
    "$program" "$@" > out 2> err < /dev/null || code=$?
    last="dropless $(printf '%.300s' "$*")"
    n=$((n + 1))
}
# code, then patterns that stderr must have
expect()
{
    [ "$code" = "$1" ] || bad "$last: exit code $code, expected $1: $(tail -n 3 err)"
    for pattern in "${@:2}"; do
        grep -qE -- "$pattern" err || bad "$last: stderr lacks /$pattern/, it has: $(head -c 400 err)"
    done
}
finish()
{
    echo "$name: $n runs, $n_bad problems"
    [ "$n_bad" = 0 ]
}

# 10 windows of 64 tokens remain for training, which is 2.5 steps an epoch: order and position matter at once.
seq -f 'line %g of a text to learn from, no line like another' 20 | head -c 711 > text.txt
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
routed_bias_update_rate: 0.001
norm_topk_prob: true
load_balance_loss_weight: 0.01
base_num_query_heads: 2
q_lora_rank: 16
kv_lora_rank: 16
qk_nope_head_dim: 8
qk_rope_head_dim: 8
v_head_dim: 8
mtp_num_layers: 1
max_position_embeddings: 128
max_target_length: 64
per_device_batch_size: 4
dtype: float32
dataset_type: text
dataset_path: $PWD/text.txt
learning_rate: 2e-3
steps: 24
checkpoint_period: 1
eval_interval: 4
eval_steps: 2
YAML

# Rows of metrics.jsonl without what a clock measured; a row that is no flat JSON object shows as BROKEN.
rows() # run directory
{
    local value='(-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?|null)'
    sed -E "/^\{(\"[a-z_]+\": $value(, |\}\$))+\$/! s/.*/BROKEN: &/
            s/\"(seconds|tflops_per_device|tokens_per_s_per_device|mfu|gmm_ms|dispatch_ms|combine_ms)\": [^,}]*(, )?//g" \
        "$1/metrics.jsonl"
}
# Is run $2 what the undisturbed run $1 is? Its last checkpoint equal byte by byte, its rows too, nothing left over.
same_run()
{
    local last_step rest
    last_step=$(find "$1/checkpoints" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort -n | tail -n 1)
    diff -r "$1/checkpoints/$last_step" "$2/checkpoints/$last_step" > difference 2>&1 ||
        bad "$2: checkpoint $last_step differs from the undisturbed run's: $(head -n 3 difference)"
    diff <(rows "$1") <(rows "$2") > difference ||
        bad "$2: metrics.jsonl differs from the undisturbed run's: $(head -n 5 difference)"
    rest=$(find "$2" -name '*.tmp')
    [ -z "$rest" ] || bad "$2: left behind: $rest"
    grep -avE '^(|completed step: [0-9]+, seconds: .*, mfu: [0-9.]+|checkpoint: .*/[0-9]+|resuming after step [0-9]+|Completed eval after train step [0-9]+, loss=.*|Per train step:| Total TFLOPs: .*| split as .*|number parameters: .*|memory: .*|machine: .*|data: .*|nothing to do: .*|mesh: .*| data [0-9]+, fsdp [0-9]+: ranks .*| [0-9.]+ MB of weights, .*| and up to [0-9.]+ MB for .*)$' \
        "$2/log.txt" > difference && bad "$2: odd lines in log.txt: $(head -n 3 difference)"
    return 0
}
