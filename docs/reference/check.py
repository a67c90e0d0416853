#!/usr/bin/env python3
"""Checks the reference that docs/reference/make.sh makes, by Doxygen's XML, and counts its pages.

    check.py FOLDER

Every function outside a class has a comment, every public function a page. A function of the stages that takes a backend says its cost
and synchronisation. The main page names only functions that are there, by links.
"""
import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

SECTIONS = {"Cost", "Synchronisation"}


def text(member, part):
    return "".join(member.find(part).itertext()).strip()


def faults_of(member, in_class, folder):
    """What is wrong with one function."""
    page = member.get("id").rsplit("_1", 1)[0] + ".html"
    if not (folder / "html" / page).is_file():
        yield "has no page"
    if not in_class and not text(member, "briefdescription") and not text(member, "detaileddescription"):
        yield "has no comment"
    stage = not member.findtext("definition").split("(")[0].split(" ")[-1].startswith(("mdkv::cpu::", "mdkv::gpu::"))
    if stage and member.findtext("param/declname") == "on":
        for section in sorted(SECTIONS - {title.text for title in member.iter("title")}):
            yield f"says no {section.lower()}"


def main(folder):
    faults, functions, types = [], set(), set()
    for path in sorted((folder / "xml").glob("*.xml")):
        for compound in xml.parse(path).getroot().iter("compounddef"):
            kind = compound.get("kind")
            if kind in ("class", "struct", "concept"):
                types.add(compound.findtext("compoundname"))
            if kind not in ("class", "struct", "namespace") or compound.get("prot") == "private":
                continue
            for member in compound.iter("memberdef"):
                if member.get("kind") != "function" or member.get("prot") != "public":
                    continue
                functions.add(member.get("id"))
                place = member.find("location")
                faults += [f"{place.get('file')}:{place.get('line')}: {member.findtext('name')} {fault}"
                           for fault in faults_of(member, kind != "namespace", folder)]
    main_page = (folder / "html" / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r"mdkv::[\w:]+", re.sub(r"<a .*?</a>", "", main_page)):
        faults.append(f"docs/reference/main.md: {name} is not there")
    print("\n".join(sorted(set(faults))), end="\n" if faults else "")
    print(f"reference: {len(functions)} functions, {len(types)} types and concepts, {len(set(faults))} faults")
    sys.exit(1 if faults or not functions else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
