"""The receiver on a host: which files it takes, where, and what is left after a fault."""

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.processes import wait_until

from launcher.sync import receiver

HERE = "/home/me/project"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dtrain"


def file(name: str, content: bytes, *, changed_ns: int = 10**18, mode: int = 0o644) -> list[Any]:
    return [f"{HERE}/{name}", len(content), mode, changed_ns, hashlib.sha256(content).hexdigest()]


def offer(files: list[list[Any]], **more: Any) -> dict[str, Any]:
    given = {
        "run": "run1", "key": "ab12", "files": files, "links": [], "folders": [],
        "dtrain": HERE, "environment": "", "site": [], "libc": [2, 17], "platform": "",
    }  # fmt: skip
    return {**given, **more}


class Host:
    """A receiver as a process, and the messages with it."""

    def __init__(self, contents: dict[str, bytes], *, container: Sequence[str] = (), **options: Any) -> None:
        self._contents = contents
        self._process = subprocess.Popen(
            [*container, sys.executable, "-S", receiver.__file__, "-m", "tokenize"],  # which reads its input
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        )
        self.asked: list[list[str]] = []  # paths, by request

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        with self._process as process:
            process.send_signal(signal.SIGKILL)

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        (length,) = struct.unpack(">I", self._process.stdout.read(4))
        message: dict[str, Any] = json.loads(self._process.stdout.read(length))
        return message

    def offered(self, offered: dict[str, Any]) -> dict[str, Any]:
        """Serve it until it is ready, or says why not."""
        self.write(block(json.dumps(offered).encode()))
        while "need" in (message := self.read()):
            wanted = [offered["files"][number] for number in message["need"]]
            self.asked.append([each[0].removeprefix(HERE + "/") for each in wanted])
            self.write(block(b"".join(self._contents[name] for name in self.asked[-1])))
        return message


def block(data: bytes) -> bytes:
    packed = zlib.compress(data)
    return struct.pack(">I", len(packed) | receiver.COMPRESSED) + packed


def sent(contents: dict[str, bytes], files: list[list[Any]] | None = None, **more: Any) -> tuple[Path, list[list[str]]]:
    """Send files to a new receiver; return its tree, and what it has asked for."""
    files = [file(name, content) for name, content in contents.items()] if files is None else files
    with Host(contents) as host:
        message = host.offered(offer(files, **more))
        assert "ready" in message, message
        tree = Path(message["ready"][0] + HERE)
    return tree, host.asked


