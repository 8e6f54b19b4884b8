"""Builds the shared library; everything else stands in pyproject.toml."""

from pathlib import Path

import jaxlib
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
SOURCES = ("handlers", "pool", "avx512", "avx2", "plain")


class PlainLibrary(build_ext):
    """The library is loaded with ctypes, so its name has no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class AnyPython(bdist_wheel):
    """One wheel for all versions of Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": AnyPython},
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
    ],
)
