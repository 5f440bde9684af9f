"""What a host hands out: GPUs through a real libnvidia-ml (of fake cards), processors by affinity and cgroups."""

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
from testbed.gpu_machine import GpuMachine
from testbed.nvml import build_nvml
from testbed.ports import free_port
from testbed.processes import Result, run_dtrain, run_program

from launcher.machine.processors import cores, cpu_limit, share

pytestmark = pytest.mark.ordinary_user

UNSET = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUDA_DEVICE_ORDER"))
CARD_1 = "GPU-00000001-0000-4000-8000-000000000000"
SLICES_OF_1 = ("MIG-00000001-0000-4000-8000-000000000000", "MIG-00000001-0001-4000-8000-000000000000")

FIND = """
import os, sys
from launcher.machine.gpus.visible import find_gpus
from launcher.errors import UsageError
for inherited in sys.argv[1:] or [os.environ.get("CUDA_VISIBLE_DEVICES")]:
    if inherited is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = inherited
    try:
        gpus = find_gpus(os.environ)
        certain = [] if gpus.numbers_are_certain else ["in any order"]
        trouble = [gpus.trouble] if gpus.trouble else []
        print(gpus.variable, *gpus.ids, "verified" if gpus.verified else "unverified", *certain, *trouble)
    except UsageError as error:
        print(error)
"""

SHOW = """
import os, sys
names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
print(*(os.environ.get(name, "unset") for name in names), flush=True)
"""


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


class Fake:
    """A machine with fake cards."""

    def __init__(self, nvml: Path, folder: Path) -> None:
        self._nvml = nvml
        self._folder = folder

    def environment(self, cards: Mapping[str, object]) -> dict[str, str | None]:
        return {**UNSET, "LD_LIBRARY_PATH": str(self._nvml), **{name: str(value) for name, value in cards.items()}}

    def find(self, **cards: object) -> str:
        found = run_program(sys.executable, "-c", FIND, env=self.environment(cards))
        assert (found.returncode, found.stderr) == (0, "")
        return found.stdout.strip()

    def find_each(self, lists: Collection[str], **cards: object) -> dict[str, str]:
        """Return what is found under each of several values of CUDA_VISIBLE_DEVICES."""
        found = run_program(sys.executable, "-c", FIND, *lists, env=self.environment(cards))
        assert (found.returncode, found.stderr) == (0, "")
        return dict(zip(lists, found.stdout.splitlines(), strict=True))

    def dtrain(self, *args: str, **cards: object) -> Result:
        (self._folder / "show.py").write_text(SHOW)
        return run_dtrain(*args, "show.py", env=self.environment(cards), cwd=self._folder)

    def seen(self, *args: str, **cards: object) -> dict[int, tuple[str, str]]:
        """Run `dtrain run ARGS`; return for each rank its local rank and the GPUs that it sees."""
        result = self.dtrain("run", *args, **cards)
        assert result.returncode == 0, result
        words = [line.partition("] ")[2].split(" ") for line in result.stdout.splitlines()]
        return {int(rank): (local_rank, visible) for rank, local_rank, visible, _ in words}


@pytest.fixture
def fake(nvml_folder: Path, tmp_path: Path) -> Fake:
    return Fake(nvml_folder, tmp_path)


# ---- what is found -------------------------------------------------------------------------------------------


def test_all_cards_are_found_in_order(fake: Fake) -> None:
    assert fake.find(FAKE_GPUS=3) == "CUDA_VISIBLE_DEVICES 0 1 2 verified"


def test_a_lost_card_is_left_out_and_no_number_depends_on_it(fake: Fake) -> None:
    assert fake.find(FAKE_GPUS=3, FAKE_LOST="2") == "CUDA_VISIBLE_DEVICES 0 1 verified"
    others = [CARD_1.replace("GPU-00000001", f"GPU-0000000{index}") for index in (0, 2)]
    assert fake.find(FAKE_GPUS=3, FAKE_LOST="1") == f"CUDA_VISIBLE_DEVICES {' '.join(others)} verified"


