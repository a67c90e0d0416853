#!/usr/bin/env python3
"""One table of KV caches inside llama.cpp: its own types, and mdkv's budgets. run.sh calls it.

    same_bytes.py MODEL --programs BIN --plugin libggml-mdkv.so --text PROSE --logs FOLDER
        [--columns quality,recall,speed] [--rows f16,q8_0,K8V4,q4_0,by_window:53.1%,...]

quality  bytes of everything in all attention layers, in % of f16's (and of the layers served, where others pass through);
         mean KL divergence from f16 over 1,023 tokens fed after 1,024, in as many texts as --chunks says; same likeliest token
recall   % of numbers of seven digits, hidden at ten places of about 2,000 tokens, that are answered where the question comes
         after the compression
speed    tokens a second, 64 decoded after --depths tokens, with --threads threads; in brackets without the one compression

Rows are what llama.cpp's -ctk and -ctv take, K8V4 (q8_0 keys, q4_0 values), and PRESET:BUDGET of mdkv.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

CACHE_TYPES = {"f16": ("f16", "f16"), "K8V4": ("q8_0", "q4_0")}
BITS = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5}
CITIES = "Lisbon Quito Oslo Cairo Lima Perth Osaka Turin Dakar Minsk".split()
PLACES = (10, 30, 50, 70, 90)
BATCH = 128  # the compression waits for the end of a batch
ANSWER_TOKENS = 24


class Row:
    def __init__(self, text):
        self.preset, _, self.budget = text.partition(":")
        self.ours = bool(self.budget)
        self.types = ("f16", "f16") if self.ours else CACHE_TYPES.get(text, (text, text))
        if not all(t in BITS for t in self.types):
            sys.exit(f"same_bytes.py: row {text} is none of {', '.join([*BITS, 'K8V4'])} and not PRESET:BUDGET")
        self.label = f"mdkv `{self.preset}`, {self.budget}" if self.ours else f"llama.cpp, {text}"
        self.name = text.replace(":", "-").rstrip("%")

    def environment(self, plugin, **more):
        """Of a program; the plug-in comes by LD_PRELOAD, because these programs have their backends linked in."""
        if not self.ours:
            return dict(os.environ)
        return {**os.environ, "MDKV_PRESET": self.preset, "MDKV_BUDGET": self.budget, "LD_PRELOAD": str(plugin), **more}

    def flags(self):
        return ["-fa", "on", "-ctk", self.types[0], "-ctv", self.types[1]]


def run(options, log, command, environment):
    """Standard output and error of a program, which are kept in `log`."""
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, errors="replace")
    pathlib.Path(options.logs, f"{log}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"same_bytes.py: {command[0]} failed: {options.logs}/{log}.log")
    return done.stdout, done.stderr


def said(pattern, text):
    found = re.search(pattern, text, re.M)
    return found[1] if found else "-"


class Quality:
    def __init__(self, options):
        self.options = options
        self.base = pathlib.Path(options.logs, "base.kld")
        self.command = [options.programs / "llama-perplexity", "-m", options.model, "-f", options.text, "-c", 2048, "-b", 512,
                        "-ub", 512, "--chunks", options.chunks, "-t", max(options.threads), "--kl-divergence-base", self.base]
        run(options, "quality-base", [*self.command, *Row("f16").flags()], dict(os.environ))

    def head(self):
        return ["bytes, %", "of the layers served", "perplexity", "mean KLD", "same top, %"]

    def cells(self, row):
        out, error = run(self.options, f"quality-{row.name}", [*self.command, "--kl-divergence", *row.flags()],
                         row.environment(self.options.plugin, MDKV_AT="1024"))
        both = out + error
        own = f"{100 * sum(BITS[t] for t in row.types) / 32:.1f}"
        shares = [said(p, both) for p in (r"mdkv: decoded .* ([\d.]+) % of the cells of all ",
                                          r"mdkv: decoded .* ([\d.]+) % of those of the \d+ served")]
        return [*(shares if row.ours else [own, own]), said(r"^Mean PPL\(Q\) +: +([\d.]+)", both),
                said(r"^Mean +KLD: +(\S+)", both), said(r"^Same top p: +([\d.]+)", both)]

    def end(self):
        self.base.unlink()


class Recall:
    def __init__(self, options):
        self.options = options
        words = pathlib.Path(options.text).read_text(encoding="utf-8").split()
        digits = random.Random(options.seed)
        self.samples = []  # prompt's file, number
        for i, city in enumerate(CITIES):
            own = words[i // len(PLACES) * 1400:][:1400]
            number = str(digits.randint(10 ** 6, 10 ** 7 - 1))
            place = len(own) * PLACES[i % len(PLACES)] // 100
            while place and not own[place - 1].endswith("."):
                place -= 1
            text = " ".join([*own[:place], f"The special magic number of {city} is {number}.", *own[place:]])
            path = pathlib.Path(options.logs, f"recall-{i}.txt")
            path.write_text(f"{text}\n\nWhat is the special magic number of {city}? Answer with the number only.\n")
            self.samples.append((path, number))
        self.tokens = {}  # of the prompts

    def head(self):
        return [f"number asked later, % of {len(self.samples)}"]

    def ask(self, row, path, **more):
        out, error = run(self.options, f"recall-{row.name}-{path.stem}",
                         [self.options.programs / "llama-completion", "-m", self.options.model, "-f", path, "-c", 4096, "-n",
                          ANSWER_TOKENS, "--temp", 0, "-ub", BATCH, "-t", max(self.options.threads), "--no-display-prompt",
                          "--no-warmup", "-st", *row.flags()], row.environment(self.options.plugin, **more))
        self.tokens.setdefault(path, int(said(r"prompt eval time = .* / +(\d+) tokens", error)))
        return out

    def cells(self, row):
        right = 0
        for path, number in self.samples:
            if row.ours and path not in self.tokens:
                self.ask(Row("f16"), path)
            # The last batch that is compressed ends before the question, which has some 30 tokens with the chat's own.
            more = {"MDKV_AT": str((self.tokens[path] - 40) // BATCH * BATCH)} if row.ours else {}
            right += number in self.ask(row, path, **more)
        return [f"{100 * right / len(self.samples):.0f}"]

    def end(self):
        for path, _ in self.samples:
            path.unlink()


class Speed:
    def __init__(self, options):
        self.options = options
        self.cases = [(depth, threads) for depth in options.depths for threads in options.threads]

    def head(self):
        return [f"tokens/s after {depth:,}, {threads} thread{'s' * (threads > 1)}" for depth, threads in self.cases]

    def cells(self, row):
        found = []
        for depth, threads in self.cases:
            out, error = run(self.options, f"speed-{row.name}-{depth}-{threads}",
                             [self.options.programs / "llama-bench", "-m", self.options.model, "-p", 0, "-n", 64, "-d", depth,
                              "-r", 1, "-t", threads, "-o", "jsonl", *row.flags()], row.environment(self.options.plugin))
            rate = next(json.loads(line)["avg_ts"] for line in out.splitlines() if line.startswith("{"))
            spent = re.search(r"compressed \d+ layers in ([\d.]+) s", error)
            without = f" ({64 / (64 / rate - float(spent[1])):.1f})" if spent else ""
            found.append(f"{rate:.1f}{without}")
        return found

    def end(self):
        pass


COLUMNS = {"quality": Quality, "recall": Recall, "speed": Speed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in re.split("[ ,]+", text)]
    words = lambda text: re.split("[ ,]+", text)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="folder of llama.cpp's")
    parser.add_argument("--plugin", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--logs", type=pathlib.Path, required=True, help="folder for the programs' output")
    parser.add_argument("--columns", type=words, default=list(COLUMNS))
    parser.add_argument("--rows", type=words, default=words("f16,q8_0,K8V4,q4_0,by_window:53.1%,by_window:28.1%,best:28.1%,"
                                                            "best:12.5%,any_question:12.5%"))
    parser.add_argument("--depths", type=numbers, default=[4096, 16384])
    parser.add_argument("--threads", type=numbers, default=[os.cpu_count()])
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=260320616, help="of the hidden numbers")
    options = parser.parse_args()
    for name in options.columns:
        if name not in COLUMNS:
            parser.error(f"--columns: {name} is none of {', '.join(COLUMNS)}")
    rows = [Row(text) for text in options.rows]
    options.logs.mkdir(parents=True, exist_ok=True)
    print(f"mdkv: {', '.join(options.columns)}: {len(rows)} rows, one after another", file=sys.stderr, flush=True)
    columns = [COLUMNS[name](options) for name in options.columns]
    head = [cell for column in columns for cell in column.head()]
    print(f"\n| cache | {' | '.join(head)} |\n|:--|{'--:|' * len(head)}", flush=True)
    for number, row in enumerate(rows, 1):
        begun = time.monotonic()
        cells = [cell for column in columns for cell in column.cells(row)]
        print("| " + " | ".join([row.label, *cells]) + " |", flush=True)
        print(f"mdkv: row {number} of {len(rows)}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    for column in columns:
        column.end()


if __name__ == "__main__":
    main()
