"""The programs by which namespaces and networks are made: where they are, their arguments, their output."""

import os
import select
import shutil
import subprocess

PARTS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}  # and their packages
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_part(name: str) -> str | None:
    """The path of a program, or None; /usr/sbin is not on every user's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def path_of(part: str) -> str:
    if (path := find_part(part)) is None:
        raise FileNotFoundError(f"no {part} on this machine: apt-get install {PARTS[part]}")
    return path


def bare_environment() -> dict[str, str]:
    """A host has nothing of a test's environment, its mark least of all."""
    return {"PATH": SYSTEM_PATH, "LC_ALL": "C"}


def run_part(part: str, *args: str, inside: int | None = None, stdin: str = "") -> None:
    """Run one of the PARTS to its end, in the network namespace of the process `inside`."""
    enter = [] if inside is None else [path_of("nsenter"), f"--net=/proc/{inside}/ns/net", "--"]
    argv = [*enter, path_of(part), *args]
    result = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, env=bare_environment())
    if result.returncode:
        error = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise ChildProcessError(f"{part} {' '.join(args)}: {error}")


def await_word(process: "subprocess.Popen[bytes]", what: str) -> None:
    """Wait until the process has said "up". Raises ChildProcessError if it does not within a minute."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    if not ready or process.stdout.readline() != b"up\n":
        raise ChildProcessError(f"{what} did not come up")
