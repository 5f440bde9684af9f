"""Hosts as the user names them."""

import re
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind, own_names, parse_hosts
from launcher.hosts.sources import Sources, choose_hosts


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("alpha", Host("alpha", HostKind.SSH)),
        ("alpha:4", Host("alpha", HostKind.SSH, slots=4)),
        ("user@alpha", Host("alpha", HostKind.SSH, user="user")),
        ("user.name@alpha.example.org:16", Host("alpha.example.org", HostKind.SSH, slots=16, user="user.name")),
        ("10.0.0.7:2", Host("10.0.0.7", HostKind.SSH, slots=2)),
        ("[fe80::1]", Host("fe80::1", HostKind.SSH)),
        ("[fe80::1%eth0]:2", Host("fe80::1%eth0", HostKind.SSH, slots=2)),
        ("user@[2001:db8::2]:8", Host("2001:db8::2", HostKind.SSH, slots=8, user="user")),
        ("localhost", Host("localhost", HostKind.LOCAL)),
        ("[::1]:3", Host("::1", HostKind.LOCAL, slots=3)),
        (socket.gethostname(), Host(socket.gethostname(), HostKind.LOCAL)),
        ("me@localhost", Host("localhost", HostKind.SSH, user="me")),
        (" alpha ", Host("alpha", HostKind.SSH)),
        ("alpha:1023", Host("alpha", HostKind.SSH, slots=1023)),
        ("alpha:1024", Host("alpha", HostKind.SSH, port=1024)),
        ("me@alpha:2222", Host("alpha", HostKind.SSH, user="me", port=2222)),
        ("me@alpha:22:4", Host("alpha", HostKind.SSH, user="me", port=22, slots=4)),
        ("[fe80::1]:2222:1", Host("fe80::1", HostKind.SSH, port=2222, slots=1)),
        ("localhost:2222", Host("localhost", HostKind.SSH, port=2222)),
        ("AD\\me@alpha", Host("alpha", HostKind.SSH, user="AD\\me")),
    ],
)
def test_a_host_is_a_name_with_optional_user_port_and_slots(text: str, host: Host) -> None:
    assert parse_hosts(text) == (host,)


def test_each_host_of_a_range_has_what_its_entry_says() -> None:
    assert parse_hosts("node[08-10]:4,me@n[1-2]:2222:8") == (
        *(Host(name, HostKind.SSH, slots=4) for name in ("node08", "node09", "node10")),
        *(Host(name, HostKind.SSH, slots=8, user="me", port=2222) for name in ("n1", "n2")),
    )
    assert [(host.name, host.kind) for host in parse_hosts("127.0.0.[1-2]")] == [
        ("127.0.0.1", HostKind.LOCAL),
        ("127.0.0.2", HostKind.SSH),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "alpha,",
        "al pha",
        "alpha:",
        "alpha:x",
        "alpha:4:4:4",
        "alpha:4:2222",
        "alpha:65536",
        "alpha:22:0",
        "alpha:" + "9" * 5000,
        "alpha:٣",
        "älpha",
        "alpha/../beta",
        "@alpha",
        "fe80::1",
        "[fe80::zz]",
        "[alpha",
        "[alpha]",
        "alpha, me@n[1-3",
        "n[3-1]:4",
        "n[1-2]:[3-4]",
        "n[1-3],n2",
        "n[0-65535],m",
        "-l@alpha",
        "$(reboot)@alpha",
        "a\x00b@alpha",
        "me\\@alpha",
        "me@corp@alpha",
        "a:2222,a:2223",
        "alpha:0",
        "-oProxyCommand=x",
        "-alpha",
        "alpha,beta,alpha",
        "alpha:1,me@alpha:3",
        "localhost,127.0.0.1",
    ],
)
def test_what_is_no_list_of_hosts(text: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UsageError) as refused:
        parse_hosts(text)
    assert str(refused.value) == snapshot


NAMES = (st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True) | st.ip_addresses().map(str)).filter(
    lambda name: name not in own_names()
)
USERS = st.none() | st.from_regex(r"[a-zA-Z_][a-zA-Z0-9._-]{0,6}", fullmatch=True)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    slots = draw(st.none() | st.integers(1, 1023))
    port = draw(st.none() | st.integers(1024 if slots is None else 1, 65535))
    return Host(draw(NAMES), HostKind.SSH, slots=slots, user=draw(USERS), port=port)


def written(host: Host) -> str:
    user = "" if host.user is None else f"{host.user}@"
    name = f"[{host.name}]" if ":" in host.name else host.name
    return user + name + "".join(f":{number}" for number in (host.port, host.slots) if number is not None)


@settings(deadline=None, max_examples=60)
@given(st.lists(hosts(), min_size=1, max_size=8, unique_by=lambda host: host.name), st.sampled_from([",", " , "]))
def test_any_list_of_hosts_is_read_as_it_was_written(listed: list[Host], comma: str) -> None:
    assert parse_hosts(comma.join(map(written, listed))) == tuple(listed)


@settings(deadline=None, max_examples=300)
@given(st.text("ab1-[]:,@. 2", max_size=20) | st.text(max_size=20))
def test_any_text_is_a_list_of_hosts_or_an_error_with_a_column(text: str) -> None:
    column = 1
    try:
        assert parse_hosts(text)
    except UsageError as error:
        match = re.match(r"--hosts: column ([0-9]+): .", str(error))
        column = int(match[1]) if match else 0
    assert 1 <= column <= len(text) + 1


def test_without_a_list_the_host_is_this_machine() -> None:
    (host,) = choose_hosts(Sources(), nnodes=None)
    assert (host.kind, host.name) == (HostKind.LOCAL, socket.gethostname().split(".")[0])
    assert choose_hosts(Sources(), nnodes=(1, 1)) == (host,)


def test_an_elastic_run_takes_what_is_there_and_keeps_spares() -> None:
    assert choose_hosts(Sources(hosts="a,b,c"), nnodes=(1, 2), spares=True) == parse_hosts("a,b,c")
    assert choose_hosts(Sources(hosts="a,b"), nnodes=(1, 4), spares=True) == parse_hosts("a,b")


def test_simulated_hosts_are_equal_parts_of_this_machine() -> None:
    hosts = choose_hosts(Sources(simulate=True), nnodes=(3, 3))
    assert [(host.name, host.kind, host.part, host.parts) for host in hosts] == [
        (f"sim{part}", HostKind.SIMULATED, part, 3) for part in range(3)
    ]
