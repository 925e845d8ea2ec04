"""Flow networks over streams: each network with its plain and fused solver, and what its streams keep."""
