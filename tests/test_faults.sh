#!/usr/bin/env bash
# Faults that users of other training systems reported, seen from the program: example configurations that do not run,
# instructions that the machine lacks, a loss that is not finite, a file that cannot be written in the middle of a save.
# Usage: test_faults.sh PROGRAM
source "$(dirname "$0")/runs.sh" test_faults "$1"

# ---- every configuration that comes with the program trains, small, and can be inspected as it is
for config in "$root"/configs/*.yml; do
    run train "$config" base_output_directory=configs steps=2 "dataset_path=$root/data/shakespeare.txt" \
        per_device_batch_size=1 max_target_length=64 base_emb_dim=64 base_mlp_dim=64 base_moe_mlp_dim=32
    expect 0
    [ "$(grep -c '^completed step: ' out)" = 2 ] || bad "$config: no two steps: $(tail -n 2 out)"
    run inspect "$config" --memory
    expect 0
done

# ---- code for newer processors lies in the files that are chosen at run time, and nowhere else
objects=$(dirname "$program")/CMakeFiles
if [ "$(uname -m)" = x86_64 ] && [ -d "$objects" ] && command -v objdump > /dev/null; then
    n_objects=0 n_wide=0
    while IFS= read -r object; do
        case $object in
        *kernels_amx*) wide='no instruction' ;;
        *avx512*) wide='%tmm[0-9]|ldtilecfg' ;;
        *avx2* | *kernels_tiles*) wide='%tmm[0-9]|ldtilecfg|%zmm[0-9]|%k[0-7]' ;;
        *) wide='%tmm[0-9]|ldtilecfg|%zmm[0-9]|%k[0-7]|%ymm[0-9]' ;;
        esac
        objdump -d --no-show-raw-insn "$object" > code.txt
        n_objects=$((n_objects + 1))
        [[ $object == *avx* ]] && grep -qE '%[yz]mm[0-9]' code.txt && n_wide=$((n_wide + 1))
        if grep -qE "$wide" code.txt; then
            bad "$object has instructions of a higher level: $(grep -m 1 -E "$wide" code.txt)"
        fi
    done < <(find "$objects" -path '*/dpl_*.dir/*' -name '*.o' ! -path '*/dpl_bench.dir/*')
    [ $n_objects -gt 20 ] && [ $n_wide -ge 2 ] || bad "$n_objects objects, $n_wide with wide registers: none was looked at"
else
    skip "disassembly: no x86-64, no objects or no objdump"
fi
for level in ref avx2 avx512 avx512_bf16 amx tiles; do # each level runs, or is refused by its name
    DPL_CPU=$level run train tiny.yml run_name=$level steps=1
    [ $code = 0 ] || expect 1 "$level"
done

# ---- training that diverges: an error, rows that are still JSON, and the checkpoint before is good
run train tiny.yml run_name=diverges learning_rate=1e30 warmup_steps_fraction=0 gradient_clipping_threshold=0
expect 1 'not finite'
mkdir diverged && sed -E 's/, "error": "([^"\\]|\\.)*"\}$/}/' runs/diverges/metrics.jsonl > diverged/metrics.jsonl
rows diverged > have
grep -q BROKEN have && bad "a run that diverges: $(grep BROKEN have)"
tail -n 1 have | grep -q '"loss": null' || bad "a run that diverges: the last row is $(tail -n 1 have)"
[ "$(wc -l < have)" -ge 2 ] || bad "a run that diverges left $(wc -l < have) rows"
run inspect runs/diverges
expect 0

# ---- a save whose second file cannot be written: nothing of it stays, and the run goes on from the one before
run train tiny.yml run_name=straight base_output_directory=straight
expect 0
run train tiny.yml run_name=straight base_output_directory=limited steps=8 learning_rate_schedule_steps=24
expect 0
model_kb=$(($(stat -c %s limited/straight/checkpoints/7/model.safetensors) / 1024))
optimizer_kb=$(($(stat -c %s limited/straight/checkpoints/7/optimizer.safetensors) / 1024))
[ $optimizer_kb -gt $((model_kb + 50)) ] || bad "the optimizer's file is not the larger one"
code=0
(
    trap '' XFSZ # so that the write fails instead
    ulimit -f $((model_kb + 25))
    exec "$program" train tiny.yml run_name=straight base_output_directory=limited > out 2> err < /dev/null
) || code=$?
n=$((n + 1)) last='a save beyond the limit of a file'
expect 1 'optimizer.safetensors: File too large'
[ "$(find limited -mindepth 3 -maxdepth 3 -printf '%f\n' | sort -n | tail -n 1)" = 7 ] || bad "$last left a checkpoint"
[ -z "$(find limited -name '*.tmp')" ] || bad "$last left $(find limited -name '*.tmp')"
run inspect limited/straight
expect 0
run train tiny.yml run_name=straight base_output_directory=limited
expect 0
diff -r straight/straight/checkpoints/23/model.safetensors limited/straight/checkpoints/23/model.safetensors > difference ||
    bad "$last, then space: $(head -n 3 difference)"
rows straight/straight > want && rows limited/straight | diff want - > difference || bad "$last, then space: $(head -n 3 difference)"
finish
