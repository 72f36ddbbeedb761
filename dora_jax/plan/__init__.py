"""What a machine chooses for a run and what its devices then hold: rules between fields, presets, memory, budget. No
JAX."""
