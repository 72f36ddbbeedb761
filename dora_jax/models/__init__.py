"""The model: one dense decoder (decoder.py), the sharding table (sharding.py), Hugging Face folders (hf.py)."""
