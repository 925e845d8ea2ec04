"""HiFT over streams: overlaps, cross-fades, CUDA graphs."""
