#!/usr/bin/env python3
"""llama-server with the backend of examples/llama_cpp under load: several clients at once, prompts reused, second turns,
requests cancelled, slots saved, erased and restored. Every answer is checked.

  python3 tests/llama_cpp/server_load.py --server llama-server --plugin libggml-mdkv.so --model M.gguf --text PROSE.txt \\
      [--slots 4,1] [--clients 4] [--minutes 1] [--budget 100%,25%] [-- more arguments of llama-server]

At first a server without the backend answers each prompt of the pool by itself, with the log-probabilities of its likeliest
tokens. Then the server with the backend is under load. Greedy answers are checked token by token:

  100%   each token is the reference's, with nearly its log-probability; where another one is chosen, the reference holds it
         for nearly as likely (rounding decides such ties, and depends on the other requests of a batch), and the comparison
         ends.
  less   an answer must not state a number of another prompt; numbers that the reference finds should be found (--missed), and
         text must not repeat itself where the reference's does not.

The comparison must tell answers of different prompts apart: that is tried, too. Status 0: no error, no wrong answer, the
server ended by itself, and the backend's last lines say that it decoded from compressed caches. With --slots 0 the server has as
many slots as it likes, which share the cells of one cache. At 100% leave out --cache-reuse, by which llama.cpp itself answers otherwise. MDKV_LOAD_PRELOAD names
libraries to load before the backend, as a sanitizer's. Only Python's own library.
"""
import argparse
import collections
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

THINGS = ["red door", "old well", "north gate", "blue lamp", "stone bridge", "iron chest", "tall tower", "quiet garden"]
SHORT = ["What is the capital of France?", "Name three colours.", "How many legs has a spider?", "What is a compiler?"]
DEFAULT_SLOTS = 4  # of a llama-server without -np; they share the cells of one cache
NEAR = 0.7  # of log-probabilities; rounding alone stays below, another prompt's answer does not


class Prompt:
    """A text to complete and what is known of its answer."""

    def __init__(self, name, text, tokens, number=None):
        self.name, self.text, self.tokens, self.number = name, text, tokens, number
        self.reference = None  # of the server without the backend


