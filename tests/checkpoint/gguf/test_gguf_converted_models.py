"""Models that llama.cpp's converter wrote: fused projections, parts, ends, sampling, pooling."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import paths
import pytest
import tiny
from gguf_edits import edited
from test_gguf_names import convert
from weight_files import gguf_bytes, gguf_field, written

import jaxllm
from jaxllm.batch.job.identity import checkpoint_digests
from jaxllm.checkpoint.gguf.generation import generation_settings
from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.gguf.split import open_gguf
from jaxllm.checkpoint.load import open_checkpoint
from jaxllm.cli.verify import _load_reference
from jaxllm.common.errors import CheckpointError, JaxLLMError, MissingFileError, UnsupportedError
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.planning.abstract import read_source

DATA = paths.DATA / "gguf"
MODELS = json.loads((DATA / "models.json").read_text())
FILES = {"llama": "llama.gguf", "qwen2": "qwen2-00001-of-00003.gguf", "qwen3": "qwen3.gguf"}


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_fused_projections_are_those_of_the_model(name):
    """Whole, and by rows, of which a device reads some; the bias too."""
    with open_checkpoint(DATA / FILES[name]).weights as view:
        expected = MODELS["tensors"][name]
        assert set(view.names()) == set(expected)
        for tensor, sha256 in expected.items():
            whole = view.read(tensor)
            assert digest(whole) == sha256, tensor
            assert view.info(tensor).shape == whole.shape
            for rows in (slice(0, 3), slice(2, 7), slice(4, None), slice(5, 5)):
                np.testing.assert_array_equal(view.read(tensor, (rows,)), whole[rows])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_fused_projections(kind, tmp_path):
    """The blocks that are kept are those of the model whose projections are apart."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"intermediate_size": 96, "num_hidden_layers": 1}
    jaxllm.save_hf(tmp_path / "folder", tiny.make("llama", **config))
    apart = tmp_path / "apart.gguf"
    convert(tmp_path / "folder", apart, kind=gguf.GGMLQuantizationType[kind])
    tensors = gguf.GGUFReader(apart).tensors
    joined = tmp_path / "joined.gguf"
    edited(apart, joined, tensors=fused(tensors))
    with HFView(GGUFFile(apart)) as first, HFView(GGUFFile(joined)) as second:
        assert set(first.names()) == set(second.names())
        for name in first.names():
            np.testing.assert_array_equal(first.read(name), second.read(name))
            ours, theirs = (view.blocks(name, (slice(3, 9),)) for view in (first, second))
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                np.testing.assert_array_equal(ours.values, theirs.values)
                np.testing.assert_array_equal(ours.scales, theirs.scales)


def fused(tensors: Any) -> dict[str, tuple[np.ndarray, Any]]:
    """The tensors with q, k and v of each layer as one, as raw data with their types."""
    by_name = {t.name: (np.asarray(t.data), t.tensor_type) for t in tensors}
    parts = [by_name.pop(f"blk.0.attn_{part}.weight") for part in "qkv"]
    kind = parts[0][1]
    return {**by_name, "blk.0.attn_qkv.weight": (np.concatenate([x for x, _ in parts]), kind)}


def test_a_fused_projection_of_another_size_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    edited(DATA / "llama.gguf", path, fields={"llama.attention.head_count_kv": 4})
    with pytest.raises(CheckpointError, match=r"attn_qkv\.bias' has 32 rows, not the 48 of q"):
        open_checkpoint(path)


@pytest.fixture
def parts(tmp_path):
    for path in DATA.glob("qwen2-*.gguf"):
        shutil.copy(path, tmp_path)
    return sorted(tmp_path.iterdir())


def test_parts_are_joined(parts):
    """By the path of the first, or of their folder."""
    folder = parts[0].parent
    ids = tiny.ids(1, 5, vocab=400)
    logits = [np.asarray(jaxllm.load(path)[0](ids).logits) for path in (parts[0], folder)]
    np.testing.assert_array_equal(*logits)
    assert logits[0].std() >= 1
    assert checkpoint_digests(folder) == checkpoint_digests(parts[0])
    before = checkpoint_digests(folder)
    data = bytearray(parts[1].read_bytes())
    data[-1] ^= 1
    parts[1].write_bytes(bytes(data))
    assert checkpoint_digests(folder) != before


def test_parts_elsewhere(parts):
    """A plan reads the headers; transformers, beside which models are verified, joins no parts."""
    folder = parts[0].parent
    assert read_source(parts[0])[0] == read_source(folder)[0] == open_checkpoint(folder).config
    with pytest.raises(UnsupportedError, match=r"does not join the parts .* --merge"):
        _load_reference(folder, "Qwen2ForCausalLM", None)


