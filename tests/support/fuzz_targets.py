"""What reads untrusted files, for the fuzz tests and `make fuzz`: each takes the path of a file.

A target either returns or raises a JaxLLMError.
"""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import tiny
from paths import DATA

from jaxllm.batch.rows import RowReader
from jaxllm.batch.tables import read_source
from jaxllm.checkpoint.flax_file import FlaxFile, FlaxView
from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.load import MAX_JSON_BYTES, read_config_file
from jaxllm.checkpoint.peft import load_adapter, read_peft_config
from jaxllm.checkpoint.safetensors import SafetensorsFile
from jaxllm.checkpoint.source import WeightSource, find_nonfinite
from jaxllm.checkpoint.t5x import T5XView
from jaxllm.checkpoint.torch_file import TorchFile
from jaxllm.checkpoint.weight_files import ShardedWeights
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.files import read_json
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.registry import model_spec
from jaxllm.tokenizers import FastTokenizer, Tokenizer, load_tokenizer
from jaxllm.tokenizers.chat_templates import render_in_sandbox
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.training.run.recipe import read_recipe

TOKENIZERS = DATA / "tokenizers"
TEXT = "Hello <s>world</s>, 12 345 見<|im_end|>  é\n\t😀 don't " + "a" * 500
CHAT = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "ho"}]


# Weights.


def read_all(source: WeightSource) -> None:
    for name in source.names():
        info = source.info(name)
        try:
            array = source.read(name)
        except UnsupportedError:
            continue
        assert array.shape == info.shape
        assert array.dtype == info.dtype
        find_nonfinite(name, array)


def safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        read_all(file)


def safetensors_index(path: Path) -> None:
    """The index of shards in its folder."""
    with ShardedWeights(path, SafetensorsFile, ".safetensors") as source:
        read_all(source)


def torch_zip(path: Path) -> None:
    """A file of torch; its pickle's wrapper, if it has one, is no matter of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TorchFile(path) as file:
            read_all(file)


def torch_legacy(path: Path) -> None:
    """A file of torch in the format before zip files."""
    torch_zip(path)


def t5x(path: Path) -> None:
    """T5X's msgpack file, or a .zarray beside the chunks of its array."""
    if path.name == ".zarray":
        path = path.parents[1] / "checkpoint"
    with T5XView(path) as view:
        read_all(view)


def flax_msgpack(path: Path) -> None:
    with FlaxView(FlaxFile(path)) as source:
        read_all(source)


def gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        read_all(file)
        read_all(HFView(file))


ADAPTER = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "bias": "none"},
    **{"target_modules": ["q_proj"], "base_model_name_or_path": "x", "inference_mode": True},
}


def adapter(path: Path) -> None:
    """The weights of a PEFT adapter, on a model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter_model.safetensors").symlink_to(path)
        (Path(folder) / "adapter_config.json").write_text(json.dumps(ADAPTER))
        load_adapter(tiny.make("llama"), folder)


# Settings.


def config(path: Path) -> None:
    model_spec(read_config_file(path))


def generation_config(path: Path) -> None:
    GenerationConfig.from_file(path)


def adapter_config(path: Path) -> None:
    read_peft_config(path)


def recipe(path: Path) -> None:
    read_recipe(path)


@functools.cache
def reader() -> RowReader:
    return RowReader(tiny.make("llama"), None, {}, 0)


def rows(path: Path) -> None:
    """The rows of a batch."""
    source = read_source(path)
    for index in range(len(source)):
        reader().read(source.row(index))


# Tokenizers.


def use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, "pair")
    tokenizer.encode_user(TEXT)
    tokenizer.decode(ids)
    tokenizer.decode(range(len(tokenizer)), skip_special_tokens=True)
    tokenizer(["a", TEXT], bucket=64, return_tensors="np")


def load_as(name: str, path: Path, **others: Path) -> Tokenizer:
    """Loads a folder in which the file has this name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).symlink_to(path)
        for other, target in others.items():
            (Path(folder) / other).symlink_to(target)
        tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def tokenizer_json(path: Path) -> None:
    use(load_as("tokenizer.json", path))


def tokenizer_and_prompt(path: Path) -> None:
    """A tokenizer.json with another field, the prompt."""
    pair = read_json(path, max_bytes=MAX_JSON_BYTES)
    if not isinstance(pair, dict) or not isinstance(prompt := pair.pop("prompt", None), str):
        return
    tokenizer = FastTokenizer(pair, TokenizerSettings())
    ids = tokenizer.encode(prompt)
    tokenizer.encode_user(prompt)
    tokenizer.decode(ids[:10_000])
    tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], chat_template="<s>{{ messages[0].content }}</s>"
    )


def llama_model(path: Path) -> None:
    use(load_as("tokenizer.model", path))


def t5_model(path: Path) -> None:
    use(load_as("spiece.model", path))


def tokenizer_config(path: Path) -> None:
    model = {"tokenizer.model": TOKENIZERS / "llama.model"}
    use(load_as("tokenizer_config.json", path, **model))


def chat_template(path: Path) -> None:
    template = path.read_bytes().decode("utf-8", "replace")
    variables = {"messages": CHAT, "bos_token": "<s>", "eos_token": "</s>"}
    render_in_sandbox(template, {**variables, "add_generation_prompt": True}, now=0.0)


# Without their use, for the memory of loading.


def load_tokenizer_json(path: Path) -> None:
    load_as("tokenizer.json", path)


def load_sentencepiece(path: Path) -> None:
    load_as("tokenizer.model", path)


TARGETS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        *(safetensors, safetensors_index, flax_msgpack, torch_zip, torch_legacy),
        *(gguf, adapter),
        *(config, generation_config, adapter_config, recipe, rows),
        *(tokenizer_json, tokenizer_and_prompt, tokenizer_config, llama_model, t5_model),
        chat_template,
    )
}


def by_suffix(path: Path) -> None:
    """Calls the target that the suffix names, so that one child reads files of several kinds."""
    TARGETS[path.suffix[1:]](path)
