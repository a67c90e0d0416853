#!/usr/bin/env python3
"""The archive of cmake/packaging/plugin.sh in programs of a llama.cpp that loads its backends (GGML_BACKEND_DL=ON).

  python3 tests/llama_cpp/plugin_file.py --archive libggml-mdkv-VERSION-linux-x86_64.tar.gz --programs FOLDER --model M.gguf \\
      --text PROSE.txt

GGML_BACKEND_PATH alone brings the backend. llama-server gets the flags with which Ollama starts it: eight requests at once on
four slots, one longer than its slot (context shift), the end by SIGTERM, and a second start. Before come the refusals (another
version of ggml's interface, a file that is missing), llama-bench, llama-cli and llama-completion. A program that is not in the
folder is skipped. A server without the backend answers first; the
backend at 25 % must find three quarters of the numbers that this one finds, and none of another prompt. Only Python's own library.
"""
import argparse
import concurrent.futures
import glob
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile

import server_load
from server_load import Server, pool_of

SLOTS, CELLS, LONG = 4, 1536, 250  # slots, cells of each, tokens that are decoded across the end of a slot


class Ollamas(Server):
    """llama-server as Ollama starts it."""

    def __init__(self, options, plugin=None):
        self.port, self.patience = server_load.free_port(), options.patience
        command = [f"{options.programs}/llama-server", "--model", options.model, "--port", str(self.port), "--host", "127.0.0.1",
                   "--no-webui", "--offline", "-c", str(SLOTS * CELLS), "-np", str(SLOTS), "--flash-attn", "on", "-b", "512", "-ub", "512",
                   "--context-shift", "--keep", "4"]
        self.start(command, environment_with(plugin))

    def stop(self):
        """Returns the exit status, the backend's lines, and removes the log."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        status, log = self.end()
        os.unlink(self.log.name)
        return status, backends_lines(log)

    def at_once(self, prompts):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as clients:
            return [answer["content"] for answer in clients.map(lambda one: self.complete(one.text, one.tokens), prompts)]

    def shifted(self, text):
        """A prompt and an answer that are longer than a slot."""
        body = dict(prompt=text, n_predict=LONG, temperature=0, ignore_eos=True)
        status, answer = self.ask("POST", "/completion", body)
        return status == 200 and server_load.json.loads(answer)


def backends_lines(output):
    """A line may follow an unfinished one of the program's own, which another thread writes."""
    return re.findall("mdkv: .*", output)


def environment_with(plugin, **more):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MDKV_", "GGML_", "LD_"))}
    return {**environment, **({"GGML_BACKEND_PATH": plugin} if plugin else {}), **more}


class Results:
    passed = failed = skipped = 0

    def check(self, name, good, said=""):
        self.passed += bool(good)
        self.failed += not good
        print(f"{'passed' if good else 'FAILED'}: {name}{': ' if said else ''}{said}", flush=True)

    def has(self, options, program):
        """Whether the program is there; otherwise its test counts as skipped."""
        there = os.access(f"{options.programs}/{program}", os.X_OK)
        if not there:
            self.skipped += 1
            print(f"skipped: {options.programs} has no {program}")
        return there


def found(prompts, answers):
    return {prompt.name for prompt, answer in zip(prompts, answers) if prompt.number in answer}


def mixed(prompts, answers):
    """Answers that state a number which only other prompts hold."""
    numbers = {prompt.number for prompt in prompts}
    return [answer for prompt, answer in zip(prompts, answers)
            if any(n in numbers and n not in prompt.text for n in re.findall(r"\b\d{4}\b", answer))]


def served(lines):
    return any(re.search(r"decoded [1-9]\d* steps .*compressed [1-9]\d* layers", line) for line in lines)


def servers(options, plugin, prompts, long, results):
    alone = Ollamas(options)
    reference = alone.at_once(prompts)
    alone.stop()
    expected = found(prompts, reference)
    results.check("the server alone finds numbers", len(expected) >= 4, f"{len(expected)} of {len(prompts)}")

    server = Ollamas(options, plugin)
    answers = server.at_once(prompts)
    right = found(prompts, answers)
    results.check("eight requests at once", not mixed(prompts, answers) and 4 * len(right & expected) >= 3 * len(expected),
                  f"{len(right)} of {len(prompts)} numbers, {len(right & expected)} of those {len(expected)}, {answers}")
    answer = server.shifted(long)
    results.check("context shift", answer and answer["tokens_predicted"] == LONG and answer["truncated"],
                  answer and f"{answer['tokens_evaluated']} tokens read, {answer['tokens_predicted']} decoded, {answer['content'][-60:]!r}")
    status, lines = server.stop()
    print("\n".join(f"  {line}" for line in lines))
    results.check("the server ends by SIGTERM", status == 0, f"status {status}")
    results.check("the file says what it is, once", sum("for ggml" in line for line in lines) == 1)
    results.check("it decoded from compressed caches", served(lines))
    results.check("it reports no error", not any("mdkv: error" in line for line in lines))

    server = Ollamas(options, plugin)
    again = server.at_once(prompts[:1])
    status, lines = server.stop()
    results.check("stop and start", len(again[0]) > 0 and not mixed(prompts, again) and status == 0 and served(lines),
                  f"{again[0]!r}, status {status}")


