"""resolve: local paths, Hub ids, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants  # its attribute otherwise depends on what was imported before
import pytest
from hub_server import running_hub

from jaxllm.checkpoint.hub import resolve
from jaxllm.checkpoint.weight_files import weight_files
from jaxllm.common.errors import (
    CheckpointError,
    InputError,
    MissingFileError,
    UnsupportedError,
)


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """Ids that the Hub was asked for."""
    calls: list[str] = []

    def model_info(api, repo_id, **options):
        calls.append(repo_id)
        raise OSError("asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return calls


class TestLocal:
    def test_local_folders_and_weight_files(self, tmp_path, downloads):
        files = ("a.gguf", "a.safetensors", "A.GGUF", "flax_model.msgpack", "pytorch_model.bin")
        for name in (*files, "model.safetensors.index.json"):
            (tmp_path / name).touch()
            assert resolve(tmp_path / name) == tmp_path / name
            assert resolve(tmp_path / name, weights=False) == tmp_path / name
        (tmp_path / "config.json").touch()
        assert resolve(tmp_path / "a.safetensors", weights=False) == tmp_path
        assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
        assert not downloads

    def test_local_folder_takes_precedence_over_hub_id(self, tmp_path, monkeypatch, downloads):
        (tmp_path / "gpt2").mkdir()
        monkeypatch.chdir(tmp_path)
        assert resolve("gpt2") == Path("gpt2")
        assert not downloads

    def test_home_is_expanded(self, tmp_path, monkeypatch, downloads):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        assert resolve("~/model") == tmp_path / "model"
        with pytest.raises(MissingFileError, match=rf"{tmp_path}/other': no such file"):
            resolve("~/other")
        assert not downloads

    @pytest.mark.parametrize(
        "name",
        [
            "./model",
            "../model",
            "/model",
            "~/model",
            "a/b/c",
            "model.gguf",
            "a/model.safetensors",
            "a/model.bin",
            "a\\b",
            "a b",
            "a/",
            "/a",
            "",
            "a\0b",
            "x" * 5000 + "/y/z",
            "é",
            Path("org/name"),
        ],
        ids=lambda name: repr(name)[:20],
    )
    def test_missing_paths_do_not_contact_the_hub(self, name, tmp_path, monkeypatch, downloads):
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path / "below")
        with pytest.raises(MissingFileError, match="no such file or folder"):
            resolve(name)
        assert not downloads

    def test_unsupported_file_formats(self, tmp_path):
        names = dict.fromkeys(("tf_model.h5", "rng_state.pth", "a.pkl"), "safe_serialization")
        names |= dict.fromkeys(("training_args.bin", "optimizer.bin"), "safe_serialization")
        for name, advice in {**names, "config.json": "folder"}.items():
            (tmp_path / name).touch()
            with pytest.raises(UnsupportedError, match=advice):
                resolve(tmp_path / name)

    def test_revision_of_local_path_is_an_error(self, tmp_path):
        with pytest.raises(InputError, match="revision='v1'"):
            resolve(tmp_path, revision="v1")
        assert resolve(tmp_path, revision="main") == tmp_path


SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model")
SETTINGS += ("spiece.model", "merges.txt", "vocab.json", "chat_template.jinja")
OTHERS = ("model.pt", "consolidated.00.pth", "tf_model.h5", "training_args.bin", "optimizer.bin")
OTHERS += ("onnx/config.json", "README.md", "consolidated.safetensors", "rust_model.ot", "evil.py")
OTHERS += ("model-00001-of-00007.safetensors", "pytorch_model.fp32.bin", "extra.bin", "a.msgpack")
SAFETENSORS = ("model.safetensors",)
FLAX = ("flax_model.msgpack",)
TORCH = ("pytorch_model.bin",)


def sharded(name: str, suffix: str) -> dict[str, bytes]:
    """Contents of an index and of its shards."""
    shards = [f"{name}-0000{n}-of-00002{suffix}" for n in (1, 2)]
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    contents = {shard: shard.encode() for shard in shards}
    return {f"{name}{suffix}.index.json": json.dumps(index).encode(), **contents}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on this machine, and an empty cache, for the real client."""
    constants = huggingface_hub.constants
    with running_hub(token="none") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def repository(hub, *weights: str | dict[str, bytes]) -> None:
    """Gives the Hub the model me/model with these weights, and all that is never wanted."""
    files = {name: name.encode() for name in (*SETTINGS, *OTHERS)}
    for each in weights:
        files |= {each: each.encode()} if isinstance(each, str) else each
    hub.files["me/model"] = files


