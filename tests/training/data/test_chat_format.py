"""Conversations: only what the assistant says is learnt, and the token that ends it."""

from __future__ import annotations

import json

import paths
import pytest

from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.common.errors import DataError, TemplateError
from jaxllm.tokenizers import FastTokenizer, tokenizer_from_gguf
from jaxllm.tokenizers.settings import AddedToken, TokenizerSettings
from jaxllm.training.data.formats import ChatFormat

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
        ("reasoning", "<|im_end|>"),
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
        ({"messages": "hi"}, "messages: expected list"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: expected an object with a role"),
        ({"chat": []}, "messages: no such field"),
    ],
)
def test_wrong_conversations(row, message):
    with pytest.raises(DataError, match=message):
        ChatFormat(tokenizer_with("smollm2"), (), "messages")(row)


def test_tools_reach_the_template():
    template = "{{ tools | tojson if tools else '' }}" + TEMPLATES["chatml"]["template"]
    encode = ChatFormat(tokenizer_with("chatml"), (), "messages", template)
    example = encode({"messages": turns("a", "b"), "tools": [{"name": "clock"}]})
    assert "clock" in encode.tokenizer.decode(example.input_ids)
    assert learnt_texts(encode.tokenizer, example) == ["b<|im_end|>"]
