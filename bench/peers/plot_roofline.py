"""Draws what `bench/peers/ggml.sh --json FILE` measured as a roofline: nanoseconds for a token of a KV head against the bytes
that it has, both on logarithmic axes, one picture for each number of threads. The line is a plain read of as many bytes:
nothing that reads them is below it.

    python3 bench/peers/plot_roofline.py peers.json docs/lab/2026-11/pictures/roofline.png --tokens 65536

Needs matplotlib (which brings numpy).
"""

import argparse
import json
import sys
from pathlib import Path

HEADS = 8  # of the layer that the benchmark makes
SMALL = "KV 512"  # its bytes do not belong to all tokens


def read_results(path, tokens):
    """{threads: [(name, bytes a token, ns a token, ns of a plain read)]}."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        points = {}
        for one in results:
            if one["tokens"] == tokens and SMALL not in one["name"]:
                each = HEADS * tokens
                point = one["name"], one["bytes"] / each, one["seconds"] / each * 1e9, one["read_seconds"] / each * 1e9
                points.setdefault(one["threads"], []).append(point)
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}; give a file that bench/peers/ggml.sh --json wrote")
    except (KeyError, TypeError, ValueError) as problem:
        sys.exit(f"{path}: not what bench/peers/ggml.sh --json writes ({problem})")
    if not points:
        sys.exit(f"{path}: nothing was measured at {tokens} tokens")
    return points


def draw(points, tokens, to):
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        sys.exit("matplotlib is missing: python3 -m pip install matplotlib")
    figure, axes = pyplot.subplots(1, len(points), figsize=(5.2 * len(points), 4.2), sharey=True, squeeze=False)
    for axis, (threads, all_points) in zip(axes[0], sorted(points.items())):
        reads = {}
        for _, size, _, read in all_points:
            reads[size] = min(read, reads.get(size, read))
        axis.plot(*zip(*sorted(reads.items())), color="black", linewidth=1, label="plain read")
        for name, size, taken, _ in all_points:
            rival = name.startswith("ggml")
            axis.plot(size, taken, "s" if rival else "o", color="tab:orange" if rival else "tab:blue")
            left = "best" in name
            side = {"xytext": (-6, -2), "ha": "right"} if left else {"xytext": (6, -2)}
            axis.annotate(name, (size, taken), textcoords="offset points", fontsize=7, **side)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(35, 2000)
        axis.set_xlabel("bytes of a token and KV head")
        axis.set_title(f"{tokens:,} tokens, {threads} thread{'s' if threads > 1 else ''}", fontsize=10)
        axis.legend(loc="lower right", fontsize=8)
    axes[0][0].set_ylabel("ns for a token and KV head, four queries")
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON of bench/peers/ggml.sh")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("--tokens", type=int, default=65536, help="which of the measured lengths (65536)")
    chosen = parser.parse_args()
    draw(read_results(chosen.results, chosen.tokens), chosen.tokens, chosen.picture)


if __name__ == "__main__":
    main()
