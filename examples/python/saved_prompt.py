"""saved_prompt.py: a text is read once, compressed and saved; another process answers questions about it from the file.

    python saved_prompt.py                                # the reference model, 1,250 tokens, a quarter of the bytes
    python saved_prompt.py --model ~/.cache/mdkv/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf

Prints seconds and bytes, the answers of both processes, and how much of the file is resident in the second one.
"""
import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

import gguf_folder
import mdkv.transformers
import texts
import three_questions


def answers(model, tokenizer, ids, after, cache):
    """Of two questions, each asked of the text alone."""
    return [three_questions.ask(model, tokenizer, ids, after, cache, fact[1])[0] for fact in texts.FACTS[:2]]


@torch.no_grad()
def save(model, tokenizer, ids, after, path, budget, preset):
    """Reads and saves a text; what was measured, as a dictionary."""
    cache = mdkv.transformers.Cache(model.config, budget, preset)
    found = {"tokens": ids.shape[1], "read": three_questions.read(model, ids, cache)["read"]}
    start = time.perf_counter()
    cache.save(path, ids)
    return {**found, "saved": time.perf_counter() - start, "file": os.path.getsize(path),
            "cache": cache.report()["uncompressed_bytes"], "answers": answers(model, tokenizer, ids, after, cache)}


def resident(path):
    """KiB of a mapped file that are in memory, and those that no other process shares (Linux; elsewhere 0)."""
    smaps, sizes, inside = pathlib.Path("/proc/self/smaps"), {"Rss": 0, "Private_Dirty": 0}, False
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        name, *words = line.split()
        if not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name[:-1] in sizes:
            sizes[name[:-1]] += int(words[0])
    return sizes


def load(model, tokenizer, ids, after, path):
    """Answers from the file; what was measured, as a dictionary."""
    found = {}
    for verify in ("everything", "bounds"):
        for _ in range(2):  # the first time Python compiles
            start = time.perf_counter()
            cache = mdkv.transformers.Cache.load(path, model.config, ids, verify=verify)
            found[f"loaded, {verify}"] = time.perf_counter() - start
        del cache
        gc.collect()  # the file is mapped once
    cache = mdkv.transformers.Cache.load(path, model.config, ids, verify="bounds")
    found["resident"] = resident(path)
    found["answers"] = answers(model, tokenizer, ids, after, cache)
    return {**found, "resident after the answers": resident(path)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=1250)
    parser.add_argument("--budget", type=float, default=0.25, help="share of the bytes")
    parser.add_argument("--preset", default="best")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--load", help="a file that an earlier run saved: answer from it, and print what was measured as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model, tokenizer = gguf_folder.load(chosen.model)
    ids, after = three_questions.prompt_of(tokenizer, chosen.tokens)
    if chosen.load:
        return print(json.dumps(load(model, tokenizer, ids, after, chosen.load)))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "prompt.mdkv")
        here = save(model, tokenizer, ids, after, path, chosen.budget, chosen.preset)
        there = json.loads(subprocess.run([sys.executable, __file__, *sys.argv[1:], "--load", path], check=True, text=True,
                                          stdout=subprocess.PIPE).stdout.splitlines()[-1])
    for name, value in [*here.items(), *((f"another process: {name}", value) for name, value in there.items())]:
        print(f"{name}: {value:.4f} s" if isinstance(value, float) else f"{name}: {value}")
    print(f"the same answers: {here['answers'] == there['answers']}")


if __name__ == "__main__":
    main()
