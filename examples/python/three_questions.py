"""three_questions.py: a text is read once and compressed; three questions are asked about it, one after the other.

    python three_questions.py                            # the reference model, 4,000 tokens, an eighth of the bytes
    python three_questions.py --model ~/.cache/mdkv/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf

Prints answers, bytes, seconds, peak and resident memory beside transformers' own cache. Memory is the process's anonymous
memory above its state before the text (Linux; elsewhere 0). `any_question` compresses when all layers have been read, `by_window` layer after layer, so that its peak is lower.
"""
import argparse
import ctypes
import gc
import pathlib
import time

import torch
from transformers import DynamicCache

import gguf_folder
import mdkv.transformers
from mdkv.transformers import CACHE_ARGUMENT
import texts


def keep_memory_apart():
    """Lets glibc give every large tensor pages of its own, so that freed ones leave no holes between tensors that stay. By
    default tensors below 32 MiB share one heap after a while; with it the peak of each cache is up to twice as high."""
    try:
        ctypes.CDLL("libc.so.6").mallopt(-3, 131072)  # M_MMAP_THRESHOLD
    except (OSError, AttributeError):  # another C library
        pass


def memory(name):
    """Bytes of an entry of /proc/self/status, such as RssAnon or VmHWM, after free memory was given back; 0 without one."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return 0
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        pass
    return 1024 * next((int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name + ":")), 0)


def prompt_of(tokenizer, tokens):
    """Token ids [1, N] of a chat up to the end of a text of about so many tokens, and the text of the chat after a question."""
    mark = "\u241e"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": texts.document(tokenizer, tokens - 40) + mark}],
                                         add_generation_prompt=True, tokenize=False)
    before, after = chat.split(mark)
    return tokenizer(before, return_tensors="pt", add_special_tokens=False).input_ids, after


@torch.no_grad()
def read(model, ids, cache, chunk=None):
    """Reads a text, [1, N], in one call or by calls of `chunk` tokens; returns seconds, and bytes of resident and of peak memory above the state before."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    except OSError:
        pass
    before, start = memory("RssAnon"), time.perf_counter()
    resident = memory("VmRSS")
    mdkv.transformers.read(model, ids, cache, chunk or ids.shape[1])
    seconds = time.perf_counter() - start
    return {"read": seconds, "peak": max(memory("VmHWM") - resident, 0), "resident": memory("RssAnon") - before}


def ask(model, tokenizer, ids, after, cache, question, new_tokens=24):
    """The answer to a question about the text in the cache, which is afterwards as it was before; and seconds."""
    asked = tokenizer(question + after, return_tensors="pt", add_special_tokens=False).input_ids
    ids, start = torch.cat([ids, asked], dim=1), time.perf_counter()
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache}, max_new_tokens=new_tokens,
                            do_sample=False)[0, ids.shape[1]:]
    cache.crop(-(cache.get_seq_length() - ids.shape[1] + asked.shape[1]))
    return tokenizer.decode(answer, skip_special_tokens=True).strip(), time.perf_counter() - start


def run(model, tokenizer, ids, after, cache):
    """Reads the text into a cache and asks three questions; everything measured, as a dictionary."""
    found = read(model, ids, cache)
    if isinstance(cache, mdkv.transformers.Cache):
        found["bytes"] = cache.report()["held_bytes"]
    else:
        found["bytes"] = sum(one.keys.nbytes + one.values.nbytes for one in cache.layers)
    asked = [ask(model, tokenizer, ids, after, cache, fact[1]) for fact in texts.FACTS[:3]]
    return {**found, "answers": [answer for answer, _ in asked], "asked": sum(seconds for _, seconds in asked)}


def table(found):
    """Lines that compare what `run` returned, by name."""
    lines = [f"{'cache':<22}{'cache MiB':>10}{'resident MiB':>14}{'peak MiB':>10}{'read s':>8}{'three answers s':>17}"]
    for name, one in found.items():
        sizes = [one[key] / 2**20 for key in ("bytes", "resident", "peak")]
        lines.append(f"{name:<22}{sizes[0]:>10.1f}{sizes[1]:>14.1f}{sizes[2]:>10.1f}{one['read']:>8.1f}{one['asked']:>17.1f}")
    for i, fact in enumerate(texts.FACTS[:3]):
        lines += [fact[1].strip()] + [f"    {name:<22}{one['answers'][i]!r}" for name, one in found.items()]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--budget", type=float, default=0.125, help="share of the bytes")
    parser.add_argument("--presets", default="any_question,by_window")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    keep_memory_apart()
    model, tokenizer = gguf_folder.load(chosen.model)
    ids, after = prompt_of(tokenizer, chosen.tokens)
    with torch.no_grad():
        model(ids[:, :64], logits_to_keep=1)  # memory that is taken once is taken now
    print(f"{ids.shape[1]} tokens, {100 * chosen.budget:.1f} % of the bytes, mdkv compiled for {mdkv.compiled_for}")
    found = {"DynamicCache": run(model, tokenizer, ids, after, DynamicCache(config=model.config))}
    for preset in chosen.presets.split(","):
        cache = mdkv.transformers.Cache(model.config, chosen.budget, preset)
        found[f"mdkv {preset}"] = run(model, tokenizer, ids, after, cache)
        del cache
    print("\n".join(table(found)))
    whole = found["DynamicCache"]
    for name, one in list(found.items())[1:]:
        print(f"{name}: resident memory is lower by {(whole['resident'] - one['resident']) / 2**20:.1f} MiB, by the report "
              f"{(whole['bytes'] - one['bytes']) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
