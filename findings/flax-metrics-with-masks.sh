#!/usr/bin/env bash
# flax 0.12.8: a mask makes nnx's Accuracy larger than 1, and its Welford metric ignores the mask.
#
# The masks of Average and Accuracy may have any shape that broadcasts to the values, says their
# documentation. The values are multiplied by the broadcast mask, but what they are divided by is
# the sum of the mask as it was given. A mask of rows, (batch, 1), on values of (batch, tokens)
# makes the average as many times too large as there are tokens. With NaN behind the mask the
# average is NaN. MultiMetric hands its mask to all its metrics, and Welford, for the mean and the
# deviation, takes it without an error and counts all values. A mask of the values' own shape is
# right in Average.
#
# Seen on 2026-11-30 with flax 0.12.8 and jax 0.10.2, Python 3.11 (the values are 0 to 7 in two
# rows):
#   Average of the first row: 1.5 with a mask (2, 4), 6.0 with a mask (2, 1)
#   Accuracy of the first row, 3 of 4 right: 0.75 with a mask (2, 4), 3.0 with a mask (2, 1)
#   MultiMetric with a mask (2, 4) of the first row: Average 1.5, Welford 3.5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install flax==0.12.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import nnx

values = jnp.arange(8.0).reshape(2, 4)
labels = jnp.array([[1, 1, 1, 0], [0, 0, 0, 0]])
logits = jax.nn.one_hot(jnp.ones_like(labels), 2)
rows = jnp.array([[True], [False]])
tokens = jnp.broadcast_to(rows, values.shape)


def result(metric, **update):
    metric.update(**update)
    return metric.compute()


averages = [float(result(nnx.metrics.Average(), values=values, mask=m)) for m in (tokens, rows)]
accuracies = [
    float(result(nnx.metrics.Accuracy(), logits=logits, labels=labels, mask=m))
    for m in (tokens, rows)
]
both = nnx.MultiMetric(average=nnx.metrics.Average(), welford=nnx.metrics.Welford())
both = result(both, values=values, mask=tokens)
average, welford = float(both["average"]), float(both["welford"].mean)
shapes = "{} with a mask (2, 4), {} with a mask (2, 1)"
print("Average of the first row:", shapes.format(*averages))
print("Accuracy of the first row, 3 of 4 right:", shapes.format(*accuracies))
print(f"MultiMetric with a mask (2, 4) of the first row: Average {average}, Welford {welford}")
assert averages == [1.5, 6.0] and accuracies == [0.75, 3.0], (averages, accuracies)
assert (average, welford) == (1.5, 3.5), (average, welford)
hidden = values.at[1].set(jnp.nan)
assert jnp.isnan(result(nnx.metrics.Average(), values=hidden, mask=tokens))
PYTHON
