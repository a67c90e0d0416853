#!/usr/bin/env python3
"""Counts the instructions of every stage of the CPU backend under callgrind and compares them with recorded ones.

    python3 bench/instructions/count.py --folder FOLDER [--compiler C++] [--record] [--limit PERCENT]

Compiles stages.cpp in FOLDER for one instruction set, whatever the machine has, and runs it once on one thread.
Counts repeat, unlike times: a stage that executes over 5 % more than recorded is reported in a line `WARNING: ...`; it does not
fail, for the growth may be meant. --record writes recorded.txt anew. Another compiler or C library counts
otherwise: the recorded figures are then not compared, and a line `SKIPPED: ...` says so.
Exit status: 0, 1 if something failed or a stage is not recorded, 77 where callgrind is missing or nothing can be compared.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = ROOT / "bench/instructions/recorded.txt"
SOURCE = ROOT / "bench/instructions/stages.cpp"
FLAGS = "-std=c++20 -O3 -march=x86-64-v3"
# Names that the loader looks up at a first call would count as that stage's.
LINK_FLAGS = "-Wl,-z,now -pthread"
RECORD = "python3 bench/instructions/count.py --folder build/instructions --record"


def skip(reason):
    print(f"SKIPPED: instruction counts: {reason}")
    sys.exit(77)


def surroundings(compiler):
    """What changes counts though no line of the library changes."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return {"compiler": version, "library": os.confstr("CS_GNU_LIBC_VERSION"), "flags": FLAGS}


def build(compiler, folder):
    program = folder / "stages"
    subprocess.run([compiler, *FLAGS.split(), f"-I{ROOT / 'include'}", SOURCE, "-o", program, *LINK_FLAGS.split()], check=True)
    return program


def count(program, folder):
    """Instructions by stage, in the order of the run."""
    for old in folder.glob("counts.*"):
        old.unlink()
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={folder / 'counts'}", program],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], "LC_ALL": "C"})
    if done.returncode != 0:
        sys.exit(f"callgrind ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    found = {}
    for path in folder.glob("counts.*"):
        text = path.read_text(encoding="utf-8")
        stage = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if stage and total:
            found[stage[1]] = int(total[1])
    names = done.stdout.splitlines()
    if not names or sorted(names) != sorted(found):
        sys.exit(f"callgrind counted {sorted(found)}, the program ran {names}")
    return {name: found[name] for name in names}


def read_recorded():
    around, counts = {}, {}
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line:
            continue
        name, _, value = line.partition(": ")
        if value.isdigit():
            counts[name] = int(value)
        else:
            around[name] = value
    return around, counts


def write_recorded(around, counts):
    lines = [f"# Instructions of each stage, one thread; written by {RECORD}"]
    lines += [f"{name}: {value}" for name, value in (around | counts).items()]
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"recorded {len(counts)} stages in {RECORDED.relative_to(ROOT)}")


def compare(now, recorded, limit):
    """Prints the table and what grew; 1 if program and record name other stages."""
    print(f"{'stage':<24}{'recorded':>14}{'now':>14}{'ratio':>8}")
    for name, value in now.items():
        if name in recorded:
            print(f"{name:<24}{recorded[name]:>14,}{value:>14,}{value / recorded[name]:>8.3f}")
    for name, value in now.items():
        if name in recorded and value > recorded[name] * (1 + limit / 100):
            print(f"WARNING: {name} executes {100 * (value / recorded[name] - 1):.1f} % more instructions than recorded "
                  f"({value:,} instead of {recorded[name]:,}); if that is meant: {RECORD}")
    other = sorted(set(now) ^ set(recorded))
    for name in other:
        print(f"{name} is {'not recorded' if name in now else 'recorded and no longer run'}: {RECORD}")
    return 1 if other else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for what is built and counted")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--limit", type=float, default=5.0, help="growth in percent that is not reported")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        skip("there is no valgrind (Debian and Ubuntu: package valgrind)")
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        skip("the stages are compiled for x86-64-v3, which this processor lacks")
    around = surroundings(options.compiler)
    recorded_around, recorded = ({}, {}) if options.record else read_recorded()
    for name, value in around.items():
        if not options.record and recorded_around.get(name) != value:
            skip(f"recorded with {name} {recorded_around.get(name)}, this is {value}; counts of the two cannot be compared")
    options.folder.mkdir(parents=True, exist_ok=True)
    now = count(build(options.compiler, options.folder), options.folder)
    if options.record:
        write_recorded(around, now)
        return 0
    return compare(now, recorded, options.limit)


if __name__ == "__main__":
    sys.exit(main())
