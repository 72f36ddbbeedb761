"""What the packages of the runtime share: the Protocols between its parts, worker threads, the codec, listeners,
shutdown."""
