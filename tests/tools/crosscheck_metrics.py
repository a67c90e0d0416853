#!/usr/bin/env python3
"""Compares our metrics with the public packages on random answers and references.

usage: crosscheck_metrics.py DUMP [--count 1500] [--seed SEED]

DUMP is the executable of tests/apps/runner/dump_metrics.cpp; COUNT is per metric. Needs: pip install -r public_metrics.txt
"""
import argparse
import json
import random
import subprocess
import sys

import public_metrics

WORDS = ("a an the The A eat sandwich sit in Dolores Park on sunny day sandwiches sitting parks sunnier days city cities flies "
         "dying sky skies generalizations oscillators hopefully relational digitizer 7 42 1999 07 3.14 U.S. e.g. don't it's "
         "well-known O(n) x_1 caf\u00e9 CAF\u00c9 na\u00efve \u00c9COLE \u041c\u043e\u0441\u043a\u0432\u0430 \u041c\u041e\u0421\u041a\u0412\u0410 "
         "\u6771\u4eac \U0001F600 a\u0301 \u00aa \u00b2 \u2082 \u2014 \u2018the\u2019 \u0663\u0664 Paragraph number entity").split()
MARKS = [" ", " ", " ", " ", " ", " ", "  ", "\n", "\n\n", "\t", ". ", ".", "...", ", ", "; ", "! ", "?", " - ", "\x1f", "\x00",
         "\u00a0", "\u3000", "\u2028", "\r\n"]
CLASSES = ["Location", "Other location", "City", "Country", "Mountain", "State", "Other", "Other entity", "Number", "Number of",
           "number", "Description", "Description of a person", "Person", "Date", "Definition of something", "Reason", "e", "o"]
CODE = ["return x", "return self.x", "if (a == b) {", "for i in range(10):", "# comment", "// comment", "```python", "```",
        "    value = compute(value, 0)", "public static void main(String[] args)", "", "}", "x", "int* p = nullptr;", "a//b",
        "print(\"\u00e9\u00e8\")", "                                        "]
SUFFIXES = ("ational tional enci anci izer abli bli alli entli eli ousli ization ation ator alism iveness fulness ousness aliti "
            "iviti biliti fulli logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant ement ment ent ion "
            "sion tion ou ism ate iti ous ive ize e l ll s ss sses ies ied eed ed ing y yed ying at bl iz logy ally ity").split()


def text(chance, longest=30):
    parts = []
    for _ in range(chance.choice((0, 1, 2, 5, longest))):
        parts += [chance.choice(WORDS), chance.choice(MARKS)]
    return "".join(parts)


def related(chance, answer):
    """Another text, or the same one with words lost, doubled and swapped."""
    if chance.random() < 0.3:
        return text(chance)
    words = [word for word in answer.split(" ") for _ in range(chance.choice((0, 1, 1, 1, 1, 2)))]
    if words and chance.random() < 0.5:
        words.insert(0, words.pop(chance.randrange(len(words))))
    return " ".join(words)


def long_words(chance):
    """One sentence, some of which are too long for the package's recursion (by far, for that differs a little by version)."""
    return " ".join(chance.choice("uvwxyz") for _ in range(chance.choice((5, 60, 300, 900))))


def code(chance):
    lines = [chance.choice(CODE) for _ in range(chance.choice((1, 1, 2, 4)))]
    if chance.random() < 0.2:  # long enough for difflib's treatment of frequent characters
        lines[-1] = "".join(chance.choice("abcdefghij (),.=") * chance.choice((1, 1, 2, 9)) for _ in range(150))
    return "\n".join(lines)


def edited(chance, line):
    characters = list(line)
    for _ in range(chance.choice((0, 1, 3, 10))):
        characters.insert(chance.randrange(len(characters) + 1), chance.choice("abx(). =\u00e9"))
        del characters[chance.randrange(len(characters))]
    return "".join(characters)


def case(chance, metric):
    answer = text(chance)
    references = [related(chance, answer) for _ in range(chance.choice((1, 1, 3)))]
    one = {"metric": metric, "answer": answer, "references": references}
    if metric == "stem":
        letters = "".join(chance.choice("aeiouybcdlstzwx0") for _ in range(chance.randrange(1, 6)))
        one["answer"] = letters + "".join(chance.choice(SUFFIXES) for _ in range(chance.randrange(0, 4)))
    elif metric == "rouge_l" and chance.random() < 0.02:
        one.update(answer=long_words(chance), references=[long_words(chance)])
    elif metric == "word_recall":
        references[0] += "needle"
    elif metric.startswith("string_match"):
        one["references"] = [chance.choice(WORDS).upper() for _ in range(chance.choice((1, 2, 4)))]
    elif metric == "classification":
        classes = [chance.choice(CLASSES) for _ in range(chance.randrange(1, 12))]
        named = " ".join(chance.choice(CLASSES) for _ in range(chance.randrange(4)))
        one.update(answer=named, references=[chance.choice(CLASSES)], classes=classes)
    elif metric == "retrieval":
        one["references"] = [f"Paragraph {chance.choice((7, 42, 1999))}" + chance.choice(("", ": Paragraph 3"))]
    elif metric == "count":
        one["references"] = [chance.choice(("7", "42", "07", "3", "14"))]
    elif metric.startswith("code"):
        one["answer"] = code(chance)
        one["references"] = [edited(chance, chance.choice((code(chance), one["answer"])))]
    return one


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dump")
    options.add_argument("--count", type=int, default=1500)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = options.parse_args()
    print(f"crosscheck metrics: seed {given.seed}")
    chance = random.Random(given.seed)
    for metric in public_metrics.METRICS:
        cases = [case(chance, metric) for _ in range(given.count)]
        lines = "".join(json.dumps(one) + "\n" for one in cases)
        answer = subprocess.run([given.dump], input=lines.encode(), check=True, stdout=subprocess.PIPE)
        distinct = set()
        for one, line in zip(cases, answer.stdout.splitlines(), strict=True):
            mine, expected = json.loads(line), public_metrics.value(one)
            if mine != expected:
                sys.exit(f"crosscheck metrics: {json.dumps(one)} is {mine!r} here and {expected!r} there")
            distinct.add(expected)
        print(f"crosscheck metrics ({metric}): {len(cases)} compared, {len(cases)} equal, {len(distinct)} different values")


if __name__ == "__main__":
    main()
