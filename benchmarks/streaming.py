"""The ceiling of a decode kernel; it lives in `vattn.cli.bench.stream`."""

from vattn.cli.bench.stream import stream_decode

__all__ = ["stream_decode"]
