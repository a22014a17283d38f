"""With which status a command ends that did not do what it was asked for."""

BAD_USAGE = 2
INTERRUPTED = 130  # as a shell reports of what Ctrl-C ended
