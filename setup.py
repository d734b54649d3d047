"""Packages of the wheel: difftx/ itself, and the folder configs/ as `difftx.configs`. See pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["difftx*"]), "difftx.configs"], package_dir={"difftx.configs": "configs"})
