#!/usr/bin/env bash
# Every key at the edges of its range and beyond, and odd forms of arguments and files: each trains a step or says what
# is wrong, none crashes. Usage: test_settings.sh PROGRAM; EVERY=n (8) tries one of n values, chosen by SEED=n; KEYS=regex
# only those keys; LIMIT=s (5) stops what is merely large.
source "$(dirname "$0")/runs.sh" test_settings "$1"
every=${EVERY:-8} seed=${SEED:-$$} limit=${LIMIT:-5}
RANDOM=$seed
echo "test_settings: SEED=$seed EVERY=$every"
echo 1000 > /proc/self/oom_score_adj # if memory should end, nobody else is to suffer
# Too much memory is to come back as NULL from the sanitizers' allocators too.
export ASAN_OPTIONS=${ASAN_OPTIONS:-}:allocator_may_return_null=1
export TSAN_OPTIONS=${TSAN_OPTIONS:-}:allocator_may_return_null=1
# Two steps, whatever steps= says.
sed -i '/^eval/d; /^checkpoint/d' tiny.yml
echo 'num_epoch: 1' >> tiny.yml

# Runs train with $1, then judges; $2, if given, is the exit code that it must have.
try()
{
    [ $((RANDOM % every)) = 0 ] || return 0
    code=0
    { timeout -s KILL "$limit" "$program" train tiny.yml enable_checkpointing=false threads=2 "$1"; } > out 2> err < /dev/null || code=$?
    last="train $(printf '%.80q' "$1")"
    n=$((n + 1))
    key=${1%%=*}
    case $code in
    0) ;;
    1) grep -q '^dropless: .' err || bad "$last: exit code 1 without an error" ;;
    2) grep -qF -- "${key:0:40}" err || bad "$last: the error does not name '${key:0:40}': $(head -c 300 err)" ;;
    137) slow="$slow $1" ;;
    *) bad "$last: exit code $code: $(tail -n 3 err | head -c 400)" ;;
    esac
    ! grep -qE 'runtime error|ERROR: [A-Za-z]*Sanitizer' err || bad "$last: $(grep -E 'runtime error|ERROR: ' err | head -n 2)"
    [ -z "${2:-}" ] || [ "$code" = "$2" ] || bad "$last: exit code $code, expected $2: $(head -c 300 err)"
}
slow=

