"""Draws the table that `mdkv_run map --csv FILE` writes as a picture: one row per KV head of every layer, tokens from
left to right, colour for the bytes that were kept.

    python3 bench/quality/plot_map.py map.csv docs/pictures/map.png

Needs matplotlib (which brings numpy).
"""

import argparse
import csv
import sys
from pathlib import Path

HEADER = ["layer", "head", "token", "bytes"]


def read_map(path):
    """Returns (layers, heads, {(layer, head): bytes of its tokens in order})."""
    rows = {}
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        header = next(lines, None)
        if header != HEADER:
            sys.exit(f"{path}:1: expected the columns {','.join(HEADER)}, got {','.join(header or [])}")
        for number, line in enumerate(lines, start=2):
            try:
                layer, head, token, kept = map(int, line)
            except ValueError:
                sys.exit(f"{path}:{number}: expected four whole numbers, got {','.join(line)}")
            row = rows.setdefault((layer, head), [])
            if token != len(row):
                sys.exit(f"{path}:{number}: token {token} of layer {layer}, head {head} comes after {len(row)} tokens")
            row.append(kept)
    if not rows:
        sys.exit(f"{path}: no tokens")
    layers = 1 + max(layer for layer, _ in rows)
    heads = 1 + max(head for _, head in rows)
    lengths = {len(row) for row in rows.values()}
    if len(rows) != layers * heads or len(lengths) != 1:
        sys.exit(f"{path}: {len(rows)} heads of {sorted(lengths)} tokens are not {layers} layers of {heads} heads each")
    return layers, heads, rows


def pooled(row, columns):
    """Means of `columns` neighbouring pieces of nearly equal length."""
    edges = [len(row) * c // columns for c in range(columns + 1)]
    return [sum(row[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="table from mdkv_run map --csv")
    parser.add_argument("png", type=Path, help="picture to write")
    parser.add_argument("--columns", type=int, default=256, help="cells across, of tokens averaged (%(default)s)")
    parser.add_argument("--title", default="", help="line above the picture, e.g. model, policy and KV size")
    options = parser.parse_args()
    if options.columns < 1:
        sys.exit(f"--columns: {options.columns} is not positive")

    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import colors, pyplot

    layers, heads, rows = read_map(options.csv)
    tokens = len(rows[0, 0])
    most = max(1, max(max(row) for row in rows.values()))
    columns = min(options.columns, tokens)
    cells = [pooled(rows[layer, head], columns) for layer in range(layers) for head in range(heads)]

    figure, axes = pyplot.subplots(figsize=(9, min(12, max(2.5, 1.2 + 0.05 * layers * heads))), layout="constrained")
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        cmap="inferno",
        norm=colors.PowerNorm(0.5, vmin=0, vmax=most),  # the square root shows low shares
        extent=(0, tokens, layers * heads, 0),
    )
    step = max(1, -(-layers // 16))
    axes.set_yticks([(layer + 0.5) * heads for layer in range(0, layers, step)], range(0, layers, step))
    axes.set_xlabel("token")
    axes.set_ylabel("layer" if heads == 1 else f"layer ({heads} KV heads each)")
    axes.set_title(options.title, loc="left", fontsize="medium")
    ticks = [0, most / 8, most / 4, most / 2, most]
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=ticks, format="{x:g}")
    bar.set_label(f"bytes kept of {most}, mean of {tokens / columns:g} tokens")
    figure.savefig(options.png, dpi=100, metadata={"Software": None})
    print(f"{options.png}: {layers} layers, {heads} KV heads, {tokens} tokens, {options.png.stat().st_size} bytes")


if __name__ == "__main__":
    main()
