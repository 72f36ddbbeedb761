"""The version of this package, which workdirs and manifests carry."""

__version__ = "0.2.0"
