#!/usr/bin/env python3
"""Times the experts of DeepSeek-V2-Lite (64 of width 2048, hidden 1408: gate and up, SwiGLU, down)
in bf16 in torch beside `dropless bench experts`: forward, and forward with backward, which writes
the gradient of each weight into new memory here (bf16), into zeroed memory there (fp32).

    bench/compare/torch_grouped.py [--rows 6,48,384] [--skew balanced|zipf|hot] [--rounds N] [--runs N]

Needs torch: a loop over experts, torch's grouped product where it has one, and, forward only, the
oneDNN within torch with weights that it packed beforehand.
"""
import argparse
import sys

from peers import Table, dropless, median_ms, need, processor, threads

(torch,) = need("torch")
E, D, F = 64, 2048, 1408
silu = torch.nn.functional.silu
grouped_mm = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))


def bounds(rows, skew):
    """Where each expert's rows end, as `bench experts` has them."""
    parts = {"balanced": [1 / E] * E, "zipf": [1 / (e + 1) for e in range(E)],
             "hot": [0.6] + [0.4 / (E - 1)] * (E - 1)}[skew]
    ends = [int(sum(parts[: e + 1]) / sum(parts) * E * rows + 0.5) for e in range(E)]
    return ends[:-1] + [E * rows]


def glu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


class Experts:
    def __init__(self):
        def bf16(*shape):
            return (torch.randn(shape) * 0.02).bfloat16()

        self.gate_up, self.down = bf16(E, 2 * F, D), bf16(E, D, F)
        # Of an expert each: a view of the whole would have a gradient of the size of the whole.
        self.each = [(a.clone().requires_grad_(), b.clone().requires_grad_())
                     for a, b in zip(self.gate_up, self.down)]
        self.gate_up.requires_grad_(), self.down.requires_grad_()
        self.packed = []

    def leaves(self):
        return [self.gate_up, self.down] + [w for pair in self.each for w in pair]

    def loop(self, x, ends):
        rows = x.tensor_split(ends[:-1])
        return torch.cat([glu(r @ a.T) @ b.T for r, (a, b) in zip(rows, self.each)])

    def grouped(self, x, ends):
        offs = torch.tensor(ends, dtype=torch.int32)
        h = glu(grouped_mm(x, self.gate_up.transpose(-2, -1), offs=offs))
        return grouped_mm(h, self.down.transpose(-2, -1), offs=offs)

    def onednn(self, x, ends):
        op = torch.ops.mkldnn
        if not self.packed:
            self.packed = [[op._reorder_linear_weight(w.detach()) for w in pair]
                           for pair in self.each]
        rows = x.tensor_split(ends[:-1])

        def linear(r, w):
            return op._linear_pointwise(r, w, None, "none", [], "")

        return torch.cat([linear(glu(linear(r, a)), b) for r, (a, b) in zip(rows, self.packed)])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6,48,384")
    parser.add_argument("--skew", default="balanced", choices=["balanced", "zipf", "hot"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5, help="a round")
    args = parser.parse_args()
    torch.set_num_threads(threads())
    torch.manual_seed(1)
    experts, table = Experts(), Table()
    peers = {"torch, expert loop": experts.loop}
    if grouped_mm:
        peers["torch, grouped_mm"] = experts.grouped
        peers["torch.compile, grouped_mm"] = torch.compile(experts.grouped, dynamic=False)
    forward_only = {"torch's oneDNN, packed weights": experts.onednn}

    def forward(fn, x, ends):
        with torch.no_grad():
            fn(x, ends)

    def both(fn, x, ends, dy):
        for w in experts.leaves() + [x]:
            w.grad = None
        fn(x, ends).backward(dy)

    for _ in range(args.rounds):
        for rows in map(int, args.rows.split(",")):
            ends = bounds(rows, args.skew)
            x = torch.randn(E * rows, D).bfloat16().requires_grad_()
            dy = torch.randn(E * rows, D).bfloat16()
            names = [f"{rows} rows, {args.skew}, {op}" for op in ("forward", "forward+backward")]
            ours = dropless("bench", "experts", f"rows={rows}", f"skew={args.skew}", "dtype=bf16",
                            f"runs={args.runs}")
            for name, row in zip(names, ours):
                table.add(name, "dropless", row["median_us"] / 1e3, row["kernel"])
            for who, fn in {**peers, **forward_only}.items():
                try:
                    table.add(names[0], who, median_ms(lambda: forward(fn, x, ends), args.runs))
                    if who in peers:
                        ms = median_ms(lambda: both(fn, x, ends, dy), args.runs)
                        table.add(names[1], who, ms)
                except Exception as e:  # a peer that cannot do it is a result
                    print(f"{names[0]}: {who} failed: {e}", file=sys.stderr)
    table.print(f"Experts of DeepSeek-V2-Lite, bf16, {args.skew} load\n\n{processor()}; torch {torch.__version__}")


if __name__ == "__main__":
    main()
