#!/usr/bin/env python3
"""Counts what CONTRIBUTING.md's rule on words forbids, as far as a script can see it, and compares with the most that is allowed.

    word_check.py [--list]

Fragments: comments of include/, and sentences in them, that begin with of, as, so, those, what or whatever. Sentences: those of
README.md and the pages in docs/ (not the lab notebook) that do. Wide: lines of docs/ and
README.md over 110 columns that are no table, link or code. Long: doc comments of include/ whose text before the first \\param has
more than 20 lines or 220 words, or that have more than 36 lines or 450 words in all. --list prints each place. A count may fall, and MOST with it; it must
not grow. Exit status 1 if one did.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MOST = {"fragments": 0, "sentences": 0, "wide": 0, "long": 0}
COMMENT = re.compile(r"//[/!]?<?\s?(.*)$")
FORBIDDEN = r"(?:of|as|so|those|what|whatever)\b"
BEGINS = re.compile(FORBIDDEN, re.IGNORECASE)
SENTENCE = re.compile(r"\. (?:Of|As|So|Those|What|Whatever)\b")


def fragments():
    """Comments that begin so, a comment of several lines once, and later sentences of a line that do."""
    for path in sorted((ROOT / "include").rglob("*.[hc]*")):
        goes_on = False  # the comment of the line before
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = COMMENT.search(line)
            alone = found is not None and not line[: found.start()].strip()
            if found:
                text = found[1].strip()
                if (not (alone and goes_on) and BEGINS.match(text)) or SENTENCE.search(text):
                    yield f"{path.relative_to(ROOT)}:{number}: {text}"
            goes_on = found is not None


def sentences():
    """Sentences of the pages that users read."""
    begins = re.compile(r"(?:^|[.:] |\n\n|\n- )(?:Of|As|So|Those|What|Whatever)\b(?! [^.|]*\?)[^.\n]*")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"([^\n])\n(?![\n|#-])", r"\1 ", text)  # paragraphs on one line
        for found in begins.finditer(text):
            yield f"{path.relative_to(ROOT)}: {found[0].strip()[:90]}"


def wide():
    """Lines of prose that no screen shows beside a file."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                code = not code
            elif len(line) > 110 and not code and " " in line.strip() and not line.lstrip().startswith("|") and "](" not in line:
                yield f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"


def long():
    """Doc comments that nobody reads to the end."""
    for path in sorted((ROOT / "include").rglob("*.[hc]*")):
        block = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip().startswith("///") and not line.strip().startswith("///<"):
                block.append(line.strip()[3:].strip())
                continue
            head = next((i for i, text in enumerate(block) if text.startswith("\\")), len(block))
            words, of_head = (sum(len(text.split()) for text in part) for part in (block, block[:head]))
            if head > 20 or of_head > 220 or len(block) > 36 or words > 450:
                yield f"{path.relative_to(ROOT)}:{number}: {len(block)} lines, {words} words; {head}, {of_head} before \\param"
            block = []


def main():
    failed = False
    for name, places in (("fragments", list(fragments())), ("sentences", list(sentences())), ("wide", list(wide())), ("long", list(long()))):
        if "--list" in sys.argv:
            print("\n".join(places))
        print(f"words: {name}: {len(places)}, at most {MOST[name]}")
        failed |= len(places) > MOST[name]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
