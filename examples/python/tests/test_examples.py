"""test_examples.py: three_questions.py, saved_prompt.py, long_prompt.py and the blocks of pages, with a small random model."""
import argparse
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")

import tokenizers

import mdkv.transformers

FOLDER = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(FOLDER)]
import long_prompt
import saved_prompt
import texts
import three_questions
from test_transformers import PART, small


class Letters:
    """A tokenizer of letters with as much of the interface as the example uses."""

    def __call__(self, text, **options):
        ids = [2 + ord(letter) % 90 for letter in text]
        return transformers.BatchEncoding({"input_ids": torch.tensor([ids]) if "return_tensors" in options else ids})

    def decode(self, ids, **_):
        return "".join(chr(32 + int(one) % 90) for one in ids)

    def apply_chat_template(self, messages, **_):
        return f"<user>{messages[0]['content']}<assistant>"


def test_three_questions(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PROSE", tmp_path)  # the made text
    assert len(texts.prose()) > 20000 and all(fact[0] in texts.document(Letters(), 4000) for fact in texts.FACTS)
    model, tokenizer = small("llama"), Letters()
    ids, after = three_questions.prompt_of(tokenizer, 700 // PART)
    found = {"DynamicCache": three_questions.run(model, tokenizer, ids, after, transformers.DynamicCache(config=model.config))}
    for budget in (1.0, 0.25):
        cache = mdkv.transformers.Cache(model.config, budget, "any_question")
        found[f"mdkv {budget}"] = three_questions.run(model, tokenizer, ids, after, cache)
        assert cache.get_seq_length() == ids.shape[1]
    assert found["mdkv 1.0"]["answers"] == found["DynamicCache"]["answers"]
    assert len(three_questions.table(found)) == 4 + 3 * 4


def test_saved_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PROSE", tmp_path)  # the made text
    model, tokenizer, path = small("llama"), Letters(), tmp_path / "prompt.mdkv"
    monkeypatch.setattr(model.config, "_name_or_path", "small")  # the identity of a model that comes from a folder
    ids, after = three_questions.prompt_of(tokenizer, 700 // PART)
    here = saved_prompt.save(model, tokenizer, ids, after, path, 0.25, "best")
    there = saved_prompt.load(model, tokenizer, ids, after, path)
    assert here["answers"] == there["answers"] and here["file"] == path.stat().st_size < here["cache"]
    assert there["resident after the answers"]["Private_Dirty"] == 0 < there["resident after the answers"]["Rss"]


def test_long_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PROSE", tmp_path)  # the made text
    model, tokenizer = small("llama"), Letters()
    chosen = argparse.Namespace(chunk=128, budget=0.25, preset="any_question")
    prompt = three_questions.prompt_of(tokenizer, 700)
    lines = [long_prompt.line(chosen, name, model, tokenizer, *prompt).removeprefix(name).split() for name in long_prompt.NAMES]
    full, held, reading = (float(one[0]) for one in lines)
    assert full > held == reading > 0 and all(one[-3:] == ["0", "of", "4"] for one in lines)


def blocks(page, first, last):
    """Python blocks of a page from one heading up to another."""
    page = page.read_text()
    return re.findall(r"^```python\n(.*?)^```", page[page.index(f"\n## {first}\n"):page.index(f"\n## {last}\n")], re.M | re.S)


def save_small_model(folder):
    """A small random model whose tokens are bytes, for from_pretrained."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bytes_of = tokenizers.Tokenizer(tokenizers.models.BPE({letter: 2 + i for i, letter in enumerate(sorted(letters))}, []))
    bytes_of.pre_tokenizer, bytes_of.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of).save_pretrained(folder)
    small("llama", vocab_size=258, eos_token_id=None).save_pretrained(folder)


@pytest.mark.skipif(mdkv.transformers.CACHE_ARGUMENT != "cache", reason="SKIPPED: pages are for newer versions of transformers")
def test_blocks_of_pages_run_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_small_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "LICENSE").write_text("The licence of a boat. " * (60 // PART))
    names = {}
    for block in blocks(FOLDER.parents[1] / "README.md", "From Python", "See it run"):
        exec(block, names)
    shown, *answers = capsys.readouterr().out.splitlines()
    assert f"any_question: {names['document'].shape[1]} tokens" in shown and len(answers) == 2
    for block in blocks(FOLDER / "README.md", "In transformers", "Over processes"):
        exec(block, names)
    lines = capsys.readouterr().out.splitlines()
    found = [float(line.split()[-1]) for line in lines]  # in bfloat16
    assert len(found) == 12 and max(found[::4]) < 1e-4 < min(found[3::4])
