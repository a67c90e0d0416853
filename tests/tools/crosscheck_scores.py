#!/usr/bin/env python3
"""Compares bench/quality/score_answers.py with recorded figures of the public benchmarks, and make_samples.py with prompts written by hand.

usage: crosscheck_scores.py

Needs the packages of bench/quality/score_answers.txt.
"""
import contextlib
import io
import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench/quality"))
import make_samples
import score_answers

TASKS = {"rouge_l": "gov_report", "token_f1": "hotpotqa", "classification": "trec", "retrieval": "passage_retrieval_en",
         "count": "passage_count", "code": "lcc"}


def value(case):
    """The metric of a recorded case, by a task of LongBench that is scored by it; None: the script has no such metric."""
    metric, answer = case["metric"], case["answer"]
    if metric == "first_line":
        return score_answers.first_line(answer)
    if metric == "rouge_1":
        return score_answers.rouge_1(answer, case["references"][0])
    if metric not in TASKS:
        return None
    function = score_answers.longbench_metric(TASKS[metric])
    # Recorded are whole answers; the rule of the first line has cases of its own.
    return score_answers.longbench_score(function, "", answer, case["references"], case.get("classes"))


def printed(function, *arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*arguments)
    return out.getvalue()


def answer(policy, size, task, text, resident, **about):
    return {"task": task, "policy": policy, "kv_size": size, "question": "after", "model": "m", "element": "f16", "window": 8,
            "answer": text, "scores": about.pop("scores", {}), "resident_bytes": resident, "full_bytes": 1000, "about": about}


TABLE = """\
### score, m, f16, 8, after

| policy | KV size | hotpotqa | (trec) | average | bytes % |
|:--|--:|--:|--:|--:|--:|
| full |  | 83.33 | 0.00 | 83.33 | 100.00 |
| best | 64 | 40.00* | 100.00 | - | 12.50 |

In parentheses: the full cache is below 25; left out of averages.

*, -: some or all answers are missing; such rows have no average.

"""


def check_table(folder):
    lines = [answer("best", 64, "hotpotqa", "Lisbon, Porto or Faro", 120, answers=["Lisbon"]),
             answer("full", 0, "hotpotqa", "the Lisbon", 1000, answers=["Kyoto", "Lisbon"]),
             answer("full", 0, "hotpotqa", "Lisbon, I think not", 1000, answers=["a Lisbon not"]),
             answer("full", 0, "trec", "City\nPerson", 1000, answers=["Person"], all_classes=["City", "Person"]),
             answer("best", 64, "trec", "\nPerson\nCity", 130, answers=["Person"], all_classes=["City", "Person"])]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = score_answers.tables_of(score_answers.read(folder))
    found = "".join(printed(score_answers.print_table, title, rows, 25) for title, rows in tables.items())
    assert found == TABLE, found
    pair = answer("full", 0, "needle", "to eat a sandwich\nno", 1, needle_kind="pair", needle="to eat a sandwich",
                  second_needle="it is 7", length=512, scores={"first": 50.0})
    assert score_answers.scores_of(pair) == {"first": 50.0, "first_rouge1": 100.0, "second_rouge1": 0.0}
    assert score_answers.scores_of(answer("full", 0, "vt", "x", 1, scores={"match": 20.0})) == {"match": 20.0}


def check_samples(folder):
    prompts = {"trec": "Type? {context}\n{input}", "hotpotqa": "Read. {context}\n\nQuestion: {input}\nAnswer:"}
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "dataset2maxlen.json").write_text(json.dumps({"trec": 64, "hotpotqa": 32}))
    line = {"input": "Who {context}?", "context": "A {input} book", "answers": ["Eve"], "all_classes": None, "length": 3, "_id": "7"}
    for task, context, question, chat in (("trec", "Type? A {input} book", "\nWho {context}?", False),
                                          ("hotpotqa", "Read. A {input} book", "\n\nQuestion: Who {context}?\nAnswer:", True)):
        (folder / f"{task}_e.jsonl").write_text(json.dumps(line) + "\n\n")
        (sample,) = make_samples.longbench(folder, folder / f"{task}_e.jsonl")
        assert (sample["context"], sample["question"], sample["chat"]) == (context, question, chat), sample
        assert (sample["task"], sample["id"], sample["answers"]) == (task, "7", ["Eve"]), sample
    ends = {"niah_single_1": ("What is the special magic number for x?", " The special magic number for x is"),
            "niah_multiquery": ("What are all the special magic numbers for x and y?", " The special magic numbers for x and y are"),
            "vt": ("Question: Find all variables that are assigned the value 7 in the text above.", " Answer: According to"),
            "cwe": ("Question: What are the 10 most common words in the above list?", " Answer: The top 10 words"),
            "fwe": ("Question: Do not provide any explanation. Which?", " Answer: According to"),
            "qa_1": ("Answer the question based on the given documents. Only.\n\nQuestion: Who?", " Answer:")}
    for task, (question, prefix) in ends.items():
        context = f"Read. {question}{prefix} 1, 2\nThe special magic text.\n"  # an example of its own, as vt and cwe have
        for line in ({"input": context + question, "answer_prefix": prefix}, {"input": context + question + prefix}):
            (folder / "file.jsonl").write_text(json.dumps({"index": 5, "outputs": ["1"], **line}))
            (sample,) = make_samples.ruler(task, folder / "file.jsonl")
            assert sample == {"index": 5, "task": task, "context": context, "question": question, "answer_prefix": prefix,
                              "answers": ["1"], "max_new_tokens": make_samples.RULER[task.split("_")[0]][2]}, sample


def main():
    equal = {}
    for case in json.loads((ROOT / "tests/data/metrics.json").read_text())["cases"]:
        found = value(case)
        if found is not None:
            assert found == case["value"], f"{json.dumps(case)} is {found!r} here"
            equal[case["metric"]] = equal.get(case["metric"], 0) + 1
    assert set(equal) == {"first_line", "rouge_1", *TASKS} and min(equal.values()) >= 15, equal
    with tempfile.TemporaryDirectory() as folder:
        check_table(pathlib.Path(folder))
        check_samples(pathlib.Path(folder))
    print("crosscheck scores: " + ", ".join(f"{count} of {metric}" for metric, count in equal.items()) + " equal")


if __name__ == "__main__":
    main()
