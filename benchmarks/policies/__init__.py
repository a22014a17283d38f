"""What each policy was promised to do, and what it does on real workers here."""
