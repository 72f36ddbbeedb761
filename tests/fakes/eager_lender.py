"""A run whose trainer lends its devices whenever it waits, whatever that is worth: python -m tests.fakes.eager_lender
FLAGS."""

from dora_jax import train
from dora_jax.cli import flags
from dora_jax.orchestrate import lending

if __name__ == "__main__":
    lending.worth_lending = lambda *expected: True
    flags.run(train.main)
