"""test_while_reading.py: mdkv.transformers.Cache(while_reading=True), whose prompt is compressed while it is read."""
import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")

import mdkv
import mdkv.transformers
from mdkv.cache_layer import attention
from mdkv.transformers import CACHE_ARGUMENT
from test_transformers import PART, crop, interrupted, kl, logits, plain, refused, small, text


def reading(model, budget=0.3, preset="best", **options):
    return mdkv.transformers.Cache(model.config, budget, preset, **{"while_reading": True, **options})


def token_bytes(cache):
    """Bytes of an uncompressed token of all layers."""
    return sum(one.token_bytes() for one in cache.compressed)


@pytest.mark.parametrize("preset", ["best", "any_question"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "phi", "glm", "cohere2", "gpt_oss"])
def test_a_prompt_that_fits_is_that_of_dynamic_cache(kind, preset):
    model, ids = small(kind), text(110)
    for calls, prompt in (((90, 1, 12, 1), None), ((40, 49, 1, 1, 12, 1), 90)):
        expected = logits(model, plain(model), ids, calls)
        cache = reading(model, 1.0, preset, prompt_tokens=prompt)
        torch.testing.assert_close(logits(model, cache, ids, calls), expected, rtol=1e-4, atol=1e-4)
        assert cache.report()["arena_bytes"] == 90 * token_bytes(cache)
        assert all(layer.packed and layer.held is layer.given is None for layer in cache.compressed)


@pytest.mark.parametrize("preset", ["best", "any_question"])
def test_generate_in_chunks(preset):
    model, prompt, chunk = small("llama"), 600 // PART, 256 // PART
    ids = text(prompt + 40)
    options = dict(attention_mask=torch.ones_like(ids[:, :prompt]), max_new_tokens=5, do_sample=False, prefill_chunk_size=chunk)
    cache = reading(model, 1.0, preset, prompt_tokens=prompt)
    assert torch.equal(model.generate(ids[:, :prompt], **{CACHE_ARGUMENT: cache}, **options),
                       model.generate(ids[:, :prompt], **{CACHE_ARGUMENT: plain(model)}, **options))
    calls = (chunk, chunk, prompt - 2 * chunk, 1, 8)
    expected = logits(model, plain(model), ids, calls)[:, -9:]
    for budget, most in ((0.6, 1e-4), (0.3, 2e-2)):
        held = mdkv.transformers.Cache(model.config, budget, preset, prompt_tokens=prompt)
        cache = reading(model, budget, preset, prompt_tokens=prompt)
        assert kl(expected, logits(model, cache, ids, calls)[:, -9:]) < most
        logits(model, held, ids, calls)
        assert cache.report()["arena_bytes"] <= budget * prompt * token_bytes(cache)
        dropped, expected_drops = (sum(one.packed[0].rungs["drop"] for one in each.compressed) for each in (cache, held))
        assert dropped == pytest.approx(expected_drops, rel=0.1, abs=20)


