"""Ahead-of-time compilation for TPUs and GPUs: cost and HLO of a model's programs."""

from jaxllm.planning.abstract import abstract_model
from jaxllm.planning.decide import Decision, MeshBounds, TrainingBounds, decide
from jaxllm.planning.lower import LoweredProgram, Workload, lower
from jaxllm.planning.plan import Plan, ProgramPlan, plan
from jaxllm.planning.topology import Chip, Topology, find_topology

__all__ = [
    "Chip",
    "Decision",
    "LoweredProgram",
    "MeshBounds",
    "Plan",
    "ProgramPlan",
    "Topology",
    "TrainingBounds",
    "Workload",
    "abstract_model",
    "decide",
    "find_topology",
    "lower",
    "plan",
]
