"""test_kvpress.py: mdkv.kvpress in kvpress' own pipeline and around generate."""
import copy
import os
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
import transformers

import mdkv.kvpress
import mdkv.transformers
from mdkv.transformers import CACHE_ARGUMENT

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
import gguf_folder
import texts
from test_transformers import plain, small, text


class Letters:
    """A tokenizer of letters with as much of the interface as the pipeline uses."""

    bos_token, chat_template, model_max_length = "", None, 10**6

    def encode(self, text, **_):
        return torch.tensor([[2 + ord(letter) % 90 for letter in text]])

    def decode(self, ids, **_):
        return " ".join(str(int(one)) for one in ids)


def pipeline_of(model):
    return kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=Letters())


CONTEXT = "The wind turned north on Monday. " * 12
QUESTIONS = ["When?", "Which wind was it?", "When?"]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_answers_of_the_pipeline_at_all_bytes(kind):
    pipe = pipeline_of(small(kind))
    expected = pipe(CONTEXT, questions=QUESTIONS, max_new_tokens=6)["answers"]
    for press in mdkv.kvpress.presses().values():
        press.compression_ratio = 0.0
        cache = transformers.DynamicCache()
        assert pipe(CONTEXT, questions=QUESTIONS, press=press, cache=cache, max_new_tokens=6)["answers"] == expected
        assert cache.get_seq_length() == len(CONTEXT) and all(layer.packed for layer in cache.layers)
    cache = mdkv.transformers.Cache(pipe.model.config, budget=1.0)
    assert pipe(CONTEXT, questions=QUESTIONS, cache=cache, max_new_tokens=6)["answers"] == expected
    assert pipe(CONTEXT, questions=QUESTIONS, max_new_tokens=6)["answers"] == expected  # and without a press again


def test_bytes_are_freed_where_peers_hide_keys():
    pipe = pipeline_of(small("llama"))
    held = {}
    for name, press in (("none", None), ("mdkv", mdkv.kvpress.MdkvPress(0.75)), ("snapkv", kvpress.SnapKVPress(0.75)),
                        ("adakv", kvpress.AdaKVPress(kvpress.SnapKVPress(0.75)))):
        cache = transformers.DynamicCache()
        with torch.no_grad(), (press(pipe.model) if press else torch.no_grad()):
            pipe.model.model(input_ids=pipe.tokenizer.encode(CONTEXT), **{CACHE_ARGUMENT: cache})
        held[name] = mdkv.kvpress.cache_bytes(cache) / (len(CONTEXT) * 2 * 2 * 16 * 4 * 3)
    assert held["none"] == held["adakv"] == 1
    assert 0.2 < held["mdkv"] < 0.27 and held["snapkv"] == pytest.approx(0.25, abs=0.01)  # mdkv's with its directory


def test_a_context_that_is_compressed_while_it_is_read():
    pipe = pipeline_of(small("llama"))
    context, options = CONTEXT * 2, dict(questions=QUESTIONS, max_new_tokens=6)
    expected = pipe(context, **options)["answers"]
    press = mdkv.kvpress.MdkvPress(0.0, while_reading=True)
    assert pipe(context, press=press, **options)["answers"] == expected
    press.compression_ratio, cache = 0.75, transformers.DynamicCache()
    pipe(context, press=press, cache=cache, **options)
    assert cache.get_seq_length() == len(context) > 2 * 256 and all(layer.packed for layer in cache.layers)
    assert press.cache.report()["arena_bytes"] <= 0.25 * len(context) * 2 * 2 * 16 * 4 * 3
    with torch.no_grad(), press(pipe.model), pytest.raises(ValueError, match="input_ids, which the call must give by its name"):
        pipe.model.model(pipe.tokenizer.encode(context), **{CACHE_ARGUMENT: transformers.DynamicCache()})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("reading", [False, True])
def test_generate_within_the_press_at_all_bytes(kind, reading):
    model, ids, options = small(kind), text(600, batch=2), dict(max_new_tokens=5, do_sample=False)
    one, mask, empty = ids[:1], torch.ones_like(ids), lambda: {CACHE_ARGUMENT: transformers.DynamicCache()}
    mask[1, :333] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    square = torch.ones(600, 600, dtype=torch.bool).tril() & mask.bool()[:, None, None]

    def turns():
        cache = transformers.DynamicCache()
        first = model.generate(one, **{CACHE_ARGUMENT: cache}, **options)
        return model.generate(torch.cat([first, text(20)], 1), **{CACHE_ARGUMENT: cache}, **options)

    def copied():
        cache = transformers.DynamicCache()
        model(one, **{CACHE_ARGUMENT: cache})
        found = [model(text(20), **{CACHE_ARGUMENT: copy.deepcopy(cache)}).logits for _ in range(2)]
        assert torch.equal(*found) and cache.get_seq_length() == 600
        return found[0]

    calls = {
        "a sequence": (lambda: model.generate(one, **options), {}),
        "several": (lambda: model.generate(ids, **options), {}),
        "padded": (lambda: model.generate(ids, attention_mask=mask, **options), {}),
        "short": (lambda: model.generate(ids[:, :30], **options), {}),
        "beams": (lambda: model.generate(one, num_beams=3, **options), {}),
        "embeddings": (lambda: model.generate(inputs_embeds=model.get_input_embeddings()(one), **options), {}),
        "position_ids": (lambda: model.generate(ids, attention_mask=mask, position_ids=places, **options), {}),
        "turns": (turns, {}), "copied": (copied, {}),
        "drafts": (lambda: model.generate(one, prompt_lookup_num_tokens=3, **options), {"prompt_tokens": 600}),
        "first chunk": (lambda: model.generate(one, prefill_chunk_size=200, **empty(), **options), {}),
        "chunks": (lambda: model.generate(ids, attention_mask=mask, prefill_chunk_size=280, **empty(), **options), {"prompt_tokens": 600}),
        "call": (lambda: model(one).logits[:, -1:], {}),
        "cache_position": (lambda: model(ids, position_ids=places, cache_position=torch.arange(600)).logits[:, -1:], {}),
        "square": (lambda: model(ids, attention_mask=square, position_ids=places).logits[:, -1:], {}),
    }
    if kind != "llama":
        del calls["square"]
    for name, (call, given) in calls.items():
        expected, press = call(), mdkv.kvpress.MdkvPress(0.0, while_reading=reading, **given)
        with press(model):
            for _ in range(2):
                torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4, msg=name)
                tokens = {"short": 30, "first chunk": 200}.get(name, 600)
                assert press.cache.compressed[0].packed[0].compressed_tokens == tokens, name
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4, msg=name)
    for given, most in (({}, 600), ({"prompt_tokens": 500}, 500)):
        press = mdkv.kvpress.MdkvPress(0.75, while_reading=reading, **given)
        with press(model):
            model.generate(one, **options)
        assert press.cache.report()["arena_bytes"] <= 0.25 * most * 2 * 2 * 16 * 4 * len(press.cache.compressed)


