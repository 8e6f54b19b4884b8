"""resolve: local paths, Hub ids, one-line errors."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from jaxllm.checkpoint.hub import resolve
from jaxllm.common.errors import InputError, MissingFileError, UnsupportedError


@pytest.fixture
def downloads(monkeypatch, tmp_path) -> list[tuple[str, dict]]:
    """Downloads recorded instead of done."""
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


class TestLocal:
    def test_local_folders_and_weight_files(self, tmp_path, downloads):
        for name in ("a.gguf", "a.safetensors", "A.GGUF"):
            (tmp_path / name).touch()
            assert resolve(tmp_path / name) == tmp_path / name
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
        for name, advice in ("pytorch_model.bin", "safe_serialization"), ("config.json", "folder"):
            (tmp_path / name).touch()
            with pytest.raises(UnsupportedError, match=advice):
                resolve(tmp_path / name)

    def test_revision_of_local_path_is_an_error(self, tmp_path):
        with pytest.raises(InputError, match="revision='v1'"):
            resolve(tmp_path, revision="v1")
        assert resolve(tmp_path, revision="main") == tmp_path


class TestHub:
    @pytest.mark.parametrize("name", ["gpt2", "google-t5/t5-small", "HuggingFaceTB/SmolLM2-1.7B_x"])
    def test_hub_ids_are_downloaded(self, name, tmp_path, downloads):
        assert resolve(name, revision="v1") == tmp_path / "snapshot"
        assert [call[0] for call in downloads] == [name]
        assert downloads[0][1]["revision"] == "v1"

    def test_only_needed_files_are_downloaded(self, downloads):
        resolve("gpt2")
        options = downloads[0][1]

        def wanted(file: str) -> bool:
            return any(fnmatch(file, p) for p in options["allow_patterns"]) and not any(
                fnmatch(file, p) for p in options["ignore_patterns"]
            )

        for file in (
            *("config.json", "generation_config.json", "model.safetensors.index.json"),
            *("model-00001-of-00002.safetensors", "tokenizer.json", "tokenizer.model"),
            *("spiece.model", "merges.txt", "vocab.json", "chat_template.jinja"),
        ):
            assert wanted(file), file
        for file in (
            *("pytorch_model.bin", "model.pt", "consolidated.00.pth", "flax_model.msgpack"),
            *("tf_model.h5", "training_args.bin", "onnx/config.json", "README.md"),
            *("consolidated.safetensors", "rust_model.ot", "modeling_evil.py"),
        ):
            assert not wanted(file), file

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
    def test_client_errors_take_one_line(self, failure, monkeypatch):
        def fail(*_, **__):
            raise failure

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(MissingFileError, match="Hub download failed") as error:
            resolve("org/name")
        assert "\n" not in str(error.value)
        assert error.value.__suppress_context__  # the client's errors are many, and long
