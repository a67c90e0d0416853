"""The files of a release agree: one version everywhere, a changelog in order, the paper cited alike, links that exist.

    release.py REPOSITORY

Needs no package and no network, so CITATION.cff is read by its lines.
"""

import re
import sys
from pathlib import Path

SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def header_version(root):
    text = (root / "include/mdkv/core/version.hpp").read_text(encoding="utf-8")
    return ".".join(re.search(rf"^#define MDKV_VERSION_{part} (\d+)$", text, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def versions(root):
    said = header_version(root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    asked = re.findall(r"find_package\(mdkv (\d+\.\d+) ", (root / "README.md").read_text(encoding="utf-8"))
    yield "CHANGELOG.md's newest version", re.search(r"^## \[(\d[^\]]*)\]", changelog, re.M)[1], said
    yield "the version of the README's find_package", asked, [said.rpartition(".")[0]]
    files = re.findall(r"\b(?:lib)?(?:ggml-)?mdkv(?:-dev)?[-_](\d+\.\d+\.\d+)\b", (root / "README.md").read_text(encoding="utf-8"))
    yield "the versions of files in README.md", set(files), {said}


def changelog(root):
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, re.M)
    entries = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2}|unreleased)", head) for head in heads]
    yield "headings that are not [VERSION] - DATE or - unreleased", [one for one, entry in zip(heads, entries) if not entry], []
    numbers = [tuple(map(int, entry.groups()[:3])) for entry in entries if entry]
    dates = [entry[4] for entry in entries if entry]
    yield "the order of versions", numbers, sorted(set(numbers), reverse=True)
    yield "the order of dates", dates, sorted(dates, reverse=True)
    yield "sections of no known kind", sorted(set(re.findall(r"^### (.*)$", text, re.M)) - SECTIONS), []


def citation(root):
    cff = (root / "CITATION.cff").read_text(encoding="utf-8")
    readme = (root / "README.md").read_text(encoding="utf-8")
    for key in ("cff-version", "message", "title", "authors"):
        yield f"lines with CITATION.cff's {key}", len(re.findall(rf"^{key}:", cff, re.M)), 1
    yield "a version or tab in CITATION.cff", re.findall(r"^version:.*|\t", cff, re.M), []
    paper = cff.partition("\nreferences:\n")[2]
    yield "authors without a family name or a given name", len(re.findall(r"family-names: .+\n +given-names: .+", paper)), \
        paper.count("family-names:")
    yield "the paper's number", set(re.findall(r"\d{4}\.\d{5}", paper)), set(re.findall(r"arXiv\s+(\d{4}\.\d{5})", readme))
    yield "the README's links to CITATION.cff", readme.count("](CITATION.cff)"), 1


def text_of(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text_of(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(root):
    pages = [page for folder in ("docs", "examples", "tests", "bench") for page in (root / folder).rglob("*.md")]
    for page in [*root.glob("*.md"), *pages]:
        found = re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text_of(page))
        targets = [(page.parent / file if file else page, anchor) for file, anchor in found]
        yield f"broken links of {page.relative_to(root)}", [f"{file}#{anchor}" for file, anchor in targets if not file.exists()
                                                           or anchor and file.suffix == ".md" and anchor not in anchors(file)], []


def main():
    root = Path(sys.argv[1])
    failed = 0
    for check in (versions, changelog, citation, links):
        for name, found, expected in check(root):
            if found != expected:
                failed += 1
                print(f"failed: {name}: {found}, expected {expected}")
    print(f"{header_version(root)}: {failed} failed")
    return failed > 0


sys.exit(main())
