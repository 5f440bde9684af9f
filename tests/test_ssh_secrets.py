"""What is secret stays out of sight: looked for in the command lines of all processes, in all files, in all output."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from testbed.processes import run_dtrain
from testbed.sshd import SshHosts, write_key

PASSPHRASE = "canary-passphrase"


@contextlib.contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """Collect what every user of this machine could see meanwhile."""
    seen: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            for entry in os.listdir("/proc"):
                if entry.isdigit():
                    with contextlib.suppress(OSError):
                        seen.add(Path("/proc", entry, "cmdline").read_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


@pytest.mark.parametrize("fails", [False, True], ids=["run", "failed run"])
def test_no_secret_is_in_any_command_line_file_or_message(ssh_hosts: SshHosts, tmp_path: Path, fails: bool) -> None:
    locked = write_key(tmp_path / "locked", Ed25519PrivateKey.generate(), BestAvailableEncryption(PASSPHRASE.encode()))
    own = (
        ssh_hosts.identity.read_text().splitlines()[2:-1] + locked.read_text().splitlines()[2:-1]
    )  # the first line is in all
    secrets = {"exported": "canary-exported", "given": "canary-given", "token": "canary-token", "phrase": PASSPHRASE}
    secrets.update({f"private key {i}": line for i, line in enumerate(own) if len(line) > 40})
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nprint(len(os.environ['SECRET'] + os.environ['GIVEN']), flush=True)\ntime.sleep(0.3)"
    )
    config = ssh_hosts.folder / "secret_config"
    config.write_text(
        f"Host node2\n  ProxyJump node3\n  IdentityFile {locked}\n"
        + (f"Host node1\n  IdentityFile {locked}\n  IdentityFile none\n" if fails else "")
        + ssh_hosts.ssh_config.read_text().replace(str(ssh_hosts.identity), str(locked), 1 if fails else 0)
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {"SECRET": "canary-exported", "DTRAIN_TOKEN": "canary-token", "TMPDIR": str(scratch)}
    with command_lines() as seen:
        result = run_dtrain(
            "run", "-v", "--ssh-config", config, "--hosts", "node1,node2", "-x", "SECRET", "-x", "GIVEN", script,
            env={**env, "GIVEN": "canary-given"}, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == (1 if fails else 0), result.stderr
    assert ("locked by a passphrase" in result.stderr) == fails
    assert any(b"launcher.agent" in line for line in seen)  # the watcher did see them
    places = {str(line): line for line in seen}
    places |= {"stdout": result.stdout.encode(), "stderr": result.stderr.encode()}
    for folder in (tmp_path, ssh_hosts.folder):
        for file in folder.rglob("*"):
            if file.is_file() and file not in (locked, ssh_hosts.identity):
                places[str(file)] = file.read_bytes()
    found = {
        (what, where) for what, secret in secrets.items() for where, text in places.items() if secret.encode() in text
    }
    assert not found
