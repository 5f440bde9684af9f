"""Which torch, NCCL and dtrain a Python has, without importing any of them: torch takes seconds to import."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

from launcher.check.facts import Packages

__all__ = ["code_digest", "find_packages", "folder_of", "version_of"]


def find_packages() -> Packages:
    """Return the versions by torch's own file and the metadata of packages."""
    folder = folder_of("torch")
    if folder is None:
        return Packages(numpy=version_of("numpy"))
    try:
        text = Path(folder, "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    cuda, rocm = _assigned(text, "cuda"), _assigned(text, "hip")
    return Packages(
        torch=_assigned(text, "__version__") or version_of("torch"),
        torch_cuda=cuda or (f"ROCm {rocm}" if rocm else None),
        nccl=_nccl(folder) if cuda else None,
        numpy=version_of("numpy"),
    )


def folder_of(package: str) -> str | None:
    """Return the folder of a package that could be imported, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """Return a SHA-256 over dtrain's own files: one version may still have different code, as in a clone."""
    digest = hashlib.sha256()
    for package in ("launcher", "ddp"):
        folder = folder_of(package)
        if folder is None:
            continue
        for file in sorted(Path(folder).rglob("*.py")):
            try:
                content = file.read_bytes()
            except OSError:  # gone meanwhile, or not for this user to read: the same for all hosts where it is so
                content = b""
            name = f"{package}/{file.relative_to(folder).as_posix()}"
            # Of each part its own hash: both have a fixed length, so that no byte counts as another file's.
            digest.update(hashlib.sha256(os.fsencode(name)).digest() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _assigned(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}(?::[^=\n]*)? = '([^'\n]*)'", text, re.MULTILINE)
    return found[1] if found else None


def _nccl(torch_folder: str) -> str | None:
    """Return NCCL's version: of the package that torch's wheels use, else of the library that would be loaded."""
    for major in ("13", "12", "11"):
        if version := version_of(f"nvidia-nccl-cu{major}"):
            return version
    import ctypes

    for path in (Path(torch_folder).parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2", "libnccl.so.2"):
        number = ctypes.c_int()
        try:
            failed = ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if not failed and number.value >= 10000:
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return None
