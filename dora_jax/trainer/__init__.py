"""Stage 5, train: a packed batch in, new weights out."""
