"""Finds the project's checkout, for the commands whose code is not part of the wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ister
from ister.errors import NotFoundError


def use_checkout(command: str, package: str) -> None:
    """Makes a top-level package of the checkout importable, here and in child processes.

    Raises:
        NotFoundError: Ister was installed from a wheel, without the checkout around it.
    """
    root = Path(ister.__file__).resolve().parents[2]
    if not (root / package / "__init__.py").is_file() or not (root / "pyproject.toml").is_file():
        raise NotFoundError(
            f"`{command}` needs a checkout of the project",
            hint="git clone the repository, run `make setup` in it, then .venv/bin/" + command,
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *paths])
