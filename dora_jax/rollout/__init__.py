"""Stage 2: one engine instance. Consumes prompts and versions of weights, produces samples with log-probs."""
