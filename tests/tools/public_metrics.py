"""The metrics of the public benchmarks, by the packages they call; what they have in files of their own is restated.

needle     ROUGE-1: rouge_score with stemmer, as FYYFU/HeadKV's run_needle_in_haystack.py at 0862a09 calls it; word recall:
           Zefan-Cai/KVCache-Factory, scripts/scripts_needle/visualize.py at c97f9d7
RULER      NVIDIA/RULER, scripts/eval/evaluate.py and scripts/eval/synthetic/constants.py at c3f5e3b
LongBench  THUDM/LongBench, LongBench/metrics.py and LongBench/eval.py at c5ea10b: ROUGE-L by rouge, code by fuzzywuzzy
           with and without python-Levenshtein

Needs the packages of public_metrics.txt.
"""
import importlib
import re
import string
import sys
import warnings
from collections import Counter

from nltk.stem.porter import PorterStemmer
from rouge import Rouge
from rouge_score import rouge_scorer


def fuzz_with(levenshtein):
    """fuzzywuzzy.fuzz as it is where python-Levenshtein is installed, or where it is not."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ("fuzzywuzzy", "Levenshtein")}
    if not levenshtein:
        sys.modules["Levenshtein"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that difflib is slow
        module = importlib.import_module("fuzzywuzzy.fuzz")
    for name in list(sys.modules):
        if name.split(".")[0] in ("fuzzywuzzy", "Levenshtein"):
            del sys.modules[name]
    sys.modules.update(kept)
    expected = "fuzzywuzzy.StringMatcher" if levenshtein else "difflib"
    assert module.SequenceMatcher.__module__ == expected, module.SequenceMatcher
    return module


STEMMER = PorterStemmer()
SCORER = rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)
DIFFLIB = fuzz_with(levenshtein=False)
LEVENSHTEIN = fuzz_with(levenshtein=True)
FRAMES_OF_EVAL = 3  # eval.py's module, scorer and rouge_score are on the stack when it calls the package


def rouge_l(answer, reference):
    frame, depth = sys._getframe(), 0
    while frame:
        frame, depth = frame.f_back, depth + 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000 + depth - FRAMES_OF_EVAL)
    try:
        return Rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):  # eval.py catches whatever comes
        return 0.0
    finally:
        sys.setrecursionlimit(limit)


def word_recall(answer, reference):
    wanted = set(reference.lower().split())
    return len(wanted & set(answer.lower().split())) / len(wanted)


def contained(answer, references):
    text = re.sub("[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def plain_words(text):
    without_marks = text.lower().translate({ord(mark): None for mark in string.punctuation})
    return re.sub(r"\b(?:the|an|a)\b", " ", without_marks).split()


def token_f1(answer, reference):
    answered, expected = plain_words(answer), plain_words(reference)
    common = (Counter(answered) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(answered), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def classification(answer, reference, classes):
    named = [name for name in classes if name in answer]
    for name in named:  # taking out of the list that is walked through is the original's doing
        if name != reference and name in reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def share_of(number, answer):
    numbers = re.findall(r"\d+", answer)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def first_line(answer):
    return answer.lstrip("\n").split("\n")[0]


def code(fuzz, answer, reference):
    lines = (line for line in answer.lstrip("\n").split("\n") if not re.search("[`#]|//", line))
    return fuzz.ratio(next(lines, ""), reference) / 100


def best(score):
    return lambda case: max([0.0] + [score(case["answer"], reference) for reference in case["references"]])


def first(score):
    return lambda case: score(case["answer"], case["references"][0])


METRICS = {
    "stem": lambda case: STEMMER.stem(case["answer"]),
    "first_line": lambda case: first_line(case["answer"]),
    "rouge_1": first(lambda answer, reference: float(SCORER.score(reference, answer)["rouge1"].fmeasure)),
    "rouge_l": best(rouge_l),
    "word_recall": first(word_recall),
    "string_match_all": lambda case: sum(found := contained(case["answer"], case["references"])) / len(found),
    "string_match_part": lambda case: float(max(contained(case["answer"], case["references"]))),
    "token_f1": best(token_f1),
    "classification": lambda case: best(
        lambda answer, reference: classification(answer, reference, case["classes"]))(case),
    "retrieval": best(lambda answer, reference: share_of(re.search(r"Paragraph (\d+)", reference)[1], answer)),
    "count": best(lambda answer, reference: share_of(reference, answer)),
    "code_difflib": best(lambda answer, reference: code(DIFFLIB, answer, reference)),
    "code_levenshtein": best(lambda answer, reference: code(LEVENSHTEIN, answer, reference)),
}


def value(case):
    return METRICS[case["metric"]](case)
