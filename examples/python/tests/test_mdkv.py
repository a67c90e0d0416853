"""The classes of `mdkv` itself, on NumPy arrays; torch's tensors where torch is at hand."""
import copy
import os
import pathlib
import pydoc
import pickle
import platform
import re
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest

import mdkv
from mdkv.token_rungs import TokenRungs

H, G, N, D = (2, 3, 240, 32) if "MDKV_TEST_SMALL" in os.environ else (2, 3, 600, 64)
ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def random(request):
    seed = int(os.environ.get("MDKV_TEST_SEED", zlib.crc32(request.node.name.encode())))
    print("MDKV_TEST_SEED", seed)  # pytest shows it if the test fails
    return np.random.default_rng(seed)


def prompt_rows(random, dtype=np.float32, tokens=N):
    """Queries of all tokens, keys, values: keys have outlying channels, and a few tokens take most of the attention."""
    keys = random.normal(size=(H, tokens, D))
    keys[:, :, 3] += 8
    keys[:, ::37] *= 2
    queries = random.normal(size=(H * G, tokens, D))
    return tuple(x.astype(dtype) for x in (queries, keys, random.normal(size=(H, tokens, D))))


def attention(queries, keys, values):
    """Attention of the last n of all tokens, in double precision."""
    n, tokens = queries.shape[1], keys.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), G, axis=0) for x in (keys, values))
    logits = queries.astype(np.float64) @ keys.transpose(0, 2, 1) / np.sqrt(D)
    logits[:, np.arange(tokens) > tokens - n + np.arange(n)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    lse = np.log(weights.sum(axis=2)) + logits.max(axis=2)
    return weights @ values / weights.sum(axis=2, keepdims=True), lse


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("dtype,rounding", [(np.float32, 2e-6), (np.float16, 1e-3)])
@pytest.mark.parametrize("name", ["best", "any_question", "by_window", "paper", "paper_literal", "evict"])
def test_everything_kept_is_full_attention(random, name, dtype, rounding):
    queries, keys, values = prompt_rows(random, dtype)
    layer, report = mdkv.compress(queries, keys, values, 1.0, mdkv.preset(name), rope=mdkv.Rope())
    assert report["status"] == "uncompressed" and layer.bytes["arena"] == keys.nbytes + values.nbytes
    new = prompt_rows(random, dtype, 5)
    layer.append(*new[1:])
    got, lse = np.empty_like(new[0]), np.empty(new[0].shape[:2], np.float32)
    layer.attend(new[0], got, lse)
    want, want_lse = attention(new[0], *(np.concatenate([a, b], axis=1) for a, b in zip((keys, values), new[1:])))
    assert off(got, want) < rounding and np.abs(lse - want_lse).max() < 1e-4


def test_quotas_of_heads(random):
    queries, keys, values = prompt_rows(random, np.float16)
    prompt = mdkv.Prompt(mdkv.preset("by_window"), layers=2, heads=H, group=G, key_dim=D, tokens=N, dtype="float16")
    for layer in range(2):
        prompt.finish_layer(layer, queries[:, -64:], keys, values)
    token = 2 * D * 2  # bytes
    quotas = np.array([[40 * token, 80 * token], [20 * token, 160 * token]])
    chosen = prompt.allocate(quotas=quotas)
    assert 0.9 * quotas.sum() < chosen["token_bytes"] <= quotas.sum()
    sizes = [prompt.pack(layer, queries[:, -64:], keys, values)[0].bytes["arena"] for layer in range(2)]
    window = H * mdkv.preset("by_window").window * token
    assert all(0.9 * quota.sum() < size <= quota.sum() + window for size, quota in zip(sizes, quotas))
    even = prompt.allocate(quotas=np.full((2, H), 75 * token))
    assert even["loss"] != chosen["loss"]
    for wrong, message in ((dict(limit=0.5, quotas=quotas), "both a limit and quotas"), (dict(quotas=quotas[:1]), "quotas"),
                           (dict(quotas=quotas.astype(np.float32)), "int64")):
        with pytest.raises(ValueError, match=message):
            prompt.allocate(**wrong)


def test_budgets_in_all_units(random):
    rows = prompt_rows(random)
    full = rows[1].nbytes + rows[2].nbytes
    for limit, budget in [(0.1, full // 10), (mdkv.Budget.fraction(0.1), full // 10), (mdkv.Budget.bytes(40000), 40000),
                          (mdkv.Budget.kv_size(50), full * 50 // N), (1, full)]:
        assert mdkv.compress(*rows, limit)[1]["budget_bytes"] == budget


def test_views_of_any_strides_give_the_bits_of_their_copies(random):
    queries, keys, values = prompt_rows(random)

    def odd(x):  # tokens first, every second one, coordinates backwards: what DLPack cannot say is copied
        wide = np.zeros((x.shape[1] * 2, x.shape[0], x.shape[2]), x.dtype)
        wide[::2, :, ::-1] = x.transpose(1, 0, 2)
        return wide[::2, :, ::-1].transpose(1, 0, 2)

    results = []
    for rows in [(queries, keys, values), tuple(odd(x) for x in (queries, keys, values))]:
        layer, _ = mdkv.compress(*rows, 0.2)
        layer.append(rows[1][:, :3], rows[2][:, :3])
        output = np.empty((3, H * G, D), np.float32).transpose(1, 0, 2)
        layer.attend(rows[0][:, :3], output)
        results.append(output)
    assert np.array_equal(*results)


def test_prompt_of_several_layers_shares_one_budget(random):
    layers = [prompt_rows(random) for _ in range(3)]
    layers[1][2][...] *= 10  # whose values weigh more
    preset = mdkv.presets.best
    prompt = mdkv.Prompt(preset, layers=3, heads=H, group=G, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope(base=1e6),
                         backend=mdkv.Backend(threads=2))
    assert prompt.state_bytes > 0 and prompt.preset.name == "best"
    last = [(q[:, -preset.queries:], k, v) for q, k, v in layers]
    lse = [mdkv.log_sum_exps(q, k) for q, k, _ in last]
    for i, (q, k, v) in enumerate(layers):
        for first in range(0, N, 256):
            prompt.read_chunk(i, first, *(x[:, first:first + 256] for x in (q, k, v)))
        prompt.finish_layer(i, *last[i], lse[i])
    with pytest.raises(ValueError, match="no rungs were chosen; call allocate first"):
        prompt.pack(0, *last[0], lse[0])
    with pytest.raises(ValueError, match="no rungs were chosen; call allocate first"):
        prompt.rungs_of(0)
    with pytest.raises(ValueError, match="losses_of: layer is 3; it must be from 0 to 2"):
        prompt.losses_of(3)
    with pytest.raises(ValueError, match="rungs_of: layer is 3; it must be from 0 to 2"):
        prompt.rungs_of(3)
    unread = mdkv.Prompt(preset, layers=1, heads=H, group=G, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope())
    with pytest.raises(ValueError, match="layer 0 is not finished; call finish_layer first"):
        unread.losses_of(0)
    with pytest.raises(TypeError, match="backend is no mdkv.Backend"):
        mdkv.Prompt(preset, layers=1, heads=H, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope(), backend=7)
    prompt.allocate(0.5)
    chosen = prompt.allocate(0.125)  # another budget, of the same scores
    packed = [prompt.pack(i, *last[i], lse[i]) for i in range(3)]
    sizes = [layer.bytes["arena"] for layer, _ in packed]
    full = layers[0][1].nbytes + layers[0][2].nbytes
    assert sum(sizes) <= 3 * full // 8 and sum(sizes) > 0.95 * 3 * full / 8
    assert sizes[1] != sizes[0]
    for i, (layer, _) in enumerate(packed):
        rungs = prompt.rungs_of(i)
        assert rungs.shape == (H, N)  # the window is in codes
        assert prompt.losses_of(i).shape == (H, 4, N - preset.window)
        counts = np.bincount(rungs.ravel(), minlength=4)
        assert dict(zip(preset.ratios, counts)) == layer.rungs
    assert sum(chosen["tokens"].values()) == 3 * H * N


@pytest.mark.parametrize("name", ["best", "by_window"])
def test_sink_logits_of_compress(random, name):
    queries, keys, values = prompt_rows(random)
    sinks, preset = random.normal(2, 3, H * G).astype(np.float32), mdkv.preset(name)
    layer, _ = mdkv.compress(queries, keys, values, 0.25, name, rope=mdkv.Rope(), sink_logits=sinks)
    prompt = mdkv.Prompt(preset, layers=1, heads=H, group=G, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope())
    last = queries[:, N - preset.queries :], keys, values
    lse = np.logaddexp(mdkv.log_sum_exps(*last[:2]), sinks[:, None])
    if preset.replayed:
        prompt.read_chunk(0, 0, queries, keys, values, sink_logits=sinks)
    prompt.finish_layer(0, *last, lse, sink_logits=sinks)
    prompt.allocate(0.25)
    assert np.array_equal(mdkv.write([layer]), mdkv.write([prompt.pack(0, *last, lse)[0]]))
    plain, none = (mdkv.write([mdkv.compress(queries, keys, values, 0.25, name, rope=mdkv.Rope(), sink_logits=one)[0]])
                   for one in (None, np.full(H * G, -np.inf, np.float32)))
    assert np.array_equal(plain, none) and not np.array_equal(plain, mdkv.write([layer]))
    with pytest.raises(ValueError, match=r"sink_logits have the shape \[1\]; they must be \[H\*G\], \[6\]"):
        mdkv.compress(queries, keys, values, 0.25, name, rope=mdkv.Rope(), sink_logits=sinks[:1])


def test_log_sum_exps(random):
    queries, keys, values = prompt_rows(random)
    want = attention(queries[:, -7:], keys, values)[1]
    assert np.abs(mdkv.log_sum_exps(queries[:, -7:], keys) - want).max() < 1e-5
    with pytest.raises(ValueError, match=f"log_sum_exps: queries .* are 6 x 9 x {D}, keys"):
        mdkv.log_sum_exps(queries[:, :9], keys[:, :8])


def test_tail_grows_and_is_truncated(random):
    queries, keys, values = prompt_rows(random)
    layer, _ = mdkv.compress(queries, keys, values, 0.2)
    whole = layer.copy()
    for i in range(100):
        layer.append(keys[:, i:i + 1], values[:, i:i + 1])
    whole.append(keys[:, :100], values[:, :100])
    assert layer.appended == whole.appended == 100 and layer.tokens == N + 100
    outputs = [np.empty((H * G, 4, D), np.float32) for _ in range(2)]
    for x, output in zip((layer, whole), outputs):
        x.attend(queries[:, :4], output)
    assert np.array_equal(*outputs)
    layer.truncate(3)
    assert layer.appended == 3 and whole.appended == 100
    fresh, _ = mdkv.compress(queries, keys, values, 0.2)
    fresh.append(keys[:, :3], values[:, :3])
    for x, output in zip((layer, fresh), outputs):
        x.attend(queries[:, 5:6], output[:, :1])
    assert np.array_equal(outputs[0][:, :1], outputs[1][:, :1])


def test_scratch_is_given_back_at_a_prompts_end(random):
    backend = mdkv.Backend(2)
    rows = prompt_rows(random)
    layer, _ = mdkv.compress(*rows, 0.25, backend=backend)
    assert backend.scratch_bytes == 0
    sizes = {"heads": H, "group": G, "key_dim": D, "tokens": N, "dtype": "float32", "backend": backend, "rope": mdkv.Rope()}
    prompt, last = mdkv.Prompt(mdkv.presets.best, layers=2, **sizes), [rows[0][:, -64:], *rows[1:]]
    for i in range(2):
        prompt.read_chunk(i, 0, *rows)
        prompt.finish_layer(i, *last, mdkv.log_sum_exps(*last[:2]))
    for limit in (0.25, 0.5):
        prompt.allocate(limit)
        for i in range(2):
            most = backend.scratch_bytes
            assert most > 0
            prompt.pack(i, *last, mdkv.log_sum_exps(*last[:2]))
        assert backend.scratch_bytes == 0
    reader = mdkv.Reader(mdkv.presets.best, layers=1, limit=0.25, chunk=N, **sizes)
    reader.attend(0, *rows, np.empty_like(rows[0]))
    assert backend.scratch_bytes > 0
    reader.finish()
    assert backend.scratch_bytes == 0
    held = np.empty_like(rows[0][:, :1])
    layer.attend(rows[0][:, :1], held)
    assert 0 < backend.scratch_bytes < most
    backend.release_scratch()
    again = np.empty_like(held)
    layer.attend(rows[0][:, :1], again)
    assert np.array_equal(held, again)

    def exchange(numbers):  # the call that makes it uses the scratch memory
        before = backend.scratch_bytes
        backend.release_scratch()
        assert backend.scratch_bytes == before > 0
        raise InterruptedError

    with pytest.raises(InterruptedError):
        mdkv.compress(*rows, 0.25, backend=backend, ranks=mdkv.Ranks(exchange, first_head=0, heads=2 * H))


def test_recompress_folds_the_tail(random):
    queries, keys, values = prompt_rows(random)
    layer, _ = mdkv.compress(queries, keys, values, 0.2)
    layer.append(keys[:, :200], values[:, :200])
    limit = layer.bytes["arena"]
    report = layer.recompress(queries[:, 168:200], mdkv.Budget.bytes(limit))
    assert layer.appended == 0 and layer.tokens == N + 200 and layer.bytes["arena"] == report["resident_bytes"] <= limit
    assert sum(layer.rungs.values()) == H * (N + 200)
    with pytest.raises(ValueError, match="it must be from 1 to "):
        layer.recompress(queries, 0.2)
    layer.append(keys[:, :200], values[:, :200])
    with pytest.raises(ValueError, match="Q = 0; it must be from 1 to "):
        layer.recompress(queries[:, :0], 0.2)
    assert layer.recompress(queries[:, 199:200])["limit_bytes"] >= layer.bytes["arena"]  # one is enough


def test_a_layer_remembers_its_limit(random, tmp_path):
    queries, keys, values = prompt_rows(random)
    layer, report = mdkv.compress(queries, keys, values, 0.2)
    mdkv.save(tmp_path / "layer", [layer])
    others = [(layer.copy(), report["budget_bytes"]), (mdkv.load(tmp_path / "layer").layer(0), layer.bytes["arena"])]
    for one, limit in [(layer, report["budget_bytes"]), *others]:
        for fold in range(2):
            one.append(keys[:, :200], values[:, :200])
            assert one.recompress(queries[:, 168:200])["limit_bytes"] == limit >= one.bytes["arena"]


@pytest.mark.parametrize("name", ["best", "by_window", "evict"])
def test_rungs_of_all_tokens_through_folds(random, name):
    queries, keys, values = prompt_rows(random, tokens=N + 120)
    preset = mdkv.preset(name)
    prompt = mdkv.Prompt(preset, layers=1, heads=H, group=G, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope())
    rows = queries[:, N - 64 : N], keys[:, :N], values[:, :N]
    lse = mdkv.log_sum_exps(*rows[:2])
    if preset.replayed:
        prompt.read_chunk(0, 0, queries[:, :N], *rows[1:])
    prompt.finish_layer(0, *rows, lse)
    prompt.allocate(0.2)
    layer = prompt.pack(0, *rows, lse)[0]
    found, limit, places = TokenRungs(layer, prompt.rungs_of(0)), layer.bytes["arena"], np.arange(N + 120)
    for end in range(N + 40, N + 121, 40):
        layer.append(keys[:, end - 40 : end], values[:, end - 40 : end])
        found.fold(layer, queries[:, end - 40 : end], mdkv.Budget.bytes(limit), preset)
        assert found.rungs.shape == (H, end - preset.window) and layer.bytes["arena"] <= limit
        stored, unused = np.empty((2, H, end + layer.stand_ins, D), np.float32)
        layer.unpack(stored, unused)
        for h, counts in enumerate(layer.rungs_of_heads):
            assert sum(counts.values()) == end
            rungs = [r for r, rung in enumerate(counts) if rung != "drop" for _ in range(counts[rung])]  # "full" is the last one
            nearest = ((stored[h, : len(rungs), None] - keys[h, :end]) ** 2).sum(axis=2).argmin(axis=1)
            before = nearest < end - preset.window
            assert (nearest[~before] == places[end - preset.window : end]).all() and np.unique(nearest).size == nearest.size
            assert (found.rungs[h, nearest[before]] == np.array(rungs)[before]).all()
            assert (found.rungs[h] > 0).sum() == before.sum()


def test_own_ratio_sets_and_presets(random):
    rows = prompt_rows(random)
    ratios = mdkv.RatioSet("drop", "1/4:int8", "1/2", "full")
    assert list(ratios) == ["drop", "1/4:int8", "1/2", "full"] == list(mdkv.RatioSet("0", "1/4:int8", "1/2", "1"))
    own = mdkv.presets.paper.replace(name="own", ratios=ratios, window=16, pooling={"width": 5}, scale=0.1)
    assert (own.name, own.window, own.pooling) == ("own", 16, {"width": 5, "kind": "max"})
    assert mdkv.presets.paper.window == 32 and "own" in repr(own) and "window" in dir(own)
    layer, _ = mdkv.compress(*rows, 0.4, own)
    assert list(layer.rungs) == list(ratios) and layer.rungs["full"] >= H * 16
    best = mdkv.presets.best
    assert best.replace(shared=None, replayed=None).shared is None
    assert best.replace(refitted=None).refitted is None
    assert best.replace(refitted={"rows": 7}).refitted == {**best.refitted, "rows": 7}
    assert best.replace(replayed={"ahead": 7}).replayed == {**best.replayed, "ahead": 7}
    assert repr(best) != repr(best.replace(window=9)) and "window=9" in repr(best.replace(window=9))
    floats = best.replace(early_weight=0.3, uniform=1e-7, refitted={"ridge": 1 / 3})
    assert (floats.early_weight, floats.uniform, floats.refitted["ridge"]) == (0.3, 1e-7, 0.33333334)
    assert floats.replace(early_weight=floats.early_weight).early_weight == 0.3 and "early_weight=0.3," in repr(floats)


def test_help_lists_what_the_package_has():
    text = pydoc.plain(pydoc.render_doc(mdkv))
    for name in ("Backend", "Budget", "InvalidArgument", "Layer", "Preset", "Prompt", "Ranks", "RatioSet", "Reader", "Rope", "Stored", "presets"):
        assert f"    class {name}(" in text, name
    for name in ("compress", "load", "read", "save", "write"):
        assert f"    {name}(" in text, name
    for preset in (mdkv.presets.best, mdkv.presets.any_question, mdkv.presets.by_window):
        assert repr(preset) in text
    everything = {}
    exec("from mdkv import *", everything)
    assert set(mdkv.__all__) <= set(everything)


def test_losses_of_ones_own_serve_every_preset_without_projected_rungs(random):
    queries, keys, values = prompt_rows(random)
    for name in ("best", "any_question", "by_window"):
        preset = mdkv.preset(name)
        own = random.random((H, 4, N - preset.window), np.float32) * np.float32([1, 1e-2, 1e-4, 0])[:, None]
        layer, report = mdkv.compress(queries[:, -64:], keys, values, 0.25, name, losses=own)
        assert report["resident_bytes"] == layer.bytes["arena"] <= 0.25 * report["full_bytes"]
        assert layer.bytes["arena"] > 0.2 * report["full_bytes"]


@pytest.mark.parametrize("call,message", [
    (lambda r: mdkv.compress(*r, 0.0001), "a budget of (10|5) bytes a layer cannot hold the window"),
    (lambda r: mdkv.compress(*r, 300), r"300.* is no share of the uncompressed bytes, from 0 to 1; bytes are Budget\.bytes"),
    (lambda r: mdkv.compress(*r, mdkv.Budget.bytes(-1)), "-1 is negative"),
    (lambda r: mdkv.compress(r[0], r[1], r[2][:, :9], 0.5), "values must be .* its extent 1 is 9"),
    (lambda r: mdkv.compress(r[0][:5], r[1], r[2], 0.5), "have 5 heads, which the .* KV heads"),
    (lambda r: mdkv.compress(r[0].astype(np.float16), r[1], r[2], 0.5), "the element type is float16"),
    (lambda r: mdkv.compress(*(x.astype(np.float64) for x in r), 0.5), 'dtype is "float64"'),
    (lambda r: mdkv.compress(r[0][None], r[1], r[2], 0.5), r"queries must be \[H\*G, Q, D\], they have 4 dimensions"),
    (lambda r: mdkv.compress(*r, 0.5, "best"), "rope is missing; the preset .best."),
    (lambda r: mdkv.compress(*r, 0.5, "bets"), "preset .bets. is unknown"),
    (lambda r: mdkv.compress(*r, 0.5, losses=np.zeros((H, 4, 93), np.float32)), "losses are of 93 tokens, above 92"),
    (lambda r: mdkv.compress(*r, 0.5, losses=np.zeros((H, 4, 91), np.float32)), "only 91 tokens were read, not all 92"),
    (lambda r: mdkv.compress(*r, 0.5, losses=np.zeros((H, 3, 92), np.float32)), r"losses must be .*H,R,n"),
    (lambda r: mdkv.compress(*r, 0.5, losses=np.zeros((H, 4, 92))), "the element type is float64; float32 is needed"),
    (lambda r: mdkv.compress(*r, 0.5, losses=np.full((H, 4, 92), np.nan, np.float32)), "NaN"),
    (lambda r: mdkv.compress(*r, 0.5, "paper", losses=np.zeros((H, 4, 68), np.float32)), "such a preset cannot replay"),
    (lambda r: mdkv.compress(r[0], r[1] * np.inf, r[2], 0.5), "keys"),
    (lambda r: mdkv.compress(r[0][:, -9:], r[1], r[2], 0.5, mdkv.presets.best), "queries are of 9 tokens and keys of"),
    (lambda r: mdkv.preset("bets"), 'preset "bets" is unknown; there are best, any_question'),
    (lambda r: mdkv.presets.best.replace(windo=3), 'no member "windo"; there are charge, coded_stand_ins'),
    (lambda r: mdkv.presets.best.replace(window="x"), "window is 'x', which has another type"),
    (lambda r: mdkv.presets.best.replace(pooling={"kind": "median"}), 'kind is "median"; there are max, mean, adaptive'),
    (lambda r: mdkv.RatioSet("drop", "int3"), 'rung "int3" is none of drop, int4'),
    (lambda r: mdkv.RatioSet("full", "drop"), "only rung 0 may"),
    (lambda r: mdkv.Rope(pairs="thirds"), 'pairs is "thirds"; there are halves, neighbours'),
    (lambda r: mdkv.Rope(frequencies=[1.0, float("nan")]), r"frequencies\[1\] is nan; it must be finite"),
    (lambda r: mdkv.Rope(frequencies=[1.0, 0.1], rotating=6), "2 frequencies for 6 rotating coordinates"),
    (lambda r: mdkv.Rope(base=float("inf")), "base is inf; it must be finite and above 0"),
    (lambda r: mdkv.Rope(base=0.0), "base is 0; it must be finite and above 0"),
    (lambda r: mdkv.Rope(rotating=3), "rotating is 3; it must be even"),
    (lambda r: mdkv.Rope(rotating=-2), "rotating is -2; it must be even, and not negative"),
    (lambda r: mdkv.Backend(threads=0), "threads must be at least 1"),
    (lambda r: mdkv.compress(*r, 0.5)[0].attend(r[0][:, :1], r[0][:, :1, : D // 2].copy()), "output must be"),
    (lambda r: mdkv.compress(*r, 0.5)[0].attend(r[0][:, :2], r[0][:, :2].copy()), "but 0 were appended"),
    (lambda r: mdkv.compress(*r, 0.5)[0].append(r[1][:, :2, :9], r[2][:, :2]), "keys"),
    (lambda r: mdkv.compress(*r, 0.5)[0].append(r[1][:, :2], r[2][:, :3]), "values"),
    (lambda r: mdkv.compress(*r, 0.5)[0].truncate(-1), "must not be negative"),
    (lambda r: mdkv.compress(*r, 0.5)[0].reserve(-1), "must not be negative"),
])
def test_messages(random, call, message):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=message):
        call(prompt_rows(random, tokens=100))


def test_other_threads_run_and_take_turns(random):
    rows = prompt_rows(random, tokens=2 * N)
    layer, _ = mdkv.compress(*rows, 0.3)
    turns, done = [0], threading.Event()

    def count():
        while not done.is_set():
            turns[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    workers = [threading.Thread(target=lambda: [layer.append(rows[1][:, :7], rows[2][:, :7]) for _ in range(50)]) for _ in range(3)]
    for worker in workers:
        worker.start()
    mdkv.compress(*rows, 0.1, mdkv.presets.best, rope=mdkv.Rope())
    for worker in workers:
        worker.join()
    done.set()
    counter.join()
    assert layer.appended == 3 * 50 * 7 and turns[0] > 0


def test_torch_tensors(random):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = prompt_rows(random, np.float16)
    query = random.normal(size=(H * G, 1, D))
    want, _ = attention(query, *rows[1:])
    for dtype, rounding in [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]:
        queries, keys, values = (torch.tensor(x).to(dtype) for x in rows)
        layer, report = mdkv.compress(queries, keys, values, 1.0)
        assert layer.dtype == str(dtype).removeprefix("torch.")
        output = torch.empty(H * G, 1, D, dtype=dtype)
        layer.attend(torch.tensor(query).to(dtype), output)
        assert off(output.double().numpy(), want) < rounding
        by_torch = torch.logsumexp(queries[:, -3:].float() @ keys.float().repeat_interleave(G, 0).transpose(1, 2) / D**0.5
                                   + torch.full((3, N), -torch.inf).triu(N - 2), dim=2)
        assert np.abs(mdkv.log_sum_exps(queries[:, -3:], keys) - by_torch.numpy()).max() < 1e-3
    with pytest.raises((ValueError, TypeError)):
        layer.attend(torch.zeros(H * G, 1, D, dtype=dtype, device="meta"), output)


def test_outputs_that_cannot_be_written(random):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    queries, keys, values = prompt_rows(random)
    layer, _ = mdkv.compress(queries, keys, values, 0.5)
    read_only = np.broadcast_to(np.float32(0), queries[:, :1].shape)

    class Immutable:  # as jax's arrays are
        shape = read_only.shape

        def __dlpack__(self, **options):
            return read_only.__dlpack__(**options)

        def __dlpack_device__(self):
            return read_only.__dlpack_device__()

    for output in (read_only, Immutable()):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            layer.attend(queries[:, :1], output)
    layer.attend(torch.from_numpy(queries[:, :1]), torch.empty(queries[:, :1].shape))


def test_torch_tensors_with_the_negative_bit(random):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def negative(x):
        """The same values, with the other sign in memory."""
        made = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert made.is_neg() and torch.equal(made, x)
        return made

    rows = [torch.tensor(x) for x in prompt_rows(random)]
    new = [torch.tensor(x) for x in prompt_rows(random, tokens=3)]
    found = []
    for given in (lambda x: x, negative):
        queries, keys, values = (given(x) for x in rows)
        layer, _ = mdkv.compress(queries, keys, values, 0.4, "best", rope=mdkv.Rope())
        layer.append(*(given(x) for x in new[1:]))
        output = torch.empty(H * G, 3, D)
        layer.attend(given(new[0]), output)
        layer.recompress(given(torch.cat([rows[0][:, -5:], new[0]], 1)), 0.4, mdkv.presets.best)
        whole, _ = mdkv.compress(queries, keys, values, 1.0)
        places = torch.arange(N, dtype=torch.int32).repeat(H, 1)
        places = torch._neg_view(-places) if given is negative else places
        written = mdkv.write([layer]), mdkv.write([whole], tokens=N, positions=[places])
        found.append((output.numpy(), mdkv.log_sum_exps(given(new[0]), given(rows[1])), *written))
    for one, other in zip(*found):
        assert np.array_equal(one, other)
    lse = torch.empty(H * G, 1)
    for arguments, name in (((new[0][:, :1], negative(torch.empty(H * G, 1, D).zero_())), "attend: output"),
                            ((new[0][:, :1], torch.empty(H * G, 1, D), negative(lse.zero_())), "attend: lse")):
        with pytest.raises(ValueError, match=f"{name} is a view with torch's negative bit set.*cannot be written"):
            layer.attend(*arguments)
    with pytest.raises(ValueError, match="unpack: keys is a view with torch's negative bit"):
        layer.unpack(negative(torch.zeros(H, N + 3, D)), torch.zeros(H, N + 3, D))
    assert torch.equal(negative(rows[0][0]), rows[0][0])  # an input stays as it is
    with pytest.raises(ValueError, match="element type is complex64"):
        layer.attend(torch.zeros(H * G, 1, D, dtype=torch.complex64).conj(), output[:, :1])


def test_objects_are_not_pickled(random):
    queries, keys, values = prompt_rows(random, tokens=100)
    layer, _ = mdkv.compress(queries, keys, values, 0.5)
    prompt = mdkv.Prompt(mdkv.presets.by_window, layers=1, heads=H, key_dim=D, tokens=9, dtype="float32")
    reader = mdkv.Reader(mdkv.presets.best, layers=1, heads=H, key_dim=D, tokens=9, dtype="float32", rope=mdkv.Rope(),
                         limit=mdkv.Budget.kv_size(16))
    stored = mdkv.read(mdkv.write([layer]))
    for one, hint in ((layer, "mdkv.save writes layers to a file"), (prompt, "mdkv.save"), (reader, "mdkv.save"), (stored, r"mdkv.load\(path\)"),
                      (mdkv.Backend(), r"Backend\(threads\)")):
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"^mdkv: .*cannot be pickled; .*{hint}"):
                call(one)


def test_the_package_is_imported_again_after_it_was_removed():
    code = ("import sys, warnings; warnings.simplefilter('error'); import mdkv, numpy as n\n"
            "k = n.random.default_rng(1).normal(size=(2, 90, 64)).astype('f'); layer, _ = mdkv.compress(k, k, k, 0.5); old = mdkv\n"
            "for name in [name for name in sys.modules if name.partition('.')[0] == 'mdkv']: del sys.modules[name]\n"
            "import mdkv; assert mdkv is not old and mdkv.Layer is old.Layer and mdkv.compiled_for == old.compiled_for\n"
            "other, _ = mdkv.compress(k, k, k, 0.5); assert (mdkv.write([layer]) == old.write([other])).all()\n"
            "for one in (mdkv, old):\n"
            "    try: one.compress(k, k, k, 5)\n"
            "    except mdkv.InvalidArgument: pass\n"
            "print('done')")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "done\n" and ran.stderr == "", ran.stderr


@pytest.mark.parametrize("lines", [None, "processor: 0\n", "flags: fpu\n"])
def test_processors_that_tell_nothing(lines):
    """Without Linux's list of what a processor has, the module for the least instructions runs."""
    code = ("import builtins, io; real = builtins.open\n"
            "def open(name, *more, **options):\n"
            "    if name != '/proc/cpuinfo': return real(name, *more, **options)\n"
            "    if lines is None: raise FileNotFoundError(name)\n"
            "    return io.StringIO(lines)\n"
            "builtins.open = open; import mdkv; print(mdkv.compiled_for)")
    ran = subprocess.run([sys.executable, "-c", f"lines = {lines!r}\n" + code], capture_output=True, text=True)
    own = list(pathlib.Path(mdkv.__file__).parent.glob("_own.*"))
    if lines and lines.startswith("flags") and not own and platform.machine() == "x86_64":
        assert "holds no module for this processor; it lacks abm, avx2, bmi1, bmi2, f16c, fma, movbe." in ran.stderr
    else:
        assert ran.returncode == 0 and ran.stdout.strip() == (mdkv.compiled_for if own else "x86-64-v3"), ran.stderr


def test_both_modules_agree(random):
    """Where both sets of instructions run, the other one gives the same up to rounding."""
    names = [p.name.split(".")[0] for p in pathlib.Path(mdkv.__file__).parent.glob("_x86_64_v*.so")]
    if len(names) < 2 or mdkv.compiled_for != "x86-64-v4":
        pytest.skip(f"this processor runs {mdkv.compiled_for}; the package has {names or 'its own instructions'}")
    code = ("import mdkv._x86_64_v3 as m, numpy as n; r = n.random.default_rng(1); k = r.normal(size=(2, 300, 64)).astype('f');"
            "p = m.Prompt(m.preset('by_window'), layers=1, heads=2, key_dim=64, tokens=300, dtype='float32');"
            "p.finish_layer(0, k[:, -64:], k, k); p.allocate(0.3); c, _ = p.pack(0, k[:, -64:], k, k); o = n.empty((2, 1, 64), 'f');"
            "c.attend(k[:, :1], o); print(m.compiled_for, float(abs(o).sum()))")
    results = [subprocess.run([sys.executable, "-c", code.replace("_x86_64_v3", name)], capture_output=True, text=True,
                              check=True).stdout.split() for name in sorted(names)]
    assert [name for name, _ in results] == ["x86-64-v3", "x86-64-v4"]
    assert abs(float(results[0][1]) - float(results[1][1])) < 1e-3 * float(results[0][1])


def test_package_holds_no_path_of_the_machine_that_built_it():
    for module in pathlib.Path(mdkv.__file__).parent.glob("*.so"):
        assert str(ROOT).encode() not in module.read_bytes(), module.name


def test_types_of_the_module_lie_beside_it():
    types = (pathlib.Path(mdkv.__file__).parent / "_module.pyi").read_text()
    for name in set(mdkv.__all__) & set(vars(mdkv._module)):
        assert re.search(rf"^((class|def) )?{name}\b", types, re.MULTILINE), name
    assert f"library_version: str = '{mdkv.__version__}'" in types and "NDArray" not in types
