#!/usr/bin/env python3
"""Writes tests/data/head_scores_means.json: per-head means of the head scores that HeadKV publishes.

usage: record_head_scores.py COMMIT OUT FILE...

FILE are the files of Important_Head/head_score/ in github.com/FYYFU/HeadKV, checked out at COMMIT. Each holds one object;
key "layer-head", value a list of one number per detection sample. The means are added up from left to right in double
precision and written with all their digits, layer after layer; zeros as 0.
"""
import json
import os
import sys

LAYERS = HEADS = 32


def record(path):
    with open(path, encoding="ascii") as file:
        pairs = json.load(file, object_pairs_hook=list)
    lists = dict(pairs)
    names = [f"{layer}-{head}" for layer in range(LAYERS) for head in range(HEADS)]
    samples = {len(values) for values in lists.values()}
    if len(pairs) != len(lists) or set(lists) != set(names) or len(samples) != 1:
        sys.exit(f"{path}: not one list of equal length for each of {LAYERS} x {HEADS} heads")
    count = samples.pop()
    means = []
    for name in names:
        total = 0.0
        for value in lists[name]:
            total += value
        means.append(total / count or 0)
    return {"samples": count, "means": means}


def main(commit, out, paths):
    content = {
        "source": "github.com/FYYFU/HeadKV, Important_Head/head_score/",
        "commit": commit,
        "written_by": "tests/tools/record_head_scores.py",
        "layers": LAYERS,
        "heads": HEADS,
        "files": {os.path.basename(path): record(path) for path in paths},
    }
    with open(out, "w", encoding="ascii") as file:
        json.dump(content, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
