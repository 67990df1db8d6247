"""What a user meets first: the import, the package's contents and the set-up script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vattn

ROOT = Path(__file__).parents[2]
OPTIONAL = ("triton", "transformers", "flashinfer", "flash_attn", "xformers", "safetensors", "hypothesis", "pytest")

PUBLIC_NAMES = """
AsyncGenerator Attention AttentionConfig AttentionMetadata AttentionMetadataBuilder AttentionOutput AttentionType
Audit BlockPool CUDAGraphRunner CacheConfig Calibration Chat ChunkedLocalAttentionSpec CrossAttention
CrossAttentionSpec DecodeInput DifferentialAttention DraftModel EagleDraft Embedder EncoderFP8Config
EncoderOnlyAttention EncoderOnlyAttentionSpec FileConnector FlashAttentionMetadata FlashAttentionMetadataBuilder
FullAttentionSpec
FusionReport Generator Grammar GroupedMetadata GroupedMetadataBuilder HostMemoryConnector HybridBlockTable KVCacheSpec
KVConnector KVTransfer MLAAttention MLAAttentionSpec MLAConfig MMEncoderAttention MtpDraft PromptEmbeddings PromptLookup
QuantConfig Request RopeConfig Sampling SinkFullAttentionSpec SlidingWindowSpec StaticSinkAttention Submission
TQFullAttentionSpec TokenTree TransferRequest TreeAttentionMetadataBuilder WarmupReport XFormersMetadata
XFormersMetadataBuilder allocate_kv_cache audit backend block_keys boundary_layers calibrate check_cu_seqlens
clear_fusion_report clip_rates compile compile_regions copy_blocks differential_lambda_init disable enable errors
explain export_step fast_prefill forward_context fusion_report kept_rows kv_cache_shape load_flash_attn
maybe_transfer_kv_layer merge_attn_states move_slots observe_clipping options pad_cu_seqlens paged_attention plan_key
quantise_linears read_encoder_scales register_backend register_kv_format rope_update_kv_cache save_encoder_scales
save_encoder_scales_when_full swap_blocks token_order update_kv_cache varlen_attention warmup
""".split()
"""What users may rely on: a name leaves this list only with a deprecation."""


def run_python(code: str, **env: str) -> str:
    """Run code in a fresh process from the repository root and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_brings_no_optional_package_and_everything_on_cpu_works_with_torch_alone() -> None:
    code = f"""
import importlib.abc, sys, torch
before = set(sys.modules)
import vattn
new = set(sys.modules) - before
print(sorted(name for name in new if name.split(".")[0] in {OPTIONAL!r} or name.startswith("vattn.kernels.triton.")))

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.metadata
real = importlib.metadata.version

def version(name):
    if name in {OPTIONAL!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
from vattn.cli import doctor
print(doctor.report())
for row in doctor.check_backends():
    print(*row)
"""
    printed = run_python(code, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert printed.startswith("[]\n")
    assert re.search(r"TRITON_ATTN .*not usable: package triton is not installed \(pip install", printed)
    assert re.search(r"TORCH_SDPA CPU ok", printed)
    assert "DIFFERENTIAL_FLASH_ATTN" not in printed, "it runs no plain request"


def test_public_names_are_these() -> None:
    assert sorted(vattn.__all__) == sorted(PUBLIC_NAMES)
    assert [name for name in PUBLIC_NAMES if not hasattr(vattn, name)] == []


def test_torch_is_the_only_dependency() -> None:
    declared = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == '"torch>=2.11"'


def test_ci_and_set_up_name_no_package_host() -> None:
    for path in ("Makefile", "tools/install.sh", ".ci/run", "pyproject.toml"):
        text = (ROOT / path).read_text()
        assert not re.search(r"https?://|index-url", text), path


def run_install(*modules: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "tools/install.sh", "demo", *modules]
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120)


def test_an_existing_interpreter_is_used_as_it_is_or_refused_by_what_it_lacks() -> None:
    result = run_install("pytest", PYTHON=sys.executable, VENV="none")
    assert result.returncode == 0 and "as it is" in result.stdout, result.stderr
    result = run_install("pytest", "no_such_module", PYTHON=sys.executable, VENV="none")
    assert result.returncode == 1 and result.stderr.rstrip().endswith("lacks: no_such_module")


def test_old_or_missing_python_is_refused_by_name(tmp_path: Path) -> None:
    assert "no interpreter named 'no-such-python'" in run_install(PYTHON="no-such-python").stderr
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$2" in *"% sys"*) echo 3.8;; *) exit 1;; esac\n')
    old.chmod(0o755)
    result = run_install(PYTHON=str(old))
    assert result.returncode == 1
    assert "is Python 3.8; vattn needs 3.10 or newer" in result.stderr


@pytest.mark.long
def test_wheel_holds_the_package_and_its_type_marker(tmp_path: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("vattn-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    source = {p.relative_to(ROOT).as_posix() for p in (ROOT / "vattn").rglob("*.py")}
    assert source | {"vattn/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"vattn", f"vattn-{vattn.__version__}.dist-info"}
