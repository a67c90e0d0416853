#!/usr/bin/env python3
"""Full-cache decode by PyTorch's scaled_dot_product_attention, and by FlashInfer where it is installed, beside a copy of the
same memory timed by turns with them: the outside peers of gpu_attend's `attend/full` (same shape: 8 KV heads, 1, 4 or 8 query
heads each, D = 128, bf16, 128K tokens). Another process than gpu_attend: compare both by `of_copy`, their share of the copy
bandwidth.

    torch_sdpa.py [--json FILE] [--tokens N] [--groups G,...] [--device cpu]

Needs a PyTorch of 2.5 or newer; `--device cpu` only shows that it runs. Every kernel that PyTorch can choose is measured by
itself; one that refuses is named on the standard error.
"""
import argparse
import functools
import json
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, DIM = 8, 128
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
WARM_UPS, REPETITIONS = 3, 25


class Layers:
    """As many layers as the L2 cache holds little of; one decode step goes through them all."""

    def __init__(self, device, tokens, group):
        generator = torch.Generator(device=device).manual_seed(1)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.bytes = 2 * HEADS * tokens * DIM * 2
        self.query = normal(1, HEADS * group, 1, DIM)
        self.layers = [(normal(1, HEADS, tokens, DIM), normal(1, HEADS, tokens, DIM)) for _ in range(2)]

    def step(self, kernel):
        with sdpa_kernel(kernel):
            for keys, values in self.layers:
                torch.nn.functional.scaled_dot_product_attention(self.query, keys, values, enable_gqa=True)

    def step_of_flashinfer(self):
        import flashinfer

        for keys, values in self.layers:
            flashinfer.single_decode_with_kv_cache(
                self.query[0, :, 0], keys[0], values[0], kv_layout="HND", use_tensor_cores=True)


class Timer:
    """Times calls behind a read of far more than the L2 cache holds."""

    def __init__(self, device, megabytes):
        self.device = device
        self.source = torch.ones(megabytes << 18, device=device, dtype=torch.int32)
        self.target = torch.empty_like(self.source)

    def copy(self):
        self.target.copy_(self.source)

    def recorded(self, call):
        """The call as a graph, so that launches cost as little as in gpu_attend."""
        if self.device == "cpu":
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def once(self, call):
        """Microseconds."""
        self.source.sum()
        if self.device == "cpu":
            begin = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - begin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def medians(self, calls):
        times = {name: [] for name in calls}
        for turn in range(-WARM_UPS, REPETITIONS):
            for name, call in calls.items():
                taken = self.once(call)
                if turn >= 0:
                    times[name].append(taken)
        return {name: statistics.median(all_of) for name, all_of in times.items()}


def measured(timer, layers, tokens, group):
    """Every kernel with `group` query heads per KV head."""
    steps = {name: functools.partial(layers.step, kernel) for name, kernel in KERNELS.items()}
    steps["flashinfer"] = layers.step_of_flashinfer
    calls = {"copy": timer.recorded(timer.copy)}
    for name, step in steps.items():
        try:
            step()
            calls[name] = timer.recorded(step)
        except (RuntimeError, ImportError) as refused:
            print(f"torch_sdpa.py: {name}: {str(refused).splitlines()[0]}", file=sys.stderr)
    times = timer.medians(calls)
    bandwidth = 2 * 4 * timer.source.numel() / times.pop("copy")
    results = []
    for name, taken in times.items():
        one = taken / len(layers.layers)
        results.append({
            "name": f"torch_sdpa/{name}",
            "torch": torch.__version__,
            "tokens": tokens,
            "group": group,
            "median_us": one,
            "bytes": layers.bytes,
            "gb_per_s": layers.bytes / one / 1e3,
            "of_copy": layers.bytes / one / bandwidth,
        })
        print(f"{results[-1]['name']:<24} tokens={tokens} group={group} {one:12.2f} us {results[-1]['gb_per_s']:8.1f} GB/s"
              f"  of_copy={results[-1]['of_copy']:.4g}")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=128 * 1024)
    parser.add_argument("--groups", default="4,1,8", help="query heads per KV head")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_sdpa.py: this PyTorch finds no GPU")

    timer = Timer(options.device, 1024 if options.device == "cuda" else 64)
    results = []
    for group in (int(text) for text in options.groups.split(",")):
        results += measured(timer, Layers(options.device, options.tokens, group), options.tokens, group)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file)
    if not results:
        sys.exit("torch_sdpa.py: PyTorch refused every kernel")


if __name__ == "__main__":
    main()
