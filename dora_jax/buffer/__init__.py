"""Stage 4, buffer: scored groups wait here, and are packed for the trainer."""
