"""test_tensor_parallel.py: three processes over gloo with a small random model of 3 KV heads, spread by transformers' tensor
parallelism, and with real models where MDKV_REFERENCE_MODEL and MDKV_SECOND_MODEL name GGUF files. Process 0 repeats what all have
given to their prompts as one process with all heads: bit for bit the same. Run as `__main__` this file is one of the
processes."""
import copy
import datetime
import os
import pathlib
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")
import torch.distributed as dist

import mdkv
import mdkv.distributed
import mdkv.transformers

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
import gguf_folder
import tensor_parallel
import texts
from test_examples import Letters
from test_ranks import contents, expects_equal
from test_transformers import PROSE, plain, small, text

SIZE, TOKENS, LATER, LIMIT = 3, 400, 24, 480  # processes; tokens; seconds
HEADS = dict(hidden_size=96, intermediate_size=96, num_attention_heads=6, num_key_value_heads=3)


def processes(tmp_path, task, *arguments, size=SIZE):
    """Runs a task in `size` processes. Returns exit codes, of which every one is there within the limit of time, and outputs."""
    folder = tmp_path / task
    folder.mkdir()
    everyone = []
    for rank in range(size):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        with open(folder / f"{rank}.txt", "w") as output:
            everyone.append(subprocess.Popen([sys.executable, __file__, task, str(folder), *arguments], env=environment,
                                             stdout=output, stderr=subprocess.STDOUT, start_new_session=True))
    try:
        codes = [one.wait(LIMIT) for one in everyone]
    finally:
        for one in everyone:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    return codes, [(folder / f"{rank}.txt").read_text() for rank in range(size)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small("llama", **HEADS).save_pretrained(folder)
    return str(folder)


def test_one_budget_over_three_processes(tmp_path, model_folder):
    codes, outputs = processes(tmp_path, "model", model_folder)
    assert codes == [0] * SIZE, "\n".join(outputs)
    print(outputs[0])


@pytest.mark.parametrize("variable, size", [("MDKV_REFERENCE_MODEL", 3), ("MDKV_SECOND_MODEL", 2)])
def test_real_models(tmp_path, variable, size):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no model")
    codes, outputs = processes(tmp_path, "real", gguf_folder.folder_of(os.environ[variable]), "best", "600", "50", "12", size=size)
    assert codes == [0] * size, "\n".join(outputs)
    print(outputs[0])


def test_a_process_that_ends_is_an_error_of_the_others(tmp_path):
    codes, outputs = processes(tmp_path, "ends")
    assert codes == [1, 1, 3], "\n".join(outputs)
    assert all("RuntimeError" in output or "DistBackendError" in output for output in outputs[:2]), "\n".join(outputs)


# What follows runs in the processes.


def kept(arguments):
    """Copies of tensors, and other arguments."""
    return [torch.as_tensor(one).clone() if hasattr(one, "__dlpack__") else one for one in arguments]


class Recorded:
    """An mdkv.Prompt: all calls, with rungs and what layers hold."""

    made, real = [], mdkv.Prompt

    def __init__(self, *arguments, **options):
        self.of, self.calls = Recorded.real(*arguments, **options), []
        self.arguments, self.options = arguments, {name: one for name, one in options.items() if name not in ("ranks", "backend")}
        Recorded.made.append(self)

    def __getattr__(self, name):
        def call(*arguments):
            result = getattr(self.of, name)(*arguments)
            self.calls.append((name, kept(arguments), held(name, result)))
            return result
        return call


def held(name, result):
    """What is compared of a prompt's call."""
    return contents(result[0]) if name == "pack" else result.tobytes() if name == "rungs_of" else None


def joined(calls):
    """A call of all processes as one of all heads: its name, and arguments with tensors head after head; others are the same."""
    arguments = zip(*(call[1] for call in calls))
    return calls[0][0], [torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0] for parts in arguments]


def repeat_as_one():
    """Process 0 repeats the calls of all processes' prompts with all heads, and compares: every token of every head has the same
    rung, and the same bytes."""
    heads = 0
    for recorded in Recorded.made:
        prompts = [None] * dist.get_world_size()
        dist.all_gather_object(prompts, recorded.calls)
        if dist.get_rank() > 0:
            continue
        whole = Recorded.real(recorded.arguments[0], **{**recorded.options, "heads": recorded.options["heads"] * len(prompts)})
        for calls in zip(*prompts, strict=True):
            name, arguments = joined(calls)
            result = getattr(whole, name)(*arguments)
            if name == "rungs_of":
                assert b"".join(call[2] for call in calls) == held(name, result)
            if name == "pack":
                expects_equal([call[2] for call in calls], held(name, result))
                heads += result[0].heads
    if dist.get_rank() == 0:
        assert heads > 0
        print(f"{recorded.arguments[0]}: {heads} heads are equal")
    Recorded.made.clear()


