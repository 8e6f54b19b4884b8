"""The parity cases: configs with every field off its default, and the calls made on each."""

from __future__ import annotations

from parity_maker import gpt2, llama, t5

CASES = [*llama.CASES, *gpt2.CASES, *t5.CASES]
