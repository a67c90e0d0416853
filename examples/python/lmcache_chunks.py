"""lmcache_chunks.py: what LMCache's chunks lose, and cost, as stored caches of mdkv and as fp8.

    python lmcache_chunks.py --shares 0.36,0.5,0.6        # the reference model; needs lmcache (README.md)

Two chunks of 256 tokens are read, written and read again; 64 tokens follow. Prints KL divergence from the chunks themselves,
the share of tokens with the same most probable next one, and milliseconds of processor time for a chunk.
"""
import argparse
import copy
import time

import lmcache.v1.distributed.serde as serde
import torch
import transformers
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

import gguf_folder
import mdkv.lmcache
from mdkv.transformers import CACHE_ARGUMENT
import texts

CHUNKS, TOKENS, LATER = 2, 256, 64


def memory(shape, dtype):
    """A memory object of LMCache."""
    size = torch.Size(shape).numel() * dtype.itemsize
    about = MemoryObjMetadata(shape=torch.Size(shape), dtype=dtype, address=0, phy_size=size, ref_count=1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(torch.zeros(size, dtype=torch.uint8), about, None)


def chunk_of(cache, first):
    """Tokens first, first + 1, ... of a DynamicCache as a chunk [2, L, T, H*D] of halves."""
    heads, dim = cache.layers[0].keys.shape[1], cache.layers[0].keys.shape[3]
    chunk = memory((2, len(cache.layers), TOKENS, heads * dim), torch.float16)
    for i, layer in enumerate(cache.layers):
        for j, rows in enumerate((layer.keys, layer.values)):
            chunk.tensor[j, i].copy_(rows[0, :, first:first + TOKENS].transpose(0, 1).reshape(TOKENS, -1))
    return chunk


def through(cache, serializer, deserializer):
    """A cache whose chunks were written and read again; share of the bytes, milliseconds of writing and of reading a chunk."""
    made, key, written, seconds = copy.deepcopy(cache), ObjectKey(chunk_hash=b"1", model_name="m", kv_rank=0), 0, [0.0, 0.0]
    for number in range(CHUNKS):
        chunk = back = chunk_of(cache, number * TOKENS)
        if serializer is not None:
            layout = MemoryLayoutDesc(shapes=[chunk.tensor.shape], dtypes=[chunk.tensor.dtype])
            between = memory((serializer.estimate_serialized_size(layout),), torch.uint8)
            back, start = memory(chunk.tensor.shape, torch.float16), time.process_time()
            written += serializer.serialize(chunk, between, key)
            middle = time.process_time()
            deserializer.deserialize(between, back, key)
            seconds = [seconds[0] + middle - start, seconds[1] + time.process_time() - middle]
        for i, layer in enumerate(made.layers):
            for j, rows in enumerate((layer.keys, layer.values)):
                place = rows[0, :, number * TOKENS:(number + 1) * TOKENS]
                place.copy_(back.tensor[j, i].reshape(TOKENS, place.shape[0], -1).transpose(0, 1))
    return made, written / (CHUNKS * chunk.get_size()), *(1000 * one / CHUNKS for one in seconds)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--shares", default="0.36,0.5,0.6", help="of the bytes")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model, tokenizer = gguf_folder.load(chosen.model)
    ids = tokenizer(texts.prose(2), return_tensors="pt").input_ids[:, :CHUNKS * TOKENS + LATER]
    cache = transformers.DynamicCache(config=model.config)
    model(ids[:, :CHUNKS * TOKENS], **{CACHE_ARGUMENT: cache})
    dim = cache.layers[0].keys.shape[3]

    def distributions(of):
        return model(ids[:, CHUNKS * TOKENS:], **{CACHE_ARGUMENT: of}).logits.double().log_softmax(-1)

    full = distributions(through(cache, None, None)[0])
    print("| serde | bytes | KL | same top | writing | reading |\n|:--|--:|--:|--:|--:|--:|")
    pairs = [("LMCache's fp8", serde.Fp8QuantizationSerializer(), serde.Fp8QuantizationDeserializer())]
    pairs += [("mdkv", mdkv.lmcache.MdkvSerializer(dim, float(share)), mdkv.lmcache.MdkvDeserializer(dim))
              for share in chosen.shares.split(",")]
    for name, *pair in pairs:
        made, share, *milliseconds = through(cache, *pair)
        other = distributions(made)
        kl = float((full.exp() * (full - other)).sum(-1).mean())
        top = float((full.argmax(-1) == other.argmax(-1)).double().mean())
        print(f"| {name} | {share:.1%} | {kl:.5f} | {top:.1%} | {milliseconds[0]:.1f} | {milliseconds[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
