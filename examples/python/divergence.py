"""divergence.py: how far next-token distributions are from the full cache's, in nats, beside those of `mdkv_run compare`.

    python divergence.py TEXT --kv-sizes 128,256          # 2,048 tokens are read and compressed, then 128 are fed one by one
    mdkv_run compare --model MODEL --text TEXT --element f32 --kv-size 128,256

Both run the model in float32; the weights of the file are dequantised alike.
"""
import argparse
import pathlib

import torch
from transformers import DynamicCache

import gguf_folder
import mdkv.transformers
from mdkv.transformers import CACHE_ARGUMENT


@torch.no_grad()
def distributions(model, ids, cache, prompt):
    """Logarithms of the probabilities behind each token after the first `prompt` ones of ids [1, N]: [N - prompt, words]."""
    model(ids[:, :prompt], **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
    rows = [model(ids[:, i:i + 1], **{CACHE_ARGUMENT: cache}).logits[:, -1] for i in range(prompt, ids.shape[1])]
    return torch.cat(rows).double().log_softmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="a file")
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens that are compressed")
    parser.add_argument("--tokens", type=int, default=128, help="tokens after them")
    parser.add_argument("--kv-sizes", default="128,256")
    parser.add_argument("--presets", default="best,by_window,any_question")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model, tokenizer = gguf_folder.load(chosen.model)
    ids = torch.tensor([tokenizer(pathlib.Path(chosen.text).read_text()).input_ids[: chosen.prompt + chosen.tokens]])
    full = distributions(model, ids, DynamicCache(config=model.config), chosen.prompt)
    print("| preset | KV size | KL |\n|:--|--:|--:|")
    for preset in chosen.presets.split(","):
        for size in (int(one) for one in chosen.kv_sizes.split(",")):
            cache = mdkv.transformers.Cache(model.config, mdkv.Budget.kv_size(size), preset)
            other = distributions(model, ids, cache, chosen.prompt)
            print(f"| {preset} | {size} | {float((full.exp() * (full - other)).sum(-1).mean()):.6f} |", flush=True)


if __name__ == "__main__":
    main()
