#!/usr/bin/env python3
"""Compares our tokenizer with PyPI `tokenizers` on random Unicode text, for every pre-tokeniser.

usage: crosscheck_tokenizer.py DUMP [--model MODEL [--alone]] [--text FILE] [--count 10000] [--seed SEED]

DUMP is the executable of tests/runner/dump.cpp. With a model, its vocabulary is used for its own pre-tokeniser, its
control tokens are tried too, and conversations are compared with what jinja2 makes of its template; without, and for the
other pre-tokenisers, a small vocabulary is trained here. --alone leaves all but the model's own out. FILE adds its lines
to the random strings. Needs: pip install gguf==0.19 jinja2 tokenizers
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

import gguf
import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from public_words import PRE_TOKENIZERS

CONTROL, USER_DEFINED = 3, 4

# Inclusive ranges of code points, by what they try out.
RANGES = {
    "ascii": [(0x20, 0x7E)], "latin": [(0xA0, 0x17F)], "greek and cyrillic": [(0x370, 0x52F)],
    "hebrew and arabic": [(0x590, 0x6FF)], "indic and thai": [(0x900, 0xE7F)], "hangul": [(0xAC00, 0xD7A3)],
    "japanese and chinese": [(0x3000, 0x30FF), (0x4E00, 0x9FFF)], "marks": [(0x300, 0x36F)],
    "digits": [(0x30, 0x39), (0x660, 0x669), (0xB2, 0xB3), (0x2150, 0x218B), (0xFF10, 0xFF19)],
    "space": [(0x20, 0x20), (0x9, 0xD), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E),
              (0x2000, 0x200F), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)],
    "symbols": [(0x2010, 0x2027), (0x20A0, 0x20BF), (0x2190, 0x22FF)], "emoji": [(0x1F300, 0x1F64F), (0x1F900, 0x1F9FF)],
    "control": [(0x0, 0x1F), (0x7F, 0x9F)], "other planes": [(0x10000, 0x1FFFF), (0x20000, 0x2A6DF), (0xE0000, 0xE01EF)],
    "private and odd": [(0xE000, 0xE0FF), (0xFE00, 0xFE0F), (0xFFF0, 0xFFFD), (0xF0000, 0xF00FF), (0x100000, 0x1000FF)],
}
PHRASES = ["'s", "'T", "'re", "'LL", "'ſ", "don't", " ", "  ", "   ", "\n", "\r\n", "\n\n", " \n", "\t", "a  5", "1234567",
           "3.14159", "http://x.y/z?a=b&c=d", "<|im_end|>", "\u00E9", "e\u0301",
           "\U0001F468\u200D\U0001F469\u200D\U0001F467", "\U0001F1E9\U0001F1EA", "!!!", "...", "$1,000", "x^2+y~|z"]


def random_text(chance):
    """Words and stretches of one kind each, so that patterns find something to hold on to."""
    parts = []
    for _ in range(chance.randrange(0, 12)):
        if chance.random() < 0.3:
            parts.append(chance.choice(PHRASES))
            continue
        ranges = chance.choice(list(RANGES.values()))
        for _ in range(chance.choice((1, 1, 2, 3, 5, 9, 30))):
            character = chr(chance.randint(*chance.choice(ranges)))
            # Unassigned characters are what differing Unicode versions differ in.
            if unicodedata.category(character) != "Cn":
                parts.append(character)
        if chance.random() < 0.5:
            parts.append(" ")
    return "".join(parts)


def theirs(vocabulary, merges, name, control=(), defined=()):
    pairs = [tuple(merge.split(" ")) for merge in merges]
    model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    return tokenizer


def ids_of(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def compare(what, dump, command, model, expect, texts, folder):
    listing = pathlib.Path(folder) / "texts.json"
    listing.write_text(json.dumps(texts))
    answer = subprocess.run([dump, command, model, str(listing)], check=True, stdout=subprocess.PIPE)
    for text, mine in zip(texts, json.loads(answer.stdout), strict=True):
        expected = expect(text)
        if mine != expected:
            sys.exit(f"crosscheck tokenizer ({what}): {text!r} is {mine} here and {expected} there")
    print(f"crosscheck tokenizer ({what}): {len(texts)} compared, {len(texts)} equal")


def read_model(path):
    fields = gguf.GGUFReader(path).fields
    strings = lambda key: [bytes(fields[key].parts[i]).decode() for i in fields[key].data]
    tokens = strings("tokenizer.ggml.tokens")
    kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
    control, defined = ([token for token, own in zip(tokens, kinds) if own == kind] for kind in (CONTROL, USER_DEFINED))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    template = fields["tokenizer.chat_template"].contents()
    return fields["tokenizer.ggml.pre"].contents(), vocabulary, strings("tokenizer.ggml.merges"), control, defined, template


def train(name, corpus):
    """A small vocabulary. Every 20th merge is left out, so that some tokens are reached by no merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return model["vocab"], [merge for i, merge in enumerate(merges) if i % 20 != 19]


def write_vocabulary(path, name, vocabulary, merges):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([1] * len(vocabulary))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_template(what, dump, model, template, tokenizer, texts, chance, folder):
    """Conversations of a system text or none and one question, as the file's own template writes them."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    written = environment.from_string(template)

    def conversation(pair):
        roles = (("system", pair[0]), ("user", pair[1]))
        messages = [{"role": role, "content": text} for role, text in roles if text is not None]
        return ids_of(tokenizer)(written.render(messages=messages, add_generation_prompt=True))

    plain = [text for text in texts if "<|" not in text]  # in a text from outside, a control token's name is just text
    pairs = [(chance.choice(plain) if chance.random() < 0.3 else None, question) for question in plain[:2000]]
    compare(f"{what}, conversations", dump, "chat", model, conversation, pairs, folder)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dump")
    options.add_argument("--model")
    options.add_argument("--alone", action="store_true")
    options.add_argument("--text")
    options.add_argument("--count", type=int, default=10000)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = options.parse_args()
    print(f"crosscheck tokenizer: seed {given.seed}")
    chance = random.Random(given.seed)
    texts = [random_text(chance) for _ in range(given.count)]
    if given.text:
        texts += pathlib.Path(given.text).read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
    own = None
    with tempfile.TemporaryDirectory() as folder:
        if given.model:
            own, vocabulary, merges, control, defined, template = read_model(given.model)
            mixed = [chance.choice(control + defined).join(random_text(chance) for _ in range(3)) for _ in range(1000)]
            compare(f"{own}, the model's vocabulary", given.dump, "encode", given.model,
                    ids_of(theirs(vocabulary, merges, own, (), defined)), texts + mixed, folder)
            special = theirs(vocabulary, merges, own, control, defined)
            compare(f"{own}, with control tokens", given.dump, "encode-special", given.model, ids_of(special), mixed, folder)
            compare_template(own, given.dump, given.model, template, special, texts, chance, folder)
        if given.alone:
            return
        corpus = [random_text(chance) for _ in range(2000)] + [__doc__] * 20 + texts[:500]
        for name in PRE_TOKENIZERS:
            if name != own:
                vocabulary, merges = train(name, corpus)
                model = str(pathlib.Path(folder) / "vocabulary.gguf")
                write_vocabulary(model, name, vocabulary, merges)
                compare(f"{name}, a trained vocabulary", given.dump, "encode", model,
                        ids_of(theirs(vocabulary, merges, name)), texts, folder)


if __name__ == "__main__":
    main()
