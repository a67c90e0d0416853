"""test_device.py: what only a device has, and layers on a device beside the CPU's; see conftest.py's --device."""
import ctypes
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")

import mdkv
import mdkv.transformers
from mdkv import device
from conftest import HostSource
from test_mdkv import off, random  # noqa: F401  (random is a fixture)
from test_transformers import kl, logits, small, text

H, G, N, D = 2, 2, 150, 32
BYTES = 0.02  # the CPU multiplies codes by queries of 8 bits


@pytest.fixture
def place(place):
    if place.name == "cpu":
        pytest.skip("takes --device cuda, or --device executor in a build with the executor of PTX (MDKV_PYTHON_EXECUTOR)")
    return place


@pytest.fixture
def stand_in(place):
    if place.name != "executor":
        pytest.skip("takes the executor's stand-in for streams and memory")
    return place


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


@pytest.mark.parametrize("preset, share, source", [("by_window", 0.3, True), ("best", 0.5, True), ("by_window", 0.5, False)])
def test_a_prompt_is_packed_attended_folded_and_appended_as_on_the_cpu(random, place, preset, share, source):
    prompt, new = rows(random), rows(random, 5)
    there = [torch.tensor(one.repeat(2, axis=2), device=place.to)[:, :, ::2] for one in prompt]  # whose rows have gaps
    on = place.on() if source else mdkv.CudaBackend(0 if place.to == "cpu" else torch.cuda.current_stream().cuda_stream)
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


def test_a_decode_step_asks_for_a_stream_and_for_no_memory(random, stand_in):
    there = [torch.tensor(one) for one in rows(random)]
    on = stand_in.on()
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


def test_a_decode_step_waits_for_nothing(random, stand_in):
    """The executor refuses calls that wait while a stream is being captured, and runs what was captured later."""
    runtime, stream, graph, made = ctypes.CDLL(mdkv._module.__file__), *(ctypes.c_void_p() for _ in range(3))
    on = stand_in.on()
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


def test_the_allocators_error_leaves_a_layer_as_it_was(random, stand_in):
    here, _ = mdkv.compress(*rows(random), 0.3)
    layer, source = here.to(stand_in.on()), HostSource.made[-1]
    new = rows(random, 2)
    source.refuses = ArithmeticError("no memory today")
    with pytest.raises(ArithmeticError, match="no memory today"):
        decoded(layer, *new, to="cpu")
    source.refuses = None
    assert layer.appended == 0 and off(decoded(layer, *new, to="cpu"), decoded(here, *new)) < BYTES


@pytest.mark.parametrize("options", [dict(preset="by_window", tail=2, keep_rungs=True), dict(preset="best"),
                                     dict(preset="best", while_reading=True)], ids=str)
def test_a_models_cache_as_on_the_cpu(monkeypatch, place, options):
    model, ids = small("llama", torch.float16, num_hidden_layers=2), text(96)
    calls, options = (90, 1, 2, 1, 1, 1), dict(budget=0.5, least=40, **options)
    cache = mdkv.transformers.Cache(model.config, **options)
    found = logits(model, cache, ids, calls).cpu()
    with monkeypatch.context() as plain:
        if place.name == "executor":
            plain.setattr(torch.Tensor, "__dlpack__", place.plain)
            plain.delitem(device.SOURCES, "cpu")
        own = mdkv.transformers.Cache(model.config, **options)
        expected = logits(model.cpu(), own, ids.cpu(), calls)
    assert kl(expected, found) < 0.02 * kl(expected, expected.roll(1, 1))
    assert all(one.device == "cuda" for layer in cache.compressed for one in layer.packed)
    report = cache.report()
    assert report["tokens"] == own.report()["tokens"] == 96 and report["uncompressed_bytes"] == own.report()["uncompressed_bytes"]
    assert abs(report["arena_bytes"] - own.report()["arena_bytes"]) < 0.05 * own.report()["arena_bytes"]
    if place.name == "executor":
        blocks = [block for one in HostSource.made for block in one.blocks.values()]
        queries = sum(one["bytes"]["queries"] for one in report["layers"])
        assert sum(block.nbytes - 256 for block in blocks) == pytest.approx(report["held_bytes"] - queries, rel=0.05)
        del cache
        gc.collect()
        assert not any(one.blocks for one in HostSource.made)


def test_one_message_for_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(mdkv, "CudaBackend", None)
    with pytest.raises(NotImplementedError, match="keys are on cuda:0, and this package was built without CUDA, as mdkv.build\\(\\) says"):
        device.Backends(mdkv.Backend())[torch.device("cuda:0")]
    with pytest.raises(NotImplementedError, match="keys are on meta; the CPU and CUDA devices are served"):
        device.Backends(mdkv.Backend())[torch.device("meta")]
    assert set(mdkv.build()) == {"version", "instructions", "cuda"}


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
