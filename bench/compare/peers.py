"""What the comparisons with other programs share: running dropless, taking turns, a table.

Both sides take turns in rounds, since a shared machine changes; each round gives one median a side,
and the ratio is the median of the rounds' ratios. What ran while others used more than TOLERATED of
the processor is run again, up to TRIES times; the least disturbed counts."""
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOLERATED, TRIES = 0.03, int(os.environ.get("TRIES", 10))
PROGRAM = os.environ.get("DROPLESS", f"{ROOT}/build/dropless")


def need(*names):
    """The modules, or an exit that says which are missing."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as e:
            missing.append(f"{name} ({e})")
    if missing:
        packages = " ".join(names).replace("yaml", "pyyaml")
        sys.exit(f"{sys.argv[0]}: cannot import {', '.join(missing)}.\n"
                 f"Needed: pip install {packages}")
    return [sys.modules[name] for name in names]


def output(command):
    run = alone(lambda: subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True))
    return run.stdout.decode()


def compile_c(command, hint):
    """Runs a compiler; an exit with its errors and the hint where it fails."""
    try:
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    except OSError as e:
        sys.exit(f"{command[0]}: {e.strerror}\n{hint}")
    if run.returncode != 0:
        sys.exit(f"{run.stderr}\n{hint}")


def dropless(*args):
    """The JSON rows that a command of dropless prints."""
    if not os.path.exists(PROGRAM):
        sys.exit(f"there is no {PROGRAM}: run make, or set DROPLESS")
    return [json.loads(line) for line in output([PROGRAM, *args, "--json"]).splitlines()]


def median_ms(fn, runs):
    """The median of `runs` calls, after one that does not count."""
    def time_all():
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            fn()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    fn()
    return alone(time_all)


def busy_s():
    """Seconds of processor time: of the machine, of this process and what it ran."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, soft = map(int, stat.readline().split()[1:8])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ((user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK"),
            sum(u.ru_utime + u.ru_stime for u in used))


def watched(fn):
    """What others used of the processor meanwhile, and the result of fn()."""
    start, (all0, own0) = time.perf_counter(), busy_s()
    result = fn()
    all1, own1 = busy_s()
    return (all1 - all0 - own1 + own0) / (time.perf_counter() - start) / os.cpu_count(), result


def alone(fn):
    best = None
    for _ in range(TRIES):
        for _ in range(20):  # seconds to wait for one in which nobody works
            if watched(lambda: time.sleep(1))[0] < TOLERATED:
                break
        others, result = watched(fn)
        if best is None or others < best[0]:
            best = others, result
        if others < TOLERATED:
            break
    else:
        print(f"others used {100 * best[0]:.0f} % of the processor", file=sys.stderr)
    return best[1]


def threads():
    return len(os.sched_getaffinity(0))


def processor():
    with open("/proc/cpuinfo") as info:
        names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {threads()} threads"


class Table:
    """Rounds of milliseconds by (what, who); `ours` is who the others are compared with."""

    def __init__(self, ours="dropless"):
        self.ours, self.ms, self.kernel = ours, {}, {}

    def add(self, what, who, ms, kernel=""):
        self.ms.setdefault(what, {}).setdefault(who, []).append(ms)
        self.kernel[what, who] = kernel
        print(f"{what}: {who} {ms:.1f} ms", file=sys.stderr, flush=True)

    def print(self, about):
        print(f"{about}\n\n| what | by | ms | over dropless |\n|---|---|---|---|")
        for what, rows in self.ms.items():
            ours = rows[self.ours]
            for who, ms in rows.items():
                ratio = statistics.median(a / b for a, b in zip(ms, ours))
                kernel = self.kernel[what, who]
                print(f"| {what} | {who}{f' ({kernel})' if kernel else ''} |"
                      f" {statistics.median(ms):.1f} | {ratio:.2f} |")
