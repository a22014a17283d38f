"""What a hand-over spares those that are being answered, and that it changes no token."""
