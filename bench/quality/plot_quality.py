"""Draws what `mdkv_run compare --json FILE` measured: the KL divergence to the full cache against resident bytes, both on
logarithmic axes; a curve for every policy, the median over the texts, in a band from the least to the most.

    python3 bench/quality/plot_quality.py compare.json quality.svg
    python3 bench/quality/plot_quality.py odd.json even.json quality.png --context 2048 --policies paper,best

Files are put together: other texts, other policies, other budgets. Needs matplotlib (which brings numpy).
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from plot_needle import only, split_policies


def read_results(path):
    """Yields context, model, policy, budget, text, share of the full cache's bytes, and KL."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        for text in record["texts"]:
            for result in text["results"]:
                if result["policy"] != "full":
                    share = result["resident_bytes"] / result["full_bytes"]
                    place = result["policy"], result["budget"], text["text"]
                    yield record["context"], Path(record["model"]).name, place, share, result["kl"]
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}; give a file that mdkv_run compare --json wrote")
    except ValueError:
        sys.exit(f"{path}: no JSON; give a file that mdkv_run compare --json wrote")
    except (KeyError, TypeError, ZeroDivisionError) as problem:
        sys.exit(f"{path}: no figures of mdkv_run compare: {problem!r}")


def collect(paths, options):
    """Returns the context, the model, the texts and {policy: {budget: [(share, KL) by text]}}."""
    results = [(path, *result) for path in paths for result in read_results(path)]
    if not results:
        sys.exit(f"{paths[0]}: no figures")
    context = only("--context", {context for _, context, *_ in results}, options.context)
    model = only("--model", {model for _, _, model, *_ in results}, options.model)
    curves, seen = {}, {}
    for path, of_context, of_model, place, share, kl in results:
        if (of_context, of_model) != (context, model):
            continue
        if place in seen:
            sys.exit(f"{path}: {' '.join(map(str, place))} is in {seen[place]}, too")
        seen[place] = path
        policy, budget, _ = place
        curves.setdefault(policy, {}).setdefault(budget, []).append((share, kl))
    return context, model, {text for *_, text in seen}, curves


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="+", help="files of mdkv_run compare --json")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("--context", type=int, help="tokens of context; needed where there are several")
    parser.add_argument("--model", help="file name; needed where there are several")
    parser.add_argument("--policies", help="comma-separated, in the order of the legend; all by default")
    parser.add_argument("--title", help="instead of the model, the context and the number of texts")
    options = parser.parse_args()
    if options.picture.suffix not in (".png", ".svg"):
        sys.exit(f"{options.picture}: the picture's name must end in .png or .svg")

    context, model, texts, curves = collect(options.figures, options)
    policies = split_policies(options.policies) if options.policies else list(curves)
    for policy in policies:
        if policy not in curves:
            sys.exit(f"--policies: {policy} was not measured; there are {', '.join(curves)}")

    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mdkv"  # equal pictures for equal figures
    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for number, policy in enumerate(policies):
        points = []
        for measured in curves[policy].values():
            divergences = [kl for _, kl in measured]
            share = 100 * statistics.mean(share for share, _ in measured)
            points.append((share, statistics.median(divergences), min(divergences), max(divergences)))
        shares, medians, least, most = zip(*sorted(points))
        (line,) = axes.plot(shares, medians, marker="os^Dv<>pXP"[number % 10], markersize=4, label=policy)
        axes.fill_between(shares, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("resident bytes, % of the full cache")
    axes.set_ylabel("KL divergence to the full cache, nats")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize="x-small")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    axes.set_title(options.title or f"{model}, {context:,} tokens of context, {len(texts)} texts", fontsize="medium")
    drops = {"Software": None} if options.picture.suffix == ".png" else {"Date": None}
    figure.savefig(options.picture, dpi=100, metadata=drops)
    print(f"{options.picture}: {len(policies)} policies over {len(texts)} texts")


if __name__ == "__main__":
    main()