def test_numbers_are_certain_only_if_cuda_counts_as_the_driver(
    fake: Fake,
) -> None:
    assert fake.find(FAKE_GPUS=2, FAKE_T4="0") == "CUDA_VISIBLE_DEVICES 0 1 verified in any order"
    assert fake.find(FAKE_GPUS=2, FAKE_T4="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == "CUDA_VISIBLE_DEVICES 0 1 verified"
    assert fake.find(FAKE_GPUS=2, FAKE_T4="0,1") == "CUDA_VISIBLE_DEVICES 0 1 verified"
    assert fake.find(FAKE_GPUS=3, FAKE_T4="0", CUDA_VISIBLE_DEVICES="1,2").endswith("1 2 verified in any order")
    named = fake.find(FAKE_GPUS=2, FAKE_T4="0", CUDA_VISIBLE_DEVICES=CARD_1)
    assert named == f"CUDA_VISIBLE_DEVICES {CARD_1} verified"


def test_a_card_that_is_cut_into_slices_is_handed_out_by_slice(fake: Fake) -> None:
    assert fake.find(FAKE_GPUS=3, FAKE_MIG="1:2").split() == [
        "CUDA_VISIBLE_DEVICES", "0", *SLICES_OF_1, "2", "verified",
    ]  # fmt: skip


@pytest.mark.parametrize("fails", ["init", "mismatch", "count"])
def test_a_library_without_a_working_driver_is_no_gpu(fake: Fake, tmp_path: Path, fails: str) -> None:
    torch = GpuMachine(tmp_path / "machine").built_for(None)
    assert fake.find(FAKE_GPUS=2, FAKE_FAILS=fails, PYTHONPATH=torch) == "CUDA_VISIBLE_DEVICES unverified"
    assert fake.find(FAKE_FAILS=fails, CUDA_VISIBLE_DEVICES="3,4") == "CUDA_VISIBLE_DEVICES 3 4 unverified"


FAILURES = {"mismatch": "Driver/library version mismatch", "count": "Unknown Error"}


@pytest.mark.parametrize("fails", FAILURES)
def test_a_driver_that_fails_is_said_where_torch_is_built_for_it(fake: Fake, tmp_path: Path, fails: str) -> None:
    torch = GpuMachine(tmp_path / "machine").built_for("cuda")
    found = fake.find(FAKE_GPUS=2, FAKE_FAILS=fails, PYTHONPATH=torch)
    assert found == f"CUDA_VISIBLE_DEVICES unverified NVML says: {FAILURES[fails]}"
    assert fake.find(FAKE_FAILS="init", PYTHONPATH=torch) == "CUDA_VISIBLE_DEVICES unverified", "there is no driver"
    listed = fake.find_each(["3,4", ""], FAKE_FAILS=fails, PYTHONPATH=torch)
    assert listed == {"3,4": "CUDA_VISIBLE_DEVICES 3 4 unverified", "": "CUDA_VISIBLE_DEVICES unverified"}


def test_rocm_s_variable_counts_where_no_nvidia_driver_is(fake: Fake) -> None:
    assert fake.find(FAKE_FAILS="init", HIP_VISIBLE_DEVICES="1,0") == "HIP_VISIBLE_DEVICES 1 0 unverified"
    assert fake.find(FAKE_GPUS=1, HIP_VISIBLE_DEVICES="1,0") == "CUDA_VISIBLE_DEVICES 0 verified"


def test_an_inherited_list_is_kept_as_it_was_written(fake: Fake) -> None:
    lists = ["4,5,6,7", "7,4", " 4 , 5 ", CARD_1, "GPU-00000001", "2,GPU-00000001"]
    for inherited, found in fake.find_each(lists, FAKE_GPUS=8).items():
        names = " ".join(name.strip() for name in inherited.split(","))
        assert found == f"CUDA_VISIBLE_DEVICES {names} verified"


def test_an_inherited_slice_may_have_any_name_that_cuda_knows(fake: Fake) -> None:
    names = [SLICES_OF_1[1], SLICES_OF_1[1][:17], "1", "GPU-00000001", f"MIG-{CARD_1}/2/0"]
    for name, found in fake.find_each(names, FAKE_GPUS=2, FAKE_MIG="1:2").items():
        assert found == f"CUDA_VISIBLE_DEVICES {name} verified"


def test_an_inherited_list_may_hide_all_gpus(fake: Fake) -> None:
    found = fake.find_each(["", ",", "-1", "NoDevFiles"], FAKE_GPUS=2)
    assert set(found.values()) == {"CUDA_VISIBLE_DEVICES verified"}


def test_a_list_that_cuda_would_shorten_silently_is_an_error(fake: Fake) -> None:
    complaints = {
        "0,9": "CUDA_VISIBLE_DEVICES=0,9 names GPU 9, but this host has: 0, 2",
        "1": "names GPU 1, but this host has: 0, 2",  # the lost one
        "GPU-ffffffff": "names GPU GPU-ffffffff, but this host has",
        "MIG-00000000": "names GPU MIG-00000000, but this host has",
        "GPU-0": "GPU-0 may be any of the GPUs 0, 2; write more of it",
        "2,0,2": "names GPU 2 twice",
        "0,GPU-00000000": "names GPU GPU-00000000 twice",
    }
    for inherited, found in fake.find_each(complaints, FAKE_GPUS=3, FAKE_LOST="1").items():
        assert complaints[inherited] in found


# ---- what the commands do with them --------------------------------------------------------------------------


def test_eight_gpus_are_divided_between_two_simulated_hosts(fake: Fake) -> None:
    first, second = "0,1,2,3", "4,5,6,7"
    seen = fake.seen("--simulate", "--nnodes", "2", FAKE_GPUS=8)
    assert seen == {rank: (str(rank % 4), first if rank < 4 else second) for rank in range(8)}


def test_workers_get_only_what_the_user_exported(fake: Fake) -> None:
    assert fake.seen(FAKE_GPUS=8, CUDA_VISIBLE_DEVICES="4,5,6,7") == {r: (str(r), "4,5,6,7") for r in range(4)}


def test_gpus_per_proc_shows_each_worker_its_own_alone(fake: Fake) -> None:
    seen = fake.seen("--gpus-per-proc", "2", FAKE_GPUS=5, CUDA_VISIBLE_DEVICES="4,GPU-00000001,0,2,3")
    assert seen == {0: ("0", "4,GPU-00000001"), 1: ("1", "0,2")}


def test_a_slice_for_each_worker_which_is_its_device_0(fake: Fake) -> None:
    seen = fake.seen(FAKE_GPUS=2, FAKE_MIG="1:2")
    assert {rank: (local_rank, visible[:17]) for rank, (local_rank, visible) in seen.items()} == {
        0: ("0", "0"), 1: ("0", "MIG-00000001-0000"), 2: ("0", "MIG-00000001-0001"),
    }  # fmt: skip


def test_a_worker_cannot_have_several_slices(fake: Fake) -> None:
    result = fake.dtrain("run", "--gpus-per-proc", "2", FAKE_GPUS=1, FAKE_MIG="0:2")
    assert (result.returncode, result.stdout) == (2, ""), result
    assert "--gpus-per-proc 2, but a process can use one MIG slice" in result.stderr
    assert "use --gpus-per-proc 1" in result.stderr


def test_workers_counted_by_processor_see_no_gpu(fake: Fake) -> None:
    seen = fake.seen("--nproc-per-node", "cpu", FAKE_GPUS=2)
    assert seen == {rank: (str(rank), "") for rank in range(cpu_limit())}


@pytest.mark.parametrize("command", ["plan", "run"])
def test_more_workers_than_gpus_is_an_error_with_the_ways_out(fake: Fake, command: str) -> None:
    result = fake.dtrain(command, "--simulate", "--nnodes", "2", "--nproc-per-node", "3", FAKE_GPUS=4)
    assert (result.returncode, result.stdout) == (2, "")
    for host, gpus in (("sim0", "0, 1"), ("sim1", "2, 3")):
        assert f"{host}: 3 workers need 3 GPUs, it has 2 ({gpus}); use fewer" in result.stderr
    assert "--oversubscribe" in result.stderr


def test_workers_may_share_gpus_when_asked_for(fake: Fake) -> None:
    assert fake.seen("--nproc-per-node", "3", "--oversubscribe", FAKE_GPUS=2) == {
        rank: (str(rank), "0,1") for rank in range(3)
    }


def test_a_wrong_list_is_found_before_any_worker_starts(fake: Fake) -> None:
    planned = fake.dtrain("plan", FAKE_GPUS=2, CUDA_VISIBLE_DEVICES="0,5")
    assert (planned.returncode, planned.stdout) == (2, "")
    assert "names GPU 5, but this host has: 0, 1" in planned.stderr
    run = fake.dtrain("run", FAKE_GPUS=2, CUDA_VISIBLE_DEVICES="0,5")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no worker was started" in run.stderr
    assert "names GPU 5, but this host has: 0, 1" in run.stderr


def test_a_driver_that_fails_gives_no_number_of_workers(fake: Fake, tmp_path: Path) -> None:
    broken = {"FAKE_GPUS": 2, "FAKE_FAILS": "mismatch"}
    cuda = {**broken, "PYTHONPATH": GpuMachine(tmp_path / "machine").built_for("cuda")}
    by_hand = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    for more in ([], ["--nproc-per-node", "gpu"], ["--nproc-per-node", "auto", *by_hand]):
        result = fake.dtrain("run", *more, **cuda)
        assert (result.returncode, result.stdout) == (1, ""), result
        assert "NVML says: Driver/library version mismatch. See nvidia-smi; reboot the host" in result.stderr
        assert "or give --nproc-per-node N" in result.stderr
    planned = fake.dtrain("plan", **cuda)
    assert (planned.returncode, planned.stdout, "Driver/library version mismatch" in planned.stderr) == (2, "", True)
    assert fake.seen("--nproc-per-node", "2", **cuda) == {rank: (str(rank), "unset") for rank in range(2)}
    assert fake.seen(CUDA_VISIBLE_DEVICES="", **cuda) == {0: ("0", "")}
    assert fake.seen(PYTHONPATH=GpuMachine(tmp_path / "other").built_for(None), **broken) == {0: ("0", "unset")}


# ---- processors ----------------------------------------------------------------------------------------------


def _cgroup(folder: Path, membership: str, files: Mapping[str, str]) -> int:
    for name, text in files.items():
        file = folder / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "membership").write_text(membership)
    return cpu_limit(folder / "fs", folder / "membership")


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 50000\n"}, 4),
        ("0::/", {"cpu.max": "1250000 100000\n"}, 12),
        ("0::/a", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a", {"a/cpu.max": "9900000 100000\n"}, 64),
        ("0::/a", {"a/cpu.max": "rubbish"}, 64),
        ("0::/../elsewhere", {"cpu.max": "500000 100000"}, 5),
        ("3:cpu,cpuacct:/j\n1:memory:/j", {"cpu,cpuacct/j/cpu.cfs_quota_us": "700000",
                                           "cpu,cpuacct/j/cpu.cfs_period_us": "100000"}, 7),
        ("3:cpu,cpuacct:/gone", {"cpu,cpuacct/cpu.cfs_quota_us": "600000",
                                 "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 6),
        ("3:cpu:/j", {"cpu/j/cpu.cfs_quota_us": "-1", "cpu/j/cpu.cfs_period_us": "100000"}, 64),
        ("4:cpuset:/j\n0::/j", {"cpuset/j/cpu.max": "100000 100000"}, 64),
        ("", {}, 64),
    ],
    ids=["v2", "v2 parent", "v2 root", "less than one", "more than there are", "unreadable", "outside the namespace",
         "v1", "v1 inside a container", "v1 no quota", "another controller", "none"],
)  # fmt: skip
def test_the_quota_of_the_cgroups_limits_the_processors(
    membership: str, files: Mapping[str, str], limit: int, tmp_path: Path
) -> None:
    assert _cgroup(tmp_path, membership, files) == limit


def test_without_cgroups_the_affinity_gives_the_processors(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path, tmp_path / "none") == len(cores()) == len(os.sched_getaffinity(0))


def test_shares_are_contiguous_and_cover_everything() -> None:
    for count in range(9):
        for parts in range(1, 6):
            shares = [share(tuple(range(count)), part, parts) for part in range(parts)]
            assert [thing for one in shares for thing in one] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _on(processors: Sequence[int], *args: str, cwd: Path | None = None, **env: str | None) -> Result:
    """Run dtrain on some processors only, as `taskset` or a batch system does."""
    bind = "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split())); os.execv(sys.argv[2], sys.argv[2:])"
    argv = ["-c", bind, " ".join(map(str, processors)), sys.executable, "-m", "launcher", *args]
    return run_program(sys.executable, *argv, env={**UNSET, **env}, cwd=cwd)


def test_the_affinity_is_what_is_divided() -> None:
    for processors in (cores()[:2], cores()[-1:]):
        result = _on(processors, "plan", "--simulate", "--nnodes=2", "--nproc-per-node=1", "--json", "x.py")
        divided = [row["cores"] for row in json.loads(result.stdout)]
        assert divided == [list(share(processors, part, 2) or processors) for part in range(2)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_threads_are_the_fair_share_unless_they_are_inherited(workers: int, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    processors = cores()[:2]
    fair = max(1, min(len(processors), cpu_limit()) // workers)
    for inherited, expected in ((None, fair), ("7", 7)):
        argv = ["run", "--nproc-per-node", str(workers), "show.py"]
        result = _on(processors, *argv, cwd=tmp_path, OMP_NUM_THREADS=inherited)
        assert [line.split()[-1] for line in result.stdout.splitlines()] == [str(expected)] * workers, result
