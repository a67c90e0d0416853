#!/usr/bin/env python3
"""Writes a GGUF file of a known model's shape with random Q4_0 weights, to see what memory and time such a model takes.

    make_random_model.py VOCABULARY_GGUF OUT_GGUF [--shape llama-3-8b] [--layers 32]

Shapes: llama-3-8b (about 4.3 GB), and gemma-3-270m, of which 3 of 18 layers see all tokens and the others a window of 512
(76 MB). The tokenizer is taken from VOCABULARY_GGUF (the reference model). The weights mean nothing, so neither does
the text; bytes and seconds do. Needs the PyPI package gguf.
"""
import argparse
from dataclasses import dataclass

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    window: int = 0  # of the layers that slide; 0: none does


SHAPES = {
    "llama-3-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 500000.0),
    "gemma-3-270m": Shape("gemma3", 18, 640, 2048, 4, 1, 256, 1000000.0, 512),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("vocabulary")
    arguments.add_argument("out")
    arguments.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    arguments.add_argument("--layers", type=int, help="default: as many as the shape has")
    args = arguments.parse_args()
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    gemma = shape.architecture == "gemma3"
    source = gguf.GGUFReader(args.vocabulary)
    random = np.random.default_rng(1)

    out = gguf.GGUFWriter(args.out, shape.architecture)
    out.add_block_count(layers)
    out.add_context_length(8192)
    out.add_embedding_length(shape.embedding)
    out.add_feed_forward_length(shape.feed_forward)
    out.add_head_count(shape.query_heads)
    out.add_head_count_kv(shape.kv_heads)
    out.add_key_length(shape.head_dim)
    out.add_value_length(shape.head_dim)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(shape.rope_base)
    if shape.window > 0:
        out.add_sliding_window(shape.window)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    tokens = source.fields["tokenizer.ggml.tokens"].contents()
    out.add_token_list(tokens)
    out.add_token_types([int(t) for t in source.fields["tokenizer.ggml.token_type"].contents()])
    out.add_token_merges(source.fields["tokenizer.ggml.merges"].contents())
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = random.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
        scale = np.float16(1.0 / (4.6 * np.sqrt(columns)))  # nibbles minus 8 have a spread of 4.6
        blocks[:, :, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
        out.add_tensor(name, blocks.reshape(rows, columns // 32 * 18), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str, size: int = shape.embedding) -> None:
        out.add_tensor(name, np.ones(size, dtype=np.float32))

    queries, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrix("token_embd.weight", len(tokens), shape.embedding)
    for layer in range(layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        matrix(block + "attn_q.weight", queries, shape.embedding)
        matrix(block + "attn_k.weight", kv, shape.embedding)
        matrix(block + "attn_v.weight", kv, shape.embedding)
        matrix(block + "attn_output.weight", shape.embedding, queries)
        norm(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", shape.feed_forward, shape.embedding)
        matrix(block + "ffn_up.weight", shape.feed_forward, shape.embedding)
        matrix(block + "ffn_down.weight", shape.embedding, shape.feed_forward)
        if gemma:
            norm(block + "attn_q_norm.weight", shape.head_dim)
            norm(block + "attn_k_norm.weight", shape.head_dim)
            norm(block + "post_attention_norm.weight")
            norm(block + "post_ffw_norm.weight")
    norm("output_norm.weight")
    if not gemma:  # its output matrix is that of the embeddings
        matrix("output.weight", len(tokens), shape.embedding)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file(progress=False)
    out.close()


if __name__ == "__main__":
    main()
