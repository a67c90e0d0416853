"""openvino_cache.py: OpenVINO GenAI's cache eviction, KVCrush and codes on the prompts that lm_eval_cache.py has answered.

    python bench/peers/openvino_cache.py --model MODEL.gguf --prompts FILE --tasks niah_single_1 \\
        --caches full,evict@0.25,crush@0.25,full:u8 --json FILE

FILE is lm_eval_cache.py's. A cache is `full`, `evict` or `crush` (KVCrush, which gets a quarter of the evictable blocks) and
the share of a prompt's tokens that may stay, rounded up to blocks; after a colon comes KV_CACHE_PRECISION (f16). Each runs in a
process of its own, which reports answers, seconds, and the resident memory's peak; its messages stay if it dies. A process's
first prompt is read twice, once before all measurements. Needs openvino-genai.
"""
import argparse
import json
import math
import pathlib
import resource
import subprocess
import sys
import time

BLOCK = 32  # tokens of a block of OpenVINO's CPU plug-in


def pipeline_of(genai, chosen, cache, tokens):
    """The pipeline with a cache for prompts of so many tokens."""
    kind, _, precision = cache.partition(":")
    kind, _, share = kind.partition("@")
    plan = genai.SchedulerConfig()
    plan.cache_size = chosen.gibibytes
    plan.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": chosen.threads, "INFERENCE_PRECISION_HINT": "f32"}
    if share:
        most = math.ceil(float(share) * tokens / BLOCK) * BLOCK
        start, recent = BLOCK, max(BLOCK, most // 4 // BLOCK * BLOCK)
        crushed = max(1, (most - start - recent) // BLOCK // 4)
        crush = {"kvcrush_config": genai.KVCrushConfig(crushed)} if kind == "crush" else {}
        plan.use_cache_eviction = True
        plan.cache_eviction_config = genai.CacheEvictionConfig(start, recent, most, genai.AggregationMode.NORM_SUM, **crush)
    options["KV_CACHE_PRECISION"] = precision or "f16"
    return genai.LLMPipeline(str(chosen.model.expanduser()), "CPU", scheduler_config=plan, **options)


def answer(chosen, cache, prompts):
    """Answers of one cache to all prompts, in this process."""
    import openvino_genai as genai

    tokenizer = genai.Tokenizer(str(chosen.model.expanduser()))
    counts = [tokenizer.encode(one, add_special_tokens=False).input_ids.shape[1] for one in prompts]
    pipe = pipeline_of(genai, chosen, cache, max(counts))
    how = genai.GenerationConfig()
    how.max_new_tokens, how.do_sample, how.apply_chat_template = chosen.new_tokens, False, False
    how.set_eos_token_id(tokenizer.get_eos_token_id())
    pipe.generate(prompts[0], how)
    answers, firsts, later = [], [], []
    for prompt in prompts:
        begin = time.perf_counter()
        found = pipe.generate([prompt], how)
        answers.append(found.texts[0])
        firsts.append(found.perf_metrics.get_ttft().mean / 1e3)
        later.append(found.perf_metrics.get_tpot().mean)
        print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr)
    return {"answers": answers, "tokens": counts, "first_token_seconds": firsts, "token_milliseconds": later,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="GGUF file")
    parser.add_argument("--prompts", type=pathlib.Path, required=True, help="JSON that lm_eval_cache.py wrote")
    parser.add_argument("--tasks", default="niah_single_1", help="tasks in it")
    parser.add_argument("--caches", default="full,evict@0.25,evict@0.5,crush@0.25,full:u8,evict@0.5:u8,full:u4")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--gibibytes", type=int, default=1, help="size of the engine's own cache")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--alone", action="store_true", help="answer one task with one cache in this process")
    chosen = parser.parse_args()
    results = json.loads(chosen.prompts.read_text())["results"]
    tasks = chosen.tasks.split(",")
    samples = {one["task"]: one for one in results if one["question"] == "in the prompt" and one["task"] in tasks}
    if chosen.alone:
        chosen.json.write_text(json.dumps(answer(chosen, chosen.caches, samples[chosen.tasks]["prompts"])))
        return
    found = []
    for task, one in samples.items():
        for cache in chosen.caches.split(","):
            part = chosen.json.with_suffix(".part")
            part.unlink(missing_ok=True)
            again = ["--tasks", task, "--caches", cache, "--json", str(part), "--alone"]
            ended = subprocess.run([sys.executable, *sys.argv, *again], stderr=subprocess.PIPE, text=True, errors="replace")
            if not part.exists():
                print(f"| {task} | {cache} | exit status {ended.returncode} |", *ended.stderr.splitlines()[-2:], flush=True)
                found.append({"task": task, "cache": cache, "status": ended.returncode, "stderr": ended.stderr[-4000:]})
            else:
                result = json.loads(part.read_text())
                scores = [sum(text.lower() in answer.lower() for text in wanted) / len(wanted)
                          for answer, wanted in zip(result["answers"], one["wanted"])]
                tokens, first, later = (sum(result[name]) / len(result[name])
                                        for name in ("tokens", "first_token_seconds", "token_milliseconds"))
                print(f"| {task} | {cache} | {100 * sum(scores) / len(scores):.1f} % of {len(scores)} | {tokens:.0f} tokens | "
                      f"{first:.2f} s | {later:.1f} ms | {result['peak_mib']:.0f} MiB |", flush=True)
                found.append({"task": task, "cache": cache, "scores": scores, **result})
            part.unlink(missing_ok=True)
            chosen.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
