#!/usr/bin/env bash
# jax 0.10.2: a function with custom_jvp that makes a reference fails in jit, with custom_vjp not.
#
# jax.new_ref makes an array that can be changed in place, and a function may make one, change it and
# return its last value, so that it is a pure function from outside. With jax.custom_jvp around it,
# it runs eagerly, and its gradient runs, under jit too. Inside jit its value does not: lowering says
# that references have no rule for the primitive custom_jvp_call. The same function without a custom
# derivative, or with jax.custom_vjp, runs in all three ways. A kernel that writes in place can
# therefore pass tests of its value and its gradient, and fail where it is used.
#
# Seen on 2026-11-30 with jax 0.10.2, Python 3.11:
#   plain: eager 6.0, jit 6.0
#   custom_jvp: eager 6.0, jit of the gradient 5.0, jit NotImplementedError
#   custom_vjp: eager 6.0, jit of the gradient 5.0, jit 6.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax


def doubled(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2.0
    return jax.freeze(ref)


# The derivatives say 5, so that the output shows that they are used.
with_jvp = jax.custom_jvp(doubled)
with_jvp.defjvp(lambda x, t: (with_jvp(*x), 5.0 * t[0]))
with_vjp = jax.custom_vjp(doubled)
with_vjp.defvjp(lambda x: (x * 2.0, None), lambda _, g: (5.0 * g,))

print(f"plain: eager {doubled(3.0)}, jit {jax.jit(doubled)(3.0)}")
assert float(jax.jit(doubled)(3.0)) == 6.0
seen = {}
for name, function in (("custom_jvp", with_jvp), ("custom_vjp", with_vjp)):
    value, slope = float(function(3.0)), float(jax.jit(jax.grad(function))(3.0))
    try:
        seen[name] = f"{jax.jit(function)(3.0)}"
    except NotImplementedError as error:
        seen[name] = type(error).__name__
        assert "custom_jvp_call" in str(error), error
    print(f"{name}: eager {value}, jit of the gradient {slope}, jit {seen[name]}")
    assert (value, slope) == (6.0, 5.0), (value, slope)
assert seen == {"custom_jvp": "NotImplementedError", "custom_vjp": "6.0"}, seen
PYTHON
