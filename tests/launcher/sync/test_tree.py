"""Which files are the code of a run, and what is said of those that are not."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from testbed.imports import graph

from launcher.errors import UsageError
from launcher.placement.job_spec import CommandKind, WorkerCommand
from launcher.sync import tree
from launcher.sync.tree import Code, find_code, root_of


def make(root: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def repository(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)


def find(root: Path, named: str = "", left_out: str = "runs") -> Code:
    return find_code([str(root)], [], cache=root.parent / "hashes", left_out={str(root / left_out)}, named=named)


def names(root: Path, code: Code) -> list[str]:
    return sorted(os.path.relpath(file.path, root) for file in code.files)


def test_files_that_git_does_not_ignore_are_sent(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, "tracked.py", "new.py", "out/model.pt", "runs/1/log", ".venv/pyvenv.cfg", ".venv/lib/x.py", "gone.py")
    make(root, ".gitignore", text="out/\n")
    repository(root)
    subprocess.run(["git", "-C", str(root), "add", "tracked.py", "gone.py"], check=True)
    (root / "gone.py").unlink()
    assert names(root, find(root)) == [".gitignore", "new.py", "tracked.py"]


def test_a_repository_in_a_repository_is_sent_too(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, "a.py", "vendored/b.py", "vendored/ignored.o")
    make(root / "vendored", ".gitignore", text="*.o\n")
    repository(root / "vendored")
    repository(root)
    assert names(root, find(root)) == ["a.py", "vendored/.gitignore", "vendored/b.py"]


def test_a_submodule_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, "a.py")
    repository(root)
    entry = "160000,4b825dc642cb6eb9a060e54bf8d69288fbee4904,vendored"
    subprocess.run(["git", "-C", str(root), "update-index", "--add", "--cacheinfo", entry], check=True)
    (root / "vendored").mkdir()
    assert names(root, find(root)) == ["a.py"]


def test_a_repository_in_a_repository_can_be_left_out(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, "a.py", "vendored/b.py", "data/big.bin", "data/small.py", "runs/old/c.py")
    make(root, ".dtrainignore", text="vendored/\ndata/big.bin\n")
    for inner in ("vendored", "data", "runs/old"):
        repository(root / inner)
    repository(root)
    assert names(root, find(root)) == [".dtrainignore", "a.py", "data/small.py"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_a_folder_is_left_out_by_whatever_name(tmp_path: Path, is_repository: bool) -> None:
    root = tmp_path / "project"
    make(root, "a.py", "runs/old/log.txt")
    if is_repository:
        repository(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    code = find_code([str(link)], [], cache=tmp_path / "hashes", left_out={str(root / "runs")})
    assert names(link, code) == ["a.py"]


def test_without_git_it_is_the_folder_less_dtrainignore(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(
        root, "a.py", "__pycache__/a.pyc", "data/1", "data/keep.csv", "sub/data/2", "sub/b.bin", "only/here", "c/only/x"
    )
    make(root, ".dtrainignore", text="# large\ndata/\n*.bin\n/only\n")
    assert names(root, find(root)) == [".dtrainignore", "a.py", "c/only/x"]


def test_the_script_is_always_sent(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, "secret.key")
    make(root, ".gitignore", "train.py", text="*.py\n")
    repository(root)
    assert names(root, find(root, named=str(root / "train.py"))) == [".gitignore", "train.py"]


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", "id_ed25519", "tls.pem", "api.key", ".netrc", "credentials.json", "hf_token", "token"],
)
def test_what_looks_like_a_secret_is_not_sent(name: str, tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, name, "a.py")
    assert names(root, code := find(root)) == ["a.py"]
    assert code.notes == (f"not sent, for they look like secrets: {name}; write !NAME in .dtrainignore to send one",)


@pytest.mark.parametrize("name", [".env.example", "tokenizer.json", "keys.py", "token.py", "secrets.py", "monkey.json"])
def test_what_only_sounds_like_one_is_sent(name: str, tmp_path: Path) -> None:
    make(tmp_path / "project", name)
    assert names(tmp_path / "project", find(tmp_path / "project")) == [name]


def test_links_that_lead_out_and_what_is_no_file_are_named(tmp_path: Path) -> None:
    root = tmp_path / "project"
    make(root, "a.py")
    make(tmp_path, "outside")
    (root / "in").symlink_to("a.py")
    (root / "absolute").symlink_to(root / "a.py")
    (root / "out").symlink_to("../outside")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
        code = find(root)
    assert sorted(code.links) == [(str(root / "absolute"), "a.py"), (str(root / "in"), "a.py")]
    assert [note.partition(":")[0] for note in code.notes] == ["not sent"]
    assert "out" in code.notes[0]
    assert "socket" in code.notes[0]


def test_too_much_code_is_an_error_that_names_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "project"
    for number in range(7):
        make(root, f"{number}.bin", text="x" * (number << 20))
    monkeypatch.setattr(tree, "CODE_BYTES", 10 << 20)
    with pytest.raises(UsageError, match="has 21 MB, more than 10") as caught:
        find(root)
    lines = [line.split() for line in str(caught.value).splitlines()[1:-1]]
    assert lines == [[str(number), "MB", f"{number}.bin"] for number in (6, 5, 4, 3, 2)]


def test_only_changed_files_are_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "project"
    make(root, "a.py", "b.py")
    before = find(root)
    read: list[str] = []
    digest = tree._digest

    def noted(path: str) -> str:
        read.append(path)
        return digest(path)

    monkeypatch.setattr(tree, "_digest", noted)
    assert find(root) == before
    assert read == []
    make(root, "b.py", text="yy")  # of another size: its times may be those of before, to the tick of the clock
    after = find(root)
    assert read == [str(root / "b.py")]
    assert [old == new for old, new in zip(before.files, after.files, strict=True)].count(False) == 1


def test_names_may_have_any_bytes(tmp_path: Path) -> None:
    root = tmp_path / "project"
    odd = ["with space", "new\nline", os.fsdecode(b"no-\xff-utf8")]
    make(root, *odd)
    assert names(root, find(root)) == sorted(odd)
    repository(root)
    assert names(root, find(root)) == sorted(odd)


def test_the_root_is_the_repository_around_the_script(tmp_path: Path) -> None:
    make(tmp_path / "project", "package/train.py")
    script = WorkerCommand(CommandKind.SCRIPT, "package/train.py")
    assert root_of(script, tmp_path / "project") == str(tmp_path / "project/package")
    repository(tmp_path / "project")
    assert root_of(script, tmp_path / "project") == str(tmp_path / "project")
    module = WorkerCommand(CommandKind.MODULE, "package.train")
    assert root_of(module, tmp_path / "project") == str(tmp_path / "project")


def test_agents_import_nothing_of_the_packages_that_are_not_sent() -> None:
    imported = graph("launcher")
    seen: set[str] = set()
    left = [name for name in imported if name.startswith("launcher.agent.")] + ["launcher.check.examiner"]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += imported.get(name, set()) - {"launcher.functions.launch"}  # when it is first used
    sent = {part for name in seen for part in name.split(".")}
    assert "protocol" in sent
    assert not sent & tree._ONLY_HERE
