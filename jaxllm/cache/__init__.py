"""KV cache: preallocated keys and values as an explicit value, and the attention view of it.

`Cache` keeps all keys and values as floats; `CacheKind` chooses the variants (int8, sliding
window). `make_view` derives positions and the attention mask from a padding mask.
"""

from jaxllm.cache.attention_view import AttentionView, Branches, make_view
from jaxllm.cache.kv_cache import KV, Cache
from jaxllm.cache.variants import CacheKind, QuantizedKV, RingCache, WindowCache

__all__ = [
    "KV",
    "AttentionView",
    "Branches",
    "Cache",
    "CacheKind",
    "QuantizedKV",
    "RingCache",
    "WindowCache",
    "make_view",
]
