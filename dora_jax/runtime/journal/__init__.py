"""What makes a run exact after a crash: the event log, the payload that follows from it, recovery, object storage."""
