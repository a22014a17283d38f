"""Effect of hand-overs on running responses, and a check that they change no token."""
