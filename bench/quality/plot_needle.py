"""Draws the answers that `mdkv_run needle --out FOLDER` leaves as heatmaps: a panel for every policy, lengths across,
depths down, colour for the score, whose mean is in the panel's title.

    python3 bench/quality/plot_needle.py FOLDER needle.png
    python3 bench/quality/plot_needle.py FOLDER needle.svg --kv-size 128 --policies full,snapkv,paper --question window

Needs matplotlib (which brings numpy).
"""

import argparse
import json
import sys
from pathlib import Path

QUESTIONS = {"window": "question in the window", "after": "question behind the compressed context"}


def read_answers(path):
    """Yields the answers in the log, in the order of its lines."""
    if path.is_dir():
        path = path / "answers.jsonl"
    try:
        file = path.open(encoding="utf-8")
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}; give the folder that mdkv_run needle --out names")
    with file:
        for number, line in enumerate(file, start=1):
            try:
                answer = json.loads(line)
                place = answer["about"]["depth"], answer["about"]["length"]
                yield answer["policy"], answer["kv_size"], answer["question"], answer["model"], place, answer["scores"]
            except ValueError:
                sys.exit(f"{path}:{number}: no JSON; run mdkv_run needle again to mend a line that was cut")
            except (KeyError, TypeError) as problem:
                sys.exit(f"{path}:{number}: no answer of mdkv_run needle: {problem} is missing")


def split_policies(text):
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += {"[": 1, "]": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def only(what, values, asked):
    """The one value there is, or the one asked for."""
    if asked is not None:
        if asked not in values:
            sys.exit(f"{what} {asked} has no answers; there are {', '.join(map(str, sorted(values)))}")
        return asked
    if len(values) != 1:
        sys.exit(f"there are answers for several: {', '.join(map(str, sorted(values)))}; choose one with {what}")
    return next(iter(values))


def collect(answers, options):
    """Returns the KV size, the question place, the model and {policy: {(depth, length): scores}}."""
    sizes = {size for _, size, *_ in answers if size}
    size = only("--kv-size", sizes, options.kv_size) if sizes else 0
    question = only("--question", {question for _, _, question, *_ in answers}, options.question)
    model = only("--model", {model for _, _, _, model, *_ in answers}, options.model)
    panels = {}
    for policy, of_size, of_question, of_model, place, scores in answers:
        if of_size in (0, size) and of_question == question and of_model == model:
            if options.metric not in scores:
                sys.exit(f"--metric {options.metric} is unknown; there are {', '.join(sorted(scores))}")
            panels.setdefault(policy, {}).setdefault(place, []).append(scores[options.metric])
    return size, question, model, panels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="folder of mdkv_run needle --out, or its answers.jsonl")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("--kv-size", type=int, help="tokens per KV head; needed where there are several")
    parser.add_argument("--question", choices=sorted(QUESTIONS), help="needed where there are both")
    parser.add_argument("--policies", help="comma-separated, in the order of the panels; all by default")
    parser.add_argument("--model", help="file name; needed where there are several")
    parser.add_argument("--metric", default="recall", help="recall or match (%(default)s)")
    parser.add_argument("--columns", type=int, default=2, help="panels across (%(default)s)")
    options = parser.parse_args()
    if options.columns < 1:
        sys.exit(f"--columns: {options.columns} is not positive")

    answers = list(read_answers(options.answers))
    if not answers:
        sys.exit(f"{options.answers}: no answers")
    size, question, model, panels = collect(answers, options)
    policies = split_policies(options.policies) if options.policies else sorted(panels, key=lambda p: (p != "full", p))
    for policy in policies:
        if policy not in panels:
            sys.exit(f"--policies: {policy} has no answers; there are {', '.join(panels)}")

    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import colors, pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mdkv"  # equal pictures for equal answers
    lengths = sorted({length for panel in panels.values() for _, length in panel})
    depths = sorted({depth for panel in panels.values() for depth, _ in panel})
    shades = colors.LinearSegmentedColormap.from_list("needle", ["#F0496E", "#EBB839", "#0CD79F"])
    across = min(options.columns, len(policies))
    down = -(-len(policies) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.2 * across, 0.8 + 2.1 * down), layout="constrained", squeeze=False
    )
    for panel in axes.flat[len(policies):]:
        panel.axis("off")
    for panel, policy in zip(axes.flat, policies):
        scores = panels[policy]
        mean = lambda place: sum(scores[place]) / len(scores[place]) if place in scores else float("nan")
        cells = [[mean((depth, length)) for length in lengths] for depth in depths]
        image = panel.imshow(cells, aspect="auto", interpolation="nearest", cmap=shades, vmin=0, vmax=100)
        every = [score for place in scores.values() for score in place]
        panel.set_title(f"{policy}: {sum(every) / len(every):.2f}", fontsize="medium")
        step = -(-len(lengths) // 8)
        panel.set_xticks(range(0, len(lengths), step), lengths[::step], fontsize="small")
        step = -(-len(depths) // 6)
        panel.set_yticks(range(0, len(depths), step), [f"{depth:g}" for depth in depths[::step]], fontsize="small")
    for panel in axes[-1]:
        panel.set_xlabel("tokens of the prompt")
    for row in axes:
        row[0].set_ylabel("depth, %")
    figure.colorbar(image, ax=axes, pad=0.01, label=options.metric)
    figure.suptitle(f"{model}, KV size {size}, {QUESTIONS[question]}" if size else f"{model}, {QUESTIONS[question]}")
    drops = {"Software": None} if options.picture.suffix == ".png" else {"Date": None}
    figure.savefig(options.picture, dpi=100, metadata=drops)
    print(f"{options.picture}: {len(policies)} panels of {len(depths)} depths and {len(lengths)} lengths")


if __name__ == "__main__":
    main()
