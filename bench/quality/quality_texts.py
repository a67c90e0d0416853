#!/usr/bin/env python3
"""Cuts the texts that storage and ratio sets are compared on: four from each of four kinds of English.

    quality_texts.py OUTPUT_FOLDER --handbook FOLDER --austen RDATA.RDB --opticks FILE --jargon FILE.GZ

    handbook  the Debian Administrator's Handbook, 2021: how-to prose; the pieces prose_from_html.py leaves
    austen    four novels by Jane Austen, 1813 to 1817, from the lazy-load database of the R package janeaustenr
    opticks   Isaac Newton's Opticks, fourth edition, 1730: experiments and geometry
    jargon    the Jargon File 4.4.7, 2003: essays, and a dictionary's entries

Writes 01-handbook-02.txt to 16-jargon-4.txt: whole paragraphs of running text in their order, a paragraph a line. Odd
numbers and even numbers have two of every kind, so that one half can be chosen on and the other reported on. The same
files give the same bytes.
"""

import argparse
import gzip
import re
import struct
import sys
import zlib
from pathlib import Path

from prose_from_html import is_prose

LEAST_BYTES = 48000  # of one text: more than 8,500 tokens of any of these
HANDBOOK_PIECES = (2, 6, 10, 14)
NOVELS = ("EMMA", "MANSFIELD PARK", "PERSUASION", "PRIDE AND PREJUDICE")
R_STRINGS, R_STRING = 16, 9  # the types of R's serialisation that a novel consists of


class broken_source(Exception):
    """A source that is not what it should be."""


def r_strings(record, path):
    """The elements of a character vector in R's XDR serialisation, version 2 or 3."""

    def number(at):
        return struct.unpack_from(">i", record, at)[0]

    if record[:2] != b"X\n":
        raise broken_source(f"{path}: no XDR serialisation of R")
    at = 14
    if number(2) == 3:  # the native encoding follows
        at += 4 + number(at)
    if number(at) & 0xFF != R_STRINGS:
        raise broken_source(f"{path}: a record holds type {number(at) & 0xFF}, not strings")
    count, at = number(at + 4), at + 8
    lines = []
    for _ in range(count):
        if number(at) & 0xFF != R_STRING:
            raise broken_source(f"{path}: byte {at} of a record is no string")
        length = number(at + 4)
        lines.append(record[at + 8 : at + 8 + max(length, 0)].decode())
        at += 8 + max(length, 0)
    return lines


def r_database(path):
    """Yields the records of a lazy-load database: each a length, then a zlib stream of that many bytes."""
    rest = path.read_bytes()
    while rest:
        stream = zlib.decompressobj()
        try:
            record = stream.decompress(rest[4:])
        except zlib.error as problem:
            raise broken_source(f"{path}: {problem}") from None
        if len(record) != struct.unpack_from(">I", rest)[0]:
            raise broken_source(f"{path}: a record has another length than is said before it")
        yield record
        rest = stream.unused_data


def novels(path):
    """The lines of every novel, by its title, which is its first line."""
    found = {}
    for record in r_database(path):
        lines = r_strings(record, path)
        found[lines[0].strip().upper()] = lines
    return found


def is_narrative(paragraph):
    """Novels live by short paragraphs, too; only headings and decorations are left out."""
    return bool(re.search(r"[a-z]", paragraph)) and paragraph[-1] in ".,:;!?-\"'" and not paragraph.startswith("CHAPTER")


def paragraphs_of(lines, wanted=is_prose):
    """Running text between blank lines, unwrapped, without marks of emphasis and footnotes."""
    found = []
    for block in re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines)):
        text = re.sub(r"_([^_]+)_", r"\1", " ".join(block.split()))
        text = re.sub(r"\[[A-Z]+\]", "", text).replace("{", "").replace("}", "")
        if text and wanted(text):
            found.append(text)
    return found


def cut(paragraphs, count, name):
    """`count` runs of whole paragraphs, each just over LEAST_BYTES, evenly spread over the whole."""
    sizes = [len(p.encode()) + 2 for p in paragraphs]  # with the blank line that follows
    total = sum(sizes)
    if total < count * (LEAST_BYTES + 2 * max(sizes, default=0)):
        raise broken_source(f"{name}: only {total} bytes of prose for {count} texts of {LEAST_BYTES}")
    runs, at, position = [], 0, 0
    for number in range(count):
        while position < total * number // count:
            position += sizes[at]
            at += 1
        run, size = [], 0
        while size < LEAST_BYTES:
            run.append(paragraphs[at])
            size += sizes[at]
            position += sizes[at]
            at += 1
        runs.append(run)
    return runs


def all_texts(arguments):
    """Yields a name and the paragraphs of every text, in the order of their numbers."""
    for piece in HANDBOOK_PIECES:
        text = (arguments.handbook / f"prose-{piece:02}.txt").read_text(encoding="utf-8")
        yield f"handbook-{piece:02}", text.strip().split("\n\n")
    found = novels(arguments.austen)
    for title in NOVELS:
        if title not in found:
            raise broken_source(f"{arguments.austen}: no {title}; there are {', '.join(sorted(found))}")
        # From a third of the way in: openings of famous novels are known by heart.
        yield f"austen-{title.split()[0].lower()}", cut(paragraphs_of(found[title], is_narrative), 3, title)[1]
    newton = arguments.opticks.read_text(encoding="utf-8").splitlines()
    for number, run in enumerate(cut(paragraphs_of(newton), 4, "opticks"), 1):
        yield f"opticks-{number}", run
    jargon = gzip.decompress(arguments.jargon.read_bytes()).decode().splitlines()
    for number, run in enumerate(cut(paragraphs_of(jargon), 4, "jargon"), 1):
        yield f"jargon-{number}", run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--handbook", type=Path, required=True, help="folder with prose-01.txt, ...")
    parser.add_argument("--austen", type=Path, required=True, help="janeaustenr's data/Rdata.rdb")
    parser.add_argument("--opticks", type=Path, required=True, help="Isaac.Newton-Opticks.txt, as Go's sources hold it")
    parser.add_argument("--jargon", type=Path, required=True, help="jargon.txt.gz")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        for number, (name, paragraphs) in enumerate(all_texts(arguments), 1):
            text = "\n\n".join(paragraphs) + "\n"
            (arguments.output / f"{number:02}-{name}.txt").write_text(text, encoding="utf-8")
    except (broken_source, OSError, UnicodeDecodeError, struct.error) as problem:
        sys.exit(f"quality texts: {problem}")


if __name__ == "__main__":
    main()
