"""Scores answers by public packages, and prints tables of the means, in %.

    python3 bench/quality/score_answers.py FOLDER...

FOLDER is the --out of `mdkv_run answers`, `ruler` or `needle`, or a file of such lines from elsewhere: JSON objects with task,
answer and about, and as far as they are known policy, kv_size, question, model, element, window, resident_bytes, full_bytes.

LongBench  `answers` (and `all_classes`) of about, by lm-eval's functions; the best of several references counts. Where lm-eval
           differs from LongBench/eval.py and metrics.py, their rules hold: of trec, triviaqa, samsum and lsht the first line
           counts, answers keep their ends, and a line of code may be blank. fuzzywuzzy compares by difflib, as LongBench's
           requirements have it.
needle     ROUGE-1 of the hidden sentence, which is about's `needle`, by rouge-score, as HeadKV's program calls it
others     the scores that `mdkv_run` wrote

Packages: bench/quality/score_answers.txt.
"""
import argparse
import importlib.util
import json
import pathlib
import re
import sys
import warnings

sys.modules.setdefault("Levenshtein", None)  # fuzzywuzzy computes by it where it is installed, and the figures differ
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that difflib is slow
    from fuzzywuzzy import fuzz
from rouge_score import rouge_scorer

LONGBENCH = pathlib.Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks/longbench"
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
SCORER = rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)


def module_of(path):
    """A module of lm-eval by itself: the package as a whole imports what its metrics do not need."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METRICS = module_of(LONGBENCH / "metrics.py")


def rouge_1(answer, reference):
    return float(SCORER.score(reference, answer)["rouge1"].fmeasure)


def first_line(answer):
    return answer.lstrip("\n").split("\n")[0]


def code_similarity(answer, reference, **_):
    lines = (line for line in answer.lstrip("\n").split("\n") if not re.search("[`#]|//", line))
    return fuzz.ratio(next(lines, ""), reference) / 100


def rouge_l(answer, reference, **_):
    """Python ends rouge's recursion over long sentences, which counts as 0: as deep as where LongBench/eval.py calls it."""
    frame, depth = sys._getframe(), 1  # METRICS.rouge_score
    while frame:
        frame, depth = frame.f_back, depth + 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000 + depth - 3)  # eval.py's module, scorer and rouge_score
    try:
        return METRICS.rouge_score(answer, reference)
    finally:
        sys.setrecursionlimit(limit)


def longbench_metric(task):
    """The function of a task of LongBench, which lm-eval's description of it names, or None."""
    description = LONGBENCH / f"{task}.yaml"
    if not description.is_file():
        return None
    name = re.search(r"metrics\.get_(\w+)_with_score", description.read_text())[1]
    own = {"code_sim": code_similarity, "rouge": rouge_l}
    return own[name] if name in own else getattr(METRICS, f"{name}_score")


def longbench_score(metric, task, answer, references, classes=None):
    answer = first_line(answer) if task.removesuffix("_e") in FIRST_LINE else answer
    return max([0.0] + [metric(answer, reference, all_classes=classes) for reference in references])


def scores_of(line):
    """The scores of an answer by their names, 0 to 100."""
    about, answer, task = line["about"], line["answer"], line["task"]
    if metric := longbench_metric(task):
        return {"score": 100 * longbench_score(metric, task, answer, about["answers"], about.get("all_classes"))}
    scores = dict(line.get("scores", {}))
    if about.get("needle_kind") == "pair":
        first, _, second = answer.partition("\n")
        scores.update(first_rouge1=100 * rouge_1(first, about["needle"]), second_rouge1=100 * rouge_1(second, about["second_needle"]))
    elif "needle" in about:
        scores["rouge1"] = 100 * rouge_1(answer, about["needle"])
    return scores


def mean(values):
    return sum(values) / len(values)


def read(path):
    """The answers of a folder or file, in the order of its lines."""
    path = path / "answers.jsonl" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}; give the folder that mdkv_run answers --out names")
    for number, line in enumerate(text.split("\n"), start=1):
        if line:
            try:
                one = json.loads(line)
                yield one, scores_of(one)
            except (ValueError, KeyError, TypeError) as problem:
                sys.exit(f"{path}:{number}: no answer that can be scored: {problem!r}")


def tables_of(answers):
    """{title: {(kv_size, policy): ({column: scores}, shares of bytes)}}: answers that are made by unlike means never mix."""
    tables = {}
    for one, scores in answers:
        about = one["about"]
        column = str(about["length"]) if "needle_kind" in about else one["task"]
        made_by = [str(one[key]) for key in ("model", "element", "window", "question") if key in one]
        made_by += [f"{about['max_length']} tokens"] if "max_length" in about else []
        for metric, score in scores.items():
            rows = tables.setdefault(", ".join([metric, *made_by]), {})
            cells, shares = rows.setdefault((one.get("kv_size", 0), one.get("policy", "")), ({}, []))
            cells.setdefault(column, []).append(score)
            if one.get("full_bytes"):
                shares.append(100 * one["resident_bytes"] / one["full_bytes"])
    return tables


def print_table(title, rows, least_full):
    """Rows by size and then as they come; in parentheses and left out of averages: columns on which the full cache fails."""
    columns = list(dict.fromkeys(column for cells, _ in rows.values() for column in cells))
    full = next((cells for (size, _), (cells, _) in rows.items() if size == 0), {})
    out = {column for column in columns if column in full and mean(full[column]) < least_full}
    most = {column: max(len(cells.get(column, [])) for cells, _ in rows.values()) for column in columns}
    print(f"### {title}\n")
    print("| policy | KV size | " + " | ".join(f"({name})" if name in out else name for name in columns) + " | average | bytes % |")
    print("|:--|--:" + "|--:" * len(columns) + "|--:|--:|")
    for (size, policy), (cells, shares) in sorted(rows.items(), key=lambda row: row[0][0]):
        shown, counted = [], []
        for name in columns:
            values = cells.get(name, [])
            shown.append(f"{mean(values):.2f}" + "*" * (len(values) < most[name]) if values else "-")
            if name not in out:
                counted.append(mean(values) if len(values) == most[name] else None)
        average = f"{mean(counted):.2f}" if counted and None not in counted else "-"
        print(f"| {policy} | {size or ''} | " + " | ".join(shown) + f" | {average} | {f'{mean(shares):.2f}' if shares else ''} |")
    notes = [f"In parentheses: the full cache is below {least_full:g}; left out of averages."] * bool(out)
    notes += ["*, -: some or all answers are missing; such rows have no average."] * any(
        len(cells.get(name, [])) < most[name] for cells, _ in rows.values() for name in columns)
    print("".join(f"\n{note}\n" for note in notes))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=pathlib.Path, nargs="+", help="folder of --out, or its answers.jsonl")
    parser.add_argument("--least-full", type=float, default=25, help="columns on which the full cache has less are left out of averages (%(default)g)")
    given = parser.parse_args()
    for title, rows in tables_of(answer for path in given.answers for answer in read(path)).items():
        print_table(title, rows, given.least_full)


if __name__ == "__main__":
    main()
