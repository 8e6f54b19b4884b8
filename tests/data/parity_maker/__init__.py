"""The parity cases: configs with every field off its default, and the calls made on each."""

from __future__ import annotations

from parity_maker import bart, gpt2, gpt_relatives, llama, rotary, t5, t5gemma, xglm

CASES = [*llama.CASES, *rotary.CASES, *gpt2.CASES, *t5.CASES, *bart.CASES, *t5gemma.CASES]
CASES += [*xglm.CASES, *gpt_relatives.CASES]
