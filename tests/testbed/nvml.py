"""Builds a libnvidia-ml that shows fake cards, as the variables of `fake_nvml.c` say."""

import shutil
import subprocess
from pathlib import Path

from testbed.require import require

FOLDER = Path(__file__).parent


def build_nvml(folder: Path, more: str = "") -> Path:
    """Build the library in a folder, which may be missing, and return the folder.

    `more` are functions in C that fake_nvml.c has not.
    """
    compiler = shutil.which("cc")
    require(compiler, "a C compiler", "apt-get install gcc libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvml.c").write_text(f'#include "fake_nvml.c"\n{more}')
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([str(compiler), "-shared", "-fPIC", f"-I{FOLDER}", "-o", library, folder / "nvml.c"], check=True)
    return folder
