"""The tiny model and everything that runs where it is trained: in sandboxes that have torch."""
from pathlib import Path

SHIPPED = Path(__file__).with_name("base.safetensors")