class TestHub:
    @pytest.mark.parametrize(
        ("weights", "prefer", "expected"),
        [
            ((*SAFETENSORS, *FLAX, *TORCH), None, SAFETENSORS),
            ((*SAFETENSORS, *FLAX, *TORCH), "flax", FLAX),
            ((*SAFETENSORS, *FLAX, *TORCH), "pt", TORCH),
            ((*FLAX, *TORCH), None, FLAX),
            (TORCH, None, TORCH),
            (TORCH, "flax", TORCH),
            ((sharded("pytorch_model", ".bin"),), None, tuple(sharded("pytorch_model", ".bin"))),
            (
                (*TORCH, sharded("flax_model", ".msgpack")),
                None,
                tuple(sharded("flax_model", ".msgpack")),
            ),
            (
                (sharded("model", ".safetensors"), sharded("pytorch_model", ".bin")),
                None,
                tuple(sharded("model", ".safetensors")),
            ),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_one_listing_then_the_chosen_files(self, weights, prefer, expected, hub, monkeypatch):
        repository(hub, *weights)
        folder = resolve("me/model", prefer=prefer)
        assert hub.listings == ["me/model"]
        assert set(hub.downloads) == {*SETTINGS, *expected}
        assert {path.name for path in folder.iterdir()} == {*SETTINGS, *expected}
        # Once more, from the cache: nothing is sent again, also without a network.
        assert resolve("me/model", prefer=prefer) == folder
        assert len(hub.downloads) == len({*SETTINGS, *expected})
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert resolve("me/model", prefer=prefer) == folder
        assert weight_files(folder, prefer)[0].name == expected[0]

    def test_folders_that_modules_json_names(self, hub):
        """And no other folders: onnx, or modules of another model."""
        modules = [{"path": path, "type": "a"} for path in ("", "1_Pooling", "2_Dense", "../evil")]
        wanted = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
        others = ("2_Dense/README.md", "3_Dense/config.json", "2_Dense/a/config.json")
        repository(
            hub,
            {"modules.json": json.dumps(modules).encode()},
            *(*SAFETENSORS, *wanted, *others),
        )
        resolve("me/model")
        expected = {*SETTINGS, *SAFETENSORS, "modules.json", *wanted}
        assert set(hub.downloads) == expected

    def test_no_weights_for_a_config(self, hub):
        repository(hub, *SAFETENSORS, sharded("pytorch_model", ".bin"))
        folder = resolve("me/model", weights=False)
        assert {path.name for path in folder.iterdir()} == set(hub.downloads) == set(SETTINGS)

    def test_a_revision_is_listed_and_noted(self, hub, monkeypatch):
        repository(hub, *SAFETENSORS)
        folder = resolve("me/model", revision="v1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert resolve("me/model", revision="v1") == folder
        with pytest.raises(MissingFileError, match=r"'me/model'.*\(revision v2\)"):
            resolve("me/model", revision="v2")

    def test_unreadable_weights_are_named(self, hub):
        hub.files["me/model"] = {"config.json": b"{}", "tf_model.h5": b"", "rust_model.ot": b""}
        with pytest.raises(UnsupportedError, match=r"me/model holds only rust_model.ot, tf_mod"):
            resolve("me/model")
        hub.files["me/model"] = {"config.json": b"{}", "x.gguf": b""}
        with pytest.raises(MissingFileError, match=r"me/model: neither model.*, only x.gguf"):
            resolve("me/model")
        assert set(hub.downloads) == {"config.json"}

    def test_an_index_names_files_of_the_repository_only(self, hub):
        index = {"weight_map": {"a": "../../evil.msgpack"}}
        repository(hub, {"flax_model.msgpack.index.json": json.dumps(index).encode()})
        with pytest.raises(CheckpointError, match=r"flax_model.msgpack.index.json.*evil"):
            resolve("me/model")

    def test_missing_repositories(self, hub):
        with pytest.raises(MissingFileError, match=r"'me/none'.*the Hub download failed"):
            resolve("me/none")

    def test_offline_uses_the_cache_or_fails(self, tmp_path, monkeypatch):
        """The real client, without a network and with an empty cache."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(MissingFileError) as error:
            resolve("org/no-such-model", revision="v2")
        message = str(error.value)
        assert "'org/no-such-model'" in message
        assert "revision v2" in message
        assert "give the folder's path" in message
        assert "\n" not in message

    @pytest.mark.parametrize(
        "failure", [RuntimeError("HTTP"), OSError(), TimeoutError("slow\nserver"), ValueError("id")]
    )
    def test_client_errors_take_one_line(self, failure, hub, monkeypatch):
        def fail(*_, **__):
            raise failure

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
        with pytest.raises(MissingFileError, match="Hub download failed") as error:
            resolve("org/name")
        assert "\n" not in str(error.value)
        assert error.value.__suppress_context__  # the client's errors are many, and long
