"""Files of the faults that were found (tests/data/fuzz), each read again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fuzz_seeds import fault_files
from fuzzing import run_batch


@pytest.mark.ci
def test_files_of_faults_are_harmless(tmp_path: Path) -> None:
    files = []
    for target, path in fault_files():
        files.append(tmp_path / f"{path.name}.{target}")
        shutil.copy(path, files[-1])
    outcomes = run_batch("fuzz_targets:by_suffix", files)
    bad = [o for o in outcomes if not o.harmless or o.grown_mib > 512 or len(o.detail) > 700]
    assert not bad, "\n".join(map(str, bad))
    assert all(o.detail.isprintable() for o in outcomes), "messages of several lines"
    refused = {o.path.name for o in outcomes if o.status == "refused"}
    accepted = {"gguf-loaded.config", "use-cache-off.config", "use-cache-off.generation_config"}
    accepted |= {"no-model-type.config", "leftovers.config", "roberta-processing.tokenizer_json"}
    accepted |= {"chat-and-empty-lists.generation_config", "initialisation-null.adapter_config"}
    # Padding is dropped, what unsloth left says nothing, and NaN is for the loader to find.
    accepted |= {"padding-length.tokenizer_json", "leftover.adapter_config", "nan.safetensors"}
    assert {path.name for path in files} - refused == accepted
