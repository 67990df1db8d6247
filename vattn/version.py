"""The version of vattn."""

__version__ = "0.1.0"
