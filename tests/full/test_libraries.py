"""Training scripts of libraries, written for torchrun, train under dtrain to the numbers that torchrun gets.

They print each line in one write, for torchrun does not keep those of its workers apart.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain, run_program
from testbed.require import require
from testbed.sshd import SshHosts

PROGRAMS = REPOSITORY / "tests/programs"
LIMIT_S = 150.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Sums in another order are other numbers; and nothing is to be fetched.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def where(request: pytest.FixtureRequest) -> list[str]:
    """Options for two workers, on the hosts that a test asks for."""
    if request.param == "simulated":
        return ["--simulate", "--nnodes", "2", "--nproc-per-node", "1"]
    hosts: SshHosts = request.getfixturevalue("ssh_hosts")
    return ["--hosts", "node1,node2", "--ssh-config", str(hosts.ssh_config)]


@pytest.mark.parametrize(
    ("program", "library", "where", "results"),
    [
        ("accelerate_loop", "accelerate", "simulated", ["epoch 1", "processes 2 [0, 1] DistributedType.MULTI_CPU"]),
        ("lightning_loop", "lightning", "simulated", ["TorchElasticEnvironment world 2 loss", "weights"]),
        ("transformers_trainer", "transformers", "ssh", ["world 2 losses", "weights"]),
        ("torch_parallel", "torch", "ssh", ["ddp", "fsdp", "mesh 0 (3, 2) 66", "mesh 1 (3, 2) 66"]),
    ],
    indirect=["where"],
)
def test_a_library_s_script_trains_as_under_torchrun(
    program: str, library: str, where: list[str], results: list[str], tmp_path: Path
) -> None:
    require(find_spec(library), library, "scripts/test --full")
    words = [PROGRAMS / f"{program}.py", tmp_path / "out"]
    expected = _results(run_program(*TORCHRUN, *words, cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT_S))
    for result in results:
        assert any(line.startswith(result) for line in expected), expected
    exported = ["-x", "OMP_NUM_THREADS", "-x", "HF_HUB_OFFLINE"]
    found = _results(run_dtrain("run", *where, *exported, *words, cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT_S))
    assert set(found) == set(expected)  # what one process a host prints is there twice: there are two hosts


def test_libraries_that_read_mpirun_s_variables_find_their_rank(tmp_path: Path) -> None:
    """accelerate goes by those of Open MPI where torchrun's are not set."""
    require(find_spec("accelerate"), "accelerate", "scripts/test --full")
    (tmp_path / "train.py").write_text(
        "import os\n"
        "for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):\n"
        "    del os.environ[name]\n"
        "import torch, accelerate\n"
        "state = accelerate.PartialState(cpu=True)\n"
        "total = accelerate.utils.reduce(torch.tensor([state.process_index + 1.0]), 'sum')\n"
        "print('result', state.process_index, state.local_process_index, state.num_processes, total.item())\n"
        "state.destroy_process_group()\n"
    )
    words = ["--simulate", "--nnodes", "2", "--nproc-per-node", "1", "--env-for", "mpi", "train.py"]
    result = run_dtrain("run", *words, cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT_S)
    assert sorted(_results(result)) == ["0 0 2 3.0", "1 0 2 3.0"]


# By library: trains, and sets `made` to the number of steps that the library has counted.
COUNTING = {
    "accelerate": """
import accelerate
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 1)
batches = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4)
model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)
made = 0
for batch in batches:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        made += accelerator.sync_gradients
""",
    "lightning": """
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4))
made = trainer.global_step
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
class Net(torch.nn.Linear):
    def forward(self, x, labels=None):
        return {"loss": (super().forward(x) - labels).square().mean()}
data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]
quiet = dict(report_to=[], save_strategy="no", disable_tqdm=True)
arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, **quiet)
trainer = Trainer(Net(4, 1), arguments, train_dataset=data)
trainer.train()
made = trainer.state.global_step
""",
}


@pytest.mark.parametrize("library", COUNTING)
def test_dtrain_counts_the_steps_that_a_library_counts(library: str, tmp_path: Path) -> None:
    require(find_spec(library), library, "scripts/test --full")
    (tmp_path / "train.py").write_text(
        f"import os, struct\nimport torch\n{COUNTING[library]}"
        "with open(os.environ['DTRAIN_PROGRESS_FILE'], 'rb') as file:\n"
        "    print('result', made, struct.unpack('<9Q', file.read())[5])\n"
    )
    result = run_dtrain("run", "--nproc-per-node", "2", "train.py", cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT_S)
    found = [tuple(map(int, line.split())) for line in _results(result)]
    assert len(found) == 2
    assert all(made == counted > 0 for made, counted in found)


def _results(result: Result) -> list[str]:
    assert result.returncode == 0, result
    return re.findall(r"\bresult ([^\n]*)", result.stdout)
