"""`jaxllm.pipeline`: strings in, strings, labels or vectors out."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from paths import DATA
from serving_tools import chat_tokenizer
from translation_tools import write

import jaxllm
from jaxllm.errors import ConfigError, InputError, NonFiniteError, UnsupportedError
from jaxllm.models.model import BaseModel
from jaxllm.tokenizers import load_tokenizer
from jaxllm.tokenizers.byte_level import byte_tokenizer

REFERENCE = DATA / "reference"
TEXTS = ["Hello", "Nice to meet you.", "a b"]


@pytest.fixture(scope="module")
def writer() -> jaxllm.pipelines.Pipeline:
    return jaxllm.pipeline("text-generation", REFERENCE / "tiny-gpt2", batch_size=2)


@pytest.mark.ci
def test_text_generation(writer):
    results = writer(TEXTS, max_new_tokens=4, return_full_text=False)
    for text, [result] in zip(TEXTS, results, strict=True):
        ids = writer.tokenizer.encode(text)
        single = writer.model.generate([ids], max_new_tokens=4).sequences[0]
        expected = writer.tokenizer.decode(single, skip_special_tokens=True)
        assert text + result["generated_text"] == expected
        assert writer(text, max_new_tokens=4) == [{"generated_text": expected}]
    assert writer([]) == []


@pytest.mark.ci
def test_rows_of_all_batches_draw_different_numbers(writer):
    fields = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2, "key": 5}
    results = writer(["Hello"] * 4, **fields)
    texts = [each["generated_text"] for row in results for each in row]
    assert len(texts) == len(set(texts)) == 8
    assert results == writer(["Hello"] * 4, **fields)


@pytest.mark.ci
def test_chats_are_answered(writer):
    chat = [{"role": "user", "content": "Hello"}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = jaxllm.auto.AutoTokenizer.from_pretrained(
        REFERENCE / "tiny-gpt2", chat_template=template
    )
    pipe = jaxllm.pipeline("text-generation", writer.model, tokenizer)
    [answer] = pipe("Hello", max_new_tokens=4, return_full_text=False)
    message = {"role": "assistant", "content": answer["generated_text"]}
    assert pipe(chat, max_new_tokens=4) == [{"generated_text": [*chat, message]}]


@pytest.mark.ci
@pytest.mark.parametrize("task", ["text-generation", "text2text-generation"])
def test_stop_strings_end_answers_without_padding(task):
    """The pipeline's own tokenizer finds them; the pad is a token that would be read as text."""
    folder = REFERENCE / ("tiny-gpt2" if task == "text-generation" else "tiny-t5")
    pipe = jaxllm.pipeline(task, folder, batch_size=2)
    fields = {"max_new_tokens": 12, "num_return_sequences": 4, "do_sample": True, "key": 3}
    fields |= {"eos_token_id": None, "top_k": 0, "temperature": 2.0}
    if task == "text-generation":
        fields["return_full_text"] = False
    plain = [row["generated_text"] for row in pipe("Hello", **fields)]
    stop = plain[1].strip()[2:4]
    pad = pipe.tokenizer.encode("z", add_special_tokens=False)[0]
    texts = pipe("Hello", stop_strings=[stop], pad_token_id=pad, **fields)
    for whole, result in zip(plain, texts, strict=True):
        text = result["generated_text"]
        assert whole.startswith(text)
        assert text == whole or stop in text
    assert texts[1]["generated_text"] != plain[1]


@pytest.mark.ci
def test_text_to_text():
    pipe = jaxllm.pipeline("text2text-generation", REFERENCE / "tiny-t5")
    batch = pipe.tokenizer(TEXTS, padding=True, return_tensors="np")
    sequences = pipe.model.generate(**batch, max_new_tokens=4).sequences
    expected = pipe.tokenizer.batch_decode(sequences, skip_special_tokens=True)
    assert pipe(TEXTS, max_new_tokens=4) == [{"generated_text": text} for text in expected]
    two = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4, "key": 0}
    answers = pipe(TEXTS[0], **two)
    assert [list(answer) for answer in answers] == [["generated_text"]] * 2
    assert pipe(TEXTS[:1], **two) == [answers]


