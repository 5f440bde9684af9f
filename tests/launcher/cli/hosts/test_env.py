"""`dtrain env`: what a bug report needs is there, and nothing that must not be published."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from testbed.processes import run_dtrain

from launcher import __version__
from launcher.cli.hosts.env import scrub

CANARY = "canary-7f3a91"
SECRETS = {
    "WANDB_API_KEY": CANARY,
    "HF_TOKEN": CANARY,
    "DTRAIN_TOKEN": CANARY * 3,
    "SLURM_JWT": CANARY,
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "MY_PASSWORD": CANARY,
    "NCCL_COMM_ID": f"{CANARY}:1",
    "NCCL_NET_PLUGIN_TOKEN": CANARY,
    "PYTHONSTARTUP": f"/home/{CANARY}/start.py",
    "DTRAIN_HOSTS": f"{CANARY}.example",
    "NCCL_DEBUG_FILE": f"/home/{CANARY}/%h.log",
    "DTRAIN_EXPORT": f"KEY={CANARY}",
    "http_proxy": f"http://me:{CANARY}@proxy",
}
SETTINGS = f"""\
nproc-per-node = "2"
hosts = "{CANARY}.example"
export = ["SECRET={CANARY}"]
ssh-config = "/home/{CANARY}/config"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dtrain.toml").write_text(SETTINGS)
    return tmp_path


def test_it_has_versions_and_settings_but_no_secret(folder: Path) -> None:
    env = {
        **SECRETS,
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "4",
        "NCCL_TOPO_FILE": f"{Path.home()}/topo.xml",
        "GLOO_LOG": "at 198.51.100.7",
    }
    text = run_dtrain("env", env=env, cwd=folder)
    result = run_dtrain("env", "--json", env=env, cwd=folder)
    assert (text.returncode, text.stderr) == (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    everything = text.stdout + result.stdout
    assert CANARY not in everything
    assert "198.51.100.7" not in everything
    assert str(Path.home()) + "/" not in everything
    assert found["format"] == 2
    assert found["versions"]["dtrain"].startswith(f"{__version__} (")
    assert found["versions"]["Python"].startswith("{}.{}.{}".format(*sys.version_info[:3]))
    assert re.match(r"2\.\d+", found["versions"]["torch"])
    shown = found["variables"]
    assert shown["NCCL_DEBUG"] == "INFO"
    assert (shown["NCCL_SOCKET_IFNAME"], shown["OMP_NUM_THREADS"], shown["CUDA_VISIBLE_DEVICES"]) == ("eth0", "3", "4")
    assert shown["NCCL_TOPO_FILE"] == "~/topo.xml"
    assert shown["NCCL_DEBUG_FILE"] == "(set)", "it has a character that values of settings do not have"
    assert shown["GLOO_LOG"] == "at ADDRESS"
    assert shown["WANDB_API_KEY"] == shown["DTRAIN_TOKEN"] == shown["PYTHONSTARTUP"] == shown["DTRAIN_HOSTS"] == "(set)"
    assert not {"AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "http_proxy"} & {*shown}, "not even that it is set"
    assert found["settings"] == {
        "nproc_per_node": "2", "hosts": "(set)", "export": "(set)", "ssh_config": "(set)"
    }  # fmt: skip
    assert "  NCCL_DEBUG: INFO\n" in text.stdout
    assert f"{len(os.sched_getaffinity(0))} usable" in text.stdout


def test_names_and_addresses_are_replaced_as_words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.cli.hosts.env._user", lambda: "ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "box7.lab.example")
    monkeypatch.setenv("HOME", "/data/people/ann")
    monkeypatch.setenv("LOGNAME", "ann")
    cleaned = scrub(
        {
            "ann": ["/data/people/ann/x", "annotated by ann", "box7 and box7.lab.example", "box70"],
            "more": {"at": "10.1.2.3:29500", "version": "535.104.05", "n": 3, "other": "/home/bob/x:/Users/eve"},
        }
    )
    assert cleaned == {
        "USER": ["~/x", "annotated by USER", "HOST and HOST", "box70"],
        "more": {"at": "ADDRESS:29500", "version": "535.104.05", "n": 3, "other": "/home/USER/x:/Users/USER"},
    }
