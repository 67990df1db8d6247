"""The ceiling of a decode kernel; it lives in `vattn.bench.stream`."""

from vattn.bench.stream import stream_decode

__all__ = ["stream_decode"]