def test_bytes_while_a_prompt_is_read():
    model, ids, chunk = small("llama"), text(1200 // PART), 128 // PART
    cache = reading(model, 0.125, "any_question", prompt_tokens=1200 // PART)
    limit = 0.125 * 1200 / PART
    with torch.no_grad():
        for first in range(0, 8 * chunk, chunk):
            model(ids[:, first : first + chunk], **{CACHE_ARGUMENT: cache})
            report, each = cache.report(), token_bytes(cache)
            assert report["tokens"] == first + chunk and report["other_bytes"] == 0
            assert 0 < report["arena_bytes"] <= 1.25 * limit * each  # a quarter of slack until the end
            held = cache.compressed[0].group.bytes()
            assert report["compressed_bytes"] == report["bytes"] == held["total"]
            assert held["arena"] + held["tail"] <= (1.25 * limit + 256) * each and held["losses"] > 0
            assert report["uncompressed_bytes"] == (first + chunk) * each and cache.layers[0].keys is None
        model(ids[:, 8 * chunk :], **{CACHE_ARGUMENT: cache})
    assert cache.report()["arena_bytes"] <= limit * each and not cache.compressed[0].group.readers


def test_read_and_questions_in_copies():
    model, n = small("llama"), 600 // PART
    ids = text(n + 100, batch=2)
    for mask in (None, torch.stack([torch.ones(n), (torch.arange(n) >= n // 2)]).long()):
        made = []
        for cache in (reading(model, 0.4), reading(model, 0.4, prompt_tokens=n)):
            output = mdkv.transformers.read(model, ids[:, :n], cache, attention_mask=mask)
            assert output.logits.shape[1] == 1 and cache.get_seq_length() == n and all(one.packed for one in cache.compressed)
            made.append(output.logits)
        assert torch.equal(*made)
        after = {} if mask is None else {"attention_mask": torch.nn.functional.pad(mask, (0, 20), value=1)}
        places = {} if mask is None else {"position_ids": (after["attention_mask"].cumsum(-1) - 1)[:, n:]}
        with torch.no_grad():
            copies = [copy.deepcopy(cache) for _ in range(2)]
            answers = [model(ids[:, n : n + 20], **{CACHE_ARGUMENT: one}, **after, **places).logits for one in copies]
            assert torch.equal(*answers) and cache.get_seq_length() == n
            crop(copies[0], 20)
            assert torch.equal(model(ids[:, n : n + 20], **{CACHE_ARGUMENT: copies[0]}, **after, **places).logits, answers[0])
    found = [mdkv.transformers.read(model, ids, cache).logits for cache in (reading(model, 1.0), plain(model))]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_read_after_other_tokens():
    model, ids = small("llama"), text(120, batch=2)
    for make in (plain, lambda one: reading(one, 1.0), lambda one: mdkv.transformers.Cache(one.config, 1.0, tail=100)):
        for mask in (None, torch.cat([torch.ones(1, 120), (torch.arange(120) >= 15)[None]]).long()):
            whole, cache = plain(model), make(model)
            expected = mdkv.transformers.read(model, ids, whole, attention_mask=mask).logits
            mdkv.transformers.read(model, ids[:, :50], cache, 20, None if mask is None else mask[:, :50])
            torch.testing.assert_close(mdkv.transformers.read(model, ids[:, 50:], cache, 20, mask).logits, expected, rtol=1e-4, atol=1e-4)


def test_arguments_of_read():
    model, ids, mask = small("llama"), text(90), torch.ones(1, 90)
    for given, options, match in (
            (ids, {"chunk": 0}, "read: chunk is 0; it must be a whole number of tokens, at least 1"), (ids, {"chunk": -5}, "chunk is -5"),
            (ids, {"chunk": 2.5}, "chunk is 2.5"), (ids, {"chunk": None}, "chunk is None"), (ids, {"chunk": "16"}, "chunk is '16'"),
            (ids[:, :0], {}, r"read: ids has the shape \[1, 0\]; it must be \[B, n\]"), (ids[:0], {}, r"the shape \[0, 90\]"),
            (ids[0], {}, r"the shape \[90\]"), (ids[None], {}, r"the shape \[1, 1, 90\]"), (ids.tolist(), {}, "read: ids is of type list"),
            (ids.float(), {}, "ids is of torch.float32; it must be of torch.int64"), (ids > 5, {}, "ids is of torch.bool"),
            (ids, {"attention_mask": mask[:, :80]}, r"attention_mask has the shape \[1, 80\]; it must be \[1, 90\]"),
            (ids, {"attention_mask": mask.expand(2, 90)}, r"the shape \[2, 90\]; it must be \[1, 90\]"),
            (ids, {"attention_mask": mask[0]}, r"the shape \[90\]"), (ids, {"attention_mask": [1] * 90}, "attention_mask is of type list"),
            (ids, {"cache": None}, "read: cache is of type NoneType")):
        for cache in (reading(model), mdkv.transformers.Cache(model.config), plain(model)):
            with pytest.raises(ValueError, match=match):
                mdkv.transformers.read(model, given, **{"cache": cache, **options})
            assert cache.get_seq_length() == 0


def test_calls_of_any_length():
    model, ids = small("llama"), text(640)
    for calls in ((600,), (300, 300), (256, 44, 299, 1), (2, 100, 98, 200, 100, 100)):
        most, calls = 299 if 299 in calls else True, [max(one // PART, 1) for one in calls]
        cache = reading(model, 0.4, "any_question", prompt_tokens=sum(calls), while_reading=most)
        expected, found = (logits(model, one, ids, (*calls, 1, 8))[:, -9:] for one in (plain(model), cache))
        assert kl(expected, found) < 1e-2 and cache.compressed[0].packed[0].compressed_tokens == sum(calls)
    cache = reading(model, 0.4, prompt_tokens=600)
    with torch.no_grad():
        model(ids[:, :10], **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match=r"reads 300 tokens .* room for 256; generate\(prefill_chunk_size=256\).*while_reading=300"):
            model(ids[:, 10:310], **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="must be reset"):
            model(ids[:, 10:20], **{CACHE_ARGUMENT: cache})


class Attention(torch.nn.Module):
    """Stands for the attention of a model's layers."""

    is_causal, num_key_value_groups = True, 2

    def run(self, cache, rows, mask=None):
        """[L, B, n, H*G, Dv] of queries [L, B, H*G, n, D], keys and values [L, B, H, n, D]."""
        found = []
        for layer, (query, keys, values) in enumerate(zip(*rows)):
            self.layer_idx = layer
            keys, values = cache.update(keys, values, layer)
            found.append(attention(self, query, keys, values, mask, scaling=0.25)[0])
        return torch.stack(found)


@pytest.mark.parametrize("preset", ["best", "any_question"])
def test_each_sequence_of_a_batch_is_that_alone_bit_for_bit(preset):
    model, pads, calls, prompt = small("llama"), (0, 33, 150, 360), (100, 100, 150, 10, 1, 5), 360
    torch.manual_seed(3)
    rows = [torch.randn(3, len(pads), heads, sum(calls), 16) * scale for heads, scale in ((4, 3), (2, 3), (2, 1))]
    options = dict(prompt_tokens=prompt, rope=mdkv.Rope(base=1e4))
    together, found, first = reading(model, 0.3, preset, **options), [], 0
    for length in calls:
        last = first + length
        seen = torch.ones(length, last, dtype=torch.bool).tril(first)[None] & (torch.arange(last) >= torch.tensor(pads)[:, None, None])
        found.append(Attention().run(together, [one[:, :, :, first:last] for one in rows], seen[:, None]))
        first = last
    found = torch.cat(found, dim=2)
    for b, pad in enumerate(pads):
        if pad == prompt:
            assert together.compressed[0].packed[b].compressed_tokens == 0
            continue
        alone = reading(model, 0.3, preset, **{**options, "prompt_tokens": prompt - pad})
        first = 0
        for length in calls:
            start, first = max(first, pad), first + length
            if start < first:
                part = Attention().run(alone, [one[:, b : b + 1, :, start:first] for one in rows])
                assert torch.equal(part[:, 0], found[:, b, start:first])
        packed = [[layer.packed[i] for layer in cache.compressed] for cache, i in ((alone, 0), (together, b))]
        assert mdkv.write(packed[0]).tobytes() == mdkv.write(packed[1]).tobytes()


def test_padding_that_changes_is_refused():
    model, ids = small("llama"), text(100, batch=2)
    for before, after in ((0, 10), (40, 30)):
        cache, mask = reading(model, prompt_tokens=90), torch.ones_like(ids)
        with torch.no_grad():
            mask[1, :before] = 0
            model(ids[:, :40], **{CACHE_ARGUMENT: cache}, attention_mask=mask[:, :40])
            mask[1] = 1
            mask[1, :after] = 0
            with refused("padding changes while its prompt is read"):
                model(ids[:, 40:50], **{CACHE_ARGUMENT: cache}, attention_mask=mask[:, :50])


@pytest.mark.parametrize("tail", [None, 8])
def test_tokens_after_the_prompt_in_its_last_call(tail):
    model, ids = small("llama"), text(120)
    found = []
    for calls in ((50, 30, 20, 1, 1), (50, 50, 1, 1), (100, 1, 1)):
        cache = reading(model, 0.4, tail=tail, prompt_tokens=80)
        found.append(logits(model, cache, ids, calls)[:, -1:])
        assert cache.get_seq_length() == 102 and cache.compressed[0].packed[0].appended in ((22,) if tail is None else (1, 2))
    torch.testing.assert_close(*found[:2], rtol=1e-2, atol=1e-2 if tail is None else 1.0)
    expected = logits(model, plain(model), ids, (50, 50, 1, 1))
    cache = reading(model, 1.0, tail=tail and 40, prompt_tokens=80)
    torch.testing.assert_close(logits(model, cache, ids, (50, 50, 1, 1)), expected, rtol=1e-4, atol=1e-4)
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=3)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: reading(model, 1.0, prompt_tokens=120)}, **options),
                       model.generate(ids, **options))


def test_tail_is_folded_and_memory_stays():
    model, ids = small("llama"), text(400)
    cache = reading(model, 0.5, tail=16, prompt_tokens=200)
    logits(model, cache, ids, (150, 50, *[1] * 10))
    before = cache.report()["layers"]
    assert logits(model, cache, ids[:, 210:], [1] * 90).isfinite().all()
    for old, new in zip(before, cache.report()["layers"]):
        assert new["bytes"]["arena"] <= old["bytes"]["arena"] and new["bytes"]["tail"] <= old["bytes"]["tail"]
    assert cache.get_seq_length() == 300 and cache.compressed[0].packed[0].appended <= 16


def test_beams_and_files(tmp_path):
    model, ids = small("llama"), text(80)
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids), num_beams=3)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: reading(model, 1.0)}, **options), model.generate(ids, **options))
    cache = reading(model, 0.4, prompt_tokens=80)
    with torch.no_grad():
        model(ids[:, :50], **{CACHE_ARGUMENT: cache})
        with refused("saved before its prompt's end"):
            cache.save(tmp_path / "half", ids[:, :50], identity="a")
        model(ids[:, 50:], **{CACHE_ARGUMENT: cache})
        cache.save(tmp_path / "whole", ids, identity="a")
        other = mdkv.transformers.Cache.load(tmp_path / "whole", model.config, ids, identity="a", while_reading=True)
        assert torch.equal(model(ids[:, :5], **{CACHE_ARGUMENT: cache}).logits, model(ids[:, :5], **{CACHE_ARGUMENT: other}).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_short_prompts(kind):
    model, ids = small(kind), text(40)
    for length in (1, 2, 7, 30):
        for preset in ("best", "any_question"):
            calls = (length, 1, 2)
            cache = reading(model, 0.1, preset, least=64)
            torch.testing.assert_close(logits(model, cache, ids, calls), logits(model, plain(model), ids, calls), rtol=1e-4, atol=1e-4)
            for budget in (0, 0.1, 0.5):
                cache = reading(model, budget, preset)
                logits(model, cache, ids, calls)
                tokens = max(budget * length, min(cache.preset.window + 8, length))
                assert cache.report()["arena_bytes"] <= tokens * token_bytes(cache)


@torch.no_grad()
def test_a_cache_whose_call_failed_and_reset():
    model, ids = small("llama"), text(90)
    fresh = logits(model, reading(model, 0.5, prompt_tokens=60), ids, (40, 20, 1))
    cache = reading(model, 0.5, prompt_tokens=60)
    for fails in (0, 1, 2):  # the call that is interrupted, between two layers
        for place, rows in enumerate((ids[:, :40], ids[:, 40:60], ids[:, 60:61])[: fails + 1]):
            hook = model.model.layers[1].register_forward_pre_hook(interrupted) if place == fails else None
            if hook:
                with pytest.raises(KeyboardInterrupt):
                    model(rows, **{CACHE_ARGUMENT: cache})
                hook.remove()
            else:
                model(rows, **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="ended by an exception; the cache must be reset"):
            model(ids[:, :1], **{CACHE_ARGUMENT: cache})
        cache.reset()
        assert torch.equal(logits(model, cache, ids, (40, 20, 1)), fresh)
        cache.reset()


def test_what_is_refused():
    config = small("llama").config
    for preset in ("by_window", "paper", "evict"):
        with pytest.raises(ValueError, match=f'preset "{preset}" knows no losses .*"best" and "any_question"'):
            mdkv.transformers.Cache(config, preset=preset, while_reading=True)
    for value in (0, -1, "yes", 0.5, None):
        with pytest.raises(ValueError, match="it must be True, False, or the most tokens of a call"):
            mdkv.transformers.Cache(config, while_reading=value)
    with refused("while_reading with keep_rungs"):
        mdkv.transformers.Cache(config, while_reading=True, keep_rungs=True)
    with refused("while_reading with group"):
        mdkv.transformers.Cache(config, while_reading=True, group=object())
    model, ids = small("llama"), text(60)
    cache = reading(model, prompt_tokens=55)
    with torch.no_grad():
        model(ids[:, :50], **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="cannot be removed"):
            crop(cache, 1)
        with refused("copied before its prompt's end"):
            copy.deepcopy(cache)
        with refused("reordered"):
            cache.reorder_cache(torch.tensor([0]))
    with torch.no_grad(), refused("layers 0 and 1 have different rotary encodings"):
        model = small("smollm3", no_rope_layers=[1, 0, 1])
        model(ids, **{CACHE_ARGUMENT: reading(model)})
    with torch.no_grad(), pytest.raises(ValueError, match="at least .* bytes are needed"):
        model = small("llama")
        model(ids, **{CACHE_ARGUMENT: reading(model, mdkv.Budget.bytes(100))})


def test_presets_without_a_shared_budget():
    model, ids = small("llama"), text(320)
    preset = mdkv.presets.any_question.replace(shared=None)
    cache = reading(model, 0.4, preset, prompt_tokens=300)
    calls = (200, 100, 1, 8)
    assert kl(logits(model, plain(model), ids, calls)[:, -9:], logits(model, cache, ids, calls)[:, -9:]) < 1e-2
    assert all(one.packed[0].bytes["arena"] <= 0.4 * 300 * one.token_bytes() for one in cache.compressed)
