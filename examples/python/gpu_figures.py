"""gpu_figures.py: what gpu.sh measures of mdkv.transformers on a GPU, as a table and, with --json, a list of dictionaries:

    python gpu_figures.py memory others                  # bytes and tokens a second, beside other compressed caches
    python gpu_figures.py quality --model FILE.gguf      # answers, and KL of eight texts, beside the CPU's
    python gpu_figures.py memory others --device cpu --tokens 200 --small     # shows that it runs

The model of `memory` and `others` has random weights: two layers of Llama-3-8B's shapes, with fewer words. `held MiB` is how much
torch.cuda.memory_allocated grew by the prompt, `report MiB` what the cache itself says. `others` are kvpress' SnapKV and
transformers' QuantizedCache, where they are installed.
"""
import argparse
import contextlib
import json
import time

import torch
import transformers
from transformers import DynamicCache

import mdkv.transformers
from mdkv.transformers import CACHE_ARGUMENT

SHAPES = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
SMALL = dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
BUDGETS = (0.25, 0.1)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device):
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@torch.no_grad()
def measure(model, ids, make, press=None, steps=64):
    """A row of the table: make() returns a cache, or None, with which the press makes one; `ids` [1, N] are read in one call."""
    device = ids.device.type
    before = allocated(device)
    cache, start = make(), time.perf_counter()
    with press(model) if press else contextlib.nullcontext():
        model(ids, **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    wait(device)
    read, held, one = time.perf_counter() - start, allocated(device) - before, ids[:, :1].contiguous()
    for i in range(steps + 4):
        if i == 4:  # memory that is taken once has been taken
            wait(device)
            start = time.perf_counter()
        model(one, **{CACHE_ARGUMENT: cache})
    wait(device)
    row = {"tokens": ids.shape[1], "held": held, "read_seconds": read, "tokens_per_second": steps / (time.perf_counter() - start)}
    if isinstance(cache, mdkv.transformers.Cache):
        row["report"] = cache.report()["held_bytes"]
    return row


def caches(config):
    """Name, and what makes the cache, of those that `memory` compares."""
    yield "sdpa, DynamicCache", lambda: DynamicCache(config=config)
    for preset in ("by_window", "best"):
        for budget in BUDGETS:
            yield f"mdkv {preset} {100 * budget:.0f} %", lambda p=preset, b=budget: mdkv.transformers.Cache(config, b, p)


def others(config):
    """The same of other packages' caches; with a press, if one makes them."""
    try:
        from kvpress import SnapKVPress
        for budget in BUDGETS:
            yield f"kvpress SnapKV {100 * budget:.0f} %", lambda: DynamicCache(config=config), SnapKVPress(1 - budget)
    except ImportError as problem:
        print(f"SKIPPED: kvpress: {problem}")
    for backend in ("quanto", "hqq"):
        try:
            transformers.QuantizedCache(backend, config)
        except (ImportError, AttributeError, ValueError) as problem:
            print(f"SKIPPED: QuantizedCache, {backend}: {str(problem).splitlines()[0]}")
        else:
            yield f"QuantizedCache {backend}", lambda b=backend: transformers.QuantizedCache(b, config), None


def of_random_model(parts, device, lengths, small):
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**(SMALL if small else SHAPES), num_hidden_layers=2, vocab_size=1024, rope_theta=5e5,
                                      max_position_embeddings=max(lengths) + 256)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    model.set_attn_implementation("sdpa")
    kinds = [(*one, None) for one in caches(model.config)] if "memory" in parts else []
    kinds += list(others(model.config)) if "others" in parts else []
    for length in lengths:
        ids = torch.randint(0, 1024, (1, length), device=device)
        for name, make, press in kinds:
            try:
                row = measure(model, ids, make, press, 4 if small else 64)
            except Exception as problem:  # the other rows are wanted all the same
                print(f"FAILED: {name}, {length} tokens: {type(problem).__name__}: {str(problem)[:200]}")
                yield {"part": "memory", "cache": name, "tokens": length, "error": repr(problem)[:500]}
                continue
            sizes = [row["held"] / 2**20, row.get("report", 0) / 2**20]
            print(f"{name:<24}{length:>8} tokens{sizes[0]:>10.1f} held MiB{sizes[1]:>10.1f} report MiB{row['read_seconds']:>8.2f} s to "
                  f"read{row['tokens_per_second']:>9.1f} tokens/s", flush=True)
            yield {"part": "memory", "cache": name, **row}


