#!/usr/bin/env python3
"""Trains configs/shakespeare.yml in bf16, MXFP8 and NVFP4 from the same seeds, and says how far the
validation losses are apart: a table on standard output, a picture as SVG.

    bench/compare/formats.py --program build/dropless --runs runs/formats --svg docs/precision.svg

Runs that are there are not repeated; one takes some five minutes. Needs nothing but Python.
"""
import argparse
import json
import math
import os
import subprocess
import sys

FORMATS = ("bf16", "mxfp8", "nvfp4")
COLORS = {"bf16": "#444444", "mxfp8": "#1f77b4", "nvfp4": "#d62728"}
WINDOW = 25  # steps whose mean is a point of a curve


def metrics_of(runs, name):
    path = os.path.join(runs, name, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def is_complete(rows, n_steps):
    return any(row.get("step") == n_steps - 1 and "eval_loss" in row for row in rows)


def train(args, fmt, seed):
    name = f"{fmt}_{seed}"
    rows = metrics_of(args.runs, name)
    if is_complete(rows, args.steps):
        return rows
    print(f"training {name}", file=sys.stderr)
    command = [args.program, "train", args.config, f"dataset_path={args.data}",
               f"base_output_directory={args.runs}", f"run_name={name}", f"steps={args.steps}",
               f"init_weights_seed={seed}", f"data_shuffle_seed={seed}",
               "save_checkpoint_on_start=false", "checkpoint_period=100000"]
    if fmt != "bf16":
        command += [f"quantization={fmt}", f"gmm_quantization={fmt}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = metrics_of(args.runs, name)
    if not is_complete(rows, args.steps):
        sys.exit(f"formats: {name} has no evaluation after step {args.steps - 1}")
    return rows


def mean_and_error(x):
    mean = sum(x) / len(x)
    if len(x) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - 1) / len(x))


def evaluations(rows):
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def curve(all_rows):
    """(step, loss): means over runs and windows of steps."""
    sums = {}
    for rows in all_rows:
        for row in rows:
            if "lm_loss" in row:
                total, n = sums.get(row["step"] // WINDOW, (0, 0))
                sums[row["step"] // WINDOW] = total + row["lm_loss"], n + 1
    return [(WINDOW * (k + 0.5), total / n) for k, (total, n) in sorted(sums.items())]


def differences(runs, fmt, seeds, step):
    """Percent of the loss of bf16 with the same seed."""
    pairs = [(evaluations(runs[fmt, s])[step], evaluations(runs["bf16", s])[step]) for s in seeds]
    return [100 * (a / b - 1) for a, b in pairs]


class Panel:
    def __init__(self, left, title, x_most, y_range, unit):
        self.left, self.x_most, self.y_range = left, x_most, y_range
        self.out = [f'<text x="{left}" y="20" font-weight="bold">{title}</text>']
        for i in range(5):
            y = y_range[0] + (y_range[1] - y_range[0]) * i / 4
            self.out.append(f'<line x1="{left}" x2="{left + 300}" y1="{self.y(y):.1f}" '
                            f'y2="{self.y(y):.1f}" stroke="#dddddd"/>')
            self.out.append(f'<text x="{left - 6}" y="{self.y(y) + 4:.1f}" text-anchor="end">'
                            f"{y:.2g}{unit}</text>")
        for i in range(5):
            x = x_most * i / 4
            self.out.append(f'<text x="{self.x(x):.1f}" y="288" text-anchor="middle">{x:.0f}</text>')

    def x(self, step):
        return self.left + 300 * step / self.x_most

    def y(self, value):
        low, high = self.y_range
        return 270 - 235 * (min(max(value, low), high) - low) / (high - low)

    def line(self, points, color):
        at = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.out.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="1.4"/>')

    def bar(self, x, mean, error, color):
        self.out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.y(mean - error):.1f}" '
                        f'y2="{self.y(mean + error):.1f}" stroke="{color}" stroke-width="2"/>')
        self.out.append(f'<circle cx="{x:.1f}" cy="{self.y(mean):.1f}" r="3.5" fill="{color}"/>')


def write_picture(args, runs, seeds, steps):
    left = Panel(50, "training loss, nats per byte", args.steps, (1.0, 3.0), "")
    right = Panel(430, "validation loss against bf16", args.steps, (-2.0, 2.0), " %")
    for fmt in FORMATS:
        left.line(curve([runs[fmt, s] for s in seeds]), COLORS[fmt])
    for shift, fmt in ((-4, "mxfp8"), (4, "nvfp4")):
        for step in steps:
            mean, error = mean_and_error(differences(runs, fmt, seeds, step))
            right.bar(right.x(step) + shift, mean, 0 if math.isnan(error) else error, COLORS[fmt])
    keys = [f'<text x="{260 + 90 * i}" y="310" fill="{COLORS[f]}">{f}</text>'
            for i, f in enumerate(FORMATS)]
    with open(args.svg, "w", encoding="utf-8") as out:
        out.write('<svg xmlns="http://www.w3.org/2000/svg" width="750" height="320" '
                  'font-family="sans-serif" font-size="12">\n'
                  '<rect width="750" height="320" fill="white"/>\n')
        out.write("\n".join(left.out + right.out + keys) + "\n</svg>\n")


def write_table(runs, seeds, step):
    print("| seed | " + " | ".join(FORMATS) + " | MXFP8 - bf16 | NVFP4 - bf16 |")
    print("|---|---|---|---|---|---|")
    for s in seeds:
        loss = {f: evaluations(runs[f, s])[step] for f in FORMATS}
        print(f"| {s} | " + " | ".join(f"{loss[f]:.4f}" for f in FORMATS) + " | " +
              " | ".join(f"{100 * (loss[f] / loss['bf16'] - 1):+.2f} %" for f in FORMATS[1:]) + " |")
    means = [mean_and_error([evaluations(runs[f, s])[step] for s in seeds]) for f in FORMATS]
    apart = [mean_and_error(differences(runs, f, seeds, step)) for f in FORMATS[1:]]
    print("| mean | " + " | ".join(f"{m:.4f}" for m, _ in means) + " | " +
          " | ".join(f"{m:+.2f} ± {e:.2f} %" for m, e in apart) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default="build/dropless")
    parser.add_argument("--config", default="configs/shakespeare.yml")
    parser.add_argument("--data", default="data/shakespeare.txt")
    parser.add_argument("--runs", default="runs/formats", help="where runs are and go")
    parser.add_argument("--svg", default="docs/precision.svg")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1100)
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    runs = {(f, s): train(args, f, s) for s in seeds for f in FORMATS}
    steps = sorted(evaluations(runs["bf16", 1]))
    write_table(runs, seeds, steps[-1])
    write_picture(args, runs, seeds, steps)


if __name__ == "__main__":
    main()
