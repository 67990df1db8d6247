"""Latent attention by hand: a prompt in two chunks and some decodes, and the formula with every head's keys beside it.

Run it with `python examples/13_latent_attention.py`.
"""

import torch

import vattn

HEADS, NOPE, ROPE, VALUE, LATENT = 8, 32, 16, 32, 64
SCALE = (NOPE + ROPE) ** -0.5


def expanded(query, kv_c, k_pe, weight):
    """Attend with keys and values of every head, as a model without a cache of latents would."""
    key, value = (kv_c @ weight.T).view(-1, HEADS, NOPE + VALUE).split((NOPE, VALUE), -1)
    key = torch.cat((key, k_pe.expand(-1, HEADS, -1)), -1)
    scores = torch.einsum("qnd,snd->nqs", query, key) * SCALE
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("nqs,snv->qnv", weights, value).flatten(1)


def main():
    torch.manual_seed(0)
    kv_b_proj = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
    layer = vattn.MLAAttention(HEADS, SCALE, NOPE, ROPE, VALUE, None, LATENT, kv_b_proj, prefix="layers.0.attn")
    cache = vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32)
    heads_apart = HEADS * (NOPE + ROPE + VALUE)
    print(f"{LATENT + ROPE} values a token in the cache instead of {heads_apart}; {cache.total_bytes} bytes in all")

    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=64, max_seq_len=96, layers=layer)
    attend = vattn.compile(layer, fullgraph=True)
    length = 50
    query, kv_c = torch.randn(length, HEADS, NOPE + ROPE), torch.randn(length, LATENT)
    k_pe = torch.randn(length, 1, ROPE)
    wanted = expanded(query, kv_c, k_pe, kv_b_proj.weight.detach())

    done = 0
    for tokens in (30, 17, 1, 1, 1):
        step = builder.build([tokens], [done + tokens], [[5, 2, 7, 1]])
        rows = slice(done, done + tokens)
        with torch.no_grad(), vattn.forward_context(step):
            got = attend(query[rows], kv_c[rows], k_pe[rows])
        distance = (got - wanted[rows]).norm() / wanted[rows].norm()
        print(f"{tokens:2d} tokens after {done:2d}: relative distance to the formula {distance:.1e}")
        done += tokens


if __name__ == "__main__":
    main()
