#!/usr/bin/env python3
"""Cuts and makes the kinds of text beside prose that presets are compared on: what people put into prompts.

    kinds_of_text.py OUTPUT_FOLDER --packages FOLDER --tables WHEEL

    code       C++ (Eigen), Python (its standard library), Go (its own library): four files of each
    logs       JSON lines of tool calls with repeated keys, made with a seed; paths and results are the library's
    chats      questions and answers of Perl's and Python's FAQs as turns of a chat in ChatML, both models' template
    tables     measurements and prices (vega_datasets), and tables made with a seed
    languages  the Debian Administrator's Handbook in French and in Chinese

FOLDER holds the unpacked packages of Debian that examples/setup.sh names. Writes code-01-cpp.txt and so on, 16 kB each;
odd numbers and even numbers have as many of every source, so that one half can be chosen on and the other reported on.
Control tokens of chats are written as text: mdkv_run compare --control-tokens reads them as tokens. The same files give
the same bytes.
"""

import argparse
import json
import random
import re
import sys
import zipfile
from datetime import datetime, timedelta
from pathlib import Path

from prose_from_html import pages_in_order

BYTES = 16000
EIGEN, PYTHON, GO = "usr/include/eigen3/Eigen/src", "usr/lib/python3.*", "usr/share/go-*/src"
CODE = {
    "cpp": (EIGEN, "SVD/BDCSVD.h", "SparseCore/SparseMatrix.h", "Core/util/Memory.h", "Geometry/Transform.h"),
    "python": (PYTHON, "mailbox.py", "shutil.py", "asyncio/base_events.py", "statistics.py"),
    "go": (GO, "net/http/transfer.go", "go/printer/nodes.go", "encoding/json/encode.go", "text/template/exec.go"),
}
FAQS = {
    "perl": [f"usr/share/perl/*/pod/perlfaq{n}.pod" for n in range(3, 10)],
    "python": [f"usr/share/doc/python3.*/html/_sources/faq/{n}.rst.txt" for n in ("design", "library", "programming")],
}
TABLES = ("seattle-weather", "stocks", "us-employment", "seattle-temps")
LANGUAGES = {"french": ("fr-FR", "[a-zéèàêçù]"), "chinese": ("zh-CN", "[\u4e00-\u9fff]")}


def find(root, pattern):
    """The one path that a pattern with a version in it stands for."""
    found = sorted({path.resolve() for path in root.glob(pattern)})
    if len(found) != 1:
        raise ValueError(f"{len(found)} paths {pattern} in {root}, 1 is needed")
    return found[0]


def cut(text):
    """The first BYTES bytes, to the end of a line or, in one long line, of a character."""
    if len(text.encode()) < BYTES:
        raise ValueError(f"only {len(text.encode())} bytes, {BYTES} are needed: {text[:60]!r}")
    head = text.encode()[:BYTES].decode(errors="ignore")
    return head[: head.rfind("\n") + 1] or head


