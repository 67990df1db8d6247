#!/bin/sh
# usage: install.sh EXTRA[,EXTRA] MODULE...
#
# Make the virtual environment $VENV with $PYTHON and install vattn with the extras into it, once for each state of
# pyproject.toml. The MODULEs are what the extras bring: with VENV=none nothing is installed, they are only looked for.
#
#   PYTHON    interpreter to start from                       (python3)
#   VENV      folder of the environment, or none              (.venv)
#   TORCH     requirement for torch                           (with a CUDA GPU the newest, else the newest CPU build)
#   PIP_ARGS  arguments for the pip call that installs torch  ()
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
PIP_ARGS=${PIP_ARGS:-}
extras=$1
shift

fail() {
    echo "vattn: $*" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null 2>&1 || fail "no interpreter named '$PYTHON'. Pass one: make PYTHON=/path/to/python3"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "'$PYTHON' does not run."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$PYTHON' is Python $version; vattn needs 3.10 or newer. Pass another: make PYTHON=python3.12"

missing_modules() {
    "$1" - "$@" <<'PROBE'
import importlib.util, sys
print(" ".join(name for name in sys.argv[2:] if importlib.util.find_spec(name) is None))
PROBE
}

if [ "$VENV" = none ]; then
    missing=$(missing_modules "$PYTHON" torch "$@")
    [ -z "$missing" ] || fail "VENV=none installs nothing, and '$PYTHON' lacks: $missing"
    echo "vattn: using $PYTHON (Python $version) as it is"
    exit 0
fi

wanted=${TORCH:-}
if [ -z "$wanted" ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    wanted=newest
fi

stamp=$VENV/vattn-$extras.stamp
state="$version ${wanted:-cpu} $PIP_ARGS $(cksum <pyproject.toml)"
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
    exit 0
fi

remake=
if [ -x "$VENV/bin/python" ] && ls "$VENV"/vattn-*.stamp >/dev/null 2>&1 &&
    ! "$VENV/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"; then
    remake=--clear
fi
if [ -n "$remake" ] || [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "'$PYTHON' has no venv module. Install it (Debian and Ubuntu: apt install python3-venv), or use an" \
            "interpreter that already has torch: make PYTHON=/path/to/python3 VENV=none"
    echo "vattn: making $VENV with Python $version"
    "$PYTHON" -m venv $remake "$VENV"
fi

# A user-wide pip configuration may ask for --user installs or for prompts; neither works here.
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
quiet=-q
[ ! -t 1 ] || quiet=

# The first, so newest, version in pip's list whose name says that it is a CPU build.
cpu_build() {
    # shellcheck disable=SC2086
    "$VENV/bin/python" -m pip index versions torch $PIP_ARGS 2>/dev/null | tr -d ',' | tr ' ' '\n' | grep -m 1 '+cpu$'
}

case $wanted in
newest)
    TORCH='torch>=2.11'
    why='the newest, for the CUDA GPU that was found'
    ;;
'')
    TORCH='torch>=2.11'
    why='no CUDA GPU was found, and no build is named +cpu'
    if build=$(cpu_build); then
        TORCH="torch==$build"
        why='the newest CPU build, as no CUDA GPU was found'
    fi
    ;;
*) why='as asked' ;;
esac
echo "vattn: installing $TORCH ($why)${PIP_ARGS:+ with pip arguments: $PIP_ARGS}"
# shellcheck disable=SC2086
"$VENV/bin/python" -m pip install $quiet $PIP_ARGS "$TORCH"
echo "vattn: installing what [$extras] needs"
# shellcheck disable=SC2086
"$VENV/bin/python" -m pip install $quiet -e ".[$extras]" "$TORCH"
missing=$(missing_modules "$VENV/bin/python" torch "$@")
[ -z "$missing" ] || fail "after installing, $VENV still lacks: $missing"
echo "$state" >"$stamp"
