"""Upstream's own way through the flows and HiFT, over the same weights: the reference that serving is compared with.

Serving computes the encoder's window again for every chunk, keeps the DiT's keys in rings, continues HiFT's source from
chunk to chunk and renders many streams at once. Upstream's loops, which the golden fixtures record, pass caches from
chunk to chunk (`dit_flow`, `encoder`), render a stream from its start for every chunk (`window_flow`) or begin the
source anew (`vocoder`). Nothing here is served.
"""
