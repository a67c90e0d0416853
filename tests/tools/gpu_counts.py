#!/usr/bin/env python3
"""Counts what a GPU issues for one token of attention, in the machine code of attend_slice: no GPU is needed.

    gpu_counts.py --nvcc PROGRAM --nvdisasm PROGRAM --cuobjdump PROGRAM [--record] CUBIN...

A token's count is that of a warp's way through the loop over tiles, for one whole tile of 16 tokens, or for two tiles of codes
(everything in the loop counted: copies, waits, branches, instructions that are predicated off), over 16 or 32. The way is the
cheapest one through the kernel's control flow that does the tiles' work: its tensor-core products, copies, exponentials and
transpositions, and no step that is rare (a maximum that moves exchanges it between lanes by SHFL). A warp serves up to eight
query heads of a KV head, so the count is the same for G = 1 to 8 and twice as large for 9 to 16. Wavefronts are those of
shared memory: 128 bytes each, without bank conflicts (a test shows that words of codes have none).

The result is compared with tests/data/gpu_counts.txt: a count that grew by more than 3 % is an error, if the compiler has
the version that is written there. --record writes the file. Without the programs the script says SKIPPED.
"""
import argparse
import heapq
import os
import re
import subprocess
import sys

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "gpu_counts.txt")
TILE = 16  # tokens
THREADS, REGISTER_FILE = 128, 65536  # of a block; of a multiprocessor
RARE = ("SHFL", "LDG", "ENDCOLLECTIVE", "BAR")


def operation(instruction):
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def functions(nvdisasm, cubin):
    """name -> (instructions, label -> index of the instruction behind it)"""
    text = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    found, current = {}, None
    for line in text.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\S+?),", line)
        if section:
            current = found.setdefault(section[1], ([], {}))
        if current is None:
            continue
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            current[1][label[1]] = len(current[0])
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line)
        if instruction:
            current[0].append(instruction[1])
    return found


def followers(instructions, labels, i):
    text = instructions[i]
    name = operation(text)
    target = re.search(r"`\((\.L_x_\d+)\)", text)
    to = [labels[target[1]]] if target and target[1] in labels else []
    if name.startswith("BRA.DIV"):  # taken if lanes have diverged, which they have not
        return [i + 1]
    if name.startswith("BRA.CONV"):  # taken if they have not
        return to
    if name.startswith("BRA") or name == "CALL.REL.NOINC":  # a call of a label is a far branch
        return to + ([i + 1] if text.startswith("@") or re.match(r"BRA\S*\s+!?U?P", text) else [])
    if name.startswith(("EXIT", "RET", "BRX", "JMP", "CALL")):
        return []
    return [i + 1]


def cheapest(instructions, labels, start, work):
    """The cheapest way from `start` back to it with so much of each kind of work; None if there is none."""
    names, goal = list(work), tuple(work.values())
    steps = [tuple(int(re.match(r"(@!?U?P\w+\s+)?" + name, text) is not None) for name in names) for text in instructions]
    rare = [operation(text).split(".")[0] in RARE for text in instructions]
    before, heap = {}, [(0, start, (0,) * len(goal), None)]
    while heap:
        cost, i, done, origin = heapq.heappop(heap)
        if cost > 0 and i == start and done == goal:
            way = [start]
            while origin is not None and origin in before:
                way.append(origin[0])
                origin = before[origin]
            return way[:-1]
        if (i, done) in before:
            continue
        before[i, done] = origin
        after = tuple(a + b for a, b in zip(done, steps[i]))
        if rare[i] or any(a > b for a, b in zip(after, goal)):
            continue
        for j in followers(instructions, labels, i):
            if j < len(instructions):
                heapq.heappush(heap, (cost + 1, j, after, (i, done)))
    return None


