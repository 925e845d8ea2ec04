"""Flows whose streams keep keys and values: Step-Audio2's DiT and CosyVoice3's rotary DiT."""
