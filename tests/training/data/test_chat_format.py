"""Conversations: only what the assistant says is learnt, and the token that ends it."""

from __future__ import annotations

import json

import paths
import pytest

from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.common.errors import ConfigError, DataError, InputError, TemplateError
from jaxllm.tokenizers import FastTokenizer, tokenizer_from_gguf
from jaxllm.tokenizers.settings import AddedToken, TokenizerSettings
from jaxllm.training.data.chat_formats import ChatFormat

DATA = paths.DATA / "tokenizers"
TEMPLATES = json.loads((DATA / "chat_templates.json").read_text(encoding="utf-8"))
SPEC = json.loads((DATA / "fast" / "smollm.json").read_text(encoding="utf-8"))


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *chat] if system else chat


CHAT = turns("Hi there", "Hello!\n\nHow are you?", "Fine <|im_end|> you?", " good\n", system="Be")


def tokenizer_with(name: str) -> FastTokenizer:
    template = TEMPLATES[name]
    named = {kind: AddedToken(template[kind]) for kind in ("bos_token", "eos_token")}
    settings = TokenizerSettings(named=named, chat_templates={"default": template["template"]})
    return FastTokenizer(SPEC, settings)


def learnt_texts(tokenizer, example) -> list[str]:
    """The stretches of tokens that are learnt, as text."""
    texts, run = [], []
    for token, label in zip(example.input_ids.tolist(), example.labels.tolist(), strict=True):
        if label == -100:
            texts += [tokenizer.decode(run)] if run else []
            run = []
        else:
            assert label == token
            run.append(token)
    return texts + ([tokenizer.decode(run)] if run else [])


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return tokenizer_from_gguf(GGUFFile(smollm2_gguf).metadata)


@pytest.mark.ci
def test_smollm2_learns_answers_and_their_end(smollm2):
    example = ChatFormat(smollm2, (2,), "messages")({"messages": CHAT})
    assert example.input_ids.tolist() == smollm2.apply_chat_template(
        CHAT, add_generation_prompt=False
    )
    assert learnt_texts(smollm2, example) == [
        "Hello!\n\nHow are you?<|im_end|>",
        " good\n<|im_end|>",
    ]
    assert example.labels[example.labels != -100].tolist().count(2) == 2
    last = ChatFormat(smollm2, (2,), "messages", train_on="last")({"messages": CHAT})
    assert learnt_texts(smollm2, last) == [" good\n<|im_end|>"]


@pytest.mark.ci
def test_what_stands_before_an_answer_is_the_prompt_of_generation(smollm2):
    example = ChatFormat(smollm2, (2,), "messages")({"messages": CHAT[:3]})
    prompt = smollm2.apply_chat_template(CHAT[:2], add_generation_prompt=True)
    first = (example.labels != -100).argmax()
    assert example.input_ids[:first].tolist() == prompt


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("smollm2", "<|im_end|>"),
        ("chatml", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("llama2", "</s>"),
        ("zephyr", "</s>"),
        ("phi", "</s>"),
    ],
)
def test_templates(name, end):
    tokenizer = tokenizer_with(name)
    tokenizer_ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    example = ChatFormat(tokenizer, (), "messages")({"messages": CHAT})
    assert example.input_ids.tolist() == tokenizer_ids
    texts = learnt_texts(tokenizer, example)
    assert [text.strip().removesuffix(end).strip() for text in texts] == [
        "Hello!\n\nHow are you?",
        "good",
    ]
    assert all(text.endswith(end) for text in texts)


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_one_bos(name):
    """A tokenizer that puts BOS before texts puts none before what a template wrote."""
    tokenizer = tokenizer_with(name)
    example = ChatFormat(tokenizer, (), "messages")({"messages": turns("a", "b")})
    assert example.input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert example.input_ids[0] == tokenizer.bos_token_id


def test_a_token_across_the_boundary_is_learnt(smollm2):
    r"""An answer that begins with a line break: "\n" of the template and "\n" are one token."""
    chat = turns("a", "\nb")
    example = ChatFormat(smollm2, (2,), "messages")({"messages": chat})
    assert learnt_texts(smollm2, example)[0].strip() == "b<|im_end|>"


def chat_with(template: str, messages=CHAT, **options):
    encode = ChatFormat(tokenizer_with("chatml"), (), "messages", template, **options)
    return encode.tokenizer, encode({"messages": messages})


# As of models that think: what was thought is shown of the last answer only.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>hm</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_template_that_cannot_be_split():
    with pytest.raises(DataError, match=r"messages\[3\].*train_on to 'last'"):
        chat_with(FORGETS)
    tokenizer, example = chat_with(FORGETS, train_on="last")
    assert learnt_texts(tokenizer, example) == ["<think>hm</think> good\n<|im_end|>"]
    counts = "{{ messages | length }}" + FORGETS
    with pytest.raises(DataError, match="writes the messages before this one"):
        chat_with(counts, train_on="last")


def test_template_without_an_end():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="would not learn to stop"):
        chat_with(template)


def test_failing_template():
    with pytest.raises(TemplateError, match="no system"):
        chat_with("{{ raise_exception('no system') }}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": turns("a")}, "no message of the assistant"),
        ({"messages": []}, "no message of the assistant"),
        ({"messages": "hi"}, "messages: not JSON"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role: expected the name of a role"),
        ({"chat": []}, "messages: no such field"),
    ],
)
def test_wrong_conversations(row, message):
    with pytest.raises((DataError, InputError), match=message):
        ChatFormat(tokenizer_with("smollm2"), (), "messages")(row)


