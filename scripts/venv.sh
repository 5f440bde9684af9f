# Sourced by scripts/quickstart and scripts/test: makes .venv and installs dtrain into it, unless that is done. After
# use_pair another environment takes the place of .venv.
#
#   PYTHON=/path/to/python3     the interpreter to use (default: 3.11 if there is one, else any from 3.10 on)
#   DTRAIN_TORCH_INDEX=URL      where else pip may look for torch. Machines without a GPU get the build without
#                               CUDA where pip can find it; https://download.pytorch.org/whl/cpu has it.

# Settings that would let pip or python work on another environment than ours.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

venv=.venv
constraints=scripts/constraints.txt

say() { echo "-- $*"; }
die() { echo "$(basename "$0"): $*" >&2; exit 1; }

# has_gpu: whether this machine has a GPU of NVIDIA or AMD. WSL2 and some sandboxes have no /proc/driver.
has_gpu() { [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || [ -e /dev/dxg ]; }

# can_apt: whether this user may install Debian packages.
can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# apt_install PACKAGE...: quiet unless it fails, or waits for another process that uses apt.
apt_install() {
  apt_get update && apt_get install -y --no-install-recommends "$@"
}

# apt_get ARGUMENT...: try again for apt_wait_s as long as another process holds one of apt's locks. apt's own
# DPkg::Lock::Timeout waits for those of dpkg, but not for those of the package lists and of the archives.
apt_wait_s=300
apt_get() {
  local log status=0 waits='' end=$((SECONDS + apt_wait_s))
  log=$(mktemp)
  until DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get "$@" >"$log" 2>&1 </dev/null; do
    if ! grep -q "Could not get lock" "$log" || [ $SECONDS -ge $end ]; then
      cat "$log" >&2
      status=1
      break
    fi
    [ -n "$waits" ] || say "waiting up to $apt_wait_s s: $(grep -m 1 "Could not get lock" "$log")" >&2
    waits=1
    sleep 1
  done
  rm -f "$log"
  return $status
}

# install_parts PACKAGE...: the Debian packages without which tests are skipped. With CI=true those would fail, so end here.
install_parts() {
  local problem="the tests that need $* cannot run"
  if ! can_apt; then
    problem+="; root may: apt-get install $*"
  else
    say "apt-get install $*"
    ! apt_install "$@" || return 0
    problem+=": apt-get install failed"
  fi
  [ "${CI:-}" != true ] || die "$problem"
  say "$problem"
}

# find_python [MODULE]: the first suitable interpreter that has the module. Asked by running it: a pyenv shim may exist
# for a version that is not there, and inside a virtual environment the interpreter behind it is wanted.
find_python() {
  local candidate candidates=(python3.11 python3.12 python3.13 python3.10 python3.14 python3 /usr/bin/python3)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    "$candidate" - "${1:-sys}" 2>/dev/null <<'PY' && return
import importlib, sys
importlib.import_module(sys.argv[1])
if sys.version_info < (3, 10):
    sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)
PY
  done
  return 1
}

