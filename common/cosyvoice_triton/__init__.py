"""CosyVoice text-to-speech on NVIDIA Triton Inference Server."""