def test_a_folder_of_other_files_is_not_joined(parts):
    shutil.copy(DATA / "llama.gguf", parts[0].parent)
    with pytest.raises(MissingFileError, match=r"several \.gguf files"):
        open_checkpoint(parts[0].parent)


def rename_first(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("model.gguf"))


def remove_second(parts: list[Path]) -> Path:
    parts[1].unlink()
    return parts[0]


def remove_first(parts: list[Path]) -> Path:
    parts[0].unlink()
    return parts[1]


def rename_second(parts: list[Path]) -> Path:
    return parts[1].rename(parts[1].with_name("qwen2.gguf"))


def rename_all(parts: list[Path]) -> Path:
    parts[2].unlink()
    parts[1].unlink()
    for name in ("qwen2-00001-of-00003.gguf", "qwen2-00003-of-00003.gguf"):
        shutil.copy(parts[0], parts[0].with_name(f"copy-{name}"))
    return parts[0].rename(parts[0].with_name("copy-qwen2-00002-of-00003.gguf"))


def swap(parts: list[Path]) -> Path:
    data = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(data)
    return parts[0]


def repeat(parts: list[Path]) -> Path:
    edited(parts[1], parts[2], fields={"split.no": 2})
    return parts[0]


def count_wrongly(parts: list[Path], number: int = 0) -> Path:
    copy = parts[number].with_suffix(".copy")
    parts[number].rename(copy)
    edited(copy, parts[number], fields={"split.tensors.count": 5})
    copy.unlink()
    return parts[0]


def count_later_wrongly(parts: list[Path]) -> Path:
    return count_wrongly(parts, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda parts: parts[1],
            r"part 2 of 3 \(split.no is 1\); give the first part, qwen2-00001-",
        ),
        (rename_first, r"model.gguf: split.no is 0 and split.count 3, so the file should be named"),
        (remove_second, r"part 1 of 3 .* what is missing: qwen2-00002-of-00003.gguf$"),
        (remove_first, r"part 2 of 3 .* what is missing: qwen2-00001-of-00003.gguf$"),
        (rename_second, r"split.no is 1 and split.count 3, so the file should be named"),
        (rename_all, r"00002-of-00003.gguf: split.no is 0 and split.count 3, so the file should"),
        (swap, r"00002-of-00003.gguf: split.no and split.count are \[2, 3\], not \[1, 3\]"),
        (repeat, r"00003-of-00003.gguf: the tensor 'blk.0.* is also in qwen2-00002-of-00003.gguf"),
        (count_wrongly, r"00001-of-00003.gguf: split.tensors.count is 5, but the parts have"),
        (count_later_wrongly, r"00003-of-00003.gguf: split.tensors.count is 5, but the parts have"),
    ],
)
def test_parts_that_do_not_belong_together(parts, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_gguf(change(parts))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("imatrix", "general.type is 'imatrix': an importance matrix"),
        ("adapter", "general.type is 'adapter': a LoRA adapter; merge"),
        ("mmproj", "general.type is 'mmproj': the image or audio part"),
        ("vocab", "general.type is 'vocab': no model"),
        ("model", "general.architecture is 'clip': the image or audio part"),
    ],
)
def test_files_that_are_no_model(tmp_path, kind, message):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(path)


def test_ends_and_sampling():
    """The converter drops the model's list of ends; llama.cpp finds them by their texts."""
    model, tokenizer = jaxllm.load(DATA / "llama.gguf")
    assert tokenizer is not None
    config = model.generation_config
    texts = [tokenizer.id_to_token(index) for index in config.eos_token_id]
    assert texts == ["</s>", "<|im_end|>", "<end_of_turn>"]
    fields = {k: v for k, v in MODELS["settings"].items() if k not in ("do_sample", "eos_token_id")}
    assert {name: getattr(config, name) for name in fields} == fields
    assert not config.do_sample
    # A caller sees them and overrides them.
    ids = np.asarray([[5, 6, 7]])
    first = int(np.asarray(model.generate(ids, max_new_tokens=4).sequences)[0, 3])
    stopped = model.generate(ids, max_new_tokens=4, eos_token_id=[first], pad_token_id=0)
    assert np.asarray(stopped.sequences)[0].tolist() in (
        [5, 6, 7, first],
        [5, 6, 7, first, 0, 0, 0],
    )


def with_texts(*texts: str, pad: int | None = None) -> dict[str, Any]:
    """Fields of llama.gguf with these texts as its last tokens, control tokens."""
    metadata = GGUFFile(DATA / "llama.gguf").metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    fields: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*tokens[: -len(texts)], *texts],
        "tokenizer.ggml.token_type": [*types[: -len(texts)].tolist(), *[3] * len(texts)],
    }
    return fields if pad is None else {**fields, "tokenizer.ggml.padding_token_id": pad}


