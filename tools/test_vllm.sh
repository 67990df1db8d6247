#!/bin/sh
# usage: test_vllm.sh VERSION
#
# Run the tests of vattn's plugin against a release of vLLM, in an environment of its own. The release is built from
# PyPI's source without kernels (two minutes at most), over the packages of $VENV. Its torch need not be the one that
# vLLM asks for: the tests use vLLM's interfaces alone.
#
#   VENV     environment with vattn and its test packages    (.venv)
#   ENGINES  folder of the environments with engines         (.engines)
set -eu

version=$1
VENV=${VENV:-.venv}
home=${ENGINES:-.engines}/vllm-$version

if [ ! -e "$home/done" ]; then
    "$VENV/bin/python" -m venv --clear "$home"
    site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/vattn-tests.pth"
    pip="$home/bin/python -m pip install -q --disable-pip-version-check"
    $pip 'setuptools>=77,<81' setuptools-scm setuptools-rust wheel
    $pip --no-build-isolation -e '.[test-vllm]'
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version $pip --no-deps --no-build-isolation --no-binary vllm "vllm==$version"
    touch "$home/done"
fi
"$home/bin/python" -m pytest -q -p no:cacheprovider tests/integrations/vllm
