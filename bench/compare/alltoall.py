#!/usr/bin/env python3
"""Times dispatch and combine of dropless beside MPI_Alltoallv with packing and unpacking.

    bench/compare/alltoall.py [--mpi openmpi|mpich] [--ranks N] [--tokens 64,256,1024,4096,8192]

Needs an MPI, its compiler wrapper and its launcher (on Debian libopenmpi-dev openmpi-bin, or
libmpich-dev mpich), and dropless built with it. One rank a processor.
"""
import argparse
import os
import tempfile

from peers import PROGRAM, ROOT, Table, compile_c, output, processor

LAUNCH = {"openmpi": ["mpirun.openmpi", "--bind-to", "core", "--oversubscribe"],
          "mpich": ["mpiexec.mpich", "-bind-to", "core"]}


def build(mpi, to):
    library = os.path.dirname(PROGRAM)
    command = [f"mpicc.{mpi}", "-std=c11", "-O3", "-march=native", f"-I{ROOT}/include", "-o", to,
               f"{ROOT}/bench/compare/alltoall.c", f"-L{library}", "-ldropless",
               f"-Wl,-rpath,{library}"]
    compile_c(command, f"alltoall.c does not compile\n{__doc__}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=sorted(LAUNCH), default="openmpi")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="64,256,1024,4096,8192")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        build(args.mpi, f"{folder}/alltoall")
        command = [*LAUNCH[args.mpi], "-n", str(args.ranks), f"{folder}/alltoall",
                   *args.tokens.split(",")]
        for _ in range(args.rounds):
            for line in output(command).splitlines():
                tokens, *ms = line.split()
                for i, what in enumerate(("dispatch", "combine")):
                    name = f"{what}, {tokens} tokens a rank"
                    table.add(name, "dropless", float(ms[2 * i]))
                    table.add(name, "MPI_Alltoallv", float(ms[2 * i + 1]))
    table.print("Rows of bf16 to experts and back, D 2048, 64 experts, K 6, "
                f"{args.ranks} ranks of {args.mpi}\n\n{processor()}")


if __name__ == "__main__":
    main()
