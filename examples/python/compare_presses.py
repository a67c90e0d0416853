"""compare_presses.py: mdkv beside kvpress' presses in kvpress' own pipeline, at measured bytes, on texts with hidden facts.

    python compare_presses.py --model ~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf --tokens 1024 --shares 0.25,0.125

`held` is measured on the cache after the context: AdaKV and KVzip hide keys, and hold all of them. `right` counts answers that
have the fact, `same` those that are the uncompressed cache's word for word. Needs kvpress 0.5 and transformers 5.2. For
kvpress' own data sets see mdkv/kvpress.py.
"""
import argparse
import contextlib
import logging
import warnings

import torch
from kvpress import AdaKVPress, ExpectedAttentionPress, KVzipPress, SnapKVPress
from transformers import DynamicCache, pipeline

import gguf_folder
import texts
from mdkv.kvpress import MdkvPress, cache_bytes

PRESSES = {
    "mdkv any_question": lambda removed: MdkvPress(removed),
    "mdkv best": lambda removed: MdkvPress(removed, "best"),
    "SnapKV": lambda removed: SnapKVPress(removed),
    "Expected Attention": lambda removed: ExpectedAttentionPress(removed),
    "AdaKV of SnapKV": lambda removed: AdaKVPress(SnapKVPress(removed)),
    "AdaKV of Expected Attention": lambda removed: AdaKVPress(ExpectedAttentionPress(removed, epsilon=1e-2)),
    "KVzip": lambda removed: KVzipPress(removed),
}


class Measured:
    """A press, or None for none, that notes the bytes of the cache after the context."""

    def __init__(self, press, cache):
        self.press, self.cache, self.bytes = press, cache, 0

    @contextlib.contextmanager
    def __call__(self, model):
        with self.press(model) if self.press else contextlib.nullcontext():
            yield
        self.bytes = cache_bytes(self.cache)


def answers_of(pipe, context, press, new_tokens=20):
    """Answers to all facts' questions about a context that is read once, and the bytes of its cache."""
    cache = DynamicCache()
    measured = Measured(press, cache)
    questions = [fact[1] for fact in texts.FACTS]
    return pipe(context, questions=questions, press=measured, cache=cache, max_new_tokens=new_tokens)["answers"], measured.bytes


def compare(model, tokenizer, tokens=1024, shares=(0.25, 0.125), chapters=(7,), names=tuple(PRESSES)):
    """Rows of name, share asked for, share held, right, same, number of answers; the uncompressed cache's first."""
    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    contexts = [texts.document(tokenizer, tokens, number=chapter) for chapter in chapters]
    full = [answers_of(pipe, context, None) for context in contexts]
    facts = [fact[2] for fact in texts.FACTS]

    def row(name, share, found):
        pairs = [(answer, fact, whole) for (answers, _), (wholes, _) in zip(found, full)
                 for answer, fact, whole in zip(answers, facts, wholes)]
        return (name, share, sum(one[1] for one in found) / sum(one[1] for one in full),
                sum(fact in answer for answer, fact, _ in pairs), sum(answer == whole for answer, _, whole in pairs), len(pairs))

    rows = [row("uncompressed", 1.0, full)]
    for share in shares:
        rows += [row(name, share, [answers_of(pipe, context, PRESSES[name](1 - share)) for context in contexts]) for name in names]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="~/.cache/mdkv/SmolLM2-135M-Instruct.Q4_1.gguf", help="GGUF file or folder")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--shares", default="0.25,0.125", help="shares of the bytes to keep")
    parser.add_argument("--chapters", default="7", help="numbers of the texts, 1 to 16")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model, tokenizer = gguf_folder.load(chosen.model)
    rows = compare(model, tokenizer, chosen.tokens, [float(one) for one in chosen.shares.split(",")],
                   [int(one) for one in chosen.chapters.split(",")])
    print("| press | asked | held | right | same |\n|:--|--:|--:|--:|--:|")
    for name, share, held, right, same, count in rows:
        print(f"| {name} | {100 * share:.1f} % | {100 * held:.1f} % | {right} of {count} | {same} of {count} |")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main()
