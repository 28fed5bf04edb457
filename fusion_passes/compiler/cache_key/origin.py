"""Whose code a module is: that of an installed package, which a version stands for, or the user's, which is read."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from pathlib import Path

import torch

INSTALLED = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=4096)
def version(module: str) -> str | None:
    """What stands for all code of an installed package: "numpy 2.4.6 <digest of its list of files>"; None for a
    module of the user's.

    The list (RECORD) has a digest of each file, as the installer wrote it: a package that is installed again under the
    same version counts as another.  One that is installed as a link to its source is the user's.
    """
    top = module.partition(".")[0]
    if top == "fusion_passes":
        return top  # its source is in every key
    if top in ("torch", "functorch", "torchgen"):
        return f"torch {torch.__version__}"  # Inductor digests torch's source itself
    file = _file(module) or _file(top)
    if file is None:
        return _PYTHON if top in sys.builtin_module_names or top in sys.stdlib_module_names else None
    if not any(part in INSTALLED for part in file.parts):
        return _PYTHON if any(file.is_relative_to(folder) for folder in _STANDARD_LIBRARY) else None
    return _installed(top)


_PYTHON = f"python {sys.version}"
_STANDARD_LIBRARY = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}


def _file(module: str) -> Path | None:
    found = getattr(sys.modules.get(module), "__file__", None)
    if found is None and module not in sys.modules and "." not in module:
        spec = importlib.util.find_spec(module)
        found = spec.origin if spec is not None and spec.has_location else None
    return Path(found).resolve() if found else None


@functools.cache
def _installed(top: str) -> str | None:
    try:
        distribution = importlib.metadata.distribution(top)
        names = {str(path).replace("\\", "/").partition("/")[0].partition(".")[0] for path in distribution.files or ()}
        if top not in names:  # another distribution of that name
            raise importlib.metadata.PackageNotFoundError(top)
    except importlib.metadata.PackageNotFoundError:
        owners = importlib.metadata.packages_distributions().get(top)
        if not owners:
            return None
        distribution = importlib.metadata.distribution(sorted(owners)[0])
    files = distribution.read_text("RECORD")
    if files is None:
        return None
    digest = hashlib.sha256(files.encode()).hexdigest()
    return f"{distribution.metadata['Name']} {distribution.version} {digest}"
