"""lm_eval_cache.py: tasks of lm-eval answered by transformers with several KV caches, which read each prompt together.

    python bench/quality/lm_eval_cache.py --model MODEL.gguf --tokens 1024 --limit 20 --tasks niah_single_1,ruler_vt \\
        --caches full,best@0.25,any_question@0.125,hqq4,press:SnapKV@0.25 --json FILE

A cache is `full`, PRESET@SHARE of mdkv, BACKEND and BITS of transformers' QuantizedCache (hqq or quanto, by the axes that it
advises), or a press of kvpress by its name, with options that differ from its own, and the share that it keeps:
press:SnapKV@0.25, press:SnapKV[window_size=32]@0.25 (of two: [a=1+b=2]), press:AdaKV, PyramidKV, CriticalKV, KeyDiff, TOVA,
ExpectedAttention, Random, StreamingLLM, Knorm and others. ThinK's share is that of the channels of keys. AdaKV hides keys and
frees nothing. The model computes in float32; shares are those of a cache of 16 bits a number, which mdkv's and quantised ones
get. Each sample is answered twice: with its question in the prompt, and asked later. JSON has all scores, held bytes and answers;
those it has are not made again. A prompt that is too long for the model loses its middle. RULER's tasks in essays take a text of
yours (--essay), its questions of SQuAD and HotpotQA files (--squad dev-v2.0.json, --hotpot hotpot_dev_distractor_v1.json);
without them lm-eval fetches its own. LongBench (--tasks longbench_...) and other tasks need their data sets at hand, which
lm-eval fetches. Needs lm-eval with wonderwords and nltk, mdkv, and for presses kvpress with its transformers.
"""
import argparse
import contextlib
import copy
import itertools
import json
import pathlib
import random
import re
import sys

import numpy
import torch
import tqdm
import transformers
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mdkv.transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"))
import gguf_folder

#: by the beginning of a task's name: of the matches the last begins the question; "" is for all other tasks
QUESTIONS = {"niah": r"\n(?=What (?:is|are all) the special magic )", "ruler": r"\n(?=Question: )", "": r"\n(?=[^\n]+\n*$)"}
PLACES = ("in the prompt", "later")
PRESETS = ("best", "any_question", "by_window", "paper", "evict")
QUANTISED = re.compile(r"(hqq|quanto)(\d)")


class Together(cache_utils.DynamicLayer):
    """An uncompressed layer that gives all that it reads to layers of mdkv's caches, too, until `others` is emptied."""

    others = ()

    def update(self, keys, values, *args, **kwargs):
        all_rows = super().update(keys, values)
        for rows, _ in [one.update(keys, values) for one in self.others]:
            rows.mdkv_layer = self
            all_rows = rows, rows
        return all_rows

    def attend(self, module, query, mask, scaling, dropout, options):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output = sdpa(module, query, self.keys, self.values, mask, dropout=dropout, scaling=scaling, **options)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **kwargs: output  # of a prompt it is the same in all of them
        for one in self.others:
            one.attend(module, query, mask, scaling, dropout, options)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
        return output[0]


def halved(layer):
    """A cache's layer, from now on of 16 bits a number, for a model in float32."""
    update, attend = layer.update, getattr(layer, "attend", None)

    def take(keys, values, *args, **kwargs):
        rows = update(keys.half(), values.half())
        return rows if attend else tuple(one.float() for one in rows)

    layer.update = take
    if attend:
        layer.attend = lambda module, query, *arguments: attend(module, query.half(), *arguments).float()
    return layer


sums = mdkv.log_sum_exps
mdkv.log_sum_exps = lambda queries, keys, *options: sums(queries.float(), keys.float(), *options)  # in 16 bits it takes longer


