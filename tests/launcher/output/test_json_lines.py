"""`--log-format json`: one object a line, whatever the workers write and however the run ends."""

import json
from pathlib import Path

from testbed.processes import run_dtrain, started_dtrain

from launcher.output.json_lines import message, output_head, output_lines


def test_any_bytes_become_valid_utf_8() -> None:
    head = output_head("a", 3, 1, 2, 0)
    lines = output_lines(head, "größe\n".encode() + bytes(range(256)).replace(b"\n", b""))
    first, second = (json.loads(line) for line in lines.decode().splitlines())
    time = first.pop("time")
    assert first == {
        "kind": "output", "host": "a", "rank": 3, "local_rank": 1, "stream": "stderr", "attempt": 0, "text": "größe",
    }  # fmt: skip
    assert time.endswith("+00:00")
    assert "\\xff" in second["text"]
    assert json.loads(message("a path: \udcff").decode())["text"] == "a path: \\udcff"


def test_all_that_a_failed_run_shows_is_objects(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nsys.stdout.buffer.write(b'\\xff\\xfe one\\r 50%\\r100%\\nunfinished')\nsys.stdout.flush()\n"
        "print('to err', file=sys.stderr, flush=True)\nimport time\n"
        "if os.environ['RANK'] == '0': open('shown', 'w').close(); time.sleep(600)\n"
        "while not os.path.exists('shown'): time.sleep(0.01)\nsys.exit(3)"
    )
    options = ["--log-format", "json", "--simulate", "--nnodes", "2", "--nproc-per-node", "1", "--grace-s", "1"]
    with started_dtrain("run", "-v", *options, "script.py", cwd=tmp_path) as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 3
    shown = [json.loads(line) for line in out.decode().splitlines()]
    assert {(each["kind"], each["stream"], each["text"]) for each in shown} == {
        ("output", "stdout", "100%"), ("output", "stdout", "unfinished")}  # fmt: skip
    assert {(each["host"], each["rank"], each["local_rank"], each["attempt"]) for each in shown} == {
        ("sim0", 0, 0, 0), ("sim1", 1, 0, 0)}  # fmt: skip
    said = [json.loads(line) for line in err.decode().splitlines()]
    assert {each["kind"] for each in said} == {"output", "message", "report"}
    report = said[-1]
    assert (report["kind"], report["level"], report["outcome"]["cause"]["rank"]) == ("report", "error", 1)
    assert "exit code 3" in report["text"] or "exited" in report["text"]


def test_a_command_that_cannot_be_run_says_so_in_an_object(tmp_path: Path) -> None:
    result = run_dtrain("run", "missing.py", cwd=tmp_path, env={"DTRAIN_LOG_FORMAT": "json"})
    assert result.returncode == 2
    said = json.loads(result.stderr)
    assert (said["kind"], said["level"]) == ("message", "error")
    assert "does not exist" in said["text"]
