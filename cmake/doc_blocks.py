"""Compiles every ```cpp block of Markdown pages, each as its own translation unit (-fsyntax-only), and counts tables' columns.

A block that includes something stands for itself and is compiled as it is. Any other block is preceded by the prelude
below and is tried first as declarations, then as the body of a function. Two HTML comments on the lines before a block
say more; a reader of the rendered page does not see them:

    <!-- given:                         code that the block relies on, put before it
    std::vector<float> keys;
    -->
    <!-- not compiled: the reason -->   for blocks that cannot be

The words between backticks of a table below <!-- names --> must stand in the library's headers.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PRELUDE = """\
#include <mdkv/mdkv.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>
"""

BLOCK = re.compile(
    r"(?P<comments>(?:^[ \t]*<!--(?:(?!-->).)*?-->[ \t]*\n+)*)"
    r"^(?P<indent>[ \t]*)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
NAMES = re.compile(r"^<!-- names -->\n((?:\|.*\n?)*)", re.MULTILINE)
HEADERS = Path(__file__).parents[1] / "include"
COMMENT = re.compile(r"<!--\s*(given|not compiled):(.*?)-->", re.DOTALL)


def blocks(page):
    """Yields (line number, code, given, reason not to compile) for each C++ block."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["language"].strip() not in ("cpp", "c++"):
            continue
        notes = dict((kind, body.strip("\n")) for kind, body in COMMENT.findall(match["comments"]))
        line = text.count("\n", 0, match.start("code")) + 1
        yield line, match["code"], notes.get("given", ""), notes.get("not compiled", "").strip()


def sources(code, given):
    """The translation units to try, best first."""
    if re.search(r"^\s*#\s*include\b", code, re.MULTILINE):
        return [f"{given}\n{code}"]
    includes = "\n".join(line for line in given.splitlines() if line.lstrip().startswith("#"))
    given = "\n".join(line for line in given.splitlines() if not line.lstrip().startswith("#"))
    head = f'#include "prelude.hpp"\n{includes}\n'
    return [f"{head}{given}\n{code}", f"{head}void block()\n{{\n{given}\n{code}\n}}\n"]


def compile_error(compiler, flags, source, folder):
    """The compiler's messages, or None when it accepts the source."""
    path = Path(folder) / "block.cpp"
    path.write_text(source, encoding="utf-8")
    result = subprocess.run([compiler, f"@{flags}", "-fsyntax-only", str(path)], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr


def uneven_rows(page):
    """Yields (line number, columns, columns of the table's head) for each row of a table that has too few or too many."""
    width, fenced = 0, False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if fenced or not line.startswith("|"):
            width = 0
            continue
        columns = len(re.findall(r"(?<!\\)\|", line)) - 1
        width = width or columns
        if columns != width:
            yield number, columns, width


def unknown_names(page):
    """Yields the words of tables of names that no header has."""
    tables = NAMES.findall(page.read_text(encoding="utf-8"))
    if tables:
        known = {word for path in HEADERS.rglob("*") if path.is_file() for word in re.findall(r"\w+", str(path) + path.read_text())}
        yield from sorted({word for table in tables for code in re.findall(r"`([^`]*)`", table) for word in re.findall(r"[^\W\d]\w+", code)}
                          - known)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--flags", required=True, help="response file with include directories and the standard")
    parser.add_argument("pages", nargs="+", type=Path)
    arguments = parser.parse_args()

    compiled, left_out, failed = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        prelude = Path(folder) / "prelude.hpp"
        prelude.write_text(PRELUDE, encoding="utf-8")
        # g++ reads it compiled; other compilers read the header itself.
        subprocess.run([arguments.compiler, f"@{arguments.flags}", "-x", "c++-header", "-o", f"{prelude}.gch", prelude], check=True)
        for page in arguments.pages:
            for line, columns, width in uneven_rows(page):
                failed += 1
                print(f"{page}:{line}: a row of {columns} columns in a table of {width}")
            for name in unknown_names(page):
                failed += 1
                print(f"{page}: no header has the name {name}, which a table names")
            for line, code, given, reason in blocks(page):
                if reason:
                    left_out += 1
                    print(f"{page}:{line}: not compiled: {reason}")
                    continue
                errors = []
                for source in sources(code, given):
                    error = compile_error(arguments.compiler, arguments.flags, source, folder)
                    if error is None:
                        compiled += 1
                        break
                    errors.append(error)
                else:
                    failed += 1
                    print(f"{page}:{line}: this block does not compile\n{min(errors, key=lambda error: error.count('error:'))}")
    print(f"doc blocks: {compiled} compiled, {failed} failed, {left_out} marked as not compiled")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
