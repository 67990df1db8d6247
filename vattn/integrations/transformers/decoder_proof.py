"""Prove that a decoder on vattn computes the model's own logits, before it is accepted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.errors import UnsupportedRequestError
from vattn.integrations.transformers.checks import model_dtype
from vattn.integrations.transformers.decoder_layers import encoder_outputs, states_width
from vattn.metadata import forward_context as context
from vattn.metadata.builder import AttentionMetadataBuilder

PROOF = 2.0**-7
"""Relative L2 of logits in fp32: products in TF32 round to 2**-11."""

PROOF_16 = 2.0**-2
"""The same in 16 bits, of the median token: every layer rounds."""


class DecoderProof:
    """Two short requests of a model, with its own logits.

    Args:
        model: as transformers runs it.
        vocab_size: of the decoder.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        rng = torch.Generator().manual_seed(0)
        drawn = torch.randperm(vocab_size, generator=rng)[:9].tolist()
        # Some decoders give padding no position.
        ids = [token for token in drawn if token != getattr(model.config, "pad_token_id", None)]
        self._states = [
            torch.randn(count, states_width(model), generator=rng).to(model.device, model_dtype(model))
            for count in (19, 5)
        ]
        self._ids = [ids[:6], ids[2:6]]
        self._expected = [_own_logits(model, *each) for each in zip(self._states, self._ids, strict=True)]

    @torch.no_grad()
    def check(self, packed: Any) -> None:
        """Run the first request in a step but for two tokens, one beside the other's prompt, and one beside its last.

        Raises:
            UnsupportedRequestError: other logits.
        """
        cache, packed.kv_cache = packed.allocate(num_blocks=16), None
        for each in cache.kv_caches:
            each.view(torch.uint8).fill_(67)
        builder = AttentionMetadataBuilder(2, 16, 16, layers=packed, max_encoder_len=32)
        lengths, start, tables = [len(states) for states in self._states], 3, []
        for length in lengths:
            end = start + -(-length // cache.block_size)
            tables.append(list(range(start, end)))
            start = end
        found: list[list[Tensor]] = [[], []]
        done = [0, 0]
        for counts in ((4, 0), (1, 3), (1, 1)):
            rows = [row for row, count in enumerate(counts) if count]
            new = [not done[row] for row in rows]
            ids = [token for row in rows for token in self._ids[row][done[row] : done[row] + counts[row]]]
            for row in rows:
                done[row] += counts[row]
            step = builder.build(
                [counts[row] for row in rows], [done[row] for row in rows], [[1 + row] for row in rows],
                encoder_lens=[lengths[row] for row in rows], new_encoder=new,
                cross_block_tables=[tables[row] for row in rows],
            )  # fmt: skip
            written = [self._states[row] for row, is_new in zip(rows, new, strict=True) if is_new]
            with context.forward_context(step):
                assert step.positions is not None
                logits = packed(
                    torch.tensor(ids, device=cache.device),
                    step.positions[: len(ids)],
                    None,
                    torch.cat(written) if written else None,
                )
            for row, part in zip(rows, logits.split([counts[row] for row in rows]), strict=True):
                found[row].append(part)
        for parts, wanted in zip(found, self._expected, strict=True):
            errors = (torch.cat(parts) - wanted).float().norm(dim=1) / wanted.float().norm(dim=1).clamp(min=1e-30)
            exact = model_dtype(packed.model) == torch.float32
            error, bound = (float(errors.max()), PROOF) if exact else (float(errors.median()), PROOF_16)
            if not error <= bound:
                raise UnsupportedRequestError(
                    f"{type(packed.model).__name__}, which computes other logits on vattn than by itself ({error:.1e})",
                    f"differences up to {bound:.1e}, relative",
                    "keep this model on transformers' own attention",
                )


def _own_logits(model: Any, states: Tensor, ids: list[int]) -> Tensor:
    with torch.no_grad():
        tokens = torch.tensor([ids], device=model.device)
        return model(encoder_outputs=encoder_outputs(states), decoder_input_ids=tokens, use_cache=False).logits[0]  # type: ignore[no-any-return]
