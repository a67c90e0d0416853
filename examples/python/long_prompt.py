"""long_prompt.py: peak memory of a prompt that is compressed while it is read, beside prompts that are held until their end.

    python long_prompt.py                                # the reference model, 4,000 tokens, an eighth of the bytes

All caches read the prompt by calls of --chunk tokens, each in a process of its own. The peak is that of resident memory above the
state before the prompt, activations and scratch memory included (Linux).
"""
import argparse
import multiprocessing

import torch
from transformers import DynamicCache

import gguf_folder
import mdkv.transformers
import texts
from three_questions import ask, keep_memory_apart, prompt_of, read


def measure(chosen, name):
    """A line of the table."""
    torch.set_num_threads(chosen.threads)
    keep_memory_apart()
    model, tokenizer = gguf_folder.load(chosen.model)
    ids, after = prompt_of(tokenizer, chosen.tokens)
    mdkv.transformers.read(model, ids[:, : chosen.chunk], DynamicCache(config=model.config))  # memory that is taken once is taken now
    if name == "DynamicCache":
        cache = DynamicCache(config=model.config)
    else:
        cache = mdkv.transformers.Cache(model.config, chosen.budget, chosen.preset, prompt_tokens=ids.shape[1],
                                        while_reading=name == "while reading")
    found = read(model, ids, cache, chosen.chunk)
    whole = name == "DynamicCache"
    held = sum(one.keys.nbytes + one.values.nbytes for one in cache.layers) if whole else cache.report()["bytes"]
    each = (held if whole else cache.report()["uncompressed_bytes"]) / ids.shape[1]
    sizes = [size / 2**20 for size in (held, 1.5 * held + chosen.chunk * each, found["peak"], 0 if whole else cache.backend.scratch_bytes)]
    answers = [ask(model, tokenizer, ids, after, cache, fact[1])[0] for fact in texts.FACTS]
    right = sum(fact[2] in answer for fact, answer in zip(texts.FACTS, answers))
    return (f"{name:<16}{sizes[0]:>10.1f}{sizes[1]:>24.1f}{sizes[2]:>10.1f}{sizes[3]:>13.1f}{found['read']:>8.1f}{right:>7} of "
            f"{len(answers)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--budget", type=float, default=0.125, help="share of the bytes")
    parser.add_argument("--preset", default="any_question")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    print(f"{'cache':<16}{'cache MiB':>10}{'1.5 of it and a chunk':>24}{'peak MiB':>10}{'scratch MiB':>13}{'read s':>8}{'answers':>12}")
    for name in ("DynamicCache", "held", "while reading"):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            print(process.apply(measure, (chosen, name)), flush=True)


if __name__ == "__main__":
    main()