def test_translation(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, "nllb"))
    assert tokenizer is not None
    model = tiny.make("m2m_100", vocab_size=len(tokenizer), seed=1)
    languages = {"src_lang": "deu_Latn", "tgt_lang": "zul_Latn"}
    pipe = jaxllm.pipeline(
        "translation", model, tokenizer, max_new_tokens=4, eos_token_id=None, **languages
    )
    ids = tokenizer("Hello world.", src_lang="deu_Latn", return_tensors="np")
    fields = tokenizer.target_fields("zul_Latn")
    sequences = model.generate(**ids, max_new_tokens=4, eos_token_id=None, **fields).sequences
    expected = {"translation_text": tokenizer.decode(sequences[0], skip_special_tokens=True)}
    assert pipe("Hello world.") == pipe(["Hello world."]) == [expected]
    assert expected["translation_text"]
    assert pipe("Hello world.", src_lang="fra_Latn", tgt_lang="ace_Arab") != [expected]
    with pytest.raises(InputError, match=r"forced_bos_token_id: 7 contradicts tgt_lang 'zul_Latn'"):
        pipe("Hello", forced_bos_token_id=7)
    with pytest.raises(InputError, match=r"tgt_lang: a \w+ has no languages"):
        jaxllm.pipeline("translation", tiny.cached("t5"), byte_tokenizer())("a", tgt_lang="de")


@pytest.mark.ci
@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_text_classification(problem, tmp_path):
    tokenizer = byte_tokenizer()
    model = tiny.make(
        "llama",
        architecture="LlamaForSequenceClassification",
        vocab_size=len(tokenizer),
        id2label={"0": "bad", "1": "fair", "2": "good"},
        problem_type=problem,
    )
    jaxllm.save_hf(tmp_path, model, tokenizer)
    pipe = jaxllm.pipeline("text-classification", tmp_path, batch_size=2)
    logits = np.asarray(model(**tokenizer(TEXTS, bucket=1, return_tensors="np")).logits, np.float64)
    if problem.startswith("multi"):
        expected = 1 / (1 + np.exp(-logits))
    else:
        expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    names = ["LABEL_0", "LABEL_1", "LABEL_2"]  # a config keeps no names; a checkpoint does
    for text, row in zip(TEXTS, expected, strict=True):
        [best] = pipe(text)
        assert best["label"] == names[row.argmax()]
        labels = pipe(text, top_k=None)
        scores = {label["label"]: label["score"] for label in labels}
        np.testing.assert_allclose([scores[name] for name in names], row, rtol=1e-5)
    assert [each["label"] for each in pipe(TEXTS)] == [names[i] for i in expected.argmax(1)]


def test_text_classification_of_pairs():
    """As transformers' pipeline: mappings of `text` and `text_pair`, also among plain texts."""
    tokenizer = chat_tokenizer()
    model = tiny.make(
        "llama", architecture="LlamaForSequenceClassification", vocab_size=len(tokenizer)
    )
    pipe = jaxllm.pipeline("text-classification", model, tokenizer, batch_size=2, top_k=None)
    inputs = [{"text": "Hello", "text_pair": "Nice to meet you."}, "Hello", {"text": "a b"}]
    for each, labels in zip(inputs, pipe(inputs), strict=True):
        texts = [each] if isinstance(each, str) else each.values()
        logits = np.asarray(model(**tokenizer(*map(list, zip(texts)), return_tensors="np")).logits)
        expected = np.sort(np.exp(logits[0]) / np.exp(logits[0]).sum())[::-1]
        np.testing.assert_allclose([x["score"] for x in labels], expected, rtol=1e-5)
    assert pipe(inputs[0], top_k=1) == pipe(inputs, top_k=1)[0]
    assert pipe(inputs[0], top_k=1) != pipe(inputs[1], top_k=1)[0]
    assert pipe({"text": "Hello", "text_pair": ""}) == pipe(["Hello"])[0]
    for wrong, message in (
        ({"text": "a", "pair": "b"}, r"inputs\[0\]: expected text and text_pair, found"),
        ([{"text": "a"}, {"text": 5}], r"inputs\[1\]: expected a string"),
        ([["a", "b"]], r"inputs\[0\]: expected a string, or a mapping of text and text_pair"),
        ([[{"text": "a"}]], r"inputs\[0\]: expected a string"),
    ):
        with pytest.raises(InputError, match=message):
            pipe(wrong)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-t5"])