def expects_folded(cache, tail):
    """Each process has folded its own heads into the bytes that they got with the prompt."""
    for layer in cache.compressed:
        for one, limit in zip(layer.packed, layer.limits, strict=True):
            assert one.appended <= tail and one.bytes["arena"] <= limit


@torch.no_grad()
def model_task(folder):
    rank = dist.get_rank()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    ids = text(TOKENS)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=LATER, do_sample=False)

    def make(budget=0.25, preset="best", group=dist.group.WORLD, **others):
        return mdkv.transformers.Cache(model.config, budget, preset, group=group, keep_rungs=True, **others)

    mdkv.Prompt = Recorded
    found = {}
    for preset in ("best", "any_question", "by_window"):
        cache = make(preset=preset, tail=8)
        found[preset] = model.generate(ids, past_key_values=cache, **options)
        assert cache.get_seq_length() == TOKENS + LATER - 1
        expects_folded(cache, 8)
        assert copy.deepcopy(cache).group is dist.group.WORLD
        assert [one[0].shape[0] for one in cache.rungs] == [1] * 3
        repeat_as_one()
    mdkv.Prompt = Recorded.real
    whole = model.generate(ids, past_key_values=make(1.0), **options)
    shares = model.generate(ids, past_key_values=make(group=None), **options)
    for other in (whole, shares, *found.values()):  # all processes go on with the same tokens
        all_of_them = [None] * SIZE
        dist.all_gather_object(all_of_them, other)
        assert all(torch.equal(one, other) for one in all_of_them)

    def refused(match, error, call):
        try:
            call()
        except error as raised:
            assert match in str(raised), raised
        else:
            raise AssertionError(f"not refused: {match}")

    refused("ranks differ in", ValueError, lambda: model(ids, past_key_values=make(0.5 if rank == 2 else 0.25)))
    refused("cannot hold the window", ValueError, lambda: model(ids, past_key_values=make(mdkv.Budget.bytes(9))))
    refused("prompt_tokens of rank 2 is 9, of rank 0 None", ValueError,
            lambda: model(ids, past_key_values=make(prompt_tokens=9 if rank == 2 else None)))
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = alone.generate(ids, past_key_values=plain(alone), **options)
    assert torch.equal(whole, expected)
    refused("have 9 KV heads of a layer and the configuration 3", NotImplementedError,
            lambda: alone(ids, past_key_values=mdkv.transformers.Cache(alone.config, group=dist.group.WORLD)))
    print("tokens of one process at 100 %:", expected[0, TOKENS:].tolist())
    question = {"input_ids": ids[:, :50], "attention_mask": torch.ones_like(ids[:, :50])}
    found = {}
    for name, on, group, processes in (("3 processes", model, dist.group.WORLD, SIZE), ("1 process", alone, None, 1)):
        for kind, cache in (("full", plain(on)), ("one budget", mdkv.transformers.Cache(on.config, 0.25, group=group, keep_rungs=True))):
            caches = [cache, plain(on)]  # the second one reads the question
            found[f"{name}, {kind}"] = tensor_parallel.measured(on, ids, 300, question, lambda config: caches.pop(0), processes)
    for kind in ("full", "one budget"):
        assert abs(found[f"3 processes, {kind}"]["bytes"] / found[f"1 process, {kind}"]["bytes"] - 1) < 0.01
    print("\n".join(tensor_parallel.table(found, Letters())))
    print(tensor_parallel.compared(found["3 processes, one budget"], found["1 process, one budget"]))


@torch.no_grad()
def real_task(folder, presets, tokens, later, tail):
    """A text is read and gone on with, by tokens that all processes choose alike, and folded many times."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, later = int(tokens), int(later)
    ids = tokenizer(texts.prose() if tokens > 1000 else PROSE * 40, return_tensors="pt").input_ids[:, : tokens + later]
    assert ids.shape[1] == tokens + later
    mdkv.Prompt = Recorded
    for preset in presets.split(","):
        cache = mdkv.transformers.Cache(model.config, 0.125, preset, tail=int(tail), group=dist.group.WORLD)
        model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
        for i in range(tokens, tokens + later):
            model(ids[:, i : i + 1], past_key_values=cache)
        expects_folded(cache, int(tail))
        repeat_as_one()


def ends_task():
    import numpy as np

    rank = dist.get_rank()
    ranks = mdkv.distributed.ranks(rank + 1)
    assert (ranks.first_head, ranks.heads) == ([0, 1, 3][rank], 6)
    if rank == 2:
        os._exit(3)
    keys = np.random.default_rng(rank).normal(size=(rank + 1, 200, 64)).astype(np.float32)
    mdkv.compress(keys, keys, keys, 0.2, ranks=ranks)


if __name__ == "__main__":
    task, folder, *arguments = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
                            timeout=datetime.timedelta(seconds=LIMIT / 4))
    {"model": model_task, "real": real_task, "ends": ends_task}[task](*arguments)
    dist.barrier()
    dist.destroy_process_group()
