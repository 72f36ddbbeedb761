"""Benchmarks: a page each, fixed seed, one table out, a switch that runs the rival.

They run from a checkout (`python -m dora_jax.bench.MODULE`, and the bench's name where the module has several); the
wheel is without them. What kills, damages and sends garbage is in tests/soak: `python -m tests.soak.chaos`, .exact,
.damage, .gang_kills, .kill_rate and .fuzz_ports.
"""