def test_feature_extraction(name):
    tokenizer = byte_tokenizer() if name == "tiny-llama" else None
    pipe = jaxllm.pipeline("feature-extraction", REFERENCE / name, tokenizer)
    vectors = pipe(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        states = pipe.model(**pipe.tokenizer([text], return_tensors="np")).last_hidden_state[0]
        np.testing.assert_allclose(vector, np.mean(states, 0), rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(pipe(text, pooling=None), states, rtol=2e-4, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
def test_outputs_that_are_not_finite(task):
    tokenizer = byte_tokenizer()
    if task == "feature-extraction":
        model = jaxllm.load(REFERENCE / "tiny-llama", architecture=BaseModel)[0]
    else:
        name = "LlamaForSequenceClassification"
        model = tiny.make("llama", architecture=name, vocab_size=len(tokenizer))
    broken = jax.tree.map(lambda x: x * np.nan, model)
    if task == "text-classification":  # whose labels are in the card
        broken = broken.with_card(model.card)
    pipe = jaxllm.pipeline(task, broken, tokenizer)
    with pytest.raises(NonFiniteError, match=r"inputs\[0\]: the model's output is NaN"):
        pipe("Hello")


@pytest.mark.ci
def test_settings_of_a_task_in_an_old_config_are_its_defaults(tmp_path, writer):
    """As in transformers' pipelines; an option of the call replaces them."""
    folder = tmp_path / "model"
    shutil.copytree(REFERENCE / "tiny-gpt2", folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"max_length": 12, "prefix": "Once ", "repetition_penalty": 1.5}
    config["task_specific_params"] = {"text-generation": own, "summarization": {"num_beams": 4}}
    (folder / "config.json").write_text(json.dumps(config | {"prefix": "of all tasks"}))
    pipe = jaxllm.pipeline("text-generation", folder)
    fields = {"max_length": 12, "repetition_penalty": 1.5, "return_full_text": False}
    expected = writer("Once upon", **fields)
    assert pipe("upon", return_full_text=False) == expected
    changed = {"max_length": 14, "repetition_penalty": 1.0, "return_full_text": False}
    assert pipe("upon", **changed) == writer("Once upon", **changed) != expected
    for wrong, message in (
        ({"text-generation": {"a_field": 1}}, "text-generation: unknown .*a_field"),
        ({"text-generation": [1]}, r"text-generation: expected an object, found \[1\]"),
        ("none", "expected an object, found 'none'"),
        ({"text-generation": {"prefix": 5}}, "prefix: expected a text, found 5"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"task_specific_params": wrong}))
        with pytest.raises(ConfigError, match=message):
            jaxllm.pipeline("text-generation", folder)


def test_options_of_transformers(writer):
    """Options of calls are given once, a tokenizer by its path, and texts are truncated."""
    folder = REFERENCE / "tiny-gpt2"
    pipe = jaxllm.pipeline(
        "text-generation", str(folder), str(folder), device=0, max_new_tokens=4, batch_size=1
    )
    assert pipe(TEXTS, batch_size=2) == writer(TEXTS, max_new_tokens=4)
    assert pipe("Hello", max_new_tokens=2) == writer("Hello", max_new_tokens=2)
    features = jaxllm.pipeline("feature-extraction", folder, truncation=True, max_length=2)
    assert features("Hello", pooling=None).shape[0] == 2
    with pytest.raises(InputError, match=r"pipeline\(\) has no `device`: leave it out"):
        jaxllm.pipeline("text-generation", folder, device="cuda")
    with pytest.raises(InputError, match="unknown generation field `max_token`"):
        jaxllm.pipeline("text-generation", folder, max_token=3)
    with pytest.raises(InputError, match="does not take top_k; its options are max_length, pool"):
        features("Hello", top_k=2)


@pytest.mark.ci
def test_refusals(writer):
    with pytest.raises(UnsupportedError, match="'fill-mask'; pipelines have text-generation"):
        jaxllm.pipeline("fill-mask", writer.model)
    with pytest.raises(UnsupportedError, match="needs a CausalLM, not a T5ForCond"):
        jaxllm.pipeline("text-generation", tiny.cached("t5"), writer.tokenizer)
    with pytest.raises(InputError, match="tokenizer: give the model's"):
        jaxllm.pipeline("text-generation", writer.model)
    with pytest.raises(InputError, match="dtype: for a path"):
        jaxllm.pipeline("text-generation", writer.model, writer.tokenizer, dtype="float32")