def bytes_of(value, seen):
    """Bytes of all tensors that can be reached from a value."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if hasattr(value, "__tensor_flatten__"):
        return sum(bytes_of(getattr(value, name), seen) for name in value.__tensor_flatten__()[0])
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (dict, list, tuple)):
        return sum(bytes_of(one, seen) for one in (value.values() if isinstance(value, dict) else value))
    return bytes_of(vars(value), seen) if isinstance(value, cache_utils.CacheLayerMixin) else 0


def make_at_most(limit):
    """Cuts the loops in which lm-eval makes 500 samples of a task; the first ones stay what they are."""
    whole = tqdm.tqdm
    tqdm.tqdm = lambda steps, *args, **options: whole(steps[:limit] if steps == range(500) else steps, *args, **options)


def parts_of(prompt, task, tokenizer, most):
    """Tokens of a prompt before its question and from it on, at most `most` together: the text before loses its middle."""
    pattern = next(one for name, one in QUESTIONS.items() if task.startswith(name))
    turn = prompt.rfind("<|")  # where a chat template begins the answer
    asked = prompt[: prompt.rfind("<|", 0, turn)] if len(prompt) - turn < 40 else prompt
    found = [one.start() for one in re.finditer(pattern, asked)]
    if not found:
        raise ValueError(f"{task}: no question was found at the end of the prompt; QUESTIONS needs a pattern for it")
    text, question = (tokenizer(part, return_tensors="pt", add_special_tokens=False).input_ids
                      for part in (prompt[: found[-1]], prompt[found[-1]:]))
    if (over := text.shape[1] + question.shape[1] - most) > 0:
        first = (text.shape[1] - over) // 2
        text = torch.cat([text[:, :first], text[:, first + over:]], 1)
    return text, question


def press_of(name, share):
    """A press of kvpress, by the name of its class without "Press" and options in brackets, that keeps a share."""
    import kvpress

    name, _, given = name.rstrip("]").partition("[")
    options = {key: json.loads(value) for key, value in (one.split("=") for one in given.split("+") if one)}
    if name in ("AdaKV", "CriticalKV", "CriticalAdaKV"):
        return getattr(kvpress, f"{name}Press")(kvpress.SnapKVPress(1 - share, **options))
    kept = {"key_channel_compression_ratio" if name == "ThinK" else "compression_ratio": 1 - share}
    return getattr(kvpress, f"{name}Press")(**kept, **options)


def use_files(essay, squad, hotpot):
    """Lets RULER's tasks read files in the place of what they would fetch."""
    from lm_eval.tasks.ruler import prepare_niah, qa_utils  # lm-eval reads the tasks' own files anew, which import from these

    if essay:
        words = pathlib.Path(essay).read_text(encoding="utf-8").split()
        own = prepare_niah.get_haystack
        prepare_niah.get_haystack = lambda type_haystack: words if type_haystack == "essay" else own(type_haystack=type_haystack)
        prepare_niah.sent_tokenize = lambda text: re.split(r"(?<=[.?!])\s+", text)  # nltk fetches its model from elsewhere
    fetch, files = qa_utils.download_json, {"squad": squad, "hotpot": hotpot}

    def read(url):
        file = next((one for name, one in files.items() if one and name in url.lower()), None)
        return json.loads(pathlib.Path(file).read_text(encoding="utf-8")) if file else fetch(url)

    qa_utils.download_json = read


def tasks_of(names, folder, tokens, limit):
    """lm-eval's tasks, {name: task}, with the samples that it makes itself, for a folder's tokenizer."""
    make_at_most(limit)
    manager, tasks = TaskManager(metadata={"tokenizer": folder, "max_seq_lengths": [tokens]}), {}
    for name in names:
        random.seed(DEFAULT_RANDOM_SEED)  # lm-eval does it before it makes the samples
        numpy.random.seed(DEFAULT_OTHER_SEED)
        tasks |= manager.load([name])["tasks"]
    return tasks


