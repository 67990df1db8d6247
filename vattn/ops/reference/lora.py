"""`vattn::add_lora` in plain torch, in fp32."""

from __future__ import annotations

from vattn.ops.lora_arguments import TILE_ROWS, LoRAArgs


def add_lora(args: LoRAArgs) -> None:
    """Add the products of adapters to their rows; rows and adapters out of range are skipped."""
    (num_rows, _), ranks = args.input.shape, args.lora_b.shape[2]
    for adapter, first, count in args.tiles.tolist():
        if count <= 0 or first < 0 or not 0 <= adapter < args.lora_a.shape[0]:
            continue
        rows = args.rows[first : first + min(count, TILE_ROWS)].long()
        rows = rows[(rows >= 0) & (rows < num_rows)]
        hidden = args.input[rows].float() @ args.lora_a[adapter].float().t()
        begin = 0
        for part, size in enumerate(args.sizes):
            features = slice(begin, begin + size)
            weight = args.lora_b[adapter, features].float()
            change = hidden[:, part * ranks : (part + 1) * ranks] @ weight.t() * args.scales[adapter, part]
            args.output[rows, features] = (args.output[rows, features].float() + change).to(args.output.dtype)
            begin += size
