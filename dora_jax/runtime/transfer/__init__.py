"""Stage 6 beyond one process: weights of a version, and KV pages of running samples, from one process to another."""