def test_ends_are_overridden_in_the_generation_config():
    model, _ = jaxllm.load(DATA / "llama.gguf")
    ids = np.asarray([[5, 6, 7]])
    bias = {421: 100}  # so that <end_of_turn> is the next token
    ended = model.generate(ids, max_new_tokens=3, logit_bias=bias, pad_token_id=0)
    assert np.asarray(ended.sequences)[0, 3:].tolist() in ([421], [421, 0, 0])
    model.generation_config = GenerationConfig(eos_token_id=2)
    longer = model.generate(ids, max_new_tokens=3, logit_bias=bias, pad_token_id=0)
    assert np.asarray(longer.sequences)[0, 3:].tolist() == [421, 421, 421]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tokenizer.ggml.eos_token_ids": [9, 2, 5]}, [2, 9, 5, 420, 421]),
        ({"tokenizer.ggml.eot_token_id": 421}, [2, 421, 420]),
        ({"tokenizer.ggml.token_type": [1] * 424}, 2),
        ({"tokenizer.ggml.token_type": 3}, 2),
        ({"tokenizer.ggml.tokens": 3}, 2),
        ({"tokenizer.ggml.fim_pad_token_id": 9}, [2, 9, 420, 421]),
        # What ends a message may not end a text.
        (with_texts("<|call|>", "<|return|>", "<|end|>"), [2, 420, 421, 422]),
        (with_texts("<|tool_response>", "<|fim_pad|>", "[PAD]"), [2, 420, 421, 422, 423]),
        # generate() masks a pad token that is no end.
        (with_texts("<|fim_pad|>", "[PAD]", pad=423), [2, 420, 421, 422]),
        (with_texts("<|endoftext|>", "<|end|>", pad=422), [2, 420, 421, 422, 423]),
    ],
)
def test_other_ends(tmp_path, fields, expected):
    edited(DATA / "llama.gguf", tmp_path / "a.gguf", fields=fields)
    view = HFView(open_gguf(tmp_path / "a.gguf"))
    assert view.generation["eos_token_id"] == expected
    assert view.config["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tokenizer.ggml.eos_token_ids": [424]},
            r"eos_token_ids is \[424\], not ids below 424",
        ),
        ({"tokenizer.ggml.eos_token_ids": ["a"]}, r"eos_token_ids is \['a'\], not ids below"),
        ({"general.sampling.temp": "hot"}, "general.sampling.temp is 'hot', not a number"),
        ({"general.sampling.top_k": 2.5}, "general.sampling.top_k is 2.5, not an integer"),
        ({"general.sampling.penalty_repeat": 0.0}, "sampling.penalty_repeat is 0.0, not a number"),
        ({"qwen3.pooling_type": 9}, "qwen3.pooling_type is 9, not a number from 0 to 4"),
    ],
)
def test_wrong_fields_are_named(tmp_path, fields, message):
    source = FILES["qwen3" if "qwen3.pooling_type" in fields else "llama"]
    edited(DATA / source, tmp_path / "a.gguf", fields=fields)
    with pytest.raises(JaxLLMError, match=message):
        jaxllm.load(tmp_path / "a.gguf")


def test_sampling_without_a_counterpart_is_said(tmp_path):
    fields = {"general.sampling.mirostat": 2, "general.sampling.temp": 0.0}
    fields |= {"general.sampling.xtc_probability": 0.0}  # off
    edited(DATA / "llama.gguf", tmp_path / "a.gguf", fields=fields)
    with pytest.warns(UserWarning, match=r"and ignores general\.sampling\.mirostat$"):
        model, _ = jaxllm.load(tmp_path / "a.gguf")
    assert model.generation_config.temperature != 0


def test_a_top_k_that_is_off(tmp_path):
    """-1 is written from some generation_config.json, and is off in llama.cpp."""
    negative = struct.pack("<Ii", 5, -1)
    file = written(
        tmp_path / "a.gguf", gguf_bytes([gguf_field("general.sampling.top_k", negative)], [])
    )
    assert generation_settings(GGUFFile(file).metadata, 10, "a.gguf") == {"top_k": 0}


def test_pooling_is_kept(tmp_path):
    """Also in the folders that a model is saved to."""
    model, _ = jaxllm.load(DATA / "qwen3.gguf")
    assert model.checked_card("test").pooling == "last"
    jaxllm.save_hf(tmp_path / "folder", model)
    assert jaxllm.load(tmp_path / "folder")[0].checked_card("test").pooling == "last"
    jaxllm.save_orbax(tmp_path / "orbax", model)
    assert jaxllm.load_orbax(tmp_path / "orbax")[0].checked_card("test").pooling == "last"
    assert jaxllm.load(DATA / "llama.gguf")[0].checked_card("test").pooling is None