def later_part(text):
    """A file from its first blank line behind the first eighth, where licences and imports are over."""
    return text[text.index("\n\n", len(text) // 8) + 2 :]


def code(root):
    for i in range(4):
        for language, (folder, *names) in CODE.items():
            yield language, later_part((find(root, folder) / names[i]).read_text(encoding="utf-8"))


def log(root, chance):
    """Tool calls of an agent. Keys, their order, and the form of times and numbers are one log's own."""
    library = find(root, PYTHON)
    files = sorted(p for p in library.rglob("*.py") if p.is_file() and p.stat().st_size > 8000)
    time = datetime(2026, chance.randint(1, 12), chance.randint(1, 28), chance.randint(0, 23))
    names = [chance.choice(n) for n in (("ts", "time", "timestamp"), ("call_id", "id", "span"), ("tool", "name"))]
    names += [chance.choice(n) for n in (("args", "arguments", "input"), ("status", "outcome"), ("ms", "duration_ms"))]
    names += [chance.choice(n) for n in (("result", "output", "observation"), ("session", "agent", "trace_id"))]
    dense, session = chance.random() < 0.5, f"{chance.getrandbits(32):08x}"
    while True:
        path = chance.choice(files)
        lines = [one for one in path.read_text(encoding="utf-8").splitlines() if len(one.strip()) > 8]
        at = chance.randrange(len(lines) - 4)
        word = max(re.findall(r"\w+", lines[at]), key=len, default="def")
        short = str(path.relative_to(library))
        tool, arguments, result = chance.choice(
            [
                ("read_file", {"path": short, "first": at + 1, "lines": 3}, "\n".join(lines[at : at + 3])),
                ("grep", {"pattern": word, "path": short}, f"{short}:{at + 1}:{lines[at].strip()}"),
                ("list_files", {"folder": short.rpartition("/")[0] or "."}, f"{chance.randint(2, 90)} entries"),
                ("run_tests", {"target": short[:-3].replace("/", ".")}, f"{chance.randint(1, 400)} passed"),
            ]
        )
        failed = chance.random() < 0.1
        time += timedelta(milliseconds=chance.randint(40, 90000))
        values = [time.isoformat(timespec="milliseconds") + "Z", f"c{chance.getrandbits(24):06x}", tool, arguments]
        values += ["error" if failed else "ok", chance.randint(1, 4000), "timed out" if failed else result, session]
        yield json.dumps(dict(zip(names, values)), separators=(",", ":") if dense else None)


def questions(kind, text):
    """Headings that ask and the text below each, without marks of links and fonts."""
    if kind == "perl":
        found = re.findall(r"^=head2 ([^\n]*\?)\n\n(.*?)(?=^=head|^=over|\Z)", text, re.MULTILINE | re.DOTALL)
        plain = lambda s: re.sub(r"\b[A-Z]<{1,2} ?(?:[^<>|]*\|)?([^<>]*?) ?>{1,2}", r"\1", s)  # noqa: E731
    else:
        found = re.findall(r"^([^\n]*\?)\n-{4,}\n\n(.*?)(?=^[^\n]*\n[-=]{4,}\n|\Z)", text, re.MULTILINE | re.DOTALL)
        plain = lambda s: re.sub(r":[\w:]+:`~?([^`<]*)[^`]*`|``?([^`]*)``?_?", r"\1\2", s)  # noqa: E731
    for question, answer in found:
        paragraphs, kept = re.split(r"\n\s*\n", plain(answer).strip()), []
        while paragraphs and sum(map(len, kept)) < 700:
            kept.append(paragraphs.pop(0))
        yield plain(question), "\n\n".join(kept)


def chats(root):
    """Eight chats of FAQs' questions in their order, each from another quarter of them on."""
    pools = [[q for f in files for q in questions(kind, find(root, f).read_text(encoding="utf-8"))] for kind, files in FAQS.items()]
    for i in range(4):
        for kind, pool in zip(FAQS, pools):
            at = len(pool) * i // 4
            turns = [("system", "You are a helpful assistant.")]
            for question, answer in pool[at:] + pool[:at]:
                turns += [("user", question), ("assistant", answer)]
            yield kind, "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)


def made_table(chance):
    """Sales by shop and month as Markdown, or readings of sensors in columns."""
    if chance.random() < 0.5:
        places = chance.sample("Aachen Bergen Cork Delft Espoo Faro Ghent Halle Izola Jaca Kiel Lviv".split(), 5)
        yield "| month | " + " | ".join(places) + " | total |"
        yield "|:--|" + "--:|" * 6
        level = [chance.randint(2000, 90000) for _ in places]
        for month in range(600):
            level = [max(100, round(x * chance.uniform(0.9, 1.11))) for x in level]
            cells = [f"{1980 + month // 12}-{month % 12 + 1:02}", *level, sum(level)]
            yield "| " + " | ".join(map(str, cells)) + " |"
    else:
        level = [chance.uniform(5, 90) for _ in range(6)]
        yield "    t/s " + " ".join(f"{name:>9}" for name in ("T1/C", "T2/C", "p/bar", "flow", "U/V", "I/A"))
        for step in range(600):
            level = [x + chance.gauss(0, 1) for x in level]
            yield f"{step * 0.25:7.2f} " + " ".join(f"{x:9.3f}" for x in level)


def tables(wheel):
    with zipfile.ZipFile(wheel) as archive:
        for number, name in enumerate(TABLES):
            text = archive.read(f"vega_datasets/_data/{name}.csv").decode()
            yield name, (text * 2)[: 2 * BYTES]
            yield "made", "\n".join(made_table(random.Random(number // 2 * 2 + 40 + number % 2))) + "\n"


def languages(root):
    pools = {}
    for name, (folder, letters) in LANGUAGES.items():
        pages = pages_in_order(root / "usr/share/doc/debian-handbook/html" / folder)
        all_paragraphs = (p for page in pages for p in page.paragraphs)
        pools[name] = [p for p in all_paragraphs if len(p) > 40 and len(re.findall(letters, p)) > 0.6 * len(p)]
    for i in range(4):
        for name, pool in pools.items():
            yield name, "\n\n".join(pool[len(pool) * i // 5 :]) + "\n"


def all_texts(arguments):
    """Yields a kind, its sources' names and its texts, in the order of their numbers."""
    root = arguments.packages
    yield "code", in_pairs(code(root), len(CODE))
    logs = ("\n".join(one for one, _ in zip(log(root, random.Random(seed)), range(200))) for seed in range(8))
    yield "logs", (("tools", text + "\n") for text in logs)
    yield "chats", in_pairs(chats(root), len(FAQS))
    yield "tables", in_pairs(tables(arguments.tables), 2)
    yield "languages", in_pairs(languages(root), len(LANGUAGES))


def in_pairs(texts, sources):
    """Orders texts, which come round by round of all sources, so that a source's first two are neighbours."""
    texts = list(texts)
    for first in range(0, len(texts), 2 * sources):
        for i in range(first, first + sources):
            yield texts[i]
            yield texts[i + sources]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--packages", type=Path, required=True, help="folder of the unpacked packages, with usr")
    parser.add_argument("--tables", type=Path, required=True, help="the wheel of vega_datasets")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        for kind, texts in all_texts(arguments):
            for number, (name, text) in enumerate(texts, 1):
                (arguments.output / f"{kind}-{number:02}-{name}.txt").write_text(cut(text), encoding="utf-8")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
        sys.exit(f"kinds of text: {problem}")


if __name__ == "__main__":
    main()