def content_of(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_only_what_has_changed_is_asked_for_again() -> None:
    contents = {"a.py": b"a", "package/b.py": b"b", "gone.py": b""}
    tree, asked = sent(contents)
    assert content_of(tree) == contents
    assert asked == [[*contents]]
    contents = {"a.py": b"a", "package/b.py": b"other"}
    again, asked = sent(contents, run="run2")
    assert content_of(again) == contents
    assert asked == [["package/b.py"]]
    assert not tree.exists()  # the run that had it has ended


def test_a_tree_that_another_host_takes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts may share a home folder: what is listed may have another name before it is looked at."""
    folder = tmp_path / "trees"
    (folder / "run1").mkdir(parents=True)
    (folder / "run2").mkdir()
    scandir = os.scandir

    def listed(path: str) -> Any:
        with scandir(path) as entries:
            found = list(entries)
        (folder / "run1").rmdir()
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", listed)
    assert receiver._newest(str(folder)) == ["run2"]


def test_a_tree_written_to_stays_and_its_files_are_copied() -> None:
    contents = {"a.py": b"a", "b.py": b"b"}
    tree, _ = sent(contents)
    (tree / "model.pt").write_bytes(b"weights")
    (tree / "b.py").write_bytes(b"B")
    again, asked = sent(contents, run="run2")
    assert content_of(again) == contents
    assert asked == [["b.py"]]
    assert content_of(tree) == {"a.py": b"a", "b.py": b"B", "model.pt": b"weights"}


def test_a_later_agent_of_the_run_finds_the_written_files() -> None:
    contents = {"a.py": b"a", "b.py": b"b"}
    tree, _ = sent(contents)
    (tree / "checkpoint.pt").write_bytes(b"weights")
    (tree / "b.py").write_bytes(b"B")
    again, asked = sent(contents)
    assert content_of(again) == {**contents, "checkpoint.pt": b"weights"}
    assert asked == [["b.py"]]


@pytest.mark.parametrize("container", ["", "unshare --map-root-user --pid --fork --kill-child --mount-proc"])
def test_code_of_a_run_that_lives_is_not_taken(container: str) -> None:
    """In a container the process has the id 1, which is that of another process outside."""
    if container and subprocess.run([*container.split(), "true"], capture_output=True).returncode:
        pytest.skip("an ordinary user may not make namespaces everywhere")
    contents = {"a.py": b"a"}
    with Host(contents, container=container.split()) as host:
        lives = offer([file("a.py", b"a")])
        tree = Path(host.offered(lives)["ready"][0] + HERE)
        again, asked = sent(contents, run="run2")
        assert content_of(tree) == content_of(again) == contents
        assert asked == []  # it was copied


@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_what_somebody_has_damaged_is_sent_again(damage: str) -> None:
    contents = {"a.py": b"aaaa", "b.py": b"b"}
    tree, _ = sent(contents)
    path = tree / "a.py"
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"aa" if damage == "cut" else b"AAAA")
    again, asked = sent(contents, run="run2")
    assert content_of(again) == contents
    assert asked == [["a.py"]]


def test_a_store_with_damaged_records_is_used_again(cache: Path) -> None:
    contents = {"a.py": b"a"}
    sent(contents)
    for record in cache.glob("code/ab12/*/record.json"):
        record.write_text("[1]")
    for name in ("stray", "code/stray", "code/ab12/stray", "env/stray"):
        (cache / name).touch()
    (cache / "code/ab12/.empty").mkdir()
    (cache / "tidied").unlink()
    for _ in range(2):
        tree, _ = sent(contents)
        assert content_of(tree) == contents


@pytest.mark.parametrize("days", [-365, 365])
def test_a_clock_that_was_a_year_off_does_no_harm(days: int, cache: Path) -> None:
    contents = {"a.py": b"a"}
    sent(contents)
    other = time.time() + days * 86400
    for path in (*cache.glob("code/*/*"), cache / "tidied"):
        os.utime(path, (other, other))
    tree, asked = sent(contents, run="run2")
    assert content_of(tree) == contents
    assert asked == ([["a.py"]] if days < 0 else [])  # unused for a year: it is removed
    assert abs((cache / "tidied").stat().st_mtime - time.time()) < 3600


def test_a_full_disk_is_named_and_no_partial_file_stays(cache: Path) -> None:
    """The receiver has the disk in a mount namespace of its own; a second one follows it there."""
    program = 'mount -t tmpfs -o size=80m tmpfs "$XDG_CACHE_HOME" && { "$@"; rm "$XDG_CACHE_HOME/filler"; exec "$@"; }'
    container = ["unshare", "--map-root-user", "--mount", "sh", "-c", program, "sh"]
    cache.parent.mkdir()
    if subprocess.run([*container, "true"], capture_output=True).returncode not in (0, 127):
        pytest.skip("an ordinary user may not make namespaces everywhere")
    contents = {"a.py": b"a" * (1 << 20), "b.py": b"b" * (8 << 20)}
    files = [file(name, content) for name, content in contents.items()]
    with Host(contents, container=container) as host:
        host.write(block(json.dumps(offer(files)).encode()))
        assert host.read()["need"] == [0, 1]
        host.write(block(contents["a.py"]))
        there = Path(f"/proc/{host.pid}/root{cache}")
        wait_until(lambda: [*there.glob(f"code/*/.*/tree{HERE}/b.py")], "the second file is begun")
        with (there.parent / "filler").open("wb") as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 20))
        host.write(block(contents["b.py"]))
        assert "No space left on device; free some space" in host.read()["error"]
        assert [path.name for path in there.rglob("*.py")] == ["a.py"]
        assert "ready" in host.offered(offer(files))
        assert host.asked == [["b.py"]]
        assert {path.name: path.read_bytes() for path in there.rglob("*.py")} == contents


def test_an_unfinished_transfer_goes_on() -> None:
    contents = {f"{number}.py": b"%d" % number for number in range(10)}
    with Host(contents) as host:
        host.write(block(json.dumps(offer([file(name, content) for name, content in contents.items()])).encode()))
        assert len(host.read()["need"]) == 10
        host.write(block(b"012345"))
        folder = Path(os.environ["XDG_CACHE_HOME"], "dtrain", "code", "ab12")
        wait_until(lambda: any(path.stat().st_size for path in folder.rglob("5.py")), "six files are there")
    assert [path.name.startswith(".") for path in folder.iterdir()] == [True]
    tree, asked = sent(contents)
    assert content_of(tree) == contents
    assert asked in ([["6.py", "7.py", "8.py", "9.py"]], [["5.py", "6.py", "7.py", "8.py", "9.py"]])


def test_a_file_that_changes_while_sent_is_not_kept(cache: Path) -> None:
    with Host({"a.py": b"b"}) as host:
        message = host.offered(offer([file("a.py", b"a")]))
    assert message == {"error": f"{HERE}/a.py changed while it was sent; start the run again"}
    assert not [*cache.rglob("a.py")]


@pytest.mark.parametrize("path", ["/a/../b", "a", "/a//b", "/a/./b", "/", "/a\0b"])
def test_no_path_leaves_the_tree(path: str, cache: Path) -> None:
    with Host({}) as host:
        message = host.offered(offer([], folders=[path]))
    assert message == {"error": f"the path {path!r} is not a plain absolute path"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../etc", "a/../../../../../etc"])
def test_no_link_leaves_the_tree(target: str) -> None:
    with Host({}) as host:
        message = host.offered(offer([], links=[[f"{HERE}/link", target]]))
    assert "leads out of the tree" in message["error"]


def test_links_and_modes_arrive() -> None:
    files = [file("package/run.sh", b"#!", mode=0o755)]
    tree, _ = sent({"package/run.sh": b"#!"}, files, links=[[f"{HERE}/link", "package/run.sh"]])
    assert os.access(tree / "package/run.sh", os.X_OK)
    assert os.readlink(tree / "link") == "package/run.sh"


def test_names_may_have_any_bytes() -> None:
    names = ["with space.py", "with\nnewline", os.fsdecode(b"no-\xff-utf8")]
    tree, _ = sent({name: name.encode("utf-8", "surrogateescape") for name in names})
    assert sorted(content_of(tree)) == sorted(names)


def test_a_full_disk_is_named() -> None:
    with Host({}) as host:
        huge = [f"{HERE}/huge", 1 << 60, 0o644, 0, "0" * 64]
        message = host.offered(offer([huge]))
    assert "MB free; 1099511627776 MB are to come" in message["error"]


def test_a_store_that_others_can_read_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    with Host({}) as host:
        message = host.offered(offer([]))
    assert message == {"error": f"{cache} there is not private to its user; type there: rm -r {cache}"}


def test_it_ends_once_the_controller_is_silent_for_long() -> None:
    """As it is where the network went away without a word."""
    silent = "import os\nfrom launcher.sync import receiver\nreceiver.QUIET_S = 1\nreceiver.read_block(os.pipe()[0])"
    assert subprocess.run([sys.executable, "-c", silent], timeout=60).returncode == -signal.SIGALRM


# Environments


def environment(contents: dict[str, bytes]) -> tuple[bytes, str]:
    data = receiver.pack(file(name, content) for name, content in contents.items())
    return data, hashlib.sha256(data).hexdigest()


class Served:
    """What a receiver in this process asks for an environment, and gets."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents
        self.asked: list[str] = []

    def __call__(self, numbers: Any, files: Any, writer: receiver.Writer) -> None:
        names = [files[number][0].removeprefix(HERE + "/") for number in numbers]
        self.asked += names
        blocks: Iterator[bytes] = iter([b"".join(self._contents[name] for name in names)])
        writer.receive([files[number] for number in numbers], lambda: next(blocks))


def build(contents: dict[str, bytes]) -> tuple[Path, list[str]]:
    data, digest = environment(contents)
    made = receiver.Environment(receiver.open_store(), digest)
    if not made.is_known():
        made.learn(data)
    served = Served(contents)
    made.build(served)
    return Path(made.tree + HERE), served.asked


def test_environments_share_what_they_have_in_common() -> None:
    first, asked = build({"a.py": b"a", "b.py": b"b"})
    assert asked == ["a.py", "b.py"]
    assert build({"a.py": b"a", "b.py": b"b"}) == (first, [])
    second, asked = build({"a.py": b"a", "b.py": b"new"})
    assert asked == ["b.py"]
    assert second != first
    assert (second / "a.py").samefile(first / "a.py")
    assert not (first / "a.py").stat().st_mode & 0o222


def test_a_damaged_environment_is_mended() -> None:
    contents = {"a.py": b"aaaa", "b.py": b"b"}
    tree, _ = build(contents)
    (tree / "a.py").chmod(0o600)
    (tree / "a.py").write_bytes(b"AAAA")
    assert build(contents) == (tree, ["a.py"])
    assert content_of(tree) == contents


def test_two_runs_at_once_make_one_environment() -> None:
    contents = {f"{number}.py": b"x" * number for number in range(300)}
    data, digest = environment(contents)
    receiver.Environment(receiver.open_store(), digest).learn(data)
    children = []
    for _ in range(3):
        children.append(os.fork())
        if not children[-1]:
            build(contents)
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    tree, asked = build(contents)
    assert asked == []
    assert content_of(tree) == contents
    above = Path(str(tree).removesuffix(HERE)).parent
    assert sorted(os.listdir(above)) == [digest, f"{digest}.list"]


# What stays


def test_what_is_unused_goes_then_the_oldest_over_the_limit() -> None:
    day_s, gb = 86400.0, 1 << 30
    now = 1000 * day_s
    old, large, newest = (now - 31 * day_s, 1, "old"), (now - 2 * day_s, 15 * gb, "large"), (now, 10 * gb, "newest")
    assert receiver.removable([newest, large, old], now) == ["old", "large"]
    assert receiver.removable([newest, old], now) == ["old"]
    assert receiver.removable([(now + 400 * day_s, 1, "of another clock")], now) == []


def test_code_of_ended_runs_is_removed_after_30_days(cache: Path) -> None:
    tree, _ = sent({"a.py": b"a"})
    with Host({"a.py": b"a"}) as host:
        lives = offer([file("a.py", b"a")], key="cd34")
        living = Path(host.offered(lives)["ready"][0])
        later = os.stat(cache).st_mtime + 31 * 86400
        (cache / "tidied").unlink()
        receiver.tidy(str(cache), later)
        assert living.exists()
        assert not tree.exists()


def test_a_tree_that_a_run_just_took_is_not_removed(cache: Path) -> None:
    sent({"a.py": b"a"})
    ((_, _, path),) = receiver.kept(str(cache))
    lock = receiver.own(path)
    assert lock is not None
    receiver._remove_kept(path)  # what `tidy` and `dtrain cache --clear` call after `kept`
    assert os.path.exists(path)
    os.close(lock)
    receiver._remove_kept(path)
    assert not os.path.exists(path)


def test_an_environment_in_the_project_is_kept_apart(tmp_path: Path) -> None:
    """As with the usual `.venv`: both trees have the project's folder."""
    site = f"{HERE}/.venv/lib/python3/site-packages"
    code, shared = tmp_path / "code" / "tree", tmp_path / "env"
    for path, content in (
        (f"{code}{HERE}/mine.py", "import theirs"),
        (f"{shared}{site}/theirs.py", "where = __file__"),
        (f"{shared}{site}/a.pth", "import sys; sys.seen = True"),
    ):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
    sent: Any = SimpleNamespace(folder=str(code.parent), tree=str(code))
    environment: Any = SimpleNamespace(tree=str(shared))
    python = receiver._make_venv(sent, environment, [HERE, site], HERE)
    program = "import sys, mine; print(mine.theirs.where, mine.__file__, sys.seen)"
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert found == [f"{shared}{site}/theirs.py", f"{code}{HERE}/mine.py", "True"]
