"""Which weight file of a folder is read: by format, by preference and by its path."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from paths import DATA
from weight_formats import FLAX, TORCH, copied, write_flax, write_flax_shards, write_torch

import jaxllm
from jaxllm import flax_classes
from jaxllm.batch.job.identity import checkpoint_digests
from jaxllm.checkpoint.hub import hub_name
from jaxllm.checkpoint.safetensors import write_safetensors
from jaxllm.checkpoint.weight_files import open_weights, weight_files
from jaxllm.common.errors import InputError, MissingFileError, UnsupportedError
from jaxllm.models.weights import parameters

GPT2 = DATA / "reference" / "tiny-gpt2"
NORM = "ln_f.weight"


def norm(model) -> float:
    """The first value of a norm, by which the tests tell the files apart."""
    return float(parameters(model)["backbone.stack.norm.weight"][0])


@pytest.fixture
def folder(tmp_path):
    """GPT-2 with a norm of 1 in safetensors, of 2 in msgpack and of 3 in torch's file."""
    tensors = copied(GPT2, tmp_path / "model")
    name = next(name for name in tensors if name.endswith(NORM))
    write_safetensors(
        tmp_path / "model" / "model.safetensors",
        {**tensors, name: np.full_like(tensors[name], 1)},
    )
    write_flax(tmp_path / "model", {**tensors, name: np.full_like(tensors[name], 2)})
    write_torch(tmp_path / "model", {**tensors, name: np.full_like(tensors[name], 3)})
    return tmp_path / "model"


def test_safetensors_come_before_msgpack_and_bin(folder, capsys):
    jaxllm.set_progress(True)
    try:
        assert norm(jaxllm.load(folder)[0]) == 1
        said = capsys.readouterr().err
        first = f"{folder}: reading the weights from model.safetensors, not from {FLAX}, {TORCH}"
        assert first in said
        (folder / "model.safetensors").unlink()
        assert norm(jaxllm.load(folder)[0]) == 2
        assert f"from {FLAX}, not from {TORCH}" in capsys.readouterr().err
        (folder / FLAX).unlink()
        assert norm(jaxllm.load(folder)[0]) == 3
        assert "reading the weights from" not in capsys.readouterr().err
    finally:
        jaxllm.set_progress(False)


def test_from_flax_and_from_pt_choose(folder):
    load = jaxllm.auto.AutoModelForCausalLM.from_pretrained
    assert norm(load(folder, from_flax=True)) == norm(jaxllm.load(folder, weight_format="flax")[0])
    assert norm(load(folder, from_flax=True)) == 2
    assert norm(load(folder, from_flax=False)) == norm(load(folder, from_pt=False)) == 1
    assert norm(load(folder, from_pt=True)) == 3
    (folder / TORCH).unlink()
    assert norm(load(folder, from_pt=True)) == 1  # the first of the others
    with pytest.raises(InputError, match="from_pt and from_flax are both True"):
        load(folder, from_pt=True, from_flax=True)
    with pytest.raises(InputError, match="weight_format: expected 'safetensors', 'flax', 'pt' or"):
        jaxllm.load(folder, weight_format="msgpack")


def test_flax_classes_take_msgpack_first(folder):
    load = flax_classes.FlaxAutoModelForCausalLM.from_pretrained
    assert norm(load(folder).module) == 2
    assert norm(load(folder, from_pt=True).module) == 3
    assert norm(load(folder, use_safetensors=True).module) == 1
    (folder / FLAX).unlink()
    assert norm(load(folder).module) == 1


@pytest.mark.filterwarnings("ignore:.*keeps the tokenizer")
def test_a_saved_model_replaces_the_weights_of_all_formats(folder):
    """A Flax class would read the old msgpack again."""
    (folder / "notes.msgpack").touch()
    model = flax_classes.FlaxAutoModelForCausalLM.from_pretrained(folder)
    (before,) = jax.tree.leaves(model.params["transformer"]["ln_f"]["bias"])
    params = jax.tree.map(lambda x: x + 1, model.params)
    with pytest.warns(UserWarning, match=f"{folder}: .*{FLAX}, {TORCH}, .*was replaced"):
        model.save_pretrained(folder, params=params)
    again = flax_classes.FlaxAutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_array_equal(again.params["transformer"]["ln_f"]["bias"], before + 1)
    assert (folder / "notes.msgpack").exists()


