#!/usr/bin/env python3
"""Writes a GGUF file of Llama-3-8B's shape with random Q4_0 weights, to see what memory a model of that size takes.

    make_random_model.py VOCABULARY_GGUF OUT_GGUF [--layers 32]

The tokenizer is taken from VOCABULARY_GGUF (the reference model). The weights mean nothing, so neither does the text;
bytes and seconds do. About 4.3 GB. Needs the PyPI package gguf.
"""
import argparse

import gguf
import numpy as np

EMBEDDING, FEED_FORWARD, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("vocabulary")
    arguments.add_argument("out")
    arguments.add_argument("--layers", type=int, default=32)
    args = arguments.parse_args()
    source = gguf.GGUFReader(args.vocabulary)
    random = np.random.default_rng(1)

    out = gguf.GGUFWriter(args.out, "llama")
    out.add_block_count(args.layers)
    out.add_context_length(8192)
    out.add_embedding_length(EMBEDDING)
    out.add_feed_forward_length(FEED_FORWARD)
    out.add_head_count(QUERY_HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(500000.0)
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

    def norm(name: str) -> None:
        out.add_tensor(name, np.ones(EMBEDDING, dtype=np.float32))

    matrix("token_embd.weight", len(tokens), EMBEDDING)
    for layer in range(args.layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        matrix(block + "attn_q.weight", QUERY_HEADS * HEAD_DIM, EMBEDDING)
        matrix(block + "attn_k.weight", KV_HEADS * HEAD_DIM, EMBEDDING)
        matrix(block + "attn_v.weight", KV_HEADS * HEAD_DIM, EMBEDDING)
        matrix(block + "attn_output.weight", EMBEDDING, QUERY_HEADS * HEAD_DIM)
        norm(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", FEED_FORWARD, EMBEDDING)
        matrix(block + "ffn_up.weight", FEED_FORWARD, EMBEDDING)
        matrix(block + "ffn_down.weight", EMBEDDING, FEED_FORWARD)
    norm("output_norm.weight")
    matrix("output.weight", len(tokens), EMBEDDING)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file(progress=False)
    out.close()


if __name__ == "__main__":
    main()
