#!/usr/bin/env python3
"""An independent forward pass of a llama or qwen2 GGUF model in numpy, for checking the runner's.

    reference_forward.py record MODEL OUT.json              writes the small vectors that tests/runner/model.cpp reads
    reference_forward.py check MODEL DUMP_LOGITS TEXT_FILE  compares the executable tests/runner/dump_logits.cpp with
        [--tokens 512] [--double] [--limit 1e-3]            this pass over the text, teacher forced; exit 1 if unequal

Needs numpy and the PyPI packages gguf (weights) and tokenizers (ids). Shares no code with the runner.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np
from gguf.quants import dequantize
from tokenizers import Tokenizer, models

from public_words import PRE_TOKENIZERS

RECORDED_TEXT = (
    "The harbour was quiet before dawn. Two fishing boats lay against the stone wall, and the woman who kept the "
    "light walked down the steps with a lamp in her hand, counting the ropes as she had done every morning for "
    "31 years. The tide tables said low water at 5:47; the wind, as far as anybody could tell, had not read them. "
    "\"You are early,\" said the older of the fishermen. She told him that the weather would change by noon, and that "
)
RECORDED_POSITIONS = (0, 1, 31, 64, 95)
RECORDED_TOKENS = 96
GREEDY_TOKENS = 24
FIXED_IDS = (0, 1, 2, 198, 1000, 19556, 49151)


class Model:
    def __init__(self, path, dtype):
        reader = gguf.GGUFReader(path)
        fields = reader.fields
        value = lambda key, default=None: fields[key].contents() if key in fields else default
        own = value("general.architecture")
        assert own in ("llama", "qwen2"), own
        self.halves = own == "qwen2"  # else neighbours turn together
        self.dtype = dtype
        self.layers = value(f"{own}.block_count")
        self.heads = value(f"{own}.attention.head_count")
        self.kv_heads = value(f"{own}.attention.head_count_kv", self.heads)
        self.epsilon = value(f"{own}.attention.layer_norm_rms_epsilon")
        embedding = value(f"{own}.embedding_length")
        self.key_dim = value(f"{own}.attention.key_length", embedding // self.heads)
        self.value_dim = value(f"{own}.attention.value_length", embedding // self.heads)
        rotated = value(f"{own}.rope.dimension_count", self.key_dim)
        self.frequencies = value(f"{own}.rope.freq_base", 10000.0) ** (-np.arange(0, rotated, 2) / rotated)
        self.weights = {t.name: dequantize(t.data, t.tensor_type).astype(dtype) for t in reader.tensors}
        if "rope_freqs.weight" in self.weights:
            self.frequencies = self.frequencies / self.weights["rope_freqs.weight"]
        self.tokens = value("tokenizer.ggml.tokens")
        self.merges = value("tokenizer.ggml.merges")
        self.words = PRE_TOKENIZERS[value("tokenizer.ggml.pre")]
        self.keys = [np.zeros((self.kv_heads, 0, self.key_dim), dtype) for _ in range(self.layers)]
        self.values = [np.zeros((self.kv_heads, 0, self.value_dim), dtype) for _ in range(self.layers)]

    def encode(self, text):
        bpe = models.BPE({t: i for i, t in enumerate(self.tokens)}, [tuple(m.split(" ", 1)) for m in self.merges])
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = self.words
        return tokenizer.encode(text).ids

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dtype(self.epsilon)) * self.weights[name]

    def rotate(self, x, positions):
        """x [heads, n, D]: pairs turn by position * frequency."""
        angle = positions[:, None] * self.frequencies[None, :]
        cosine, sine = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        count = len(self.frequencies)
        a, b = (slice(0, count), slice(count, 2 * count)) if self.halves else (slice(0, 2 * count, 2), slice(1, 2 * count, 2))
        turned = x.copy()
        turned[..., a] = x[..., a] * cosine - x[..., b] * sine
        turned[..., b] = x[..., a] * sine + x[..., b] * cosine
        return turned

    def feed(self, ids):
        """Logits [n, vocabulary] of the next tokens; keys and values are kept for the call after this one."""
        w = self.weights
        past = self.keys[0].shape[1]
        positions = np.arange(past, past + len(ids))
        hidden_columns = np.arange(past + len(ids))[None, :] > positions[:, None]
        x = w["token_embd.weight"][ids]
        for i in range(self.layers):
            b = f"blk.{i}."
            h = self.norm(x, b + "attn_norm.weight")
            bias = lambda name: w.get(f"{b}{name}.bias", self.dtype(0))
            split = lambda name, dim: (h @ w[f"{b}{name}.weight"].T + bias(name)).reshape(len(ids), -1, dim).transpose(1, 0, 2)
            q = self.rotate(split("attn_q", self.key_dim), positions)
            k = self.rotate(split("attn_k", self.key_dim), positions)
            self.keys[i] = np.concatenate([self.keys[i], k], 1)
            self.values[i] = np.concatenate([self.values[i], split("attn_v", self.value_dim)], 1)
            shared = self.heads // self.kv_heads
            keys, values = np.repeat(self.keys[i], shared, 0), np.repeat(self.values[i], shared, 0)
            s = q @ keys.transpose(0, 2, 1) / self.dtype(np.sqrt(self.key_dim))
            s[:, hidden_columns] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            a = (p / p.sum(-1, keepdims=True)) @ values
            x = x + a.transpose(1, 0, 2).reshape(len(ids), -1) @ w[b + "attn_output.weight"].T
            h = self.norm(x, b + "ffn_norm.weight")
            gate = h @ w[b + "ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
        output = w.get("output.weight", w["token_embd.weight"])
        return self.norm(x, "output_norm.weight") @ output.T


def margin(logits):
    """Distance of the largest from the second largest."""
    two = np.partition(logits, -2, -1)[..., -2:]
    return two[..., 1] - two[..., 0]


def lines_of(recorded):
    """JSON with a line for each key and each position."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in recorded.items() if key != "positions"]
    positions = ",\n  ".join(map(json.dumps, recorded["positions"]))
    return "{" + ",\n ".join(lines) + f',\n "positions": [\n  {positions}]}}\n'


