"""Put a Hugging Face model on vattn: `enable(model)` swaps attention, masks and the cache, and keeps the model's code.

The model then runs steps of packed tokens, `[1, T]` and no padding between requests, under `vattn.forward_context`.
What a model does is found out by running it once on a few tokens: which modules attend, with which heads, scale,
window, soft cap and sinks, under which mask, and whether tokens meet anywhere else. What vattn cannot express is
refused there, before anything is changed.
"""

from __future__ import annotations

from vattn.integrations.transformers.adapters import LoRAAdapters as LoRAAdapters
from vattn.integrations.transformers.adapters import enable_adapters as enable_adapters
from vattn.integrations.transformers.continuous_batching import continuous_batching as continuous_batching
from vattn.integrations.transformers.continuous_batching import register_batched
from vattn.integrations.transformers.dense_attention import register_dense
from vattn.integrations.transformers.enabling import disable as disable
from vattn.integrations.transformers.enabling import enable as enable
from vattn.integrations.transformers.fp8_checkpoint import load_fp8_linears as load_fp8_linears
from vattn.integrations.transformers.packed_model import PackedModel as PackedModel

register_dense()
register_batched()
