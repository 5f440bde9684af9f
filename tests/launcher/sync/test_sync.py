"""Runs whose code, and whose packages, are sent to real SSH hosts that have neither."""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from testbed.imports import ROOT
from testbed.processes import Result, marked, run_dtrain, run_program, started_dtrain, wait_until
from testbed.require import require
from testbed.sshd import BareHosts
from testbed.typed import dtrain
from testbed.write import write


@pytest.fixture
def project(bare_hosts: BareHosts) -> Path:
    """A folder that the hosts do not have."""
    folder = bare_hosts.here / uuid.uuid4().hex[:8]
    folder.mkdir()
    write(folder, "train.py", "import helper\nprint(helper.text())\n")
    write(folder, "helper.py", "def text():\n    return 'first'\n")
    return folder


def run(hosts: BareHosts, folder: Path, *args: str, names: str = "node1,node2", sync: str = "code") -> Result:
    options = ["--sync", sync, "--hosts", names, "--ssh-config", str(hosts.ssh_config)]
    return run_dtrain("run", *options, *(args or ("train.py",)), cwd=folder)


def shown(result: Result) -> list[str]:
    assert result.returncode == 0, result.stderr
    return sorted(result.stdout.splitlines())


@pytest.mark.parametrize("client", [[], ["--ssh-command", "ssh"]], ids=["paramiko", "openssh"])
def test_code_is_sent_to_hosts_that_have_nothing(bare_hosts: BareHosts, project: Path, client: list[str]) -> None:
    assert shown(run(bare_hosts, project, *client, "train.py")) == ["[node1:0] first", "[node2:1] first"]


@pytest.mark.parametrize("client", [[], ["--ssh-command", "ssh"]], ids=["paramiko", "openssh"])
def test_the_python_after_setup_takes_the_files(
    bare_hosts: BareHosts, project: Path, tmp_path: Path, client: list[str]
) -> None:
    write(
        project, "train.py", "import os, helper\nprint(helper.text(), os.environ['SHOWN'])\nopen('left', 'w').close()"
    )
    write(tmp_path, "env.sh", f"echo loaded\nalias_of() {{ :; }}\nPATH={tmp_path}:$PATH; export SHOWN='a \"b\"'\n")
    (tmp_path / "python-of-site").symlink_to(os.path.realpath(sys.executable))
    options = ["--python", "python-of-site", "--fetch", "left", "--run-id", "job", *client]
    result = run(bare_hosts, project, *options, "--setup", f"source {tmp_path}/env.sh", "train.py")
    assert shown(result) == ['[node1:0] first a "b"', '[node2:1] first a "b"']
    assert "--fetch: 2 files" in result.stderr
    failed = run(bare_hosts, project, *options[:2], *client, "--setup", "echo no; no_such_command", "train.py")
    assert failed.returncode == 1
    assert "--setup ended there with status 127: no; " in failed.stderr


@pytest.mark.parametrize("client", [[], ["--ssh-command", "ssh"]], ids=["paramiko", "openssh"])
def test_files_are_sent_to_a_container_around_the_agent(
    bare_hosts: BareHosts, project: Path, client: list[str]
) -> None:
    require(shutil.which("bwrap"), "bwrap", "apt-get install bubblewrap")
    write(project, "train.py", "import helper, os\nprint(helper.text(), os.getpid() < 100)\nopen('left', 'w').close()")
    options = ["--agent-prefix", "bwrap --dev-bind / / --unshare-pid --proc /proc", "--fetch", "left", *client]
    result = run(bare_hosts, project, *options, "--run-id", "job", "train.py")
    assert shown(result) == ["[node1:0] first True", "[node2:1] first True"]
    assert "--fetch: 2 files" in result.stderr


def test_a_container_that_is_missing_is_named(bare_hosts: BareHosts, project: Path) -> None:
    result = run(bare_hosts, project, "--agent-prefix", "no-such-container run", "train.py", names="node1")
    assert result.returncode == 1
    assert "no-such-container: " in result.stderr
    assert "is what --agent-prefix names installed there?" in result.stderr


