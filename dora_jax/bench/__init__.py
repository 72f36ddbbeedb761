"""Benchmarks: a page each, fixed seed, one table out, a switch that runs the rival."""
