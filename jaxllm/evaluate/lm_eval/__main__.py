"""``python -m jaxllm.evaluate.lm_eval ...``: lm-eval's own command, with the model "jaxllm".

Running a module of the package imports the package, which adds the model to the registry.
"""

import os
import sys

from jaxllm.common.errors import JaxLLMError

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    # Standard errors by bootstrap would fork a process in which JAX's threads run.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        cli_evaluate()
    except JaxLLMError as error:
        sys.exit(f"error: {error}")
