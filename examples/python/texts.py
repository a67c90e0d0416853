"""texts.py: a long text with facts hidden in it, their questions and answers, for the examples."""
import pathlib

PROSE = pathlib.Path.home() / ".cache" / "mdkv" / "prose"  # `bash examples/setup.sh` puts it there

#: sentence, question, answer
FACTS = [
    ("The secret number of the harbour is 4817236.", "\n\nWhat is the secret number of the harbour?", "4817236"),
    ("The password of the observatory is Marguerite.", "\n\nWhat is the password of the observatory?", "Marguerite"),
    ("The secret number of the garden is 9053471.", "\n\nWhat is the secret number of the garden?", "9053471"),
    ("The name of the captain's parrot is Cinnabar.", "\n\nWhat is the name of the captain's parrot?", "Cinnabar"),
]


def prose(number=7):
    """Chapter 1 to 16 of the project's prose, or, where it was not downloaded, a made one of about as many words."""
    file = PROSE / f"prose-{number:02}.txt"
    if file.is_file():
        return file.read_text()
    winds, hands = ("north", "south-west", "east"), ("the cook", "a fisherman", "the keeper's daughter", "nobody")
    return "\n".join(f"On day {i} the wind came from the {winds[i % 3]}. The boat {'stayed in the harbour' if i % 4 else 'left'}, "
                     f"and {hands[i % 4]} carried {i * 37 % 11 + 2} baskets up to the lamp. The log has {i % 7 + 3} lines for it, "
                     f"{'in ink' if i % 5 else 'with a drawing of a gull'}." for i in range(number * 1000, number * 1000 + 220))


def document(tokenizer, tokens, facts=FACTS, number=7):
    """A text of about so many tokens: prose with the facts' sentences spread evenly over it."""
    length = tokens - sum(len(tokenizer(fact[0]).input_ids) + 2 for fact in facts)
    lines = tokenizer.decode(tokenizer(prose(number)).input_ids[: max(length, 1)]).split(". ")
    for i, fact in enumerate(facts):
        lines.insert(len(lines) * (2 * i + 1) // (2 * len(facts)), "\n" + fact[0] + "\n")
    return ". ".join(lines).replace("\n. ", "\n").replace(".\n. ", ".\n")
