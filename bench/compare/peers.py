"""What the comparisons with other programs share: running dropless, taking turns, a table.

Both sides take turns in rounds, since a shared machine changes; each round gives one median a side,
and the ratio is the median of the rounds' ratios."""
import importlib
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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


def dropless(*args):
    """The JSON rows that a command of dropless prints."""
    if not os.path.exists(PROGRAM):
        sys.exit(f"there is no {PROGRAM}: run make, or set DROPLESS")
    run = subprocess.run([PROGRAM, *args, "--json"], cwd=ROOT, stdout=subprocess.PIPE,
                         check=True, text=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def median_ms(fn, runs):
    """The median of `runs` calls, after one that does not count."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


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
