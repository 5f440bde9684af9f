"""Host files as people have them for other launchers, and what discovery scripts print."""

import re
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from testbed.present import present

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind, own_names
from launcher.hosts.hostfile import parse_discovered, read_hostfile


def ssh(name: str, slots: int | None = None, max_slots: int | None = None, **reached: str | int) -> Host:
    user, port = reached.get("user"), reached.get("port")
    assert user is None or isinstance(user, str)
    assert port is None or isinstance(port, int)
    return Host(name, HostKind.SSH, slots=slots, max_slots=max_slots, user=user, port=port)


FILES = {
    "deepspeed": (
        "# the two that we have\nworker-0 slots=4\n\n  worker-1   slots=8  # with the big disk\n",
        [ssh("worker-0", 4), ssh("worker-1", 8)],
    ),
    "open mpi": (
        "aa slots=2\nbb slots = 2 max-slots = 4\ncc max_slots=3\nmyself@dd count=2 // old\nee cpu=1 slots_max=2\n",
        [ssh("aa", 2), ssh("bb", 2, 4), ssh("cc", 3, 3), ssh("dd", 2, user="myself"), ssh("ee", 1, 2)],
    ),
    "open mpi 5": ("aa user_name=me port=22 slots=2\n", [ssh("aa", 2, user="me", port=22)]),
    "mpich": ("host1\nhost2:4\nhost3:2\n", [ssh("host1"), ssh("host2", 4), ssh("host3", 2)]),
    "pbs": ("n1\nn2\nn1\nn3\nn2\nn1\n", [ssh("n1", 3), ssh("n2", 2), ssh("n3", 1)]),
    "pbs, one process a host": ("n1\nn2\n", [ssh("n1"), ssh("n2")]),
    "names alone beside others": ("n1\nn1\nn2\nn3 slots=8\n", [ssh("n1", 2), ssh("n2", 1), ssh("n3", 8)]),
    "ranges": (
        "n[08-10,1] slots=4\nme@m[1-2]:2222 slots=8\n10.0.0.[7-8]:2\n",
        [
            *(ssh(f"n{number}", 4) for number in ("08", "09", "10", "1")),
            *(ssh(f"m{number}", 8, user="me", port=2222) for number in (1, 2)),
            *(ssh(f"10.0.0.{number}", 2) for number in (7, 8)),
        ],
    ),
    "addresses": ("[fe80::1] slots=2\n[fe80::2%eth0]:3\n", [ssh("fe80::1", 2), ssh("fe80::2%eth0", 3)]),
    "ports": (
        "a:2222:4\nb:22:8\nc:2222 slots=1\n",
        [ssh("a", 4, port=2222), ssh("b", 8, port=22), ssh("c", 1, port=2222)],
    ),
    "hosts that are not used": ("head slots=0\nn1 slots=4\nn2:0\nn3 slots=0 max_slots=4\n", [ssh("n1", 4)]),
    "windows": ("\ufeffn1 slots=4\r\n\r\nn2\tslots=8\r\n", [ssh("n1", 4), ssh("n2", 8)]),
    "no end of line": ("n1 slots=4", [ssh("n1", 4)]),
    "this machine": ("localhost slots=4\nn1", [Host("localhost", HostKind.LOCAL, slots=4), ssh("n1")]),
    "this machine over ssh": ("localhost port=2222\nn1", [ssh("localhost", port=2222), ssh("n1")]),
}


@pytest.mark.parametrize(("text", "hosts"), FILES.values(), ids=FILES)
def test_a_host_file_of_another_launcher_is_read_as_it_reads_it(tmp_path: Path, text: str, hosts: list[Host]) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    assert read_hostfile(path) == tuple(hosts)
    assert parse_discovered(text, command="./discover") == tuple(hosts)


def test_a_comment_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes("n1 slots=4  # für Jürgen\n".encode("latin-1"))
    assert read_hostfile(path) == (ssh("n1", 4),)


def complaint(path: Path) -> str:
    with pytest.raises(UsageError) as raised:
        read_hostfile(path)
    return str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "n1 slots=x",
        "n1 slots=4,max_slots=8",
        "n1 slots",
        "n1 slots==4",
        "n1  4",
        "n1 n2 slots=4",
        "n1 slots=4 slots=4",
        "n1:22 slots=4",
        "me@n1 user=you",
        "n1 slots=4 max_slots=2",
        "n1 max_slots=0",
        "n1 user=-oProxyCommand",
        "n1 port=0",
        "n1,n2 slots=4",
        "\tfe80::1 slots=4",
        "-n1",
        "= 4",
        " me@n[1-x] slots=4",
        "nöde slots=4",
        "a slots=4",
        "b slots=1",
        "b:2222",
        "127.0.0.1",
        "n[1-65536]:1",
        "n[1-65537]",
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, line: str, snapshot: SnapshotAssertion) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"a slots=2\nb\nlocalhost slots=1\n# comment\n{line}\n")
    assert complaint(path).removeprefix(f"{path}:5:") == snapshot


