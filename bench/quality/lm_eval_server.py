"""lm_eval_server.py: tasks of lm-eval's RULER answered by llama-server with llama.cpp's own cache types and with mdkv's plug-in.

    python bench/quality/lm_eval_server.py --programs FOLDER --plugin libggml-mdkv.so --model MODEL.gguf --tokens 1024 --limit 20 \\
        --tasks niah_single_1 --caches full,q8_0,q4_0,best@0.25,any_question@0.125 --json FILE

FOLDER has llama-server of a llama.cpp that loads its backends (GGML_BACKEND_DL=ON). A cache is `full` (f16), a type of
llama.cpp for keys and values, or PRESET@SHARE of mdkv. Each task and cache gets a server with one slot, which reads every prompt
from its beginning. lm-eval's own local-completions sends the tokens of the prompts that lm_eval_cache.py --chat answers, with the
question in them. Scores are lm-eval's own. JSON has scores, answers, prompts, and the lines with which mdkv ends; the script
stops unless these say that every layer was compressed for each sample. Rows that JSON has already are not made again. Needs what
lm_eval_cache.py needs, and tenacity.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

from lm_eval_cache import PRESETS, gguf_folder, tasks_of

SERVED = re.compile(r"decoded [1-9]\d* steps .* in the mean ([\d.]+) % of the cells of all (\d+) layers, .* those of the (\d+) "
                    r"served; compressed (\d+) layers")
PASSED = re.compile(r"passed through: \d+ layers \((\d+) nodes\)")
OF_TYPE = {"full": 100, "q8_0": 100 * 34 / 64, "q5_0": 100 * 22 / 64, "q4_0": 100 * 18 / 64}  # bytes in % of 16 bits a number


class Server:
    """llama-server with one cache."""

    def __init__(self, chosen, cache):
        preset, _, share = cache.partition("@")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MDKV_", "GGML_", "LD_"))}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.at = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [f"{chosen.programs}/llama-server", "--host", "127.0.0.1", "--port", self.at.split(":")[2], "--cache-ram", "0"]
        command += ["-m", str(chosen.model.expanduser()), "-c", str(chosen.tokens + 256), "--parallel", "1", "-fa", "on"]
        command += ["-t", str(chosen.threads)]
        if preset in PRESETS:
            environment |= {"GGML_BACKEND_PATH": str(chosen.plugin.resolve()), "MDKV_PRESET": preset}
            environment["MDKV_BUDGET"] = f"{100 * float(share):g}%"
        elif cache != "full":
            command += ["-ctk", cache, "-ctv", cache]
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        while not self.ready():
            if self.process.poll() is not None:
                sys.exit(f"the server did not start:\n{self.said()[-4000:]}")
            time.sleep(0.2)

    def ready(self):
        try:
            return urllib.request.urlopen(f"{self.at}/health", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def stop(self):
        """Lines of mdkv, after the server has ended."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return re.findall("mdkv: .*", self.said())


def held(cache, lines, samples):
    """The cache's bytes in %; mdkv's as it reports them. Ends the script unless every layer was compressed for each sample, and
    nothing passed through but one part of each later prompt, by which mdkv sees that the prompt before it is gone."""
    if cache in OF_TYPE:
        return OF_TYPE[cache]
    served = [found for line in lines if (found := SERVED.search(line))]
    passed = sum(int(found[1]) for line in lines if (found := PASSED.search(line)))
    if len(served) == 1:
        layers = int(served[0][2])
        if int(served[0][3]) == layers and int(served[0][4]) == layers * samples and passed <= layers * (samples - 1):
            return float(served[0][1])
    sys.exit("mdkv did not serve all layers of all samples:\n" + "\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="folder of llama-server")
    parser.add_argument("--plugin", type=pathlib.Path, help="libggml-mdkv.so")
    parser.add_argument("--model", type=pathlib.Path, required=True, help="GGUF file")
    parser.add_argument("--tasks", default="niah_single_1")
    parser.add_argument("--caches", default="full,q8_0,q4_0,best@0.25,any_question@0.25,best@0.125,any_question@0.125")
    parser.add_argument("--tokens", type=int, default=1024, help="length of prompt and answer")
    parser.add_argument("--limit", type=int, default=20, help="samples of a task")
    parser.add_argument("--skip", type=int, default=0, help="samples at its beginning that are left out")
    parser.add_argument("--new-tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    chosen = parser.parse_args()
    settings = {name: str(value) for name, value in vars(chosen).items() if name not in ("json", "caches", "tasks")}
    before = json.loads(chosen.json.read_text()) if chosen.json.exists() else {"settings": settings, "results": []}
    if before["settings"] != settings:
        sys.exit(f"{chosen.json} has answers of other arguments: {before['settings']}")
    results = before["results"]
    folder = gguf_folder.folder_of(chosen.model)
    for name, task in tasks_of(chosen.tasks.split(","), folder, chosen.tokens, chosen.limit).items():
        # what is not lm-eval's own goes to the server as it is
        task.set_config("generation_kwargs", {"max_gen_toks": chosen.new_tokens, "cache_prompt": False}, update=True)
        for cache in chosen.caches.split(","):
            if any((one["task"], one["cache"]) == (name, cache) for one in results):
                continue
            server, begin = Server(chosen, cache), time.perf_counter()
            try:
                model = LocalCompletionsAPI(base_url=f"{server.at}/v1/completions", max_length=chosen.tokens + 256, max_retries=1,
                                            tokenizer=folder, tokenizer_backend="huggingface", timeout=900)
                alone = {"tasks": {name: task}, "groups": {}, "group_map": {}}
                found = evaluate(model, alone, bootstrap_iters=0, verbosity="ERROR", apply_chat_template=True,
                                 samples={name: list(range(chosen.skip, chosen.limit))})
            finally:
                seconds, lines = time.perf_counter() - begin, server.stop()
            samples = found["samples"][name]
            scores = torch.tensor([one[str(chosen.tokens)] for one in samples])
            size = held(cache, lines, len(scores))
            mean, error = 100 * scores.mean().item(), 100 * scores.std().item() / len(scores) ** 0.5
            texts = {"prompts": [one["arguments"][0][0] for one in samples], "answers": [one["resps"][0][0] for one in samples],
                     "wanted": [one["doc"]["outputs"] for one in samples]}
            results.append({"task": name, "cache": cache, "held": size, "mean": mean, "error": error, "scores": scores.tolist(),
                            "seconds": seconds, "mdkv": lines, **texts})
            print(f"| {name}, {len(scores)} | {cache} | {size:.1f} % | {mean:.1f} ± {error:.1f} | {seconds:.0f} s |", flush=True)
            chosen.json.write_text(json.dumps({"settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
