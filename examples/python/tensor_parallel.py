"""tensor_parallel.py: a model whose heads are spread over processes by transformers' tensor parallelism, one budget over all.

    torchrun --nproc-per-node 3 tensor_parallel.py       # the reference model has 3 KV heads
    torchrun --nproc-per-node 2 tensor_parallel.py --model ~/.cache/mdkv/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf
    torchrun --nproc-per-node 3 tensor_parallel.py --later 200 --tail 16     # later tokens one by one, folded into the same bytes

Each process loads its share of the weights and compresses its own heads, over gloo; then process 0 reads the same text alone.
Prints bytes, the KL of each cache to the full one, the beginning of an answer, and how many tokens have the same rung. The sums
of hidden states over processes are rounded in another order, so that last bits of keys may differ; with equal keys all rungs are
equal, bit for bit (tests/test_tensor_parallel.py).
"""
import argparse
import os
import warnings

import torch
import torch.distributed as dist
from transformers import DynamicCache

import gguf_folder
import mdkv.transformers
from mdkv.transformers import CACHE_ARGUMENT
import texts


@torch.no_grad()
def measured(model, ids, tokens, question, make, processes, step=None):
    """The first `tokens` of ids [1, N] are read into a cache that make(config) returns, the others score it, `step` in a call (None:
    all). Returns bytes of the prompt's tokens, with folds of all, logarithms of the probabilities behind the latter [N - tokens,
    words], for each layer and head the rungs, and the ids of an answer; bytes and rungs of all processes, in their order."""
    cache = make(model.config)
    model(ids[:, :tokens], **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    own = sum(one.keys.nbytes + one.values.nbytes for one in cache.layers), []
    rows = [model(part, **{CACHE_ARGUMENT: cache}).logits[0] for part in ids[:, tokens:].split(step or ids.shape[1], dim=1)]
    if not isinstance(cache, DynamicCache):
        own = sum(one["bytes"]["arena"] for one in cache.report()["layers"]), [torch.from_numpy(one[0]) for one in cache.rungs]
    answer = model.generate(**question, **{CACHE_ARGUMENT: make(model.config)}, max_new_tokens=10, do_sample=False)
    everyone = [own]
    if processes > 1:
        everyone = [None] * processes
        dist.all_gather_object(everyone, own)
    rows = torch.cat(rows).double().log_softmax(-1)
    return {"bytes": sum(size for size, _ in everyone), "rows": rows, "answer": answer[0, question["input_ids"].shape[1]:],
            "rungs": [torch.cat(parts) for parts in zip(*(rungs for _, rungs in everyone))]}


def table(found, tokenizer):
    """Lines that compare what `measured` returned, by name."""
    full = found["1 process, full"]["rows"]
    for name, one in found.items():
        kl = float((full.exp() * (full - one["rows"])).sum(-1).mean())
        yield f"{name:<28}{one['bytes'] / 2**20:>7.2f} MiB{kl:>11.6f}  {tokenizer.decode(one['answer'])!r}"


def compared(several, one):
    """A line about the rungs of several processes' heads beside one process's."""
    same = [float((a == b).float().mean()) for layers in zip(several["rungs"], one["rungs"]) for a, b in zip(*layers)]
    return f"{sum(share == 1 for share in same)} of {len(same)} heads have the same rungs everywhere, " \
           f"all heads the same at {100 * sum(same) / len(same):.4f} % of the tokens"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens that are compressed")
    parser.add_argument("--later", type=int, default=96, help="tokens after them, by which caches are compared")
    parser.add_argument("--budget", type=float, default=0.125, help="share of the bytes")
    parser.add_argument("--preset", default="best")
    parser.add_argument("--tail", type=int, help="later tokens that stay as they are, before they are folded; default: all")
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node, as many processes as KV heads or a divisor of them")
    torch.set_num_threads(1)
    model, tokenizer = gguf_folder.load(chosen.model, tp_plan="auto")  # starts the group of all processes
    size = dist.get_world_size()
    ids = tokenizer(texts.prose(), return_tensors="pt").input_ids[:, : chosen.tokens + chosen.later]
    fact = texts.FACTS[1]
    question = [{"role": "user", "content": texts.document(tokenizer, chosen.tokens // 2, [fact]) + fact[1]}]
    question = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    cache = lambda budget, group: lambda config: mdkv.transformers.Cache(config, budget, chosen.preset, group=group, tail=chosen.tail,
                                                                             keep_rungs=True)
    full, everyone = lambda config: DynamicCache(config=config), dist.group.WORLD
    caches = {"full": full, "100 %": cache(1.0, everyone), "one budget": cache(chosen.budget, everyone),
              "equal shares": cache(chosen.budget, None)}
    step = chosen.tail and 1
    found = {f"{size} processes, {name}": measured(model, ids, chosen.tokens, question, make, size, step)
             for name, make in caches.items()}
    if dist.get_rank() == 0:
        model, _ = gguf_folder.load(chosen.model)
        caches = {"full": full, "100 %": cache(1.0, None), "one budget": cache(chosen.budget, None)}
        found.update({f"1 process, {name}": measured(model, ids, chosen.tokens, question, make, 1, step)
                      for name, make in caches.items()})
        folded = f", tail {chosen.tail}" if chosen.tail else ""
        print(f"{chosen.tokens} tokens, {100 * chosen.budget:g} % of the bytes, preset {chosen.preset}{folded}; after the bytes KL in nats")
        print("\n".join(table(found, tokenizer)))
        several, one = (found[f"{name}, one budget"] for name in (f"{size} processes", "1 process"))
        print(compared(several, one))
        rows = (found[f"{name}, full"]["rows"] for name in (f"{size} processes", "1 process"))
        print(f"log-probabilities of the full caches of {size} processes and of 1 differ by up to "
              f"{float(torch.sub(*rows).abs().max()):.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*tp_plan.*")
    main()