def test_a_changed_line_runs_and_written_files_stay_apart(bare_hosts: BareHosts, project: Path) -> None:
    write(project, "train.py", "import helper, os\nprint(helper.text(), *sorted({*os.listdir()} - {'__pycache__'}))\n")
    before = shown(run(bare_hosts, project, names="node1"))
    assert before == ["[node1:0] first helper.py train.py"]
    write(project, "helper.py", "def text():\n    open('left', 'w')\n    return 'second'\n")
    assert shown(run(bare_hosts, project, names="node1")) == ["[node1:0] second helper.py left train.py"]
    write(project, "helper.py", "def text():\n    return 'third'\n")
    (project / "more.py").touch()
    again = shown(run(bare_hosts, project, names="node1"))
    assert again == ["[node1:0] third helper.py more.py train.py"]


def test_paths_lie_in_the_tree_but_tracebacks_have_the_user_s(bare_hosts: BareHosts, project: Path) -> None:
    write(
        project,
        "package/train.py",
        """\
        import os, sys
        paths = __file__, sys.path[0], sys.argv[1]
        print(*(os.path.relpath(path, os.environ["HOME"]).split("/")[0] for path in paths))
        print(os.getcwd().endswith(sys.argv[2]))
        import helper
        """,
    )
    write(project, "package/helper.py", "def fail():\n    raise ValueError('bad batch')\nfail()\n")
    config = write(project, "package/config.yaml", "lr: 1")
    result = run(bare_hosts, project, "package/train.py", str(config), str(project), names="node1")
    assert result.returncode == 1
    assert result.stdout.splitlines() == ["[node1:0] .cache .cache .cache", "[node1:0] True"]
    assert f'File "{project}/package/helper.py", line 2, in fail' in result.stderr
    assert f"at {project}/package/helper.py:2 in fail" in result.stderr
    assert ".cache" not in result.stderr


def test_the_debugger_shows_and_takes_the_user_s_own_paths(
    bare_hosts: BareHosts, project: Path, tmp_path: Path
) -> None:
    write(
        project,
        "train.py",
        """\
        import helper, os, sys
        while not os.path.exists(sys.argv[1]):
            helper.text()
        """,
    )
    write(
        project,
        "helper.py",
        f"import time\ndef text():\n    open({str(tmp_path / 'up')!r}, 'w').close()\n    time.sleep(0.01)\n",
    )
    hosts = ["--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config), "--run-id", "job"]
    argv = ["run", "--detach", "--sync", "code", *hosts, "train.py", str(tmp_path / "go")]
    assert run_dtrain(*argv, cwd=project, outlived=True).returncode == 0
    wait_until((tmp_path / "up").exists, "the rank is there")
    typed = f"b {project}/helper.py:4\nw\nc\np __file__\nq\n"
    shown = run_dtrain("debug", "job", "--rank", "0", stdin=typed).stdout
    (tmp_path / "go").touch()
    assert dtrain("wait", "job").returncode == 0
    assert f"Breakpoint 1 at {project}/helper.py:4\n" in shown
    assert f"  {project}/train.py(3)<module>()\n" in shown
    assert f"> {project}/helper.py(4)text()\n" in shown
    assert ".cache/dtrain/code/" in shown.partition("time.sleep(0.01)")[2], "a value stays what it is"


@pytest.fixture(scope="session")
def small_python(_bare_lab: BareHosts) -> Path:
    """A Python that has only what dtrain imports, and a package in editable mode; the hosts lack all of it."""
    venv = _bare_lab.here / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python3.*/site-packages")
    needed = (
        "click",
        "psutil",
        "rich",
        "paramiko",
        "cryptography",
        "bcrypt",
        "PyNaCl",
        "cffi",
        "pycparser",
        "cloudpickle",
    )
    for name in needed:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and not file.name.endswith(".pyc"):
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), packages / file)
    write(_bare_lab.here, "editable/src/mine/__init__.py", "VALUE = 1\n")
    (packages / "__editable__.mine.pth").write_text(f"{_bare_lab.here}/editable/src\n{ROOT}\n")
    (packages / "of_debian-1.0.egg-info").touch()
    write(
        _bare_lab.here,
        "editable/src/mine/tool.py",
        """\
        import sys
        def main():
            print(sys.argv[1:])
            return 3
        """,
    )
    points = """\
        [gui_scripts]
        other = mine:no

        [console_scripts]
        python = mine:no
        mine-tool = mine.tool:main [extra]
        [mine]
        another = mine:no
        """
    write(packages, "mine-1.0.dist-info/entry_points.txt", points)
    write(
        packages,
        "mine-1.0.dist-info/RECORD",
        "mine-1.0.dist-info/entry_points.txt,,\n../../../bin/mine-tool,,\n"
        "../../../bin/mine-script,,\n../../../bin/mine-shell,,\n../../../share/mine.txt,,\n"
        "../../../bin/__pycache__/mine.cpython-311.pyc,,\n../../../bin/folder/data,,\n",
    )
    write(venv / "bin", "mine-tool", "not this one").chmod(0o755)
    write(venv / "bin", "mine-script", f"#!{venv}/bin/python\nimport sys, click\nprint(sys.argv[1:])").chmod(0o755)
    write(venv / "bin", "mine-shell", '#!/bin/sh\necho "shell $1"').chmod(0o755)
    for name in ("share/mine.txt", "bin/__pycache__/mine.cpython-311.pyc", "bin/folder/data"):
        write(venv, name, "")
    return venv / "bin/python"


