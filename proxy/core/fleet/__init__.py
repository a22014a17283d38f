"""The workers, their charges, breakers and pools."""
