"""A fleet in virtual time: the real policies and the real router core, without a model."""
