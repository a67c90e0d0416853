#!/usr/bin/env python3
"""Puts what tests/gpu.sh found into one JSON file.

    gpu_record.py --results LINES --output FILE --device NAME --driver V --memory M --clock C --architecture N BENCH.json...

LINES has lines `NAME STATUS`; each BENCH.json is a list of measurements as bench/gpu writes them.
"""
import argparse
import datetime
import json
import os
import subprocess


def commit():
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("results", "output", "device", "driver", "memory", "clock", "architecture"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("benches", nargs="*")
    options = parser.parse_args()
    with open(options.results, encoding="utf-8") as lines:
        results = dict(line.split(None, 1) for line in lines.read().splitlines() if line)
    measurements = []
    for path in options.benches:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                measurements += json.load(file)
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "device": options.device,
        "driver": options.driver,
        "memory": options.memory,
        "max_sm_clock": options.clock,
        "compute_capability": options.architecture,
        "results": results,
        "measurements": measurements,
    }
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
