"""Text that stands where a file of a checkpoint should be is named as what it is."""

from __future__ import annotations

import shutil

import pytest
from paths import ROOT

import jaxllm
from jaxllm.common.errors import JaxLLMError

LFS = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""
LINK = "../../blobs/4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
LLAMA = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
FILES = [path.name for path in LLAMA.iterdir() if path.name.endswith((".json", ".safetensors"))]


@pytest.mark.parametrize(
    ("text", "words"), [(LFS, "git-lfs pointer.*git lfs pull"), (LINK, "link into a Hugging Face")]
)
@pytest.mark.parametrize("name", sorted(FILES))
def test_placeholders_are_named(name, text, words, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    (folder / name).write_text(text)
    with pytest.raises(JaxLLMError, match=rf"{name}: .*{words}"):
        jaxllm.load(folder)


def test_placeholder_of_a_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_text(LFS)
    with pytest.raises(JaxLLMError, match=r"model\.gguf: a git-lfs pointer"):
        jaxllm.load(tmp_path / "model.gguf")
