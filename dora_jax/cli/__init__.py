"""The command line of every program: absl flags over the fields of `dora_jax.config`."""
