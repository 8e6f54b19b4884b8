"""Peak memory of a GGUF file that is loaded as floats: the model, and one tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from memory_model import MB
from test_load_memory import MEASURE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_dequantized_weights(smollm2_gguf: Path) -> None:
    """The largest tensor, the embedding, is there twice: dequantized, and on the device."""
    run = [sys.executable, "-c", MEASURE, str(smollm2_gguf)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    before, peak, model = map(int, done.stdout.split())
    largest = 4 * 49152 * 576
    file = smollm2_gguf.stat().st_size
    print(f"file {file // MB} MB, model {model // MB} MB, peak {(peak - before) // MB} MB")
    assert model > 5 * file
    assert peak - before < model + largest + 64 * MB