def chat(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def pool_of(text, documents, rng):
    """Documents with two numbers each and two questions, texts to go on with, and short questions."""
    words = text.split()
    numbers = [str(n) for n in rng.sample(range(1000, 10000), 2 * documents)]
    prompts = []
    for d in range(documents):
        size = rng.choice([250, 450, 800])  # words; 1.5 tokens each
        start = rng.randrange(len(words) - size)
        body = words[start : start + size]
        facts = rng.sample(THINGS, 2)
        mine = numbers[2 * d : 2 * d + 2]
        for i, (thing, number) in enumerate(zip(facts, mine)):
            body.insert(size * (i + 1) // 3, f"\nThe number of the {thing} is {number}.\n")
        body = " ".join(body)
        for thing, number in zip(facts, mine):
            question = f"{body}\n\nWhat is the number of the {thing}? Answer with the number alone."
            prompts.append(Prompt(f"document {d}, {thing}", chat(question), 12, number))
        if d % 2 == 0:
            prompts.append(Prompt(f"document {d}, continued", body, 96))
    for question in SHORT:
        prompts.append(Prompt(question, chat(question), 24))
    return prompts


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """llama-server in a process of its own."""

    def __init__(self, options, slots, budget=None, extra=()):
        self.port = free_port()
        self.patience = options.patience
        environment = dict(os.environ)
        if budget:
            preload = environment.get("MDKV_LOAD_PRELOAD", "").split() + [os.path.abspath(options.plugin)]
            environment.update(LD_PRELOAD=" ".join(preload), MDKV_BUDGET=budget)
        command = [options.server, "-m", options.model, "-c", str((slots or DEFAULT_SLOTS) * options.context), "-fa", "on"]
        command += ["-np", str(slots)] if slots else []
        command += ["-t", str(options.threads), "--host", "127.0.0.1", "--port", str(self.port), *extra]
        self.start(command, environment)

    def start(self, command, environment):
        self.log = tempfile.NamedTemporaryFile("w+", prefix="llama-server-", suffix=".log", delete=False)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        end = time.monotonic() + 300
        while True:
            try:
                if self.ask("GET", "/health", timeout=5)[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                sys.exit(f"the server did not start: {self.log.name}\n{''.join(open(self.log.name).readlines()[-20:])}")
            time.sleep(0.2)

    def ask(self, method, path, body=None, timeout=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout or self.patience)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, text, tokens):
        body = dict(prompt=text, n_predict=tokens, temperature=0, top_k=1, n_probs=10, cache_prompt=True)
        status, answer = self.ask("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"status {status}: {answer[:200]}")
        return json.loads(answer)

    def cancel(self, text, tokens, after, rng):
        """A stream that is closed after so many events; before the first one at 0."""
        body = json.dumps(dict(prompt=text, n_predict=tokens, temperature=0, stream=True, cache_prompt=True)).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=self.patience) as raw:
            raw.sendall(
                b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(body) + body
            )
            if after == 0:
                time.sleep(rng.random())
                return
            seen = b""
            while seen.count(b"data: ") < after:
                part = raw.recv(65536)
                if not part:
                    return
                seen += part

    def end(self):
        """Returns its exit status and its log."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with open(self.log.name) as log:
            return self.process.returncode, log.read()


def tokens_of(answer):
    """[(id, log-probability, {id: log-probability of the likeliest})]"""
    found = []
    for one in answer.get("completion_probabilities", []):
        found.append((one["id"], one["logprob"], {t["id"]: t["logprob"] for t in one["top_logprobs"]}))
    return found


def difference(reference, got):
    """Why an answer is not the reference's, or None; and how many tokens agreed."""
    reference, got = tokens_of(reference), tokens_of(got)
    for i, ((id0, log0, top0), (id1, log1, _)) in enumerate(zip(reference, got)):
        if id0 != id1:
            if top0.get(id1, -99.0) < log0 - NEAR:
                return f"token {i}: log-probability {top0.get(id1)} by the reference, whose own has {log0:.3f}", i
            return None, i
        if abs(log0 - log1) > NEAR:
            return f"token {i}: log-probability {log1:.3f} instead of {log0:.3f}", i
    if len(reference) != len(got):
        return f"{len(got)} tokens instead of {len(reference)}", min(len(reference), len(got))
    return None, len(got)


def distinct(text):
    words = re.findall(r"\w+", text)  # "search-search-search" repeats itself, too
    return len(set(words)) / max(len(words), 1)


class Load:
    def __init__(self, options, slots, budget, server, prompts):
        self.options, self.slots, self.budget, self.server, self.prompts = options, slots, budget, server, prompts
        self.counts = collections.Counter()
        self.complaints = []
        self.lock = threading.Lock()
        self.last = time.monotonic()  # when a request ended
        self.end = self.last + 60 * options.minutes

    def count(self, name, n=1):
        with self.lock:
            self.counts[name] += n

    def complain(self, name, text):
        with self.lock:
            self.counts[name] += 1
            self.complaints.append(f"{name}: {text}")

    def check(self, prompt, answer):
        text = answer["content"]
        others = {p.number for p in self.prompts if p.number} - {prompt.number}
        mine = set(re.findall(r"\b\d{4}\b", prompt.text))
        for number in re.findall(r"\b\d{4}\b", text):
            if number in others - mine:
                return self.complain("wrong answers", f"{prompt.name}: {number} is another prompt's: {text!r}")
        if self.budget == "100%":
            why, agreed = difference(prompt.reference, answer)
            self.count("tokens that agree", agreed)
            if why:
                return self.complain("wrong answers", f"{prompt.name}: {why}: {text!r} {prompt.reference['content']!r}")
        elif prompt.number and prompt.number in prompt.reference["content"]:
            self.count("numbers asked for")
            self.count("numbers missed", prompt.number not in text)
        elif prompt.tokens > 90 and distinct(text) < 0.2 < 0.4 < distinct(prompt.reference["content"]):
            return self.complain("wrong answers", f"{prompt.name}: repeats itself: {text!r}")
        self.count("answers checked")

    def client(self, number):
        rng = random.Random(f"{self.options.seed} {number}")
        while time.monotonic() < self.end:
            self.last = time.monotonic()
            action = rng.random()
            prompt = rng.choice(self.prompts)
            try:
                if action < 0.2:
                    self.server.cancel(prompt.text, 64, rng.choice([0, 0, 1, 5, 20]), rng)
                    self.count("cancelled")
                    continue
                if action < 0.28 and self.options.slot_files:
                    self.slot_files(rng, number)
                    continue
                answer = self.server.complete(prompt.text, prompt.tokens)
                self.count("requests")
                self.count("tokens of prompts reused", max(0, answer["tokens_evaluated"] - answer["timings"]["prompt_n"]))
                self.check(prompt, answer)
                if action > 0.8:  # a second turn
                    other = next(p for p in self.prompts if p.number and p is not prompt)
                    follow = f"{prompt.text}{answer['content']}<|im_end|>\n" + chat("Thank you. Name another colour than red.")
                    answer = self.server.complete(follow, 32)
                    self.count("requests")
                    self.count("second turns")
                    if other.number in answer["content"] and other.number not in follow:
                        self.complain("wrong answers", f"second turn of {prompt.name}: {answer['content']!r}")
            except (OSError, RuntimeError, http.client.HTTPException, KeyError, ValueError) as error:
                self.complain("errors", f"{prompt.name}: {type(error).__name__} {error}")
                if self.server.process.poll() is not None:
                    return

    def slot_files(self, rng, number):
        """A slot is saved, erased or restored behind the backend's back."""
        slot = rng.randrange(self.slots or DEFAULT_SLOTS)
        action = rng.choice(["save", "erase", "restore"])
        status, answer = self.server.ask("POST", f"/slots/{slot}?action={action}", dict(filename=f"client-{number}"))
        if status == 200:
            self.count(f"slots: {action}")
        elif action != "restore":  # there may be no file yet
            self.complain("errors", f"slot {action}: status {status}: {answer[:200]}")

    def run(self):
        clients = [threading.Thread(target=self.client, args=(n,)) for n in range(self.options.clients)]
        for one in clients:
            one.start()
        for one in clients:
            while one.is_alive():
                one.join(1)
                if time.monotonic() - self.last > 30:
                    self.wake()

    def wake(self):
        """A slot that is set free takes one waiting task. If that saves or erases a slot, no slot is set free by it, and what
        else waits does so until another request ends: llama-server's pop_deferred_task, with and without the backend."""
        self.last = time.monotonic()
        self.count("woken")
        try:
            self.server.complete(SHORT[0], 1)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            self.complain("errors", f"waking: {type(error).__name__} {error}")


def references(options, prompts):
    """Asks a server without the backend. Returns whether the comparison tells wrong answers."""
    alone = Server(options, 1, extra=["--cache-ram", "0"])
    for prompt in prompts:
        prompt.reference = alone.complete(prompt.text, prompt.tokens)
    alone.end()
    os.unlink(alone.log.name)
    lengths = sorted(p.reference["tokens_evaluated"] for p in prompts)
    asked = [p for p in prompts if p.number]
    found = [p for p in asked if p.number in p.reference["content"]]
    told = sum(difference(a.reference, b.reference)[0] is not None for a in found for b in found if a is not b)
    pairs = len(found) * (len(found) - 1)
    print(f"prompts of {lengths[0]} to {lengths[-1]} tokens; the reference finds {len(found)} of {len(asked)} numbers; "
          f"the comparison tells {told} of {pairs} answers of other prompts", flush=True)
    return told > 0.9 * pairs > 0


def run(options, slots, budget, prompts):
    """One server under load; prints what happened. Returns why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options, slots, budget, ["--slot-save-path", folder + "/", *options.more])
        load = Load(options, slots, budget, server, prompts)
        load.run()
        status, log = server.end()
    counts = load.counts
    said = [line for line in log.splitlines() if line.startswith("mdkv:")]
    compressed = re.search(r"decoded [1-9]\d* steps .*compressed [1-9]\d* layers", "\n".join(said))
    asked, missed = counts["numbers asked for"], counts["numbers missed"]
    failures = [
        (counts["errors"] > 0, f"{counts['errors']} errors"),
        (counts["wrong answers"] > 0, f"{counts['wrong answers']} wrong answers"),
        (missed > options.missed * asked, f"{missed} of {asked} numbers missed"),
        (status != 0, f"the server ended with status {status}"),
        (any("mdkv: error" in line for line in said), "the backend reported an error"),
        (not compressed, "the backend decoded nothing from compressed caches"),
        (counts["answers checked"] == 0, "no answer was checked"),
    ]
    failed = [text for bad, text in failures if bad]
    print(f"\n{options.clients} clients, {slots or 'default'} slots, {options.minutes:g} minutes, MDKV_BUDGET={budget} {' '.join(options.more)}")
    for name in ("requests", "cancelled", "errors", "wrong answers"):
        print(f"  {name}: {counts.pop(name, 0)}")
    for name, value in sorted(counts.items()):
        print(f"  {name}: {value}")
    for line in [*said, *load.complaints[:20]]:
        print(f"  {line}")
    if failed:
        failed.append(f"the server's log: {server.log.name}")
    else:
        os.unlink(server.log.name)
    print(f"FAILED: {'; '.join(failed)}" if failed else "passed", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--plugin", required=True, help="libggml-mdkv.so")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, help="a file of prose")
    parser.add_argument("--slots", default="4,1", help="one server for each of these numbers and each budget; 0: llama-server's default")
    parser.add_argument("--budget", default="100%,25%", help="MDKV_BUDGET")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=1, help="of each server")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--context", type=int, default=2560, help="cells of a slot")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--missed", type=float, default=0.25, help="share of the numbers that may be missed below 100%%")
    parser.add_argument("--slot-files", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--patience", type=float, default=300, help="seconds until an answer counts as an error")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("more", nargs="*", help="arguments of llama-server, after --")
    options = parser.parse_args()

    with open(options.text) as file:
        prompts = pool_of(file.read(), options.documents, random.Random(options.seed))
    print(f"seed {options.seed}; {len(prompts)} prompts; references of llama-server alone", flush=True)
    if not references(options, prompts):
        print("FAILED: the comparison does not tell wrong answers")
        return 1
    runs = [(int(slots), budget) for slots in options.slots.split(",") for budget in options.budget.split(",")]
    return int(any([run(options, *one, prompts) for one in runs]))


if __name__ == "__main__":
    sys.exit(main())
