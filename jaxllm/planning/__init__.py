"""Ahead-of-time compilation for TPUs and GPUs: cost and HLO of a model's programs."""

from jaxllm.planning.abstract import abstract_model
from jaxllm.planning.lower import LoweredProgram, Workload, lower
from jaxllm.planning.plan import Plan, ProgramPlan, plan
from jaxllm.planning.topology import Chip, Topology, find_topology

__all__ = [
    "Chip",
    "LoweredProgram",
    "Plan",
    "ProgramPlan",
    "Topology",
    "Workload",
    "abstract_model",
    "find_topology",
    "lower",
    "plan",
]
