"""Lists of host names in SLURM's short form, against a plain reference and SLURM's own program."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.require import require

from launcher.hosts.ranges import MAX_HOSTS, HostListError, expand, split

# What `scontrol show hostnames` of SLURM 22.05 writes.
LISTS = {
    "node[01-03,20]": "node01 node02 node03 node20",
    "n[1-3,7],m2": "n1 n2 n3 n7 m2",
    "n[9-11]": "n9 n10 n11",
    "n[099-101]": "n099 n100 n101",
    "n[1-03]": "n1 n2 n3",
    "n[8-0010]": "n8 n9 n10",
    "n[1-3,02-04]": "n1 n2 n3 n02 n03 n04",
    "n[2,1,1]": "n2 n1 n1",
    "n[5-05],a,a": "n5 a a",
    "[1-3]": "1 2 3",
    "1[1-2]": "11 12",
    "rack0x[0-1]": "rack0x0 rack0x1",
    "a[1-2]b[01-02]": "a1b01 a1b02 a2b01 a2b02",
    "a[1-2][3-4]": "a13 a14 a23 a24",
    "a[1-2]x[1-2]y[1-2]": "a1x1y1 a1x1y2 a2x1y1 a2x1y2 a1x2y1 a1x2y2 a2x2y1 a2x2y2",
}


@pytest.mark.parametrize(("text", "names"), LISTS.items())
def test_a_list_becomes_the_names_that_slurm_makes_of_it(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


def test_the_installed_slurm_expands_lists_to_the_same_names(tmp_path: Path) -> None:
    require(shutil.which("scontrol"), "scontrol", "apt-get install slurm-client")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=ALL\n")
    result = subprocess.run(
        ["scontrol", "show", "hostnames", ",".join(LISTS)],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert tuple(result.stdout.split()) == expand(",".join(LISTS))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),  # as pdsh; SLURM has nothing behind the last bracket
        ("n[1-2].example.org", ["n1.example.org", "n2.example.org"]),
        (" a , b[1-2]", ["a", "b1", "b2"]),
        ("[fe80::1],n[1-2],[fe80::2%eth0]", ["[fe80::1]", "n1", "n2", "[fe80::2%eth0]"]),
        ("n[000000000000000001-2]", ["n000000000000000001", "n000000000000000002"]),
    ],
)
def test_what_slurm_does_not_know_is_read_as_well(text: str, names: list[str]) -> None:
    assert expand(text) == tuple(names)


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 1, "a host is missing here"),
        ("a,,b", 3, "a host is missing here"),
        ("a b", 2, "'a b' contains a blank"),
        ("x,n[1, 2]", 7, "'n[1, 2]' contains a blank"),
        ("ab,n[3-1]", 6, "'3-1' in 'n[3-1]' runs backwards; write 1-3"),
        ("n[1,x]", 5, "'x' in 'n[1,x]' is not a number or range; write numbers and ranges as in node[01-16,20]"),
        ("n[]", 3, "'' in 'n[]' is not a number"),
        ("n[1-2-3]", 3, "'1-2-3' in"),
        ("n[3-]", 3, "'3-' in"),
        ("n[٣]", 3, "is not a number"),  # a digit, but not of ours
        ("a,n[1-2", 4, "this '[' is not closed"),
        ("n[[1]", 2, "this '[' is not closed"),
        ("n[1]]", 5, "this ']' was never opened"),
        ("n[" + "9" * 19 + "]", 3, "has more than 18 digits"),
        ("a,n[1-999999999999999999]", 3, "with 'n[1-999999999999999999]' the list has more than 65536 hosts"),
        ("n[0-65535],a", 12, "with 'a' the list has more than 65536 hosts, the limit"),
        (f"n{'[0-9]' * 50}", 1, "the list has more than 65536 hosts"),
        ("n" * 250 + "[000001]", 1, "is longer than a host's name can be (255 characters)"),
    ],
)
def test_what_is_no_list_is_an_error_with_its_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(HostListError) as raised:
        expand(text)
    assert raised.value.column == column
    assert reason in raised.value.reason
    assert str(raised.value) == f"column {column}: {raised.value.reason}"


def test_the_longest_list_is_as_long_as_the_limit_says() -> None:
    names = expand("n[00000-65534],last")
    assert (len(names), names[0], names[-2:]) == (MAX_HOSTS, "n00000", ("n65534", "last"))


def test_a_list_is_split_outside_of_brackets_only() -> None:
    assert split("a[1,2]:3 ,  [fe80::1],") == ((1, "a[1,2]:3"), (13, "[fe80::1]"), (23, ""))
    assert split("a@b[1,2]:0,1", "@") == ((1, "a"), (3, "b[1,2]:0,1"))


RANGES = st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4)).map(lambda r: (r[0], r[0] + r[1], r[2]))
BRACKETS = st.lists(RANGES, min_size=1, max_size=3)
ITEMS = st.tuples(st.text("abx0-.", min_size=1, max_size=4), st.lists(BRACKETS, max_size=2), st.text("y1-", max_size=2))


@settings(deadline=None, max_examples=60)
@given(st.lists(ITEMS, min_size=1, max_size=4), st.sampled_from([",", ", "]))
def test_any_list_has_the_names_of_nested_loops_in_their_order(
    items: list[tuple[str, list[list[tuple[int, int, int]]], str]], comma: str
) -> None:
    texts, expected = [], []
    for prefix, brackets, suffix in items:
        written = [",".join(f"{first:0{width}}-{last}" for first, last, width in ranges) for ranges in brackets]
        texts.append(prefix + "".join(f"[{ranges}]" for ranges in written) + suffix)
        numbers = [
            [str(number).zfill(width) for first, last, width in ranges for number in range(first, last + 1)]
            for ranges in brackets
        ]
        expected += [prefix + "".join(chosen) + suffix for chosen in itertools.product(*numbers)]
    assert expand(comma.join(texts)) == tuple(expected)


@settings(deadline=None, max_examples=200)
@given(st.text("ab01-,[]: ", max_size=20) | st.text(max_size=20))
def test_any_text_is_a_list_or_an_error_within_it(text: str) -> None:
    column = 1
    names: tuple[str, ...] = ("a",)
    try:
        names = expand(text)
    except HostListError as error:
        column = error.column
    assert 1 <= column <= len(text) + 1
    assert names
    assert all(names)
