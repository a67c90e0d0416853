#!/usr/bin/env python3
"""Measures what it costs to include each public header alone, and to compile each example.

    compile_cost.py [--compiler CXX] [--runs N] [--only PATTERN] [--include FOLDER]... [--flags FLAGS]

Prints a Markdown table: user seconds and peak memory of the compiler, and their ratios to those of including
<Eigen/Eigenvalues> with the same compiler and flags in the same run. Eigenvalues is compiled again between the others, and
each figure is the least of all runs, so that what else the machine does counts little. Exit status 1 if something does not
compile.
"""
import argparse
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "Eigen/Eigenvalues"
BETWEEN_BASELINES = 8


def eigen_folders():
    """The folder of Eigen's headers, by pkg-config or where distributions put them."""
    if shutil.which("pkg-config"):
        flags = subprocess.run(["pkg-config", "--cflags-only-I", "eigen3"], capture_output=True, text=True, check=False).stdout
        found = [flag[2:] for flag in shlex.split(flags)]
        if found:
            return found
    return [folder for folder in ("/usr/include/eigen3", "/usr/local/include/eigen3") if os.path.isdir(folder)]


def units():
    """(name, source text) of what is measured."""
    include = ROOT / "include"
    headers = [include / "mdkv/mdkv.hpp"]
    for folder in ("mdkv", "mdkv/core", "mdkv/cpu"):
        headers += [path for path in sorted((include / folder).glob("*.hpp")) if path not in headers]
    for path in headers:
        name = path.relative_to(include).as_posix()
        yield name, f"#include <{name}>\n"
    for path in sorted((ROOT / "examples").glob("*.cpp")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def compile_once(command, source, folder):
    """(user seconds, peak megabytes) of the compiler and what it starts; the messages, where it fails."""
    path = Path(folder) / "unit.cpp"
    path.write_text(source, encoding="utf-8")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as messages:
        process = subprocess.Popen([*command, "-c", str(path), "-o", os.devnull], stderr=messages)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # it is waited for: Popen must not do so again
        if process.returncode != 0:
            messages.seek(0)
            return None, messages.read()
    return (usage.ru_utime, usage.ru_maxrss * 1024 / 1e6), ""


def measured(chosen, command, runs, folder):
    """{name: (least seconds, least megabytes)}, the baseline included; None for what does not compile."""
    least = {}

    def measure(name, source):
        if name in least and least[name] is None:
            return
        cost, messages = compile_once(command, source, folder)
        if cost is None:
            print(f"{name} does not compile:\n{messages[:2000]}", file=sys.stderr)
            least[name] = None
        else:
            least[name] = tuple(map(min, cost, least.get(name, cost)))

    for run in range(runs):
        for at, (name, source) in enumerate(chosen):
            if at % BETWEEN_BASELINES == 0:
                measure(BASELINE, f"#include <{BASELINE}>\n")
            print(f"run {run + 1} of {runs}, {at + 1} of {len(chosen)}: {name}", file=sys.stderr)
            measure(name, source)
    return least


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"))
    parser.add_argument("--flags", default="-std=c++20 -O3 -march=native", help="one argument; default: %(default)s")
    parser.add_argument("--include", action="append", metavar="FOLDER",
                        help="with Eigen's headers; default: pkg-config's, or where distributions put them")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names to measure, e.g. 'mdkv/cpu/*' or '*hook.cpp'")
    parser.add_argument("--runs", type=int, default=3, help="of which the least counts; default: %(default)s")
    options = parser.parse_args()

    chosen = [unit for unit in units() if fnmatch.fnmatch(unit[0], options.only)]
    if not chosen or options.runs < 1:
        parser.error(f"nothing to measure: no name matches {options.only}" if not chosen else "--runs must be at least 1")
    folders = options.include or eigen_folders()
    command = [options.compiler, *shlex.split(options.flags), f"-I{ROOT / 'include'}", *(f"-isystem{f}" for f in folders)]
    print("$ " + shlex.join(command), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        least = measured(chosen, command, options.runs, folder)
    base = least[BASELINE]
    if base is None:
        return 1
    print(f"| compiled | user seconds | of `<{BASELINE}>` | peak MB | of `<{BASELINE}>` |")
    print("|---|--:|--:|--:|--:|")
    for name, _ in [(BASELINE, ""), *chosen]:
        cost = least[name]
        print(f"| `{name}` | does not compile | | | |" if cost is None else
              f"| `{name}` | {cost[0]:.2f} | {cost[0] / base[0]:.2f} | {cost[1]:.0f} | {cost[1] / base[1]:.2f} |")
    return 1 if None in least.values() else 0


if __name__ == "__main__":
    sys.exit(main())
