"""Texts that tokenizers get wrong, and a small corpus to train vocabularies on."""

import random

CORPUS = [
    "The garden is quiet in the morning, and the water is cold.",
    "Nice to meet you. How are you today?",
    "She wrote a paper about the history of the city of Paris.",
    "He doesn't know, they're late, I've seen it, we'll go, I'm here, it's fine.",
    "There are seven ways to list the numbers 1, 2, 3, 45, 678 and 9012.",
    "Never listen at the end of the road; stop and begin again!",
    "def main(): return [x for x in range(10) if x % 2 == 0]",
    "Hello world. Hello there. Hello, hello!",
    "Translate English to German: that is good. Das ist gut.",
    "summarize: studies have shown that owning a dog is good for you",
    "The <b>quick</b> brown fox jumps over the lazy dog's back (again) & again.",
    "user: what is the capital of France? assistant: Paris is the capital of France.",
    "system: you are a helpful assistant that answers the questions of the user.",
    "In the beginning was the word, and the word was with the tokens of the text.",
    "A train leaves the station at 10:45 and arrives at 12:30 in the afternoon.",
    "El niño está mañana en el café con una señora. Où est la gare? Schöne Grüße!",
    "Wind and rain, thunder and lightning: the weather in November is never kind.",
    "They asked for bread, cheese, butter, paper, ink and a place near the window.",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve.",
    "Reading, writing, listening and speaking are the four skills of a language.",
] * 3

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    ".",
    "Hello",
    " Hello",
    "  Hello",
    "Hello ",
    "Hello  ",
    "Hello   world",
    "Nice to meet you.",
    "见到你很高兴",
    "Hello 见到你 world",
    "naïve café, Ωmega, ﬁne, Ａ①",
    "emoji 😀👩‍👩‍👧 end",
    "e\u0301 combining, \u200bzero width, \u00a0hard space",
    "tabs\tand\nlines\r\n\n\nmany",
    "x = [1, 22, 333, 4444]; y=7.5e-3",
    "  12  34   567",
    "def f(x):\n    return x ** 2  # square\n",
    "don't can't we're I'VE it's 's",
    "▁already ▁▁there▁",
    "<0x41> <0x0A>",
    "<s>",
    "</s>",
    "Hello <s>.",
    "Hello<s>.",
    "<s>Hello</s>",
    "<s> Hello </s> there",
    "</s></s>",
    "<unk> and <pad>",
    "<unk>",
    "<extra_id_0>. Hello",
    "Hello <extra_id_0>.",
    "Hello <extra_id_0> , <extra_id_1>  <extra_id_99> end <extra_id_9>",
    " <extra_id_1>",
    "<extra_id_100> <extra_id_>",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    " <|im_end|> x",
    "<think> a </think>",
    "a  <left>  b  <both>  c",
    "<both><left> <both>",
    "word swordfish word",
    "words word",
    "<|endoftext|>Hello<|endoftext|>",
    "Space before . and , and ? and ! and n't and 's 'm 've 're ' end",
    "Ünïcödé ÀÉÎ ñ ß",
    "\u0000null",
    "\ufeffbom",
    "\U0010ffff \ufdd0 \ue000",
    "A" * 40,
    " " * 17 + "x" + " " * 9,
    "https://example.com/a/b?c=d&e=%20#f",
    "(a)[b]{c}<d>|e|\\f/",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of words, white space, special tokens and characters from all of Unicode."""
    rng = random.Random(seed)
    specials = ("</s>", "<s>", "<|im_end|>", "<|endoftext|>", "<extra_id_1>", "<unk>", "<pad>")
    blocks = ((32, 127), (160, 0x250), (0x370, 0x600), (0x3040, 0x3100), (0x4E00, 0x5000))
    blocks += ((0, 32), (0x1F300, 0x1F600), (0x2000, 0x2070), (0xFB00, 0xFE00), (0xFF00, 0xFFF0))

    def part() -> str:
        match rng.randrange(6):
            case 0:
                return rng.choice(specials)
            case 1:
                return rng.choice((" ", "  ", "\n", "\t", " \n ", "\u00a0", "▁"))
            case 2:
                return "".join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(3))
            case 3:
                return str(rng.randrange(10**5))
            case _:
                return rng.choice(rng.choice(CORPUS).split()) + rng.choice((" ", "", ", "))

    return ["".join(part() for _ in range(rng.randrange(12))) for _ in range(count)]
