"""What a run writes for whoever watches it: metrics, timeline and trace, samples, monitoring."""
