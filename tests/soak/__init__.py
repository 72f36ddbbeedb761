"""Soak tests: whole runs that are killed, damaged and sent garbage for minutes, a program each, run from the
checkout."""