# find_version X.Y: the interpreter of that version that can make a virtual environment, on PATH or among pyenv's, whose
# shims work only for the versions that are switched on.
find_version() {
  local candidate
  for candidate in "python$1" $(printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1" | sort -rV); do
    PYTHON=$candidate find_python ensurepip && return
  done
  die "no Python $1 that can make a virtual environment, neither as python$1 on PATH nor in pyenv"
}

# use_pair TORCH PYTHON: has install make an environment of its own for these two versions; "" is the default.
use_pair() {
  local torch=${1:-$(sed -n 's/^torch==//p' scripts/constraints.txt)}
  [[ $torch =~ ^[0-9]+\.[0-9]+\.[0-9]+[a-z0-9.+]*$ ]] || die "--torch $torch: give a whole version, like 2.13.0"
  [[ -z $2 || $2 =~ ^3\.[0-9]+$ ]] || die "--python $2: give it like 3.12"
  PYTHON=$([ -z "$2" ] && python_for_venv || find_version "$2")
  venv=.venvs/torch$torch-py$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  constraints=$venv.constraints.txt
  mkdir -p .venvs
  sed "s/^torch==.*/torch==$torch/" scripts/constraints.txt >"$constraints"
}

# Debian's python3 has no ensurepip, and thus cannot make a virtual environment, without its package python3-venv.
python_for_venv() {
  find_python ensurepip && return
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python from 3.10 on that has ensurepip"
  can_apt || die "no Python from 3.10 on that can make a virtual environment: sudo apt-get install python3-venv"
  say "apt-get install python3-venv" >&2
  apt_install python3 python3-venv || die "apt-get install python3-venv failed"
  find_python ensurepip || die "$(/usr/bin/python3 --version) is too old: dtrain needs Python 3.10 or newer"
}

# torch_version: that of the torch in $venv; nothing if there is none.
torch_version() {
  $venv/bin/python -c 'import importlib.metadata; print(importlib.metadata.version("torch"))' 2>/dev/null || true
}

# keep_torch: has install leave the torch that is in $venv, if dtrain can use it.
keep_torch() {
  local found least
  found=$(torch_version)
  least=$(sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
  [ -n "$found" ] && [ "$(printf '%s\n' "$least" "${found%%+*}" | sort -V | head -n 1)" = "$least" ] || return 0
  constraints=$venv/.dtrain-constraints.txt
  sed "s/^torch==.*/torch==$found/" scripts/constraints.txt >"$constraints"
}

# make_venv: $venv with pip. One that is there, such as one that uv made, is kept if it can get pip.
make_venv() {
  local python
  if $venv/bin/python -c 'import pip' 2>/dev/null || $venv/bin/python -m ensurepip >/dev/null 2>&1; then
    return
  fi
  python=$(python_for_venv)
  [ ! -e "$venv" ] || say "removing $venv, which has no pip"
  say "making $venv with $("$python" --version) ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
}

# install EXTRAS: $venv with dtrain[EXTRAS], editable. Does nothing when the same was installed from the same files.
install() {
  local extras=$1 stamp wanted found pinned
  local pip=($venv/bin/python -m pip install -qq --progress-bar off --no-compile -c $constraints)
  make_venv
  stamp=$venv/.dtrain-$extras
  wanted=$({ pwd; cat pyproject.toml $constraints; $venv/bin/python --version; } | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    [ -z "${DTRAIN_TORCH_INDEX:-}" ] || pip+=(--extra-index-url "$DTRAIN_TORCH_INDEX")
    found=$(torch_version)
    pinned=$(sed -n 's/^torch==//p' $constraints)
    if [ -n "$found" ] && [ "$found" != "$pinned" ] && [ "${found%%+*}" != "$pinned" ]; then
      say "replacing torch $found in $venv by torch $pinned of $constraints"
    fi
    install_torch_for_cpu "${pip[@]}"
    say "installing dtrain[$extras] into $venv (the first time this takes minutes)"
    "${pip[@]}" -e ".[$extras]"
    $venv/bin/python -m compileall -qq -j 0 $venv/lib/python*/site-packages || true # pip does it on one core
    echo "$wanted" >"$stamp"
  fi
  # Saves a tenth of a second at every start where python itself may write none. What does not compile says so when run.
  $venv/bin/python -m compileall -qq launcher ddp || true
  export PATH="$PWD/$venv/bin:$PATH"
}

# install_torch_for_cpu PIP...: on a machine without a GPU, take the build that does not bring gigabytes of CUDA.
install_torch_for_cpu() {
  local torch
  torch=$(sed -n 's/^torch==//p' $constraints)
  if has_gpu || $venv/bin/python -c 'import torch' 2>/dev/null; then
    return
  fi
  say "no GPU here: looking for torch $torch without CUDA"
  "$@" "torch==$torch+cpu" 2>/dev/null || say "pip finds none; DTRAIN_TORCH_INDEX can name an index that has it"
}
