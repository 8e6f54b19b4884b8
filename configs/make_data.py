"""Writes the recipes' data into configs/data: ``python configs/make_data.py``; no network is used.

Each set has a part to train on and a part that is held out, in which no question, number or text of
the first occurs. The same Python writes the same bytes; `bytes` and `docstrings` are cut from its
standard library, so they differ a little between Python's versions.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LIBRARY = Path(sysconfig.get_path("stdlib"))
SEED = 0

# Chat: questions that a small model can answer, and the one form in which it is to answer.
FACTS = {
    "capital": (
        ("What is the capital of {}?", "Which city is the capital of {}?"),
        "Argentina Buenos_Aires, Australia Canberra, Austria Vienna, Belgium Brussels, "
        "Brazil Brasilia, Canada Ottawa, Chile Santiago, China Beijing, Colombia Bogota, "
        "Cuba Havana, Denmark Copenhagen, Egypt Cairo, Finland Helsinki, France Paris, "
        "Germany Berlin, Greece Athens, Hungary Budapest, Iceland Reykjavik, India New_Delhi, "
        "Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin, Israel Jerusalem, "
        "Italy Rome, Japan Tokyo, Jordan Amman, Kenya Nairobi, Lebanon Beirut, "
        "Mexico Mexico_City, Morocco Rabat, Nepal Kathmandu, New_Zealand Wellington, "
        "Norway Oslo, Pakistan Islamabad, Peru Lima, Poland Warsaw, Portugal Lisbon, "
        "Romania Bucharest, Russia Moscow, Saudi_Arabia Riyadh, South_Korea Seoul, "
        "Spain Madrid, Sweden Stockholm, Thailand Bangkok, Turkey Ankara, Ukraine Kyiv, "
        "the_United_Kingdom London, the_United_States Washington, Vietnam Hanoi",
    ),
    "continent": (
        ("On which continent is {}?", "Which continent does {} belong to?"),
        "Algeria Africa, Argentina South_America, Austria Europe, Bolivia South_America, "
        "Botswana Africa, Brazil South_America, Cambodia Asia, Canada North_America, "
        "China Asia, Colombia South_America, Denmark Europe, Ecuador South_America, "
        "Ethiopia Africa, France Europe, Germany Europe, Ghana Africa, India Asia, "
        "Ireland Europe, Italy Europe, Japan Asia, Kenya Africa, Malaysia Asia, Mali Africa, "
        "Mexico North_America, Mongolia Asia, Nepal Asia, Nigeria Africa, Norway Europe, "
        "Pakistan Asia, Peru South_America, Poland Europe, Senegal Africa, Spain Europe, "
        "Sweden Europe, Tanzania Africa, Thailand Asia, Uganda Africa, Uruguay South_America, "
        "Vietnam Asia, Zambia Africa",
    ),
    "opposite": (
        ('What is the opposite of "{}"?', 'Give me the opposite of the word "{}".'),
        "big small, hot cold, up down, left right, open closed, early late, fast slow, "
        "happy sad, old new, rich poor, strong weak, tall short, wet dry, full empty, "
        "hard soft, high low, inside outside, light dark, long short, loud quiet, thick thin, "
        "win lose, true false, clean dirty, deep shallow, easy difficult, first last, "
        "front back, good bad, heavy light, love hate, near far, north south, east west, "
        "push pull, start stop, tight loose, top bottom, wide narrow, young old, above below, "
        "accept reject, arrive depart, buy sell, cheap expensive, day night, enter exit, "
        "friend enemy, give take, laugh cry",
    ),
    "past": (
        ('What is the past tense of "{}"?', 'Which word is the past tense of the verb "{}"?'),
        "go went, see saw, eat ate, drink drank, run ran, write wrote, speak spoke, take took, "
        "give gave, come came, begin began, break broke, bring brought, build built, "
        "buy bought, catch caught, choose chose, draw drew, drive drove, fall fell, feel felt, "
        "fight fought, find found, fly flew, forget forgot, grow grew, hear heard, hold held, "
        "keep kept, know knew, leave left, lose lost, make made, meet met, pay paid, ride rode, "
        "ring rang, rise rose, say said, sell sold, send sent, sing sang, sit sat, sleep slept, "
        "stand stood, swim swam, teach taught, tell told, think thought, throw threw, "
        "wear wore, win won, walk walked, play played, jump jumped, cook cooked, paint painted, "
        "open opened",
    ),
    "plural": (
        ('What is the plural of "{}"?', 'Give me the plural of the noun "{}".'),
        "cat cats, dog dogs, book books, box boxes, bus buses, baby babies, city cities, "
        "child children, man men, woman women, foot feet, tooth teeth, mouse mice, goose geese, "
        "leaf leaves, knife knives, life lives, wife wives, wolf wolves, church churches, "
        "dish dishes, fox foxes, glass glasses, hero heroes, potato potatoes, tomato tomatoes, "
        "country countries, lady ladies, party parties, story stories, key keys, toy toys, "
        "table tables, chair chairs, house houses, tree trees, river rivers, apple apples, "
        "brush brushes, watch watches, class classes, half halves, shelf shelves, "
        "thief thieves, fly flies, cherry cherries, person people, ox oxen, window windows, "
        "garden gardens",
    ),
}

# Preferences: a sentence that answers a question, and how a small chat model likes to go on.
SENTENCES = {
    "capital": (
        "The capital of {} is {}.",
        ", which is located in the center of the country and is known for its long history.",
    ),
    "continent": (
        "{} is located in {}.",
        ", specifically in the part of it that is also known as the region of the continent.",
    ),
    "opposite": (
        'The opposite of "{}" is "{}".',
        ", or a more precise term that refers to a state of the opposite kind.",
    ),
    "past": (
        'The past tense of "{}" is "{}".',
        " in the present perfect tense, which is a form that indicates a completed action.",
    ),
    "plural": (
        'The plural of "{}" is "{}".',
        ", which is the plural form of the noun and refers to more than one of them.",
    ),
}

# GPT-2: source files that every Python from 3.11 on has.
TRAIN_FILES = (
    "argparse ast base64 bdb calendar codecs configparser contextlib csv dataclasses difflib "
    "dis doctest enum fileinput fractions ftplib functools gettext gzip heapq imaplib inspect "
    "ipaddress locale mailbox mimetypes optparse os pdb pickle pickletools platform plistlib "
    "pprint pstats pydoc random shutil smtplib socket socketserver ssl subprocess tarfile "
    "tempfile threading tokenize traceback typing"
)
EVAL_FILES = "statistics textwrap uuid weakref"

# Classification: which package a docstring comes from. The order is that of the labels.
PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest", "xml")

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def chat() -> tuple[list[Row], list[Row]]:
    """Questions, answered by a JSON object with the kind of question and the answer."""

    def row(kind: str, question: str, asked: str, answer: str) -> Row:
        reply = json.dumps({"kind": kind, "answer": answer})
        return {"messages": [message("user", question), message("assistant", reply)]}

    return asked_rows(row)


def preferences() -> tuple[list[Row], list[Row]]:
    """Questions with two right answers: a sentence is preferred to one that goes on."""

    def row(kind: str, question: str, asked: str, answer: str) -> Row:
        sentence, more = SENTENCES[kind]
        chosen = sentence.format(asked, answer)
        return {
            "prompt": [message("user", question)],
            "chosen": [message("assistant", chosen)],
            "rejected": [message("assistant", chosen.removesuffix(".") + more)],
        }

    return asked_rows(row)


def message(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def asked_rows(row: Callable[[str, str, str, str], Row]) -> tuple[list[Row], list[Row]]:
    """A row for each fact, from its kind, the question, the item asked for and the answer.

    Every fifth item of a kind is held out: the model has never seen it asked.
    """
    train, held_out = [], []
    for kind, (questions, items) in FACTS.items():
        for number, item in enumerate(shuffled(items.split(", "))):
            asked, answer = (word.replace("_", " ") for word in item.split())
            question = questions[number % len(questions)].format(asked)
            part = held_out if number % 5 == 0 else train
            part.append(row(kind, question, asked, answer))
    return shuffled(train), shuffled(held_out)


def numbers() -> tuple[list[Row], list[Row]]:
    """Numbers below 10,000 and their names; 500 of them are held out."""
    rows = [{"source": str(n), "target": in_words(n)} for n in shuffled(range(10_000))]
    return rows[500:], rows[:500]


def in_words(n: int) -> str:
    """
    >>> in_words(4_713)
    'four thousand seven hundred thirteen'
    """
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            rest = f" {in_words(n % size)}" if n % size else ""
            return f"{in_words(n // size)} {name}{rest}"
    if n < 20:
        return SMALL.split()[n]
    tens = TENS.split()[n // 10 - 2]
    return f"{tens}-{in_words(n % 10)}" if n % 10 else tens


def source_code() -> tuple[list[Row], list[Row]]:
    """Files of the standard library; four of them are held out."""
    train, held_out = (
        [{"text": (LIBRARY / f"{name}.py").read_text(encoding="utf-8")} for name in names.split()]
        for names in (TRAIN_FILES, EVAL_FILES)
    )
    return train, held_out


def docstrings() -> tuple[list[Row], list[Row]]:
    """First paragraphs of docstrings that do not name their package, each of them once.

    A sixth is held out.
    """
    labels: dict[str, set[str]] = {}
    for package in PACKAGES:
        for text in paragraphs(LIBRARY / package):
            if 25 <= len(text) <= 300 and package not in text.lower():
                labels.setdefault(text, set()).add(package)
    rows = [
        {"text": text, "label": next(iter(found))}
        for text, found in sorted(labels.items())
        if len(found) == 1
    ]
    rows = shuffled(rows)
    return rows[len(rows) // 6 :], rows[: len(rows) // 6]


def paragraphs(folder: Path) -> Iterator[str]:
    """The first paragraph of every docstring in a package, but for its tests."""
    for file in sorted(folder.rglob("*.py")):
        if "test" in file.relative_to(folder).parts:
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield " ".join(text.split("\n\n")[0].split())


def shuffled(items: Sequence[Any]) -> list[Any]:
    return random.Random(SEED).sample(items, len(items))


SETS = {
    "chat": chat,
    "preferences": preferences,
    "numbers": numbers,
    "bytes": source_code,
    "docstrings": docstrings,
}


def write_data(folder: Path) -> dict[Path, int]:
    """Writes all sets into a folder; returns the number of rows of each file."""
    folder.mkdir(exist_ok=True)
    counts: dict[Path, int] = {}
    for name, make in SETS.items():
        for part, rows in zip(("train", "eval"), make(), strict=True):
            path = folder / f"{name}_{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            counts[path] = len(rows)
    return counts


if __name__ == "__main__":
    for path, count in write_data(Path(__file__).with_name("data")).items():
        print(f"{path}: {count:,} rows, {path.stat().st_size:,} bytes")
