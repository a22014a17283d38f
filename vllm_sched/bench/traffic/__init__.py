"""Who arrives when, with how much to read and to write: data, for a client and a simulator."""
