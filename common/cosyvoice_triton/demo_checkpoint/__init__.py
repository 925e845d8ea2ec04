"""The demo checkpoint: the trained one (`checkpoint`), and random weights in the official formats (other modules)."""
