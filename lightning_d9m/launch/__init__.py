"""Run the user's command in subprocesses."""