def test_all_bad_lines_are_in_one_error_the_first_five_in_full(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("good slots=1\n" + "".join(f"bad{number} slots=x\n\n" for number in range(7)))
    lines = complaint(path).splitlines()
    assert [line.split(": ")[0] for line in lines[:5]] == [f"{path}:{2 * number + 2}:12" for number in range(5)]
    assert lines[5:] == ["... and 2 more bad lines up to line 14"]


def test_a_file_that_is_no_host_file_is_given_up_soon(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("".join(f"{number} 0.5 0.25\n" for number in range(100_000)))
    assert complaint(path).splitlines()[-1] == "... and 995 more bad lines up to line 1000"


@pytest.mark.parametrize("text", ["", "\n \n", "# n1 slots=4\n", "n1 slots=0\n"])
def test_a_file_without_hosts_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    message = f"the host file {path} names no host that has slots; write a line as in: node1 slots=4"
    assert complaint(path) == message


def test_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "utf16").write_text("n1 slots=4\n", encoding="utf-16")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")  # not by its whole path, which may be too long
        texts = [complaint(Path(name)) for name in ("absent", ".", "loop", "socket", "a\0b", "/dev/zero", "utf16")]
    assert "\n".join(texts) == snapshot


def test_a_discovery_script_may_find_no_host() -> None:
    assert parse_discovered("", command="./discover") == ()
    assert parse_discovered("\n\nn1:0\n", command="./discover") == ()


def test_a_bad_line_of_a_discovery_script_names_the_command() -> None:
    with pytest.raises(UsageError) as raised:
        parse_discovered("n1:4\nnot found: x\n\nn2:y\n", command="./discover --all")
    first, second = str(raised.value).splitlines()
    assert first.startswith("output of ./discover --all, line 2, column 5: 'found:' is not known after a host")
    assert second.startswith("output of ./discover --all, line 4, column 1: 'n2:y' is not a host")


NAMES = (st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True) | st.ip_addresses().map(str)).filter(
    lambda name: name not in own_names()
)
USERS = st.none() | st.from_regex(r"[a-zA-Z_][a-zA-Z0-9._-]{0,6}", fullmatch=True)
OPEN_MPI = st.builds(
    lambda name, slots, more, user, port: ssh(
        name, slots, None if more is None else slots + more, **{k: v for k, v in (("user", user), ("port", port)) if v}
    ),
    NAMES,
    st.integers(1, 999_000),
    st.none() | st.integers(0, 8),
    USERS,
    st.none() | st.integers(1, 65535),
)
FILL = st.sampled_from(["", " ", "  \t"])
ENDS = st.sampled_from(["", "  # was: n9 slots=x", "#", "\n", "\n\n# n9\n", "\r", " // no more"])


def several(hosts: st.SearchStrategy[Host]) -> st.SearchStrategy[list[Host]]:
    return st.lists(hosts, min_size=1, max_size=6, unique_by=lambda host: host.name)


def bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


@settings(deadline=None, max_examples=60)
@given(several(OPEN_MPI), st.data())
def test_any_hosts_in_open_mpi_s_form_are_read_as_written(hosts: list[Host], data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["", "\ufeff"]))
    for host in hosts:
        user, limit = host.user, data.draw(st.sampled_from(["max_slots", "max-slots", "slots_max"]))
        values: list[tuple[str, object]] = [("slots", host.slots), (limit, host.max_slots), ("port", host.port)]
        if data.draw(st.booleans()):
            values.append(("user", user))
            user = None
        fill, end = data.draw(FILL), data.draw(ENDS)
        written = [f"{key}{fill}={fill}{value}" for key, value in values if value is not None]
        words = [
            "" if user is None else f"{user}@",
            bracketed(host.name),
            " ",
            " ".join(data.draw(st.permutations(written))),
        ]
        text += fill + "".join(words) + end + "\n"
    assert parse_discovered(text, command="x") == tuple(hosts)


@settings(deadline=None, max_examples=40)
@given(st.lists(NAMES, min_size=1, max_size=12, unique=True), st.data())
def test_a_pbs_file_counts_lines_in_order_of_appearance(names: list[str], data: st.DataObject) -> None:
    repeated = [*names, *data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=12))]
    lines = data.draw(st.permutations(repeated))
    order = list(dict.fromkeys(lines))
    expected = tuple(ssh(name, lines.count(name)) for name in order)
    assert parse_discovered("".join(f"{bracketed(name)}\n" for name in lines), command="x") == expected


@settings(deadline=None, max_examples=300)
@given(st.text("ab1-[]:,@. =\n\r\t#slotmax_", max_size=60) | st.text(max_size=40))
def test_any_text_is_hosts_or_an_error_with_places_in_it(text: str) -> None:
    places = []
    try:
        parse_discovered(text, command="x")
    except UsageError as error:
        places = [
            present(re.match(r"output of x, line ([0-9]+), column ([0-9]+): .|\.\.\. and [0-9]+ more bad", line))
            for line in str(error).splitlines()
        ]
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    for place in places:
        if place[1] is not None:
            assert 1 <= int(place[1]) <= len(lines)
            assert 1 <= int(place[2]) <= len(lines[int(place[1]) - 1])


@settings(deadline=None, max_examples=60)
@given(content=st.binary(max_size=60) | st.text("ab 1=slotmax\n").map(str.encode))
def test_any_bytes_are_hosts_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any_bytes"
    path.write_bytes(content)
    message = ""
    try:
        assert read_hostfile(path)
    except UsageError as error:
        message = str(error)
    message.encode()  # nothing in it that a terminal or a log could not take
    assert message == "" or str(path) in message
