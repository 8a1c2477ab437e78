#!/usr/bin/env bash
# Measures `bench overlap` over a slow link: one rank in each of two network namespaces, which a pair
# of virtual interfaces joins at a limited rate. Without a rate it looks for one at which a run
# without overlap spends 60 to 80 % of its compute in communication. Needs root, ip, tc and Open MPI;
# skips, and says so, without. Leaves nothing behind. With `train` it compares the steps of a training
# run without and with a lane instead, at the rate that is given: median seconds, and the phases' sum.
# Usage: overlap_netns.sh BUILD [rate=MBIT] [key=value of bench overlap ...]
#        overlap_netns.sh BUILD rate=MBIT train CONFIG [key=value ...]
set -euo pipefail
build=${1:?build folder}
shift
program=$(realpath "$build/dropless")
rate=
keys=()
command=(bench overlap memory=messages)
for key in "$@"; do
    case $key in
    rate=*) rate=${key#rate=} ;;
    train) command=(train) ;;
    *) keys+=("$key") ;;
    esac
done
skip()
{
    echo "overlap_netns: SKIPPED: $*" >&2
    exit 77
}
[ "$(id -u)" -eq 0 ] || skip "not root"
for tool in ip tc unshare taskset mpirun.openmpi; do
    command -v "$tool" > /dev/null || skip "no $tool"
done
[ "$(nproc)" -ge 2 ] || skip "one processor"

id=dpl$$
work=$(mktemp -d)
cleanup()
{
    trap - EXIT INT TERM
    for side in a b; do
        pids=$(ip netns pids "$id$side" 2> /dev/null) && [ -z "$pids" ] || kill $pids 2> /dev/null || true
        ip netns del "$id$side" 2> /dev/null || true # and its interface with it
    done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 1' INT TERM
ip netns add "${id}a" 2> "$work/error" || skip "no network namespaces: $(cat "$work/error")"
ip netns add "${id}b"
ip link add "${id}va" netns "${id}a" type veth peer name "${id}vb" netns "${id}b" 2> "$work/error" ||
    skip "no virtual interfaces: $(cat "$work/error")"
for side in a b; do
    ip -n "$id$side" link set "${id}v$side" name link0
    ip -n "$id$side" addr add "10.77.7.$([ $side = a ] && echo 1 || echo 2)/24" dev link0
    ip -n "$id$side" link set lo up
    ip -n "$id$side" link set link0 up
done

# What mpirun calls instead of ssh: address, command.
cat > "$work/agent" << END
#!/bin/sh
shift
exec ip netns exec ${id}b unshare --uts sh -c "hostname ${id}b; \$*"
END
chmod +x "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$work
export OMPI_MCA_btl=tcp,self OMPI_MCA_pml=ob1 OMPI_MCA_btl_tcp_if_include=link0
export OMPI_MCA_oob_tcp_if_include=link0 OMPI_MCA_plm_rsh_agent=$work/agent
export OMPI_MCA_btl_base_warn_component_unused=0
# One thread a rank, each on a processor of its own.
cat > "$work/rank" << END
#!/bin/sh
exec taskset -c \$OMPI_COMM_WORLD_RANK "$program" "\$@" threads=1
END
chmod +x "$work/rank"
launch() # argument ... -> $work/row
{
    timeout 900 ip netns exec "${id}a" unshare --uts sh -c 'hostname '"${id}a"'; exec "$@"' sh \
        mpirun.openmpi -n 2 --bind-to none --host 10.77.7.1:1,10.77.7.2:1 -x TMPDIR \
        "$work/rank" "${command[@]}" "${keys[@]}" "$@" > "$work/row" 2> "$work/error" < /dev/null ||
        { cat "$work/row" "$work/error" >&2; exit 1; }
}
bench() { launch "$@" --json; }
field() { sed -E "s/.*\"$1\":([^,}]*).*/\1/" "$work/row"; }
shape() # Mbit/s, both ways
{
    for side in a b; do
        tc -n "$id$side" qdisc replace dev link0 root tbf rate "$1mbit" burst 128kb latency 20ms ||
            skip "tc has no tbf"
    done
}
calculate() { awk "BEGIN { print ($*) }"; }

median() { sort -g | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'; }
train() # name key=value ...: its steps but the first, which warms up
{
    launch "base_output_directory=$work" "run_name=$1" step_profile=true enable_checkpointing=false eval_interval=-1 \
        ep_shared_memory=false "${@:2}"
    local rows
    rows=$(tail -n +2 "$work/$1/metrics.jsonl")
    echo "$1: step $(echo "$rows" | sed -E 's/.*"seconds": ([^,]*).*/\1/' | median) s, of it operators" \
        "$(echo "$rows" | awk '{ s = 0; while (match($0, /"phase_[a-z_]*_ms": [0-9.e+-]*/)) {
            split(substr($0, RSTART, RLENGTH), f, ": "); s += f[2] / 1e3; $0 = substr($0, RSTART + RLENGTH) }
            print s }' | median) s"
}
if [ "${command[0]}" = train ]; then
    [ -n "$rate" ] || { echo "overlap_netns: train needs rate=MBIT" >&2; exit 2; }
    shape "$rate"
    train blocking lane_threads=0
    train overlapped lane_threads=1
    exit
fi
if [ -z "$rate" ]; then
    shape 10000
    bench runs=1
    rate=$(calculate "int($(field sent_mb) * 8e3 / (0.7 * $(field compute_ms))) + 1")
    for _ in 1 2 3; do
        shape "$rate"
        bench runs=3
        share=$(field comm_over_compute)
        echo "overlap_netns: at $rate Mbit/s communication is $share of compute" >&2
        [ "$(calculate "$share < 0.62 || $share > 0.78")" -eq 1 ] || break
        rate=$(calculate "int($rate * $share / 0.7) + 1")
    done
fi
shape "$rate"
bench
awk -v rate="$rate" -v link_ms="$(calculate "$(field sent_mb) * 8e3 / $rate")" -F'[{},:]' '{ gsub(/"/, "")
    printf "%-26s %s\n%-26s %s\n", "rate, Mbit/s", rate, "bytes over rate, ms", link_ms
    for (i = 2; i < NF; i += 2) printf "%-26s %s\n", $i, $(i + 1) }' "$work/row"
