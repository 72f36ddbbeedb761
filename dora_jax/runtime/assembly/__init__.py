"""The assembly: a config becomes engines and a trainer, from initial weights or a checkpoint."""
