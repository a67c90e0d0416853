#!/usr/bin/env python3
"""Writes tests/data/metrics.json: answers and references, and what the public benchmarks' metrics make of them.

usage: record_metrics.py OUT

Chosen cases, and a few random ones as crosscheck_metrics.py makes them. Needs: pip install -r public_metrics.txt
"""
import json
import pathlib
import random
import sys

import crosscheck_metrics
import public_metrics

# Every rule of the stemmer, met and not met: the examples of Porter's paper, and what NLTK does otherwise.
STEMS = """
sky skies dying lying tying news innings inning outings outing cannings canning howe proceed exceed succeed
proceeds exceeded succeeding howes newsy skyes bys sys die dies died ties tied lies lied flies spied spies tried cried denied ies ied
caresses ponies caress cats gas this bus buses sses ss s as y by yy yyyy syzygy toy yes yield
feed agreed plastered bled motoring sing freed need agreeing seed proceeding speed bed red king ring thing being
conflated troubled sized hopping tanned falling hissing fizzed failing filing egged added erring outed using aged owing
happy enjoy enjoyment spy fly try buy say obey day happily gently
relational conditional rational valenci hesitanci digitizer conformabli radicalli differentli vileli analogousli
vietnamization predication operator feudalism decisiveness hopefulness callousness formaliti sensitiviti sensibiliti
national nation fulli hopefulli carefully logi geology theology archaeology logy apology technologies alli rally totally
generally annually medically finally really ally bally fully dully able ably visibly possibly probability possibility
triplicate formative formalize electriciti electrical hopeful goodness ative alize ful ness icate logical radical
revival allowance inference airliner gyroscopic adjustable defensible irritant replacement adjustment dependent adoption
homologou communism activate angulariti homologous effective bowdlerize ion sion action mission region opinion fashion
cement element moment agreement employment comment present ant plant elephant instance fence science
probate rate cease controll roll rolling controlling fulfill doll tell e ee the one these are
generalizations oscillators oscillate multidimensional characterization relativity electricity nationality
abilities abatements absolutely adhesion aluminium animadversion believes better book books booking boundaries
communication considered consistency consolation continuous dangerously daylight deeply delightfulness easily
engineering everything experiencing families fishing frightened gladness government greatest hesitated hours identities
imaginable inconsistent indebtedness janeites knightly languages listening marianne merriment mustered noisily occasionally
operations opposition ordered orderly people politeness pretty questions realized reasonable repeated secondly seemingly
sensations shyness smiling sometimes studies sufficiently surprise suspicious temptations tenderness thousands
uncertainty understanding university usually vanities varieties weaknesses wholesome wonderfully yesterday youngest
sandwich sandwiches dolores park sunny days francisco eating sitting 1999 3rd 42s x86ing a1ed zz zzing bbed aeiou
""".split()

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
SHORT = "eat a sandwich and sit in Dolores Park on a sunny day."
ANSWERS = ["", " ", "...", "!?", "eat a sandwich and sit in Dolores Park on a sunny day.", "Eat A SANDWICH, and sit",
           "eating sandwiches and sitting in the park on sunny days", "day. day. day.", "the the the the",
           "\x0bsunny\x1fday.\u00a0on\u3000a", "caf\u00e9 a\u0301 sandwich \u2014 sit", "\u00c9COLE \u212a 1\u00b2",
           "San Francisco is a city.\nThe best thing there? Eat a sandwich.", NEEDLE, "sandwich" * 20, "a a an an and"]

TEXTS = [("", ["x"]), ("x", [""]), ("", [""]), ("...", ["a."]), ("a", ["..."]), (" ", ["a"]), (" . . ", [" "]), ("a. .b", ["b. .a"]),
         ("The cat sat on the mat.", ["the cat sat on the mat", "A cat sat on a mat."]),
         ("The cat sat. On the mat it slept. ", ["On the mat the cat slept. It sat there."]),
         ("a b a b a b", ["b a b a"]), ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", ["w1 w2 w3 w4 w5"]),
         ("3.14 is pi. U.S. is a country", ["pi is 3.14 in the U.S."]), ("word", ["other", "Word", "word"]),
         ("An apple, a pear; the (plum)!", ["apple pear plum", "the apple"]), ("a", ["the"]), ("an!", ["a n"]),
         ("Espa\u00f1a \u00e9 a\u0301 \u00aaa", ["espa\u00f1a \u00c9 \u00aaA", "Espana"]), ("x\u2014a\u2014y the\u2019s", ["x y s", "\u2014"]),
         ("na\u00efve CAF\u00c9\u3000\u041c\u043e\u0441\u043a\u0432\u0430", ["NA\u00cfVE caf\u00e9 \u041c\u041e\u0421\u041a\u0412\u0410"]),
         ("Espa\u00f1a", ["Espa\u00f1"]), ("a\u00e9 x", ["\u00e9"]), ("yes\nno", ["no\nyes"]), ("one two two three", ["two two", "three one"]), ("a_b c-d", ["ab cd", "a_b"]),
         ("a" + " b" * 989, ["a"]), ("a" + " b" * 990, ["a"]),  # the longest sentence that is not too long, and one too long
         ("Alice will meet Bob tomorrow. They buy bread.", ["Bob and Alice meet tomorrow to buy bread."])]

