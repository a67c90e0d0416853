"""Draws what mdkv_run measured.

    python3 bench/quality/plot.py quality.svg compare.json...      # of compare --json: KL divergence against resident bytes
    python3 bench/quality/plot.py needle.png answers.jsonl...      # of needle --json: a heatmap for each policy and question

A curve of KL is the median over the texts, in a band from the least to the most. --policies a,b chooses and orders.
Needs matplotlib.
"""
import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_curves(records, wanted):
    curves = {}
    for one in (one for record in records for text in record["texts"] for one in text["results"] if one["policy"] != "full"):
        point = 100 * one["resident_bytes"] / one["full_bytes"], one["kl"]
        curves.setdefault(one["policy"], {}).setdefault(one["budget"], []).append(point)
    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for number, policy in enumerate(wanted or curves):
        points = []
        for measured in curves[policy].values():
            shares, found = zip(*measured)
            points.append((statistics.mean(shares), statistics.median(found), min(found), max(found)))
        shares, medians, least, most = zip(*sorted(points))
        (line,) = axes.plot(shares, medians, marker="os^Dv<>pXP"[number % 10], markersize=4, label=policy)
        axes.fill_between(shares, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="resident bytes, % of the full cache",
             ylabel="KL divergence to the full cache, nats")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    return figure


def draw_needles(answers, wanted):
    panels = {}
    for one in answers:
        if not wanted or one["policy"] in wanted:
            name = one["policy"] if one["policy"] == "full" else f"{one['policy']}, {one['kv_size']}"
            place = panels.setdefault(f"{name}, {one['question']}", {})
            place.setdefault((one["depth"], one["length"]), []).append(100 * one["right"])
    depths, lengths = (sorted({place[i] for panel in panels.values() for place in panel}) for i in (0, 1))
    figure, axes = pyplot.subplots(-(-len(panels) // 2), 2, figsize=(10, 1 + len(panels)), layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    for axis, (name, found) in zip(axes.flat, panels.items()):
        mean = lambda place: statistics.mean(found[place]) if place in found else float("nan")
        image = axis.imshow([[mean((depth, length)) for length in lengths] for depth in depths], aspect="auto", cmap="RdYlGn",
                            vmin=0, vmax=100)
        axis.set_title(f"{name}: {statistics.mean(sum(found.values(), [])):.0f} %", fontsize="medium")
        axis.set_xticks(range(len(lengths)), lengths, fontsize="small")
        axis.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths], fontsize="small")
    figure.colorbar(image, ax=axes, pad=0.01, label="% right")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=pathlib.Path, help="PNG or SVG")
    parser.add_argument("figures", type=pathlib.Path, nargs="+")
    parser.add_argument("--policies", type=lambda text: text.split(","))
    chosen = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in chosen.figures]
    if texts[0].startswith('{"'):
        figure = draw_needles([json.loads(line) for text in texts for line in text.splitlines()], chosen.policies)
    else:
        figure = draw_curves([json.loads(text) for text in texts], chosen.policies)
    figure.savefig(chosen.picture, dpi=100)


if __name__ == "__main__":
    main()
