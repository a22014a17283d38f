"""HTTP without connections: heads, bodies, server-sent events and error formats."""
