"""Write the reference of the command `dtrain` from its own help: launcher/REFERENCE.md, and the man page dtrain.1.

    python scripts/reference.py [--check]

With --check nothing is written; the exit code is 1 where a file is not as it would be written.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from launcher.cli.main import cli
from launcher.cli.sbatch import USAGE

LAUNCHER = Path(__file__).resolve().parent.parent / "launcher"
_RUN = "run"  # the command whose options plan, check, cache and warm take too
_TAKES_RUN_S = ("plan", "check", "cache", "warm")

Groups = dict[str, list[click.Option]]


def main() -> int:
    """Write both files, or compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for file, text in {LAUNCHER / "REFERENCE.md": _markdown(), LAUNCHER / "dtrain.1": _man_page()}.items():
        if check and (not file.exists() or file.read_text() != text):
            stale.append(file.name)
        elif not check:
            file.write_text(text)
    if stale:
        print(f"{', '.join(stale)} in launcher/ out of date: python scripts/reference.py writes them", file=sys.stderr)
    return 1 if stale else 0


def _markdown() -> str:
    lines = [
        "# Reference of the command `dtrain`",
        "",
        "Written by `python scripts/reference.py` from the command's own help. Guides: [README.md](README.md).",
        "",
    ]
    lines += [f"- [`dtrain {name}`](#dtrain-{name}): {command.short_help}" for name, command in cli.commands.items()]
    for name, command in cli.commands.items():
        lines += ["", f"## dtrain {name}", ""]
        if name == "sbatch":
            lines += ["```", USAGE.rstrip(), "```"]
            continue
        lines += ["```", _usage(name, command), "```", "", *_paragraphs(command)]
        for group, options in _groups(name, command).items():
            lines += ["", f"**{group}**", "", "| option | meaning | variable |", "|---|---|---|"]
            lines += [
                f"| `{_cell(_words(option))}` | {_cell(_meaning(option))} | {_variable(option)} |" for option in options
            ]
    return "\n".join(lines) + "\n"


def _man_page() -> str:
    lines = [
        '.TH DTRAIN 1 "" "dtrain" "User Commands"',
        ".SH NAME",
        "dtrain \\- start data-parallel training on every host with one command",
        ".SH SYNOPSIS",
        ".B dtrain",
        ".I COMMAND",
        "[ARGS]...",
        ".SH COMMANDS",
    ]
    for name, command in cli.commands.items():
        lines += [".TP", f".B dtrain {name}", _roff(command.short_help or "")]
    for name, command in cli.commands.items():
        lines += [f".SH DTRAIN {name.upper()}"]
        if name == "sbatch":
            lines += [".nf", *map(_roff, USAGE.rstrip().splitlines()), ".fi"]
            continue
        lines += [".nf", _roff(_usage(name, command)), ".fi"]
        for paragraph in _paragraphs(command):
            if paragraph.startswith(" "):
                lines += [".PP", ".nf", _roff(paragraph), ".fi"]
            elif paragraph:
                lines += [".PP", _roff(paragraph)]
        for group, options in _groups(name, command).items():
            lines += [f".SS {_roff(group)}"]
            for option in options:
                lines += [".TP", f".B {_roff(_words(option))}", _roff(_meaning(option))]
    lines += [
        ".SH FILES",
        ".TP",
        ".I dtrain.toml, pyproject.toml",
        "Defaults of options, in the folder of the command.",
    ]
    lines += [".TP", ".I runs/RUN/", "Output of each rank and run.json, by default; see \\-\\-log\\-dir."]
    return "\n".join(lines) + "\n"


def _usage(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"dtrain {name}")
    return " ".join([f"dtrain {name}", *command.collect_usage_pieces(context)])


def _paragraphs(command: click.Command) -> Iterator[str]:
    """Yield the help's paragraphs, an empty line between two; one that begins with \\b keeps its lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))):
        if number:
            yield ""
        if paragraph.startswith("\b"):
            yield "    " + paragraph.removeprefix("\b\n").replace("\n", "\n    ")
        else:
            yield " ".join(paragraph.split())


def _groups(name: str, command: click.Command) -> Groups:
    groups: Groups = {}
    theirs = {param.name for param in cli.commands[_RUN].params} if name in _TAKES_RUN_S else set()
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden and param.name not in theirs:
            groups.setdefault(getattr(param, "group", "Options"), []).append(param)
    return groups


def _words(option: click.Option) -> str:
    """Return how an option is typed: `-x, --export NAME[=VALUE]`."""
    metavar = ""
    if not option.is_flag:  # click before 8.2 takes no context here
        takes_context = "ctx" in inspect.signature(option.make_metavar).parameters
        metavar = option.make_metavar(*[click.Context(click.Command("dtrain"))] * takes_context)
    return f"{', '.join(option.opts)} {metavar}".rstrip()


def _meaning(option: click.Option) -> str:
    record = option.get_help_record(click.Context(click.Command("dtrain")))
    return " ".join((record[1] if record else "").split())


def _variable(option: click.Option) -> str:
    return f"`{option.envvar}`" if option.envvar else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
