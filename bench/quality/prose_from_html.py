#!/usr/bin/env python3
"""Turns the Debian Administrator's Handbook (HTML, as packaged by Debian) into plain prose, cut into equal pieces.

    prose_from_html.py HTML_FOLDER OUTPUT_FOLDER [--pieces 16]

Kept are whole paragraphs of running text, in the book's order; headings, menus, code, tables, indexes and very short
paragraphs are left out. Writes prose.txt and prose-01.txt, prose-02.txt, ...; the same pages give the same bytes.
"""

import argparse
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

SKIPPED = {"pre", "table", "script", "style", "head", "dt"}
MENUS = {"toc", "index", "docnav", "figure", "mediaobject", "titlepage", "url"}
FEWEST_WORDS = 20


class paragraph_reader(HTMLParser):
    """Collects the text of every `<div class="para">` that holds nothing but running text."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.paragraphs = []
        self.next_page = None
        self.open_elements = []
        self.text = None
        self.depth = 0

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        classes = set((attrs.get("class") or "").split())
        if tag == "link" and attrs.get("rel") == "next":
            self.next_page = (attrs.get("href") or "").split("#")[0]
        if tag in ("br", "hr", "img", "meta", "link", "input"):
            return
        skipped = tag in SKIPPED or bool(classes & MENUS)
        if "para" in classes and not any(inside for _, inside in self.open_elements):
            self.text, self.depth = [], len(self.open_elements)
        elif self.text is not None and tag in ("div", "ul", "ol", "pre", "table") and not skipped:
            self.text = None  # a list or a box inside a paragraph: its own paragraphs are met on the way
        self.open_elements.append((tag, skipped))

    def handle_endtag(self, tag):
        if not any(name == tag for name, _ in self.open_elements):
            return
        while self.open_elements:
            name, _ = self.open_elements.pop()
            if self.text is not None and len(self.open_elements) == self.depth:
                self.paragraphs.append(" ".join("".join(self.text).split()))
                self.text = None
            if name == tag:
                break

    def handle_data(self, data):
        if self.text is not None and not any(inside for _, inside in self.open_elements):
            self.text.append(data)


def is_prose(paragraph):
    words = paragraph.split()
    if len(words) < FEWEST_WORDS or paragraph[-1] not in ".!?”)" or not paragraph[0].isupper():
        return False
    plain = sum(bool(re.fullmatch(r"[(“‘\"']*[A-Za-z’'-]+[.,;:!?)”’\"']*", word)) for word in words)
    return plain >= 0.85 * len(words)


def pages_in_order(folder):
    """Follows each page's `next` link from the index; the pages nothing links to are left out."""
    name, seen = "index.html", set()
    while name and name not in seen and (folder / name).is_file():
        seen.add(name)
        reader = paragraph_reader()
        reader.feed((folder / name).read_text(encoding="utf-8"))
        yield reader
        name = reader.next_page


def cut(paragraphs, pieces):
    """Consecutive runs of whole paragraphs, each ending where its share of the words is reached."""
    total = sum(len(p.split()) for p in paragraphs)
    runs, run, words = [], [], 0
    for paragraph in paragraphs:
        run.append(paragraph)
        words += len(paragraph.split())
        if words * pieces >= total * (len(runs) + 1):
            runs.append(run)
            run = []
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("html", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pieces", type=int, default=16)
    parser.add_argument("--least-words", type=int, default=60000)
    arguments = parser.parse_args()

    paragraphs, seen = [], set()
    for page in pages_in_order(arguments.html):
        for paragraph in page.paragraphs:
            if is_prose(paragraph) and paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
    words = sum(len(p.split()) for p in paragraphs)
    if words < arguments.least_words:
        print(f"{arguments.html}: only {words} words of prose found, {arguments.least_words} are needed", file=sys.stderr)
        return 1

    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "prose.txt").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    runs = cut(paragraphs, arguments.pieces)
    for number, run in enumerate(runs, 1):
        (arguments.output / f"prose-{number:02}.txt").write_text("\n\n".join(run) + "\n", encoding="utf-8")
    smallest = min(sum(len(p.split()) for p in run) for run in runs)
    print(f"{words} words of prose in {len(paragraphs)} paragraphs, {len(runs)} pieces of at least {smallest} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
