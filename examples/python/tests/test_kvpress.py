"""test_kvpress.py: mdkv.kvpress in kvpress' own pipeline."""
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
