"""What is imported is declared: the wheel runs with what it requires and nothing else."""

from __future__ import annotations

import re
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from testbed.imports import ROOT, imports, modules
from testbed.processes import run_program
from testbed.require import require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where one is missing an error names the command. The first has to be of torch's own version, which no extra can say;
# the others are for the Python of the workers, not for dtrain's.
WITHOUT_EXTRA = {"torch-xla", "debugpy", "pydevd"}

TRAINS = """
import importlib.util, torch, ddp
assert not importlib.util.find_spec("matplotlib") and not importlib.util.find_spec("pytest"), "not a new one"
world = ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1).to(world.device))
sampler = ddp.DistributedSampler(range(4))
x = torch.tensor([[float(i), 1.0] for i in sampler], device=world.device)
model(x).sum().backward()
print("rank", world.rank, "of", world.world_size, model.module.weight.grad.tolist(), ddp.__file__)
try:
    ddp.callbacks.TensorBoard("runs")
except ddp.errors.DdpError as error:
    print(error)
"""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(requirements: list[str]) -> set[str]:
    return {_canonical(Requirement(each).name) for each in requirements}


@pytest.mark.parametrize("package", ["launcher", "ddp"])
def test_what_is_imported_is_declared(package: str) -> None:
    providers = packages_distributions()
    imported = {name.partition(".")[0] for file in modules(package).values() for name in imports(file)}
    foreign = imported - sys.stdlib_module_names - {"launcher", "ddp", "tomllib"}  # in 3.10 the last is no part of it
    needed = {name: {_canonical(each) for each in providers.get(name, [name])} for name in foreign}
    assert "torch" in needed
    extras = [each for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for each in extra]
    known = _declared([*PROJECT["dependencies"], *extras]) | WITHOUT_EXTRA
    assert {name: by for name, by in needed.items() if not by & known} == {}


def _with_requirements(name: str, seen: dict[str, Distribution], extras: frozenset[str] = frozenset()) -> None:
    """Add an installed distribution and all that it requires."""
    try:
        found = seen[_canonical(name)] = distribution(name)
    except PackageNotFoundError:
        return  # pip would have installed it here if it were needed
    for text in found.requires or ():
        each = Requirement(text)
        wanted = not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if wanted and _canonical(each.name) not in seen:
            _with_requirements(each.name, seen, frozenset(each.extras))


def _top_level(found: Distribution) -> Iterator[Path]:
    """The files and folders of a distribution that lie in site-packages itself."""
    names = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    yield from (Path(str(found.locate_file(name))) for name in sorted(names))


def test_the_wheel_runs_with_what_it_declares_and_nothing_else(tmp_path: Path) -> None:
    require(find_spec("hatchling"), "hatchling", "pip install -e '.[dev]'")
    built = run_program(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    [site] = (tmp_path / "env/lib").glob("python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    [metadata] = site.glob("dtrain-*.dist-info")
    seen: dict[str, Distribution] = {}
    for text in Distribution.at(metadata).requires or ():
        each = Requirement(text)
        if not each.marker or each.marker.evaluate({"extra": ""}):
            _with_requirements(each.name, seen, frozenset(each.extras))
    assert {"torch", "numpy", "click"} <= seen.keys()
    for path in (path for found in seen.values() for path in _top_level(found)):
        if not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    env = {"PYTHONPATH": None, "HOME": str(tmp_path)}
    argv = (python, "-m", "launcher", "run", "--simulate", "--nnodes", "2", "--nproc-per-node", "1", script)
    ran = run_program(*argv, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 [[3.0, 2.0]] {site}/ddp/__init__.py" in ran.stdout
    assert "pip install tensorboard" in ran.stdout
