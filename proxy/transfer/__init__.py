"""What vLLM's KV connectors want said in the two legs of a hand-over, one file each."""
