"""Writes the samples that `mdkv_run answers` reads, a line each, from the files of public benchmarks.

    python3 bench/quality/make_samples.py longbench CONFIG FILE.jsonl... > samples.jsonl
    python3 bench/quality/make_samples.py ruler TASK=FILE.jsonl... > samples.jsonl

LongBench: FILE is TASK.jsonl or TASK_e.jsonl of the data set THUDM/LongBench, CONFIG the folder LongBench/config of the
repository of the same name, which has prompts and lengths of answers. RULER: FILE is what its generator wrote
(NVIDIA/RULER scripts/data); the context ends where the last question begins, as in kvpress's data set of it. Data sets of
kvpress's evaluation have the keys of a sample already.
"""
import argparse
import json
import pathlib
import re
import sys

PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")  # without the model's chat form (LongBench/pred.py)

# By the beginning of a task's name: how its question and its answer begin (scripts/data/synthetic/constants.py), tokens of an answer.
RULER = {"niah": (r"What (?:is|are all) the special magic ", " The special magic ", 128),
         "vt": (r"Question: Find all variables that are assigned the value ", " Answer:", 30),
         "cwe": (r"Question: What are the 10 most common words in the above list\?", " Answer:", 120),
         "fwe": (r"Question: Do not provide any explanation\.", " Answer:", 50),
         "qa": (r"Answer the question based on the given documents\.", " Answer:", 32)}


def lines_of(path):
    """The objects of a file with one a line, with their numbers."""
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if text.strip():
            try:
                yield number, json.loads(text)
            except ValueError:
                sys.exit(f"{path}:{number}: no JSON; get the file again, or delete this line")


def longbench(config, path):
    """The samples of one task: the public prompt with {context} and {input} replaced."""
    prompts, lengths = (json.loads((config / f"dataset2{what}.json").read_text(encoding="utf-8")) for what in ("prompt", "maxlen"))
    task = path.stem.removesuffix("_e")
    if task not in prompts:
        sys.exit(f"{path}: {task} is no task of LongBench; there are {', '.join(prompts)}")
    before, behind = prompts[task].split("{context}")
    for number, line in lines_of(path):
        try:
            yield {"task": task, "id": line.get("_id") or f"line-{number}", "context": before + line["context"],
                   "question": behind.replace("{input}", line["input"]), "answers": line["answers"],
                   "max_new_tokens": lengths[task], "chat": task not in PLAIN, "stop_at_newline": task == "samsum",
                   "all_classes": line.get("all_classes"), "length": line.get("length")}
        except KeyError as missing:
            sys.exit(f"{path}:{number}: the key {missing} is missing")


def ruler(task, path):
    """The samples of one task, the input cut where its question and its answer begin."""
    if task.split("_")[0] not in RULER:
        sys.exit(f"{task} is no task of RULER; their names begin with {', '.join(RULER)}")
    question, prefix, most = RULER[task.split("_")[0]]
    for number, line in lines_of(path):
        try:
            text, outputs, answer = line.pop("input"), line.pop("outputs"), line.pop("answer_prefix", "")
        except KeyError as missing:
            sys.exit(f"{path}:{number}: the key {missing} is missing")
        places = [found.start() for found in re.finditer(question, text)]
        end = len(text) if answer else text.rfind(prefix)
        if not places or end < places[-1]:
            sys.exit(f"{path}:{number}: the input has no question or no beginning of an answer of {task}")
        yield {**line, "task": task, "context": text[:places[-1]], "question": text[places[-1]:end],
               "answer_prefix": answer or text[end:], "answers": outputs, "max_new_tokens": most}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("longbench", "ruler"))
    parser.add_argument("files", nargs="+", help="of longbench the folder of prompts first; of ruler TASK=FILE")
    parser.add_argument("--plain", action="store_true", help="no chat form around any prompt, as HeadKV's runs have it")
    given = parser.parse_args()
    if given.benchmark == "longbench":
        made = [longbench(pathlib.Path(given.files[0]), pathlib.Path(path)) for path in given.files[1:]]
    else:
        made = [ruler(task, pathlib.Path(path)) for task, _, path in (one.partition("=") for one in given.files)]
    for sample in (sample for samples in made for sample in samples):
        if given.plain:
            sample["chat"] = False
        print(json.dumps(sample, ensure_ascii=False))


if __name__ == "__main__":
    main()