@pytest.mark.parametrize("name", ["model.safetensors", FLAX, TORCH])
def test_the_path_of_a_file_picks_it(folder, name):
    model, tokenizer = jaxllm.load(folder / name)
    assert norm(model) == {"model.safetensors": 1, FLAX: 2, TORCH: 3}[name]
    assert tokenizer is not None
    assert jaxllm.auto.AutoConfig.from_pretrained(folder / name) == model.config
    ids = jaxllm.auto.AutoTokenizer.from_pretrained(folder / name).encode("a b")
    assert ids == tokenizer.encode("a b")
    planned = jaxllm.planning.abstract_model(folder / name)
    assert planned.config == model.config
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedError, match=rf"{name}: a weight file without config\.json"):
        jaxllm.load(folder / name)


def test_other_names_are_read_by_path(folder):
    (folder / FLAX).rename(folder / "step_100.msgpack")
    assert norm(jaxllm.load(folder / "step_100.msgpack")[0]) == 2
    (folder / "model.safetensors").unlink()
    (folder / TORCH).rename(folder / "training_args.bin")
    with pytest.raises(MissingFileError, match=r"neither model\.safetensors.*only step_100\.msg"):
        jaxllm.load(folder)
    with pytest.raises(UnsupportedError, match=r"training_args\.bin is not a weight file"):
        jaxllm.load(folder / "training_args.bin")


@pytest.mark.parametrize("name", ["", f"{FLAX}.index.json", "flax_model-00003-of-00003.msgpack"])
def test_shards_of_flax(tmp_path, name):
    """An empty shard, and shards of an earlier save that the index does not name."""
    folder = tmp_path / "model"
    tensors = copied(GPT2, folder)
    write_flax_shards(folder, tensors)
    (folder / "flax_model-00004-of-00004.msgpack").write_bytes(b"old")
    expected = jaxllm.load(GPT2)[0]
    jax.tree.map(np.testing.assert_array_equal, jaxllm.load(folder / name)[0], expected)
    index, *shards = weight_files(folder / name)
    assert index.name == f"{FLAX}.index.json"
    assert len(shards) == 2
    (folder / "flax_model-00002-of-00003.msgpack").unlink()
    with pytest.raises(MissingFileError, match=r"index\.json: 1 of .* missing: flax_model-00002"):
        open_weights(folder)


def test_a_shard_is_of_the_format_of_its_index(folder):
    weight_map = {"w": "model.safetensors"}
    (folder / FLAX).unlink()
    (folder / f"{FLAX}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(jaxllm.JaxLLMError, match=r"not the plain name of a \.msgpack file"):
        open_weights(folder, "flax")


def test_the_digest_of_a_job_covers_the_file_that_is_read(folder, tmp_path):
    before = checkpoint_digests(folder)
    (folder / FLAX).write_bytes(b"changed")
    assert checkpoint_digests(folder) == before
    (folder / "model.safetensors").unlink()
    first = checkpoint_digests(folder)["model weights"]
    (folder / FLAX).write_bytes(b"changed again")
    assert checkpoint_digests(folder)["model weights"] not in (None, first)
    assert checkpoint_digests(folder / FLAX) == checkpoint_digests(folder)
    shutil.rmtree(folder)
    write_flax_shards(folder, copied(GPT2, folder))
    first = checkpoint_digests(folder)["model weights"]
    (folder / "flax_model-00003-of-00003.msgpack").write_bytes(b"changed")
    assert checkpoint_digests(folder)["model weights"] not in (None, first)


def test_the_digest_of_a_job_covers_the_folders_that_modules_json_names(folder):
    names = ("Projection", "checkpoint-5")
    for name in names:
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"a layer")
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "Projection"}]))
    digests = [checkpoint_digests(folder)]
    for name in names:
        (folder / name / "model.safetensors").write_bytes(b"another")
        digests.append(checkpoint_digests(folder))
    assert digests[0] != digests[1] == digests[2]


def test_an_adapter_names_the_folder_of_its_base(folder):
    """PEFT opens folders and Hub ids."""
    assert hub_name(str(folder / FLAX)) == hub_name(str(folder)) == str(folder)
    assert hub_name(str(folder / "none.msgpack")) == str(folder / "none.msgpack")
    assert hub_name("me/model") == "me/model"
