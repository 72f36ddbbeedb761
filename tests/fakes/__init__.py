"""What stands in for engines, processes, hosts and networks in more than one test file; README.md says what for
what."""
