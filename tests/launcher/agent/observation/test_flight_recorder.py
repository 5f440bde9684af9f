"""What torch recorded is read from the answer of a worker and from what torch's watchdog wrote; neither is trusted."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from testbed.present import present

from launcher.agent.observation.flight_recorder import ask, read, recorder_variables, version
from launcher.agent.workers.worker import Files
from launcher.protocol.reports import Collective


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(str(tmp_path), 0, 3)


def entry(number: int, **more: Any) -> dict[str, Any]:
    """An entry as torch 2.13 has it, without those of its keys that are not read."""
    return {
        "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[2, 3]], "input_dtypes": ["BFloat16"],
        "state": "completed", "retired": True, **more,
    }  # fmt: skip


def written(files: Files, *entries: dict[str, Any], groups: Any = (("0", "default_pg"),)) -> list[Collective]:
    files.collectives.write_text(json.dumps({"groups": groups, "traces": [{}, {"entries": entries}]}))
    return present(read(files)).calls


def test_calls_are_those_of_the_process_s_own_groups(files: Files) -> None:
    groups = [("0", "default_pg"), ("1", "mesh_tp"), ("2", "undefined")]
    calls = written(
        files,
        entry(7, pg_id=0),  # of an earlier group of that name
        entry(1, pg_id=3),
        entry(5, process_group=["9", "gone"]),
        entry(1, pg_id=4, process_group=["1", "mesh_tp"], state="started", retired=False),
        entry(1, pg_id=3, is_p2p=True, profiling_name="nccl:send 0->1"),
        entry(1, pg_id=5, process_group=["2", "undefined"], input_sizes=[[1]] * 6, input_dtypes=["Float"] * 6),
        groups=groups,
    )
    assert calls == [
        Collective("default_pg", 1, "all_reduce", "BFloat16[2, 3]", 6, done=True),
        Collective("mesh_tp (1)", 1, "all_reduce", "BFloat16[2, 3]", 6, done=False),
        Collective("2", 1, "all_reduce", "Float[1], Float[1], Float[1], Float[1], and 2 more", 6, done=True),
    ]
    assert present(read(files)).groups == ["2", "default_pg", "mesh_tp (1)"]


def test_a_question_keeps_what_a_worker_wrote_before_it_failed(files: Files) -> None:
    os.mkfifo(files.asked)
    listens = os.open(files.asked, os.O_RDWR)
    calls = written(files, entry(1))
    before = version(files)
    assert ask(files)
    assert version(files) == before
    os.close(listens)
    assert present(read(files)).calls == calls
    files.collectives.with_suffix(".new").write_text(files.collectives.read_text())
    os.replace(files.collectives.with_suffix(".new"), files.collectives)
    assert version(files) != before


def test_the_newest_and_the_unfinished_calls_are_kept(files: Files) -> None:
    entries = [entry(number, retired=number != 5, state="started") for number in range(1, 2001)]
    assert [call.number for call in written(files, *entries)] == [5, *range(1985, 2001)]
    assert len(written(files, *(entry(number, retired=False, state="") for number in range(999)))) == 128


def test_what_the_watchdog_wrote_is_read(files: Files) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}, "": {"name": "", "desc": "", "ranks": "[]"}}
    trace = {"version": "2.10", "pg_config": config, "entries": [entry(1, state="started", retired=False)]}
    Path(f"{files.dump}3").write_bytes(pickle.dumps(trace, protocol=2))  # torch adds the rank to the name
    found = present(read(files))
    assert found.groups == ["default_pg"]
    assert [(call.number, call.done) for call in found.calls] == [(1, False)]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


def test_nothing_but_containers_is_made_of_a_pickle(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{files.dump}3").write_bytes(pickle.dumps({"pg_config": {}, "entries": [Evil()]}))
    assert read(files) is None
    assert not Path("evil").exists()
    assert "posix.mkdir is no plain container" in capfd.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"groups": [], "traces": [3]}', '{"groups": [["0", "a"]], "traces": [{"entries": [{}]}]}']
)  # fmt: skip
def test_what_cannot_be_read_is_as_if_it_were_not_there(
    files: Files, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    files.collectives.write_text(text)
    assert read(files) is None
    assert "0-3.json.collectives cannot be read: " in capfd.readouterr().err


def test_a_worker_that_does_not_listen_is_not_asked(files: Files) -> None:
    assert read(files) is None
    assert not ask(files)
    os.mkfifo(files.asked)
    assert not ask(files)


def test_settings_of_the_user_stay_under_their_former_names_too(files: Files) -> None:
    every = {
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": str(files.dump)
    }  # fmt: skip
    assert recorder_variables({}, files) == every
    for theirs, ours in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
    ):
        assert recorder_variables({theirs: "0"}, files) == {
            name: value for name, value in every.items() if name != ours
        }
