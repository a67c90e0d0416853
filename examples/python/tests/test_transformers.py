"""test_transformers.py: mdkv.transformers with small random models of several architectures, and with real ones where
MDKV_REFERENCE_MODEL and MDKV_SECOND_MODEL name GGUF files."""
import contextlib
import copy
import gc
import os
import pathlib
import pickle
import sys
import warnings
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")

import mdkv
import mdkv.transformers
from mdkv.cache_layer import CROPS_TO_LENGTH, attention
from mdkv.transformers import CACHE_ARGUMENT

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import gguf_folder

SEED = 7
DEVICE = os.environ.get("MDKV_TEST_DEVICE", "cpu")  # pytest --device
PART = 4 if "MDKV_TEST_SMALL" in os.environ else 1  # the executor has so small a part of long texts
SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, vocab_size=97, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=96)
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": dict(sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4),
    "phi": dict(rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
    "phi3": dict(sliding_window=None),
    "glm": dict(num_hidden_layers=2),
    "cohere2": dict(sliding_window=32, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2),
    "gpt_oss": dict(sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4,
                    num_local_experts=4, num_experts_per_tok=2),
}


def small(kind, dtype=torch.float32, **changes):
    """A model with random weights whose attention is far from uniform: queries and keys are enlarged."""
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **MODELS.get(kind, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(8 if "q_proj" in name or "k_proj" in name or "qkv" in name else 2)
            elif name.endswith("sinks"):
                weight.normal_(2, 3)
    return model


def text(length, batch=1):
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(SEED), device="cpu").to(DEVICE)


@torch.no_grad()
def logits(model, cache, ids, calls, **options):
    """Logits of all calls after the first, which is the prompt."""
    out, first = [], 0
    for length in calls:
        mask = {name: value[:, : first + length] for name, value in options.items()}
        out.append(model(ids[:, first : first + length], **{CACHE_ARGUMENT: cache}, **mask).logits.float())
        first += length
    return torch.cat(out[1:], dim=1)


def plain(model):
    return transformers.DynamicCache(config=model.config)


def crop(cache, removed):
    """Removes the last tokens in any version of transformers."""
    cache.crop(-removed)


def kl(full, other):
    full, other = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((full.exp() * (full - other)).sum(-1).mean())


@pytest.mark.parametrize("preset", ["best", "any_question", "by_window", "paper", "evict"])
@pytest.mark.parametrize("kind", MODELS)
def test_everything_kept_equals_dynamic_cache(kind, preset):
    if preset in ("any_question", "paper", "evict") and kind != "llama":
        preset = "best" if preset == "any_question" else "by_window"
    model, ids = small(kind), text(110)
    calls = (90, 1, 1, 12, 1)
    expected = logits(model, plain(model), ids, calls)
    cache = mdkv.transformers.Cache(model.config, budget=1.0, preset=preset)
    torch.testing.assert_close(logits(model, cache, ids, calls), expected, rtol=1e-4, atol=1e-4)
    assert all(layer.packed for layer in cache.compressed)


@pytest.mark.parametrize("preset", ["best", "by_window"])
def test_less_memory_differs_less_than_eviction(preset):
    model, ids = small("llama"), text(400)
    calls = (370, *[1] * 16)
    expected = logits(model, plain(model), ids, calls)
    found, bytes_of = {}, {}
    for name in (preset, "evict"):
        cache = mdkv.transformers.Cache(model.config, budget=0.25, preset=name)
        found[name] = kl(expected, logits(model, cache, ids, calls))
        report = cache.report()
        bytes_of[name] = sum(one["bytes"]["arena"] for one in report["layers"])
        assert report["uncompressed_bytes"] == 386 * 2 * 2 * 16 * 4 * 3
        assert bytes_of[name] <= 0.25 * 370 * 2 * 2 * 16 * 4 * 3
        assert report["compressed_bytes"] == sum(one["bytes"]["total"] for one in report["layers"])
        assert sum(report["layers"][0]["rungs"].values()) == 2 * 370
    assert 0 < found[preset] < 0.5 * found["evict"]


