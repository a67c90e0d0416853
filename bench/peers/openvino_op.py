"""openvino_op.py: OpenVINO's attention beside an operation that holds keys and values itself (openvino_op.cpp).

    python bench/peers/openvino_op.py --model MODEL.gguf --tokens 1024,4096 --share 0.25

Writes OpenVINO's form of the model, compiles the operation with $CXX (g++), and measures by turns, in one process and one thread,
in float32: the engine as it is, the operation as a copy of the engine's attention, and with the cache that mdkv compresses when
the first token is decoded (preset by_window). A prompt is a text's first tokens. Rows are medians; the first decoded token, which
compresses, is a column of its own. Needs openvino-genai and a model that OpenVINO reads.
"""
import argparse
import ctypes
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy
import openvino
import openvino_genai

HERE = pathlib.Path(__file__).resolve().parent


def library(folder):
    """The operation, compiled with the headers of the installed package."""
    package = pathlib.Path(openvino.__file__).parent
    engine = next((package / "libs").glob("libopenvino.so.*"))
    file = folder / "libopenvino_op.so"
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-march=native", "-fopenmp-simd", "-Wall", "-Wextra",
                    "-shared", "-fPIC", "-I", HERE.parents[1] / "include", "-isystem", package / "include",
                    HERE / "openvino_op.cpp", "-o", file, engine, f"-Wl,-rpath,{engine.parent}"], check=True)
    loaded = ctypes.CDLL(str(file))
    loaded.evaluation.restype = loaded.packing.restype = ctypes.c_double
    loaded.replace_attention.argtypes = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double
    return file, loaded


class Sequence:
    def __init__(self, core, file):
        options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self.request = core.compile_model(core.read_model(file), "CPU", options).create_infer_request()

    def begin(self):
        self.request.reset_state()
        self.tokens = 0

    def read(self, tokens):
        """Seconds; the likeliest next token is `best`, its scores are `logits`."""
        count = len(tokens)
        self.tokens += count
        begin = time.perf_counter()
        self.request.infer({"input_ids": numpy.array([tokens], numpy.int64),
                            "attention_mask": numpy.ones((1, self.tokens), numpy.int64),
                            "position_ids": numpy.arange(self.tokens - count, self.tokens, dtype=numpy.int64)[None],
                            "beam_idx": numpy.zeros(1, numpy.int32)})
        self.logits = self.request.get_output_tensor(0).data[0, -1].copy()
        self.best = int(self.logits.argmax())
        return time.perf_counter() - begin


def one(sequence, prompt, new_tokens, operation):
    sequence.begin()
    prefill = sequence.read(prompt)
    first, answer = sequence.logits, [sequence.best]
    operation.packing()
    compressing = sequence.read(answer)
    answer.append(sequence.best)
    packing = operation.packing()
    operation.evaluation()
    seconds = []
    for _ in range(new_tokens):
        seconds.append(sequence.read(answer[-1:]))
        answer.append(sequence.best)
    return dict(prefill=prefill, compressing=compressing, packing=packing, token=statistics.median(seconds) * 1e3,
                inside=operation.evaluation() / new_tokens * 1e3, first=first, answer=answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="GGUF file")
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = folder / "model.gguf"  # OpenVINO's form is written beside the file
        model.symlink_to(chosen.model.expanduser().resolve())
        tokenizer = openvino_genai.Tokenizer(str(model))
        openvino_genai.LLMPipeline(str(model), "CPU", ATTENTION_BACKEND="SDPA", enable_save_ov_model=True)
        text = tokenizer.encode(chosen.text.read_text()[:100000], add_special_tokens=False).input_ids.data[0].tolist()
        file, operation = library(folder)
        core = openvino.Core()
        core.add_extension(str(file))
        engine = folder / "openvino_model.xml"
        sequences = {"OpenVINO": Sequence(core, engine)}
        for title, share in (("a copy of its attention", 0.0), (f"mdkv, {chosen.share:.1%}", chosen.share)):
            changed = folder / f"{share}.xml"
            print(operation.replace_attention(str(engine).encode(), str(changed).encode(), share), "operations replaced")
            sequences[title] = Sequence(core, changed)
        print("| tokens | attention | prefill, s | first token, s | of it compressing | ms a token | of them inside "
              "| logits off by | equal tokens |\n|--:|:--|--:|--:|--:|--:|--:|--:|--:|")
        for count in map(int, chosen.tokens.split(",")):
            runs = {title: [] for title in sequences}
            for _ in range(chosen.turns):
                for title, sequence in sequences.items():
                    runs[title].append(one(sequence, text[:count], chosen.new_tokens, operation))
            right = runs["OpenVINO"][0]
            for title, of_title in runs.items():
                prefill, first, packing, token, inside = (statistics.median(run[key] for run in of_title)
                                                          for key in ("prefill", "compressing", "packing", "token", "inside"))
                pairs = zip(of_title[0]["answer"], right["answer"])
                equal = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(right["answer"]))
                off = abs(of_title[0]["first"] - right["first"]).max()
                print(f"| {count} | {title} | {prefill:.1f} | {first:.2f} | {packing:.2f} | {token:.1f} | {inside:.2f} "
                      f"| {off:.1e} | {equal} |", flush=True)


if __name__ == "__main__":
    main()
