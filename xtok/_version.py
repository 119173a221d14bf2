"""The version, readable without importing the package's contents."""

__version__ = "0.1.0"
