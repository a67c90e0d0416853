"""test_device.py: layers on a device beside the CPU's. With `--device cuda` that is torch's; in a build with the executor of PTX its
kernels run on the host's memory: there tensors of the CPU say that they are CUDA's, and a stand-in serves streams and memory."""
import copy
import ctypes
import gc
import os
import pathlib
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")
os.environ["MDKV_PTX_HOST_MEMORY"] = "1"

import mdkv
import mdkv.transformers
from mdkv import device

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import test_transformers
from test_mdkv import off, random  # noqa: F401  (random is a fixture)
from test_transformers import DEVICE, kl, logits, text

H, G, N, D = 2, 2, 150, 32
BYTES = 0.02  # the CPU multiplies codes by queries of 8 bits
PLAIN = torch.Tensor.__dlpack__
EXECUTOR = getattr(mdkv._module, "executor", False)


class HostSource:
    """Streams and memory for the executor, in the place of device.TorchSource."""

    number = 0

    def __init__(self, _=None):
        self.calls, self.allocated, self.blocks, self.refuses, self.handle = 0, 0, {}, None, 0
        self.made.append(self)

    made = []

    def stream(self):
        self.calls += 1
        return self.handle

    def allocate(self, size):
        if self.refuses:
            raise self.refuses
        block = np.full(size + 256, 255, np.uint8)  # NaNs
        address = -(-block.ctypes.data // 256) * 256
        self.blocks[address], self.allocated = block, self.allocated + 1
        return address

    def release(self, address):
        self.blocks.pop(address).fill(255)


def as_cuda(export):
    """torch's Tensor.__dlpack__ whose capsules say that the tensor is on a CUDA device."""
    def exported(self, **options):
        options.pop("stream", None)
        capsule, api = export(self, **options), ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
        api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        name = api.PyCapsule_GetName(capsule)
        tensor = api.PyCapsule_GetPointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
        ctypes.c_int32.from_address(tensor + 8).value = 2  # DLTensor: data, then the device's type
        return capsule
    return exported


@pytest.fixture
def place(monkeypatch):
    """`on()` makes an mdkv.CudaBackend; caches of models in the test use one. No kernel may read or write what it should not."""
    if EXECUTOR:
        HostSource.made.clear()
        monkeypatch.setattr(torch.Tensor, "__dlpack__", as_cuda(PLAIN))
        monkeypatch.setitem(device.SOURCES, "cpu", HostSource)
        faults = ctypes.CDLL(mdkv._module.__file__)["_ZN3ptx6faultsEv"]
        faults.restype = ctypes.c_uint64
        yield types.SimpleNamespace(on=lambda: mdkv.CudaBackend(source=HostSource()), to="cpu")
        assert faults() == 0
    elif DEVICE == "cuda":
        yield types.SimpleNamespace(on=lambda: mdkv.CudaBackend(source=device.TorchSource(torch.device("cuda"))), to="cuda")
    else:
        pytest.skip("takes --device cuda, or a build with the executor of PTX (MDKV_PYTHON_EXECUTOR)")


def rows(random, tokens=N):
    keys = random.normal(size=(H, tokens, D))
    keys[:, :, 3] += 8
    keys[:, ::37] *= 2
    return [x.astype(np.float16) for x in (random.normal(size=(H * G, tokens, D)), keys, random.normal(size=(H, tokens, D)))]


def decoded(layer, queries, keys, values, to=None):
    """The outputs of some appended tokens, as NumPy's."""
    there = [torch.tensor(one, device=to) if to else one for one in (queries, keys, values)]
    output = torch.empty(queries.shape, dtype=torch.float16, device=to) if to else np.empty_like(queries)
    layer.append(*there[1:])
    layer.attend(there[0], output)
    return output.cpu().numpy() if to else output


@pytest.mark.parametrize("preset, share", [("by_window", 0.3), ("best", 0.5)])
def test_a_prompt_is_packed_attended_folded_and_appended_as_on_the_cpu(random, place, preset, share):
    prompt, new = rows(random), rows(random, 5)
    there = [torch.tensor(one, device=place.to) for one in prompt]
    on = place.on()
    here, report = mdkv.compress(*prompt, share, preset, rope=mdkv.Rope())
    layer, other = mdkv.compress(*there, share, preset, rope=mdkv.Rope(), backend=on)
    assert (here.device, layer.device) == ("cpu", "cuda") and layer.window == here.window and layer.tokens == here.tokens == N
    assert other["budget_bytes"] == report["budget_bytes"] and layer.bytes["arena"] <= report["budget_bytes"]
    assert off(decoded(layer, *new, to=place.to), decoded(here, *new)) < 2 * BYTES
    last = np.concatenate([prompt[0][:, -8:], new[0]], axis=1)  # of the window and the tail
    folded = layer.recompress(torch.tensor(last, device=place.to), preset=mdkv.preset(preset))
    assert folded["resident_bytes"] <= folded["limit_bytes"] == here.recompress(last, preset=mdkv.preset(preset))["limit_bytes"]
    assert layer.compressed_tokens == N + 5 and layer.appended == 0
    more = rows(random, 2)
    assert off(decoded(layer, *more, to=place.to), decoded(here, *more)) < 0.05


def test_a_layer_goes_from_place_to_place_with_the_same_bytes(random, place):
    here, _ = mdkv.compress(*rows(random), 0.3)
    new, more, on = rows(random, 3), rows(random, 1), place.on()
    decoded(here, *new)
    there = here.to(on)
    back = there.to(mdkv.Backend())
    assert (there.device, back.device, there.appended, back.tokens) == ("cuda", "cpu", 3, here.tokens)
    assert bytes(mdkv.write([back])) == bytes(mdkv.write([here])) == bytes(mdkv.write([there]))
    assert off(decoded(there, *more, to=place.to), decoded(here, *more)) < BYTES
    assert there.copy().rungs == here.rungs == back.rungs


def test_a_decode_step_asks_for_a_stream_and_for_no_memory(random, place):
    if not EXECUTOR:
        pytest.skip("counts the calls of a stand-in")
    there = [torch.tensor(one) for one in rows(random)]
    on = place.on()
    source = HostSource.made[-1]
    layer, _ = mdkv.compress(*there, 0.3, backend=on)
    layer.reserve(10)
    decoded(layer, *rows(random, 1), to="cpu")
    allocated, calls = source.allocated, source.calls
    for _ in range(4):
        decoded(layer, *rows(random, 1), to="cpu")
    assert source.allocated == allocated and source.calls == calls + 8
    assert on.scratch_bytes > 0
    del layer
    on.release_scratch()
    assert not source.blocks and on.scratch_bytes == 0


def test_a_decode_step_waits_for_nothing(random, place):
    """The executor refuses calls that wait while a stream is being captured, and runs what was captured later."""
    if not EXECUTOR:
        pytest.skip("captures a stream of the executor's")
    runtime, stream, graph, made = ctypes.CDLL(mdkv._module.__file__), *(ctypes.c_void_p() for _ in range(3))
    on = place.on()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    HostSource.made[-1].handle = stream.value
    layer, _ = mdkv.compress(*(torch.tensor(one) for one in rows(random)), 0.3, backend=on)
    layer.reserve(10)
    decoded(layer, *rows(random, 1), to="cpu")
    other, new = layer.copy(), rows(random, 1)
    expected = decoded(layer, *new, to="cpu")
    queries, keys, values = map(torch.tensor, new)
    output = torch.zeros(expected.shape, dtype=torch.float16)
    assert runtime.cudaStreamBeginCapture(stream, 0) == 0
    other.append(keys, values)
    other.attend(queries, output)
    assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0 and not output.any()
    assert runtime.cudaGraphInstantiate(ctypes.byref(made), graph, ctypes.c_ulonglong(0)) == 0
    assert runtime.cudaGraphLaunch(made, stream) == 0
    np.testing.assert_array_equal(output.numpy(), expected)


def test_the_allocators_error_leaves_a_layer_as_it_was(random, place):
    if not EXECUTOR:
        pytest.skip("takes a stand-in that refuses")
    here, _ = mdkv.compress(*rows(random), 0.3)
    layer, source = here.to(place.on()), HostSource.made[-1]
    new = rows(random, 2)
    source.refuses = ArithmeticError("no memory today")
    with pytest.raises(ArithmeticError, match="no memory today"):
        decoded(layer, *new, to="cpu")
    source.refuses = None
    assert layer.appended == 0 and off(decoded(layer, *new, to="cpu"), decoded(here, *new)) < BYTES


def model_and_text(length, batch=1):
    sizes = dict(num_hidden_layers=2, hidden_size=64, head_dim=16)
    return test_transformers.small("llama", torch.float16, **sizes), text(length, batch)


def beside_the_cpu(monkeypatch, place, model, ids, calls, padding=None, **options):
    """Logits of a cache on the device and of one on the CPU, and the first of both."""
    given = {} if padding is None else {"attention_mask": padding}
    cache = mdkv.transformers.Cache(model.config, **options)
    found = logits(model, cache, ids, calls, **given).cpu()
    with monkeypatch.context() as plain:
        if EXECUTOR:
            plain.setattr(torch.Tensor, "__dlpack__", PLAIN)
            plain.delitem(device.SOURCES, "cpu")
        own = mdkv.transformers.Cache(model.config, **options)
        expected = logits(model.cpu(), own, ids.cpu(), calls, **{name: one.cpu() for name, one in given.items()})
    model.to(place.to)
    return found, expected, cache, own


@pytest.mark.parametrize("options", [dict(preset="by_window"), dict(preset="best"), dict(preset="by_window", tail=2, keep_rungs=True),
                                     dict(preset="best", while_reading=True)], ids=str)
def test_a_models_cache_as_on_the_cpu(monkeypatch, place, options):
    model, ids = model_and_text(96)
    found, expected, cache, own = beside_the_cpu(monkeypatch, place, model, ids, (90, 1, 2, 1, 1, 1), budget=0.5, least=40, **options)
    assert kl(expected, found) < 0.02 * kl(expected, expected.roll(1, 1))
    assert all(one.device == "cuda" for layer in cache.compressed for one in layer.packed)
    report = cache.report()
    assert report["tokens"] == own.report()["tokens"] == 96 and report["uncompressed_bytes"] == own.report()["uncompressed_bytes"]
    assert abs(report["arena_bytes"] - own.report()["arena_bytes"]) < 0.05 * own.report()["arena_bytes"]
    if EXECUTOR:
        blocks = [block for one in HostSource.made for block in one.blocks.values()]
        queries = sum(one["bytes"]["queries"] for one in report["layers"])
        assert sum(block.nbytes - 256 for block in blocks) == pytest.approx(report["held_bytes"] - queries, rel=0.05)
        del cache
        gc.collect()
        assert not any(one.blocks for one in HostSource.made)


def test_batches_beams_copies_crops_and_files(monkeypatch, place, tmp_path):
    model, ids = model_and_text(64, batch=2)
    padding = torch.ones_like(ids)
    padding[1, :20] = 0
    found, expected, cache, own = beside_the_cpu(monkeypatch, place, model, ids, (60, 1, 1), padding, preset="by_window", budget=0.5)
    assert kl(expected, found) < 0.02 * kl(expected, expected.roll(1, 1))
    other = copy.deepcopy(cache)
    test_transformers.crop(cache, 1)
    again = logits_of(model, cache, ids[:, 61:62], padding[:, :62])
    torch.testing.assert_close(again, found[:, -1:], rtol=0, atol=0)
    other.reorder_cache(torch.tensor([1, 1], device=ids.device))
    assert other.report()["arena_bytes"] == 2 * cache.compressed[0].packed[1].bytes["arena"] * 2
    one = mdkv.transformers.Cache(model.config, preset="by_window", budget=0.5)
    logits(model, one, ids[:1], (60, 1))
    one.save(tmp_path / "a", ids[0, :61], identity="m")
    loaded = mdkv.transformers.Cache.load(tmp_path / "a", model.config, ids[0], identity="m")
    expected = logits_of(model, one, ids[:1, 61:62])
    torch.testing.assert_close(logits_of(model, loaded, ids[:1, 61:62]), expected, rtol=0, atol=0)
    assert loaded.compressed[0].packed[0].device == "cuda"


@torch.no_grad()
def logits_of(model, cache, ids, mask=None):
    return model(ids, attention_mask=mask, **{mdkv.transformers.CACHE_ARGUMENT: cache}).logits.float().cpu()


def test_one_message_for_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(mdkv, "CudaBackend", None)
    with pytest.raises(NotImplementedError, match="keys are on cuda:0, and this package was built without CUDA, as mdkv.build\\(\\) says"):
        device.Backends(mdkv.Backend())[torch.device("cuda:0")]
    with pytest.raises(NotImplementedError, match="keys are on meta; the CPU and CUDA devices are served"):
        device.Backends(mdkv.Backend())[torch.device("meta")]
    assert set(mdkv.build()) == {"version", "instructions", "cuda"}


def test_log_sum_exps_of_torch(random):
    queries, keys, _ = rows(random)
    expected = mdkv.log_sum_exps(queries[:, -9:], keys)
    found = device.log_sum_exps(torch.tensor(queries[:, -9:]), torch.tensor(keys), 0)
    assert off(found.numpy(), expected) < 1e-6


def test_another_stream_waits_for_the_one_before(monkeypatch):
    """TorchSource with stand-ins for torch's own calls."""
    done, streams = [], {}

    class Stream:
        def __init__(self, number):
            self.cuda_stream = number

        def record_event(self):
            done.append(("record", self.cuda_stream))
            return self.cuda_stream

        def wait_event(self, event):
            done.append(("wait", self.cuda_stream, event))

    class Block:
        def __init__(self, address):
            self.data_ptr = lambda: address

        def record_stream(self, stream):
            done.append(("keep", stream.cuda_stream))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams["now"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda size, **options: Block(4096 + size))
    source, first, second = device.TorchSource(torch.device("cuda")), Stream(7), Stream(8)
    streams["now"] = first
    assert [source.stream(), source.stream()] == [7, 7] and not done
    address = source.allocate(512)
    streams["now"] = second
    assert source.stream() == 8 and done == [("record", 7), ("wait", 8, 7), ("keep", 8)]
    source.release(address)
    streams["now"] = first
    assert source.stream() == 7 and done[3:] == [("record", 8), ("wait", 7, 8)]
