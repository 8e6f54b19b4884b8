"""T5, Llama, Mistral, Qwen and GPT-2 in JAX/Flax, with jit-compiled decoding.

The names below are imported when they are first used, so that a command can handle signals and
print its help before JAX is imported, which takes seconds.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.batch import BatchGenerator
    from jaxllm.batch.generator import generate_texts
    from jaxllm.batch.row_tasks import embed
    from jaxllm.common.compiling import enable_compile_cache
    from jaxllm.common.errors import JaxLLMError
    from jaxllm.common.progress import set_progress
    from jaxllm.generation.generate import generate, stream
    from jaxllm.generation.scoring import score
    from jaxllm.generation.settings.config import GenerationConfig
    from jaxllm.loading import load, load_orbax
    from jaxllm.parallel.sharding import make_mesh
    from jaxllm.pipelines import pipeline
    from jaxllm.planning import plan
    from jaxllm.saving import push_to_hub, save_hf, save_orbax
    from jaxllm.training.run import train

__version__ = "0.1.0"

__all__ = [
    "BatchGenerator",
    "GenerationConfig",
    "JaxLLMError",
    "embed",
    "enable_compile_cache",
    "generate",
    "generate_texts",
    "load",
    "load_orbax",
    "make_mesh",
    "pipeline",
    "plan",
    "push_to_hub",
    "save_hf",
    "save_orbax",
    "score",
    "set_progress",
    "stream",
    "train",
]
_MODULE_OF = {
    "BatchGenerator": "batch",
    "GenerationConfig": "generation.settings.config",
    "JaxLLMError": "common.errors",
    "embed": "batch.row_tasks",
    "enable_compile_cache": "common.compiling",
    "generate": "generation.generate",
    "generate_texts": "batch.generator",
    "load": "loading",
    "load_orbax": "loading",
    "make_mesh": "parallel.sharding",
    "pipeline": "pipelines",
    "plan": "planning",
    "push_to_hub": "saving",
    "save_hf": "saving",
    "save_orbax": "saving",
    "score": "generation.scoring",
    "set_progress": "common.progress",
    "stream": "generation.generate",
    "train": "training.run",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")  # jaxllm.generation, after `import jaxllm`
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_successor(name)}")
    globals()[name] = value
    return value


def _successor(name: str) -> str:
    """What to write instead of a name of another package or module; empty for another name.

    >>> _successor("GPT2Tokenizer"), _successor("FlaxT5EncoderModel"), _successor("path")
    (': use jaxllm.auto.AutoTokenizer', ': use jaxllm.models.T5EncoderModel', '')
    >>> _successor("LogitsProcessorList"), _successor("BertModel")
    (': use jaxllm.generation.LogitsProcessorList', '')
    """
    if name.endswith(("Tokenizer", "TokenizerFast")):
        return ": use jaxllm.auto.AutoTokenizer"
    plain = name.removeprefix("Flax")
    if plain in __all__:
        return f": use jaxllm.{plain}"
    if not name[:1].isupper():
        return ""
    for package in ("auto", "models", "generation", "tokenizers"):
        if plain in import_module(f"{__name__}.{package}").__all__:
            return f": use jaxllm.{package}.{plain}"
    return ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