@pytest.mark.parametrize("preset", ["evict", "best"])
def test_losses_of_ones_own(preset):
    model, ids = small("llama"), text(200)
    preset = mdkv.preset(preset).replace(pooling={"width": 1, "kind": "max"}, shared=None, stand_ins=0,
                                         ratios=mdkv.presets.evict.ratios)
    scores, shapes = [], []

    def losses(layer, queries, keys, values):
        shapes.append((layer, queries.shape[0], *keys.shape, *values.shape))
        scores.append(keys[:, : -preset.window].norm(dim=-1))
        return scores[-1][:, None] * torch.tensor([1.0, 0.0])[:, None]

    cache = mdkv.transformers.Cache(model.config, 0.5, preset, losses=losses, keep_rungs=True)
    after = logits(model, cache, ids, (180, 1, 19))
    assert shapes == [(i, 4, 2, 180, 16, 2, 180, 16) for i in range(3)] and after.isfinite().all()
    for score, rungs in zip(scores, cache.rungs):
        kept = torch.tensor(rungs[0]) == 1
        assert kept.any() and score[kept].min() >= score[~kept].max()  # a token that comes again has the same norm
    report = cache.report()
    assert report["held_bytes"] == report["bytes"] + report["scratch_bytes"] and 0 < report["scratch_bytes"]  # attention's
    assert f"({preset.name}: 200 tokens, {report['arena_bytes']:,} bytes compressed, {report['held_bytes']:,} in all" in repr(cache)
    copied = copy.deepcopy(cache)
    assert copied.losses is losses and copied.get_seq_length() == 200
    batch = torch.cat([ids, ids])
    batch[1, :30] = 0
    mask = torch.ones_like(batch)
    mask[1, :30] = 0
    shapes.clear()
    logits(model, mdkv.transformers.Cache(model.config, 0.5, preset, losses=losses), batch, (180, 1), attention_mask=mask)
    assert [one[3] for one in shapes] == [180, 150] * 3
    with pytest.raises(ValueError, match="losses returned 7; it must be float32"):
        logits(model, mdkv.transformers.Cache(model.config, 0.5, preset, losses=lambda *_: 7), ids, (180, 1))
    with pytest.raises(NotImplementedError, match="losses with while_reading is not served"):
        mdkv.transformers.Cache(model.config, 0.5, "best", losses=losses, while_reading=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reading", [False, True])
def test_half_types(dtype, reading):
    model, ids = small("qwen2", dtype), text(100)
    calls = (50, 40, 1, 5)
    expected = logits(model, plain(model), ids, calls)
    cache = mdkv.transformers.Cache(model.config, budget=1.0, prompt_tokens=90, while_reading=reading)
    assert kl(expected, logits(model, cache, ids, calls)) < (1e-3 if dtype == torch.bfloat16 else 1e-5)
    assert cache.compressed[0].packed[0].dtype == str(dtype).removeprefix("torch.")


def test_both_names_of_the_argument():
    model, ids = small("llama"), text(40)
    expected = logits(model, plain(model), ids, (30, 1))
    for name in {CACHE_ARGUMENT, "past_key_values"}:
        cache = mdkv.transformers.Cache(model.config, 1.0)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error" if name == CACHE_ARGUMENT else "ignore")
            model.generate(ids[:, :30], **{name: cache}, max_new_tokens=2, attention_mask=torch.ones_like(ids[:, :30]))
            crop(cache, 1)
            torch.testing.assert_close(model(ids[:, 30:31], **{name: cache}).logits, expected, rtol=1e-4, atol=1e-4)


def test_generate_gives_the_same_tokens():
    model, ids = small("llama"), text(80)
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    expected = model.generate(ids, **options)
    for extra in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        expected = model.generate(ids, **options, **extra)
        cache = mdkv.transformers.Cache(model.config, budget=1.0, prompt_tokens=80 if "prompt_lookup_num_tokens" in extra else None)
        assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options, **extra), expected), extra


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("preset", ["best", "by_window"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(kind, preset):
    model, prompt = small(kind), 600 // PART
    ids, found = text(prompt + 40), []
    for calls in ((prompt, 1, 8), (prompt // 2, prompt // 2 - 10, 10, 1, 8)):
        cache = mdkv.transformers.Cache(model.config, budget=0.3, preset=preset, prompt_tokens=prompt)
        found.append(logits(model, cache, ids, calls)[:, -9:])
        assert all(layer.packed and layer.held is None for layer in cache.compressed)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    ids = ids[:, :prompt]
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, prefill_chunk_size=256 // PART)
    cache = mdkv.transformers.Cache(model.config, 1.0, preset, prompt_tokens=prompt)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options),
                       model.generate(ids, **{CACHE_ARGUMENT: plain(model)}, **options))
    assert cache.compressed[0].packed[0].compressed_tokens == prompt


def test_tokens_after_the_prompt_in_its_last_call():
    model, ids = small("llama"), text(120)
    for tail in (None, 8):
        found = []
        for calls in ((50, 80 - 50, 20, 1, 1), (50, 50, 1, 1)):
            cache = mdkv.transformers.Cache(model.config, budget=0.4, tail=tail, prompt_tokens=80)
            found.append(logits(model, cache, ids, calls)[:, -1:])
            assert cache.get_seq_length() == 102 and cache.compressed[0].packed[0].appended in ((22,) if tail is None else (1, 2))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 if tail is None else 1.0)
    crop(cache, 1)
    with pytest.raises(ValueError, match="prompt_tokens says where it ends"):
        crop(cache, 1)


def test_second_question_after_crop_and_in_a_copy():
    model, ids = small("llama"), text(160)
    cache = mdkv.transformers.Cache(model.config, budget=0.3)
    expected = logits(model, cache, ids, (100, 10, 1))
    crop(cache, 11)
    assert cache.get_seq_length() == 100
    other = copy.deepcopy(cache)
    with torch.no_grad():
        model(ids[:, 120:140], **{CACHE_ARGUMENT: other})
        model(ids[:, 140:141], **{CACHE_ARGUMENT: cache})
        crop(cache, 1)
        again = [model(ids[:, 100:110], **{CACHE_ARGUMENT: cache}).logits, model(ids[:, 110:111], **{CACHE_ARGUMENT: cache}).logits]
    torch.testing.assert_close(torch.cat(again, dim=1), expected, rtol=1e-5, atol=1e-5)
    assert other.get_seq_length() == 120 and cache.get_seq_length() == 111
    with pytest.raises(ValueError, match="12 tokens cannot be removed"):
        crop(cache, 12)
    own = "no token after the 111 of the cache; generate takes ids of the whole text"
    with pytest.raises((ValueError, IndexError), match=own + "|index -1" * CROPS_TO_LENGTH):  # before 5.23 generate fails by itself
        model.generate(ids[:, 100:110], **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 111
    if CROPS_TO_LENGTH:
        cache.crop(105)
        assert cache.get_seq_length() == 105
    else:
        with pytest.raises(ValueError, match="-n removes"):
            cache.crop(5)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(logits(model, cache, ids, (100, 10, 1)), expected, rtol=1e-5, atol=1e-5)


def test_sliding_layers_stay_as_they_are_and_can_be_cropped():
    model, ids = small("gemma3_text"), text(160)
    caches = [plain(model), mdkv.transformers.Cache(model.config, budget=1.0)]
    found = []
    for cache in caches:
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        elif cache is caches[0]:
            pytest.skip("this version of transformers cannot crop sliding layers")
        first = logits(model, cache, ids, (100, 10, 1))
        crop(cache, 11)
        with torch.no_grad():
            found.append(torch.cat([first, model(ids[:, 120:130], **{CACHE_ARGUMENT: cache}).logits], dim=1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert len(caches[1].compressed) == 2 and caches[1].report()["other_bytes"] > 0


@pytest.mark.parametrize("preset", ["best", "by_window"])
def test_batch_with_padding_on_the_left_equals_single_sequences(preset):
    model, ids = small("llama"), text(130, batch=2)
    pads, calls = (0, 33), (100, 1, 9, 1)
    mask = torch.ones_like(ids)
    mask[1, : pads[1]] = 0
    cache = mdkv.transformers.Cache(model.config, budget=0.3, preset=preset)
    together = logits(model, cache, ids, calls, attention_mask=mask)
    for b, pad in enumerate(pads):
        alone = mdkv.transformers.Cache(model.config, budget=0.3, preset=preset)
        expected = logits(model, alone, ids[b : b + 1, pad:], (calls[0] - pad, *calls[1:]))
        assert kl(expected, together[b : b + 1]) < 1e-3
        assert alone.compressed[0].packed[0].tokens == cache.compressed[0].packed[b].tokens
    kept = mdkv.transformers.Cache(model.config, budget=1.0, preset=preset)
    torch.testing.assert_close(logits(model, kept, ids, calls, attention_mask=mask),
                               logits(model, plain(model), ids, calls, attention_mask=mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset, tail", [("best", None), ("by_window", None), ("by_window", 12)])
def test_a_row_of_padding_only_leaves_the_others_as_they_are(preset, tail):
    model, ids, calls = small("llama"), text(130, batch=3), (90, 1, 5, 1, 9, 1, 9, 10)
    mask = torch.ones_like(ids)
    mask[1, :90], mask[2, :20] = 0, 0
    full = logits(model, plain(model), ids, calls, attention_mask=mask)
    for budget in (1.0, 0.4):
        cache = mdkv.transformers.Cache(model.config, budget, preset, tail=tail)
        found = logits(model, cache, ids, calls, attention_mask=mask)
        assert found.isfinite().all() and cache.compressed[0].lengths() == [126, 36, 106]
        if budget == 1.0 and tail is None:
            torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-4)
        others = mdkv.transformers.Cache(model.config, budget, preset, tail=tail)
        rest = [0, 2]
        expected = logits(model, others, ids[rest], calls, attention_mask=mask[rest])
        # A product of torch depends on the number of rows to the last bit, which may round one number to the next code.
        torch.testing.assert_close(found[rest], expected, rtol=1e-4, atol=1e-4 if budget == 1.0 else 1e-3)
    again = copy.deepcopy(cache)
    again.reorder_cache(torch.tensor([2, 1, 1]))
    assert again.compressed[0].lengths() == [106, 36, 36]


def test_tails_of_short_prompts_are_folded():
    model, ids = small("llama"), text(60)
    for length in (1, 3, 9):
        cache = mdkv.transformers.Cache(model.config, 0.5, "by_window", tail=10)
        found = logits(model, cache, ids, (length, *[1] * 40))
        assert found.isfinite().all() and cache.compressed[0].packed[0].appended <= 10
        assert cache.compressed[0].packed[0].window == min(length, cache.preset.window)


@pytest.mark.parametrize("kind, lower", [("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("llama", torch.float16)])
def test_autocast_is_that_of_dynamic_cache(kind, lower):
    model, ids = small(kind), text(80, batch=2)
    calls = (40, 20, 1, 5, 1)
    with torch.autocast(DEVICE, dtype=lower):
        expected = logits(model, plain(model), ids, calls)
        for preset, reading in (("best", True), ("best", False), ("by_window", False)):
            cache = mdkv.transformers.Cache(model.config, 1.0, preset, prompt_tokens=60, while_reading=reading)
            assert kl(expected, logits(model, cache, ids, calls)) < (1e-3 if lower == torch.bfloat16 else 1e-5)
            assert cache.compressed[0].packed[0].dtype == str(lower).removeprefix("torch.")
    other = mdkv.transformers.Cache(model.config, 1.0, prompt_tokens=60)
    logits(model, other, ids, calls)
    with torch.no_grad(), refused("in a cache of torch.*float16; .*autocast for all calls or for none"):
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    with torch.no_grad(), torch.autocast(DEVICE, dtype=lower), refused("in a cache of torch.float32; .*autocast"):
        model(ids[:, :1], **{CACHE_ARGUMENT: other})


def test_tail_is_folded_and_memory_stays():
    model, ids = small("llama"), text(400)
    cache = mdkv.transformers.Cache(model.config, budget=0.5, preset="by_window", tail=16)
    logits(model, cache, ids, (200, *[1] * 10))
    before = cache.report()["layers"]
    with torch.no_grad():
        for i in range(210, 300):
            model(ids[:, i : i + 1], **{CACHE_ARGUMENT: cache})
    for old, new in zip(before, cache.report()["layers"]):
        assert new["bytes"]["arena"] <= old["bytes"]["arena"] and new["bytes"]["tail"] <= old["bytes"]["tail"]
    assert cache.get_seq_length() == 300 and cache.compressed[0].packed[0].appended <= 16
    with pytest.raises(ValueError, match="cannot be removed"):
        crop(cache, 17)


def test_short_prompts():
    model, ids = small("llama"), text(40)
    for length in (1, 2, 7, 30):
        for preset in ("best", "any_question", "by_window", "paper"):
            calls = (length, 1, 2)
            cache = mdkv.transformers.Cache(model.config, budget=0.1, preset=preset, least=64)
            torch.testing.assert_close(logits(model, cache, ids, calls), logits(model, plain(model), ids, calls),
                                       rtol=1e-4, atol=1e-4)
            for budget in (0, 0.1, np.float32(0.5)):  # by itself a budget can always be kept, and is not more than it must be
                cache = mdkv.transformers.Cache(model.config, budget=budget, preset=preset)
                logits(model, cache, ids, calls)
                layer = cache.compressed[0]
                tokens = max(float(budget) * length, min(cache.preset.window + 8, length))
                assert cache.report()["arena_bytes"] <= tokens * layer.token_bytes() * len(cache.compressed)


@torch.no_grad()
def test_a_cache_whose_call_failed_must_be_reset():
    model, ids = small("llama"), text(90)
    for fails in (0, 1):  # the call that is interrupted, between two layers
        cache = mdkv.transformers.Cache(model.config, budget=0.5)
        for place, rows in enumerate((ids[:, :60], ids[:, 60:61])[:fails + 1]):
            hooks = [model.model.layers[1].register_forward_pre_hook(interrupted)] if place == fails else []
            with pytest.raises(KeyboardInterrupt) if hooks else contextlib.nullcontext():
                model(rows, **{CACHE_ARGUMENT: cache})
            for hook in hooks:
                hook.remove()
        held = cache.compressed[0].tokens
        for _ in range(2):
            with pytest.raises(ValueError, match="ended by an exception; the cache must be reset"):
                model(ids[:, :1], **{CACHE_ARGUMENT: cache})
        assert cache.compressed[0].tokens == held
        cache.reset()
        other = mdkv.transformers.Cache(model.config, budget=0.5)
        assert torch.equal(logits(model, cache, ids, (60, 1)), logits(model, other, ids, (60, 1)))


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("budget", ["12%", None, 1.5, float("nan"), -0.1])
def test_budgets_that_are_none(budget):
    with pytest.raises(ValueError, match="a share is from 0 to 1, and other limits are an mdkv.Budget"):
        mdkv.transformers.Cache(small("llama").config, budget=budget)


def test_a_configuration_is_asked_for():
    with pytest.raises(ValueError, match="config is of type str; it must be the model's own"):
        mdkv.transformers.Cache("SmolLM2")
    with pytest.raises(ValueError, match="config is of no model yet"):
        mdkv.transformers.Cache(transformers.AutoConfig.for_model("llama", **SIZES))


def test_other_caches_and_no_cache_still_work():
    model, ids = small("llama"), text(30)
    with torch.no_grad():
        expected = model(ids).logits
        mdkv.transformers.Cache(model.config)
        assert model.config._attn_implementation == "mdkv"
        torch.testing.assert_close(model(ids).logits, expected)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("options", [dict(preset="by_window", tail=4), dict(), dict(while_reading=True)], ids=str)
def test_torchs_default_device_may_be_another_one(options):
    model, ids = small("llama"), text(60, batch=2)
    found = []
    for place in (DEVICE, "meta"):
        with torch.device(place):
            cache = mdkv.transformers.Cache(model.config, 0.5, **options)
            found.append(logits(model, cache, ids, (50, *[1] * 6)))
            cache.batch_repeat_interleave(2)
    assert torch.equal(*found)


def test_rungs_of_every_token():
    model, ids = small("llama"), text(120)
    for preset in ("best", "by_window"):
        cache = mdkv.transformers.Cache(model.config, budget=0.3, preset=preset, keep_rungs=True)
        logits(model, cache, ids, (100, 1))
        window = cache.preset.window
        assert [one[0].shape for one in cache.rungs] == [(2, 100 - window)] * 3


# What is not served is refused with its reason.


def refused(match, kind="llama", error=NotImplementedError, **arguments):
    return pytest.raises(error, match=match)


def test_a_foreign_configuration_is_refused():
    model, ids = small("llama"), text(30)
    cache = mdkv.transformers.Cache(copy.deepcopy(model.config))
    with torch.no_grad(), refused(r"mdkv.transformers.Cache\(model.config\)"):
        model(ids, **{CACHE_ARGUMENT: cache})


def test_models_that_are_not_served_are_refused():
    config = transformers.AutoConfig.for_model("deepseek_v3", num_hidden_layers=1)
    with refused("latent attention"):
        mdkv.transformers.Cache(config)
    with refused("encoder"):
        mdkv.transformers.Cache(transformers.T5Config(num_layers=1))
    config = small("llama").config
    for name, why in (("flash_attention_2", "flash_attention_2"), ("eager", r"eager, is not served; model.set_attn_implementation\(.sdpa")):
        config._attn_implementation = name
        with refused(why):
            mdkv.transformers.Cache(config)
        assert config._attn_implementation == name
    with refused("cross_attention_layers"):
        mdkv.transformers.Cache(transformers.AutoConfig.for_model("mllama"))
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), text(50)
    expected = logits(model, plain(model), ids, (40, 1))
    with refused("compute attention themselves"):
        mdkv.transformers.Cache(model.config)
    assert torch.equal(logits(model, plain(model), ids, (40, 1)), expected)
    config = transformers.AutoConfig.for_model("mistral", **SIZES, sliding_window=16)
    with refused("no layer that only sees all tokens"):
        mdkv.transformers.Cache(config)


def test_arguments():
    config = small("llama").config
    for options, match in (({"preset": None}, "preset is None; it must be a name"), ({"tail": 0}, "tail is 0"),
                           ({"prompt_tokens": 0}, "prompt_tokens is 0"), ({"preset": "none"}, "none")):
        with pytest.raises(ValueError, match=match):
            mdkv.transformers.Cache(config, **options)


def test_calls_that_are_not_served_are_refused():
    model, ids = small("llama"), text(60)
    make = lambda **options: mdkv.transformers.Cache(model.config, 0.5, **options)
    with refused("gradients"):
        model(ids, **{CACHE_ARGUMENT: make()})
    with torch.no_grad():
        with refused("not causal with padding on the left"):
            mask = torch.ones_like(ids)
            mask[0, -5:] = 0
            model(ids, **{CACHE_ARGUMENT: make()}, attention_mask=mask)
        cache = make()
        model(ids[:, :50], **{CACHE_ARGUMENT: cache})
        with refused("not causal with padding on the left"):
            mask = torch.ones_like(ids)
            mask[0, 50:52] = 0
            model(ids[:, 50:], **{CACHE_ARGUMENT: cache}, attention_mask=mask)
        cache = make()
        model(ids[:, :50], **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="2 sequences; the cache is of 1"):
            model(ids[:, 50:51].expand(2, 1), **{CACHE_ARGUMENT: cache})
        cache = make(prompt_tokens=55)
        model(ids[:, :50], **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="cannot be removed"):
            crop(cache, 1)
        with refused("copied"):
            copy.deepcopy(cache)
        with refused("a layer was copied without its cache"):
            copy.deepcopy(cache.layers[0])
        for call in (pickle.dumps, copy.copy):
            with refused("a cache cannot be pickled; save writes it", error=TypeError):
                call(cache)
        with refused("reordered"):
            cache.reorder_cache(torch.tensor([0]))


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_is_looked_at_in_each_call(inference):
    model, ids = small("llama"), text(64)
    tree = torch.triu(torch.full((4, 4), float("-inf")), 1)

    def fresh():
        cache = mdkv.transformers.Cache(model.config, 1.0)
        model(ids[:, :60], **{CACHE_ARGUMENT: cache})
        shared = np.zeros((1, 1, 4, 64), np.float32)
        mask = torch.from_numpy(shared)
        mask[0, 0, :, 60:] = tree
        return cache, mask, shared

    def call(cache, mask):
        return model(ids[:, 60:64], **{CACHE_ARGUMENT: cache}, attention_mask=mask).logits

    with torch.inference_mode() if inference else torch.no_grad():
        whole = plain(model)
        model(ids[:, :60], **{CACHE_ARGUMENT: whole})
        cache, mask, _ = fresh()
        expected = call(whole, mask)
        for same in (mask, mask, mask.clone()):
            torch.testing.assert_close(call(cache, same), expected, rtol=1e-4, atol=1e-4)
            crop(cache, 4)
        for change in ("torch", "numpy", "inference"):
            cache, mask, shared = fresh()
            mask = mask.clone() if change == "inference" else mask
            call(cache, mask)
            crop(cache, 4)
            if change == "numpy":
                shared[0, 0, 3, 61] = -np.inf
            else:
                mask[0, 0, 3, 61] = float("-inf")
            with refused("not causal with padding on the left"):
                call(cache, mask)
        cache, mask, _ = fresh()
        call(cache, mask)
        with refused("not causal with padding on the left"):  # the mask of a shorter text
            call(cache, mask)


class Attention(torch.nn.Module):
    """Stands for a model's attention that calls the interface in one of many ways."""

    layer_idx, num_key_value_groups, is_causal = 0, 2, True

    def run(self, cache, groups=2, layer=0, change=lambda keys: keys, **options):
        query, key = torch.zeros(1, 4, 10, 16), torch.zeros(1, 2, 10, 16)
        keys, values = cache.update(key, key, 0)
        self.num_key_value_groups, self.layer_idx = groups, layer
        return attention(self, query, change(keys), values, None, scaling=0.25, **options)


@pytest.mark.parametrize("match, options", [
    ("soft caps", {"softcap": 30.0}), ("biases", {"position_bias": 1.0}),
    ("attention weights", {"output_attentions": True}), ("not causal", {"is_causal": False}),
    ("packed sequences", {"cu_seq_lens_q": torch.zeros(2)}), ("sliding windows", {"sliding_window": 8}), ("repeated before the cache", {"groups": 4}),
    ("keys of layer 0", {"layer": 1}), ("repeat_interleave", {"change": lambda keys: keys.repeat_interleave(2, 1)}),
    ("matmul", {"change": lambda keys: keys @ keys.transpose(1, 2)}), ("keys of an mdkv cache", {"change": lambda keys: keys + 0}),
])
def test_attentions_that_are_not_served_are_refused(match, options):
    cache = mdkv.transformers.Cache(small("llama").config)
    if match == "matmul":
        match = "transpose"
    if match == "keys of an mdkv cache":
        match = "keys or values of an mdkv cache"
    with refused(match):
        Attention().run(cache, **options)


def test_compiled_models_are_refused_or_right():
    model, ids = small("llama"), text(60)
    expected = logits(model, plain(model), ids, (50, 1))
    cache = mdkv.transformers.Cache(model.config, 1.0)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        try:
            compiled(ids[:, :50], **{CACHE_ARGUMENT: cache})
            found = compiled(ids[:, 50:51], **{CACHE_ARGUMENT: cache}).logits
        except Exception as error:  # torch wraps errors of compiled code in classes of its own
            assert "mdkv: " in str(error) and "torch.compile" in str(error)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
ROPES = {name: {**SCALED, "rope_type": name} for name in ("yarn", "linear")}
ROPES["llama3"] = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def measured(model, **options):
    """Rotary encodings of all compressed layers, as `best` measures them."""
    cache = mdkv.transformers.Cache(model.config, **options)
    logits(model, cache, text(60), (50, 1))
    return [layer.rope for layer in cache.compressed]


def test_rotary_encodings_are_measured():
    def rope(kind, **changes):
        first, *others = measured(small(kind, **changes))
        assert all(one == first for one in others)
        return first

    none = {"frequencies": [0.0] * 8}
    assert rope("llama") == {"base": 1e4, "rotating": 16, "pairs": "halves"}
    assert rope("phi") == {"base": 1e4, "rotating": 8, "pairs": "halves"}
    assert rope("glm")["pairs"] == rope("cohere")["pairs"] == "neighbours"
    assert rope("gemma3_text")["base"] == 1e6 and rope("cohere2") == none
    full = ["full_attention"] * 3
    windows = dict(sliding_window=32, layer_types=["sliding_attention", "full_attention", "full_attention"])
    assert rope("exaone4", sliding_window=None, layer_types=full)["pairs"] == "halves" and rope("exaone4", **windows) == none
    for parameters in ROPES.values():
        found = rope("llama", rope_parameters=parameters)
        assert len(found["frequencies"]) == 8 and found["frequencies"][-1] < 0.5 * 1e4 ** (-14 / 16)
    given = mdkv.Rope(base=1e4)
    assert measured(small("llama"), rope=given) == [given] * 3


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("kind", ["llama", "phi", "glm", "gemma3_text", *ROPES])
def test_frequencies_are_those_that_the_model_has_after_to(kind, reading):
    ids, calls = text(300), (280 // PART, 1, 12, 1)
    for change in (lambda model: model.to(torch.bfloat16), lambda model: model.half(), lambda model: model.to(torch.bfloat16).float()):
        model = change(small("llama", rope_parameters=ROPES[kind]) if kind in ROPES else small(kind))
        name = "full_attention_inv_freq" if kind == "gemma3_text" else "inv_freq"
        kept = dict(model.model.rotary_emb.named_buffers())[name].float().tolist()
        expected = logits(model, plain(model), ids, calls)
        for preset in ("best", "any_question"):
            cache = mdkv.transformers.Cache(model.config, 1.0, preset, while_reading=300 if reading else False)
            assert kl(expected, logits(model, cache, ids, calls)) < (1e-3 if model.dtype == torch.bfloat16 else 1e-5)
            for layer in cache.compressed:
                assert layer.rope["frequencies"] == kept and layer.rope["pairs"] == ("neighbours" if kind == "glm" else "halves")
    model = small("llama")
    model.model.rotary_emb.inv_freq *= 1.01  # frequencies that no configuration tells
    assert measured(model)[0]["frequencies"] == model.model.rotary_emb.inv_freq.tolist()


def in_calls(model, cache, ids, mask, chunk):
    """Logits of 2 calls after a prompt with padding on the left that was read by calls of `chunk` tokens."""
    mdkv.transformers.read(model, ids, cache, chunk=chunk, attention_mask=mask)
    found = []
    for new in (5, 1):
        mask = torch.nn.functional.pad(mask, (0, new), value=1)
        places = (mask.cumsum(-1) - 1)[:, -new:].contiguous()
        with torch.no_grad():
            found.append(model(ids[:, :new].contiguous(), **{CACHE_ARGUMENT: cache}, attention_mask=mask, position_ids=places).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("kind, preset", [("llama", "best"), ("llama", "any_question"), ("gemma3_text", "best"), ("phi", "best"),
                                          ("glm", "best"), ("cohere2", "best"), ("gptj", "best"), ("gpt_neox", "best"),
                                          ("linear", "best")])
def test_first_calls_of_padding_or_of_one_token(kind, preset, reading):
    more = {name: dict(rope_parameters=one) for name, one in ROPES.items()} | {"gptj": dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8)}
    model = small("llama" if kind in ROPES else kind, **more.get(kind, {}))
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{kind} computes attention itself in this version of transformers")
    ids, options = text(90, batch=2), dict(preset=preset, while_reading=reading)
    rope = mdkv.transformers.Cache(model.config, 1.0, preset)
    logits(model, rope, ids, (50, 1))
    rope = rope.compressed[0].rope
    for pads, chunk in (((15, 40), 16), ((5, 2), 2 * PART - 1), *([] if (kind, preset) != ("llama", "best") else [
            ((0, 37), 16), ((40, 50), 16), ((88, 70), 16), ((89, 90), 90), ((90, 64), 16), ((31, 32), 32), ((0, 0), 1), ((88, 88), 7)])):
        mask = torch.ones_like(ids)
        for b, pad in enumerate(pads):
            mask[b, :pad] = 0
        cache = mdkv.transformers.Cache(model.config, 1.0, **options)
        expected, found = (in_calls(model, one, ids, mask, chunk) for one in (plain(model), cache))
        rows = [b for b, pad in enumerate(pads) if pad < 90]
        torch.testing.assert_close(found[rows], expected[rows], rtol=2e-4, atol=2e-4)
        if max(90 - pad for pad in pads) > 1:
            assert all(layer.rope == rope for layer in cache.compressed), (pads, chunk)
        assert [layer.lengths() for layer in cache.compressed] == [[96 - pad for pad in pads]] * len(cache.compressed)
    mask = torch.ones_like(ids)
    mask[0, :33], mask[1, :40] = 0, 0
    for chunk in (16,) if kind != "llama" else (1, 16):
        options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, prefill_chunk_size=chunk)
        cache = mdkv.transformers.Cache(model.config, 1.0, preset, while_reading=reading, prompt_tokens=90)
        assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options),
                           model.generate(ids, **{CACHE_ARGUMENT: plain(model)}, **options))
        assert cache.compressed[0].packed[0].compressed_tokens == 57


def viewed(module, arguments):
    """Flattens an argument of a layer by view, as quantised layers do."""
    rows = arguments[0]
    return (rows.view(-1) if isinstance(module, torch.nn.Embedding) else rows.view(-1, rows.shape[-1])).view(rows.shape)


@torch.no_grad()
@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi3", "qwen3"])
def test_layers_that_flatten_by_view(kind, reading):
    more = {"gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512)}
    model, ids, mask = small(kind, **more.get(kind, {})), text(90, batch=2), torch.ones(2, 90, dtype=torch.int64)
    mask[1, :20] = 0
    expected = in_calls(model, plain(model), ids, mask, 40)
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding, transformers.pytorch_utils.Conv1D)):
            module.register_forward_pre_hook(lambda *call: (viewed(*call),))
    for preset in ("best", "any_question") + (() if reading else ("by_window",)):
        cache = mdkv.transformers.Cache(model.config, 1.0, preset, while_reading=reading)
        torch.testing.assert_close(in_calls(model, cache, ids, mask, 40), expected, rtol=1e-4, atol=1e-4)
        cache = mdkv.transformers.Cache(model.config, 1.0, preset, while_reading=reading)
        model(ids, **{CACHE_ARGUMENT: cache}, attention_mask=mask)


def test_rotary_encodings_that_are_refused():
    model, ids = small("smollm3", no_rope_layers=[1, 0, 1]), text(60)
    with refused("layers 0 and 1 have different rotary encodings; .*by_window"):
        logits(model, mdkv.transformers.Cache(model.config), ids, (50, 1))
    logits(model, mdkv.transformers.Cache(model.config, preset="by_window"), ids, (50, 1))
    with refused("depend on the text's length"):
        measured(small("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}))
    model = small("llama")  # an encoding that neither its buffers nor its configuration tell
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda states, position_ids: forward(states, 1.01 * position_ids)
    with refused("layer 0 depend on positions in another way than by the rotation that the configuration tells"):
        measured(model)
    model = small("hunyuan_v1_dense")  # normalised after the rotation, by weights
    with torch.no_grad():
        model.model.layers[0].self_attn.key_layernorm.weight.copy_(torch.linspace(0.5, 1.5, 16))
    with refused("layer 0 depend on positions in another way"):
        measured(model)


def test_the_measurement_changes_nothing():
    model, ids = small("qwen3"), text(100)
    calls = (40, 50, 1, 5)
    caches = [mdkv.transformers.Cache(model.config, 0.4, prompt_tokens=90, rope=rope) for rope in (None, mdkv.Rope(base=1e4))]
    found = [logits(model, cache, ids, calls) for cache in caches]
    assert caches[0].compressed[0].rope["base"] == 1e4 and torch.equal(*found)
    cache = mdkv.transformers.Cache(model.config, 0.4)
    logits(model, cache, ids, (90, 1))
    kept = weakref.ref(cache)
    del cache
    gc.collect()
    assert kept() is None


# Real models.


def real_model(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no GGUF file")
    return gguf_folder.load(os.environ[variable])


PROSE = ("The lighthouse keeper wrote one line a day. On Monday the wind turned north and the supply boat stayed in the harbour. "
         "On Tuesday two gulls nested behind the lamp, and he moved the oil to the cellar. ")


@pytest.mark.parametrize("variable, most", [("MDKV_REFERENCE_MODEL", 0.01), ("MDKV_SECOND_MODEL", 0.05)])
def test_real_model(variable, most):
    model, tokenizer = real_model(variable)
    story = "".join(f"Entry {i}: " + PROSE for i in range(8)) + "Beside the log lay a key, and its tag said: Marguerite. "
    ids = tokenizer(story + "".join(f"Entry {i}: " + PROSE for i in range(8, 12)), return_tensors="pt").input_ids[:, :500]
    calls = (468, *[1] * 8, 24)
    expected = logits(model, plain(model), ids, calls)
    kept = mdkv.transformers.Cache(model.config, budget=1.0)
    assert kl(expected, logits(model, kept, ids, calls)) < 1e-6
    found = {}
    for share in (0.5, 0.25, 0.125):
        cache = mdkv.transformers.Cache(model.config, budget=share)
        found[share] = kl(expected, logits(model, cache, ids, calls))
    assert found[0.5] < found[0.25] < most and found[0.25] < found[0.125] < 20 * most, found

    question = tokenizer.apply_chat_template([{"role": "user", "content": story + "\nWhich name is on the key's tag?"}],
                                             add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = [model.generate(**question, **{CACHE_ARGUMENT: cache}, max_new_tokens=16, do_sample=False)
               for cache in (plain(model), mdkv.transformers.Cache(model.config, budget=0.25))]
    full, compressed = (tokenizer.decode(answer[0, question["input_ids"].shape[1]:], skip_special_tokens=True) for answer in answers)
    assert "Marguerite" not in full or "Marguerite" in compressed, (full, compressed)
    print(f"{variable}: KL {found}, answers {full!r}, {compressed!r}")
