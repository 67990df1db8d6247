"""KV transfer: save blocks of a cache elsewhere and load them again, layer by layer, while the model computes."""

from vattn.kv_transfer.connector import KVConnector, TransferRequest, block_keys
from vattn.kv_transfer.files import FileConnector
from vattn.kv_transfer.host_memory import HostMemoryConnector
from vattn.kv_transfer.transfer import KVTransfer, TransferStep

__all__ = [
    "FileConnector",
    "HostMemoryConnector",
    "KVConnector",
    "KVTransfer",
    "TransferRequest",
    "TransferStep",
    "block_keys",
]
