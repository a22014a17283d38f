"""Router replicas on other hosts: their sheets are copied into this host's shared memory."""
