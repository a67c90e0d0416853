#!/usr/bin/env python3
"""Looks at what ptxas made of the kernels: no local memory by spilling, registers that let the planned blocks fit on a
multiprocessor, and in hot loops the instructions they are planned with.

    check_kernels.py --cuobjdump PROGRAM --nvdisasm PROGRAM CUBIN...

Prints one line per kernel; exit status 1 names what is not as planned. Without the programs it says SKIPPED.
"""
import argparse
import collections
import os
import re
import subprocess
import sys

# Kernel -> instructions its machine code must have (regular expressions). A kernel is named by its struct.
INSTRUCTIONS = {
    # copies of 16 bytes; tensor cores
    "attend_slice": [r"LDGSTS\.\S*128", r"HMMA\.16816", r"MOVM"],
}
# Instructions for half and bfloat16 only: tensor cores multiply these.
TENSOR_CORES = {"attend_slice": [r"LDSM\.16\.MT88\.4"], "score_sweep": [r"HMMA\.16816"]}
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor, compute capability 8.0 and 9.0

RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
KERNEL = re.compile(r"5entryINS\d*_(?:\d+_)?(\d+)(\w+)")


def kernel_name(mangled):
    """The struct's name inside the mangled name of entry<struct>."""
    found = KERNEL.search(mangled)
    return found[2][: int(found[1])] if found else mangled


def run(command, path):
    environment = {**os.environ, "PATH": path + os.pathsep + os.environ.get("PATH", "")}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuobjdump", required=True)
    parser.add_argument("--nvdisasm", required=True)
    parser.add_argument("cubins", nargs="+")
    options = parser.parse_args()
    for program in (options.cuobjdump, options.nvdisasm):
        if not os.path.isfile(program):
            print(f"SKIPPED: gpu/kernels: there is no {program or 'cuobjdump or nvdisasm'}")
            return 0
    path = os.path.dirname(options.nvdisasm)
    wrong, seen = [], collections.Counter()
    for cubin in options.cubins:
        label = os.path.basename(cubin)
        for mangled, registers, stack, shared, local in RESOURCES.findall(
            run([options.cuobjdump, "--dump-resource-usage", cubin], path)
        ):
            name = kernel_name(mangled)
            seen[name] += 1
            print(f"{label} {name}: {registers} registers, {stack} bytes of stack")
            if int(local) != 0:
                wrong.append(f"{label}: {mangled} has {local} bytes of local memory")
        code = run([options.cuobjdump, "--dump-sass", cubin], path)
        for part in re.split(r"\n\s*Function : ", code)[1:]:
            mangled = part.split("\n", 1)[0].strip()
            name = kernel_name(mangled)
            wanted = list(INSTRUCTIONS.get(name, []))
            if "float" not in mangled and not re.search(r"I[fd]", mangled.split(name, 1)[-1][:2]):
                wanted += TENSOR_CORES.get(name, [])
            for instruction in wanted:
                if not re.search(instruction, part):
                    wrong.append(f"{label}: {mangled} has no instruction {instruction}")
    for name in [*INSTRUCTIONS, *TENSOR_CORES]:
        if not seen[name]:
            wrong.append(f"no kernel named {name} was compiled")
    print(f"{sum(seen.values())} compiled kernels of {len(seen)} kinds")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
