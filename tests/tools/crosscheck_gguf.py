#!/usr/bin/env python3
"""Compares every tensor of a GGUF file, as our reader dequantises it, bit by bit with PyPI `gguf` 0.19.

usage: crosscheck_gguf.py DUMP MODEL [WORKFILE]

DUMP is the executable of tests/runner/dump.cpp. Needs: pip install gguf==0.19
"""
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np


def ours(stream):
    """The tensors in a file written by `dump dequantise`: name and float32 values."""
    while line := stream.readline():
        name, count = line.decode().split()
        yield name, np.frombuffer(stream.read(4 * int(count)), dtype="<f4")


def main(dump, model, work):
    subprocess.run([dump, "dequantise", model, work], check=True)
    theirs = gguf.GGUFReader(model).tensors
    equal = 0
    with open(work, "rb") as stream:
        mine = list(ours(stream))
    if [name for name, _ in mine] != [tensor.name for tensor in theirs]:
        sys.exit("crosscheck gguf: the two readers name different tensors")
    for (name, values), tensor in zip(mine, theirs):
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4").reshape(-1)
        if values.size != expected.size:
            sys.exit(f"crosscheck gguf: {name} has {values.size} values here and {expected.size} there")
        differ = np.flatnonzero(values.view("<u4") != expected.view("<u4"))
        if differ.size:
            i = differ[0]
            sys.exit(f"crosscheck gguf: {name} ({tensor.tensor_type.name}): {differ.size} values differ, "
                     f"the first at {i}: {values[i]!r} here and {expected[i]!r} there")
        equal += 1
    print(f"crosscheck gguf: {len(theirs)} compared, {equal} equal")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) == 4 else str(pathlib.Path(folder) / "tensors"))
