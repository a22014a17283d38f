"""What watches and steers: probes, metrics, the admin API."""
