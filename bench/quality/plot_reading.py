"""Draws what `mdkv_run profile --out FOLDER` measured of a prompt that is compressed while it is read, beside one that is held
until its end: memory and seconds against the prompt's length.

    python3 bench/quality/plot_reading.py FOLDER docs/pictures/long-prompts.svg
    python3 bench/quality/plot_reading.py FOLDER picture.png --policy best --size 12.5%

Needs matplotlib (which brings numpy).
"""

import argparse
import json
import sys
from pathlib import Path


def read_records(folder, policy, size):
    """{label: [(tokens, MiB beside the model, seconds, MiB of the cache)]} of the policy held, and while it is read."""
    curves = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            label = {policy: "held until the end", f"{policy}[while_reading=yes]": "compressed while it is read"}.get(one["policy"])
            if label and one["size"] == size:
                mib = [(one["peak_bytes"] - one["model_bytes"]) / 2**20, one["resident_bytes"] / 2**20]
                curves.setdefault(label, []).append((one["context"], mib[0], one["prefill_s"] + one["compress_s"], mib[1]))
    return {label: sorted(points) for label, points in curves.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of mdkv_run profile --out")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("--policy", default="any_question")
    parser.add_argument("--size", default="1/16", help="as it was given to --kv-size")
    options = parser.parse_args()
    if options.picture.suffix not in (".png", ".svg"):
        sys.exit(f"{options.picture}: the picture's name must end in .png or .svg")
    curves = read_records(options.folder, options.policy, options.size)
    if len(curves) < 2:
        sys.exit(f"{options.folder}: no figures of {options.policy} at {options.size}, held and while it is read")

    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mdkv"  # equal pictures for equal figures
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for number, (label, points) in enumerate(sorted(curves.items(), reverse=True)):
        tokens, peak, seconds, cache = zip(*points)
        memory.plot(tokens, peak, color=f"C{number}", marker="os"[number], label=label)
        time.plot(tokens, seconds, color=f"C{number}", marker="os"[number], label=label)
        if number == 0:
            memory.plot(tokens, cache, color="0.5", linestyle="--", label="the cache at the end")
    memory.set_title("memory beside the model, MiB", fontsize="medium")
    time.set_title("seconds to read the prompt", fontsize="medium")
    for axes in (memory, time):
        axes.set_xlabel("tokens of the prompt")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(True, alpha=0.25)
    memory.legend(fontsize="small")
    figure.savefig(options.picture, dpi=100, metadata={"Software": None} if options.picture.suffix == ".png" else {"Date": None})
    print(f"{options.picture}: {', '.join(f'{label}: {len(points)} lengths' for label, points in curves.items())}")


if __name__ == "__main__":
    main()
