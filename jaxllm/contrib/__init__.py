"""Features that few calls need: watermarks and token healing.

Importing a module registers what it provides through the public hooks of
`jaxllm.generation.registration`. A call imports it when it sets the field that names the module as
its provider (`watermarking_config`, `token_healing`); no other package depends on them.
docs/extending.md shows how to register extensions of your own.
"""

from jaxllm.contrib import token_healing, watermark

__all__ = ["token_healing", "watermark"]
