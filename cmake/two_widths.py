#!/usr/bin/env python3
"""Compiles one source for two processors: the objects must share no function of the CPU backend.

A program may link sources compiled for different machines. Where both define a function of the same name, the linker keeps
one of them, and the other machine runs code that is not its own. Usage: two_widths.py --compiler C++ --flags FILE SOURCE
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument("--compiler", required=True)
parser.add_argument("--flags", required=True, help="response file")
parser.add_argument("source")
options = parser.parse_args()


def functions(folder, machine):
    target = pathlib.Path(folder) / f"{machine}.o"
    subprocess.run([options.compiler, f"@{options.flags}", f"-march={machine}", "-O0", "-c", "-o", target, options.source],
                   check=True)
    names = subprocess.run(["nm", "-C", "--defined-only", "--format=posix", target], check=True, capture_output=True,
                           text=True).stdout
    return {line.rsplit(" ", 3)[0] for line in names.splitlines() if "mdkv::cpu::" in line}


with tempfile.TemporaryDirectory() as folder:
    baseline = functions(folder, "x86-64")
    shared = baseline & functions(folder, "x86-64-v3")
if not baseline:
    sys.exit("no function of mdkv::cpu was found")
for name in sorted(shared):
    print(name)
if shared:
    sys.exit(f"{len(shared)} functions have the same name for both machines")
