"""Many devices: meshes, the table of logical axes, and placement of arrays.

A mesh has the axes `data`, `fsdp` and `tensor`. The table says along which of them each parameter,
batch and activation is sharded, for all families.
"""

from jaxllm.parallel.placement import mesh_of, put_batch, put_everywhere, put_tree, row_share
from jaxllm.parallel.processes import in_all_processes
from jaxllm.parallel.sharding import (
    batch_sharding,
    constrain,
    make_mesh,
    parameter_sharding,
    tree_shardings,
    use_mesh,
)

__all__ = [
    "batch_sharding",
    "constrain",
    "in_all_processes",
    "make_mesh",
    "mesh_of",
    "parameter_sharding",
    "put_batch",
    "put_everywhere",
    "put_tree",
    "row_share",
    "tree_shardings",
    "use_mesh",
]
