"""Platform tuning: operations whose plain form is slow on some backend.

Each function computes the same result on every backend. Code written for one of them is marked
``PERF(cpu)``, ``PERF(tpu)`` or ``PERF(gpu)``. Tuning belongs here, as a branch, not in the layers.
"""