def test_tools_reach_the_template():
    template = "{{ tools | tojson if tools else '' }}" + TEMPLATES["chatml"]["template"]
    encode = ChatFormat(tokenizer_with("chatml"), (), "messages", template)
    example = encode({"messages": turns("a", "b"), "tools": [{"name": "clock"}]})
    assert "clock" in encode.tokenizer.decode(example.input_ids)
    assert learnt_texts(encode.tokenizer, example) == ["b<|im_end|>"]


MESSAGES = json.loads((DATA / "message_cases.json").read_text(encoding="utf-8"))
MARKS = MESSAGES["templates"]["phi"]


def test_marks_say_what_is_learned():
    """A template whose prefixes end otherwise than the whole, so that no answer can be searched."""
    for case in MESSAGES["cases"]:
        if case["style"] == "phi":
            tokenizer, example = chat_with(MARKS, case["messages"])
            assert example.input_ids.tolist() == case["ids"]
            learned = (example.labels != -100).astype(int).tolist()
            assert learned == case["assistant_mask"]
    chat = turns("a", "b", "c", "d")
    tokenizer, example = chat_with(MARKS, chat, train_on="last")
    assert learnt_texts(tokenizer, example) == ["d</s>"]
    with pytest.raises(DataError, match="writes the messages before this one"):
        chat_with(MARKS.replace("{% generation %}", "").replace("{% endgeneration %}", ""), chat)


@pytest.mark.parametrize("template", [MARKS, TEMPLATES["chatml"]["template"]])
def test_weights(template):
    end = "</s>" if template == MARKS else "<|im_end|>"

    def learned(*weights: object, train_on="all") -> list[str]:
        chat = turns("a", "b", "c", "d", "e", "f")
        for message, weight in zip(chat[1::2], weights, strict=True):
            message["weight"] = weight
        return [
            text.removesuffix(end)
            for text in learnt_texts(*chat_with(template, chat, train_on=train_on))
        ]

    assert learned(1, 1, None) == ["b", "d", "f"]
    assert learned(0, 1, 0) == ["d"]
    assert learned(1.0, 0.0, 1) == ["b", "f"]
    assert learned(1, 0, 0) == ["b"]
    assert learned(1, 1, 0, train_on="last") == []
    assert learned(0, 0, 1, train_on="last") == ["f"]
    for wrong in (2, 0.5, -1, "0", True, [0]):
        with pytest.raises(DataError, match=r"messages\[5\].weight: expected 0 or 1, found"):
            learned(1, 1, wrong)


@pytest.mark.parametrize("mark", ["train", "loss_mask", "trainable"])
def test_other_marks_name_the_weight(mark):
    chat = turns("a", "b")
    chat[1][mark] = False
    with pytest.raises(DataError, match=rf"messages\[1\].{mark}: is not read; write weight: 0"):
        chat_with(TEMPLATES["chatml"]["template"], chat)


def test_the_weight_does_not_reach_the_template():
    template = "{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"
    chat = turns("a", "b")
    chat[1]["weight"] = 1
    tokenizer, example = chat_with(template, chat)
    assert "weight" not in tokenizer.decode(example.input_ids)


def test_marks_without_the_end_are_named_before_the_run():
    """Its model would never learn to stop."""
    with pytest.raises(ConfigError, match="leave out the token that ends a message"):
        ChatFormat(tokenizer_with("reasoning"), (), "messages")


def test_the_answer_to_evaluate_is_one_that_is_learned():
    encode = ChatFormat(tokenizer_with("chatml"), (), "messages")
    chat = turns("a", "b", "c", "d")
    chat[3]["weight"] = 0
    ids, reference = encode.prompt_of({"messages": chat})
    assert (ids, reference) == (encode.tokenizer.apply_chat_template(chat[:1]), "b")
    with pytest.raises(DataError, match="no message of the assistant, or all have weight 0"):
        encode.prompt_of({"messages": chat[2:]})
    parts = [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]
    assert encode.prompt_of({"messages": [*turns("a"), {**chat[1], "content": parts}]})[1] == "de"


THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.last %}{% generation %}<think>hm</think>{% endgeneration %}{% endif %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_marks_that_change_with_what_follows():
    """A thought is marked in the last message alone, so marks cannot be counted by prefixes."""
    chat = turns("a", "b", "c", "d")
    tokenizer, example = chat_with(THOUGHTS, chat)
    assert learnt_texts(tokenizer, example) == ["b<|im_end|>", "<think>hm</think>d<|im_end|>"]
    tokenizer, example = chat_with(THOUGHTS, chat, train_on="last")
    assert learnt_texts(tokenizer, example) == ["<think>hm</think>d<|im_end|>"]
    chat[3]["weight"] = 0
    with pytest.raises(DataError, match=r"messages\[1\]: the chat template writes the messages"):
        chat_with(THOUGHTS, chat)


def test_marks_without_the_end_are_found_in_rows_too():
    """The conversation that is tried before the run may be one that a template refuses."""
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>"
        "{% endfor %}"
    )
    with pytest.raises(
        DataError, match=r"messages\[2\]: chat_template: its .* leave out the token"
    ):
        chat_with(template, turns("a", "b", system="c"))
