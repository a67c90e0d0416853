"""test_tensor_parallel.py: three processes over gloo with a small random model of 3 KV heads, spread by transformers' tensor
parallelism. Process 0 repeats what all have given to their prompts as one prompt of all heads: bit for bit the same. Run as
`__main__` this file is one of the processes."""
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
import tensor_parallel
from test_examples import Letters
from test_transformers import plain, small, text

SIZE, TOKENS, LATER, LIMIT = 3, 400, 24, 480  # processes; tokens; seconds
HEADS = dict(hidden_size=96, intermediate_size=96, num_attention_heads=6, num_key_value_heads=3)


def processes(tmp_path, task, *arguments):
    """Runs a task in all processes. Returns exit codes, of which every one is there within the limit of time, and outputs."""
    folder = tmp_path / task
    folder.mkdir()
    everyone = []
    for rank in range(SIZE):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"}
        with open(folder / f"{rank}.txt", "w") as output:
            everyone.append(subprocess.Popen([sys.executable, __file__, task, str(folder), *arguments], env=environment,
                                             stdout=output, stderr=subprocess.STDOUT, start_new_session=True))
    try:
        codes = [one.wait(LIMIT) for one in everyone]
    finally:
        for one in everyone:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    return codes, [(folder / f"{rank}.txt").read_text() for rank in range(SIZE)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small("llama", **HEADS).save_pretrained(folder)
    return str(folder)


def test_one_budget_over_three_processes(tmp_path, model_folder):
    codes, outputs = processes(tmp_path, "model", model_folder)
    assert codes == [0] * SIZE, "\n".join(outputs)
    print(outputs[0])


def test_a_process_that_ends_is_an_error_of_the_others(tmp_path):
    codes, outputs = processes(tmp_path, "ends")
    assert codes == [1, 1, 3], "\n".join(outputs)
    assert all("RuntimeError" in output or "DistBackendError" in output for output in outputs[:2]), "\n".join(outputs)


# What follows runs in the processes.


class Recorded:
    """An mdkv.Prompt, and all of its calls."""

    made, real = [], mdkv.Prompt

    def __init__(self, *arguments, **options):
        self.of, self.calls = Recorded.real(*arguments, **options), []
        self.arguments, self.options = arguments, {name: one for name, one in options.items() if name not in ("ranks", "backend")}
        Recorded.made.append(self)

    def __getattr__(self, name):
        def call(*arguments):
            result = getattr(self.of, name)(*arguments)
            self.calls.append((name, [torch.as_tensor(one).clone() if hasattr(one, "__dlpack__") else one for one in arguments], result))
            return result
        return call


def joined(parts):
    """Tensors of all processes, head after head; other arguments are the same everywhere."""
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]


def repeat_as_one(recorded):
    """Process 0 repeats the calls of all processes' prompts with all heads, and compares."""
    parts = [None] * SIZE
    own = [(name, arguments, attended(result[0]) if name == "pack" else torch.as_tensor(result) if name == "rungs_of" else None)
           for name, arguments, result in recorded.calls]
    dist.all_gather_object(parts, own)
    if dist.get_rank() > 0:
        return
    whole = Recorded.real(recorded.arguments[0], **{**recorded.options, "heads": recorded.options["heads"] * SIZE})
    compared = 0
    for calls in zip(*parts):
        name = calls[0][0]
        result = getattr(whole, name)(*(joined(one) for one in zip(*(call[1] for call in calls))))
        if name in ("rungs_of", "pack"):
            found = attended(result[0]) if name == "pack" else torch.as_tensor(result)
            assert torch.cat([call[2][0] if name == "pack" else call[2] for call in calls]).numpy().tobytes() == \
                (found[0] if name == "pack" else found).numpy().tobytes(), name
            if name == "pack":
                assert sum(call[2][1] for call in calls) == found[1]
            compared += 1
    print(f"{recorded.arguments[0]}: {compared} arrays of rungs and layers are equal")


def attended(layer):
    """Attention of one query for each head, the same for all of them, without later tokens; and bytes of the arena."""
    layer = layer.copy()
    layer.truncate(0)
    query = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(1)).expand(2 * layer.heads, 1, 16).contiguous()
    output = torch.empty_like(query)
    layer.attend(query, output)
    return output, layer.bytes["arena"]


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
        cache = make(preset=preset)
        found[preset] = model.generate(ids, past_key_values=cache, **options)
        assert copy.deepcopy(cache).group is dist.group.WORLD
        assert [one[0].shape[0] for one in cache.rungs] == [1] * 3
        for recorded in Recorded.made:
            repeat_as_one(recorded)
        Recorded.made.clear()
    mdkv.Prompt = Recorded.real
    whole = model.generate(ids, past_key_values=make(1.0), **options)
    shares = model.generate(ids, past_key_values=make(group=None), **options)
    folded = make(tail=8)
    model.generate(ids, past_key_values=folded, **options)
    assert folded.get_seq_length() == TOKENS + LATER - 1 and folded.compressed[0].packed[0].appended <= 8
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

    refused("limit of rank 2 is not that of rank 0", ValueError, lambda: model(ids, past_key_values=make(0.5 if rank == 2 else 0.25)))
    refused("cannot hold the window", ValueError, lambda: model(ids, past_key_values=make(mdkv.Budget.bytes(9))))
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
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=SIZE,
                            timeout=datetime.timedelta(seconds=LIMIT / 4))
    {"model": model_task, "ends": ends_task}[task](*arguments)
    dist.barrier()
    dist.destroy_process_group()
