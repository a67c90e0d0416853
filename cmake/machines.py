#!/usr/bin/env python3
"""Compiles one source for several processors: no two objects may share a function or an object that differs.

A program and its shared libraries may hold sources compiled for different processors. If two define one name, the linker
keeps either, and a processor may then meet instructions that it does not have. Two checks of every pair of processors:
without optimisation, where nearly every function that is called becomes a symbol, no name of mdkv is shared; with it, no
shared name at all, the standard library's included, stands for different code.

Usage: machines.py --compiler C++ --flags FILE SOURCE
"""
import argparse
import concurrent.futures
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

MACHINES = {
    "x86-64": ["-march=x86-64"],
    "x86-64-v2": ["-march=x86-64-v2"],
    "AVX2 alone": ["-march=x86-64", "-mavx2"],  # neither FMA nor F16C
    "x86-64-v3": ["-march=x86-64-v3"],
    "x86-64-v3 and AVX-VNNI": ["-march=x86-64-v3", "-mavxvnni"],
    "x86-64-v4": ["-march=x86-64-v4"],
    "x86-64-v4 and VNNI": ["-march=x86-64-v4", "-mavx512vnni"],
}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(target, flags, machine, bodies_too):
    """Each weak or unique symbol of the object, and on demand its code or data."""
    run(options.compiler, f"@{options.flags}", *MACHINES[machine], *flags, "-w", "-ffunction-sections", "-fdata-sections", "-c",
        "-o", str(target), options.source)
    names = {line.split()[0] for line in run("nm", "--defined-only", "--format=posix", target).splitlines()
             if line.split()[1] in "WVu"}
    bodies, name = {name: [] for name in names}, None
    if not bodies_too:
        return bodies
    for line in run("objdump", "--disassemble-all", "--reloc", "--no-show-raw-insn", target).splitlines():
        start = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if start:
            name = start[1] if start[1] in names else None
        elif name and "\t" in line:
            # What objdump adds in brackets, the name nearest to an address, differs where code does not.
            bodies[name].append(re.sub(r"<[^>]*>", "", line.split("\t", 1)[1]))
    return bodies


def demangled(names):
    return subprocess.run(["c++filt"], input="\n".join(sorted(names)), check=True, capture_output=True, text=True).stdout.splitlines()


def compare(title, flags, wrong, bodies_too):
    """Prints the shared names that are wrong for any pair, and returns how many there are."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        targets = [pathlib.Path(folder) / f"{i}.o" for i in range(len(MACHINES))]
        objects = dict(zip(MACHINES, pool.map(lambda target, machine: symbols(target, flags, machine, bodies_too), targets, MACHINES)))
    own = {machine: sum("4mdkv" in name for name in found) for machine, found in objects.items()}
    if min(own.values()) == 0:
        sys.exit(f"{title}: an object holds no symbol of mdkv: {own}")
    bad = set()
    for one, other in itertools.combinations(objects, 2):
        bad |= {name for name in objects[one].keys() & objects[other].keys() if wrong(name, objects[one][name], objects[other][name])}
    for name in demangled(bad):
        print(f"{title}: {name}")
    print(f"{title}: {len(MACHINES)} processors, {min(own.values())} to {max(own.values())} symbols of mdkv each, {len(bad)} shared that must not be")
    return len(bad)


parser = argparse.ArgumentParser()
parser.add_argument("--compiler", required=True)
parser.add_argument("--flags", required=True, help="response file")
parser.add_argument("source")
options = parser.parse_args()

shared = compare("names of mdkv, -O0", ["-O0"], lambda name, one, other: "4mdkv" in name, False)
shared += compare("different code, -O2", ["-O2"], lambda name, one, other: one != other, True)
sys.exit(1 if shared else 0)
