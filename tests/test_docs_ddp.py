"""What ddp/README.md shows is there: its Python runs, its messages are raised, its lines that resume are tested."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.processes import run_dtrain
from testbed.warm import HEADER

ROOT = Path(__file__).parents[1]
README = (ROOT / "ddp" / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- (\S+) -->\n)?```python\n(.*?)```", re.DOTALL)
RUN = (
    HEADER
    + """
from pathlib import Path
for number, block in enumerate(Path("blocks").read_text().split("\\f"), 1):
    exec(compile(block, f"block {number} of those that import ddp", "exec"), {"__name__": "__main__"})
    print("ran", number)
"""
)


@pytest.mark.usefixtures("warm")
def test_its_python_runs_on_two_ranks(tmp_path: Path) -> None:
    blocks = [code for program, code in BLOCK.findall(README) if not program]
    assert all("import ddp" in block for block in blocks)
    blocks.sort(key=lambda block: "@ddp.resilient" not in block)  # it refuses models of others
    (tmp_path / "blocks").write_text("\f".join(blocks))
    (tmp_path / "run.py").write_text(RUN)
    result = run_dtrain("run", "--nproc-per-node", "2", "run.py", cwd=tmp_path, timeout=250)
    assert result.returncode == 0, result
    assert result.stdout.count(f"ran {len(blocks)}\n") == 2, result
    assert len(blocks) >= 8, "there are examples of most sections"


def test_the_lines_that_resume_are_those_of_tested_programs() -> None:
    shown = {program: code for program, code in BLOCK.findall(README) if program.startswith("tests/")}
    assert set(shown) == {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/programs/resume_*.py")}
    for program, code in shown.items():
        there = {line.strip() for line in (ROOT / program).read_text().splitlines()}
        matter = [
            line.strip() for line in code.splitlines() if re.search(r"ckpt|latest|save_state|resume|exist|Model", line)
        ]
        assert len(matter) >= 2, program
        assert not [line for line in matter if line not in there], program


@pytest.mark.usefixtures("warm")
def test_its_scripts_that_fail_end_with_the_error_that_is_shown(tmp_path: Path) -> None:
    failing = {mark.removeprefix("raises:"): code for mark, code in BLOCK.findall(README) if mark.startswith("raises:")}
    assert len(failing) >= 2
    for error, code in failing.items():
        (tmp_path / "script.py").write_text(HEADER + code)
        result = run_dtrain("run", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
        assert result.returncode == 1, result
        assert f"ddp.errors.{error}: " in result.stderr, result


def test_its_messages_are_raised() -> None:
    section = README.partition("## Troubleshooting by message")[2].partition("\n## ")[0]
    messages = [" ".join(found.split()) for found in re.findall(r"^- `([^`]+)`:", section, re.MULTILINE)]
    assert len(messages) > 15
    raised = set(_texts())
    unknown = [message for message in messages if not any(message in text for text in raised)]
    assert not unknown


def _texts() -> Iterator[str]:
    """The texts in ddp, with "..." for what differs."""
    for path in (ROOT / "ddp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
