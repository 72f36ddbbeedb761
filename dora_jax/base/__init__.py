"""What knows no room: errors and exits, the console, files that prove themselves, digests, metrics and their
formats."""