def run(options, program, *arguments, plugin, **more):
    """Returns the exit status, the output, and the backend's lines."""
    done = subprocess.run([f"{options.programs}/{program}", *arguments], env=environment_with(plugin, **more), text=True, errors="replace",
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=options.patience)
    return done.returncode, done.stdout, backends_lines(done.stdout)


def bench(options, plugin, results):
    status, output, lines = run(options, "llama-bench", "-m", options.model, "-fa", "on", "-p", "0", "-n", "16", "-d", "512", "-r", "1",
                                plugin=plugin)
    row = [line for line in output.splitlines() if "tg16" in line]
    results.check("llama-bench", status == 0 and row and served(lines), row and row[0])


def once(options, program, plugin, prompts, results):
    """One answer at a time by a program that reads its prompt from a file; every second one suffices."""
    right = 0
    for prompt in prompts[::2]:
        question = prompt.text.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(question)
            file.flush()
            status, output, lines = run(options, program, "-m", options.model, "-f", file.name, "-fa", "on", "-n", "16", "--temp", "0",
                                        "-st", "--simple-io", "--no-display-prompt", "-c", "4096", plugin=plugin)
        right += prompt.number in output.replace(question, "")
        if status != 0 or not served(lines):
            break
    results.check(program, status == 0 and served(lines) and right > 0, f"status {status}, {right} of {len(prompts[::2])} numbers")


def refusals(options, plugin, results):
    folder = os.path.dirname(plugin)
    status, output, lines = run(options, "llama-bench", "--list-devices", plugin=plugin)
    name = next(iter(re.findall(r"libggml-mdkv-api\d-\S+\.so", "\n".join(lines))), "")
    results.check("the device is listed", status == 0 and "MDKV" in output and name, "; ".join(lines))
    own = name.partition("-x64-")[0]  # with the version of ggml's interface, which other processors' files share
    for other in sorted(set(glob.glob(f"{folder}/libggml-mdkv-api*-x64-v3.so")) - set(glob.glob(f"{folder}/{own}-*"))):
        status, output, _ = run(options, "llama-bench", "--list-devices", plugin=other)
        refused = re.search(r"incompatible API version.*", output)
        results.check(f"{os.path.basename(other)} is refused", status == 0 and refused, refused and refused[0])
    status, output, lines = run(options, "llama-bench", "--list-devices", plugin=plugin, MDKV_VERBOSE="0")
    results.check("MDKV_VERBOSE=0 says nothing", status == 0 and "MDKV" in output and not lines)
    status, output, lines = run(options, "llama-bench", "--list-devices", plugin=plugin, MDKV_BUDGET="much")
    results.check("a wrong setting is refused by name", status == 0 and any("mdkv: error: MDKV_BUDGET=much" in line for line in lines))
    with tempfile.TemporaryDirectory() as empty:
        copy = shutil.copy(plugin, empty)
        status, output, lines = run(options, "llama-bench", "--list-devices", plugin=copy)
        results.check("a missing file is named", status == 0 and any("mdkv: error" in line and name in line for line in lines), "; ".join(lines))
        link = os.path.join(empty, "link.so")
        os.symlink(plugin, link)
        status, output, lines = run(options, "llama-bench", "--list-devices", plugin=link)
        results.check("a link finds the files", status == 0 and "MDKV" in output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", required=True)
    parser.add_argument("--programs", required=True, help="the folder of llama-server, llama-bench, llama-cli and llama-completion")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, help="a file of prose")
    parser.add_argument("--patience", type=float, default=600, help="seconds until an answer counts as an error")
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(options.archive) as archive:
            archive.extractall(folder)
        plugin = glob.glob(f"{folder}/*/libggml-mdkv.so")[0]
        text = open(options.text).read()
        prompts = [prompt for prompt in pool_of(text, 4, random.Random(1)) if prompt.number]
        if results.has(options, "llama-bench"):
            refusals(options, plugin, results)
            bench(options, plugin, results)
        for program in ("llama-cli", "llama-completion"):
            if results.has(options, program):
                once(options, program, plugin, prompts, results)
        if results.has(options, "llama-server"):
            servers(options, plugin, prompts, " ".join(text.split()[5000:6130]), results)
    print(f"{results.passed} passed, {results.failed} failed, {results.skipped} skipped")
    return int(results.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
