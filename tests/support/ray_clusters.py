"""A Ray cluster of two nodes on this machine, and the processes of its actors."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

CPUS = 2


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """The cluster, without a driver; `worker_nodes` of it has the node that may be removed."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Ray starts its processes with a fork; JAX warns of it once an earlier test has used it.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        # What actors import, and where they compute.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        node = {"num_cpus": CPUS, "object_store_memory": 10**8}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


def actor_processes(name: str) -> list[int]:
    """The process ids of actors whose class has this in its name."""
    pids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            title = (folder / "cmdline").read_bytes() if folder.name.isdecimal() else b""
            if title.startswith(b"ray::") and name.encode() in title:
                pids.append(int(folder.name))
    return sorted(pids)
