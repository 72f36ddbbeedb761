"""The trainer as the runtime sees it: its worker, agreement among processes, warm start, exports."""
