"""mdkv.Reader on NumPy arrays: a prompt that is compressed while it is read."""
import threading

import numpy as np
import pytest

import mdkv
from test_mdkv import D, G, H, N, attention, off, prompt_rows, random  # noqa: F401  (random is a fixture)

L = 2


def reader(preset="any_question", *, tokens=N, dtype="float32", limit=0.25, **options):
    return mdkv.Reader(mdkv.preset(preset), layers=L, heads=H, group=G, key_dim=D, tokens=tokens, dtype=dtype,
                       rope=mdkv.Rope(), limit=limit, **options)


def read(made, layers, chunk=256, tokens=N):
    """Reads all tokens; returns outputs and log-sum-exps of each layer, and reports."""
    outputs = [[np.empty((H * G, tokens, D), queries.dtype), np.empty((H * G, tokens), np.float32)] for queries, _, _ in layers]
    reports = []
    for first in range(0, tokens, chunk):
        rows = slice(first, min(first + chunk, tokens))
        for l, (layer, (output, lse)) in enumerate(zip(layers, outputs)):
            made.attend(l, *(one[:, rows] for one in layer), output[:, rows], lse[:, rows])
        reports.append(made.end_chunk())
    return outputs, reports


@pytest.mark.parametrize("dtype, rounding", [(np.float32, 2e-6), (np.float16, 1e-3)])
@pytest.mark.parametrize("preset", ["best", "any_question"])
def test_a_prompt_that_fits_stays_as_it_is(random, preset, dtype, rounding):
    layers = [prompt_rows(random, dtype) for _ in range(L)]
    made = reader(preset, dtype=np.dtype(dtype).name, limit=1.0)
    outputs, reports = read(made, layers)
    assert made.tokens == N and all(one["chosen"]["status"] == "everything_kept" for one in reports)
    packed, report = made.finish()
    assert report["held_bytes"] == report["limit_bytes"] == sum(k.nbytes + v.nbytes for _, k, v in layers)
    for (output, lse), layer, one in zip(outputs, layers, packed):
        want, want_lse = attention(*layer)
        assert off(output, want) < rounding and off(lse, want_lse) < rounding
        assert one.rungs["full"] == H * N and one.tokens == one.compressed_tokens == N and one.window == made.preset.window
        new = prompt_rows(random, dtype, 3)
        one.append(*new[1:])
        later = np.empty((H * G, 3, D), dtype)
        one.attend(new[0], later)
        want, _ = attention(new[0], *(np.concatenate([old, more], axis=1) for old, more in zip(layer[1:], new[1:])))
        assert off(later, want) < rounding


@pytest.mark.parametrize("preset", ["best", "any_question"])
def test_bytes_stay_within_the_limit_and_the_choice_is_that_of_a_prompt(random, preset):
    layers = [prompt_rows(random) for _ in range(L)]
    made, chunk = reader(preset), 100
    limit, token = int(0.25 * N) * 2 * H * D * 4 * L, 2 * H * D * 4
    _, reports = read(made, layers, chunk)
    slack = 0.25
    for i, report in enumerate(reports):
        assert report["tokens"] == min((i + 1) * chunk, N) and report["limit_bytes"] == int((1 + slack) * limit)
        assert report["held_bytes"] <= report["limit_bytes"]
    held = made.bytes
    assert held["arena"] == reports[-1]["held_bytes"] and held["losses"] == reports[-1]["losses_bytes"] > 0
    assert held["tail"] == L * token * 256 and held["state"] == made.state_bytes and held["total"] == sum(held.values()) - held["total"]
    packed, report = made.finish()
    assert report["held_bytes"] == sum(one.bytes["arena"] for one in packed) <= limit == report["limit_bytes"]
    assert report["losses_bytes"] == made.bytes["arena"] == made.bytes["losses"] == 0
    prompt = mdkv.Prompt(mdkv.preset(preset), layers=L, heads=H, group=G, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope())
    for l, (queries, keys, values) in enumerate(layers):
        prompt.read_chunk(l, 0, queries, keys, values)
        prompt.finish_layer(l, queries[:, -64:], keys, values, mdkv.log_sum_exps(queries[:, -64:], keys))
    dropped = prompt.allocate(0.25)["tokens"]["drop"]
    assert sum(one.rungs["drop"] for one in packed) == pytest.approx(dropped, rel=0.2)


def test_tokens_ahead_are_attended_and_not_kept(random):
    queries, keys, values = prompt_rows(random, tokens=300)
    cut = [one[:, :40] for one in (queries, keys, values)]
    found = []
    for ahead in (0, 260):
        made = reader(tokens=300, chunk=64)
        output = np.empty((H * G, 40, D), np.float32)
        for l in range(L):
            made.attend(l, *cut, output)
            if ahead:
                drafts, lse = np.empty((H * G, ahead, D), np.float32), np.empty((H * G, ahead), np.float32)
                made.attend(l, *(one[:, 40:] for one in (queries, keys, values)), drafts, lse, ahead=True)
                want, want_lse = attention(queries[:, 40:], keys, values)
                assert off(drafts, want) < 2e-6 and off(lse, want_lse) < 2e-6
        packed, report = made.finish()
        assert report["tokens"] == 40
        found.append(mdkv.write(packed).tobytes())
    assert found[0] == found[1]


def test_refused_arguments(random):
    layer = prompt_rows(random)
    output = np.empty((H * G, N, D), np.float32)
    for preset in ("by_window", "paper", "evict"):
        with pytest.raises(ValueError, match=f'preset "{preset}" does not replay'):
            reader(preset)
    with pytest.raises(ValueError, match="Reader: rope is missing"):
        mdkv.Reader(mdkv.presets.best, layers=1, heads=H, key_dim=D, tokens=N, dtype="float32", limit=0.5)
    for options, match in (({"limit": mdkv.Budget.bytes(10)}, "at least .* bytes are needed"), ({"limit": 1.5}, "1.5"),
                           ({"chunk": 0}, "chunk is 0"), ({"slack": -1.0}, "slack"), ({"dtype": "int8"}, "int8")):
        with pytest.raises(ValueError, match=match):
            reader(**options)
    with pytest.raises(TypeError, match="Reader: backend is no mdkv.Backend"):
        reader(backend=7)
    with pytest.raises(TypeError, match="a share from 0 to 1 or an mdkv.Budget"):
        reader(limit="12%")
    made = reader(chunk=200)
    with pytest.raises(ValueError, match="reader_options::chunk = 200"):
        made.attend(0, *layer, output)
    made.attend(0, *(one[:, :5] for one in layer), output[:, :5])
    for l in (-1, L):
        for ahead in (False, True):
            with pytest.raises(ValueError, match=f"layer is {l}|layer {l}"):
                made.attend(l, *(one[:, :5] for one in layer), output[:, :5], ahead=ahead)
    with pytest.raises(ValueError, match="layer"):  # the other layer has none
        made.end_chunk()
    made.forget_chunk()
    made.finish()
    for call in (made.end_chunk, made.forget_chunk, made.finish, lambda: made.attend(0, *(one[:, :5] for one in layer), output[:, :5]),
                 lambda: made.attend(0, *(one[:, :5] for one in layer), output[:, :5], ahead=True)):
        with pytest.raises(ValueError, match="finished"):
            call()


def test_readers_of_one_backend_take_turns(random):
    backend, layers = mdkv.Backend(2), [prompt_rows(random) for _ in range(L)]
    found = [None] * 3

    def work(i):
        made = reader(backend=backend)
        read(made, layers)
        found[i] = mdkv.write(made.finish()[0]).tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(found))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found[0] is not None and found.count(found[0]) == len(found)
