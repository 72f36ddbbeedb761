"""The model: one decoder (decoder.py) over parts (attention.py, moe.py) that families/ choose, the sharding table
(sharding.py), Hugging Face folders (hf.py)."""
