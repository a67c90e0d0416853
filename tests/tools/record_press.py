#!/usr/bin/env python3
"""Scores of token-selecting policies by NVIDIA's kvpress, for checking the runner's.

    record_press.py OUT.json [SEED]     writes the small vectors that tests/apps/policies/press.cpp reads, of other numbers
                                        with another seed: MDKV_PRESS_SCORES=OUT.json mdkv_evaluation_tests

Needs the PyPI package kvpress (with torch and transformers; a CPU does). One attention layer of random weights reads
random tokens, and each press scores its keys and values, in float64. Rotary pairs are (i, i + D/2) there and (2i, 2i + 1)
in llama files: queries and keys are written in the second order, which no product of theirs notices.
"""
import importlib.metadata
import json
import sys

import torch
from kvpress import CriticalKVPress, ExpectedAttentionPress, KeyDiffPress, SnapKVPress, TOVAPress
from kvpress.utils import get_prerope_key_states, get_prerope_query_states
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

HEADS, GROUP, DIM, HIDDEN, TOKENS, WINDOW, BASE = 2, 2, 8, 12, 30, 8, 10000.0
KEPT = 20  # of CriticalKV's tokens, the window among them


def make_layer(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS, head_dim=DIM,
                         num_hidden_layers=1, max_position_embeddings=4096, rope_theta=BASE)
    config._attn_implementation = "sdpa"
    layer = LlamaAttention(config, layer_idx=0).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    layer.rotary_emb = LlamaRotaryEmbedding(config)
    # The vectors are to test formulas: rotations in float32 would set how well they can agree.
    layer.rotary_emb.inv_freq = layer.rotary_emb.inv_freq.double()
    return layer


def interleaved(x):
    """[..., D] with pairs (i, i + D/2) to pairs (2i, 2i + 1)."""
    return torch.stack([x[..., : DIM // 2], x[..., DIM // 2 :]], dim=-1).flatten(-2)


def numbers(x):
    return [float(f"{value:.9g}") for value in x.flatten().tolist()]


def main():
    layer = make_layer(int(sys.argv[2]) if len(sys.argv) > 2 else 260320616)
    with torch.no_grad():
        hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
        cos, sin = layer.rotary_emb(hidden, torch.arange(TOKENS)[None])
        queries, keys = apply_rotary_pos_emb(
            get_prerope_query_states(layer, hidden), get_prerope_key_states(layer, hidden), cos, sin)
        values = layer.v_proj(hidden).view(1, TOKENS, HEADS, DIM).transpose(1, 2)

        def scores(press):
            press.compression_ratio = 1 - (KEPT + 0.5) / TOKENS
            result = press.score(layer, hidden, keys, values, None, {"position_embeddings": (cos, sin)})[0]
            largest = torch.finfo(result.dtype).max
            return [None if x == largest else float(f"{x:.9g}") for x in result.flatten().tolist()]

        snapkv = SnapKVPress(window_size=WINDOW, kernel_size=5)
        record = {
            "made_by": "tests/tools/record_press.py, PyPI kvpress " + importlib.metadata.version("kvpress"),
            "heads": HEADS, "group": GROUP, "dim": DIM, "embedding": HIDDEN, "tokens": TOKENS, "window": WINDOW,
            "rope_base": BASE, "kept": KEPT,
            "queries": numbers(interleaved(queries)), "keys": numbers(interleaved(keys)), "values": numbers(values),
            "output_weights": numbers(layer.o_proj.weight),
            "snapkv": scores(snapkv),
            "tova": scores(TOVAPress()),
            "keydiff": scores(KeyDiffPress()),
            "expected_attention": scores(ExpectedAttentionPress()),
            "criticalkv": scores(CriticalKVPress(snapkv)),
        }
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(record, out)
        out.write("\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main()
