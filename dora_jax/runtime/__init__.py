"""The body: carries events and commands between the stages and the orchestrator, decides nothing."""
