"""Reading of known_hosts and ssh_config where paramiko's own reading falls short of OpenSSH's."""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from paramiko.hostkeys import HostKeys

from launcher.errors import UsageError
from launcher.known_hosts import add_key, known_keys
from launcher.ssh_config import read_ssh_config


def new_key() -> str:
    return Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def blobs(keys: list[paramiko.PKey]) -> list[str]:
    return [f"{key.get_name()} {key.get_base64()}" for key in keys]


def test_every_form_of_a_line_is_read(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(7)]
    file = tmp_path / "known_hosts"
    file.write_text(
        "# a comment\n\n"
        f"node1 {keys[0]}\n"
        f"other,node1,10.0.0.1 {keys[1]} with a comment\n"
        f"node? {keys[2]}\n"
        f"{HostKeys.hash_host('node1')} {keys[3]}\n"
        f"@cert-authority *.corp.example {keys[4]}\n"
        f"@revoked node* {keys[5]}\n"
        f"node*,!node1 {keys[6]}\n"
        "node1 ssh-ed25519 damaged\n"
        "node1 a-type-of-the-future AAAA\n"
        "nonsense\n"
    )
    known, revoked = known_keys([tmp_path / "absent", file], "node1")
    assert blobs(known) == keys[:4]
    assert blobs(revoked) == [keys[5]]


def test_port_is_part_of_the_name_and_brackets_are_no_pattern(tmp_path: Path) -> None:
    keys = [new_key(), new_key(), new_key()]
    file = tmp_path / "known_hosts"
    file.write_text(f"[127.0.0.2]:2222 {keys[0]}\n[127.0.0.*]:* {keys[1]}\n127.0.0.2 {keys[2]}\n")
    assert blobs(known_keys([file], "[127.0.0.2]:2222")[0]) == keys[:2]
    assert blobs(known_keys([file], "127.0.0.2")[0]) == keys[2:]


def test_added_key_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "known_hosts"
    (key,) = known_keys([_with(tmp_path, "a")], "a")[0]
    add_key(file, "[b]:22022", key)
    assert known_keys([file], "[b]:22022")[0] == [key]
    assert file.stat().st_mode & 0o777 == 0o600


def _with(folder: Path, name: str) -> Path:
    file = folder / "one"
    file.write_text(f"{name} {new_key()}\n")
    return file


def test_included_files_are_read_in_their_place(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "1.conf").write_text("Host alpha\n  Port 1111\n  User one\n")
    (parts / "2.conf").write_text("Host beta\n  Port 2222")
    config = tmp_path / "config"
    config.write_text(
        f"User first\nInclude {parts}/*.conf\nHost alpha\n  Port 9\n  HostName 10.0.0.9\nHost *\n  User last\n"
    )
    read = read_ssh_config(config)
    assert read.lookup("alpha") == {"hostname": "10.0.0.9", "user": "first", "port": "1111"}
    assert read.lookup("beta")["port"] == "2222"
    assert read.lookup("gamma")["user"] == "first"


def test_include_inside_a_block_does_not_end_it(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host unrelated\n  Port 1\n")
    config = tmp_path / "config"
    config.write_text(f'Host alpha\nInclude "{tmp_path}/more"\nPort 7\n')
    assert read_ssh_config(config).lookup("alpha")["port"] == "7"
    assert "port" not in read_ssh_config(config).lookup("beta")


def test_file_that_includes_itself_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Include {config}\n")
    with pytest.raises(UsageError, match="is included 17 deep"):
        read_ssh_config(config)
