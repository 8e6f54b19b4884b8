"""Adds the recipes of configs/ to the wheel, as jaxllm/recipes; pyproject.toml has all the rest."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        target = Path(self.build_lib, "jaxllm", "recipes")
        self.mkpath(str(target))
        configs = Path(__file__).parent / "configs"
        for file in [*configs.glob("*.yaml"), configs / "make_data.py"]:
            self.copy_file(str(file), str(target / file.name))


setup(cmdclass={"build_py": BuildWithRecipes})
