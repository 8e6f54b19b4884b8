"""Compares products of the installed kernels with numpy, for `make wheels`."""

import jax
import jax.numpy as jnp
import jaxllm_cpu_kernels
import numpy as np

for name, handler in jaxllm_cpu_kernels.handlers().items():
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
rng = np.random.default_rng(0)
x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 96), (64, 96)))
product = jax.ffi.ffi_call("jaxllm_linear", jax.ShapeDtypeStruct((2, 64), jnp.float32))
np.testing.assert_allclose(product(x, w), x @ w.T, rtol=1e-5, atol=1e-5)
values, scale = rng.integers(-127, 128, w.shape, np.int8), rng.random(len(w), np.float32)
product = jax.ffi.ffi_call("jaxllm_linear_int8", jax.ShapeDtypeStruct((2, 64), jnp.float32))
expected = x @ (values * scale[:, None]).T
np.testing.assert_allclose(product(x, values, scale), expected, rtol=1e-4, atol=1e-2)
print(f"the kernels compute: {jaxllm_cpu_kernels.instruction_set()}")
