#!/usr/bin/env python3
"""Lines of include/mdkv, of each of its folders, of tests, examples and bench, as wc -l counts them, and calls of stages by the
pipeline, beside their limits.

    python3 tests/tools/size.py             fails where a folder has more lines than its limit
    python3 tests/tools/size.py --record    lowers the limits to the lines of today

The limits are in sizes.txt, beside this script. A limit is raised by hand alone, in the change that needs the lines and with an
entry in docs/decisions.md that names the figure that they buy, or that lowers another limit by more.
"""
import argparse
import pathlib
import re
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parents[2]
limits_file = pathlib.Path(__file__).with_name("sizes.txt")


def lines_by_folder():
    """Of files that git knows or would add."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard",
                             "include/mdkv", "tests", "examples", "bench"], check=True, capture_output=True, text=True).stdout
    lines = {}
    for name in filter(None, listed.split("\0")):
        path, parts = root / name, pathlib.PurePath(name).parts
        if path == limits_file or not path.is_file():
            continue
        count = path.read_bytes().count(b"\n")
        folders = ["include/mdkv"] if parts[0] == "include" else [parts[0]]
        if parts[0] == "include" and len(parts) > 3:
            folders.append("/".join(parts[:3]))
        for folder in folders:
            lines[folder] = lines.get(folder, 0) + count
    return lines


def calls_of_stages():
    """Of the pipeline, which should call each stage from one place."""
    text = re.sub(r"//.*", "", "".join(path.read_text() for path in root.glob("include/mdkv/pipeline/*.hpp")))
    stages = "replay score pool join balance allocate stand_in refit pack".split()
    return {f"calls_of_{stage}": len(re.findall(rf"(?:mdkv::|[^\w.:>]){stage}\(on", text)) for stage in stages}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", action="store_true", help="lower the limits to the lines of today")
    record = options.parse_args().record
    limits = {folder: int(limit) for folder, limit in map(str.split, limits_file.read_text().splitlines())}
    lines, larger = lines_by_folder() | calls_of_stages(), False
    for folder in sorted(lines | limits):
        now, limit = lines.get(folder, 0), limits.get(folder)
        if limit is None:
            larger = True
            print(f"{folder}: {now}, and sizes.txt has no limit for it")
        elif now > limit:
            larger = True
            print(f"{folder}: {now}, {now - limit} more than its limit of {limit}")
        elif now < limit:
            print(f"{folder}: {now}, {limit - now} fewer than its limit of {limit}" + ("" if record else ": --record lowers it"))
    if record:
        kept = {folder: min(limit, lines[folder]) for folder, limit in limits.items() if folder in lines}
        limits_file.write_text("".join(f"{folder} {limit}\n" for folder, limit in sorted(kept.items())))
    return int(larger)


if __name__ == "__main__":
    sys.exit(main())
