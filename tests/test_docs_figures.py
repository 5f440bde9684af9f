"""The pictures and tables of scripts/bench/README.md show the figures of figures.json there."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed.processes import run_program
from testbed.require import require

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
PICTURES = ("startup", "recovery", "all_reduce", "scaling")
FIGURES = json.loads((BENCH / "figures.json").read_text())


@pytest.fixture(autouse=True)
def _matplotlib(request: pytest.FixtureRequest) -> None:
    if "tmp_path" in request.fixturenames:
        require(find_spec("matplotlib"), "matplotlib", "pip install matplotlib")


def test_the_pictures_are_those_of_the_figures(tmp_path: Path) -> None:
    assert set(FIGURES) == set(PICTURES)
    drawn = run_program(sys.executable, BENCH / "plots.py", "--out", tmp_path, timeout=120)
    assert drawn.returncode == 0, drawn
    for name in PICTURES:
        made, kept = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, BENCH))
        assert _texts(made) == _texts(kept), f"run scripts/bench/plots.py: {name}.svg is of other figures"
        assert len(_texts(kept)) > 5
        assert f"]({name}.svg)" in _readme()


def test_the_tables_have_the_figures_of_the_pictures() -> None:
    tables = {tuple(cell.strip() for cell in line.strip("|\n").split("|")) for line in _readme().splitlines()}
    for row in FIGURES["startup"]:
        assert any(
            row["command"] in cells
            and {f"{row['wall_s']:.3f}", f"{row['cpu_s']:.3f}"} <= set(cells)
            and any(cell.split() and cell.split()[0] == f"{row['memory_mb']:.0f}" for cell in cells)
            for cells in tables
        ), row
    for row in FIGURES["recovery"]:
        assert any(
            cells[1:4] == tuple(f"{row[f'{what}_s']:.2f}" for what in ("median", "least", "most")) for cells in tables
        )
    for ranks in {row["ranks"] for row in FIGURES["all_reduce"]}:
        rows = [f"{row['shm_ms']:.3g}, {row['ratio']:.2f}" for row in FIGURES["all_reduce"] if row["ranks"] == ranks]
        assert (str(ranks), *rows) in tables


def test_new_figures_take_the_place_of_those_with_the_same_names(tmp_path: Path) -> None:
    script = tmp_path / "plots.py"
    script.write_text((BENCH / "plots.py").read_text())
    (tmp_path / "figures.json").write_text(json.dumps(FIGURES))
    measured = {"command": "torchrun", "median_s": 8.25, "least_s": 8.0, "most_s": 9.0}
    done = run_program(sys.executable, script, "--update", "recovery", stdin=json.dumps(measured), timeout=120)
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found == {**FIGURES, "recovery": [*FIGURES["recovery"][:2], measured]}
    assert "8.25" in _texts((tmp_path / "recovery.svg").read_text())


def test_the_commands_have_the_options_that_they_are_typed_with() -> None:
    commands = re.findall(r"python (scripts/bench/\w+\.py)([^|\n]*)", _readme())
    assert {Path(script).name for script, _ in commands} >= {path.name for path in BENCH.glob("*.py")} - {"gpu.py"}
    for script, words in commands:
        source = (BENCH.parents[1] / script).read_text()
        assert not [option for option in re.findall(r"--[\w-]+", words) if f'"{option}"' not in source], (script, words)


def _readme() -> str:
    return (BENCH / "README.md").read_text()


def _texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
