#!/usr/bin/env python3
"""Adds up what test runs passed, failed and skipped, and prints it with a last line `N passed, N failed, N skipped`.

    count_results.py [NAME=]FILE...

A file is CTest's JUnit output, in which a doctest entry counts its test cases and any other entry counts as one test,
pytest's, or a text file with lines `PASSED: name`, `FAILED: name` and `SKIPPED: name: reason`. A test case that wrote a
line `SKIPPED: name: reason` counts as skipped, not as passed. Lines `WARNING: text` of a text file are printed and count as
nothing. Exit status 1 if anything failed or nothing ran.
"""
import re
import sys
import xml.etree.ElementTree as xml
from dataclasses import dataclass, field

SUMMARY = re.compile(r"\[doctest\] test cases:\s*(\d+) \|\s*(\d+) passed \|\s*(\d+) failed")
SKIPPED = re.compile(r"^SKIPPED: (.+)$", re.MULTILINE)


@dataclass
class tally:
    passed: int = 0
    failures: list = field(default_factory=list)
    skips: list = field(default_factory=list)
    warnings: list = field(default_factory=list)

    def add(self, other):
        self.passed += other.passed
        self.failures += other.failures
        self.skips += other.skips
        self.warnings += other.warnings


def count_entry(entry):
    """One entry of CTest's or pytest's output."""
    name = entry.get("name")
    if entry.get("status") is None:  # pytest's; a module that is skipped as a whole has no class
        name = f"{entry.get('classname')}.{name}".lstrip(".")
        if entry.find("skipped") is not None:
            return tally(0, [], [f"{name}: {entry.find('skipped').get('message')}"])
        failed = entry.find("failure") is not None or entry.find("error") is not None
        return tally(0 if failed else 1, [name] if failed else [])
    output = entry.findtext("system-out") or ""
    skips = [f"{name}: {line}" for line in dict.fromkeys(SKIPPED.findall(output))]
    if entry.get("status") == "disabled":
        return tally(0, [], [f"{name}: disabled"])
    if entry.get("status") == "notrun" and skips:  # it asked for something this machine has not, and left
        return tally(0, [], skips)
    succeeded = entry.get("status") == "run"
    summary = SUMMARY.search(output)
    if not summary:  # not a doctest program, or one that died before it could say anything
        return tally(1 if succeeded and not skips else 0, [] if succeeded else [name], skips if succeeded else [])
    passed, failed = int(summary[2]), int(summary[3])
    if not succeeded:
        failed = max(failed, 1)
    return tally(max(passed - len(skips), 0), [name] * failed, skips)


def count_junit(path):
    total = tally()
    for entry in xml.parse(path).getroot().iter("testcase"):
        total.add(count_entry(entry))
    if not (total.passed or total.failures or total.skips):
        total.failures.append("no test ran")
    return total


def count_lines(path):
    total = tally()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            kind, _, name = line.strip().partition(": ")
            if kind == "PASSED":
                total.passed += 1
            elif kind == "FAILED":
                total.failures.append(name)
            elif kind == "SKIPPED":
                total.skips.append(name)
            elif kind == "WARNING":
                total.warnings.append(name)
    return total


def main(arguments):
    total = tally()
    for argument in arguments:
        label, _, path = argument.rpartition("=")
        part = count_junit(path) if path.endswith(".xml") else count_lines(path)
        print(f"{label or path}: {part.passed} passed, {len(part.failures)} failed, {len(part.skips)} skipped")
        for name in dict.fromkeys(part.failures):
            print(f"  failed: {name}")
        for name in part.skips:
            print(f"  skipped: {name}")
        for text in part.warnings:
            print(f"  warning: {text}")
        total.add(part)
    print(f"{total.passed} passed, {len(total.failures)} failed, {len(total.skips)} skipped")
    return 1 if total.failures or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
