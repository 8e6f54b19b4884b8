"""Compares a product of the installed kernels with numpy, for `make wheels`."""

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
print("the kernels compute")