@torch.no_grad()
def test_calls_within_the_press_that_are_refused():
    model, ids = small("llama"), text(300)
    given = lambda **options: lambda: model(ids, **options)
    for call, match, reading in (
            (lambda: model.generate(ids, max_new_tokens=2, use_cache=False), "use_cache is False; .* it must be True", False),
            (lambda: model.generate(ids, max_new_tokens=2, cache_implementation="static"), "StaticCache; .*cache_implementation out", False),
            (given(**{CACHE_ARGUMENT: mdkv.transformers.Cache(model.config)}), "of type mdkv.transformers.Cache; ", False),
            (given(position_ids=torch.arange(299)[None]), r"cannot cut position_ids, of shape \(1, 299\)", True),
            (given(attention_mask=torch.ones(1, 299)), r"cannot cut attention_mask, of shape \(1, 299\); leave attention_mask out", True),
            (given(attention_mask={"full_attention": None}), "cannot cut attention_mask, a dict", True),
            (given(some_rows=torch.ones(1, 300)), "cannot cut some_rows", True),
            (lambda: model.generate(text(600), max_new_tokens=6, prompt_lookup_num_tokens=3), "prompt_tokens says where it ends", True)):
        with mdkv.kvpress.MdkvPress(0.0, while_reading=reading)(model), pytest.raises(ValueError, match=match):
            call()
    mask = (torch.arange(300) >= 250)[None].long()
    with mdkv.kvpress.MdkvPress(0.0)(model), pytest.raises(NotImplementedError, match="prompt_tokens says where it ends"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, prefill_chunk_size=100, **{CACHE_ARGUMENT: transformers.DynamicCache()})
    for ratio in (-0.1, 1.5, "half"):
        with pytest.raises(ValueError, match="compression_ratio is .*; it must be from 0 to 1"), mdkv.kvpress.MdkvPress(ratio)(model):
            pass
    with kvpress.ComposedPress([mdkv.kvpress.MdkvPress(0.5)])(model), pytest.raises(NotImplementedError, match="part of another press"):
        model(ids)


def test_a_peer_after_the_press_is_itself():
    model = small("llama")
    pipe = pipeline_of(model)
    for press in (kvpress.SnapKVPress(0.5), kvpress.ExpectedAttentionPress(0.5), kvpress.KnormPress(0.5)):
        expected = pipeline_of(small("llama"))(CONTEXT, questions=QUESTIONS, press=press, max_new_tokens=6)
        pipe(CONTEXT, questions=QUESTIONS, press=mdkv.kvpress.MdkvPress(0.5), max_new_tokens=6)
        assert pipe(CONTEXT, questions=QUESTIONS, press=press, max_new_tokens=6) == expected


def test_a_cache_with_tokens_is_refused():
    model, ids = small("llama"), text(30)
    cache = plain(model)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
        with mdkv.kvpress.MdkvPress(0.5)(model), pytest.raises(ValueError, match="first call with an empty cache"):
            model(ids, **{CACHE_ARGUMENT: cache})


def test_registry_names():
    assert list(mdkv.kvpress.presses()) == ["mdkv", "mdkv_best", "mdkv_by_window", "mdkv_paper", "mdkv_evict"]
    assert all(isinstance(press, kvpress.BasePress) for press in mdkv.kvpress.presses().values())


def test_answers_of_a_real_model():
    if not os.environ.get("MDKV_REFERENCE_MODEL"):
        pytest.skip("MDKV_REFERENCE_MODEL names no GGUF file")
    model, tokenizer = gguf_folder.load(os.environ["MDKV_REFERENCE_MODEL"])
    pipe = transformers.pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    context = texts.document(tokenizer, 500)
    questions = [fact[1] for fact in texts.FACTS]
    options = dict(questions=questions, max_new_tokens=20)
    expected = pipe(context, **options)["answers"]
    answers = pipe(context, press=mdkv.kvpress.MdkvPress(0.75), **options)["answers"]
    found = [(fact[2], whole, mine) for fact, whole, mine in zip(texts.FACTS, expected, answers) if fact[2] in whole]
    assert len(found) >= 2 and all(fact in mine for fact, _, mine in found), (expected, answers)
