"""`python -m jaxllm`: the same as the `jaxllm` command."""

import sys

from jaxllm.cli.main import main

sys.exit(main())
