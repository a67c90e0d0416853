"""long_prompt.py: peak memory of a prompt that is compressed while it is read, beside prompts that are held until their end.

    python long_prompt.py                                # the reference model, 4,000 tokens, an eighth of the bytes

All caches read the prompt by calls of --chunk tokens, each in a process of its own. The peak is resident memory's above the state
before the prompt, with activations and scratch memory (Linux)."""
import argparse
import multiprocessing

import torch
from transformers import DynamicCache

import gguf_folder
import mdkv.transformers
import texts
from three_questions import ask, keep_memory_apart, prompt_of, read

NAMES = ("DynamicCache", "held", "while reading")


def measure(chosen, name):
    """A line of the table, in a process of its own."""
    torch.set_num_threads(chosen.threads)
    keep_memory_apart()
    model, tokenizer = gguf_folder.load(chosen.model)
    return line(chosen, name, model, tokenizer, *prompt_of(tokenizer, chosen.tokens))


def line(chosen, name, model, tokenizer, ids, after):
    mdkv.transformers.read(model, ids[:, : chosen.chunk], DynamicCache(config=model.config))  # memory that is taken once is taken now
    whole = name == "DynamicCache"
    cache = DynamicCache(config=model.config) if whole else mdkv.transformers.Cache(
        model.config, chosen.budget, chosen.preset, while_reading=name == "while reading")
    found = read(model, ids, cache, chosen.chunk)
    report = {} if whole else cache.report()
    full = sum(one.keys.nbytes + one.values.nbytes for one in cache.layers) if whole else report["uncompressed_bytes"]
    held = report.get("bytes", full)
    sizes = (held, 1.5 * held + chosen.chunk * full / ids.shape[1], found["peak"])
    answers = [ask(model, tokenizer, ids, after, cache, fact[1])[0] for fact in texts.FACTS]
    right = sum(fact[2] in answer for fact, answer in zip(texts.FACTS, answers))
    return f"{name:<14}" + "".join(f"{size / 2**20:>15.1f}" for size in sizes) + f"{found['read']:>10.1f}{right:>5} of {len(answers)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--budget", type=float, default=0.125, help="share of the bytes")
    parser.add_argument("--preset", default="any_question")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    print(f"{'MiB':<14}" + "".join(f"{name:>15}" for name in ("cache", "1.5 + a chunk", "peak")) + f"{'read s':>10}{'right':>10}")
    for name in NAMES:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            print(process.apply(measure, (chosen, name)), flush=True)


if __name__ == "__main__":
    main()
