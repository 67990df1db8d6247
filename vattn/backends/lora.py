"""`vattn::add_lora`: add the products of adapters to the output of linear layers, each row by its own adapter.

torch's grouped products take sorted rows, which they neither gather nor scatter, and write a whole output of their own:
four launches and two copies where two launches do.
"""

from __future__ import annotations

from vattn.config.device import has_triton
from vattn.ops.lora_arguments import LoRAArgs
from vattn.ops.reference import lora as reference


def add_lora(args: LoRAArgs) -> None:
    """Add by the Triton kernels on a GPU, and in plain torch elsewhere."""
    if args.input.is_cuda and has_triton():
        from vattn.kernels.triton.lora import launch_lora

        launch_lora(args)
    else:
        reference.add_lora(args)