class Model(HFLM):
    """Answers greedily, to a question in the prompt and to one after it, with each of the caches; `chosen`, a question's place
    and a cache's name, says whose answers lm-eval gets."""

    def __init__(self, model, tokenizer, caches, most, known, keep):
        super().__init__(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
        self.caches, self.most, self.keep, self.chosen = caches, most, keep, None
        self.known = known  # {prompt: {chosen: (answer, share of the bytes that the cache holds)}}
        self.task = ""

    def generate_until(self, requests, disable_tqdm=False):
        for one in requests:
            if one.args[0] not in self.known:
                self.known[one.args[0]] = self.answers(one.args[0], min(self.most, one.args[1].get("max_gen_toks", self.most)))
                self.keep()
        return [self.known[one.args[0]][self.chosen][0] for one in requests]

    def call(self, ids, cache):
        """Logits of the last token. `seen` are tokens that were read, of which presses have dropped some."""
        seen = getattr(cache, "seen", 0)
        cache.seen = seen + ids.shape[1]
        places = torch.arange(seen, cache.seen)[None]
        options = {mdkv.transformers.CACHE_ARGUMENT: cache}
        return self.model(ids, position_ids=places, logits_to_keep=1, **options).logits[0, -1]

    @torch.no_grad()
    def answers(self, prompt, most):
        longest = self.model.config.max_position_embeddings - most
        text, question = parts_of(prompt, self.task, self.tokenizer, longest)
        whole, config, ours = torch.cat([text, question], 1), self.model.config, {}
        for name in [one for one in self.caches if one.partition("@")[0] in PRESETS]:
            preset, _, share = name.partition("@")
            for place, tokens in zip(PLACES, (whole.shape[1], text.shape[1])):
                ours[place, name] = mdkv.transformers.Cache(config, float(share), preset, prompt_tokens=tokens)
                ours[place, name].seen = tokens
                ours[place, name].layers = [halved(one) for one in ours[place, name].layers]
        full, found = transformers.DynamicCache(config=config), {}
        full.layers = [Together() for _ in full.layers]
        for part, readers in ((text, ours), (question, {key: one for key, one in ours.items() if key[0] == PLACES[0]})):
            for i, layer in enumerate(full.layers):
                layer.others = [one.layers[i] for one in readers.values()]
            logits = self.call(part, full)
        for layer in full.layers:
            layer.others = ()
        size = bytes_of(list(full.layers), set()) / whole.shape[1]  # of a token in float32
        for name in self.caches:
            for place, tokens in zip(PLACES, (whole, text)):
                if name == "full":
                    cache, next_logits = copy.deepcopy(full), logits  # nothing was compressed before the question
                elif (place, name) in ours:
                    cache, next_logits = ours[place, name], logits
                else:
                    cache, within = self.other(name)
                    with within:
                        next_logits = self.call(tokens, cache)
                if (place, name) in ours:
                    held = 2 * cache.report()["arena_bytes"]
                else:
                    held = bytes_of(list(cache.layers), set()) * (2 if QUANTISED.fullmatch(name) else 1)
                if place != PLACES[0] and name != "full":
                    next_logits = self.call(question, cache)
                share = 1.0 if name == "full" else held / size / tokens.shape[1]
                found[place, name] = self.decoded(cache, next_logits, most), share
        print(".", end="", file=sys.stderr, flush=True)
        return found

    def other(self, name):
        """A cache of another package and a context within which it reads the prompt."""
        if quantised := QUANTISED.fullmatch(name):
            backend, bits = quantised.groups()
            axis = {"hqq": 1, "quanto": 0}[backend]
            cache = cache_utils.QuantizedCache(backend, self.model.config, nbits=int(bits), axis_key=axis, axis_value=axis)
            cache.layers = [halved(one) for one in cache.layers]
            return cache, contextlib.nullcontext()
        press, _, share = name.removeprefix("press:").partition("@")
        return transformers.DynamicCache(config=self.model.config), press_of(press, float(share))(self.model)

    def decoded(self, cache, logits, most):
        answer = []
        while len(answer) < most and (token := int(logits.argmax())) != self.tokenizer.eos_token_id:
            answer.append(token)
            if len(answer) < most:
                logits = self.call(torch.tensor([[token]]), cache)
        return self.tokenizer.decode(answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file or folder")
    parser.add_argument("--tasks", default="niah_single_1,niah_multikey_2,niah_multikey_3,ruler_vt,ruler_cwe,ruler_fwe")
    parser.add_argument("--caches", default="full,best@0.125,best@0.25,any_question@0.125,any_question@0.25")
    parser.add_argument("--tokens", type=int, default=1024, help="length of prompt and answer")
    parser.add_argument("--limit", default="20", help="samples of a task; of several numbers all tasks get the first one first")
    parser.add_argument("--new-tokens", type=int, default=128, help="most tokens of an answer, beside the task's own limit")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--essay", help="text that RULER hides needles in")
    parser.add_argument("--squad", help="file of SQuAD for ruler_qa_squad")
    parser.add_argument("--hotpot", help="file of HotpotQA for ruler_qa_hotpot")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model, tokenizer = gguf_folder.load(chosen.model, dtype=torch.float32)
    names = chosen.caches.split(",")
    settings = {name: value for name, value in vars(chosen).items() if name not in ("json", "limit", "tasks")}
    before = json.loads(chosen.json.read_text()) if chosen.json.exists() else {"settings": settings, "known": []}
    if before["settings"] != settings:
        sys.exit(f"{chosen.json} has answers of other arguments: {before['settings']}")
    known = {prompt: {tuple(key): answer for key, answer in pairs} for prompt, pairs in before["known"]}
    results = []

    def keep():
        pairs = [[prompt, list(answers.items())] for prompt, answers in known.items()]
        chosen.json.write_text(json.dumps({"settings": settings, "results": results, "known": pairs}, indent=1))

    answering = Model(model, tokenizer, names, chosen.new_tokens, known, keep)
    limits = [int(one) for one in chosen.limit.split(",")]
    if chosen.essay or chosen.squad or chosen.hotpot:
        use_files(chosen.essay, chosen.squad, chosen.hotpot)
    tasks = tasks_of(chosen.tasks.split(","), gguf_folder.folder_of(chosen.model), chosen.tokens, max(limits))
    for limit in limits:
        results.clear()
        for (name, task), answering.chosen in itertools.product(tasks.items(), itertools.product(PLACES, names)):
            answering.task = name
            found = evaluate(answering, {"tasks": {name: task}, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0,
                             apply_chat_template=chosen.chat, verbosity="ERROR")
            samples = found["samples"][name]
            metric = next(one for one in (str(chosen.tokens), *samples[0].get("metrics", ())) if one in samples[0])
            scores = torch.tensor([float(one[metric]) for one in samples])
            prompts = [one["arguments"][0][0] for one in samples]
            held = [known[one][answering.chosen][1] for one in prompts]
            results.append({"task": name, "question": answering.chosen[0], "cache": answering.chosen[1],
                            "held": sum(held) / len(held), "scores": scores.tolist(), "prompts": prompts,
                            "wanted": [one["target"] for one in samples]})
            print(f"| {name}, {len(scores)} | {' | '.join(answering.chosen)} | {100 * sum(held) / len(held):.1f} % | "
                  f"{100 * scores.mean():.1f} ± {100 * scores.std() / len(scores) ** 0.5:.1f} |", flush=True)
            keep()


if __name__ == "__main__":
    main()
