"""Tasks of EleutherAI's lm-evaluation-harness, run by jaxllm's models.

The harness is an optional package, and its import takes seconds, so nothing else imports this one.
"""

from jaxllm.common.optional_packages import require

require("lm_eval", extra="eval", purpose="tasks of lm-evaluation-harness")

from jaxllm.evaluate.lm_eval.model import JaxLM  # noqa: E402
from jaxllm.evaluate.lm_eval.tasks import (  # noqa: E402
    LoadedTasks,
    load_tasks,
    results_json,
    results_table,
    run_tasks,
)

__all__ = ["JaxLM", "LoadedTasks", "load_tasks", "results_json", "results_table", "run_tasks"]
