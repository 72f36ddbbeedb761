"""What makes a run exact after a crash: the event log, the payload that follows from it, checkpoints, storage of workdirs."""
