#!/usr/bin/env python3
"""Times one product per expert (64 experts, K 2048, N 1408) in oneDNN, with weights packed
beforehand, beside `dropless bench gemm op=forward`.

    DNNL_ROOT=DIR bench/compare/onednn.py [--rows 6,48,384] [--rounds N] [--runs N]

Needs a C compiler and oneDNN 3 below DNNL_ROOT (or installed: libdnnl-dev), for example
    python3 -m venv DIR && DIR/bin/pip install onednn-devel-cpu-gomp
"""
import argparse
import os
import tempfile

from peers import ROOT, Table, compile_c, dropless, output, processor, threads

K, N, E = 2048, 1408, 64


def build(to):
    root = os.environ.get("DNNL_ROOT")
    where = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"] if root else []
    command = [os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O2", *where, "-o", to,
               f"{ROOT}/bench/compare/onednn_gemm.c", "-ldnnl"]
    compile_c(command, f"onednn_gemm.c does not compile: is oneDNN 3 there?\n{__doc__}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6,48,384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5, help="a round")
    args = parser.parse_args()
    table, version = Table(), ""
    os.environ["OMP_NUM_THREADS"] = str(threads())
    with tempfile.TemporaryDirectory() as folder:
        build(f"{folder}/onednn_gemm")
        for _ in range(args.rounds):
            for dtype in ("bf16", "f32"):
                for rows in args.rows.split(","):
                    name = f"{dtype}, {rows} rows"
                    sizes = [f"experts={E}", f"rows={rows}", f"k={K}", f"n={N}", f"dtype={dtype}"]
                    ours = dropless("bench", "gemm", "op=forward", f"runs={args.runs}", *sizes)[0]
                    table.add(name, "dropless", ours["median_us"] / 1e3, ours["kernel"])
                    command = [f"{folder}/onednn_gemm", dtype, E, rows, K, N, args.runs]
                    version, us = output(list(map(str, command))).split()
                    table.add(name, "oneDNN, packed weights", float(us) / 1e3)
    table.print(f"A product per expert, {E} experts, K {K}, N {N}\n\n{processor()}; oneDNN {version}")


if __name__ == "__main__":
    main()
