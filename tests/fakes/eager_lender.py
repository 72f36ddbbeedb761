"""A run whose trainer lends its devices whenever it waits, whatever that is worth: python -m tests.fakes.eager_lender
FLAGS."""

import os

from dora_jax import train
from dora_jax.cli import flags
from dora_jax.orchestrate import lending
from tests.fakes import faults

if __name__ == "__main__":
    faults.arm(os.environ.get("DORA_FAULT", ""))
    lending.worth_lending = lambda *expected: True
    flags.run(train.main)
