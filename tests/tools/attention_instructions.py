#!/usr/bin/env python3
"""Counts the instructions that attention's inner loops execute for a token, compiled for x86-64 with AVX2 and for 64-bit Arm.

    attention_instructions.py --folder FOLDER [--dim DIM]

Compiles tests/build/growth/attention.cpp in FOLDER and runs it over 512 and over 1,024 tokens of one KV head: what the second run
executes more, divided by 512, is a token's share. For x86-64 callgrind counts; for Arm qemu-aarch64 writes a line for every
instruction within the loops. These are counts, not times: a vector of AVX2 is twice as wide as one of Arm's.
Columns: logits, softmax, rounding of weights, sums of values; a token's, for all query heads of the group together.
"""
import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FEWER, MORE = 512, 1024
PARTS = {"logits": r"(coded_logits|tile_logits)<", "softmax": r"soften\(", "rounding": r"round_weights<",
         "values": r"(coded_sums|column_sums)<"}
MACHINES = {"x86-64-v3": ["g++", "-march=x86-64-v3"],
            "armv8-a": ["aarch64-linux-gnu-g++", "-march=armv8-a", "-static"],
            "armv8.2-a+dotprod": ["aarch64-linux-gnu-g++", "-march=armv8.2-a+dotprod", "-static"],
            "armv8.2-a+dotprod+i8mm": ["aarch64-linux-gnu-g++", "-march=armv8.2-a+dotprod+i8mm", "-static"]}


def part_of(function):
    return next((part for part, pattern in PARTS.items() if re.search(r"detail::" + pattern, function)), None)


def callgrind(program, arguments, folder):
    file = folder / "callgrind"
    subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={file}", program, *arguments], check=True, capture_output=True)
    text = subprocess.run(["callgrind_annotate", "--threshold=100", "--auto=no", file], check=True, capture_output=True, text=True).stdout
    counts = dict.fromkeys(PARTS, 0)
    for number, function in re.findall(r"^\s*([\d,]+) \([^)]*\)\s+[^:]*:(.*)$", text, re.MULTILINE):
        if part := part_of(function):
            counts[part] += int(number.replace(",", ""))
    return counts


def emulated(program, arguments, _):
    ranges, names = [], []
    table = subprocess.run(["aarch64-linux-gnu-nm", "-CS", program], check=True, capture_output=True, text=True).stdout
    for begin, size, name in re.findall(r"^([0-9a-f]{16}) ([0-9a-f]{16}) \w (.*)$", table, re.MULTILINE):
        if part := part_of(name):
            ranges.append((int(begin, 16), int(begin, 16) + int(size, 16), part))
            names.append(f"0x{begin}+0x{size}")
    counts = dict.fromkeys(PARTS, 0)
    with subprocess.Popen(["qemu-aarch64", "-cpu", "max", "-singlestep", "-d", "nochain,exec", "-dfilter", ",".join(names), program,
                           *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        for line in run.stderr:  # Trace 0: 0x7f... [flags/address/...]
            address = re.match(r"Trace \d+: \S+ \[[0-9a-f]+/([0-9a-f]+)/", line)
            if address:
                at = int(address[1], 16)
                for begin, end, part in ranges:
                    if begin <= at < end:
                        counts[part] += 1
                        break
    if run.returncode != 0:
        sys.exit(f"{program} ended with status {run.returncode} in qemu-aarch64")
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for what is built")
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    for tool in ["valgrind", "qemu-aarch64", "aarch64-linux-gnu-g++"]:
        if not shutil.which(tool):
            print(f"SKIPPED: attention instructions: there is no {tool}")
            return 77
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"instructions a token, D = {options.dim}")
    print("| compiled for | tokens | G | " + " | ".join(PARTS) + " | all |\n|---|---|--:|" + "--:|" * (len(PARTS) + 1))
    for index, (machine, command) in enumerate(MACHINES.items()):
        program = options.folder / f"attention{index}"
        subprocess.run([*command, "-std=c++20", "-O3", f"-I{ROOT / 'include'}", ROOT / "tests/build/growth/attention.cpp", "-o", program,
                        "-pthread"], check=True)
        count = callgrind if machine.startswith("x86") else emulated
        for kind in ["f16", "int8", "int4"]:
            for group in [1, 4]:
                fewer, more = (count(program, [kind, str(group), str(options.dim), str(n)], options.folder) for n in (FEWER, MORE))
                each = [(more[part] - fewer[part]) / (MORE - FEWER) for part in PARTS]
                print(f"| {machine} | {kind} | {group} | " + " | ".join(f"{x:.1f}" for x in each) + f" | {sum(each):.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
