"""The address and the interface on which a host meets the others: by the kernel's routes, or as it was asked for."""

import json
from pathlib import Path

import pytest
from testbed.network import NetworkHosts
from testbed.processes import run_dtrain

from launcher.errors import DtrainError
from launcher.machine import network


def test_the_address_is_of_the_route_and_never_of_the_name() -> None:
    assert network.choose_address((), "127.0.0.1", "10.1.2.3") == "10.1.2.3", "by which it was reached"
    assert network.choose_address((), "127.0.0.1", None) == "127.0.0.1"
    assert network.choose_address(("none", "lo"), "", None) == "127.0.0.1"
    with pytest.raises(DtrainError, match=r"no interface none or nil is up there \(--interface\); it has: "):
        network.choose_address(("none", "nil"), "", None)


def test_on_one_machine_gloo_and_nccl_choose_for_themselves() -> None:
    assert network.socket_interfaces("127.0.0.1", ()) == {}
    assert network.socket_interfaces("localhost", ()) == {}
    assert network.socket_interfaces("127.0.0.1", ("lo",)) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_an_interface_that_no_host_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    result = run_dtrain("run", "--interface", "nope0", "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "no interface nope0 is up there (--interface); it has: " in result.stderr


def test_workers_of_several_hosts_get_the_interface_between_them(tmp_path: Path, network_hosts: NetworkHosts) -> None:
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    (tmp_path / "show.py").write_text(
        f"import json, os\nprint(json.dumps([os.environ.get(name) for name in {names!r}]), flush=True)"
    )

    def shown(*words: str, **env: str) -> list[list[str | None]]:
        options = ["--hosts", "far1,far2", "--ssh-config", str(network_hosts.ssh_config), *words]
        result = run_dtrain("run", *options, "show.py", cwd=tmp_path, env=env)
        assert result.returncode == 0, result
        return [json.loads(line.partition("] ")[2]) for line in sorted(result.stdout.splitlines())]

    first, second = shown()
    assert first == second
    assert first[0] is not None
    assert not first[0].startswith("127.")
    assert first[1] == first[2] == "eth0", "else gloo takes what the host's own name stands for"
    own = shown("-x", "GLOO_SOCKET_IFNAME=mine")
    assert [found[1] for found in own] == ["mine", "mine"]
    assert [found[0] for found in shown("--interface", "lo")] == ["127.0.0.1", "127.0.0.1"]
