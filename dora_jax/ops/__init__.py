"""Kernels, each behind one function chosen by configuration."""
