"""head_scores.py: which query heads retrieve, in the form that HeadKV publishes and mdkv_run --head-scores reads:
{"layer-head": [score, ...], ...}, a number for each prompt that counts.

    python bench/quality/head_scores.py --model MODEL.gguf --text prose.txt --out scores.json [--kind r]

A made-up statement is put between two sentences of the text, one like it about something else elsewhere, and the model is asked
for the first, in its chat template. While it answers greedily, the attention of each query head is looked at in each step (eager
attention of transformers): r2 (FYYFU/HeadKV, Important_Head/retrieval_head_detection_r2.py) adds the attention on those of the k
strongest positions that lie in the statement, over k, its tokens; r adds 1/k if the strongest position lies in the statement and
holds the token that the model says next. A prompt counts if the words of the answer agree with the statement by an F1 above --least-f1
and more than with the look-alike. Needs transformers and gguf.
"""
import argparse
import collections
import json
import pathlib
import random
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"))
import gguf_folder

PURSUITS = ["play chess with strangers", "walk along the river", "listen to old jazz records", "paint the harbour", "feed the ducks"]
TREATS = ["drink a cup of green tea", "eat a slice of lemon cake", "buy a bag of chestnuts", "have a bowl of tomato soup"]
FORMS = [
    ("{}'s favorite thing is to {} and {} in the evening.", "What is {}'s favorite thing?",
     ["Mary", "John", "Olivia", "Peter", "Amelia", "Victor", "Clara", "Samuel"], PURSUITS, TREATS),
    ("The best thing to do in {} is to {} and {} on a sunny day.", "What is the best thing to do in {}?",
     ["Lisbon", "Montreal", "Kyoto", "Vienna", "Nairobi", "Seattle", "Prague", "Dublin"], PURSUITS, TREATS),
    ("The {} is hidden {}, {}.", "Where is the {} hidden?",
     ["silver violin", "blue suitcase", "golden compass", "wooden chessboard", "red umbrella", "brass telescope"],
     ["in the attic of the bakery", "in the cellar of the museum", "in the kitchen of the castle"],
     ["behind a pile of newspapers", "under a broken piano", "inside a barrel of apples"]),
]


def f1(answer, wanted):
    words = [collections.Counter(text.lower().replace(".", "").replace(",", "").split()) for text in (answer, wanted)]
    common = sum((words[0] & words[1]).values())
    return 2 * common / max(1, sum(words[0].values()) + sum(words[1].values()))


def make_prompt(tokenizer, prose, length, depth, chance):
    """Ids of a prompt of about `length` tokens, the positions of the statement in it, statement and look-alike."""
    statement, question, *parts = chance.choice(FORMS)
    (key, first, second), (other, third, fourth) = zip(*(chance.sample(values, 2) for values in parts))
    hidden, decoy = statement.format(key, first, second), statement.format(other, third, fourth)
    size = len(tokenizer(prose[:20000]).input_ids) / min(20000, len(prose))  # tokens of a character
    begin = chance.randrange(max(1, len(prose) - int(length / size)))
    sentences = prose[begin: begin + int((length - 150) / size)].split(". ")
    for text, place in sorted(((hidden, depth), (decoy, chance.random())), key=lambda one: -one[1]):
        sentences.insert(round(place * len(sentences)), text.removesuffix("."))
    asked = (f"This is a very long book:\n<book>\n{'. '.join(sentences)}\n</book>\nBased on the content of the book, answer the "
             f"question with a full sentence.\nQuestion: {question.format(key)}")
    text = asked + "\nAnswer:"
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True)
    read = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    at = text.index(hidden.removesuffix("."))
    needle = [i for i, (a, b) in enumerate(read.offset_mapping) if a < at + len(hidden) - 1 and b > at]
    return torch.tensor([read.input_ids]), needle, hidden, decoy


@torch.no_grad()
def watch(model, tokenizer, ids, needle, most, kind):
    """The answer, and the scores [layers, heads] while it was made."""
    cache = model(ids[:, :-1], logits_to_keep=1).past_key_values
    token, answer, k = ids[:, -1:], [], len(needle)
    inside, scores = torch.tensor(needle), 0
    for _ in range(most):
        out = model(token, past_key_values=cache, output_attentions=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        attention = torch.stack([one[0, :, -1] for one in out.attentions])  # [layers, heads, tokens]
        strongest = attention.topk(k if kind == "r2" else 1)
        if kind == "r2":
            scores += (strongest.values * torch.isin(strongest.indices, inside)).sum(-1) / k
        else:
            held = strongest.indices[..., 0]
            copied = torch.isin(held, inside) & (ids[0][held.clamp(max=ids.shape[1] - 1)] == token.item())
            scores += copied.float() / k
        text = tokenizer.decode(token[0])
        if token.item() == tokenizer.eos_token_id or "\n" in text:
            break
        answer.append(token.item())
    return tokenizer.decode(answer), scores


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file or folder")
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--kind", choices=("r2", "r"), default="r2")
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=[512, 1024, 2048])
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least-f1", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model, tokenizer = gguf_folder.load(chosen.model, dtype=torch.float32)
    model.set_attn_implementation("eager")
    prose, found, chance = " ".join(chosen.text.read_text(encoding="utf-8").split()), [], random.Random(chosen.seed)
    for i in range(chosen.samples):
        length = chosen.lengths[i % len(chosen.lengths)]
        ids, needle, hidden, decoy = make_prompt(tokenizer, prose, length, i // len(chosen.lengths) % 10 / 9, chance)
        answer, scores = watch(model, tokenizer, ids, needle, len(tokenizer(hidden).input_ids) + 8, chosen.kind)
        counts = f1(answer, hidden) > max(chosen.least_f1, f1(answer, decoy))
        found += [scores] if counts else []
        print(f"{i + 1} of {chosen.samples}: {ids.shape[1]} tokens, F1 {f1(answer, hidden):.2f}{'' if counts else ', does not count'}: {answer}")
    if not found:
        sys.exit("no prompt counts; try shorter --lengths, or --least-f1 0")
    scores = torch.stack(found, -1)
    lists = {f"{layer}-{head}": [round(one, 4) for one in scores[layer, head].tolist()]
             for layer in range(scores.shape[0]) for head in range(scores.shape[1])}
    chosen.out.write_text(json.dumps(lists) + "\n")


if __name__ == "__main__":
    main()
