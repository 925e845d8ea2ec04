"""Upstream's own way through the flows over the same weights: the reference that serving is compared with.

Serving computes the encoder's window again for every chunk, keeps the DiT's keys in rings and renders many streams at
once. Upstream's loops, which the golden fixtures record, pass caches from chunk to chunk (`dit_flow`, `encoder`) or
render a stream from its start for every chunk (`window_flow`). Nothing here is served.
"""
