"""The two legs of a request whose prefill and decode run on different workers."""