edges() # key type range
{
    local key=$1 type=$2 low high value
    low=$(sed -nE 's/^(-?[0-9.e-]+) \.\..*/\1/p' <<< "$3")
    high=$(sed -nE 's/.*\.\. ([0-9.e-]+)$/\1/p' <<< "$3")
    case $type in
    integer)
        try "$key=$low"
        try "$key=$((low + 1))"
        try "$key=$((low - 1))" 2
        if [ -n "$high" ]; then
            try "$key=$high"
            try "$key=$((high + 1))" 2
        else
            try "$key=9223372036854775807"
            try "$key=4611686018427387905"
        fi
        for value in 9223372036854775808 -9223372036854775809 -9223372036854775808 abc 1.5 1e400 nan ' 3' '3 ' --3 3x ٣; do
            try "$key=$value" 2
        done
        try "$key=" && try "$key=0x10" && try "$key=1_000" && try "$key=+3" && try "$key=1e2"
        ;;
    number)
        for value in $low $high 1e-320 1e300 1.7976931348623157e308 -1 -0.0 .5 5. 0 1 1.5 +1; do try "$key=$value"; done
        for value in 1e400 nan inf -inf abc 1e '1 ' ' 1' 1,5 1x 0..1; do try "$key=$value" 2; done
        [ -z "$low" ] || try "$key=-1e300" 2
        [ -z "$high" ] || try "$key=1e300" 2
        try "$key="
        ;;
    text)
        for value in '' ' ' ' x ' "$long" 'ナイーブ' $'a\377b' $'a\nb' '[' '[]' '["("]' '[1]' '{}' '%s%n%s' '*' '~' /dev/null \
            /dev/full .; do
            try "$key=$value"
        done
        ;;
    *) # choices
        for value in ${type//|/ }; do try "$key=$value"; done
        for value in x "$type|" "${type%%|*}x" 1 null ' '; do try "$key=$value" 2; done
        try "$key="
        ;;
    esac
}
long=$(printf '%0100000d' 7)
"$program" train --help > help
mapfile -t keys < <(sed -nE '/^  [a-z0-9_]+=/ { s/^  ([a-z0-9_]+)=.*/\1/; h; n; s/.*\(([^()]+)\)$/\1/; s/, /\t/; H; x; s/\n/\t/; p }' help)
[ ${#keys[@]} = "$(grep -cE '^  [a-z0-9_]+=' help)" ] && [ ${#keys[@]} -ge 70 ] || bad "--help has odd lines"
for row in "${keys[@]}"; do
    IFS=$'\t' read -r key type range <<< "$row"
    [[ $key =~ ${KEYS:-.} ]] && edges "$key" "$type" "$range"
done

# ---- odd arguments: not one is taken for something else
for odd in = =1 steps steps: steps:3 ' steps=3' 'steps =3' STEPS=3 -steps=3 --steps=3 '' ' ' - . steps==3 steps=3=4 '=steps=3' \
    "$long=1" "steps=$long" "$long" 'ステップ=3' $'\377=1' 'steps[0]=1' 'a.b=1' $'steps\n=3' '%n%s=1'; do
    run train tiny.yml enable_checkpointing=false "$odd"
    [ $code = 2 ] && [ -s err ] || bad "$(printf '%.80q' "$odd"): exit code $code, expected 2: $(head -c 300 err)"
done
many=() # about 1 MB of arguments
for i in $(seq 10); do many+=("run_name=$long"); done
for i in $(seq 3000); do many+=("steps=$i"); done
run train tiny.yml "${many[@]}" run_name=many enable_checkpointing=false && expect 0
run train tiny.yml "${many[@]}" enable_checkpointing=false && expect 1 'path longer than'

# ---- odd files: exit code 1 or 2, and the error names the file
odd_file() # code [pattern]
{
    run train odd.yml enable_checkpointing=false
    [ $code = "$1" ] && { [ "$1" = 0 ] || grep -qE -- "odd.yml${2:+.*$2}" err; } ||
        bad "odd.yml ($(head -c 60 odd.yml | tr '\n\0' '  ')): exit code $code, expected $1: $(head -c 300 err)"
}
{ cat tiny.yml; echo 'steps: 2'; } | sed '/^steps: 24/d; s/$/\r/' > odd.yml && odd_file 0
{ printf '\357\273\277'; cat tiny.yml; } > odd.yml && odd_file 0
{ cat tiny.yml; echo 'steps: 3'; } > odd.yml && odd_file 1 'steps.*already'
{ cat tiny.yml; echo "run_name: $long$long$long$long$long$long$long$long$long$long"; } > odd.yml
run train odd.yml enable_checkpointing=false && expect 1 'path longer than'
{ cat tiny.yml; echo "$long: 1"; } > odd.yml && odd_file 1
for text in 'steps: [1, 2]' 'steps: {a: 1}' 'steps: !!int x' '- steps' 'steps: 3: 4' 'steps' '? [a]' '*a' '&a steps: *a' \
    $'steps: |\n  x' $'\tsteps: 3' 'steps: "' '%YAML 9.9' $'a: b\n---\nc: d' $'steps: \001' $'\377\376s' '{' "[[[[[[[["; do
    { cat tiny.yml; printf '%s\n' "$text"; } > odd.yml
    run train odd.yml enable_checkpointing=false
    [ $code = 1 ] || [ $code = 2 ] || bad "odd.yml with $(printf %q "$text"): exit code $code"
    grep -q 'odd.yml' err || bad "odd.yml with $(printf %q "$text"): the error does not name it: $(head -c 300 err)"
done
head -c 100000 "$program" > odd.yml && run train odd.yml
[ $code = 1 ] || [ $code = 2 ] || bad "a binary file as configuration: exit code $code"
: > odd.yml && run train odd.yml base_output_directory=none && expect 1 'decoder_block'
mkfifo fifo && run train fifo && expect 1 'fifo: not a regular file'

[ -z "$slow" ] || echo "test_settings: too large to end in $limit s, stopped:$slow"
finish
