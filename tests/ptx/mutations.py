#!/usr/bin/env python3
"""Puts faults into the machine code of the device tests, one kind at a time, and prints which of them the tests find.

    mutations.py MDKV_PTX_TESTS [NAME...]

MDKV_PTX_TESTS is the program of that name. Each fault changes every statement of PTX that a regular expression matches while
the program reads it (MDKV_PTX_MUTATE), so nothing is compiled. NAMEs choose among the faults (parts of their names; default:
all). Exit status 1 if one is not found. Takes some minutes, and is no test of CTest's.
"""
import os
import re
import subprocess
import sys

TILE = r"(mma\S*f32\.{0}\.{0}\.f32 \{{[^}}]*\}}), \{{([^,]*),([^,]*),([^,]*),([^}}]*)\}}, \{{([^,]*),([^}}]*)\}}, (.*)"
# name, which statements, what they become, which stages can meet them; why nothing can find it, where that is so
MUTATIONS = [
    ("copies of 16 bytes left out", r"cp\.async\.cg\.shared\.global.*", "", "attend"),
    ("copies of 16 bytes bring 8", r"(cp\.async\.cg.*), 16", "$1, 8", "attend"),
    ("copies of 8 bytes bring 4", r"(cp\.async\.ca.*), 8$", "$1, 4", "attend_alignment attend"),
    ("copies of 4 bytes left out", r"cp\.async\.ca.*, 4$", "", "attend attend_alignment"),
    ("copies of 4 bytes bring 8", r"(cp\.async\.ca.*), 4$", "$1, 8", "attend attend_alignment"),
    ("groups of copies are not ended", r"cp\.async\.commit_group", "", "attend"),
    ("no wait for copies", r"cp\.async\.wait_group.*", "", "attend"),
    ("the last wait for copies leaves a group", r"cp\.async\.wait_group 0", "cp.async.wait_group 1", "attend basis",
     "groups behind the last that is used are empty, so nothing is on its way there"),
    ("waits leave two groups, not one", r"cp\.async\.wait_group 1", "cp.async.wait_group 2", "attend"),
    ("waits leave five groups, not four", r"cp\.async\.wait_group 4", "cp.async.wait_group 5", "attend attend_alignment"),
    ("ldmatrix reads 16 bytes further on", r"(ldmatrix.*\[%r[0-9]+)\]", "$1+16]", "attend"),
    ("ldmatrix does not transpose", r"(ldmatrix.*)\.trans", "$1", "attend"),
    ("movmatrix does not transpose", r"movmatrix\S*", "mov.b32", "attend"),
    ("the power of two is left out", r"ex2\.approx\.ftz\.f32", "mov.f32", "attend"),
    ("no barrier", r"bar\.sync.*", "", "team attend"),
    ("lanes do not wait for their warp", r"bar\.warp\.sync.*", "", "attend score"),
    ("lanes exchange with others", r"shfl\.sync\.bfly", "shfl.sync.down", "device"),
    ("a vote says no", r"vote\.sync\.any\.pred (%p[0-9]+),.*", "mov.pred $1, 0", "attend score"),
    ("bytes of a word: the others", r"(mov\.u32 .*), 16960", "$1, 17217", "device attend"),
    ("threads read again are lanes", r"(mov\.u32 %r[0-9]+), %tid\.x", "$1, %laneid", "attend"),
]
for kind in ("f16", "bf16"):
    tile = TILE.format(kind)
    stages = "attend score" if kind == "f16" else "attend score attend_alignment"
    MUTATIONS += [
        (f"mma {kind}: rows of a exchanged", tile, "$1, {$3,$2,$4,$5}, {$6,$7}, $8", stages),
        (f"mma {kind}: columns of a exchanged", tile, "$1, {$4,$3,$2,$5}, {$6,$7}, $8", stages),
        (f"mma {kind}: halves of b exchanged", tile, "$1, {$2,$3,$4,$5}, {$7,$6}, $8", stages),
        (f"mma {kind}: a in the place of b", tile, "$1, {$2,$3,$4,$5}, {$2,$3}, $8", stages),
        (f"mma {kind}: left out", rf"mma\S*f32\.{kind}\..*", "", stages),
        (f"pair {kind}: halves exchanged", rf"(cvt\.rn\.{kind}x2\.f32) ([^,]*), ([^,]*), (.*)", "$1 $2, $4, $3", stages),
    ]


def run(program, stage, rule):
    """How the program's tests of a stage end with a fault put in: statements changed, and what found it (or '')."""
    environment = dict(os.environ, MDKV_PTX_MUTATE=rule, MDKV_TEST_LEAVE_SCRATCH="1")
    command = [program, f"--source-file=*/tests/gpu/{stage}.cu", "--no-path-filenames=true"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return 1, f"{stage}: no end"
    changed = re.search(r"PTX: (\d+) statements mutated", done.stdout)
    found = []
    failed = re.search(r"test cases:.*\| *(\d+) failed", done.stdout)
    if failed and int(failed[1]) > 0:
        found.append(f"{failed[1]} test cases")
    reports = re.findall(r"^ptx: ([^:]*): ", done.stderr, re.MULTILINE)
    found += sorted(set(reports))
    if done.returncode != 0 and not found:
        found.append(f"status {done.returncode} {done.stderr[-200:]}")
    return int(changed[1]) if changed else 0, f"{stage}: {', '.join(found)}" if found else ""


def main():
    program, wanted = sys.argv[1], sys.argv[2:]
    lost = 0
    print("| fault | statements | found by |\n|:--|--:|:--|", flush=True)
    for name, pattern, replacement, stages, *reason in MUTATIONS:
        if wanted and not any(word in name for word in wanted):
            continue
        most, finding = 0, ""
        for stage in stages.split():
            changed, finding = run(program, stage, f"{pattern}=>{replacement}")
            most = max(most, changed)
            if finding:
                break
        lost += not finding and not reason
        print(f"| {name} | {most} | {finding or 'nothing: ' + ''.join(reason or ['**not found**'])} |", flush=True)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
