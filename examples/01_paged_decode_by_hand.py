"""One decode step without a model: a cache of blocks, a block table, and two ops. Prints the distance to dense math."""

import torch

import vattn

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16
config = vattn.AttentionConfig(
    HEADS, KV_HEADS, SIZE, SIZE, scale=SIZE**-0.5, dtype="float32", kv_cache_dtype="float32", block_size=BLOCK
)
torch.manual_seed(0)

# The cache is one tensor of blocks. Unwritten slots may hold anything, NaN included.
cache = torch.full(vattn.kv_cache_shape(config, num_blocks=8), float("nan"))

# Two requests hold 40 and 7 tokens, in any blocks. The last token of each is the new query.
seq_lens, tables = [40, 7], [[5, 2, 7], [3]]
keys = [torch.randn(n, KV_HEADS, SIZE) for n in seq_lens]
values = [torch.randn(n, KV_HEADS, SIZE) for n in seq_lens]
query = torch.randn(2, HEADS, SIZE)

# The builder turns lengths and tables into the tensors of a step; first all tokens but the last as prompts ...
builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=64, max_seq_len=64, block_size=BLOCK)
prompt = builder.build([n - 1 for n in seq_lens], [n - 1 for n in seq_lens], tables)
old_keys, old_values = torch.cat([k[:-1] for k in keys]), torch.cat([v[:-1] for v in values])
vattn.update_kv_cache(old_keys, old_values, cache, prompt.slot_mapping, config)

# ... then one new token each: store its key and value, and attend to all that the request has.
step = builder.build([1, 1], seq_lens, tables)
print("slots of the new tokens:", step.slot_mapping.tolist())
new_keys, new_values = torch.stack([k[-1] for k in keys]), torch.stack([v[-1] for v in values])
vattn.update_kv_cache(new_keys, new_values, cache, step.slot_mapping, config)
output = vattn.paged_attention(query, cache, step, config).output

for row, (key, value) in enumerate(zip(keys, values, strict=True)):
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    weights = (torch.einsum("hd,khd->hk", query[row], key) * config.scale).softmax(-1)
    dense = torch.einsum("hk,khd->hd", weights, value)
    distance = (output[row] - dense).norm() / dense.norm()
    print(f"request {row}: {seq_lens[row]} tokens, relative distance to dense attention {distance:.1e}")
    assert distance < 1e-5
