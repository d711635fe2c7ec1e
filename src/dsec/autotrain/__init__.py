"""The double loop: an agent writes training jobs, the platform checks and runs them, and what they did for a model is its reward."""
