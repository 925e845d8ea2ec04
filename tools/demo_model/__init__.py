"""The parts of the demo checkpoint: random weights in the official file formats, one file per part."""
