"""Make a run deterministic: settings, variables, seeding, algorithms, loaders, session."""