CLASSIFICATIONS = [
    ("Location", "Location", ["Location", "City"]), ("location", "Location", ["Location"]), ("City or Location", "City", ["Location", "City"]),
    ("Other location", "Other location", ["Other", "location", "Other location"]),  # the second is skipped
    ("abcd", "abcd", ["a", "b", "c", "d", "ab", "bc", "cd", "abcd"]), ("abcd", "abcd", ["abcd", "a", "b", "abcd", "b", "b"]),
    ("Number of something", "Number of something", ["Number of something", "Number", "Number"]), ("x", "x", []),
    ("", "e", ["e", "f"]), ("anything", "", ["", "any"]), ("Type: Other entity, Other", "Other", ["Other", "Other entity"])]

NUMBERS = [("", "5"), ("There are 5 paragraphs", "5"), ("5 or 6", "6"), ("15", "5"), ("05 5", "5"), ("5.5", "5"), ("\u0665 5", "5"),
           ("Paragraph 12", "12"), ("Paragraph 12, or Paragraph 13, 12", "12"), ("twelve", "12"), ("\u00b2 2", "2"), ("1,000", "1000")]

CODE = [("", ""), ("", "x"), ("x", ""), ("x = 1", "x = 1"), ("\n\nx = 1\ny", "x = 2"), ("```python\nreturn x\n```", "return x"),
        ("# a comment\n// another\n    return self.x", "    return x"), ("a // b", "a"), ("```", "x"), ("#\n", "x"), ("abc", "cadb"),
        ("cadb", "abc"), ("tide", "diet"), ("diet", "tide"), ("    \n", "    "), ("\n", "x"), ("\u00e9\u00e8x", "e\u00e8x"),
        ("def foo(self):", "def foo(self, bar=None):"), ("abcdefgh", "abcxefgh"), ("aaaaaaaa", "a"), ("ab", "abababababababa"),
        ("x" * 10 + "=" * 100 + "y" * 100, "y" * 90 + "=" * 105 + "x" * 10), ("int a = 0; " * 20, "int b = 1; " * 19),
        ("\tif (x) {", "        if (x) {"), ("for(;;)", "while(true)"), ("a\r\nb", "a")]

RULER = [("", ["1234567"]), ("1234567", ["1234567"]), ("It is 1234567.", ["1234567", "7654321"]), ("ABCDE, fghij", ["abcde", "FGHIJ", "x"]),
         ("a\x01b", ["a\nb", "a\x01b"]), ("  x\t", [" x", "x"]), ("\u00c9cole", ["\u00e9COLE", ""]), ("no", ["yes", "maybe"])]


def chosen():
    for answer in ["", "\n", "\n\nyes\nno", "yes", " \nyes", "a\r\nb", "\n \n"]:
        yield {"metric": "first_line", "answer": answer}
    for answer in ANSWERS:
        yield {"metric": "rouge_1", "answer": answer, "references": [NEEDLE]}
        yield {"metric": "word_recall", "answer": answer, "references": [SHORT]}
    yield {"metric": "rouge_1", "answer": "x", "references": ["..."]}
    for answer, references in TEXTS:
        yield {"metric": "rouge_l", "answer": answer, "references": references}
        if len(answer) < 100:
            yield {"metric": "token_f1", "answer": answer, "references": references}
    for answer, reference, classes in CLASSIFICATIONS:
        yield {"metric": "classification", "answer": answer, "references": [reference], "classes": classes}
    for answer, number in NUMBERS:
        yield {"metric": "count", "answer": answer, "references": [number]}
        yield {"metric": "retrieval", "answer": answer, "references": [f"Paragraph {number}", "Paragraph 3 Paragraph 13"]}
    for answer, reference in CODE:
        yield {"metric": "code_difflib", "answer": answer, "references": [reference]}
        yield {"metric": "code_levenshtein", "answer": answer, "references": [reference]}
    for answer, references in RULER:
        yield {"metric": "string_match_all", "answer": answer, "references": references}
        yield {"metric": "string_match_part", "answer": answer, "references": references}


def main(path):
    chance = random.Random(260320616)
    cases = list(chosen())
    for metric in [name for name in public_metrics.METRICS if name != "stem"]:
        short = (one for _ in iter(int, 1) if len(json.dumps(one := crosscheck_metrics.case(chance, metric))) < 400)
        cases += [next(short) for _ in range(8)]
    packages = pathlib.Path(__file__).with_name("public_metrics.txt").read_text().splitlines()
    about = "written by tests/tools/record_metrics.py with " + " ".join(p for p in packages if not p.startswith("#"))
    lines = [json.dumps({**one, "value": public_metrics.value(one)}) for one in cases]
    stems = json.dumps({word: public_metrics.STEMMER.stem(word) for word in STEMS})
    text = f'{{"about": {json.dumps(about)},\n"stems": {stems},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    pathlib.Path(path).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
