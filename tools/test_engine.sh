#!/bin/sh
# usage: test_engine.sh {vllm|sglang} VERSION [pytest arguments]
#
# Run the tests of vattn's plugin against a release of an engine, in an environment of its own over the packages of $VENV
# (two minutes to make it). Releases come without their kernels and need not get the torch that they ask for: the tests
# use their interfaces alone. vLLM is built from PyPI's source.
#
#   VENV     environment with vattn and its test packages    (.venv)
#   ENGINES  folder of the environments with engines         (.engines)
set -eu

engine=$1 version=$2
shift 2
VENV=${VENV:-.venv}
home=${ENGINES:-.engines}/$engine-$version
tests=tests/integrations/vllm
[ "$engine" = vllm ] || tests="tests/integrations/test_sglang.py tests/integrations/test_sglang_contract.py
    tests/integrations/test_sglang_model_runner.py"

if [ ! -e "$home/done" ]; then
    "$VENV/bin/python" -m venv --clear "$home"
    site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/vattn-tests.pth"
    pip="$home/bin/python -m pip install -q --disable-pip-version-check"
    $pip 'setuptools>=77,<81' setuptools-scm setuptools-rust wheel
    $pip --no-build-isolation -e ".[test-$engine]"
    if [ "$engine" = vllm ]; then
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version $pip --no-deps --no-build-isolation --no-binary vllm "vllm==$version"
    else
        # torchvision 0.26 goes with torch 2.11, and so on.
        vision=$("$home/bin/python" -c 'import torch; print(f"0.{int(torch.__version__.split(chr(46))[1]) + 15}.*")')
        $pip --no-deps "sglang==$version" "torchvision==$vision"
    fi
    touch "$home/done"
fi
# The engine's tests alone, the slow ones too.
"$home/bin/python" -m pytest -q -p no:cacheprovider -m "not gpu" $tests "$@"