@torch.no_grad()
def logits(model, ids, prompt, budget):
    """Logits of what comes after a prompt; budget None: transformers' own cache."""
    ids = ids.to(model.device)
    cache = DynamicCache(config=model.config) if budget is None else mdkv.transformers.Cache(model.config, budget, "best")
    model(ids[:, :prompt].contiguous(), **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    return model(ids[:, prompt:].contiguous(), **{CACHE_ARGUMENT: cache}).logits.double().log_softmax(-1).cpu()


def of_model(file, device, tokens, texts_read):
    """Answers to three questions; mean KL of the compressed cache's logits from those of the float model with all bytes."""
    import gguf_folder
    import texts
    import three_questions

    model, tokenizer = gguf_folder.load(file)
    model = model.to(torch.float32)
    ids = [tokenizer(texts.prose(1 + i), return_tensors="pt").input_ids[:, : tokens + 64] for i in range(texts_read)]
    whole = [logits(model, one, tokens, None) for one in ids]
    prompt, after = three_questions.prompt_of(tokenizer, 4 * tokens)
    for name, to, dtype in (("CPU float", "cpu", torch.float32), ("CPU bfloat16", "cpu", torch.bfloat16), (f"{device} bfloat16", device, torch.bfloat16)):
        model = model.to(to, dtype)
        found = [logits(model, one, tokens, 0.25) for one in ids]
        divergence = sum(float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(whole, found)) / texts_read
        document = prompt.to(to)
        cache = mdkv.transformers.Cache(model.config, 0.25, "any_question")
        mdkv.transformers.read(model, document, cache, document.shape[1])
        answers = []
        for _, question, fact in texts.FACTS[:3]:
            asked = tokenizer(question + after, return_tensors="pt", add_special_tokens=False).input_ids.to(to)
            both = torch.cat([document, asked], 1)
            answer = model.generate(both, attention_mask=torch.ones_like(both), **{CACHE_ARGUMENT: cache}, max_new_tokens=24,
                                    do_sample=False)[0, both.shape[1]:]
            cache.crop(-(cache.get_seq_length() - document.shape[1]))
            answers.append(tokenizer.decode(answer, skip_special_tokens=True).strip())
        right = sum(fact[2] in answer for fact, answer in zip(texts.FACTS, answers))
        print(f"{name:<16} KL {divergence:.5f} nats of {texts_read} texts; {right} of 3 answers: {answers}", flush=True)
        yield {"part": "quality", "model": str(file), "on": name, "kl": divergence, "right": right, "answers": answers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("quality", "memory", "others"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", action="append", default=[], help="GGUF file, for quality")
    parser.add_argument("--tokens", default="2000,8000,32000", help="lengths of prompts; quality reads a quarter of the first one")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="smaller layers")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    lengths = [int(one) for one in chosen.tokens.split(",")]
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    rows = [{"part": "machine", "device": name, "torch": torch.__version__, "transformers": transformers.__version__, **mdkv.build()}]
    print(rows[0])

    def kept(more):
        for row in more:
            rows.append(row)
            if chosen.json:  # whatever ends the program, what was measured is there
                with open(chosen.json, "w") as file:
                    json.dump(rows, file, indent=1)

    if {"memory", "others"} & set(chosen.parts):
        kept(of_random_model(chosen.parts, chosen.device, lengths, chosen.small))
    for file in chosen.model if "quality" in chosen.parts else []:
        kept(of_model(file, chosen.device, max(lengths[0] // 4, 64), chosen.texts))


if __name__ == "__main__":
    main()