def record(arguments):
    model = Model(arguments.model, np.float64)
    ids = model.encode(RECORDED_TEXT)[:RECORDED_TOKENS]
    assert len(ids) == RECORDED_TOKENS, len(ids)
    logits = model.feed(ids)
    out = {
        "made_by": "tests/tools/reference_forward.py record (numpy, float64, weights by PyPI gguf)",
        "model": pathlib.Path(arguments.model).name,
        "ids": ids,
        "fixed_ids": FIXED_IDS,
        "positions": [],
    }
    for position in RECORDED_POSITIONS:
        row = logits[position]
        top = np.argsort(-row, kind="stable")[:32]
        out["positions"].append({
            "position": position,
            "top_ids": top.tolist(),
            "top_logits": [round(float(v), 6) for v in row[top]],
            "fixed_logits": [round(float(row[i]), 6) for i in FIXED_IDS],
        })
    greedy, margins, row = [], [], logits[-1]
    for _ in range(GREEDY_TOKENS):
        greedy.append(int(row.argmax()))
        margins.append(round(float(margin(row)), 6))
        row = model.feed([greedy[-1]])[-1]
    out["greedy"], out["greedy_margins"] = greedy, margins
    pathlib.Path(arguments.out).write_text(lines_of(out))
    print(f"reference_forward record: {len(ids)} ids, {len(RECORDED_POSITIONS)} positions, {GREEDY_TOKENS} greedy "
          f"tokens, smallest margin {min(margins):.4f}")


def run(arguments, command, ids, width):
    """The executable's floats [rows, width] for these ids."""
    with tempfile.TemporaryDirectory() as folder:
        listed, out = pathlib.Path(folder, "ids.txt"), pathlib.Path(folder, "out.f32")
        listed.write_text(" ".join(map(str, ids)))
        subprocess.run([arguments.dump_logits, command, arguments.model, listed, out], check=True)
        return np.fromfile(out, "<f4").reshape(-1, width)


def check(arguments):
    model = Model(arguments.model, np.float64 if arguments.double else np.float32)
    text = pathlib.Path(arguments.text).read_text(encoding="utf-8")
    ids = model.encode(text[: 16 * arguments.tokens])[: arguments.tokens]
    if len(ids) < arguments.tokens:
        sys.exit(f"reference_forward check: {arguments.text} has only {len(ids)} tokens of {arguments.tokens}")
    wanted = model.feed(ids)
    failed = False
    for command in ("step", "prefill"):
        found = run(arguments, command, ids, wanted.shape[1])
        expected = wanted if command == "step" else wanted[-1:]
        margins = margin(expected)
        difference = np.abs(found - expected).max(-1)
        clear = margins > 2 * arguments.limit
        same = found.argmax(-1) == expected.argmax(-1)
        wrong = int((clear & ~same).sum())
        failed = failed or found.shape != expected.shape or wrong > 0 or not (difference.max() <= arguments.limit)
        print(f"reference_forward check ({command}): {len(expected)} positions, max |dlogit| {difference.max():.2e} "
              f"(limit {arguments.limit:g}), greedy equal at {int(same.sum())}, different beyond the margin at {wrong}, "
              f"smallest margin {margins.min():.2e}")
    sys.exit(1 if failed else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("model")
    one.add_argument("out")
    two = commands.add_parser("check")
    two.add_argument("model")
    two.add_argument("dump_logits")
    two.add_argument("text")
    two.add_argument("--tokens", type=int, default=512)
    two.add_argument("--double", action="store_true")
    two.add_argument("--limit", type=float, default=1e-3)
    arguments = parser.parse_args()
    {"record": record, "check": check}[arguments.command](arguments)


if __name__ == "__main__":
    main()
