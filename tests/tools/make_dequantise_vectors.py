#!/usr/bin/env python3
"""Writes tests/data/dequantise.txt: random blocks of every weight format and what PyPI `gguf` makes of them.

usage: make_dequantise_vectors.py OUT

For each format a line `TYPE HEX HEX`: the blocks' bytes, and the values' bytes as little-endian float32. The scales are halves
of all finite kinds, subnormal and zero included. Needs: pip install gguf==0.19
"""
import sys

import gguf
import numpy as np

# Per format: number of blocks, and where in a block the halves are (their exponent must not be all ones: NaN has no
# single pattern of bits).
FORMATS = {
    "F32": (16, []), "F16": (64, [0]), "BF16": (32, []), "Q4_0": (6, [0]), "Q4_1": (6, [0, 2]), "Q5_0": (6, [0]),
    "Q5_1": (6, [0, 2]), "Q8_0": (6, [0]), "Q4_K": (4, [0, 2]), "Q5_K": (4, [0, 2]), "Q6_K": (4, [208]),
}
# Zeros, subnormals, the least normal one, one, the largest ones.
HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0x3C00, 0xFBFF]


def random_blocks(chance, name):
    count, halves = FORMATS[name]
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = chance.integers(0, 256, (count, size), dtype=np.uint8)
    for place in halves:
        scales = chance.normal(0, 0.1, count).astype("<f2").view("<u2")
        scales[::3] = chance.choice(HALVES, len(scales[::3]))
        blocks[:, place:place + 2] = scales.view(np.uint8).reshape(count, 2)
    if name in ("F32", "BF16"):
        blocks[:, -1] &= 0xBF  # no infinity and no NaN
    return blocks


def main(path):
    chance = np.random.default_rng(260320616)
    lines = ["# written by tests/tools/make_dequantise_vectors.py: blocks and float32 values, by gguf.quants.dequantize"]
    for name in FORMATS:
        kind = gguf.GGMLQuantizationType[name]
        blocks = random_blocks(chance, name)
        # The two formats that are numbers already are given to the package as such.
        given = blocks.view({"F32": "<f4", "F16": "<f2"}.get(name, "u1"))
        values = gguf.quants.dequantize(given, kind)
        lines.append(f"{name} {blocks.tobytes().hex()} {values.astype('<f4').tobytes().hex()}")
    with open(path, "w", encoding="ascii") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
