"""The address and the interface on which a host meets the others: by the kernel's routes, or as it was asked for."""

import ipaddress
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from testbed.namespaces import find_part
from testbed.network import NetworkHosts
from testbed.processes import run_dtrain
from testbed.require import require

from launcher.errors import DtrainError, UsageError
from launcher.machine import network


def test_the_address_is_of_the_route_and_never_of_the_name() -> None:
    assert network.choose_address((), "127.0.0.1", "10.1.2.3") == "10.1.2.3", "by which it was reached"
    assert network.choose_address((), "127.0.0.1", None) == "127.0.0.1"
    assert network.choose_address((), "", "127.0.0.1") == "127.0.0.1"
    assert network.choose_address(("none", "lo"), "", None) == "127.0.0.1"
    with pytest.raises(DtrainError, match=r"no interface none or nil is up there \(--interface\); it has: "):
        network.choose_address(("none", "nil"), "", None)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and what they mean here; other names mean what they always do."""
    known: dict[str, list[str]] = {}
    find = socket.getaddrinfo

    def found(name: str, *more: Any, **options: Any) -> list[tuple[Any, ...]]:
        return [each for address in known.get(name, [name]) for each in find(address, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return known


def test_a_name_of_this_host_means_the_address_that_others_reach(names: dict[str, list[str]]) -> None:
    names |= {"debian": ["127.0.1.1"], "fedora": ["fe80::1%lo", "2001:db8::7", "10.1.2.3"], "cable": ["169.254.3.4"]}
    names |= {"only6": ["fe80::1%lo", "2001:db8::7"]}
    route = network.choose_address((), "127.0.0.1", None)
    assert network.own_address("debian", "127.0.0.1") == route
    assert network.own_address("debian", "127.0.0.1", "10.1.2.9") == "10.1.2.9"
    assert network.own_address("fedora") == "10.1.2.3"
    assert network.own_address("only6") == "2001:db8::7"
    assert network.own_address("cable") == "169.254.3.4"
    for itself in ("127.0.0.2", "10.1.2.3", "localhost"):
        assert network.own_address(itself, "elsewhere", "10.1.2.9") in (itself, "127.0.0.1", "::1")


def test_all_workers_on_one_machine_meet_at_the_name_as_it_is(names: dict[str, list[str]]) -> None:
    names |= {"debian": ["127.0.1.1"]}
    assert network.listening_address("debian", (), "", None) == "debian"
    assert network.listening_address("debian", (), "another", "10.1.2.9") == "10.1.2.9"
    assert network.listening_address("no-such.invalid", (), "another", None) == "no-such.invalid"


def test_the_end_of_a_tunnel_is_no_address_for_another_host() -> None:
    """As of AWS's Session Manager, cloudflared or ssh -R, which connect to their own host's sshd."""
    route = network.choose_address((), "198.51.100.7", None)
    for end in ("127.0.0.1", "::1"):
        assert network.choose_address((), "198.51.100.7", end) == route
    assert network.choose_address((), "198.51.100.7", "127.0.0.2") == "127.0.0.2", "another machine in the tests"


def test_a_cable_without_addresses_of_its_own_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("lo", True, "127.0.0.1"), ("eth0", True, "169.254.3.4"), ("eth0", True, "fe80::1")]
    monkeypatch.setattr(network, "_interfaces", lambda: iter(found))
    assert network.addresses() == {"lo": ["127.0.0.1"], "eth0": ["169.254.3.4"]}


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


# ---- addresses and interfaces, compared with what the kernel's own tools say of them ---------------------------


@pytest.fixture(scope="module")
def kernel() -> list[tuple[str, bool, str, str]]:
    """Interface, whether it is up, address, scope: of every address, from ip(8)."""
    require(find_part("ip"), "ip", "apt-get install iproute2")
    said = subprocess.run(["ip", "-json", "address"], capture_output=True, check=True).stdout
    return [
        (interface["ifname"], "UP" in interface["flags"], found["local"], found["scope"])
        for interface in json.loads(said)
        for found in interface.get("addr_info", [])
    ]


def test_all_addresses_are_found_but_link_local_ones(kernel: list[tuple[str, bool, str, str]]) -> None:
    expected: dict[str, set[str]] = {}
    for name, up, address, _ in kernel:
        if up and not (":" in address and ipaddress.ip_address(address).is_link_local):
            expected.setdefault(name, set()).add(address)
    assert {name: set(found) for name, found in network.addresses().items()} == expected
    assert "127.0.0.1" in network.addresses()["lo"]


def test_every_address_is_its_interfaces_and_this_machines(kernel: list[tuple[str, bool, str, str]]) -> None:
    for name, _, address, scope in kernel:
        if scope != "link":  # the same one may be on several
            assert network.interface_of(address) == name
            assert network.is_own(address)
    assert network.interface_of("127.0.0.9") == "lo"
    assert network.interface_of("::ffff:127.0.0.1") == "lo"
    assert network.interface_of("203.0.113.77") is None
    assert network.interface_of("no address") is None


def test_the_route_decides_by_which_address_a_host_is_reached(kernel: list[tuple[str, bool, str, str]]) -> None:
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.address_towards("127.9.9.9").startswith("127.")
    assert network.address_towards("localhost") in ("127.0.0.1", "::1")
    for _, up, address, scope in kernel:
        if up and scope == "global":
            assert network.address_towards(address) == address


def test_unknown_names_and_unreachable_hosts_are_named() -> None:
    with pytest.raises(UsageError, match=r"DNS lookup of no-such-host\.invalid failed"):
        network.address_towards("no-such-host.invalid")
    with pytest.raises(UsageError, match=r"DNS lookup of a+ failed"):
        network.address_towards("a" * 100)
    with pytest.raises(UsageError, match=r"no route leads from this machine to 255\.255\.255\.255"):
        network.address_towards("255.255.255.255")


def test_what_leads_to_this_machine_only_is_loopback() -> None:
    for address in ("localhost", "127.0.0.1", "127.1", "127.1.2.3", "::1", "::1%lo"):
        assert network.is_loopback(address)
    for address in ("127.example.com", "10.1", "192.0.2.1", "::2", "", "a..b"):
        assert not network.is_loopback(address)


def test_own_names_are_own() -> None:
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert network.is_own(host)
    for host in ("203.0.113.77", "no-such-host.invalid", "2001:db8::77", "a" * 100):
        assert not network.is_own(host)


def test_the_first_interface_that_is_up_gives_its_address() -> None:
    assert network.address_of_interface(["nosuch0", "lo"]) == ("lo", "127.0.0.1")
    assert network.address_of_interface(["nosuch0"]) is None
    assert network.address_of_interface([]) is None


def test_no_descriptor_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    network.address_towards("127.0.0.1")
    network.addresses()
    assert set(os.listdir("/proc/self/fd")) == before