def test_packages_are_sent_editable_ones_as_they_are_now(
    bare_hosts: BareHosts, project: Path, small_python: Path
) -> None:
    write(
        project,
        "train.py",
        """\
        import click, cryptography.hazmat.bindings._rust, mine, psutil, sys
        print(mine.VALUE, *("/.cache/dtrain/" in name for name in (click.__file__, mine.__file__, sys.executable)))
        """,
    )
    options = ["--sync", "--hosts", "node1,node2", "--ssh-config", str(bare_hosts.ssh_config), "train.py"]
    first = run_program(small_python, "-m", "launcher", "run", *options, cwd=project)
    assert shown(first) == ["[node1:0] 1 True True True", "[node2:1] 1 True True True"]
    assert "not sent, since no RECORD says which files they have: of_debian; install them with pip" in first.stderr
    write(bare_hosts.here, "editable/src/mine/__init__.py", "VALUE = 2\n")
    again = run_program(small_python, "-m", "launcher", "run", *options, cwd=project)
    assert shown(again) == ["[node1:0] 2 True True True", "[node2:1] 2 True True True"]


def test_check_looks_at_what_is_sent_or_names_the_option(
    bare_hosts: BareHosts, project: Path, small_python: Path
) -> None:
    hosts = ["--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config), "--no-allreduce", "train.py"]

    def check(*options: str) -> str:
        return run_program(small_python, "-m", "launcher", "check", *options, *hosts, cwd=project).stdout

    without = check()
    assert "note: node1: dtrain run --sync code sends your code to hosts that lack it" in without
    assert "note: node1: dtrain run --sync env sends this Python's packages to hosts that lack it" in without
    assert "pip install" not in without, "no Python is there"
    errors = [
        line for line in check("--sync", "both").splitlines() if line.startswith(("error", "note: node1: dtrain"))
    ]
    assert len(errors) == 1, errors  # this Python has none
    assert "has no torch" in errors[0]


def test_programs_of_packages_are_in_path(bare_hosts: BareHosts, project: Path, small_python: Path) -> None:
    write(
        project,
        "train.py",
        """\
        import shutil, subprocess
        print(subprocess.run(["mine-tool", "a b"]).returncode, shutil.which("other"), shutil.which("another"))
        print(subprocess.run(["mine-script", "c d"]).returncode, subprocess.run(["mine-shell", "e f"]).returncode)
        print(subprocess.run(["python", "-c", "import click"]).returncode)
        """,
    )
    options = ["--sync", "--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config), "train.py"]
    result = run_program(small_python, "-m", "launcher", "run", *options, cwd=project)
    found = [f"[node1:0] {each}" for each in ("0", "0 0", "3 None None", "['a b']", "['c d']", "shell e f")]
    assert shown(result) == found
    assert not [*bare_hosts.cache(1).rglob("mine.txt")]


def test_a_function_finds_its_modules_and_packages(bare_hosts: BareHosts, project: Path, small_python: Path) -> None:
    write(project, "modules/bad.py", "def fail(of):\n    raise ValueError(of)\n")
    program = """\
        import sys, helper, launcher
        sys.path.append(sys.argv[2])
        import bad

        def call(suffix):
            import click
            return helper.text() + suffix, "/.cache/dtrain/env/" in click.__file__

        if __name__ == "__main__":
            options = dict(hosts="node1,node2", ssh_config=sys.argv[1], sync="both", quiet=True)
            print(launcher.launch(call, "!", **options))
            launcher.launch(bad.fail, "batch", **options)
        """
    write(project, "program.py", program)
    (project / "elsewhere").mkdir()
    argv = ["../program.py", str(bare_hosts.ssh_config), str(project / "modules")]
    result = run_program(small_python, *argv, cwd=project / "elsewhere")
    assert result.stdout == "[('first!', True), ('first!', True)]\n", result.stderr
    assert f'File "{project}/modules/bad.py", line 2, in fail' in result.stderr
    assert ".cache/dtrain/code" not in result.stderr


def test_all_packages_of_this_python_are_sent_and_train(bare_hosts: BareHosts, project: Path) -> None:
    write(
        project,
        "train.py",
        """\
        import ddp, torch
        world = ddp.init()
        model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2) * world.rank).sum().backward()
        print(model.module.weight.grad.tolist(), "/.cache/dtrain/env/" in torch.__file__)
        """,
    )
    result = run(bare_hosts, project, "--nproc-per-node", "2", "train.py", names="node1", sync="both")
    assert shown(result) == [f"[node1:{i}] [[0.5, 0.5]] True" for i in range(2)]


def test_files_are_fetched_from_each_host_after_a_failure_too(
    bare_hosts: BareHosts, project: Path, tmp_path: Path
) -> None:
    write(
        project,
        "train.py",
        """\
        import os, sys, time
        os.makedirs("out/deep")
        for name in ("model.pt", "log.txt", "deep/model.pt"):
            with open("out/" + name, "w") as file:
                file.write(os.environ["RANK"] * 3_000_000)
        open(sys.argv[1] + "/" + os.environ["RANK"], "w").close()
        while len(os.listdir(sys.argv[1])) < 2:
            time.sleep(0.01)
        sys.exit(3)
        """,
    )
    options = ["--fetch", "out/*.pt", "--fetch", "out/deep/**"]
    result = run(bare_hosts, project, *options, "--run-id", "job", "train.py", str(tmp_path))
    assert result.returncode == 3
    assert "--fetch: 4 files (12.0 MB) of 2 hosts are in runs/job/fetched" in result.stderr
    assert "is there already" not in result.stderr
    fetched = {str(path.relative_to(project)): path.read_text() for path in project.glob("runs/job/fetched/**/*.*")}
    names = ("out/model.pt", "out/deep/model.pt")
    assert fetched == {f"runs/job/fetched/node{i + 1}/{name}": str(i) * 3_000_000 for i in range(2) for name in names}


def test_what_cannot_be_fetched_is_said(bare_hosts: BareHosts, project: Path) -> None:
    result = run(bare_hosts, project, "--fetch", "out/*.pt", "train.py", names="node1")
    assert shown(result) == ["[node1:0] first"]
    assert "--fetch: node1: no file matches out/*.pt there" in result.stderr


def test_what_is_kept_is_listed_and_removed_if_unused(
    bare_hosts: BareHosts, project: Path, tmp_path: Path, small_python: Path
) -> None:
    hosts = ["--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config)]

    def cache(*options: str) -> Result:
        return run_dtrain("cache", *options, *hosts, cwd=project, outlived=True)

    write(
        project,
        "train.py",
        "import os, sys, time, helper\nwhile os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
        "import click\nprint(click.__name__)",
    )
    flag = write(tmp_path, "flag", "")
    argv = ["-m", "launcher", "run", "--sync", *hosts, "--run-id", "job", "train.py", str(flag)]
    with subprocess.Popen([small_python, *argv], cwd=project, stdout=subprocess.PIPE, text=True) as running:
        wait_until(lambda: [*bare_hosts.cache(1).glob("code/*/job+*")], "the code is there")
        assert "nothing is kept there that no run uses" in cache().stderr
        assert "node1: removed 0 trees" in cache("--clear").stderr
        flag.unlink()
        assert running.communicate(timeout=60)[0] == "[node1:0] click\n"
    rows = cache().stdout.splitlines()[2:]
    assert sorted(row.split("  ")[1].strip() for row in rows) == ["code of run job", "packages"], rows
    assert "node1: removed 2 trees" in cache("--clear").stderr
    assert not [*bare_hosts.cache(1).glob("code/*/*"), *bare_hosts.cache(1).glob("env/*")]


def test_files_that_look_like_secrets_stay_here_unless_named(bare_hosts: BareHosts, project: Path) -> None:
    write(project, "train.py", "import os\nprint(*sorted(os.listdir()))\n")
    for name in (".env", "server.key", "named.pem"):
        write(project, name, "hidden")
    write(project, ".dtrainignore", "data/\n*.bin\n!named.pem\n")
    write(project, "data/large.txt", "")
    write(project, "model.bin", "")
    result = run(bare_hosts, project, names="node1")
    assert shown(result) == ["[node1:0] .dtrainignore helper.py named.pem train.py"]
    assert "not sent, for they look like secrets: .env, server.key; write !NAME in .dtrainignore" in result.stderr


def test_detached_and_repeated_runs_send_their_code(bare_hosts: BareHosts, project: Path) -> None:
    options = ["--sync", "code", "--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config), "--run-id", "job"]
    detached = run_dtrain("run", "--detach", *options, "train.py", cwd=project, outlived=True)
    assert detached.stdout.strip() == "job", detached.stderr
    assert dtrain("wait", "job").returncode == 0
    assert "[node1:0] first" in dtrain("logs", "job").stdout
    write(project, "helper.py", "def text():\n    return 'second'\n")
    assert shown(run_dtrain("rerun", "job", cwd=project, outlived=True)) == ["job"]
    assert dtrain("wait", "job").returncode == 0
    assert "[node1:0] second" in dtrain("logs", "job").stdout


def test_a_restart_on_a_spare_host_sends_it_the_code(bare_hosts: BareHosts, project: Path) -> None:
    write(
        project,
        "train.py",
        """\
        import helper, os, signal
        print(helper.text(), flush=True)
        if os.environ["DTRAIN_TEST_HOST"] == "node1":
            os.kill(os.getppid(), signal.SIGKILL)  # the agent, and so the host
            signal.pause()
        """,
    )
    result = run(bare_hosts, project, "--nnodes", "1", "--max-restarts", "2", "train.py")
    assert shown(result)[-1] == "[node2:0] first"  # what the lost host wrote may be lost with it
    assert "host node1 was lost" in result.stderr


def test_a_host_without_the_script_names_the_option(bare_hosts: BareHosts, project: Path) -> None:
    options = ["--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config)]
    result = run_dtrain("run", *options, "train.py", cwd=project)
    assert "there is no Python at" in result.stderr
    assert "or see --sync" in result.stderr


def test_a_host_without_python_is_named(bare_hosts: BareHosts, project: Path) -> None:
    result = run(bare_hosts, project, "--python", "/opt/none/bin/python", "train.py", names="node1")
    assert result.returncode == 1
    assert "there is no Python there (/opt/none/bin/python); install Python 3." in result.stderr


def test_another_python_is_named(bare_hosts: BareHosts, project: Path, tmp_path: Path) -> None:
    other = write(
        tmp_path,
        "python",
        f"""\
        #!/bin/sh
        exec {os.path.realpath(sys.executable)} -S -c "import sys; sys.version_info = (3, 9, 1); $3"
        """,
    )
    other.chmod(0o755)
    result = run(bare_hosts, project, "--python", str(other), "train.py", names="node1")
    wanted = "Python {}.{}".format(*sys.version_info[:2])
    assert f"node1: it is Python 3.9 there, and {wanted} here; install {wanted} there, or name one" in result.stderr


def test_a_repository_s_module_and_names_of_any_bytes(bare_hosts: BareHosts, project: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    odd = ["with space", "new\nline", os.fsdecode(b"no-\xff-utf8")]
    for name in odd:
        write(project, f"data/{name}", "")
    write(
        project,
        "package/train.py",
        "import helper, os\nprint(helper.text(), sorted(map(os.fsencode, os.listdir('data'))))",
    )
    result = run(bare_hosts, project, "-m", "package.train")
    assert shown(result) == [f"[node{i + 1}:{i}] first {sorted(map(os.fsencode, odd))}" for i in range(2)]


def test_a_script_is_run_from_another_folder(bare_hosts: BareHosts, project: Path) -> None:
    write(project, "package/train.py", "import os\nprint(os.getcwd().endswith('/elsewhere'))")
    (project / "elsewhere").mkdir()
    result = run(bare_hosts, project / "elsewhere", "../package/train.py", names="node1")
    assert shown(result) == ["[node1:0] True"]


def test_a_working_directory_that_the_hosts_have_is_used(bare_hosts: BareHosts, project: Path, tmp_path: Path) -> None:
    write(project, "train.py", "import os\nprint(os.getcwd())")
    options = ["--workdir", str(tmp_path), str(project / "train.py")]
    assert shown(run(bare_hosts, project, *options, names="node1")) == [f"[node1:0] {tmp_path}"]


LARGE_BYTES = 200 << 20


def receivers(hosts: BareHosts) -> list[psutil.Process]:
    found = []
    for process in marked({hosts.mark}):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any("marshal.loads" in arg for arg in process.cmdline()):
                found.append(process)
    return found


def arriving(hosts: BareHosts) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has just got its last name
        return any(path.stat().st_size for path in hosts.cache(1).rglob("large.bin"))
    return False


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_controller_stopped_while_sending_leaves_nothing(signum: int, bare_hosts: BareHosts, project: Path) -> None:
    write(project, "large.bin", "").write_bytes(os.urandom(LARGE_BYTES))
    write(project, "train.py", "import os\nprint(os.path.getsize('large.bin'))")
    options = ["--sync", "code", "--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config), "train.py"]
    with started_dtrain("run", *options, cwd=project, outlived=True) as process:
        wait_until(lambda: arriving(bare_hosts), "a part of the file is there")
        process.send_signal(signum)
        process.wait(60)
    wait_until(lambda: not receivers(bare_hosts), "the receiver has ended")
    assert shown(run(bare_hosts, project, names="node1")) == [f"[node1:0] {LARGE_BYTES}"]


def test_after_a_killed_receiver_the_next_run_succeeds(bare_hosts: BareHosts, project: Path) -> None:
    write(project, "large.bin", "").write_bytes(os.urandom(LARGE_BYTES))
    options = ["--sync", "code", "--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config), "train.py"]
    with started_dtrain("run", *options, cwd=project) as process:
        wait_until(lambda: arriving(bare_hosts), "a part of the file is there")
        for receiver in receivers(bare_hosts):
            receiver.kill()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
    assert b"while files were sent" in stderr
    assert b"start the run again: it goes on" in stderr
    assert shown(run(bare_hosts, project, names="node1")) == ["[node1:0] first"]
