"""Rollout instances as the runtime sees them: worker, proxy, supervision, lent devices."""
