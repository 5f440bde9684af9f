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
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"SECRET": "canary-exported", "DTRAIN_TOKEN": "canary-token", "TMPDIR": str(temporary)}
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


def test_the_run_s_key_is_for_the_eyes_of_its_workers_alone(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """It is in no command line, log, report or evidence, of a run in which much is said; a user's own is not used."""
    keys, work = tmp_path / "keys", tmp_path / "work"
    for folder in (keys, work):
        folder.mkdir()
    script = work / "script.py"
    script.write_text(
        "import os, signal, struct, sys, time\n"
        "rank, count = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        f"open('{keys}/' + rank + '-' + count, 'w').write(os.environ['DTRAIN_RUN_KEY'])\n"
        "os.pwrite(os.open(os.environ['DTRAIN_PROGRESS_FILE'], os.O_RDWR), struct.pack('<Q', rank == '1'), 16)\n"
        "if rank == '1' and count == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"while not os.path.exists('{keys}/1-1'): time.sleep(0.01)\n"
        "if rank == '0': raise ValueError('no')\ntime.sleep(60)\n"
    )
    env = {"DTRAIN_RUN_KEY": "canary-of-the-user", "DTRAIN_TOKEN": "canary-token"}
    hosts: list[str | Path] = ["--ssh-config", ssh_hosts.ssh_config, "--hosts", "node1,node2"]
    options = ["--max-restarts", "1", "--error-json", "end.json", "-x", "DTRAIN_*"]
    with command_lines() as seen:
        result = run_dtrain("run", "-v", *hosts, *options, script, cwd=work, env=env)
        shown = [run_dtrain(*words, cwd=work, env=env) for words in (["plan", *hosts, script], ["env"])]
    assert result.returncode == 1, result.stderr
    assert sorted(file.name for file in keys.iterdir()) == ["0-0", "1-0", "1-1"]
    (key,) = {file.read_text() for file in keys.iterdir()}
    assert len(bytes.fromhex(key)) == 32
    assert any(b"launcher.agent" in line for line in seen)
    places = {str(line): line for line in seen}
    places |= {f"{k}": (reported.stdout + reported.stderr).encode() for k, reported in enumerate([result, *shown])}
    places |= {
        str(file): file.read_bytes() for root in (work, ssh_hosts.folder) for file in root.rglob("*") if file.is_file()
    }
    assert any(place.endswith("evidence-1.txt") for place in places)
    secrets = (key, key.upper(), "canary-of-the-user", "canary-token")
    assert not [where for where, text in places.items() for secret in secrets if secret.encode() in text]
