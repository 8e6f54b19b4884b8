"""Every row that docs/finetuning-data.md shows is one of its format."""

from __future__ import annotations

import json
import re
from typing import get_args

import paths
import pytest

from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, read_examples
from jaxllm.training.data.config import KINDS_OF, FormatName

DOCS = paths.DOCS / "finetuning-data.md"
SHOWN = dict(
    re.findall(r"^\| `(\w+)`[^|]* \| `(\{.*?\})` \|", DOCS.read_text("utf-8"), re.MULTILINE)
)
OPTIONS = {
    "classification": {"label_names": ("bad", "good")},
    "chat": {
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    },
}


@pytest.mark.parametrize("name", get_args(FormatName))
def test_the_row_shown_is_of_its_format(name):
    config = DataConfig(format=name, max_length=64, **OPTIONS.get(name, {}))
    model = ModelInfo(kind=KINDS_OF[name][0], vocab_size=258)
    examples = read_examples(config, byte_tokenizer(), model, [json.loads(SHOWN[name])])
    assert examples.counts.examples == 1
    assert examples.counts.learnt > 0
