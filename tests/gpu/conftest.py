"""What every test on the GPU starts from."""

from __future__ import annotations

import os

# FlashInfer takes minutes to compile a kernel that it did not come with: its backend refuses those here, and
# `FLASHINFER_DISABLE_JIT= pytest -m gpu ...` lets it compile.
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
