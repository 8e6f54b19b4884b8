"""The earlier import path of `jaxllm.parallel`, kept for code that was written against it."""

from jaxllm.parallel import batch_sharding, make_mesh, parameter_sharding, tree_shardings
from jaxllm.parallel import use_mesh as use

__all__ = ["batch_sharding", "make_mesh", "parameter_sharding", "tree_shardings", "use"]
