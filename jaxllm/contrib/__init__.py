"""Features that few calls need: watermarks and token healing.

Importing this package registers them through the public hooks of `jaxllm.generation.registration`;
no other package depends on them. docs/extending.md shows how to register extensions of your own.
"""

from jaxllm.contrib import token_healing, watermark

__all__ = ["token_healing", "watermark"]
