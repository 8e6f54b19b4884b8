"""Builds the shared library; everything else stands in pyproject.toml."""

from pathlib import Path

import jaxlib
from setuptools import Extension, setup

HERE = Path(__file__).parent
SOURCES = ("handlers", "pool", "avx512", "avx2", "plain")

setup(
    ext_modules=[
        Extension(
            "jaxllm_cpu_kernels._kernels",
            sources=[f"src/{name}.cc" for name in SOURCES],
            depends=[str(path.relative_to(HERE)) for path in HERE.glob("src/*.h")],
            include_dirs=[str(Path(jaxlib.__file__).parent / "include")],
            # Each source file sets its own instructions, so a wheel serves any processor.
            extra_compile_args=["-std=c++17", "-O3", "-fPIC", "-w"],
            extra_link_args=["-pthread"],
            language="c++",
        )
    ]
)