def bytes_of(kind, dim):
    """A token's, keys and values."""
    return {"f16": 4 * dim, "part": dim, "int8": 2 * (dim + dim // 16), "int4": dim + dim // 8}[kind]


def tokens_of(kind):
    """Those of a way through the loop."""
    return 2 * TILE if kind in ("int8", "int4") else TILE


def work_of(kind, dim):
    """What a way takes, and a mark of the code that does it. Codes are copied by 16 bytes a lane, plain coordinates of a quarter
    by 8."""
    steps, groups = dim // 16, dim // 64
    exponentials = {r"MUFU\.EX2": 4}
    if kind == "part":  # a quarter of the coordinates: the general loop, with copies of 8 bytes a lane
        work = {"HMMA": steps, "LDSM": steps // 2, **exponentials}
        return [{**work, r"LDGSTS\.\S*64 ": n} for n in range(16, 3, -1)], "LDSM"
    if kind == "f16":
        return [{"HMMA": 4 * steps, "LDSM": 2 * steps, r"LDGSTS\.\S*\.128 ": 8 * groups, **exponentials}], "LDSM"
    work = {"HMMA": 2 * (8 if kind == "int4" else 16) * groups, "MOVM": 2 * (2 if kind == "int4" else 4) * groups,
            r"MUFU\.EX2": 8}
    unit = 1 if kind == "int8" or groups == 1 else 2  # groups that are copied at once, of keys and of values, of two tiles
    rows = 2 if kind == "int4" and unit == 1 else 3  # instructions for a tile's part of it: four rows of 128 bytes each
    return [{**work, r"LDGSTS\.\S*\.128 ": 2 * 2 * rows * groups // unit}], "0xf000f," if kind == "int4" else "0x4341"


def wavefronts(instructions, kind, dim):
    """Of a way: 128 bytes each. A copy's are its bytes; lanes that read the same address share one."""
    sums = dim // 64 if kind in ("int8", "int4") else 0  # pairs of sums of queries: 8 bytes of four lanes are all that is read
    total = tokens_of(kind) * bytes_of(kind, dim) / 128 - sums
    for text in instructions:
        name = operation(text)
        if name.startswith(("LDS", "STS")) and not text.startswith("@!PT"):
            total += 4 if name.startswith("LDSM") or ".128" in name else 2 if ".64" in name else 1
    return total


def count(nvdisasm, cubin):
    """(head dimension, storage) -> (slots, wavefronts) of a token"""
    result = {}
    for name, (instructions, labels) in functions(nvdisasm, cubin).items():
        kernel = re.search(r"attend_sliceINS0_4halfES5_Li(\d+)ELi1E", name)
        if not kernel:
            continue
        dim = int(kernel[1])
        waits = [i for i, text in enumerate(instructions) if re.match(r"DEPBAR\.LE SB0, 0x[1-9]", text)]
        for kind in ("f16", "part", "int8", "int4"):
            works, mark = work_of(kind, dim)
            marks = [i for i, text in enumerate(instructions) if mark in text]
            near = [i for i in waits if marks[0] - 1500 <= i <= marks[-1]]
            ways = (cheapest(instructions, labels, i, work) for work in works for i in near)
            way = next((way for way in ways if way), None)
            if way is None:
                sys.exit(f"gpu_counts: {cubin}: no way through {kind} of {name}")
            tokens = tokens_of(kind)
            result[dim, kind] = (len(way) / tokens, wavefronts([instructions[i] for i in way], kind, dim) / tokens)
    return result


def resources(cuobjdump, cubin):
    text = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:\d+ LOCAL:(\d+)", text)
    kernels = {}
    for name, registers, local in found:
        kernel = re.search(r"attend_sliceINS0_4halfES5_Li(\d+)ELi1E", name)
        if kernel:
            kernels[int(kernel[1])] = (int(registers), int(local))
    return kernels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--nvdisasm", required=True)
    parser.add_argument("--cuobjdump", required=True)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("cubins", nargs="+")
    options = parser.parse_args()
    for program in (options.nvdisasm, options.cuobjdump):
        if not os.path.isfile(program):
            print(f"SKIPPED: gpu/counts: there is no {program or 'nvdisasm or cuobjdump'}")
            return 0
    os.environ["PATH"] = os.path.dirname(options.nvdisasm) + os.pathsep + os.environ.get("PATH", "")
    version = subprocess.run([options.nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    lines = [f"nvcc {re.search(r'release ([0-9.]+)', version)[1]}"]
    for cubin in options.cubins:
        architecture = re.search(r"(\d+)\D*$", os.path.splitext(os.path.basename(cubin))[0])[1]
        used = resources(options.cuobjdump, cubin)
        for (dim, kind), (slots, fronts) in sorted(count(options.nvdisasm, cubin).items()):
            registers, local = used[dim]
            warps = REGISTER_FILE // (registers * THREADS) * (THREADS // 32)
            lines.append(f"sm_{architecture} D={dim} {kind}: {slots:.1f} slots, {fronts:.1f} wavefronts a token; "
                         f"{registers} registers, {local} bytes spilled, {warps} warps by registers")
    print("\n".join(lines))
    if options.record:
        with open(RECORD, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        return 0
    with open(RECORD, encoding="utf-8") as file:
        recorded = file.read().splitlines()
    if recorded[0] != lines[0]:
        print(f"not compared: recorded with {recorded[0]}")
        return 0
    slots = {line.split(":")[0]: float(line.split()[3]) for line in recorded[1:]}
    grown = [line for line in lines[1:] if float(line.split()[3]) > 1.03 * slots.get(line.split(":")[0], 1e9)]
    for line in grown:
        print(f"grown: {line}; recorded {slots[line.split(':')[0]]}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
